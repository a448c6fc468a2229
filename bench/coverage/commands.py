"""The verb `ngu coverage`. What computes is imported when it runs, so that its help costs nothing."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

from learner.evaluate import Json, K, NumRollouts, Seed, Settings, Strategy, Task, enough_rollouts, roll_out
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from learner.evaluation.outcomes import RolloutOutcome

OUTCOMES = ".jsonl"

Side = Annotated[
    str,
    Parameter(help="A run, a checkpoint, a model directory, builtin, or a .jsonl file that `ngu eval --out` wrote."),
]


def coverage(
    base: Side,
    tuned: Side,
    /,
    *settings: Settings,
    k: K = "1..256",
    rollouts: NumRollouts = None,
    task: Task = None,
    strategy: Strategy = None,
    seed: Seed = 0,
    out: Path = Path("coverage"),
    as_json: Json = False,
) -> int:
    """Compare two models' pass@k: where the curves cross, problems gained and lost, strategies before and after.

    Both are evaluated under the settings of TUNED's run, or of BASE's if only that is one.

    Parameters
    ----------
    out:
        Directory for the figure (PNG, SVG), its data (CSV), the numbers (JSON) and the outcomes of every rollout.
    """
    from bench.files import make_directory
    from pipeline.estimates import parse_ks

    ks = parse_ks(k)
    if ks[-1] < 2:
        raise ConfigError(f"--k {k}: a comparison of coverage needs k of 2 or more")
    num_rollouts = enough_rollouts(rollouts, ks)
    make_directory(out)
    before, after = _both(base, tuned, settings, task, strategy, num_rollouts, seed, out)

    from bench.coverage.compare import compare, pair_up
    from bench.coverage.figure import HEADER, draw
    from bench.coverage.words import CoverageReport, sentences, table
    from bench.scaling.figures import save

    pair = pair_up(before, after, ks[-1])
    found = compare(pair, ks, seed)
    report = CoverageReport(base, tuned, seed, found, sentences(found))
    figure, rows = draw(found, pair)
    paths = save(out, "coverage", figure, HEADER, rows, report)
    if as_json:
        print(msgspec.json.encode(report).decode())
        return 0
    print(table(found))
    print()
    for line in report.says:
        print(f"- {line}")
    print(f"\nwrote {', '.join(str(path) for path in paths)}")
    return 0


def _both(
    base: str,
    tuned: str,
    settings: tuple[str, ...],
    task: str | None,
    strategy: str | None,
    num_rollouts: int,
    seed: int,
    out: Path,
) -> "tuple[list[RolloutOutcome], list[RolloutOutcome]]":
    """The outcomes of both sides; what is generated here is also written to `out`, so that it need not be again."""
    from learner.evaluation.outcomes import read_outcomes, write_outcomes
    from learner.evaluation.source import eval_config, find_model
    from pipeline.tasks.registry import make_task

    sides = {"tuned": tuned, "base": base}
    found = {side: read_outcomes(Path(name)) for side, name in sides.items() if name.endswith(OUTCOMES)}
    models = {side: find_model(name) for side, name in sides.items() if side not in found}
    if models:
        config = eval_config(list(models.values()), settings, task)
        problems = make_task(config.task, config.seed).eval_problems()
        for side in sorted(models):  # each with random numbers of its own: equal models differ by chance alone
            found[side] = roll_out(models[side], config, problems, num_rollouts, f"{side}/{seed}", strategy)
            write_outcomes(out / f"{side}{OUTCOMES}", found[side])
    return found["base"], found["tuned"]

"""The verb `ngu methods`. What computes is imported when it runs, so that its help costs nothing."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from cyclopts import Parameter

from bench.coverage.commands import OUTCOMES, Side
from learner.evaluate import Json, K, NumRollouts, Seed, Strategy, Task, enough_rollouts, roll_out
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from bench.coverage.methods import Trained
    from bench.coverage.training import Course
    from learner.evaluation.outcomes import RolloutOutcome

SEED = ".seed_"

Runs = Annotated[
    str,
    Parameter(
        show_default=False,
        help="Runs, METHOD.seed_N.jsonl files that this command wrote, a TOML file and settings key=value.",
    ),
]


class _Model(NamedTuple):
    """One run, or the outcomes of one; `path` is where they are."""

    method: str
    seed: int
    path: Path


def methods(
    base: Side,
    /,
    *runs: Runs,
    k: K = "1..256",
    rollouts: NumRollouts = None,
    task: Task = None,
    strategy: Strategy = None,
    seed: Seed = 0,
    out: Path = Path("methods"),
    as_json: Json = False,
) -> int:
    """Compare training methods by what they did to one base model, over seeds: coverage, strategies, interference.

    Runs whose configs differ only in the seed are one method, named after its directory. All models are evaluated under
    the settings of the first run.

    Parameters
    ----------
    out:
        Directory for the figure (PNG, SVG), its data (CSV), the numbers (JSON) and the outcomes of every rollout.
    """
    from bench.files import make_directory
    from pipeline.estimates import parse_ks

    ks = parse_ks(k)
    num_rollouts = enough_rollouts(rollouts, ks)
    given = [word for word in runs if Path(word).is_dir() or word.endswith(OUTCOMES)]
    models = _models(given)
    make_directory(out)
    settings = [word for word in runs if word not in given]
    before, trained = _outcomes(base, models, settings, task, strategy, num_rollouts, seed, out)

    from bench.coverage.figure import HEADER
    from bench.coverage.methods import compare_methods
    from bench.coverage.methods_figure import draw
    from bench.coverage.methods_words import MethodsReport, sentences, table
    from bench.scaling.figures import save

    found, courses = compare_methods(before, trained, ks), _courses(models)
    report = MethodsReport(base, found, courses, sentences(found))
    figure, rows = draw(found, courses)
    paths = save(out, "methods", figure, HEADER, rows, report)
    if as_json:
        print(msgspec.json.encode(report).decode())
        return 0
    print(table(found))
    print()
    for line in report.says:
        print(f"- {line}")
    print(f"\nwrote {', '.join(str(path) for path in paths)}")
    return 0


def _models(given: list[str]) -> list[_Model]:
    """Method and seed of each; raises ConfigError."""
    models, names = [], {}
    for word in given:
        path = Path(word)
        if word.endswith(OUTCOMES):
            method, dot, seed = path.name.removesuffix(OUTCOMES).rpartition(SEED)
            if not dot or not seed.lstrip("-").isdecimal():
                raise ConfigError(f"{word}: name it METHOD{SEED}N{OUTCOMES}, so that it is known what it is of")
            models.append(_Model(method, int(seed), path))
            continue
        try:
            config = msgspec.json.decode((path / "config.json").read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.DecodeError) as e:
            raise ConfigError(f"{word}: not a run with a config.json: {e}") from None
        seed = int(config.pop("seed", 0))
        key = msgspec.json.encode(config, order="deterministic")
        models.append(_Model(names.setdefault(key, _name(path, seed, set(names.values()))), seed, path))
    if not models:
        raise ConfigError("no runs to compare; give their directories after the base model")
    return models


def _name(run: Path, seed: int, taken: set[str]) -> str:
    """The directory's without its seed, or that above it where a study called it seed_N."""
    path = run.absolute()
    name = path.name.removesuffix(f"_{seed}")
    name = path.parent.name if name == "seed" else name
    return name if name not in taken else f"{name} ({path.name})"


def _outcomes(
    base: str,
    models: list[_Model],
    settings: list[str],
    task: str | None,
    strategy: str | None,
    num_rollouts: int,
    seed: int,
    out: Path,
) -> "tuple[list[RolloutOutcome], list[Trained]]":
    """What is generated here is also written to `out`, so that it need not be again."""
    from bench.coverage.methods import Trained
    from learner.evaluation.outcomes import read_outcomes, write_outcomes
    from learner.evaluation.source import eval_config, find_model
    from pipeline.tasks.registry import make_task

    sources = {model: find_model(str(model.path)) for model in models if model.path.is_dir()}
    base_source = None if base.endswith(OUTCOMES) else find_model(base)
    needed = [*sources.values(), *([base_source] if base_source else [])]
    config = eval_config(needed, settings, task) if needed else None

    def evaluated(source: Any, name: str) -> "list[RolloutOutcome]":
        assert config is not None
        problems = make_task(config.task, config.seed).eval_problems()
        found = roll_out(source, config, problems, num_rollouts, f"{name}/{seed}", strategy)
        write_outcomes(out / f"{name}{OUTCOMES}", found)
        return found

    before = evaluated(base_source, "base") if base_source else read_outcomes(Path(base))
    trained = []
    for model in models:
        name = f"{model.method}{SEED}{model.seed}"
        found = evaluated(sources[model], name) if model in sources else read_outcomes(model.path)
        trained.append(Trained(model.method, model.seed, found))
    return before, trained


def _courses(models: list[_Model]) -> "list[Course]":
    from bench.coverage.training import Course, snapshots

    courses = [Course(m.method, m.seed, snapshots(m.path)) for m in models if m.path.is_dir()]
    return [course for course in courses if course.snapshots]

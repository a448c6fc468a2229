"""The verb `ngu eval`. What computes is imported when it runs, so that its help costs nothing."""

import os
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter
from cyclopts.types import PositiveInt

from pipeline.errors import ConfigError, VerifierError

if TYPE_CHECKING:
    from learner.evaluation.outcomes import RolloutOutcome
    from learner.evaluation.source import ModelSource
    from pipeline.config import Config
    from pipeline.messages import Problem

Model = Annotated[
    str, Parameter(help="A run (its newest checkpoint), a checkpoint, a model directory, a .gguf file, or builtin.")
]
Settings = Annotated[
    str,
    Parameter(
        show_default=False,
        help="A TOML file, and settings such as sampling.temperature=0.7. Default: those of the run, if it is one.",
    ),
]
K = Annotated[str, Parameter(name="--k", help="The largest k, or a range such as 1..256; powers of two lie between.")]
NumRollouts = Annotated[
    PositiveInt | None, Parameter(name="--rollouts", help="Rollouts of each problem. Default: the largest k.")
]
Task = Annotated[str | None, Parameter(help="Short for task.kind=NAME.")]
Seed = Annotated[int, Parameter(help="Of the engine's random numbers and the bootstrap.")]
Strategy = Annotated[
    str | None,
    Parameter(
        name="--strategy",
        help="file.py:function of (problem, text) that names the strategy of a rollout. Default: the task's own rule.",
    ),
]
Json = Annotated[
    bool, Parameter(name="--json", negative="", show_default=False, help="Print the report as one JSON object.")
]


def evaluate(
    model: Model,
    /,
    *settings: Settings,
    k: K = "64",
    rollouts: NumRollouts = None,
    task: Task = None,
    strategy: Strategy = None,
    seed: Seed = 0,
    out: Path | None = None,
    as_json: Json = False,
) -> int:
    """Measure a model on a task's held-out problems: pass@k, best@k and worst@k with intervals.

    Parameters
    ----------
    out:
        Also write the outcome of every rollout to this file, a JSON object a line.
    """
    from learner.evaluation.source import eval_config, find_model
    from pipeline.estimates import parse_ks
    from pipeline.tasks.registry import make_task

    ks = parse_ks(k)
    num_rollouts = enough_rollouts(rollouts, ks)
    if out is not None and (out.is_dir() or not os.access(out.parent, os.W_OK)):
        raise ConfigError(f"{out}: a file cannot be written there; choose another --out")
    source = find_model(model)
    config = eval_config([source], settings, task)
    problems_of = make_task(config.task, config.seed)
    outcomes = roll_out(source, config, problems_of.eval_problems(), num_rollouts, f"eval/{seed}", strategy)

    from learner.evaluation.outcomes import write_outcomes
    from learner.evaluation.report import evaluate_outcomes, text

    if out is not None:
        write_outcomes(out, outcomes)
    kind = str(config.task.__struct_config__.tag)
    weights, hard = problems_of.level_weights(), problems_of.hard_levels
    report = evaluate_outcomes(outcomes, ks, weights, hard, seed, model, kind)
    print(msgspec.json.encode(report).decode() if as_json else text(report))
    return 0


def enough_rollouts(rollouts: int | None, ks: Sequence[int]) -> int:
    """`rollouts`, by default the largest k; raises ConfigError when they are fewer than that."""
    if rollouts is not None and rollouts < ks[-1]:
        raise ConfigError(f"--rollouts {rollouts}: pass@{ks[-1]} needs at least {ks[-1]} of each problem")
    return rollouts or ks[-1]


def roll_out(
    source: "ModelSource",
    config: "Config",
    problems: "Sequence[Problem]",
    num_rollouts: int,
    name: str,
    strategy: str | None = None,
) -> "list[RolloutOutcome]":
    """Judged rollouts of every problem under a progress bar; raises ConfigError when there are no problems, and
    VerifierError when nothing could be judged.

    `name` sets the engine's random numbers, together with the seed of `config`; `strategy` names the user's function
    that labels rollouts (`find_label`).
    """
    if not problems:
        raise ConfigError("the task holds out no problems; raise task.eval_size or task.eval_per_level")
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from learner.evaluation.generate import Collector, ready_engine
    from learner.evaluation.strategies import find_label
    from pipeline.verifiers.pool import VerifierPool

    label = find_label(strategy)
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    total = len(problems) * num_rollouts
    with (
        closing(ready_engine(config, source.model_path, name)) as engine,
        VerifierPool.of_run(config) as pool,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        if not console.is_terminal:
            print(f"{source.name}: {total} rollouts", file=sys.stderr, flush=True)
        progress = bar.add_task(source.name, total=total)
        collector = Collector(engine, pool, problems, num_rollouts, config.sampling, label)
        outcomes = collector.run(lambda number: bar.advance(progress, number))
    if not outcomes:
        raise VerifierError(f"none of the {total} rollouts could be judged; the last: {collector.last_failure}")
    return outcomes

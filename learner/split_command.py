"""The verb `ngu split`. What computes is imported when it runs, so that its help costs nothing."""

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter

from learner.evaluate import Json, Model, Settings, Task
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from learner.evaluation.source import ModelSource
    from learner.evaluation.split import Measurement
    from pipeline.config import Config
    from pipeline.messages import Problem
    from pipeline.tasks.base import TaskSource


def split(
    model: Model,
    /,
    *settings: Settings,
    task: Task = None,
    out: Path = Path("split"),
    held_out: Annotated[bool, Parameter(negative="")] = False,
    buckets: Annotated[bool, Parameter(negative="")] = False,
    as_json: Json = False,
) -> int:
    """Sort a task's problems by how hard a model finds them: Easy, Hard and Extremely Hard sets, difficulty buckets.

    Easy: avg@16 from .3 to .6. Hard: avg@16 of at most 1/16. Extremely Hard: pass@128 = 0, measured where avg@16 is 0.
    The same command goes on with a measurement that was cut off.

    Parameters
    ----------
    out:
        Directory of the sets (JSON lines that task.path takes), of the measurement and its summary.
    held_out:
        Measure the held-out problems instead of those to train on.
    buckets:
        Give every problem 128 rollouts, so that all have a difficulty bucket (the field `level` of buckets.jsonl).
    """
    from learner.evaluation.source import eval_config, find_model
    from learner.evaluation.split import Measurement, write_sets
    from pipeline.config import dump_config
    from pipeline.model_path import resolve_model_path
    from pipeline.tasks.registry import make_task

    source = find_model(model)
    config = eval_config([source], settings, task)
    problems = _problems(make_task(config.task, config.seed), held_out)
    _fields(problems[0])
    settled = dump_config(config)
    identity = {name: settled[name] for name in ("task", "sampling", "verifier")}
    identity |= {"model": str(resolve_model_path(source.model_path).absolute()), "held_out": held_out}
    measurement = Measurement(out, identity)
    _measure(source, config, problems, measurement, buckets)
    summary = write_sets(out, [measurement.difficulty(p) for p in problems], _fields)
    print(msgspec.json.encode(summary).decode() if as_json else _text(summary, out))
    return 0


def _problems(source: "TaskSource", held_out: bool) -> "list[Problem]":
    if held_out:
        problems = source.eval_problems()
    elif source.num_problems is None:
        raise ConfigError("the task makes new problems for ever; only one with a fixed number can be split")
    else:
        problems = [source.next_problem() for _ in range(source.num_problems)]
    if not problems:
        raise ConfigError("the task holds out no problems; raise task.eval_size or task.eval_per_level")
    return sorted(problems, key=lambda p: p.problem_id)


def _fields(problem: "Problem") -> dict[str, Any]:
    """The problem as a row of the task that can serve it again; its prompt is complete, so its template is bare."""
    from pipeline.verifiers.registry import scorer_of

    match scorer_of(problem):
        case "math":
            return {"question": problem.prompt, "answer": problem.answer}
        case "code":
            return {"question": problem.prompt, "tests": msgspec.json.decode(problem.answer)}
        case scorer:
            raise ConfigError(f"problems of {scorer} cannot be written to a file that a task reads; split another task")


def _measure(
    source: "ModelSource", config: "Config", problems: "list[Problem]", measurement: "Measurement", buckets: bool
) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from learner.evaluation.generate import Collector, ready_engine
    from learner.evaluation.split import NUM_ALL, NUM_FIRST
    from pipeline.verifiers.pool import VerifierPool

    if not measurement.missing(problems, NUM_FIRST):
        unfinished = _to_finish(problems, measurement, buckets)
        if not measurement.missing(unfinished, NUM_ALL - NUM_FIRST):
            return
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    # Not the random numbers of what is measured already: 16 and 112 rollouts must be 128 different ones.
    name = f"split/{len(measurement.done)}"
    with (
        closing(ready_engine(config, source.model_path, name)) as engine,
        VerifierPool.of_run(config) as pool,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):

        def stage(of: "list[Problem]", num: int) -> None:
            left = len(measurement.missing(of, num))
            if not console.is_terminal:
                print(f"{left} of {len(of)} problems still need {num} rollouts", file=sys.stderr, flush=True)
            progress = bar.add_task(f"{num} rollouts of each", total=left * num)
            measurement.measure(
                of,
                num,
                lambda chunk, n, advance: Collector(engine, pool, chunk, n, config.sampling).run(advance),
                lambda number: bar.advance(progress, number),
            )

        stage(problems, NUM_FIRST)
        stage(_to_finish(problems, measurement, buckets), NUM_ALL - NUM_FIRST)


def _to_finish(problems: "list[Problem]", measurement: "Measurement", buckets: bool) -> "list[Problem]":
    """Which problems get all 128 rollouts, once their first are judged."""
    from learner.evaluation.split import NUM_FIRST

    return [p for p in problems if buckets or not any(measurement.done[p.problem_id, NUM_FIRST].correct)]


def _text(summary: dict[str, Any], out: Path) -> str:
    sets, rows = summary["sets"], summary["buckets"]
    lines = [
        f"{summary['problems']} problems: " + ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in sets.items())
    ]
    lines.append(
        f"with 128 rollouts, {sum(rows.values())}: " + ", ".join(f"{n} {name[2:]}" for name, n in rows.items())
    )
    # 95%: a problem that is solved more often than this would have been solved once (Clopper and Pearson, one-sided).
    lines.append(f"never solved in 128 means a pass rate under {1 - 0.05 ** (1 / 128):.3f} (95%)")
    if summary["unjudged"]:
        lines.append(f"{len(summary['unjudged'])} could not be judged at all; split.json lists them")
    lines.append(
        f"wrote {out}/*.jsonl; train on one with model.path=… task.kind=jsonl task.path=… "
        "'task.prompt_template={question}'"
    )
    return "\n".join(lines)

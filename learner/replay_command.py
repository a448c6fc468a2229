"""The verb `ngu replay`. What computes is imported when it runs, so that its help costs nothing."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

from pipeline import rundir
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from learner.replay import ReplayedStep

Run = Annotated[Path, Parameter(help="The directory of a run, running or not.")]
Settings = Annotated[
    str,
    Parameter(
        show_default=False,
        help="Settings of [learner], such as learner.loss.kind=grpo, under which each step is taken as well.",
    ),
]
Steps = Annotated[str, Parameter(help="Which optimizer steps: a..b, or one. Step k made policy version k.")]
Json = Annotated[
    bool, Parameter(name="--json", negative="", show_default=False, help="Print one JSON object instead of a table.")
]


def replay(run: Run, /, *settings: Settings, steps: Steps, as_json: Json = False) -> int:
    """Take recorded optimizer steps of a run again, bit for bit, also under another loss or advantage.

    Begins at the newest checkpoint before the first step, or at the model that the run began with, and compares the
    weights after every step with those that the run published. Exits 1 if they differ (as they may on a GPU).
    """
    first, last = _parse_steps(steps)
    path = rundir.find(run)
    config = rundir.read_config(path)
    from learner.replay import overridden, plan, replay

    overridden(config, config.learner, settings)  # a wrong one is refused before anything is computed
    start = plan(path, first, last)
    replayed = list(replay(path, config, start, first, last, settings))
    is_identical = all(step.is_identical for step in replayed)
    if as_json:
        report = {"run": str(run), "from_step": start.base, "settings": settings, "is_identical": is_identical}
        print(msgspec.json.encode(report | {"steps": replayed}).decode())
    else:
        print(f"from {start.checkpoint or 'the model that the run began with'}, policy version {start.base}")
        print(_table(replayed))
    return 0 if is_identical else 1


def _parse_steps(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise ConfigError(f"--steps {text}: write a..b with 1 <= a <= b, or one step")
    return first, last


def _table(replayed: "list[ReplayedStep]") -> str:
    from learner.replay import COMPARED

    has_variant = any(step.variant is not None for step in replayed)
    columns = ["step", "weights", *COMPARED] + ["gradient cos", "update cos"] * has_variant
    lines = ["".join(f"{name:>14}" for name in columns)]
    for step in replayed:
        cells = [f"{step.step}", "identical" if step.is_identical else "DIFFERENT", *_figures(step.metrics)]
        lines.append("".join(f"{cell:>14}" for cell in cells))
        if step.variant is not None:
            cosines = [_number(step.variant.gradient_cosine), _number(step.variant.update_cosine)]
            cells = ["", "as set", *_figures(step.variant.metrics), *cosines]
            lines.append("".join(f"{cell:>14}" for cell in cells))
        warnings = {step.warning, step.variant.warning if step.variant is not None else ""} - {""}
        lines += [f"    {warning}" for warning in sorted(warnings)]
    return "\n".join(lines)


def _figures(metrics: dict[str, float]) -> list[str]:
    from learner.replay import COMPARED

    return [_number(metrics[name]) for name in COMPARED]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"

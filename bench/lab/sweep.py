"""Many settings at once: a grid over cores, whose results outlive an interruption.

A sweep file names what varies; the grid is the product of the lists, each cell under every seed:

    base = "run.toml"        # optional: a run's config, by default the built-in job's
    seeds = 3
    [vary]
    "sampler.round_size" = [2, 4, 8]
    "sampler.max_attempts" = [32, 64, 128]
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from bench.files import config_key, read_plan, read_results
from bench.lab.config import LabConfig, load_lab_config
from bench.lab.runner import simulate_all, with_seeds
from bench.lab.tally import Report
from pipeline.errors import ConfigError

Value = str | int | float | bool


class SweepConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`base` is relative to the sweep file."""

    vary: dict[str, Annotated[list[Value], msgspec.Meta(min_length=1)]]
    base: str = ""
    seeds: Annotated[int, msgspec.Meta(ge=1)] = 1


class Cell(msgspec.Struct, frozen=True):
    """One simulation. `key` identifies its resolved config, so that a changed sweep file reuses what it can."""

    key: str
    settings: dict[str, Value]
    config: LabConfig


class Result(msgspec.Struct, frozen=True):
    """A line of the result file."""

    key: str
    settings: dict[str, Value]
    report: Report


def load_sweep(path: Path, overrides: Sequence[str] = ()) -> list[Cell]:
    """Every cell, checked before any is run; `overrides` apply to all. Raises ConfigError."""
    sweep = read_plan(path, SweepConfig, "sweep", "docs/LAB.md")
    base = path.parent / sweep.base if sweep.base else None
    cells = []
    for values in itertools.product(*sweep.vary.values()):
        settings = dict(zip(sweep.vary, values, strict=True))
        varied = [f"{name}={msgspec.json.encode(value).decode()}" for name, value in settings.items()]
        try:
            config = load_lab_config(base, [*overrides, *varied])
        except ConfigError as e:
            raise ConfigError(f"{path}, {', '.join(varied)}: {e.message}") from None
        cells += [Cell(config_key(seeded), settings, seeded) for seeded in with_seeds(config, sweep.seeds)]
    return cells


def run_sweep(cells: Sequence[Cell], out: Path, jobs: int, advance: Callable[[int], Any]) -> list[Result]:
    """Run what `out` does not hold yet and append it line by line; the results of these cells, in their order.

    `advance` is told how many cells are done: first those found, then one after another. Raises ConfigError.
    """
    done = {result.key: result for result in read_results(out, Result)}
    todo = [cell for cell in cells if cell.key not in done]
    advance(len(cells) - len(todo))
    try:
        with out.open("ab") as file:
            for i, report in simulate_all([cell.config for cell in todo], jobs):
                result = done[todo[i].key] = Result(todo[i].key, todo[i].settings, report)
                file.write(msgspec.json.encode(result) + b"\n")
                file.flush()
                advance(1)
    except OSError as e:
        raise ConfigError(f"{out}: cannot be written: {e.strerror}; choose another --out") from None
    return [done[cell.key] for cell in cells]


def by_settings(results: Sequence[Result]) -> list[tuple[dict[str, Value], list[Report]]]:
    """The seeds of each setting together, best first: by hard pass@1 over the run, overall where nothing is hard."""
    found: dict[str, tuple[dict[str, Value], list[Report]]] = {}
    for result in results:
        name = msgspec.json.encode(result.settings).decode()
        found.setdefault(name, (result.settings, []))[1].append(result.report)
    return sorted(found.values(), key=lambda pair: -_merit(pair[1]))


def _merit(reports: Sequence[Report]) -> float:
    areas = [r.pass_rate_area if r.hard_pass_rate_area is None else r.hard_pass_rate_area for r in reports]
    return sum(areas) / len(areas)

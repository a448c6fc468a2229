"""The verb `ngu lab`. Results go to stdout, progress to stderr."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
from cyclopts import App, Parameter
from cyclopts.types import PositiveInt
from rich.console import Console

from bench.lab.config import LabConfig, load_lab_config
from bench.lab.replay import Replay, replay
from bench.lab.runner import default_jobs, progress, simulate, simulate_all, with_seeds
from bench.lab.sweep import by_settings, load_sweep, run_sweep
from bench.lab.tables import Reports, new_table, print_reports
from bench.lab.tally import Report
from pipeline.errors import ConfigError
from samplers.registry import SamplerConfig

app = App(name="lab", help="Try samplers on a population of problems: no model, no GPU, seconds.")

Arguments = Annotated[
    str, Parameter(show_default=False, help="A TOML file, and settings such as sampler.round_size=8 that override it.")
]
Overrides = Annotated[
    str, Parameter(show_default=False, help="Settings such as sampler.round_size=8 that override the file's.")
]
Candidates = Annotated[
    str, Parameter(show_default=False, help="TOML files or kinds of sampler, and settings that apply to all of them.")
]
Json = Annotated[Path | None, Parameter(help="Write everything measured to this file.")]
Plot = Annotated[Path | None, Parameter(help="Draw it to this PNG.")]
Jobs = Annotated[PositiveInt | None, Parameter(help="Processes; default: one a core.")]

KINDS = [option.__struct_config__.tag for option in get_args(SamplerConfig)]
MAX_SWEEP_ROWS = 40
PIPE_WIDTH = 240


@app.command(name="simulate")
def simulate_(*arguments: Arguments, check: bool = False, json: Json = None, plot: Plot = None) -> int:
    """Run one sampler; without a file, that of the built-in job.

    Parameters
    ----------
    check:
        Instead, compare sampler and advantages with closed forms; the exit status is 1 if any is off.
    """
    if check:
        return _check(arguments, json)
    config = _one_config(arguments)
    reports = {_kind(config): [simulate(config)]}
    _show(reports, plot)
    _write(json, reports)
    return 0


@app.command
def compare(
    *candidates: Candidates,
    budget: PositiveInt | None = None,
    seeds: PositiveInt = 1,
    json: Json = None,
    plot: Path = Path("lab-compare.png"),
    jobs: Jobs = None,
) -> int:
    """Run several samplers on the same problems: a table and a plot.

    Parameters
    ----------
    budget:
        Rollouts for each; default: max_rollouts.
    seeds:
        How many seeds each is run under.
    plot:
        Draw it to this PNG.
    """
    names, overrides = _split(candidates)
    if len(set(names)) < 2:
        raise ConfigError("name at least two different TOML files or kinds of sampler to compare")
    if budget is not None:
        overrides.append(f"max_rollouts={budget}")
    configs = {name: _candidate(name, overrides) for name in names}
    first = next(iter(configs.values()))
    for name, config in configs.items():
        if config.lab.population != first.lab.population:
            raise ConfigError(
                f"{name}: its [lab.population] differs from that of {names[0]}; compare on the same problems"
            )
    runs = [(name, seeded) for name, config in configs.items() for seeded in with_seeds(config, seeds)]
    found: dict[int, Report] = {}
    with progress("simulating", len(runs)) as bar:
        for i, report in simulate_all([config for _, config in runs], jobs or default_jobs()):
            found[i] = report
            bar.advance(bar.task_ids[0])
    reports: Reports = {name: [] for name in configs}
    for i, (name, _) in enumerate(runs):
        reports[name].append(found[i])
    _show(reports, plot)
    _write(json, reports)
    return 0


@app.command
def sweep(file: Path, /, *settings: Overrides, out: Path | None = None, json: Json = None, jobs: Jobs = None) -> int:
    """Run a grid of settings over all cores; run it again to go on where it was interrupted.

    Parameters
    ----------
    file:
        A TOML file with `vary` and perhaps `base` and `seeds`.
    out:
        Where results are kept; default: beside the sweep file, ending in .results.jsonl.
    """
    cells = load_sweep(file, settings)
    with progress("sweeping", len(cells)) as bar:
        results = run_sweep(
            cells,
            out or file.with_suffix(".results.jsonl"),
            jobs or default_jobs(),
            lambda done: bar.advance(bar.task_ids[0], done),
        )
    _print_sweep(by_settings(results))
    _write(json, results)
    return 0


@app.command(name="replay")
def replay_(run: Path, /, *settings: Overrides, sampler: str, json: Json = None) -> int:
    """Say what another sampler would have launched on a recorded run.

    Parameters
    ----------
    run:
        The directory of a run.
    sampler:
        A TOML file with a [sampler] table, or a kind of sampler.
    """
    found = replay(run, _candidate(sampler, list(settings)).sampler)
    _print_replay(found, Path(sampler).stem)
    _write(json, found)
    return 0


# --- arguments ---


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Files and kinds, then settings."""
    names = [a for a in arguments if "=" not in a or Path(a).is_file()]
    return names, [a for a in arguments if a not in names]


def _one_config(arguments: Sequence[str]) -> LabConfig:
    names, overrides = _split(arguments)
    if len(names) > 1:
        raise ConfigError(f"one config at most, but {', '.join(names)} were given; `ngu lab compare` takes several")
    return _candidate(names[0], overrides) if names else load_lab_config(None, overrides)


def _candidate(name: str, overrides: list[str]) -> LabConfig:
    """The config in a file, or the defaults with that kind of sampler."""
    if Path(name).is_file():
        return load_lab_config(name, overrides)
    if name in KINDS:
        return load_lab_config(None, [f"sampler.kind={name}", *overrides])
    raise ConfigError(f"{name}: neither a file nor a kind of sampler ({', '.join(map(str, KINDS))})")


def _kind(config: LabConfig) -> str:
    return str(type(config.sampler).__struct_config__.tag)


# --- output ---


def _console() -> Console:
    """A pipe has no width of its own, and rich would cut its tables to 80 columns."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def _show(reports: Reports, plot: Path | None) -> None:
    print_reports(_console(), reports)
    if plot is not None:
        from bench.lab.figures import save_comparison

        save_comparison(plot, reports)
        print(f"\n{plot}")


def _write(path: Path | None, found: Any) -> None:
    if path is None:
        return
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    except OSError as e:
        raise ConfigError(f"{path}: cannot be written: {e.strerror}; choose another --json") from None


def _check(arguments: Sequence[str], json: Path | None) -> int:
    from bench.lab.check import NUM_CHAINS, check

    if arguments:
        raise ConfigError("--check takes no config: it checks fixed cases against closed forms")
    rows = []
    what = ""
    for row in check():
        if row.what != what:
            print(what := row.what)
        mark = "" if row.is_right else "   OFF"
        print(f"  {row.name:34s}{row.measured:10.4f} ± {row.error:.4f}{row.expected:10.4f}{row.off_by:7.2f} s.e.{mark}")
        rows.append(row)
    off = sum(not row.is_right for row in rows)
    print(f"{len(rows)} figures of {NUM_CHAINS} chains each (measured ± standard error, closed form): {off} off")
    _write(json, rows)
    return 1 if off else 0


def _print_sweep(found: list[tuple[dict[str, Any], list[Report]]]) -> None:
    names = list(found[0][0])
    columns = ["seeds", "hard pass@1 over the run", "at the end", "pass@1 over the run", "hard solved"]
    table = new_table(names[0], [*names[1:], *columns])
    for settings, reports in found[:MAX_SWEEP_ROWS]:
        hard = [r.hard_pass_rate_area for r in reports if r.hard_pass_rate_area is not None]
        end = [r.end.hard_pass_rate for r in reports if r.end.hard_pass_rate is not None]
        figures = [
            str(len(reports)),
            f"{sum(hard) / len(hard):.4f}" if hard else "-",
            f"{sum(end) / len(end):.4f}" if end else "-",
            f"{sum(r.pass_rate_area for r in reports) / len(reports):.4f}",
            f"{sum(r.hard_solved for r in reports) / len(reports):.1f}",
        ]
        table.add_row(*(str(settings[name]) for name in names), *figures)
    _console().print(table)
    if len(found) > MAX_SWEEP_ROWS:
        print(f"{len(found) - MAX_SWEEP_ROWS} more are in the result file")


def _print_replay(found: Replay, other: str) -> None:
    """For each level three numbers: as recorded, the lab's replay of the same sampler, the other sampler."""
    columns = [f"{what}\n{who}" for what in ("launched", "trained", "solved") for who in ("run", "lab", other)]
    table = new_table("level", columns)
    for level, recorded in found.recorded.items():
        three = recorded, found.same[level], found.other[level]
        table.add_row(
            level or "all", *(str(getattr(c, what)) for what in ("launched", "trained", "solved") for c in three)
        )
    _console().print(table)
    print(
        f"rollouts: {found.same_report.rollouts} and {found.other_report.rollouts}; tokens: {found.same_report.tokens} "
        f"and {found.other_report.tokens} (the run's own sampler in the lab, and {other})"
    )

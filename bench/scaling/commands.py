"""The verbs `ngu fit` and `ngu plan n`. What computes is imported when a verb runs, so that help costs nothing."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import msgspec
from cyclopts import App, Parameter

from pipeline.errors import ConfigError

MIN_DRAWS = 40  # fewer cannot show a 95% interval

fit = App(name="fit", help="Fit a scaling law to what runs measured, with intervals, a figure and a verdict in words.")

Inputs = Annotated[Path, Parameter(show_default=False)]
Draws = Annotated[int, Parameter(help="Bootstrap draws.")]
Seed = Annotated[int, Parameter(help="Seed of the bootstrap.")]
Out = Annotated[Path, Parameter(help="Directory for the JSON, CSV, PNG and SVG files.")]
Json = Annotated[bool, Parameter(name="--json", negative="", show_default=False, help="Print one JSON object.")]
Check = Annotated[
    bool,
    Parameter(name="--check", negative="", show_default=False, help="Test the fitter on data whose truth is known."),
]


@fit.command
def scalerl(
    *inputs: Inputs,
    unit: Literal["core_hours", "gpu_hours", "rollouts", "tokens", "steps", "compute"] | None = None,
    pass_rate: Literal["mix", "hard"] = "mix",
    method: Literal["refined", "published"] = "refined",
    r0: str = "auto",
    min_compute: float | None = None,
    max_compute: float | None = None,
    draws: Draws = 1000,
    seed: Seed = 0,
    out: Out = Path("fits"),
    as_json: Json = False,
    check: Check = False,
) -> int:
    """Fit held-out reward against compute: R = R0 + (A - R0) / (1 + (C_mid / C)^B).

    Parameters
    ----------
    inputs:
        Run directories, or CSV files with a column of compute (named by its unit), `reward` and, optionally, `recipe`
        and `seed`. Runs that differ only in the seed are one recipe.
    unit:
        What compute is counted in. Default: the table's column; rollouts for runs.
    pass_rate:
        Of a run: over all held-out problems, or over the hard levels.
    method:
        `published` searches ScaleRL's grid of A and C_mid (in GPU-hours); `refined` is the exact least-squares fit.
    r0:
        The reward before training: a number, `fit`, or `auto` (measured at compute 0, else fitted).
    min_compute:
        Leave out evaluations below. Default: none; 1500 with `--method published`.
    max_compute:
        Leave out evaluations above.
    """
    if check:
        from bench.scaling.scalerl_check import check as lines

        return _print_check(lines(seed), as_json)
    from bench.scaling import figures, scalerl_report
    from bench.scaling.scalerl_run import run

    _prepare(inputs, draws, out, "a run directory or a CSV file")
    report, figure, rows = run(inputs, unit, pass_rate, method, r0, (min_compute, max_compute), draws, seed)
    paths = figures.save(out, "scalerl", figure, scalerl_report.HEADER, rows, report)
    _print_report(report, scalerl_report.table(report.fits, report.unit), paths, as_json)
    return 0


@fit.command
def isocompute(
    *inputs: Inputs,
    target: str = "reward",
    b_problem: int | None = None,
    batch: int | None = None,
    draws: Draws = 1000,
    seed: Seed = 0,
    out: Out = Path("fits"),
    as_json: Json = False,
    check: Check = False,
) -> int:
    """Fit the best number of rollouts per problem against compute, n*(C), to a sweep.

    Parameters
    ----------
    inputs:
        Directories of `ngu sweep isocompute`, or CSV or JSON-lines files with the columns run_id, seed, b_problem, n,
        step, compute and reward: one row an evaluation.
    target:
        The column whose frontier is sought: reward, best_at_k, worst_at_k, or any other with values in [0, 1].
    b_problem:
        Only the runs with this many problems per batch.
    batch:
        Only the runs with this many rollouts per batch (problems times n).
    """
    if check:
        from bench.scaling.isocompute_check import check as lines

        return _print_check(lines(seed), as_json)
    import numpy as np

    from bench.scaling import figures, isocompute_report
    from bench.scaling.isocompute import fit_isocompute
    from bench.scaling.sensitivity import sensitivity
    from bench.scaling.sweep import load_sweep, restrict

    _prepare(inputs, draws, out, "a directory of `ngu sweep`, a CSV or a JSON-lines file")
    part = restrict(load_sweep(inputs, target), b_problem, batch)
    found, spread = fit_isocompute(part, draws, np.random.default_rng(seed)), sensitivity(part)
    rule = f"b_problem = {b_problem}" if b_problem else f"batch = {batch}" if batch else "any batch"
    says = isocompute_report.sentences(found, spread, rule)
    names = [str(path) for path in inputs]
    report = isocompute_report.IsoReport(names, target, b_problem, batch, draws, seed, found, spread, says)
    figure, rows = isocompute_report.draw(found, target)
    paths = figures.save(out, "isocompute", figure, isocompute_report.HEADER, rows, report)
    _print_report(report, isocompute_report.table(found), paths, as_json)
    return 0


def n(fit_file: Path, /, *, budget: float, base_lr: float = 1e-6, as_json: Json = False) -> int:
    """Problems per batch, rollouts per problem, steps and learning rate for a budget.

    Parameters
    ----------
    fit_file:
        The isocompute.json that `ngu fit isocompute` wrote.
    budget:
        Compute to spend, in the unit of the sweep.
    base_lr:
        The learning rate for 1,024 rollouts per batch; it grows with the square root of the batch.
    """
    from bench.scaling.plan import REFERENCE_BATCH, load_fit, make_plan

    if not (budget > 0 and base_lr > 0):
        raise ConfigError("--budget and --base-lr must be above 0")
    found = make_plan(load_fit(fit_file), budget, base_lr)
    if as_json:
        print(msgspec.json.encode(found).decode())
        return 0
    star = found.n_star
    print(f"n*({budget:g}) = {star.value:.1f} [{star.low:.1f}, {star.high:.1f}]")
    lr = f"{found.lr:.3g} (from {base_lr:g} for {REFERENCE_BATCH:,} rollouts a batch: --base-lr)"
    print(f"n = {found.n}  b_problem = {found.b_problem}  steps = {found.num_steps}  lr = {lr}")
    print(f"ngu train {' '.join(found.settings)}")
    print(f"or, with n growing as the budget is spent: {' '.join(found.growing)}")
    for line in found.says:
        print(f"  {line}")
    return 0


class _Report(Protocol):
    @property
    def says(self) -> list[str]: ...


def _prepare(inputs: tuple[Path, ...], draws: int, out: Path, what: str) -> None:
    """Refuse before the work what could not be finished."""
    from bench.files import make_directory

    if not inputs:
        raise ConfigError(f"nothing to fit: give {what}, or --check")
    if draws < MIN_DRAWS:
        raise ConfigError(f"--draws {draws}: at least {MIN_DRAWS} are needed for a 95% interval")
    make_directory(out)


def _print_report(report: _Report, table: str, paths: list[Path], as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(report).decode())
        return
    print(table)
    print()
    for line in report.says:
        print(f"- {line}")
    print(f"\nwrote {', '.join(str(path) for path in paths)}")


def _print_check(lines: Iterator[Any], as_json: bool) -> int:
    """Print each line as it is found, which is also the progress; 1 if any failed."""
    found = []
    for line in lines:
        found.append(line)
        where = sys.stderr if as_json else sys.stdout
        print(f"{'ok  ' if line.passed else 'FAIL'}  {line.name}: {line.detail}", file=where, flush=True)
    if as_json:
        print(msgspec.json.encode(found).decode())
    return 0 if all(line.passed for line in found) else 1

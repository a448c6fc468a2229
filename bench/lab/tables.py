"""Reports as tables: one column a sampler, the mean over its seeds and their standard deviation."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.lab.tally import Bin, Report

Reports = dict[str, list[Report]]

# What is printed: words, the figure (None where there is none), and how to print it.
METRICS: tuple[tuple[str, Callable[[Report], float | None], str], ...] = (
    ("rollouts", lambda r: r.rollouts, ",.0f"),
    ("tokens", lambda r: r.tokens, ",.0f"),
    ("seconds (simulated)", lambda r: r.seconds, ",.1f"),
    ("optimizer steps", lambda r: r.steps, ",.0f"),
    ("groups trained", lambda r: r.groups, ",.0f"),
    ("of which after a retry", lambda r: r.groups_after_retry_frac, ".1%"),
    ("of which with a right one", lambda r: r.groups_with_right_frac, ".1%"),
    ("problems visited", lambda r: r.visited, ",.0f"),
    ("problems solved", lambda r: r.solved, ",.0f"),
    ("hard problems solved", lambda r: r.hard_solved, ",.0f"),
    ("mean rollouts to solve", lambda r: r.time_to_solve_rollouts, ",.0f"),
    ("mean rollouts to solve, hard", lambda r: r.hard_time_to_solve_rollouts, ",.0f"),
    ("mean seconds to solve", lambda r: r.time_to_solve_s, ",.1f"),
    ("mean seconds to solve, hard", lambda r: r.hard_time_to_solve_s, ",.1f"),
    ("pass@1 at the end", lambda r: r.end.pass_rate, ".3f"),
    ("pass@1 at the end, hard", lambda r: r.end.hard_pass_rate, ".3f"),
    ("pass@1 over the run", lambda r: r.pass_rate_area, ".3f"),
    ("pass@1 over the run, hard", lambda r: r.hard_pass_rate_area, ".3f"),
    ("pass@8 at the end", lambda r: r.end.pass_at_8, ".3f"),
    ("tests passed at the end", lambda r: r.end.tests_passed_frac, ".1%"),
    ("wasted on all-wrong groups", lambda r: r.wasted_wrong_frac, ".1%"),
    ("wasted on all-right groups", lambda r: r.wasted_right_frac, ".1%"),
    ("rollouts trained", lambda r: r.trained_frac, ".1%"),
    ("lag", lambda r: r.lag_mean, ".2f"),
)
BY_DIFFICULTY: tuple[tuple[str, str, Callable[[Bin, int], float], str], ...] = (
    ("share of the rollouts", "pass rate", lambda b, total: b.rollouts / total, ".1%"),
    ("gradient weight w(p) of a visit", "pass rate", lambda b, _: b.weight, ".3g"),
    ("signal to noise of a rollout, in thousandths", "pass rate", lambda b, _: 1e3 * b.signal_to_noise, ".3g"),
)


def print_reports(console: Console, reports: Reports) -> None:
    table = new_table("", reports)
    for words, figure, form in METRICS:
        table.add_row(words, *(_mean_and_spread([figure(r) for r in found], form) for found in reports.values()))
    console.print(table)
    merged = {name: merge_bins(found) for name, found in reports.items()}
    difficulties = sorted(
        {b.difficulty for bins in merged.values() for b in bins}, key=lambda d: float(d.split("-")[0])
    )
    for title, first, figure, form in BY_DIFFICULTY:
        table = new_table(first, reports)
        for difficulty in difficulties:
            cells = []
            for bins in merged.values():
                total = sum(b.rollouts for b in bins)
                found = [figure(b, total) for b in bins if b.difficulty == difficulty]
                cells.append(format(found[0], form) if found else "-")
            table.add_row(difficulty, *cells)
        console.print(f"\n{title}")
        console.print(table)


def merge_bins(reports: Sequence[Report]) -> list[Bin]:
    """The bins of all seeds together, each figure weighted by its visits."""
    by_name: dict[str, list[Bin]] = {}
    for report in reports:
        for b in report.bins:
            by_name.setdefault(b.difficulty, []).append(b)
    return [_merge(bins) for bins in sorted(by_name.values(), key=lambda bins: bins[0].pass_rate)]


def _merge(bins: list[Bin]) -> Bin:
    visits = np.array([b.visits for b in bins])
    share = visits / visits.sum()
    return Bin(
        difficulty=bins[0].difficulty,
        pass_rate=float(share @ [b.pass_rate for b in bins]),
        visits=int(visits.sum()),
        trained=sum(b.trained for b in bins),
        rollouts=sum(b.rollouts for b in bins),
        weight=float(share @ [b.weight for b in bins]),
        weight_se=float(np.sqrt(share**2 @ [b.weight_se**2 for b in bins])),
        signal_to_noise=float(share @ [b.signal_to_noise for b in bins]),
    )


def new_table(first: str, others: Iterable[str]) -> Table:
    table = Table(box=None, header_style="dim")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _mean_and_spread(values: list[float | None], form: str) -> str:
    known = [v for v in values if v is not None]
    if not known:
        return "-"
    mean = format(float(np.mean(known)), form)
    return mean if len(known) == 1 else f"{mean} ± {format(float(np.std(known, ddof=1)), form)}"

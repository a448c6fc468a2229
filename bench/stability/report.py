"""What the arms say together: a table in Markdown and a heat map."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from bench.scaling.figures import style
from bench.stability.course import Course, survives
from bench.stability.grid import Result

# Diagnostics are means over the last steps: at the start every lag is still 0.
LATE_FRAC = 0.5
CELL_IN = 0.78, 0.42


@dataclass(frozen=True, slots=True)
class Cell:
    """One loss at one lag, over its seeds; pass@1 at the end, means over seeds and, with two or more, the range."""

    num_seeds: int
    num_survivors: int
    overall: float
    overall_range: tuple[float, float]
    hard: float | None
    ess: float
    kl: float
    max_grad_norm: float

    @property
    def survival(self) -> str:
        return f"{self.num_survivors}/{self.num_seeds}"


Cells = dict[tuple[str, int], Cell]


def cells_of(results: Sequence[Result]) -> Cells:
    """By loss and lag, losses in the order in which they first come and lags rising."""
    courses: dict[tuple[str, int], list[Course]] = {}
    for result in results:
        courses.setdefault((result.loss, result.lag), []).append(result.course)
    return {key: _cell(found) for key, found in courses.items()}


def markdown(cells: Cells) -> str:
    """Three tables: who survived and where they ended; how far off policy they were; how rough the steps were."""
    return "\n\n".join(
        [
            "Seeds that survived, overall and (hard) pass@1 at the end:",
            _table(cells, lambda c: f"{c.survival} {_short(c.overall)}{_hard(c)}"),
            f"ESS over the last {LATE_FRAC:.0%} of the steps, and KL(mu, pi) a token:",
            _table(cells, lambda c: f"{c.ess:.3f} {c.kl:.4f}"),
            "Largest gradient norm before clipping:",
            _table(cells, lambda c: f"{c.max_grad_norm:.2g}"),
        ]
    )


def heat_map(cells: Cells) -> Figure:
    """Overall and hard pass@1 at the end, with the seeds that survived where not all did."""
    losses, lags = axes_of(cells)
    has_hard = any(c.hard is not None for c in cells.values())
    width = 1.9 + (1 + has_hard) * (0.5 + CELL_IN[0] * len(lags))
    figure = Figure(figsize=(width, 1.2 + CELL_IN[1] * len(losses)), layout="constrained")
    panels = figure.subplots(1, 1 + has_hard, squeeze=False, sharey=True)[0]
    _panel(panels[0], cells, "overall pass@1 at the end", lambda c: c.overall)
    if has_hard:
        _panel(panels[1], cells, "hard pass@1 at the end", lambda c: c.hard)
    return figure


def axes_of(cells: Cells) -> tuple[list[str], list[int]]:
    return list(dict.fromkeys(loss for loss, _ in cells)), sorted({lag for _, lag in cells})


def _cell(courses: Sequence[Course]) -> Cell:
    overall = [course.final.overall for course in courses]
    hard = [course.final.hard for course in courses if course.final.hard is not None]
    late = [step for course in courses for step in course.steps[int(len(course.steps) * (1 - LATE_FRAC)) :]]
    return Cell(
        num_seeds=len(courses),
        num_survivors=sum(map(survives, courses)),
        overall=float(np.mean(overall)),
        overall_range=(min(overall), max(overall)),
        hard=float(np.mean(hard)) if hard else None,
        ess=float(np.mean([step.ess for step in late])) if late else float("nan"),
        kl=float(np.mean([step.kl for step in late])) if late else float("nan"),
        max_grad_norm=max((step.grad_norm for course in courses for step in course.steps), default=float("nan")),
    )


def _table(cells: Cells, shown) -> str:
    losses, lags = axes_of(cells)
    rows = [["loss", *(f"lag {lag}" for lag in lags)], ["---"] * (1 + len(lags))]
    rows += [[loss, *(shown(cells[loss, lag]) if (loss, lag) in cells else "-" for lag in lags)] for loss in losses]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _panel(axes: Axes, cells: Cells, title: str, value) -> None:
    losses, lags = axes_of(cells)
    grid = np.full((len(losses), len(lags)), np.nan)
    for (loss, lag), cell in cells.items():
        found = value(cell)
        grid[losses.index(loss), lags.index(lag)] = np.nan if found is None else found
    style(axes, title, "lag (optimizer steps)", "")
    axes.imshow(grid, cmap="YlGnBu", vmin=0.0, vmax=1.0, aspect="auto")
    axes.grid(False)
    axes.set_xticks(range(len(lags)), [str(lag) for lag in lags])
    axes.set_yticks(range(len(losses)), losses)
    for (loss, lag), cell in cells.items():
        y, x = losses.index(loss), lags.index(lag)
        all_survived = cell.num_survivors == cell.num_seeds
        text = _short(grid[y, x]) + ("" if all_survived else f"\n{cell.survival}")
        colour = "white" if grid[y, x] > 0.55 else "#1c2733"
        weight = "normal" if all_survived else "bold"
        axes.text(x, y, text, ha="center", va="center", fontsize=7, color=colour, fontweight=weight)
        if not all_survived:
            box = {"fill": False, "edgecolor": "#d1602a", "linewidth": 1.6}
            axes.add_patch(Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, **box))


def _hard(cell: Cell) -> str:
    return "" if cell.hard is None else f" ({_short(cell.hard)})"


def _short(rate: float) -> str:
    """.89, 1.00."""
    return f"{rate:.2f}".removeprefix("0")

"""The verb `ngu stability`. What computes is imported when it runs, so that its help costs nothing."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.types import NonNegativeInt, PositiveInt

from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from bench.stability.grid import Result

LOSSES = ("cispo", "reinforce_tis", "ppo", "grpo", "gspo", "topr", "m2po", "asymre")
LAGS = (0, 1, 2, 4, 8, 16)

Settings = Annotated[
    str, Parameter(show_default=False, help="A TOML file, and settings of all arms; they come before the options.")
]
Losses = Annotated[
    tuple[str, ...],
    Parameter(
        consume_multiple=True,
        negative="",
        help='Kinds of loss, each perhaps with settings of its own: "gspo learner.loss.eps_low=0.004".',
    ),
]
Lags = Annotated[tuple[NonNegativeInt, ...], Parameter(consume_multiple=True, negative="", help="Optimizer steps.")]
Seeds = Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative="", help="One course each.")]


def stability(
    *settings: Settings,
    losses: Losses = LOSSES,
    lags: Lags = LAGS,
    seeds: Seeds = (0, 1, 2),
    processes: PositiveInt = 1,
    out: Path = Path("stability.jsonl"),
    plot: Path = Path("stability.png"),
    run: Annotated[bool, Parameter(negative="--no-run")] = True,
) -> int:
    """Train every loss at exact lags and say which survive; run it again to go on where it was interrupted.

    An arm survives when it goes to its end and ends within .10 of its best evaluation in overall pass@1. The rollouts
    of one batch have one version here, and staleness.max_lag is set to each lag in turn.

    Parameters
    ----------
    processes:
        Arms at a time, one thread each.
    out:
        Where results are kept, a JSON object a line.
    plot:
        Draw a heat map to this PNG.
    run:
        With --no-run only show what OUT holds of these arms, also while they run elsewhere.
    """
    files = [s for s in settings if "=" not in s or Path(s).is_file()]
    if len(files) > 1:
        raise ConfigError(f"one config file at most, but {', '.join(files)} were given; a setting is written key=value")
    for option, values in (("--losses", losses), ("--lags", lags), ("--seeds", seeds)):
        if not values or len(set(values)) < len(values):
            raise ConfigError(f"{option}: give at least one value, and none twice")

    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from bench.stability.grid import find_results, make_arms, run_arms
    from bench.stability.report import cells_of, heat_map, markdown

    overrides = [s for s in settings if s not in files]
    arms = make_arms(overrides, losses, lags, seeds, Path(files[0]) if files else None)
    results = run_arms(arms, out, processes, _reporter()) if run else find_results(arms, out)
    if not results:
        raise ConfigError(f"{out}: holds no result of these arms; run them first")
    cells = cells_of(results)
    figure = heat_map(cells)
    FigureCanvasAgg(figure)
    try:
        figure.savefig(plot, format="png", dpi=130)
    except OSError as e:
        raise ConfigError(f"{plot}: cannot write the plot: {e.strerror}; choose another --plot") from None
    print(markdown(cells))
    return 0


def _reporter() -> "Callable[[Result, int], None]":
    """A line on stderr for each arm that ends."""
    started, num_done = time.monotonic(), 0

    def report(result: "Result", num_left: int) -> None:
        nonlocal num_done
        num_done += 1
        minutes = (time.monotonic() - started) / num_done * num_left / 60
        course = result.course
        print(
            f"{result.loss}, lag {result.lag}, seed {result.seed}: {course.ending}, overall {course.start.overall:.2f} "
            f"to {course.final.overall:.2f} ({course.cpu_s:.0f} core-seconds); {num_left} left, {minutes:.0f} min",
            file=sys.stderr,
            flush=True,
        )

    return report

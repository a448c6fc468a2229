"""Watching a run: a live screen for a terminal, a line a step for a log file. Both only read the run's files."""

import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.metrics import Record
from pipeline.progress import Progress, duration, number, of, sparkline

REFRESH_S = 0.5  # how often the coordinator rewrites status.json
HISTORY_LINES = 10
QUIET_S = 30.0
STEP_METRICS = {"generated/reward_mean": "reward", "lag_mean": "lag", "lag_max": "lag max", "ess": "ESS"}
RATES = {"rollouts_per_s": "rollouts/s", "tokens_per_s": "tokens/s"}


class View(Protocol):
    def update(self, progress: Progress, new: Sequence[Record]) -> None: ...

    def close(self) -> None: ...


def make_view(live: bool) -> View:
    """A live view where there is a terminal that can move its cursor, lines otherwise."""
    console = Console()
    if live and console.is_terminal and not console.is_dumb_terminal:
        return LiveView(console)
    return PlainView()


def follow(run_dir: Path, view: View, ended: Callable[[], bool]) -> None:
    """Show the run until `ended`, and once more after it."""
    progress = Progress(run_dir)
    try:
        last = False
        while not last:
            last = ended()
            view.update(progress, progress.refresh())
            if not last:
                time.sleep(REFRESH_S)
    finally:
        view.close()


@contextmanager
def followed(run_dir: Path, live: bool) -> Iterator[None]:
    """Show the run from a thread while the body runs it. A view that breaks never stops the run."""
    stop = threading.Event()

    def show() -> None:
        try:
            follow(run_dir, make_view(live), stop.is_set)
        except Exception:
            traceback.print_exc()
            print("the view stopped; the run goes on (`ngu watch` shows it again)", flush=True)

    thread = threading.Thread(target=show, name="view", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class PlainView:
    """One line a step or evaluation, without control characters; of what was before, only the last few."""

    def __init__(self) -> None:
        self._state = ""
        self._warnings: list[str] = []
        self._printed = time.monotonic()

    def update(self, progress: Progress, new: Sequence[Record]) -> None:
        for record in new if self._state else new[-HISTORY_LINES:]:
            if record["kind"] == "step":
                self._print(step_line(record, progress))
            elif record["kind"] == "eval":
                self._print(eval_line(record))
        warnings = progress.status.get("warnings") or []
        for warning in warnings:
            if warning not in self._warnings:
                self._print(f"warning: {warning}")
        self._warnings = warnings
        if progress.state != self._state:
            self._state = progress.state
            reason = progress.status.get("reason")
            self._print(f"{self._state}: {reason}" if reason else self._state)
        if time.monotonic() - self._printed > QUIET_S:
            self._print(quiet_line(progress))

    def close(self) -> None: ...

    def _print(self, line: str) -> None:
        self._printed = time.monotonic()
        print(f"{time.strftime('%H:%M:%S')} {' '.join(line.split())}", flush=True)


def quiet_line(progress: Progress) -> str:
    """Where a run stands while nothing new happens, so that a slow run does not look like a hung one."""
    status = progress.status
    queues = ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in (status.get("queues") or {}).items())
    rollouts = of(status.get("rollouts", 0), status.get("max_rollouts"))
    rate = number(status.get("rollouts_per_s"))
    return f"{progress.state}, step {status.get('step', 0)}, rollouts {rollouts}, {rate} rollouts/s; queues: {queues}"


def step_line(record: Record, progress: Progress) -> str:
    status, metrics = progress.status, record["metrics"]
    fields = [
        f"step {of(record['step'], status.get('max_steps'))}",
        f"rollouts {of(record['rollouts'], status.get('max_rollouts'))}",
        *(f"{words} {number(metrics[name])}" for name, words in STEP_METRICS.items() if metrics.get(name) is not None),
        *(f"{number(metrics[name], 0)} {words}" for name, words in RATES.items() if metrics.get(name) is not None),
    ]
    if progress.time_left_s is not None:
        fields.append(f"{duration(progress.time_left_s)} left")
    return ", ".join(fields)


def eval_line(record: Record) -> str:
    """pass@1 with its 95% intervals."""
    rates = []
    for words, name in (("hard", "hard_pass_at_1"), ("overall", "mix_pass_at_1")):
        bounds = record.get("intervals", {}).get(name)
        within = f" [{', '.join(map(number, bounds))}]" if bounds else ""
        rates.append(f"{words} {number(record.get(name))}{within}, ")
    return (
        f"evaluation {record['phase']} (step {record['step']}): {''.join(rates)}"
        f"{sum(record['num_rollouts'].values())} rollouts"
    )


class LiveView:
    """A screen of at most some 20 lines, redrawn in place twice a second."""

    def __init__(self, console: Console):
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    def update(self, progress: Progress, new: Sequence[Record]) -> None:
        self._live.update(screen(progress), refresh=True)

    def close(self) -> None:
        self._live.stop()


def screen(progress: Progress) -> RenderableType:
    status = progress.status
    parts: list[RenderableType] = [_headline(progress), _bar(progress)]
    parts.append(Columns([_learning(progress), _flow(status)], padding=(0, 3)))
    if status.get("engines"):
        parts.append(_engines(status["engines"]))
    parts += [Text(f"! {warning}", style="yellow") for warning in status.get("warnings") or []]
    # The terminal echoes ^C where the cursor stands; after a line of full width it would wrap and leave a line behind.
    parts.append(Text())
    return Group(*parts)


def _headline(progress: Progress) -> Text:
    colour = {"finished": "green", "failed": "red", "stopped": "yellow"}.get(progress.state, "cyan")
    line = Text.assemble(("ngu ", "bold"), (progress.state, f"bold {colour}"), f"  {progress.run_dir.name}")
    if evaluation := progress.status.get("evaluation"):
        line.append(f"  evaluation {evaluation['of'] - evaluation['left']}/{evaluation['of']}")
    if progress.status.get("reason"):
        line.append(f"  {progress.status['reason']}", style=colour)
    return line


def _bar(progress: Progress) -> RenderableType:
    status = progress.status
    row = Table.grid(padding=(0, 2))
    row.add_row(
        ProgressBar(total=1.0, completed=progress.done_frac, width=24),
        f"step {of(status.get('step', 0), status.get('max_steps'))}",
        f"rollouts {of(status.get('rollouts', 0), status.get('max_rollouts'))}",
        f"{duration(progress.elapsed_s)} gone, {duration(progress.time_left_s)} left",
    )
    return row


def _learning(progress: Progress) -> Table:
    status = progress.status
    table = _titled("learning")
    for name, words in (("hard_pass_at_1", "hard pass@1"), ("mix_pass_at_1", "pass@1")):
        history = progress.evaluated(name)
        value = history[-1] if history else status.get(name)
        trend = f"{number(history[0])} → {number(value)}" if len(history) > 1 else number(value)
        table.add_row(words, f"{trend}  {sparkline(history, 12)}")
    table.add_row("reward", number(status.get("reward_mean")))
    table.add_row("lag", f"{number(status.get('lag_mean'), 2)}, max {number(status.get('lag_max'), 0)}")
    table.add_row("ESS", number(status.get("ess")))
    return table


def _flow(status: Mapping[str, Any]) -> Table:
    table = _titled("flow")
    for name, words in RATES.items():
        table.add_row(words, number(status.get(name), 0))
    table.add_row("queues", _counts(status.get("queues")))
    attempts = {fate: n for fate, n in (status.get("attempts") or {}).items() if n}
    table.add_row("attempts", _counts(attempts))
    table.add_row("sampler", _counts(status.get("sampler")))
    return table


def _engines(engines: Mapping[str, Mapping[str, float]]) -> Table:
    """One row an engine with whatever gauges its heartbeat carries."""
    names = list(dict.fromkeys(name for stats in engines.values() for name in stats))[:7]
    table = Table("engine", *(name.replace("_", " ") for name in names), box=None, header_style="dim", pad_edge=False)
    for engine, stats in list(engines.items())[:8]:
        table.add_row(engine, *(_gauge(stats.get(name)) for name in names))
    return table


def _titled(title: str) -> Table:
    table = Table(title=Text(title, style="bold"), title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    return table


def _counts(values: Mapping[str, float] | None) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_gauge(value)}" for name, value in (values or {}).items()) or "-"


def _gauge(value: float | None) -> str:
    """Counts without a point, rates with two digits after it."""
    return number(value, 0 if value is None or float(value).is_integer() else 2)

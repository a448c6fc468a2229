"""The tables a run closes with: pass@1 by level before and after, and where the rollouts went."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.progress import duration, number

MAX_ROWS = 24


def print_closing(summary: dict[str, Any], run_dir: Path) -> None:
    console = Console(highlight=False)
    levels = sorted(set(summary["pass_at_1"]) | set(summary["pass_at_1_before"]) | set(summary["rollouts_by_level"]))
    if levels:
        console.print(_level_table(summary, levels[:MAX_ROWS]), "")
    if len(levels) > MAX_ROWS:
        console.print(f"{len(levels) - MAX_ROWS} more levels are in summary.json\n")
    if summary["attempts"]:
        console.print(_fate_table(summary["attempts"]), "")
    words = f"{summary['state']}: {summary['reason']}" if summary["reason"] else f"{summary['state']}"
    console.print(
        f"{words}; {summary['steps']} steps, {summary['rollouts']} rollouts, {number(summary['tokens'], 0)} tokens in "
        f"{duration(summary['wall_s'])}; lag {number(summary['lag_mean'], 2)} (max {number(summary['lag_max'], 0)}), "
        f"ESS {number(summary['ess_mean'])}",
        soft_wrap=True,
    )
    if summary["state"] == "finished" and not summary["steps"]:
        console.print("nothing was trained: no batch was filled; raise max_rollouts or lower learner.batch_size")
    console.print(f"{run_dir}: summary.json, metrics.jsonl, checkpoints/, tensorboard/, *.png", soft_wrap=True)


def _level_table(summary: dict[str, Any], levels: list[str]) -> Table:
    """pass@1 on held-out problems beside what training spent on the level."""
    closed = summary["evaluated_at_step"] in (None, summary["steps"])
    after = "after" if closed else f"step {summary['evaluated_at_step']}"
    table = _table(
        "pass@1 on held-out problems, and training rollouts",
        *("level", "before", after, "change", "launched", "trained", "correct"),
    )
    for level in levels:
        spent = summary["rollouts_by_level"].get(level, {})
        pass_at_1 = _change(summary["pass_at_1_before"].get(level), summary["pass_at_1"].get(level))
        table.add_row(level, *pass_at_1, *(str(spent.get(kind, "-")) for kind in ("launched", "trained", "correct")))
    table.add_section()
    for words, name in (("hard", "hard_pass_at_1"), ("overall", "mix_pass_at_1")):
        table.add_row(words, *_change(summary[f"{name}_before"], summary[name]))
    return table


def _change(before: float | None, after: float | None) -> tuple[str, str, str]:
    change = "-" if before is None or after is None else f"{after - before:+.3f}"
    return number(before), number(after), change


def _fate_table(attempts: dict[str, int]) -> Table:
    table = _table("where the rollouts went", "fate", "rollouts", "share")
    total = sum(attempts.values()) or 1
    for fate, count in attempts.items():
        table.add_row(fate.replace("_", " "), str(count), f"{count / total:.1%}")
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="dim", pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table

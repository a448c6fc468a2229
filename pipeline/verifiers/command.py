"""`ngu verify`: judge a file of answers, and say where the verdicts and given labels disagree."""

import json as json_module
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from cyclopts import Parameter
from cyclopts.validators import Number

from pipeline.config import ExtractRule
from pipeline.errors import ConfigError
from pipeline.messages import Verdict
from pipeline.tasks.rows import Row, read_rows
from pipeline.verifiers.golds import triage_gold
from pipeline.verifiers.pool import VerifierPool
from pipeline.verifiers.triage import NOT_MATHEMATICS, triage
from samplers.base import Problem

MAX_WAITING = 1024  # answers in the pool at once: enough to keep the children busy, few enough for any file
OUTCOMES = ("correct", "incorrect", "unknown")

AtLeastOne = Annotated[int, Parameter(validator=Number(gte=1))]
AboveZero = Annotated[float, Parameter(validator=Number(gt=0))]
Flag = Annotated[bool, Parameter(negative="")]


class Judged(NamedTuple):
    """One line of the file; `label` is None where none was asked for."""

    line: int
    gold: str
    verdict: Verdict
    label: bool | None

    @property
    def agrees(self) -> bool:
        return (self.verdict.outcome == "correct") == self.label

    def as_row(self) -> dict[str, Any]:
        v = self.verdict
        row = {"line": self.line, "gold": self.gold, "extracted": v.extracted, "verdict": v.outcome, "detail": v.detail}
        return row if self.label is None else row | {"label": self.label}


class _Item(NamedTuple):
    line: int
    gold: str
    text: str
    label: bool | None


def verify(
    file: Path,
    /,
    *,
    gold: str = "gold",
    answer: str = "answer",
    label: str = "",
    golds: Flag = False,
    extract: ExtractRule = "auto",
    workers: AtLeastOne = 1,
    deadline: AboveZero = 5.0,
    json: Flag = False,
) -> int:
    r"""Judge a file of answers; with labels, print the agreement and each disagreement.

    Parameters
    ----------
    file:
        JSON lines or a Parquet file, one answer each.
    gold:
        The field with the right answer; of `working #### 42` or `working \boxed{42}` only the 42 counts.
    answer:
        The field with the text to judge.
    label:
        The field with a true or false to compare the verdicts with.
    golds:
        Judge the golds instead: list those that do not verify against themselves.
    extract:
        Where the final answer stands in the text: the last `\boxed{x}`, `#### x` or `Answer: x`.
    workers:
        Processes for what exact arithmetic cannot decide.
    deadline:
        Seconds until one answer is given up as unknown.
    json:
        Print one JSON object.
    """
    rows = read_rows(str(file), "give a JSON-lines file")
    items = [_gold_item(row, gold) if golds else _item(row, gold, answer, label) for row in rows]
    with VerifierPool(workers, deadline) as pool:
        judged = sorted(_judge(pool, items, None if golds else extract))
    report = _gold_report(judged) if golds else _report(judged)
    if json:
        print(json_module.dumps(report, ensure_ascii=False))
    else:
        _print(report, str(file))
    return 0


def _gold_item(row: Row, gold: str) -> _Item:
    return _Item(row.number, row.gold(gold, "--gold"), "", None)


def _item(row: Row, gold: str, answer: str, label: str) -> _Item:
    text = row.value(answer, "--answer")
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise ConfigError(f"{row.where}: field {answer!r} must be a text or a number, not {text!r:.40}")
    right = row.value(label, "--label") if label else None
    if label and not isinstance(right, bool):
        raise ConfigError(f"{row.where}: field {label!r} must be true or false, not {right!r:.40}")
    return _Item(row.number, row.gold(gold, "--gold"), str(text), right)


def _judge(pool: VerifierPool, items: list[_Item], rule: ExtractRule | None) -> Iterator[Judged]:
    """Every item with its verdict, in the order in which they are ready; without a rule the golds are judged."""
    from rich.console import Console
    from rich.progress import track

    by_line = {item.line: item for item in items}
    terminal = Console(stderr=True)
    verdicts = _verdicts(pool, items, rule)
    hidden = not terminal.is_terminal
    for line, verdict in track(verdicts, "judging", len(items), console=terminal, transient=True, disable=hidden):
        yield Judged(line, by_line[line].gold, verdict, by_line[line].label)


def _verdicts(pool: VerifierPool, items: list[_Item], rule: ExtractRule | None) -> Iterator[tuple[int, Verdict]]:
    waiting = 0
    for item in items:
        if rule is None:
            pool.put(item.line, triage_gold(item.gold))
        else:
            pool.put(item.line, triage(Problem("", "file", "", item.gold), item.text, False, rule))
        waiting += 1
        done = pool.poll(0.0 if waiting < MAX_WAITING else 1.0)
        waiting -= len(done)
        yield from done
    while waiting:
        done = pool.poll(1.0)
        waiting -= len(done)
        yield from done


def _report(judged: list[Judged]) -> dict[str, Any]:
    report = _counts(judged)
    labelled = [j for j in judged if j.label is not None]
    if not labelled:
        return report | {"unknowns": [j.as_row() for j in judged if j.verdict.outcome == "unknown"]}
    disagreements = [j.as_row() for j in labelled if not j.agrees]
    agreement_frac = 1 - len(disagreements) / len(labelled)
    return report | {"agreement_frac": agreement_frac, "disagreements": disagreements}


def _gold_report(judged: list[Judged]) -> dict[str, Any]:
    """A gold that is no mathematics to the library still matches the same text; it is listed on its own."""
    wrong = [j for j in judged if j.verdict.outcome != "correct"]
    return _counts(judged) | {
        "bad_golds": [j.as_row() for j in wrong if j.verdict.detail != NOT_MATHEMATICS],
        "text_golds": [j.as_row() for j in wrong if j.verdict.detail == NOT_MATHEMATICS],
    }


def _counts(judged: list[Judged]) -> dict[str, Any]:
    counts = Counter(j.verdict.outcome for j in judged)
    return {"judged": len(judged)} | {outcome: counts[outcome] for outcome in OUTCOMES}


_LISTS = {
    "disagreements": "disagree with their label",
    "unknowns": "could not be judged",
    "bad_golds": "do not verify against themselves",
    "text_golds": "are matched as text only",
}


def _print(report: dict[str, Any], file: str) -> None:
    print(f"{report['judged']} judged: " + ", ".join(f"{report[outcome]} {outcome}" for outcome in OUTCOMES))
    if "agreement_frac" in report:
        print(f"agreement with the labels: {report['agreement_frac']:.2%}")
    for name, words in _LISTS.items():
        if rows := report.get(name):
            print(f"{len(rows)} {words}:")
        for row in report.get(name, ()):
            label = f", label {row['label']}".lower() if "label" in row else ""
            detail = f" ({row['detail']})" if row["detail"] else ""
            shown = f"gold {row['gold']!r}, answer {row['extracted']!r}"
            print(f"  {file}:{row['line']}: {shown}: {row['verdict']}{label}{detail}")

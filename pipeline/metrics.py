"""The `MetricSink` seam and its implementations: what a run measured, as JSON lines and as TensorBoard events.

A record is one flat JSON object with a `kind`, the `step` and what the run has cost so far: `rollouts` and `tokens` of
training, `core_s` {role: CPU seconds}, those of evaluation included. Besides:

- `step`: `time` (unix s), `metrics` {name: value}
- `eval`: `phase` ("before", "during", "after"), `version_min`, `version_max`, `pass_at_1` {level: value},
  `num_rollouts` {level: n}, `mean_tokens`, `hard_pass_at_1`, `mix_pass_at_1`, `truncated_frac`, `truncated_by_level`;
  `pass_at_k`, `best_at_k`, `worst_at_k` {k: mean over problems}; `correct_by_tokens`, `num_by_tokens` {least tokens of
  the bucket, "16" for 16 to 31: value}; `solved` {rollouts of a problem: [problems right 0, 1, ... times]}; `intervals`
  {name of a rate above: [low, high], by level or k as it is}, 95% over problems
- `warning`: `time`, `text`
- `failure`: `time`, `reason`, `metrics` of the time since the last step, of the batch in training (`in_step/...`) and
  what the learner last said of itself (`learner/...`); the run or its learner ended there
- `levels`: `rollouts_by_level` {level: {"launched": n, "trained": n, "correct": n}}, `left_out`: what the staleness
  rule left out (`Tally.left_out`)
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from pipeline.errors import NguError

Record = dict[str, Any]

_EVAL_SCALARS = ("hard_pass_at_1", "mix_pass_at_1", "mean_tokens", "truncated_frac")
_EVAL_AT_K = ("pass_at_k", "best_at_k", "worst_at_k")


class MetricSink(Protocol):
    """Takes records in order; after `write` returns, a killed process has lost nothing of that record."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None:
        """Idempotent."""
        ...


class JsonlSink:
    """Appends one line a record; a last line torn by a kill is cut off when the file is opened again."""

    def __init__(self, path: Path):
        self._file = path.open("ab+")
        end = self._file.seek(0, os.SEEK_END)
        whole = _end_of_last_line(self._file, end)
        if whole < end:
            self._file.truncate(whole)

    def write(self, record: Record) -> None:
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Writes scalars with the tensorboard package's own event writer, which needs neither torch nor TensorFlow.

    Step metrics keep their names; evaluations go to `eval/...`, warnings to the tab "Text". The tab "Custom Scalars" is
    one page of what to look at first (`tensorboard_page.CHARTS`).
    """

    def __init__(self, directory: Path):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        from pipeline import tensorboard_page

        self._event: Any = event_pb2  # its classes are made when it is imported, which type checkers cannot see
        self._summary, self._page = summary_pb2, tensorboard_page
        self._writer: EventFileWriter | None = EventFileWriter(str(directory))
        self._writer.add_event(self._event.Event(step=0, summary=tensorboard_page.page()))
        self._started = False

    def write(self, record: Record) -> None:
        if self._writer is None or (summary := self._summarize(record)) is None:
            return
        step = int(record["step"])
        if not self._started and record["kind"] == "step":
            # Tells TensorBoard to discard what an earlier process wrote from this step on: a resumed run repeats the
            # steps after its checkpoint.
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._writer.add_event(self._event.Event(step=step, session_log=start))
            self._started = True
        event = self._event.Event(step=step, summary=summary)
        if "time" in record:
            event.wall_time = record["time"]
        self._writer.add_event(event)
        self._writer.flush()

    def _summarize(self, record: Record) -> Any | None:
        match record["kind"]:
            case "warning":
                return self._page.text("warnings", record["text"])
            case "failure":
                return self._page.text("failure", record["reason"])
        values = [self._summary.Summary.Value(tag=tag, simple_value=value) for tag, value in _scalars(record)]
        if record["kind"] == "step" and (histogram := self._page.lag_histogram(record["metrics"])) is not None:
            values.append(histogram)
        return self._summary.Summary(value=values) if values else None

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class MetricSinks:
    """Writes each record to every sink."""

    def __init__(self, *sinks: MetricSink):
        self._sinks = sinks

    def write(self, record: Record) -> None:
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def open_sinks(run_dir: Path) -> MetricSinks:
    """The sinks of a run: `RUN/metrics.jsonl` and TensorBoard events under `RUN/tensorboard`."""
    return MetricSinks(JsonlSink(run_dir / "metrics.jsonl"), TensorBoardSink(run_dir / "tensorboard"))


class RecordTail:
    """Reads a growing `metrics.jsonl`: each `read` returns the records completed since the last one."""

    def __init__(self, path: Path):
        self._path = path
        self._offset = 0
        self._line = 0

    def read(self) -> list[Record]:
        """Raises NguError, naming the line, for a complete line that is not a JSON object."""
        try:
            with self._path.open("rb") as file:
                # A resumed run may have cut a torn line, but never below what was complete.
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        records = []
        for line in data.splitlines():
            self._line += 1
            try:
                records.append(msgspec.json.decode(line, type=Record))
            except msgspec.DecodeError as e:
                raise NguError(f"{self._path}, line {self._line}: not a metrics record ({e})") from None
        return records


def read_records(path: Path) -> list[Record]:
    """All complete records of a `metrics.jsonl`; a torn last line is left out, a missing file has none."""
    return RecordTail(path).read()


def current_records(records: list[Record]) -> list[Record]:
    """The records that still hold: a resumed run repeats the steps after its checkpoint and so replaces them."""
    kept: list[Record] = []
    index_of_step: dict[int, int] = {}
    for record in records:
        if record["kind"] == "step":
            if record["step"] in index_of_step:
                del kept[index_of_step[record["step"]] :]
                index_of_step = {step: i for step, i in index_of_step.items() if i < len(kept)}
            index_of_step[record["step"]] = len(kept)
        kept.append(record)
    return kept


def _end_of_last_line(file: Any, end: int) -> int:
    """Offset just after the last newline."""
    chunk = 1 << 16
    for start in range(max(end - chunk, 0), -chunk, -chunk):
        file.seek(max(start, 0))
        newline = file.read(chunk).rfind(b"\n")
        if newline >= 0:
            return max(start, 0) + newline + 1
    return 0


def _scalars(record: Record) -> Iterator[tuple[str, float]]:
    match record["kind"]:
        case "step":
            named = record["metrics"]
        case "eval":
            named = {f"eval/pass_at_1/{level}": value for level, value in record["pass_at_1"].items()}
            named |= {f"eval/{name}": record.get(name) for name in _EVAL_SCALARS}
            named |= {f"eval/{kind}/{k}": value for kind in _EVAL_AT_K for k, value in record.get(kind, {}).items()}
        case _:
            named = {}
    return ((name, float(v)) for name, v in named.items() if v is not None and math.isfinite(v))

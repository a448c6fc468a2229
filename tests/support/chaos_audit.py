"""What a chaos run is held against: its ledger, the records of its steps, and what its processes hold."""

import contextlib
import io
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from learner.recording import read_record, recorded_steps
from pipeline.errors import NguError
from pipeline.guards import anonymous_bytes
from pipeline.ledger_cli import ledger

# A process opens a file now and then, and its memory moves a little; a leak adds up over the recoveries.
MAX_MORE_FDS = 3
MAX_MORE_MIB = 8.0
_MISSING = "SELECT abs((SELECT launched FROM books) - (SELECT count(*) FROM attempts))"  # nothing is pruned
_OPEN = "SELECT count(*) FROM attempts WHERE fate = 0"
_TRAINED = "SELECT step, attempt_id FROM attempts WHERE fate = (SELECT code FROM fates WHERE name = 'trained')"


class Findings(NamedTuple):
    """What was found wrong at one look: attempts that have no fate, attempts in two steps, and anything in words."""

    lost: int
    doubled: int
    faults: list[str]

    def plus(self, faults: list[str]) -> "Findings":
        return self._replace(faults=self.faults + faults)

    def __str__(self) -> str:
        return f"{self.lost} lost, {self.doubled} doubled{''.join(f', {fault}' for fault in self.faults)}"


class Audit:
    """Looks at a run again and again; `lineage` holds the attempts of every step that it ever took."""

    def __init__(self, run_dir: Path):
        self.dir = run_dir
        self.lineage: dict[int, list[int]] = {}
        self._seen: dict[int, int] = {}  # step -> when its record was written
        self._num_doubled = 0

    def look(self) -> Findings:
        """At any moment of a run; what an earlier look has found is not found again."""
        faults = [*self._unbalanced(), *self._changed_steps()]
        times = Counter(attempt for attempts in self.lineage.values() for attempt in attempts)
        doubled, self._num_doubled = self._num_doubled, sum(n > 1 for n in times.values())
        return Findings(self._query(_MISSING)[0][0], self._num_doubled - doubled, faults)

    def close(self) -> Findings:
        """When the run has finished: also what it has left behind, and whether ledger and learner agree."""
        found = self.look()
        recorded = {(step, attempt) for step, attempts in self.lineage.items() for attempt in attempts}
        if odd := recorded ^ set(self._query(_TRAINED)):
            found.faults.append(f"ledger and learner disagree on {len(odd)} trained attempts, as {min(odd)}")
        if sorted(self.lineage) != list(range(1, len(self.lineage) + 1)):
            found.faults.append("a step is missing")
        if left := processes_in(self.dir):
            found.faults.append(f"processes are left: {left}")
        if Path(f"/dev/shm/ngu-{(self.dir / 'run_id').read_text().strip()}").exists():
            found.faults.append("weights are left in shared memory")
        return found._replace(lost=found.lost + self._query(_OPEN)[0][0])

    def _query(self, query: str) -> list[tuple[int, ...]]:
        with closing(sqlite3.connect(f"file:{self.dir}/ledger.sqlite?mode=ro", uri=True)) as db:
            return db.execute(query).fetchall()

    def _unbalanced(self) -> Iterator[str]:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            if ledger(self.dir, verify=True):
                yield said.getvalue()

    def _changed_steps(self) -> Iterator[str]:
        """Steps that were taken again with other attempts than the first time."""
        for step in recorded_steps(self.dir):
            path = self.dir / "steps" / f"{step:06d}.msgpack"
            try:
                written = path.stat().st_mtime_ns
                if self._seen.get(step) == written:
                    continue
                groups = read_record(self.dir, step).batch.groups
            except (FileNotFoundError, NguError):
                if path.exists():
                    raise
                continue  # a learner that starts again removes what it will repeat
            self._seen[step] = written
            attempts = [rollout.attempt_id for group in groups for rollout in group.rollouts]
            before, self.lineage[step] = self.lineage.get(step, attempts), attempts
            if before != attempts:
                yield f"step {step} was trained on something else than before"


class Usage:
    """File descriptors and anonymous memory of the same process at one recovery after another."""

    def __init__(self):
        self._seen: dict[tuple[str, int], list[tuple[int, float]]] = {}

    def note(self, roles: dict[str, int]) -> None:
        for role, pid in roles.items():
            with contextlib.suppress(OSError):
                num_fds = len(list(Path(f"/proc/{pid}/fd").iterdir()))
                self._seen.setdefault((role, pid), []).append((num_fds, anonymous_bytes(pid) / (1 << 20)))

    def growth(self) -> dict[str, tuple[int, int, float]]:
        """By role, of the process that saw most recoveries: how many, and what it gained in descriptors and MiB since
        the second of them. The first comes too early: a learner's memory grows over its first steps.
        """
        longest: dict[str, tuple[int, int, float]] = {}
        for (role, _), seen in self._seen.items():
            if len(seen) > longest.get(role, (2, 0, 0.0))[0]:
                longest[role] = (len(seen), seen[-1][0] - seen[1][0], seen[-1][1] - seen[1][1])
        return longest

    def faults(self) -> list[str]:
        return [
            f"{role} grew by {fds} descriptors and {mib:.1f} MiB over {num} recoveries"
            for role, (num, fds, mib) in self.growth().items()
            if fds > MAX_MORE_FDS or mib > MAX_MORE_MIB
        ]

    def __str__(self) -> str:
        grown = (f"{role} {fds:+d} fds {mib:+.1f} MiB" for role, (_, fds, mib) in self.growth().items())
        return ", ".join(grown)


def descendants(pid: int) -> list[int]:
    """All processes under one that lives."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                found += [child, *descendants(child)]
    return found


def processes_in(run_dir: Path) -> list[tuple[int, str]]:
    """(pid, command line) of every process that works in the directory of a run."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink() == run_dir:
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append((int(process.name), line))
    return found

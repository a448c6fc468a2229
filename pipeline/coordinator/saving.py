"""Checkpoints while the loop goes on: between two turns the books are only held fast, which copies no rollout and no
record, and a thread encodes, writes, syncs and publishes them beside the turns that follow.

From that moment on the journal goes on in a segment of its own. A crash before the checkpoint is published goes on from
the one before it and repeats both segments, as if this one had never been begun. The segment that leads to a checkpoint
is not synced for it: the checkpoint holds what came of that, and the segment, where rollouts are long, is all the bytes
that the disk can take.
"""

from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from pipeline import checkpoints
from pipeline.checkpoints import Snapshot
from pipeline.config import dump_config
from pipeline.coordinator.flow import AttemptFlow
from pipeline.coordinator.journal import Configured
from pipeline.coordinator.recovery import take_snapshot
from pipeline.manifest import sync
from pipeline.tasks.base import TaskSource


class Copy(msgspec.Struct, frozen=True):
    """The books at one version; segment `journal` of the journal goes on from them."""

    snapshot: Snapshot
    directory: Path  # with the learner's part
    journal: int
    num_ended: int


class Saver:
    """One checkpoint at a time."""

    def __init__(self, run_dir: Path, executor: Executor | None = None):
        """`executor` writes; a thread by default."""
        self._run_dir = run_dir
        self._executor = executor or ThreadPoolExecutor(1, "checkpoints")
        self.newest = -1  # version that a checkpoint was published of, or that the run goes on from
        self._copy: Copy | None = None
        self._written: Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        return self._copy is not None

    def begin(self, flow: AttemptFlow, task: TaskSource, partial: Path) -> None:
        """Hold the books fast, when the learner has written its part of the checkpoint into `partial`. Not while
        `is_busy`.
        """
        assert self._copy is None
        journal = flow.journal
        journal.begin_segment()
        snapshot, directory = take_snapshot(flow, task), checkpoints.take_over(partial)
        self._copy = Copy(snapshot, directory, journal.serial, flow.ledger.num_ended)
        journal.write(Configured(dump_config(flow.config)))

    def look(self, flow: AttemptFlow) -> int | None:
        """Go on with what was begun, once a turn; the version of the checkpoint that has just been published, if one
        was. What is no longer needed is forgotten then.
        """
        if self._copy is None:
            return None
        if self._written is None:
            # The snapshot does not hold what ended before it, so a checkpoint counts on the ledger for that.
            if not flow.ledger.has_written(self._copy.num_ended):
                return None
            self._written = self._executor.submit(self._write, self._copy, flow.ledger.log_path)
        return self._conclude(flow) if self._written.done() else None

    def finish(self, flow: AttemptFlow) -> int | None:
        """The same, and wait for it: in the middle of a turn, of which a crash meanwhile must lose nothing."""
        flow.journal.flush()
        flow.ledger.commit()
        version = self.look(flow)
        return self._conclude(flow) if self.is_busy else version

    def _write(self, copy: Copy, ledger_log: Path) -> None:
        if ledger_log.exists():
            sync(ledger_log)
        checkpoints.publish(self._run_dir, copy.directory, copy.snapshot)

    def _conclude(self, flow: AttemptFlow) -> int:
        assert self._copy is not None and self._written is not None
        self._written.result()
        copy, self._copy, self._written = self._copy, None, None
        version = copy.snapshot.policy_version
        flow.journal.drop_before(copy.journal, is_again=version == self.newest)
        self.newest = version
        oldest = checkpoints.oldest_step(self._run_dir)
        flow.ledger.prune(min(oldest, version - flow.config.daemon.ledger_keep_steps))
        return version

    def close(self) -> None:
        """What is being written is finished."""
        self._executor.shutdown()

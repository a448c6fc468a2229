"""Saving and coming back: a checkpoint is the books at one policy version, the journal what happened after it.

After a crash the books return to the last journaled moment. Only the learner is older: it stands at the checkpoint, so
the batches it had taken since are trained again first, in the same order, before anything new is launched.
"""

from collections.abc import Callable
from copy import deepcopy

from pipeline.checkpoints import Snapshot
from pipeline.config import Config, parse_config
from pipeline.coordinator.flow import AttemptFlow
from pipeline.coordinator.journal import Configured, Emptied, Entry, Judged, Proposed, Replaced, Stepped, Taken
from pipeline.errors import NguError
from pipeline.tasks.base import TaskSource


def take_snapshot(flow: AttemptFlow, task: TaskSource) -> Snapshot:
    """The books now; they continue in the journal's present segment."""
    flow.tally.fold()
    return Snapshot(
        policy_version=flow.policy_version,
        counters=dict(flow.tally.counters),
        levels={level: list(counts) for level, counts in flow.tally.levels.items()},
        wall_s=flow.tally.wall_s,
        sampler=flow.sampler.state(),
        task=task.state(),
        book=flow.book.state(),
        batcher=flow.batcher.state(),
        pending=list(flow.pending),
        journal=flow.journal.serial,
        is_holding=flow.is_holding,
        starvation=deepcopy(flow.starvation.state),
    )


def recover(
    flow: AttemptFlow, task: TaskSource, snapshot: Snapshot | None, reconfigure: Callable[[Config], None]
) -> bool:
    """Bring `flow` to the last journaled moment after `snapshot` (None: after the start of the run).

    False when there is nothing to come back to. Raises NguError when journal and checkpoint do not fit.
    """
    config, version = flow.config, 0
    if snapshot is not None:
        version = flow.policy_version = snapshot.policy_version
        flow.sampler.restore(snapshot.sampler)
        task.restore(snapshot.task)
        flow.tally.restore(snapshot.counters, snapshot.levels, snapshot.wall_s)
        flow.batcher.restore(snapshot.batcher)
        flow.book.restore(snapshot.book)
        flow.pending.extend(snapshot.pending)
        flow.is_holding = snapshot.is_holding
        flow.starvation.state = snapshot.starvation
        flow.ledger.check_holds(snapshot.counters.get("launched", 0))
    judged = [result.rollout.attempt_id for result in flow.waiting()]
    flow.ledger.rewind(version, judged + list(flow.book.places))
    has_entries = False
    for entry in flow.journal.replay(snapshot.journal if snapshot is not None else 0):
        has_entries = True
        _apply(entry, flow, reconfigure)
    flow.tally.fold()
    flow.ledger.commit()
    flow.ledger.recount()
    flow.book.next_attempt_id = flow.ledger.next_attempt_id()
    flow.policy_version = version
    flow.starvation.take_alarm()  # what an alarm changed is journaled as such
    flow.work.clear()  # an engine gets what is still in flight once the learner has caught up
    if flow.config != config:
        reconfigure(config)
    return has_entries or snapshot is not None


def _apply(entry: Entry, flow: AttemptFlow, reconfigure: Callable[[Config], None]) -> None:
    match entry:
        case Configured(config):
            reconfigure(parse_config(config, "journal"))
        case Proposed(first_id, num_attempts):
            flow.book.next_attempt_id = first_id
            flow.is_holding = False  # or nothing had been launched
            flow.propose()
            if flow.book.next_attempt_id != first_id + num_attempts:
                raise NguError(
                    "the sampler repeats other launches than the journal holds; delete RUN/journal to go on from the "
                    "checkpoint alone"
                )
        case Judged(results):
            flow.settle(results)
        case Emptied(attempt_id):
            flow.leave_empty(attempt_id)
        case Replaced(attempt_id, new_id):
            flow.book.next_attempt_id = new_id
            flow.replace(attempt_id)
        case Taken():
            if groups := flow.cut_batch():
                flow.pending.append(groups)
        case Stepped(policy_version, holds, ratio_mean, lag_mean):
            flow.policy_version = policy_version
            flow.starvation.stepped(ratio_mean, lag_mean)
            flow.is_holding |= holds
            flow.batcher.consumed()

"""How much of what waits and runs, for whoever looks at a run."""

from pipeline.coordinator.flow import AttemptFlow


def queues(flow: AttemptFlow) -> dict[str, int]:
    return {
        "launch": flow.work.num_waiting,
        "in_flight": flow.work.num_held,
        "verify": flow.jobs.num_waiting + flow.jobs.num_held,
        "open_chains": len(flow.book.chains),
        "groups": len(flow.batcher.groups),
    }


def untrained(flow: AttemptFlow) -> dict[str, float]:
    """What stands between launch and learner now, the batch in training left out: attempts that engines run; attempts
    that ended and whose verdict or siblings are awaited, and the tokens of those judged; what waits to be trained, in
    batches. The lag model (`bench.lag_model`) takes it at each new version. An evaluation's rollouts count only where
    engines run them.
    """
    num_eval = flow.evaluation.num_missing if flow.evaluation is not None else 0
    unjudged = len(flow.book.places) - num_eval
    held = flow.jobs.num_waiting + flow.jobs.num_held
    ended = max(flow.book.num_in_flight - unjudged, 0) + held
    return {
        "running": flow.work.num_held,
        "ended": ended,
        "ended_tokens": flow.book.num_ended_tokens,
        "batches": flow.batcher.num_untaken / flow.config.learner.batch_size,
    }

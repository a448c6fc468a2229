"""What a rollout costs in counts, which a busy machine does not change: messages, statements, copies.

Each bound is a little above what the code does today, so that one more message, statement or copy a rollout fails.
Decode steps a token are counted in test_embedded_engine.py, forward passes of the learner in test_learner_memory.py.
"""

import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fakes import Simulation

from pipeline.config import Config, parse_config
from pipeline.messages import FromPeer, Rollout, Rollouts, VersionSpan, pack_ids, pack_logprobs

STEPS, BATCH = 12, 64


class Counting(Simulation):
    """Counts the messages of each kind in both directions, and the ledger's statements."""

    def __init__(self, run_dir: Path, config: Config):
        self.messages: Counter[str] = Counter()
        self.statements: Counter[str] = Counter()
        self.num_turns = 0
        super().__init__(run_dir, config)
        self.ledger._db.set_trace_callback(lambda sql: self.statements.update([sql.split()[0]]))

    def receive(self, timeout_s: float) -> list[tuple[str, Any]]:
        self.num_turns += 1
        received = super().receive(timeout_s)
        self.messages.update(type(message).__name__ for _, message in received)
        return received

    def send(self, name: str, message: Any) -> bool:
        self.messages[type(message).__name__] += 1
        return super().send(name, message)


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Counting:
    raw = {
        "max_steps": STEPS,
        "max_rollouts": 0,
        "engines": {"slots": 64},
        "learner": {"batch_size": BATCH},
        "sampler": {"kind": "fixed", "num_rollouts": 4},
        "staleness": {"max_lag": 2},
        "eval": {"every_steps": 0, "final_num_rollouts": 1},
        "daemon": {"checkpoint_every_steps": 0},
    }
    run = Counting(tmp_path_factory.mktemp("counted"), parse_config(raw, "test"))
    run.run()
    return run


def test_messages_a_rollout(counted):
    launched = counted.ledger.counts["launched"]
    # What ends in one turn travels in one message.
    by_rollout = sum(counted.messages[kind] for kind in ("WorkItems", "Rollouts", "VerifyJobs", "Judgements"))
    assert by_rollout <= 0.7 * launched
    # A batch, its step, the weights, that they are loaded, the request for the next batch.
    kinds = ("Batch", "StepDone", "NewWeights", "WeightsLoaded", "BatchRequest")
    assert sum(counted.messages[kind] for kind in kinds) <= 5 * (STEPS + 2)


def test_statements_an_attempt(counted):
    launched = counted.ledger.counts["launched"]
    counted.ledger.commit()
    # One for its launch, one for its verdict and fate; one a commit counts the launches.
    commits = counted.statements["COMMIT"]
    assert counted.statements["INSERT"] + counted.statements["UPDATE"] <= 2 * launched + commits + 4
    assert commits == counted.statements["BEGIN"] <= counted.num_turns
    assert counted.statements["SELECT"] <= 4, "never by attempt"


def rollouts(num: int, num_tokens: int) -> tuple[Rollouts, int]:
    """Rollouts of random tokens, and the bytes of their arrays."""
    rng = np.random.default_rng(0)
    ids, logprobs = rng.integers(0, 1000, (num, num_tokens)), -rng.random((num, num_tokens))
    spans = (VersionSpan(0, 3),)
    made = tuple(
        Rollout(i, i, 0, pack_ids([1, 2]), pack_ids(ids[i]), pack_logprobs(logprobs[i]), spans, "stop", "", "e", 0, 1)
        for i in range(num)
    )
    return Rollouts(made), 8 * num * num_tokens


def peak_bytes(function: Callable[[], Any]) -> int:
    """The most memory that a call holds at once beyond what there was."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_copies_a_batch():
    """The arrays are copied into a message and out of it, and never turned into lists of numbers."""
    message, payload = rollouts(8, 32_768)
    data = msgspec.msgpack.encode(message)
    assert len(data) <= 1.01 * payload
    assert peak_bytes(lambda: msgspec.msgpack.Decoder(FromPeer).decode(data)) <= 1.1 * payload
    assert peak_bytes(lambda: msgspec.msgpack.encode(message)) <= 1.3 * payload
    assert peak_bytes(lambda: [r.check() for r in message.rollouts]) <= 0.1 * payload
    assert peak_bytes(lambda: [r.completion_array() for r in message.rollouts]) <= 0.1 * payload

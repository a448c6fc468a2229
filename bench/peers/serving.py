"""What the sides of the transport benchmark share: a producer, a consumer, and a clock at the consumer.

A side runs in a process of its own and measures when a line of JSON asks it to. Only numpy and the standard library
are imported here, as the sides run in different environments.
"""

import json
import sys
import time
from typing import Any, Protocol

import numpy as np

PROMPT_TOKENS = 64
BYTES_PER_TOKEN = 3  # of text
WARM_UP_S = 0.15
PATIENCE_S = 120  # a producer on a busy machine takes long to start
# What may be on its way at once, like an engine's slots, and in bytes: without a bound a slow consumer's queue would
# grow, and pages fresh from the kernel would be measured instead.
MAX_ON_WAY, MAX_BYTES_ON_WAY = 512, 16 << 20


class Side(Protocol):
    def start(self, tokens: int) -> None:
        """Begin to produce rollouts of that many tokens."""
        ...

    def take(self) -> int:
        """Receive and decode what there is, at least one; how many rollouts it were. 0 when none came for a second."""
        ...

    def stop(self) -> None:
        """End the producer and forget what is on its way."""
        ...

    def close(self) -> None:
        """Leave no process and no file behind."""
        ...


def on_way(tokens: int) -> int:
    return max(8, min(MAX_ON_WAY, MAX_BYTES_ON_WAY // (11 * tokens)))


def rollout(tokens: int) -> dict[str, Any]:
    """A rollout as a plain object, what a library that pickles is given: arrays, not lists, which would be slower."""
    rng = np.random.default_rng(tokens)
    return {
        "attempt_id": 1,
        "chain_id": 1,
        "round": 0,
        "prompt_ids": rng.integers(0, 150_000, PROMPT_TOKENS, dtype=np.int32),
        "completion_ids": rng.integers(0, 150_000, tokens, dtype=np.int32),
        "engine_logprobs": -rng.random(tokens, dtype=np.float32),
        "version_spans": ((0, 7), (tokens // 2, 8)),
        "finish_reason": "stop",
        "text": "x" * (BYTES_PER_TOKEN * tokens),
        "engine_id": "engine-0",
        "started_ns": 1,
        "finished_ns": 2,
    }


def measure(side: Side, tokens: int, seconds: float) -> float:
    """Rollouts a second at the consumer, once they flow."""
    side.start(tokens)
    try:
        _some(side)
        warm = time.perf_counter() + WARM_UP_S
        while time.perf_counter() < warm:
            _some(side)
        count, started = 0, time.perf_counter()
        while (now := time.perf_counter()) < started + seconds:
            count += _some(side)
        return count / (now - started)
    finally:
        side.stop()


def _some(side: Side) -> int:
    """What has arrived, at least one rollout; raises TimeoutError when none does."""
    begun = time.perf_counter()
    while not (count := side.take()):
        if time.perf_counter() - begun > PATIENCE_S:
            raise TimeoutError(f"nothing has arrived for {PATIENCE_S} s")
    return count


def serve(side: Side) -> None:
    """Answer requests {"tokens", "seconds"} with {"rollouts_per_s"} until the input ends."""
    try:
        for line in sys.stdin:
            request = json.loads(line)
            print(json.dumps({"rollouts_per_s": measure(side, request["tokens"], request["seconds"])}), flush=True)
    finally:
        side.close()

"""The `Engine` seam: continuous batching behind five verbs, driven by one thread.

An engine is stepped, not awaited: the worker loop polls its socket between two calls of `step`, so weights and
cancellations take effect between two tokens and no lock is ever needed.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from pipeline.messages import Rollout, WeightsNotice, Work

# Engine and learner add float32 in different orders; a wrong or stale tensor is off by far more.
CANARY_TOLERANCE = 1e-3


class Failure(msgspec.Struct, frozen=True):
    """An attempt the engine could not run. Not retryable: the problem itself cannot run (its prompt is too long)."""

    attempt_id: int
    reason: str
    retryable: bool


class LoadReport(msgspec.Struct, frozen=True):
    """What a weight load did: seconds decoding stood still, and the canary's largest absolute logprob difference.

    Above `tolerance` the difference is more than rounding, and no token of these weights may leave the engine.
    `canary_s`: what the canary took, which is part of the stall where decoding waits for it.
    """

    policy_version: int
    stall_s: float
    canary_error: float
    tolerance: float = CANARY_TOLERANCE
    canary_s: float = 0.0

    @property
    def is_right(self) -> bool:
        return self.canary_error <= self.tolerance


class Engine(Protocol):
    """Generates rollouts; every implementation passes `tests/contract/test_engines.py`.

    Two things may be asked of a completion beside sampling it (`engines.requests.Request` keeps the books of both):

    - `work.prefix`: go on after these tokens. The engine reads prompt and prefix under its present weights, and the
      rollout that it returns begins with the prefix's tokens, logprobs and spans, untouched.
    - `work.interruption`: as soon as the completion has `position` tokens (at once, if a prefix is longer) and is not
      over, look at its text, once. Unless that holds `thought_end`, the tokens of `phrase` follow, whatever the policy
      would have said: they are a `ForcedSpan`, have logprob 0 and the version then serving, and do not end the
      completion. After them at most `answer_tokens` more are sampled. A prefix that holds forced tokens is not
      interrupted again.

    `max_new_tokens` bounds the sampled tokens of the whole completion in any case.

    An engine with a server of its own may lose it: `step` and `load_weights` then raise a retryable EngineError, once,
    with every attempt forgotten, and the engine wants weights again before it takes work.
    """

    slots: int

    @property
    def ready(self) -> bool:
        """Whether weights can be loaded now; False while a server starts. `load_weights` waits for it."""
        ...

    def submit(self, work: Sequence[Work]) -> None:
        """Accept attempts; those beyond the free slots wait inside. Needs weights to have been loaded once.

        Raises EngineError when the phrase of an interruption cannot be written in the model's vocabulary.
        """
        ...

    def cancel(self, attempt_ids: Sequence[int]) -> None:
        """Forget these attempts; nothing is returned for them. Unknown ids are ignored (they have just finished)."""
        ...

    def load_weights(self, notice: WeightsNotice) -> LoadReport:
        """Serve these weights from the next token on; requests in flight go on with their KV cache.

        Raises WeightError, with the old weights still serving, if the file is missing, torn or does not fit.
        """
        ...

    def step(self) -> list[Rollout | Failure]:
        """Advance every running request by one token; return what ended. Returns at once when nothing runs."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Attempts submitted and not yet returned or cancelled."""
        ...

    def stats(self) -> dict[str, float]:
        """Counters since start: `tokens`, `rollouts`, `decode_steps` where it sees them; gauge: `slots_used`."""
        ...

    def close(self) -> None: ...

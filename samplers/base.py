"""The `Sampler` protocol and the types it speaks.

A sampler is a deterministic state machine. It proposes launches, observes what came back and decides what becomes of
a chain. The same seed and the same outcomes in the same order give the same launches, in the daemon, in the lab and
in a replay, so nothing here may read a clock, a file or a global random state.
"""

from typing import Literal, Protocol

import msgspec


class Problem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One task for the policy; `problem_id` is stable across runs and restarts."""

    problem_id: str
    source: str
    prompt: str
    answer: str
    level: str = ""


class Launch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One round of a chain: `num_rollouts` rollouts of `problem`, the first `num_resumed` of them continuing those that
    the decision before set aside.

    `round` counts from 0; `ticket` is the launch order over the whole run.
    """

    chain_id: int
    round: int
    problem: Problem
    num_rollouts: int
    ticket: int
    num_resumed: int = 0


class Outcome(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A finished round: every rollout of it has a verdict other than `unknown`.

    `rewards`, `correct` and `truncated` are in launch order and have equal length, normally the launch's
    `num_rollouts`; fewer when a rollout could not be judged after repeated tries (it is then absent, never a failure).
    `lengths`, likewise, are in units of the run's max_new_tokens, so a truncated rollout that was never continued has
    length 1; where they are empty nothing can be continued. `num_tokens` are those that this round sampled.
    `oldest_version` is the oldest policy version of any token of the round and `learner_version` the learner's when
    the round finished: their difference is the age that retention rules judge.
    """

    chain_id: int
    round: int
    rewards: tuple[float, ...]
    correct: tuple[bool, ...]
    truncated: tuple[bool, ...]
    num_tokens: int
    oldest_version: int
    learner_version: int
    lengths: tuple[float, ...] = ()


Reason = Literal[
    "mixed",
    "improved",
    "solved",
    "all_wrong",
    "gave_up",
    "zero_variance",
    "retry",
    "unverifiable",
    "too_easy",
    "too_hard",
]


class Decision(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What becomes of a chain after an outcome.

    `train`: the chain closes and the rollouts at `keep` (indices over all its judged attempts in launch order)
    become one group. `drop`: the chain closes and nothing is trained. `retry`: the chain stays open and the sampler
    will propose another round of it. `reason` names the rule that decided and is counted in the metrics.
    A retry may set rollouts of the round that has just finished aside, by their indices in `resume`: they leave the
    chain, in which their verdicts do not count, and the next launch continues them.
    """

    chain_id: int
    action: Literal["train", "drop", "retry"]
    reason: Reason
    keep: tuple[int, ...] = ()
    resume: tuple[int, ...] = ()


class ProblemStream(Protocol):
    """An endless, resumable, deterministic stream of problems: a shuffled pass over a data set, again and again.

    `num_problems` is the number of distinct problems, or None for a generator that never repeats. A sampler that skips
    problems (pending, cooling down, retired) must give up after `num_problems` skips in a row instead of spinning.
    """

    @property
    def num_problems(self) -> int | None: ...

    def next_problem(self) -> Problem: ...


class Sampler(Protocol):
    """The policy that spends the rollout budget; built by `samplers.registry.make_sampler(config, stream, seed)`.

    The sampler does not own the stream's cursor: whoever built the stream saves and restores it beside `state()`.
    """

    def propose(self, budget: int) -> list[Launch]:
        """Launches worth about `budget` rollouts: stops once `budget` is used up, so the last launch may exceed it.

        Returns fewer, or none, when no problem is available. A budget of 0 or less gives no launch.
        """
        ...

    def observe(self, outcome: Outcome) -> list[Decision]:
        """Record a finished round; returns at least the decision on that chain."""
        ...

    def abandon(self, chain_id: int) -> None:
        """Forget an open chain that the pipeline had to close (its rollouts could not be produced or judged)."""
        ...

    def stats(self) -> dict[str, float]:
        """Gauges for the dashboard, such as pending chains and the share of retries in flight."""
        ...

    def state(self) -> dict[str, object]:
        """Everything needed to go on, for msgpack to encode: values that nothing the sampler does later changes, since
        they are encoded beside it. What is frozen is shared, so that this is cheap.
        """
        ...

    def restore(self, state: dict[str, object]) -> None:
        """Become the sampler that returned `state`, which may have been encoded and decoded meanwhile; launches in
        flight then are in flight now.
        """
        ...

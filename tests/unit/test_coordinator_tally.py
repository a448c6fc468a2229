"""What a run trains of what it launches and finishes, by level and by length."""

import msgspec
from learner_samples import make_group, make_rollout

from pipeline.coordinator.tally import Tally
from samplers.base import Launch, Outcome, Problem


def rollout(num_tokens: int):
    return make_rollout([3], [4] * num_tokens, [-1.0] * num_tokens)


def outcome(rewards):
    flags = tuple(bool(r) for r in rewards)
    return Outcome(0, 0, tuple(rewards), flags, tuple(False for _ in rewards), 10, 0, 0)


def test_trained_shares_fall_where_long_or_hard_rollouts_are_lost():
    tally = Tally(clock=lambda: 0.0)
    for level in ("1", "2"):
        tally.launched(Launch(0, 0, Problem("p", "test", "1", "1", level), 4, 0))
    short, long = [rollout(5), rollout(7)], [rollout(16), rollout(31)]
    tally.round("1", outcome([1.0, 0.0, 1.0, 0.0]), [*short, *long])
    tally.round("2", outcome([0.0, 0.0]), [rollout(20), rollout(0)])
    group = make_group([*short, long[0]], [1.0, 0.0, 1.0])
    tally.trained([msgspec.structs.replace(group, problem=Problem("p", "test", "1", "1", "1"))])
    shares = {name: value for name, value in tally.step_metrics({}).items() if name.startswith("trained_over")}
    assert shares == {
        "trained_over_launched/1": 3 / 4,
        "trained_over_launched/2": 0.0,
        "trained_over_finished/1_tokens": 0.0,
        "trained_over_finished/4_tokens": 1.0,
        "trained_over_finished/16_tokens": 1 / 3,
    }

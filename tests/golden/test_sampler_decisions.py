"""Every launch and decision of long random histories, pinned by a hash: making a sampler faster must change none.

`python tests/golden/test_sampler_decisions.py` prints the hashes of the code as it is, for a change that is meant.
"""

import hashlib
import random
from collections.abc import Sequence

import msgspec
import pytest

from samplers.base import Decision, Launch, Outcome, Problem
from samplers.registry import SamplerConfig, make_sampler

NUM_STEPS = 4000
REMEMBERING = {"cool_down": 2, "retire_at": 0.8, "retire_min_attempts": 24}

# What is run, on how many problems (None: an endless stream), and the hash of all that it did.
CASES: dict[str, tuple[dict[str, object], int | None, str]] = {
    "never give up": ({"kind": "never_give_up"}, 300, "474edb2805c527f4"),
    "never give up, endless": ({"kind": "never_give_up"}, None, "1722c9e92e0c1dba"),
    "never give up, as published": (
        {"kind": "never_give_up", "retry": "probability", "p_ngu": 0.9, "max_attempts": 0, "keep_versions": 4},
        300,
        "9f2707b5e898f027",
    ),
    "never give up, coin": (
        {"kind": "never_give_up", "retry": "probability", "p_ngu": 0.6, "round_size": 3, "max_attempts": 20},
        None,
        "18a8e5547631c85f",
    ),
    "never give up, different": (
        {"kind": "never_give_up", "accept": "different", "max_retry_frac": 0.3, "keep_failures": 2},
        60,
        "5ddb20c8f46fa0da",
    ),
    "never give up, solved": (
        {"kind": "never_give_up", "accept": "solved", "max_waiting": 8, "history": REMEMBERING},
        300,
        "0492ee1a5019d5e4",
    ),
    "never give up, history": (
        {"kind": "never_give_up", "accept": "history", "keep_versions": 1, "keep_failures": 0},
        60,
        "aabe6d33d68b80d0",
    ),
    "fixed": ({"kind": "fixed", "history": REMEMBERING}, 300, "b5ac933ce91722ae"),
    "seq_balance": ({"kind": "reinforce_ada", "rule": "seq_balance"}, 300, "eda8d042d1d025ca"),
    "est": ({"kind": "reinforce_ada", "rule": "est"}, 300, "32eb223bbbc60be0"),
    "gvm": ({"kind": "gvm", "history": REMEMBERING}, 300, "9cf6c360314c55de"),
    "knapsack": ({"kind": "knapsack"}, 300, "72aafac04434ede0"),
    "greso": ({"kind": "greso"}, 300, "13c341f952d70606"),
    "pilot_commit": ({"kind": "pilot_commit"}, 300, "3ff186ca0fe862a7"),
    "speed": ({"kind": "speed"}, None, "b33158e15eec3a90"),
    "isocompute": ({"kind": "isocompute"}, 300, "7275d3339951db02"),
}


class Stream:
    """Shuffled passes, or problems that never repeat."""

    def __init__(self, num_problems: int | None):
        self.num_problems = num_problems
        self._drawn = 0
        self._order = list(range(num_problems or 0))

    def next_problem(self) -> Problem:
        index = self._drawn
        if self.num_problems:
            index %= self.num_problems
            if index == 0:
                random.Random(self._drawn).shuffle(self._order)
            index = self._order[index]
        self._drawn += 1
        return Problem(str(index), "golden", f"prompt {index}", "", f"level {index % 3}")


def fate(settings: dict[str, object], num_problems: int | None) -> str:
    """Play `NUM_STEPS` random steps; the hash of every launch, decision and gauge in order."""
    rng = random.Random(str(settings))
    sampler = make_sampler(msgspec.convert(settings, SamplerConfig), Stream(num_problems), 7)
    digest = hashlib.blake2b(digest_size=8)
    in_flight: list[Launch] = []
    version = 0
    for step in range(NUM_STEPS):
        launches = sampler.propose(rng.choice((0, 1, 1, 4, 17, 64)) if len(in_flight) < 40 else 0)
        in_flight += launches
        digest.update(_encoded(launches))
        version += rng.random() < 0.1
        for _ in range(rng.randrange(4)):
            if not in_flight:
                break
            launch = in_flight.pop(rng.randrange(len(in_flight)))
            if rng.random() < 0.02:
                sampler.abandon(launch.chain_id)
            else:
                digest.update(_encoded(sampler.observe(_outcome(launch, version, rng))))
        if step % 100 == 0:
            digest.update(msgspec.json.encode(sampler.stats()))
    return digest.hexdigest()


def _encoded(items: Sequence[Launch | Decision]) -> bytes:
    """Without the last field, which says what is gone on with: the outcomes here have no lengths, so nothing is."""
    fields = [msgspec.to_builtins(item) for item in items]
    assert all(last in (0, ()) for *_, last in fields)
    return msgspec.json.encode([f[:-1] for f in fields])


def _outcome(launch: Launch, version: int, rng: random.Random) -> Outcome:
    """Problems from never to always solved, a third of them graded; now and then a rollout that nobody could judge."""
    index = int(launch.problem.problem_id)
    rate = (index % 11) / 10 * 0.9 ** (index % 7)
    num_judged = launch.num_rollouts if rng.random() < 0.95 else rng.randrange(launch.num_rollouts + 1)
    correct = tuple(rng.random() < rate for _ in range(num_judged))
    partial = (0.0, 0.0, 0.25, 0.5, 0.1 + 0.2, 0.3) if index % 3 == 0 else (0.0,)
    rewards = tuple(1.0 if right else rng.choice(partial) for right in correct)
    oldest = max(0, version - rng.randrange(6))
    tokens = sum(rng.randrange(1, 40) for _ in range(num_judged))
    return Outcome(launch.chain_id, launch.round, rewards, correct, (False,) * num_judged, tokens, oldest, version)


@pytest.mark.parametrize("name", CASES)
def test_no_launch_and_no_decision_has_changed(name: str):
    settings, num_problems, expected = CASES[name]
    assert fate(settings, num_problems) == expected


if __name__ == "__main__":
    for name, (settings, num_problems, _) in CASES.items():
        print(f"{name}: {fate(settings, num_problems)}")

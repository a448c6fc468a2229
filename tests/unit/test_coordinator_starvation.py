"""The collapse in which completions drift up to the length limit: seen early, acted on, not seen where it is not."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
from fakes import Simulation

from pipeline.checkpoints import latest
from pipeline.config import Config, parse_config
from pipeline.coordinator.starvation import LEAST_RETRY_FRAC, MAX_SEQ_MULTIPLIER, StarvationGuard, relieved
from pipeline.engines.fake import FakeScript
from pipeline.errors import ConfigError
from pipeline.rundir import read_config

MAX_TOKENS = 60
DRIFT_FROM = 24  # the step from which lengths grow


def config(**changes: Any) -> Config:
    raw = {
        "max_rollouts": 4800,
        "engines": {"slots": 48},
        "learner": {"batch_size": 64},
        "sampling": {"max_new_tokens": MAX_TOKENS},
        "staleness": {"max_lag": 2},
        "eval": {"every_steps": 0, "final_num_rollouts": 1},
        "daemon": {"checkpoint_every_steps": 7},
    }
    return parse_config(raw | changes, "test")


class Drifting:
    """A run whose completions grow by `growth` a step; the mean ratio then falls to 0.9 over 20 steps."""

    def __init__(self, path: Path, cfg: Config, growth: float = 1.06, median: float = 20.0, resume: Path | None = None):
        self.growth, self.median = growth, median
        script = FakeScript(lambda p: 0.7 if p.level == "easy" else 0.1, length=self._length)
        self.run = Simulation(path, cfg, script=script, step_turns=2, ratio=self._ratio, resume=resume)

    @property
    def _drift(self) -> int:
        return max(0, self.run.version - DRIFT_FROM)

    def _length(self, rng: random.Random) -> int:
        median = self.median * self.growth**self._drift
        return max(1, round(rng.lognormvariate(math.log(median), 0.4)))

    def _ratio(self, step: int) -> float:
        return 1.0 - (0.1 * min(self._drift, 20) / 20 if self.growth > 1 else 0.0)

    def warnings(self) -> list[dict[str, Any]]:
        return self.run.sink.of_kind("warning")

    def alarms(self) -> list[dict[str, Any]]:
        return [w for w in self.warnings() if "about to starve" in w["text"]]


def test_the_collapse_is_seen_before_the_learner_starves(tmp_path):
    drifting = Drifting(tmp_path, config())
    drifting.run.run()
    drifting.run.ledger.close()
    starved = [w for w in drifting.warnings() if "so the learner starves" in w["text"]]
    first, last = drifting.alarms()[0], starved[0]
    assert DRIFT_FROM < first["step"] <= last["step"] - 5
    assert last["rollouts"] - first["rollouts"] > 5 * 64
    assert "of rollouts are truncated" in first["text"] and "(guards.starvation)" in first["text"]
    assert drifting.run.coordinator.config == drifting.run.config, "it was only asked to warn"
    steps = drifting.run.sink.of_kind("step")
    signs = {r["step"]: r["metrics"]["guard/starvation_signs"] for r in steps}
    assert signs[DRIFT_FROM] == 0 and signs[steps[-1]["step"]] >= 3
    assert steps[-1]["metrics"]["guard/truncated_frac"] > 0.8


@pytest.mark.parametrize("median", [20.0, 50.0])
def test_a_run_whose_lengths_stay_is_left_alone(tmp_path, median):
    """Also one that has always been cut off often and fails at most of its problems."""
    drifting = Drifting(tmp_path, config(max_rollouts=4000), growth=1.0, median=median)
    drifting.run.run()
    drifting.run.ledger.close()
    assert drifting.alarms() == []
    truncated = [r["metrics"].get("guard/truncated_frac", 0.0) for r in drifting.run.sink.of_kind("step")]
    assert (truncated[-1] > 0.25) == (median == 50.0)


def test_reactions_are_settings_that_survive_a_kill(tmp_path):
    cfg = config(guards={"starvation": ["throttle_retries", "lower_lag", "continue_truncated"]})
    drifting = Drifting(tmp_path, cfg)
    run = drifting.run
    while not drifting.alarms():
        run.turn()
    changed, sampler = run.coordinator.config, run.coordinator.sampler.state()
    assert changed.staleness.max_lag == 1 and changed.sampler.max_retry_frac == 0.375
    assert changed.sampler.seq_multiplier == 2
    assert "staleness.max_lag: 2 -> 1" in drifting.alarms()[0]["text"]
    assert read_config(tmp_path) == changed
    guard = run.coordinator.flow.starvation.state
    run.ledger._db.close()  # as a kill does
    again = Drifting(tmp_path, read_config(tmp_path), resume=latest(tmp_path)).run
    assert again.coordinator.config == changed
    assert again.coordinator.sampler.state() == sampler
    assert again.coordinator.flow.starvation.state == guard
    again.run()
    again.ledger.close()


def test_each_reaction_goes_one_notch_and_comes_to_an_end():
    every = ["throttle_retries", "lower_lag", "continue_truncated"]
    cfg, texts = config(guards={"starvation": every}), []
    while True:
        cfg, changes = relieved(cfg)
        if not changes:
            break
        texts += changes
    assert cfg.staleness.max_lag == 1 and cfg.sampler.max_retry_frac == LEAST_RETRY_FRAC
    assert texts[:3] == [
        "sampler.max_retry_frac: 0.75 -> 0.375",
        "staleness.max_lag: 2 -> 1",
        "sampler.seq_multiplier: 1 -> 2",
    ]
    assert cfg.sampler.seq_multiplier == MAX_SEQ_MULTIPLIER
    fixed = config(guards={"starvation": ["throttle_retries", "continue_truncated"]}, sampler={"kind": "fixed"})
    assert relieved(fixed) == (fixed, [])


def test_continuing_what_an_interruption_ends_is_refused():
    sampling = {"max_new_tokens": 60, "interruption": {"min_tokens": 10, "max_tokens": 20, "answer_tokens": 9}}
    with pytest.raises(ConfigError, match="continue_truncated"):
        config(guards={"starvation": ["continue_truncated"]}, sampling=sampling)


def test_a_refused_step_leaves_the_running_means_alone():
    guard = StarvationGuard(64)
    guard.stepped(math.nan, 1.0)
    guard.stepped(0.9, 1.0)
    assert guard.gauges()["ratio_mean"] == pytest.approx(0.97)


@pytest.mark.parametrize("is_barren", [False, True])
def test_rounds_much_larger_than_a_batch_are_no_starvation_unless_they_teach_nothing(tmp_path, is_barren):
    """A round of 64 fills four batches, and its one group, if it has one, is in the first of them."""
    cfg = config(
        max_rollouts=64 * 40,
        engines={"slots": 128},
        learner={"batch_size": 16},
        sampler={"kind": "fixed", "num_rollouts": 64},
    )
    run = Simulation(tmp_path, cfg, script=FakeScript(lambda p: 0.0 if is_barren or p.level == "hard" else 0.3))
    run.run()
    run.ledger.close()
    starved = [w["text"] for w in run.sink.of_kind("warning") if "starve" in w["text"]]
    assert len(starved) == is_barren, starved


def test_a_few_large_rounds_that_teach_nothing_are_chance_and_many_are_not():
    guard = StarvationGuard(batch_size=32)
    for _ in range(30):
        guard.stepped(ratio_mean=0.9, lag_mean=0.0)  # one sign, which alone says little

    def judge(rounds: list[int]) -> None:
        for is_trained in rounds:
            guard.round([False] * 512, 512 * is_trained, max_lag=1)

    judge(40 * [1, 1, 1, 1, 0, 0, 0, 0])
    assert guard.take_alarm() == ""
    judge(64 * [0])
    assert "of attempts train nothing" in guard.take_alarm()

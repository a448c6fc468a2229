"""Sees a run starve before it does.

The collapse that this is for: completions drift up to the length limit and come back truncated, so every group is all
wrong and is filtered, and the learner gets nothing any more. Each figure on its own has harmless causes (hard problems,
mastered problems, a slow learner); they are a sign when several move at once.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pipeline.config import Config
from pipeline.control import changed_live
from pipeline.room import MAX_SEQ_MULTIPLIER

MIN_PERIOD = 256  # attempts: fewer, and the shares of a window are noise
MIN_ROUNDS = 16  # as well: the attempts of one are alike, of one problem, and are trained together or not at all
WINDOW_PERIODS = 4
# After an alarm the window has to fill again before the next: a reaction shows in what is launched after it.
QUIET_PERIODS = 2 * WINDOW_PERIODS
NUM_SIGNS = 2

MIN_TRUNCATED, TRUNCATED_RISE, MAX_TRUNCATED = 0.2, 0.15, 0.5
MIN_UNTRAINED, UNTRAINED_RISE, MAX_UNTRAINED = 0.5, 0.2, 0.95
# The mean importance ratio is 1 in expectation and fell to 0.9 within some 20 steps before the collapse.
RATIO_DRIFT = 0.03
STEP_WEIGHT = 0.3  # of the newest step in the running means of ratio and lag

STARVED_BATCHES = 3

LEAST_MAX_LAG = 1  # 0 would make the run synchronous
LEAST_RETRY_FRAC = 1 / 16


class Period(msgspec.Struct, array_like=True):
    """Judged attempts, those of them that were truncated, the rollouts of the groups that they closed, and how many
    rounds they came in.
    """

    attempts: int = 0
    truncated: int = 0
    trained: int = 0
    rounds: int = 0


class StarvationState(msgspec.Struct):
    """`least_truncated` and `least_untrained` are the shares of the healthiest window so far."""

    current: Period = msgspec.field(default_factory=Period)
    window: list[Period] = msgspec.field(default_factory=list)
    least_truncated: float = 1.0
    least_untrained: float = 1.0
    ratio_mean: float = 1.0
    lag_mean: float = 0.0
    quiet: int = 0


class Signs(NamedTuple):
    truncated: bool
    untrained: bool
    ratio: bool
    lag: bool


class StarvationGuard:
    """Fed with every judged round and every step, also by a recovery, so that a new life sees what the last one saw."""

    def __init__(self, batch_size: int, state: StarvationState | None = None):
        self._period = max(batch_size, MIN_PERIOD)
        self._signs = Signs(False, False, False, False)
        self._alarm = ""
        self.state = state or StarvationState()

    def round(self, truncated: Sequence[bool], num_trained: int, max_lag: int) -> None:
        """A round was judged; the group that it closed, if any, has `num_trained` rollouts."""
        current = self.state.current
        current.attempts += len(truncated)
        current.truncated += truncated.count(True)
        current.trained += num_trained
        current.rounds += 1
        if current.attempts >= self._period and current.rounds >= MIN_ROUNDS:
            self._end_period(max_lag)

    def stepped(self, ratio_mean: float, lag_mean: float) -> None:
        state = self.state
        if not math.isfinite(ratio_mean):
            return  # a step that was refused for it; the mean would never be a number again
        state.ratio_mean += STEP_WEIGHT * (ratio_mean - state.ratio_mean)
        state.lag_mean += STEP_WEIGHT * (lag_mean - state.lag_mean)

    def take_alarm(self) -> str:
        """What is wrong, once; empty when nothing new is."""
        alarm, self._alarm = self._alarm, ""
        return alarm

    def gauges(self) -> dict[str, float]:
        shares = {} if not self.state.window else {"truncated_frac": self._truncated, "untrained_frac": self._untrained}
        return shares | {"starvation_signs": float(sum(self._signs)), "ratio_mean": self.state.ratio_mean}

    @property
    def _truncated(self) -> float:
        window = self.state.window
        return sum(p.truncated for p in window) / sum(p.attempts for p in window)

    @property
    def _untrained(self) -> float:
        window = self.state.window
        return max(0.0, 1.0 - sum(p.trained for p in window) / sum(p.attempts for p in window))

    def _end_period(self, max_lag: int) -> None:
        state = self.state
        state.window = [*state.window[1 - WINDOW_PERIODS :], state.current]
        state.current = Period()
        state.quiet = max(0, state.quiet - 1)
        self._signs = self._read_signs(max_lag)
        if sum(self._signs) >= NUM_SIGNS and not state.quiet:
            self._alarm = self._describe(max_lag)
            state.quiet = QUIET_PERIODS
        if len(state.window) == WINDOW_PERIODS:
            state.least_truncated = min(state.least_truncated, self._truncated)
            state.least_untrained = min(state.least_untrained, self._untrained)

    def _read_signs(self, max_lag: int) -> Signs:
        state, truncated, untrained = self.state, self._truncated, self._untrained
        if len(state.window) < WINDOW_PERIODS:
            return Signs(False, False, False, False)
        return Signs(
            truncated=truncated >= max(MIN_TRUNCATED, min(state.least_truncated + TRUNCATED_RISE, MAX_TRUNCATED)),
            untrained=untrained >= max(MIN_UNTRAINED, min(state.least_untrained + UNTRAINED_RISE, MAX_UNTRAINED)),
            ratio=abs(state.ratio_mean - 1.0) >= RATIO_DRIFT,
            lag=state.lag_mean > max_lag,
        )

    def _describe(self, max_lag: int) -> str:
        state = self.state
        words = (
            f"{self._truncated:.0%} of rollouts are truncated",
            f"{self._untrained:.0%} of attempts train nothing",
            f"the mean importance ratio is {state.ratio_mean:.3f}",
            f"the mean lag is {state.lag_mean:.1f} at staleness.max_lag = {max_lag}",
        )
        return ", ".join(text for text, is_on in zip(words, self._signs, strict=True) if is_on)


class Famine:
    """Batches in a row that held nothing to train on."""

    def __init__(self):
        self._num_batches = self._num_rounds = 0

    def taken(self, num_groups: int, num_rounds: int) -> str:
        """A batch was cut of so many rounds. What to say when with it the learner starves, once."""
        if num_groups:
            self._num_batches = self._num_rounds = 0
            return ""
        was_on = self._is_on
        self._num_batches += 1
        self._num_rounds += num_rounds
        if was_on or not self._is_on:
            return ""
        return (
            f"{self._num_batches} batches in a row held nothing to train on: every group was all right, all wrong or "
            "stale, so the learner starves; change the problems, max_new_tokens or the sampler"
        )

    @property
    def _is_on(self) -> bool:
        """A round larger than a batch leaves batches empty behind it, so rounds have to be many as well."""
        return self._num_batches >= STARVED_BATCHES and self._num_rounds >= MIN_ROUNDS


def relieved(config: Config) -> tuple[Config, list[str]]:
    """`config` one notch further in every way that `guards.starvation` names, and each change as `ngu ctl set` says it.

    A way that the sampler does not know, or that has come to its end, changes nothing.
    """
    changes = []
    for reaction in config.guards.starvation:
        sampler, lag = config.sampler, config.staleness.max_lag
        retry_frac = getattr(sampler, "max_retry_frac", 0.0)
        multiplier = getattr(sampler, "seq_multiplier", MAX_SEQ_MULTIPLIER)
        setting = ""
        if reaction == "throttle_retries" and retry_frac > LEAST_RETRY_FRAC:
            setting = f"sampler.max_retry_frac={max(retry_frac / 2, LEAST_RETRY_FRAC)}"
        elif reaction == "lower_lag" and lag > LEAST_MAX_LAG:
            setting = f"staleness.max_lag={lag - 1}"
        elif reaction == "continue_truncated" and multiplier < MAX_SEQ_MULTIPLIER:
            setting = f"sampler.seq_multiplier={multiplier + 1}"
        if setting:
            config, change = changed_live(config, setting)
            changes.append(change)
    return config, changes

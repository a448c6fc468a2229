"""What the lab adds to a run's config: the table [lab]. Everything else means what it means to `ngu train`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from pipeline.config import Config, load_config
from pipeline.errors import ConfigError

Positive = Annotated[float, msgspec.Meta(gt=0.0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0.0)]
Probability = Annotated[float, msgspec.Meta(gt=0.0, lt=1.0)]
AtLeast1 = Annotated[int, msgspec.Meta(ge=1)]

# Share and pass rate of each level of the built-in job, as its shipped model was measured on it.
BUILTIN_LEVELS: dict[str, tuple[float, float]] = {
    **{f"+{n}": (0.17, p) for n, p in enumerate((0.84, 0.71, 0.61, 0.52, 0.46), start=1)},
    **{f"-{n}": (0.02, p) for n, p in enumerate((0.27, 0.12, 0.065, 0.055, 0.038), start=1)},
    **{f"*{n}": (0.01, p) for n, p in enumerate((0.023, 0.0025, 0.0075, 0.002, 0.005), start=1)},
}


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the lab's tables."""


class LevelsConfig(Table, frozen=True, tag_field="kind", tag="levels"):
    """`levels` maps a name to (share of the problems, pass rate), by default those of the built-in job; the logits of a
    level's problems are normal around its own, with standard deviation `spread`.
    """

    num_problems: AtLeast1 = 2000
    levels: dict[str, tuple[float, Probability]] = msgspec.field(default_factory=lambda: dict(BUILTIN_LEVELS))
    spread: NonNegative = 0.3

    def __post_init__(self):
        if not self.levels or min(share for share, _ in self.levels.values()) <= 0:
            raise ValueError("levels must hold at least one level, each with a share above 0")


class BetaConfig(Table, frozen=True, tag_field="kind", tag="beta"):
    """Pass rates from Beta(a, b); a = b below 1 is the two-humped shape of a data set that a model half knows."""

    num_problems: AtLeast1 = 2000
    a: Positive = 0.5
    b: Positive = 0.5


class LogUniformConfig(Table, frozen=True, tag_field="kind", tag="log_uniform"):
    """Pass rates uniform in their logarithm from `low` to `high`: equally many problems in every factor of ten."""

    num_problems: AtLeast1 = 2000
    low: Probability = 1e-3
    high: Probability = 0.9

    def __post_init__(self):
        if self.low > self.high:
            raise ValueError("low must not be above high")


class TwoPointConfig(Table, frozen=True, tag_field="kind", tag="two_point"):
    """A share `hard_frac` of the problems has pass rate `hard`, the others `easy`."""

    num_problems: AtLeast1 = 2000
    hard: Probability = 0.01
    easy: Probability = 0.5
    hard_frac: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.5


class FileConfig(Table, frozen=True, tag_field="kind", tag="file"):
    """A .csv or .jsonl file with columns `problem_id`, `pass_rate` and, if known, `level` and `tokens` (their mean)."""

    path: str


class LedgerConfig(Table, frozen=True, tag_field="kind", tag="ledger"):
    """The problems of a recorded run with the pass rates and lengths in its ledger.

    A pass rate is the posterior mean with the first-round rate of the problem's level as prior, worth
    `prior_strength` rollouts. A posterior, because the plain rate of a problem that was sampled until it was solved
    lies well above the truth.
    """

    run: str
    prior_strength: Positive = 4.0


class LadderConfig(Table, frozen=True, tag_field="kind", tag="ladder"):
    """Graded problems: `num_tests` tests each, the later the harder.

    A problem's probability p to pass all is log-uniform from `low` to `high`; the first m tests are passed with
    probability p^((m/num_tests)^steepness). `reward` pays the share of tests passed, only all of them, or the mean of
    the two. By default about as hard as the small Manufactoria job.
    """

    num_problems: AtLeast1 = 448
    num_tests: AtLeast1 = 12
    low: Probability = 1e-3
    high: Probability = 0.5
    steepness: Positive = 3.0
    reward: Literal["per_test", "all_pass", "mixed"] = "per_test"

    def __post_init__(self):
        if self.low > self.high:
            raise ValueError("low must not be above high")


PopulationConfig = (
    LevelsConfig | BetaConfig | LogUniformConfig | TwoPointConfig | FileConfig | LedgerConfig | LadderConfig
)


class LengthsConfig(Table, frozen=True):
    """Completion lengths are log-normal with standard deviation `spread` of the logarithm and median
    `median_tokens` (1 + `harder` (1 - pass rate)), cut at sampling.max_new_tokens.
    """

    median_tokens: Positive = 24.0
    spread: NonNegative = 0.35
    harder: NonNegative = 0.5


class TimingConfig(Table, frozen=True):
    """Tokens a second of one engine slot; a step takes `step_s` and its tokens at `learner_tokens_per_s`."""

    slot_tokens_per_s: Positive = 300.0
    step_s: NonNegative = 0.05
    learner_tokens_per_s: Positive = 20_000.0


class LearningConfig(Table, frozen=True):
    """How far a step moves the logits of the problems it trained (`own`), of their levels and of all (`shared`).

    The defaults are tuned by hand so that the built-in job's hard levels rise about as measured under fixed n = 8. 0,
    0, 0 keeps the population as it is, so that what is measured by difficulty stays put.
    """

    own: NonNegative = 0.0
    level: NonNegative = 0.3
    shared: NonNegative = 0.025


class LabTable(Table, frozen=True):
    """`hard_below`: the initial pass rate under which a problem counts as hard."""

    hard_below: Probability = 0.02
    population: PopulationConfig = msgspec.field(default_factory=LevelsConfig)
    lengths: LengthsConfig = msgspec.field(default_factory=LengthsConfig)
    timing: TimingConfig = msgspec.field(default_factory=TimingConfig)
    learning: LearningConfig = msgspec.field(default_factory=LearningConfig)


class LabConfig(Config, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A run in the lab. The lab reads `seed`, `max_steps`, `max_rollouts`, [sampler], [sampling] max_new_tokens,
    [engines] count and slots, [learner] batches, advantages, aggregation and the cap of ratios, [staleness] and [lab].
    """

    lab: LabTable = msgspec.field(default_factory=LabTable)


def load_lab_config(path: str | Path | None, overrides: Sequence[str] = ()) -> LabConfig:
    """Raises ConfigError."""
    config = load_config(path, overrides, LabConfig)
    assert isinstance(config, LabConfig)
    if config.staleness.policy == "pace" or config.learner.batch_order == "ticket":
        raise ConfigError('the lab has neither staleness.policy = "pace" nor learner.batch_order = "ticket"')
    return config

"""What a sampler remembers of every problem over all visits to it."""

from typing import Annotated

import msgspec

from samplers.base import Outcome

# A cool-down stops doubling here, so that a problem the policy has unlearnt is noticed again.
MAX_COOL_DOWN = 64


class HistoryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Problems that need no rollouts for a while, or ever again.

    After a visit whose first round is all correct the next `cool_down` times the stream offers that problem pass by;
    each such visit in a row doubles it, up to 64 (0 = off). A problem is dropped for good once its pass rate over all
    visits reaches `retire_at`, with `retire_min_attempts` attempts or more (ScaleRL's No-Positive-Resampling: 0.9).
    """

    cool_down: Annotated[int, msgspec.Meta(ge=0)] = 0
    retire_at: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] | None = None
    retire_min_attempts: Annotated[int, msgspec.Meta(ge=1)] = 16


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One problem; replaced as a whole, which costs less than writing its fields.

    `attempts` and `correct` count every judged rollout, `first_*` those of first rounds only.
    `solved_streak` is the number of visits in a row whose first round was all correct, `skips_left` how many more
    times the stream's offer passes by, `best_reward` the best ever seen.
    """

    visits: int = 0
    attempts: int = 0
    correct: int = 0
    first_attempts: int = 0
    first_correct: int = 0
    best_reward: float | None = None
    solved_streak: int = 0
    skips_left: int = 0
    retired: bool = False


UNKNOWN = Record()


class HistoryState(msgspec.Struct):
    records: dict[str, Record]
    first_attempts: int
    first_correct: int


class History:
    """One record for each problem met; owned, saved and restored by exactly one sampler.

    A stream without end (`num_problems` None) never repeats a problem, so nothing is recorded of it and memory stays
    flat; only the totals are kept.
    """

    def __init__(self, config: HistoryConfig, num_problems: int | None):
        self._config = config
        self._remembers = num_problems is not None
        self.records: dict[str, Record] = {}
        self._first_attempts = 0
        self._first_correct = 0
        self.num_retired = 0

    def observe(self, problem_id: str, outcome: Outcome, best: float) -> None:
        """Add a finished round with at least one judged rollout; `best` is its highest reward."""
        num, correct = len(outcome.correct), outcome.correct.count(True)
        is_first = outcome.round == 0
        if is_first:
            self._first_attempts += num
            self._first_correct += correct
        if not self._remembers:
            return
        old = self.records.get(problem_id, UNKNOWN)
        if old.best_reward is not None and old.best_reward > best:
            best = old.best_reward
        attempts, all_correct = old.attempts + num, old.correct + correct
        retired = old.retired
        if self._config.retire_at is not None and not retired and self._is_learnt(attempts, all_correct):
            retired = True
            self.num_retired += 1
        if is_first:
            streak = old.solved_streak + 1 if correct == num else 0
            visits, skips = old.visits + 1, self._cool_down(streak) if streak else 0
            first_num, first_correct = old.first_attempts + num, old.first_correct + correct
        else:
            visits, streak, skips = old.visits, old.solved_streak, old.skips_left
            first_num, first_correct = old.first_attempts, old.first_correct
        self.records[problem_id] = Record(
            visits, attempts, all_correct, first_num, first_correct, best, streak, skips, retired
        )

    def withdraw(self, problem_id: str, num_attempts: int) -> None:
        """Attempts of the last round that were not correct go on: what they are is not known yet. First-round rates
        keep them, as failures at the usual length.
        """
        if self._remembers:
            record = self.records[problem_id]
            self.records[problem_id] = msgspec.structs.replace(record, attempts=record.attempts - num_attempts)

    def pass_by(self, problem_id: str) -> int:
        """The stream's offer of a cooling problem is declined; how many more will be."""
        record = self.records[problem_id]
        self.records[problem_id] = msgspec.structs.replace(record, skips_left=record.skips_left - 1)
        return record.skips_left - 1

    def _cool_down(self, streak: int) -> int:
        """`cool_down`, doubled for each solved visit in a row after the first."""
        doublings = min(streak - 1, MAX_COOL_DOWN.bit_length())
        return min(self._config.cool_down << doublings, MAX_COOL_DOWN)

    def _is_learnt(self, attempts: int, correct: int) -> bool:
        """No-Positive-Resampling (ScaleRL, arXiv 2510.13786): a problem with a high historical pass rate is dropped for
        good. The rate is over all attempts of all visits.
        """
        config = self._config
        enough = attempts >= config.retire_min_attempts
        return config.retire_at is not None and enough and correct >= config.retire_at * attempts

    def posterior_mean(self, problem_id: str, prior_correct: float = 1.0, prior_incorrect: float = 1.0) -> float:
        """Mean of Beta(prior_correct + successes, prior_incorrect + failures) over all attempts.

        The likelihood of a chain does not depend on why it stopped, so the posterior holds under any stopping rule. The
        plain rate does not: stopped at the first success it averages -p ln p/(1 - p), well above p.
        """
        record = self.records.get(problem_id, UNKNOWN)
        return (prior_correct + record.correct) / (prior_correct + prior_incorrect + record.attempts)

    def first_round_rate(self, problem_id: str) -> float | None:
        """Pass rate over first rounds only: the unbiased one, for reports. None before the first visit."""
        record = self.records.get(problem_id)
        return record.first_correct / record.first_attempts if record and record.first_attempts else None

    def stats(self) -> dict[str, float]:
        """Gauges; `first_round_pass_rate` is over all first rounds of the run."""
        stats = {"num_retired": float(self.num_retired)}
        if self._first_attempts:
            stats["first_round_pass_rate"] = self._first_correct / self._first_attempts
        return stats

    def state(self) -> HistoryState:
        return HistoryState(dict(self.records), self._first_attempts, self._first_correct)

    def restore(self, state: HistoryState) -> None:
        self.records = dict(state.records)
        self._first_attempts = state.first_attempts
        self._first_correct = state.first_correct
        self.num_retired = sum(r.retired for r in state.records.values())

"""Counters, rates and windows of a run: what the dashboard shows and nothing that decides anything but one alarm."""

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.messages import Group, Rollout, WeightsLoaded
from pipeline.soundness import one_line
from samplers.base import Launch, Outcome

RATE_WINDOW_S = 10.0
VERDICT_WINDOW = 256
PACE_WINDOW = 64  # rollouts of which the seconds a token are known
MAX_WARNINGS = 20
REFUSAL_PERIOD_S = 600.0


class Tally:
    """`counters` are totals over the whole run, restarts included; everything else is about the recent past."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self.counters: Counter[str] = Counter()
        self.levels: dict[str, list[int]] = {}  # level -> launched, trained, correct
        self.warnings: deque[str] = deque(maxlen=MAX_WARNINGS)
        self._new_warnings: list[str] = []
        self._refusal_due: dict[str, float] = {}  # by kind: when it is said again
        self.last_step: dict[str, float] = {}
        self.last_eval: dict[str, Any] = {}
        self.host: dict[str, float] = {}  # what the guards last saw of the machine
        self._wall_before_s = 0.0
        self._started: float | None = None
        self._recent: deque[bool] = deque(maxlen=VERDICT_WINDOW)  # of the newest verdicts: whether they were `unknown`
        self._paces: deque[float] = deque(maxlen=PACE_WINDOW)
        self._rates: deque[tuple[float, int, int]] = deque()
        self._since_step: defaultdict[str, float] = defaultdict(float)
        self._rounds: list[tuple[str, Outcome, Sequence[Rollout]]] = []  # not counted yet
        self._cpu_s: dict[str, float] = {}  # by process: what `spent` has counted of it
        self._stall_s = 0.0
        self._canary_error = 0.0

    # --- time ---

    def start(self) -> None:
        self._started = self._clock()

    @property
    def wall_s(self) -> float:
        """Seconds of training so far; evaluation before the first step and time between restarts do not count."""
        return self._wall_before_s + (self._clock() - self._started if self._started is not None else 0.0)

    # --- events ---

    def count(self, name: str, n: int = 1) -> None:
        self.counters[name] += n

    def warn(self, text: str) -> None:
        self.counters["warnings"] += 1
        text = one_line(text)  # much of it is what a peer said
        if text not in self.warnings:
            self.warnings.append(text)
            self._new_warnings.append(text)

    def refused(self, kind: str, text: str) -> None:
        """What a peer sent is not taken. Counted each time, said once in `REFUSAL_PERIOD_S` a kind, however often."""
        self.counters[f"error/wire/{kind}"] += 1
        if self._clock() >= self._refusal_due.get(kind, -math.inf):
            self._refusal_due[kind] = self._clock() + REFUSAL_PERIOD_S
            self.warn(f"refused: {text}; others like it are counted as error/wire/{kind}")

    def errors(self) -> dict[str, int]:
        """How often something went wrong at a boundary, by its name."""
        return {name: n for name, n in sorted(self.counters.items()) if name.startswith("error/")}

    def take_new_warnings(self) -> list[str]:
        """Those since the last call; one that is still shown is not new."""
        new, self._new_warnings = self._new_warnings, []
        return new

    def _level(self, level: str) -> list[int]:
        counts = self.levels.get(level)
        return counts if counts is not None else self.levels.setdefault(level, [0, 0, 0])

    def launched(self, launch: Launch) -> None:
        self.counters["launched"] += launch.num_rollouts
        self.counters["retries"] += launch.num_rollouts if launch.round else 0
        self._level(launch.problem.level)[0] += launch.num_rollouts

    def rollouts(self, rollouts: Sequence[Rollout], num_carried: int) -> None:
        """They arrived, for training or evaluation; earlier ones had generated `num_carried` of their tokens."""
        counters = self.counters
        counters["generated_rollouts"] += len(rollouts)
        counters["generated_tokens"] += sum([len(rollout.completion_ids) for rollout in rollouts]) // 4 - num_carried
        if rollouts:
            one = rollouts[-1]
            self._paces.append((one.finished_ns - one.started_ns) / 1e9 / max(one.num_tokens, 1))
        for rollout in rollouts:
            if rollout.forced_spans:
                counters["interrupted"] += 1
            if len(rollout.version_spans) > 1:
                counters["in_flight_updates"] += 1

    def verdicts(self, outcomes: Sequence[str]) -> float | None:
        """Count verdicts; the recent share of `unknown`, or None while too few are known to say."""
        for outcome, num in Counter(outcomes).items():
            self.counters[f"verdict/{outcome}"] += num
        self._recent.extend([outcome == "unknown" for outcome in outcomes])
        return self.unknown_frac if len(self._recent) >= VERDICT_WINDOW // 4 else None

    @property
    def slowest_pace_s(self) -> float:
        """Seconds a token of the slowest of some recent rollouts."""
        return max(self._paces, default=0.0)

    @property
    def unknown_frac(self) -> float:
        return sum(self._recent) / len(self._recent) if self._recent else 0.0

    def round(self, level: str, outcome: Outcome, rollouts: Sequence[Rollout]) -> None:
        """A round is judged; `rollouts` are its own. Counted by the next `fold`."""
        self._rounds.append((level, outcome, rollouts))

    def fold(self) -> None:
        """Count the rounds since the last call: a turn's at once, which costs less than one by one."""
        if not self._rounds:
            return
        counters, since_step = self.counters, self._since_step
        by_level: dict[str, tuple[list[int], list[Rollout]]] = {}
        for level, outcome, rollouts in self._rounds:
            num, correct = len(outcome.rewards), outcome.correct.count(True)
            if (found := by_level.get(level)) is None:
                found = by_level[level] = [0, 0], []
            found[0][0] += num
            found[0][1] += correct
            found[1].extend(rollouts)
            since_step["reward"] += sum(outcome.rewards)
            since_step["truncated"] += outcome.truncated.count(True)
            since_step["tokens"] += outcome.num_tokens
            counters["tokens"] += outcome.num_tokens
            if outcome.round == 0:
                since_step["fresh"] += num
                since_step["fresh_correct"] += correct
        self._rounds.clear()
        for level, ((num, correct), rollouts) in by_level.items():
            counters["rollouts"] += num
            self._level(level)[2] += correct
            self._used("finished", level, rollouts)
            since_step["rollouts"] += num
            since_step[f"judged/{level}"] += num
            since_step[f"correct/{level}"] += correct

    def weights_loaded(self, message: WeightsLoaded) -> None:
        self.counters["weight_loads"] += 1
        self._stall_s = message.stall_s
        self._canary_error = message.canary_error

    def trained(self, groups: Sequence[Group]) -> None:
        by_level: defaultdict[str, list[Rollout]] = defaultdict(list)
        for group in groups:
            by_level[group.problem.level] += group.rollouts
        self.counters["groups_trained"] += len(groups)
        for level, rollouts in by_level.items():
            self._level(level)[1] += len(rollouts)
            self._used("trained", level, rollouts)

    def stale(self, level: str, rollouts: Sequence[Rollout]) -> None:
        """The staleness rule left rollouts of a group out; level and length tell what the rule starves."""
        self._used("left_out", level, rollouts)

    def _used(self, how: str, level: str, rollouts: Sequence[Rollout]) -> None:
        counters = self.counters
        counters[f"{how}/rollouts"] += len(rollouts)
        counters[f"{how}/level/{level}"] += len(rollouts)
        for num_bytes, num in Counter([len(rollout.completion_ids) for rollout in rollouts]).items():
            counters[f"{how}/tokens/{1 << max((num_bytes // 4).bit_length() - 1, 0)}"] += num

    def evaluated(self, record: dict[str, Any]) -> None:
        self.last_eval = record

    def spent(self, role: str, boot_id: str, cpu_s: float) -> None:
        """A process of that role has used `cpu_s` CPU seconds since it started."""
        before = self._cpu_s.get(boot_id, 0.0)
        self._cpu_s[boot_id] = cpu_s
        self.counters[f"cpu_ms/{role}"] += round(1000 * (cpu_s - before))

    # --- views ---

    def cost_so_far(self) -> dict[str, object]:
        """What the run has cost so far. The peers' CPU time is that of their last heartbeat, about a second old."""
        self.fold()
        self.spent("coordinator", "", time.process_time())
        core_s = {name.partition("/")[2]: n / 1000 for name, n in self.counters.items() if name.startswith("cpu_ms/")}
        return {"rollouts": self.counters["rollouts"], "tokens": self.counters["tokens"], "core_s": core_s}

    def rates(self) -> tuple[float, float]:
        """Rollouts and tokens generated per second over the last `RATE_WINDOW_S`."""
        now = self._clock()
        self._rates.append((now, self.counters["generated_rollouts"], self.counters["generated_tokens"]))
        while len(self._rates) > 2 and now - self._rates[0][0] > RATE_WINDOW_S:
            self._rates.popleft()
        then, rollouts, tokens = self._rates[0]
        if now <= then:
            return 0.0, 0.0
        generated = self.counters["generated_rollouts"] - rollouts, self.counters["generated_tokens"] - tokens
        return generated[0] / (now - then), generated[1] / (now - then)

    def step_metrics(self, learner_metrics: dict[str, float]) -> dict[str, float]:
        """What the learner says of a step, and `since_step`, which begins anew."""
        self.last_step = learner_metrics | self.since_step()
        self._since_step.clear()
        return self.last_step

    def since_step(self) -> dict[str, float]:
        """What came back from the engines since the last optimizer step."""
        self.fold()
        s = self._since_step
        rollouts_per_s, tokens_per_s = self.rates()
        metrics = {
            "rollouts_per_s": rollouts_per_s,
            "tokens_per_s": tokens_per_s,
            "weights/stall_s": self._stall_s,
            "weights/canary_error": self._canary_error,
            "wall_s": self.wall_s,
            **self.host,
            "staleness/ess_holds": self.counters["ess_holds"],
            "staleness/left_out": self.counters["left_out/rollouts"],
            **self._trained_shares(),
            **self.errors(),
        }
        if n := s["rollouts"]:  # none between two steps that follow each other at once
            metrics |= {
                "generated/reward_mean": s["reward"] / n,
                "generated/truncated_frac": s["truncated"] / n,
                "generated/mean_tokens": s["tokens"] / n,
            }
        for name, n in sorted(s.items()):
            if name.startswith("judged/"):
                level = name.removeprefix("judged/")
                metrics[f"solve_rate/{level}"] = s[f"correct/{level}"] / n
        if n := s["fresh"]:
            metrics["generated/fresh_pass_at_1"] = s["fresh_correct"] / n
        return metrics

    def _trained_shares(self) -> dict[str, float]:
        """Over the whole run: rollouts trained over launched by level, and over finished by length ("16": 16 to 31
        tokens), as no length is known before the end. A share that falls with length or difficulty is a bias.
        """
        shares = {f"trained_over_launched/{level}": t / n for level, (n, t, _) in sorted(self.levels.items()) if n}
        prefix = "finished/tokens/"
        for name, n in sorted(self.counters.items()):
            if name.startswith(prefix):
                length = name.removeprefix(prefix)
                shares[f"trained_over_finished/{length}_tokens"] = self.counters[f"trained/tokens/{length}"] / n
        return shares

    def totals(self) -> dict[str, Any]:
        """The closing record of a run."""
        return {"rollouts_by_level": self.by_level(), "left_out": self.left_out(), "wall_s": self.wall_s}

    def left_out(self) -> dict[str, Any]:
        """Rollouts that the staleness rule left out, and the shares of all judged ready to train: by level, and by
        length in tokens, "16" for 16 to 31.
        """

        def shares(kind: str) -> dict[str, float]:
            trained, left_out = f"trained/{kind}/", f"left_out/{kind}/"
            names = {k.removeprefix(p) for p in (trained, left_out) for k in self.counters if k.startswith(p)}
            ordered = sorted(names, key=lambda name: (len(name), name) if kind == "tokens" else (0, name))
            sums = {n: (self.counters[left_out + n], self.counters[trained + n]) for n in ordered}
            return {name: left / (left + kept) for name, (left, kept) in sums.items() if left + kept}

        counts = {"rollouts": self.counters["left_out/rollouts"], "trained": self.counters["trained/rollouts"]}
        return counts | {"frac_by_level": shares("level"), "frac_by_tokens": shares("tokens")}

    def by_level(self) -> dict[str, dict[str, int]]:
        names = ("launched", "trained", "correct")
        return {level: dict(zip(names, counts, strict=True)) for level, counts in sorted(self.levels.items())}

    def restore(self, counters: dict[str, int], levels: dict[str, list[int]], wall_s: float) -> None:
        self.counters = Counter(counters)
        self.levels = {level: list(counts) for level, counts in levels.items()}
        self._wall_before_s = wall_s

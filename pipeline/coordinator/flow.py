"""What happens to attempts: from a launch through rollout and verdict to a closed group. It knows queues, not peers."""

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence

import msgspec

from pipeline import staleness
from pipeline.config import Config
from pipeline.coordinator.batcher import Batcher, Cut
from pipeline.coordinator.book import MAX_TRIES, Book, OpenChain, Place, Result, judged_of, make_group, results_of
from pipeline.coordinator.credit import CreditQueue
from pipeline.coordinator.evaluation import Evaluation
from pipeline.coordinator.journal import Emptied, Journal, Judged, Proposed, Replaced, Stepped, Taken
from pipeline.coordinator.starvation import Famine, StarvationGuard
from pipeline.coordinator.tally import Tally
from pipeline.errors import RunFailed, WireError
from pipeline.ledger import Fate, Ledger
from pipeline.messages import AttemptFailed, Group, Judgement, Rollout, Verdict, VerifyJob, Work
from pipeline.soundness import check_rollout
from samplers.base import Launch, Sampler

# A run ends when so many attempts for each slot of the engines came to nothing and not one between them was judged: the
# rest of its budget would go the same way, and without `max_rollouts` it would never end.
MAX_FUTILE_PER_SLOT = 16


class AttemptFlow:
    """Every attempt from its launch to its one end.

    What changes the books is journaled first and then done by a method of its own (`propose`, `settle`, `leave_empty`,
    `replace`, `cut_batch`), which a recovery calls again.
    """

    def __init__(self, config: Config, sampler: Sampler, ledger: Ledger, tally: Tally, journal: Journal):
        self.config = config
        self.sampler = sampler
        self.ledger = ledger
        self.tally = tally
        self.journal = journal
        self.book = Book(config.sampling, config.seed, ledger.next_attempt_id())
        self.batcher = Batcher(config.learner.batch_by, config.learner.batch_size)
        self.work: CreditQueue[Work] = CreditQueue()
        self.eval_work: CreditQueue[Work] = CreditQueue()  # of pinned evaluations, whose engine trains nothing
        self.jobs: CreditQueue[VerifyJob] = CreditQueue()
        self.pending: deque[list[Group]] = deque()  # batches to be trained again after a crash, before any other
        self.evaluation: Evaluation | None = None
        self.starvation = StarvationGuard(config.learner.batch_size)
        self.policy_version = 0
        self.vocab_size = 0  # of the model, once the learner has said it
        self.num_unsound: Counter[str] = Counter()  # rollouts in a row, by engine
        self.is_holding = False  # nothing is launched until what was launched before is trained
        self._famine = Famine()
        self._num_futile = 0  # places in a row that stayed empty

    # --- launching ---

    def launch(self) -> None:
        """Keep engines full, within what staleness admits and the run's budget allows."""
        if self.is_holding and (self.book.num_in_flight or self.batcher.num_batches):
            return
        self.is_holding = False
        by_groups = self.config.learner.batch_by == "groups"
        in_flight = len(self.book.open_rounds) if by_groups else self.book.num_in_flight
        lag, size = self.config.staleness.max_lag, self.config.learner.batch_size
        room = staleness.room(lag, size, self.batcher.num_waiting, in_flight)
        # A short queue behind the engines' slots hides the round trip to them without adding to lag.
        queue_room = self.work.num_slots + self.work.num_slots // 2 - self.work.num_held - self.work.num_waiting
        while room > 0 and queue_room > 0 and self._budget_left() > 0:
            first_id = self.book.next_attempt_id
            launches = self.propose()
            num_attempts = self.book.next_attempt_id - first_id
            self.journal.write(Proposed(first_id, num_attempts))
            if not launches:
                break
            room -= len(launches) if by_groups else num_attempts
            queue_room -= num_attempts

    def propose(self) -> list[Launch]:
        launches = self.sampler.propose(1)
        for launch in launches:
            self.tally.launched(launch)
            if launch.num_resumed:
                self._end_judged(self.book.resumed_by(launch), "continued")
            opened = self.book.open_round(launch, self.policy_version)
            self.ledger.launch(opened)
            self.work.put_all([(work.attempt_id, work) for work in opened])
        return launches

    def _budget_left(self) -> int:
        limit = self.config.max_rollouts
        return limit - self.tally.counters["launched"] if limit else 1

    def queue(self, work: Work, urgent: bool = False) -> None:
        if work.purpose == "train":
            self.ledger.launch([work])
        is_pinned = work.purpose == "eval" and self.evaluation is not None and self.evaluation.is_pinned
        (self.eval_work if is_pinned else self.work).put(work.attempt_id, work, urgent)

    # --- what comes back ---

    def on_rollouts(self, arrived: Sequence[tuple[str, Sequence[Rollout]]], are_sound: bool) -> None:
        """What engines, by name, have ended; `are_sound` says that their arrays were looked into
        (`soundness.are_sound`).
        """
        taken: list[Rollout] = []
        jobs: list[tuple[int, VerifyJob]] = []
        unjudged, num_carried, replace = self.book.unjudged, 0, msgspec.structs.replace
        for name, rollouts in arrived:
            for rollout in rollouts:
                attempt_id = rollout.attempt_id
                if (place := self._back(name, attempt_id)) is None:
                    continue
                work = place.work
                try:
                    check_rollout(rollout, work, self.policy_version, self.vocab_size, are_sound)
                except WireError as e:
                    self.num_unsound[name] += 1
                    self._refuse(attempt_id, e, name)
                    continue
                if self.num_unsound:
                    self.num_unsound.pop(name, None)
                if attempt_id in unjudged:  # it was sent twice
                    continue
                if work.prefix is not None:
                    num_carried += work.prefix.num_tokens
                job = VerifyJob(attempt_id, work.problem, rollout.text, rollout.finish_reason == "length")
                jobs.append((attempt_id, job))
                # The text is for the verifier: journal, checkpoint and learner have the tokens. And figures by engine
                # would be under a name that somebody made up.
                unjudged[attempt_id] = rollout = replace(rollout, text="", engine_id=name)
                taken.append(rollout)
        self.tally.rollouts(taken, num_carried)
        self.jobs.put_all(jobs)

    def _back(self, name: str, attempt_id: int) -> Place | None:
        """The place of an attempt that engine `name` gives back, and its slot with it; None where it has no such
        attempt.

        It may have had it: an engine that was thought lost, or told too late that its work was cancelled.
        """
        if self.work.done(attempt_id, name) or self.eval_work.done(attempt_id, name):
            return self.book.places.get(attempt_id)
        if attempt_id in self.book.places:
            self.tally.refused("not_held", f"{name}: attempt {attempt_id} is with another")
        else:
            self.tally.count("late_rollouts")
        return None

    def on_verdicts(self, judgements: Sequence[Judgement]) -> None:
        """Of one message: all that could be judged first, then what is launched again."""
        places, unjudged, is_finite = self.book.places, self.book.unjudged, math.isfinite
        self.jobs.all_done([judgement.attempt_id for judgement in judgements])
        trained: list[Result] = []
        evaluated: list[Result] = []
        others: list[Judgement] = []
        outcomes: list[str] = []
        for judgement in judgements:
            attempt_id, verdict = judgement.attempt_id, judgement.verdict
            if (rollout := unjudged.pop(attempt_id, None)) is None:
                continue
            if is_finite(verdict.reward):
                outcomes.append(verdict.outcome)
                if verdict.outcome != "unknown":
                    purpose = places[attempt_id].work.purpose
                    (trained if purpose == "train" else evaluated).append(Result(rollout, verdict))
                    continue
            others.append(judgement)
        unknown_frac = self.tally.verdicts(outcomes)
        if trained:
            self.journal.write(Judged(trained))
            self.settle(trained)
        for result in evaluated:
            self._settle_evaluated(self.book.take(result.rollout.attempt_id), result)
        if trained or evaluated:
            self._num_futile = 0
        for judgement in others:
            self._on_no_verdict(judgement.attempt_id, judgement.verdict, unknown_frac)

    def _on_no_verdict(self, attempt_id: int, verdict: Verdict, unknown_frac: float | None) -> None:
        try:
            verdict.check()
        except WireError as e:
            self._refuse(attempt_id, e, "the verifier")
            return
        if unknown_frac is not None:
            self._watch_unknown(unknown_frac, verdict)
        self.fail(attempt_id, verdict.detail)

    def on_attempt_failed(self, name: str, message: AttemptFailed) -> None:
        if self._back(name, message.attempt_id) is None:
            return
        if message.retryable:
            self.tally.count("error/engine")
            self.fail(message.attempt_id, message.reason)
            return
        self.tally.warn(message.reason)
        self._give_up(message.attempt_id, message.reason)

    def _refuse(self, attempt_id: int, error: WireError, sender: str) -> None:
        self.tally.refused(error.kind, f"{sender}: {error.message}")
        self.fail(attempt_id, error.message)

    def _watch_unknown(self, unknown_frac: float, verdict: Verdict) -> None:
        limit = self.config.verifier.max_unknown_frac
        if unknown_frac > limit:
            raise RunFailed(
                f"the verifier could not judge {unknown_frac:.0%} of recent rollouts (limit {limit:.0%}; last: "
                f"{verdict.detail or 'no detail'}); fix it and `ngu resume`, or raise verifier.max_unknown_frac"
            )
        if unknown_frac > limit / 2:
            self.tally.warn(
                f"the verifier could not judge more than {limit / 2:.0%} of recent rollouts; above {limit:.0%} "
                "(verifier.max_unknown_frac) the run fails"
            )

    # --- the end of an attempt, a round, a chain ---

    def _end_judged(self, results: Sequence[Result], fate: Fate) -> None:
        self.ledger.end_judged([r.rollout for r in results], [r.verdict for r in results], fate, self.policy_version)

    def fail(self, attempt_id: int, reason: str) -> None:
        """End an attempt as failed and put a new one in its place, or leave the place empty after too many tries."""
        place = self.book.places[attempt_id]
        if place.tries >= MAX_TRIES:
            self.tally.warn(f"{place.work.problem.problem_id}: no usable rollout after many tries ({reason})")
            self._give_up(attempt_id, reason)
            return
        if place.work.purpose == "train":
            self.journal.write(Replaced(attempt_id, self.book.next_attempt_id))
        self.replace(attempt_id)

    def replace(self, attempt_id: int) -> None:
        if self.book.places[attempt_id].work.purpose == "train":
            self.ledger.end([attempt_id], "failed", self.policy_version)
        self.queue(self.book.replace(attempt_id), urgent=True)

    def _give_up(self, attempt_id: int, reason: str) -> None:
        """The attempt's place gets no result."""
        self._num_futile += 1
        if self._num_futile >= MAX_FUTILE_PER_SLOT * max(self.work.num_slots, 1):
            raise RunFailed(
                f"none of the last {self._num_futile} attempts could be run and judged (last: {reason}); mend that "
                "and start again"
            )
        if self.book.places[attempt_id].work.purpose == "train":
            self.journal.write(Emptied(attempt_id))
        self.leave_empty(attempt_id)

    def leave_empty(self, attempt_id: int) -> None:
        place = self.book.take(attempt_id)
        if place.work.purpose == "eval":
            self._settle_evaluated(place, None)
            return
        self.ledger.end([attempt_id], "failed", self.policy_version)
        if (chain := self.book.leave_empty(place)) is not None:
            self._finish_round(chain)

    def settle(self, results: Sequence[Result]) -> None:
        """Training attempts have their results."""
        for chain in self.book.settle(results):
            self._finish_round(chain)

    def _settle_evaluated(self, place: Place, result: Result | None) -> None:
        if self.evaluation is not None:  # None: the run was stopped in the middle of it
            self.evaluation.settle(place.work.problem, result)

    def _finish_round(self, chain: OpenChain) -> None:
        finished = chain.current
        assert finished is not None
        outcome = self.book.finish_round(chain, self.policy_version)
        if outcome is None:
            self.sampler.abandon(chain.chain_id)
            self._close_chain(chain.chain_id, "failed")
            return
        num_judged = len(outcome.rewards)
        self.tally.round(chain.problem.level, outcome, [r.rollout for r in chain.judged[-num_judged:]])
        group: Group | None = None
        for decision in self.sampler.observe(outcome):
            self.tally.count(f"decision/{decision.reason}")
            if decision.action == "train":
                closed = self.book.close_chain(decision.chain_id)
                group = make_group(closed, decision.keep)
                if len(decision.keep) < len(closed.judged):
                    kept = set(decision.keep)
                    self._end_judged([r for i, r in enumerate(closed.judged) if i not in kept], "filtered")
            elif decision.action == "drop":
                self._close_chain(decision.chain_id, "given_up" if decision.reason == "gave_up" else "filtered")
            elif decision.resume:
                self.book.set_aside(decision.chain_id, decision.resume)
        num_trained = len(group.rollouts) if group is not None else 0
        self.starvation.round(outcome.truncated, num_trained, self.config.staleness.max_lag)
        self.batcher.add_round(num_judged, group, finished.ticket, finished.version)

    def _close_chain(self, chain_id: int, fate: Fate) -> None:
        self._end_judged(self.book.close_chain(chain_id).judged, fate)

    # --- batches ---

    def next_batch(self) -> list[Group]:
        """Groups for one optimizer step; empty if no full batch holds anything to train."""
        if self.pending:
            return self.pending.popleft()
        if (cut := self._cut()) is None or not self.batcher.can_take(cut):
            return []
        self.journal.write(Taken())
        return self.cut_batch()

    def cut_batch(self) -> list[Group]:
        """The first full batch that holds anything to train, its groups judged for staleness now."""
        while (cut := self._cut()) is not None and self.batcher.can_take(cut):
            groups = [kept for g in self.batcher.take(cut) if (kept := self._admit(g)) is not None]
            warning = self._famine.taken(len(groups), self.batcher.num_rounds_taken)
            if groups:
                return groups
            self.batcher.consumed()
            self.tally.count("empty_batches")
            if warning:
                self.tally.warn(warning)
        return []

    def _cut(self) -> Cut | None:
        """How the next batch is cut; None while something runs that would be too old for the batch after it.

        By ticket what admission lets in is trained within `max_lag` versions of its launch, if a batch counts attempts.
        The others count what comes of them, which can be more than was launched, so `pace` waits and takes it all;
        so does `max_lag` 0, or what still runs would be trained at lag 1.
        """
        rule = self.config.staleness
        is_paced = rule.policy == "pace" or rule.max_lag == 0
        if not self.batcher.ready or not (is_paced or self.config.learner.batch_order == "ticket"):
            return Cut()
        first = min(self.book.open_rounds, key=lambda r: r.ticket, default=None)
        due = self.policy_version - rule.max_lag if is_paced else -1
        if first is not None and first.version <= due:
            return None
        return Cut(math.inf if first is None else first.ticket, due)

    def _admit(self, group: Group) -> Group | None:
        """What of a group may be trained now; the rest of its rollouts end as stale."""
        rule = self.config.staleness
        admitted = staleness.admit(group, self.policy_version, rule.max_lag, rule.policy)
        if admitted is not group:
            kept = {r.attempt_id for r in admitted.rollouts} if admitted is not None else set()
            left_out = [result for result in results_of([group]) if result.rollout.attempt_id not in kept]
            self._end_judged(left_out, "stale")
            self.tally.stale(group.problem.level, [result.rollout for result in left_out])
        return admitted

    def trained(self, groups: tuple[Group, ...], metrics: Mapping[str, float]) -> None:
        """The learner finished the step that brought it to `policy_version`, and what it measured in it.

        Under `staleness.min_ess` launches wait until the groups launched before are trained: the answer of PipelineRL
        (arXiv 2509.19128) to ratios that run away. Less than a batch of them may remain and joins the next.
        """
        floor, ess = self.config.staleness.min_ess, metrics.get("ess", 1.0)
        holds = ess < floor
        step = Stepped(self.policy_version, holds, metrics.get("ratio_mean", 1.0), metrics.get("lag_mean", 0.0))
        self.journal.write(step)
        self.starvation.stepped(step.ratio_mean, step.lag_mean)
        if holds and not self.is_holding:
            self.tally.count("ess_holds")
            self.tally.warn(
                f"step {self.policy_version}: the effective sample size {ess:.2f} is under staleness.min_ess = "
                f"{floor:g}; nothing is launched until what was launched before is trained"
            )
        self.is_holding |= holds
        # In the order of launches, in which they lie on disk: what a turn writes is then on a few pages of it.
        ended = sorted(groups, key=lambda group: group.chain_id)
        self.ledger.end_judged(*judged_of(ended), "trained", self.policy_version)
        self.tally.trained(groups)
        self.batcher.consumed()

    # --- leaving and coming back ---

    def waiting(self) -> list[Result]:
        """What is judged and waits for its chain to close or its group to be trained."""
        return results_of([*self.batcher.groups, *(g for batch in self.pending for g in batch)]) + self.book.results()

    def requeue_in_flight(self) -> None:
        """After a recovery: the attempts that nobody finished are run again."""
        for attempt_id, place in self.book.places.items():
            self.work.put(attempt_id, place.work)

    def cancel_in_flight(self) -> dict[str, list[int]]:
        """Drop every running attempt; returns, by engine, what it must be told to cancel."""
        flying = {a: p.work.purpose for a, p in self.book.places.items()}
        self.jobs.discard(set(flying))
        self.book.places.clear()
        self.book.unjudged.clear()
        trained = [a for a, purpose in flying.items() if purpose == "train"]
        self.ledger.end(trained, "cancelled", self.policy_version)
        return self.work.discard(set(flying))

    def cancel_waiting(self) -> None:
        """The run is finished: what was never trained will not be."""
        self._end_judged(self.waiting(), "cancelled")

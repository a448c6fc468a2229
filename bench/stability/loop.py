"""One policy trained at an exact lag, in one process and on no clock.

Task, sampler, engine, scorer and learner are those of a run; coordinator, sockets and processes are left out, because
with them the lag is what the machine makes of it. Here the batch that step v+1 trains on is sampled, every token of it,
with the weights of version max(0, v - L): for the first L steps the lag grows from 0 to L, and then it is L. So a
config gives the same course on any machine, however many others run beside it.
"""

import os
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import xxhash
from torch import Tensor

from bench.stability.course import Course, Ending, Evaluated, Stepped, is_hopeless
from learner.checkpoint import open_learner
from learner.model import export_model_dir
from pipeline.config import Config, ExtractRule
from pipeline.coordinator.batcher import Batcher
from pipeline.coordinator.book import Book, OpenChain, Result, make_group
from pipeline.coordinator.evaluation import Evaluation
from pipeline.engines.registry import make_engine
from pipeline.errors import ConfigError, RunFailed, WeightError, WireError
from pipeline.messages import Group, Rollout, Verdict, Work
from pipeline.model_path import model_for_task
from pipeline.tasks.registry import make_task
from pipeline.verifiers.registry import Judge, make_judge
from pipeline.verifiers.triage import triage
from pipeline.weights import WeightPublisher
from samplers.base import Problem
from samplers.registry import make_sampler

SHARED_MEMORY = Path("/dev/shm")
ENGINE = "engine-0"


def num_batches(config: Config) -> int:
    """How many batches a run of this config generates."""
    limits = [config.max_steps] if config.max_steps else []
    if config.max_rollouts:
        limits.append(config.max_rollouts // config.learner.batch_size)
    return min(limits)


def run_arm(config: Config) -> Course:
    """Train at lag `config.staleness.max_lag`; a policy that falls apart is a result, not an error.

    Raises ConfigError for a model, a task or a sampler that cannot be had.
    """
    torch.set_num_threads(1)  # one arm a core
    shared = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="ngu-stability-", dir=shared) as scratch:
        return LaggedLoop(config, Path(scratch)).run()


@dataclass(frozen=True, slots=True)
class _Version:
    """Weights as they were at one version, with the canary that belongs to them."""

    number: int
    weights: dict[str, Tensor]
    canary: tuple[Tensor, Tensor]


class LaggedLoop:
    """The loop of a run, one thing after the other. `scratch` is a directory for weights."""

    def __init__(self, config: Config, scratch: Path):
        self.config = config
        self._model_dir = scratch / "model"
        path = model_for_task(config.model.path, str(config.task.__struct_config__.tag))
        config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=path))
        self.learner, tokenizer = open_learner(config, None)
        export_model_dir(self.learner.model, tokenizer, self._model_dir)
        self._task = make_task(config.task, config.seed)
        self._sampler = make_sampler(config.sampler, self._task, config.seed)
        self._book = Book(config.sampling, config.seed, next_attempt_id=0)
        self._batcher = Batcher(config.learner.batch_by, config.learner.batch_size)
        self._judge = InlineJudge(config)
        seed = xxhash.xxh3_64_intdigest(f"{config.seed}/{ENGINE}".encode()) >> 1
        self._engine = make_engine(config.engines, str(self._model_dir), seed, config.model.chat_template, ENGINE)
        self._publisher = WeightPublisher(scratch / "weights")
        self._versions = deque([self._snapshot()], maxlen=config.staleness.max_lag + 1)
        self._served: int | None = None
        self._rewards: list[float] = []  # of everything generated since the last step
        self._evaluations: list[Evaluated] = []
        self._steps: list[Stepped] = []

    def run(self) -> Course:
        started = time.process_time()
        ending, reason = self._run()
        return Course(self._evaluations, self._steps, ending, reason, time.process_time() - started)

    def _run(self) -> tuple[Ending, str]:
        total, every = num_batches(self.config), self.config.eval.every_steps
        try:
            self._evaluate(0, self.config.eval.num_rollouts)
            for batch in range(1, total + 1):
                groups = self._generate()
                if groups:  # a batch without any costs its rollouts and takes no step
                    self._train(batch, groups)
                if every and batch % every == 0 and batch < total:
                    self._evaluate(batch, self.config.eval.num_rollouts)
                    if is_hopeless(self._evaluations):
                        return "collapsed", f"hopeless after {batch} of {total} batches"
            self._evaluate(total, self.config.eval.final_num_rollouts)
        except (RunFailed, WeightError, WireError) as e:  # what ends a run, or leaves it without an engine
            return "failed", e.message
        return "finished", ""

    # --- weights ---

    def _snapshot(self) -> _Version:
        weights = deepcopy(self.learner.state_dict())  # tied weights stay one tensor
        return _Version(self.learner.policy_version, weights, self.learner.canary())

    def _serve(self, version: _Version) -> None:
        if version.number == self._served:
            return
        ids, logprobs = (t.numpy() for t in version.canary)
        notice = self._publisher.publish(version.weights, version.number, self._model_dir, ids, logprobs)
        report = self._engine.load_weights(notice)
        if not report.is_right:
            raise WeightError(f"weights {version.number}: engine and learner differ by {report.canary_error:.3g}")
        self._served = version.number

    # --- one batch ---

    def _generate(self) -> list[Group]:
        """The next batch's groups, sampled by the oldest version that the lag allows."""
        self._serve(self._versions[0])
        self._rewards = []
        while not self._batcher.ready:
            launches = self._sampler.propose(self.config.learner.batch_size - self._batcher.num_waiting)
            if not launches:
                raise RunFailed("the sampler has no problem left to launch; raise task.num_problems")
            version = self.learner.policy_version
            for result in self._roll_out([w for la in launches for w in self._book.open_round(la, version)]):
                if result.verdict.outcome == "unknown":
                    chain = self._book.leave_empty(self._book.take(result.rollout.attempt_id))
                    finished = [chain] if chain is not None else []
                else:
                    finished = self._book.settle([result])
                for chain in finished:
                    self._finish_round(chain)
        groups = self._batcher.take()
        self._batcher.consumed()
        return groups

    def _finish_round(self, chain: OpenChain) -> None:
        finished = chain.current
        assert finished is not None
        outcome = self._book.finish_round(chain, self.learner.policy_version)
        if outcome is None:
            self._sampler.abandon(chain.chain_id)
            self._book.close_chain(chain.chain_id)
            return
        self._rewards += outcome.rewards
        group = None
        for decision in self._sampler.observe(outcome):
            if decision.action == "train":
                group = make_group(self._book.close_chain(decision.chain_id), decision.keep)
            elif decision.action == "drop":
                self._book.close_chain(decision.chain_id)
            elif decision.resume:
                self._book.set_aside(decision.chain_id, decision.resume)
        self._batcher.add_round(len(outcome.rewards), group, finished.ticket, finished.version)

    def _roll_out(self, work: Sequence[Work]) -> list[Result]:
        """Every attempt's rollout and verdict, in the order of `work`."""
        self._engine.submit(work)
        rollouts: dict[int, Rollout] = {}
        while self._engine.num_in_flight:
            for ended in self._engine.step():
                if not isinstance(ended, Rollout):
                    raise ConfigError(ended.reason)
                ended.check()
                rollouts[ended.attempt_id] = ended
        problems = {w.attempt_id: w.problem for w in work}
        return [Result(r := rollouts[a], self._judge(problem, r)) for a, problem in problems.items()]

    def _train(self, batch: int, groups: Sequence[Group]) -> None:
        learner = self.config.learner
        report = self.learner.step(groups, learner.batch_size if learner.batch_by == "attempts" else None)
        self._versions.append(self._snapshot())
        metrics = report.metrics
        self._steps.append(
            Stepped(
                batch=batch,
                lag=metrics["lag_mean"],
                reward=sum(self._rewards) / max(len(self._rewards), 1),
                ess=metrics["ess"],
                ratio_mean=metrics["ratio_mean"],
                kl=metrics["kl"],
                clipped_mass=metrics["clipped_mass"],
                entropy=metrics["entropy"],
                grad_norm=metrics["grad_norm"],
                refused=bool(report.warning),
            )
        )

    # --- evaluation ---

    def _evaluate(self, batches: int, num_rollouts: int) -> None:
        """Held-out pass@1 of the newest version."""
        self._serve(self._versions[-1])
        problems = [p for p in self._task.eval_problems() for _ in range(num_rollouts)]
        evaluation = Evaluation("during", self.learner.policy_version, problems)
        work = [self._book.new_attempt(p, -1, 0, 0, "eval", tries=1) for p in evaluation.launches]
        for result in self._roll_out(work):
            place = self._book.take(result.rollout.attempt_id)
            evaluation.settle(place.work.problem, None if result.verdict.outcome == "unknown" else result)
        record = evaluation.record(self._task.level_weights(), self._task.hard_levels)
        overall, hard, by_level = (record[k] for k in ("mix_pass_at_1", "hard_pass_at_1", "pass_at_1"))
        if not isinstance(overall, float) or not isinstance(by_level, dict):
            raise ConfigError("the task holds out no problems; raise task.eval_size or task.eval_per_level")
        hard = hard if isinstance(hard, float) else None
        best, worst = evaluation.extremes_by_level()
        self._evaluations.append(Evaluated(batches, overall, hard, by_level, best, worst))


class InlineJudge:
    """The run's own scorer in this process: no deadline, so only for answers that cannot make it hang."""

    def __init__(self, config: Config):
        self._rule: ExtractRule = config.verifier.extract
        self._slow: Judge | None = None

    def __call__(self, problem: Problem, rollout: Rollout) -> Verdict:
        found = triage(problem, rollout.text, rollout.finish_reason == "length", self._rule)
        if isinstance(found, Verdict):
            return found
        if self._slow is None:  # seconds of imports that most arms never need
            self._slow = make_judge(None, "")
        return self._slow.judge(found)

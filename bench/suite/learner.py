"""How fast an optimizer step is, by how its rollouts are cut into forward passes.

The rollouts are those of the built-in job, sampled by its own engine and model. Processor seconds count, not those on
the wall: a step has one thread, and what else runs on the machine takes none of them.
"""

import itertools
import time
from collections.abc import Callable, Sequence

from bench.suite.base import Benchmark, Row, Say, figure, interleaved, ratio
from learner.evaluation.generate import ready_engine
from learner.learner import Learner
from learner.model import load_model
from pipeline.config import Config
from pipeline.learner_config import LearnerConfig
from pipeline.messages import Group, Rollout, SamplingParams, Verdict, Work
from pipeline.sections import PositiveInt
from pipeline.tasks.registry import make_task

MODEL = "builtin"
GROUP_SIZE = 8
PADDED = "one padded batch"


class LearnerBench(Benchmark, frozen=True):
    """`micro_batch_tokens`: the budgets to compare with one padded batch of all `rollouts`."""

    rollouts: PositiveInt = 384
    repeats: PositiveInt = 7
    micro_batch_tokens: tuple[PositiveInt, ...] = (512, 1024, 2048, 4096, 8192)

    def run(self, say: Say) -> list[Row]:
        groups = sampled_groups(Config(), self.rollouts // GROUP_SIZE)
        num_inputs = sum(
            len(r.prompt_array()) + len(r.completion_array()) - 1 for group in groups for r in group.rollouts
        )
        kinds = {PADDED: 1 << 30} | {f"micro-batches of {n} tokens": n for n in self.micro_batch_tokens}
        seconds = interleaved({kind: _step(groups, budget) for kind, budget in kinds.items()}, self.repeats)
        rows = []
        for kind, own in seconds.items():
            rows.append(figure(kind, "inputs/CPU s", [num_inputs / s for s in own]))
            if kind != PADDED:
                rows.append(ratio(f"{kind}, against {PADDED}", seconds[PADDED], own))
        return rows


def _step(groups: Sequence[Group], budget: int) -> Callable[[], float]:
    """A step of a learner of its own, at a learning rate of 0: every step does the same work."""
    learner = Learner(load_model(MODEL)[0], LearnerConfig(micro_batch_tokens=budget, lr=0.0), temperature=1.0)

    def step() -> float:
        started = time.process_time()
        learner.step(groups)
        return time.process_time() - started

    return step


def sampled_groups(config: Config, num_groups: int) -> list[Group]:
    """Groups of the config's training problems, sampled by its model.

    Their rewards alternate: a step costs the same whatever they are, but without variance there is no gradient.
    """
    engine, task = ready_engine(config, config.model.path, "bench"), make_task(config.task, config.seed)
    problems = [task.next_problem() for _ in range(num_groups)]
    sampling = SamplingParams(config.sampling.temperature, config.sampling.max_new_tokens)
    ids = itertools.count()
    engine.submit([Work(next(ids), i, 0, p, sampling) for i, p in enumerate(problems) if p for _ in range(GROUP_SIZE)])
    ended: list[list[Rollout]] = [[] for _ in problems]
    while engine.num_in_flight:
        for rollout in engine.step():
            if isinstance(rollout, Rollout):
                ended[rollout.chain_id].append(rollout)
    engine.close()
    return [_group(i, problem, rollouts) for i, (problem, rollouts) in enumerate(zip(problems, ended, strict=True))]


def _group(chain_id: int, problem, rollouts: Sequence[Rollout]) -> Group:
    rewards = tuple(float(i % 2) for i in range(len(rollouts)))
    verdicts = tuple(Verdict("correct" if r else "incorrect", r) for r in rewards)
    return Group(chain_id, problem, tuple(rollouts), verdicts, tuple(range(len(rewards))), rewards, (len(rewards),))

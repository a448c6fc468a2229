"""How fast an optimizer step is, by how its rollouts are cut into forward passes: `python -m bench.learner_step`.

The rollouts are those of the built-in job, sampled by its own engine and model. Each repeat takes one step of every
kind in turn, so that a busy machine slows all of them alike, and what counts is the ratio within a repeat.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence

import msgspec

from learner.evaluation.generate import ready_engine
from learner.learner import Learner
from learner.model import load_model
from pipeline.config import Config
from pipeline.learner_config import LearnerConfig
from pipeline.messages import Group, Rollout, SamplingParams, Verdict, Work
from pipeline.tasks.registry import make_task

MODEL = "builtin"
GROUP_SIZE = 8
# Kind and token budget; what all are compared with comes first.
KINDS = {"one padded batch": 1 << 30, "512": 512, "1024": 1024, "2048": 2048, "4096": 4096, "8192": 8192}


class Timing(msgspec.Struct, frozen=True):
    """Processor seconds of one step: the median over the repeats, and the ratio to one padded batch within each."""

    kind: str
    median_s: float
    speedup: float
    speedup_min: float
    speedup_max: float
    num_inputs: int
    num_rollouts: int


def builtin_groups(num_groups: int, seed: int = 0) -> list[Group]:
    """Groups of the built-in task's training problems, sampled by its model.

    Their rewards alternate: a step costs the same whatever they are, but without variance there is no gradient.
    """
    config = Config(seed=seed)
    engine, task = ready_engine(config, MODEL, "bench"), make_task(config.task, seed)
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


def measure(groups: Sequence[Group], repeats: int) -> list[Timing]:
    learners = {}
    for kind, budget in KINDS.items():
        config = LearnerConfig(micro_batch_tokens=budget, lr=0.0)
        learners[kind] = Learner(load_model(MODEL)[0], config, temperature=1.0)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for repeat in range(repeats + 1):  # the first pays for what is made once
        for kind, learner in learners.items():
            started = time.process_time()
            learner.step(groups)
            if repeat:
                seconds[kind].append(time.process_time() - started)
    base = seconds[next(iter(KINDS))]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    num_inputs = sum((len(r.prompt_ids) + len(r.completion_ids)) // 4 - 1 for r in rollouts)
    timings = []
    for kind, own in seconds.items():
        ratios = [b / s for b, s in zip(base, own, strict=True)]
        middle = statistics.median(ratios)
        median_s = statistics.median(own)
        timings.append(Timing(kind, median_s, middle, min(ratios), max(ratios), num_inputs, len(rollouts)))
    return timings


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.learner_step", description="Time of one optimizer step.")
    parser.add_argument("--rollouts", type=int, default=384)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args(argv)
    timings = measure(builtin_groups(args.rollouts // GROUP_SIZE), args.repeats)
    print(f"{'micro-batch tokens':>18}  {'step, CPU s':>11}  {'times as fast as one padded batch':>33}")
    for t in timings:
        spread = f"{t.speedup:.2f} ({t.speedup_min:.2f} to {t.speedup_max:.2f})"
        print(f"{t.kind:>18}  {t.median_s:>11.3f}  {spread:>33}")
    print(json.dumps(msgspec.to_builtins(timings)))


if __name__ == "__main__":
    main()

"""How fast an optimizer step is and what memory it takes, by how its rollouts are cut into passes, and against TRL's.

The rollouts are those of the built-in job, sampled by its own engine and model; every side gets the same, and GRPO's
loss, and is a process of its own. Processor seconds count, not those on the wall: a step has one thread, and what else
runs on the machine takes none of them.
"""

import itertools
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import msgspec

from bench.suite.base import Benchmark, Row, Say, figure, interleaved, ratio
from bench.suite.peers import THIS_PYTHON, Measurer, find_python, say_missing
from learner.evaluation.generate import ready_engine
from pipeline.config import Config
from pipeline.learner_config import LearnerConfig
from pipeline.messages import Group, Rollout, SamplingParams, Verdict, Work
from pipeline.role import ROLE_ENV
from pipeline.sections import PositiveInt
from pipeline.tasks.registry import make_task

GROUP_SIZE = 8
PADDED = "one padded batch"
TRL = "TRL"


class LearnerBench(Benchmark, frozen=True):
    """`micro_batch_tokens`: the budgets to compare with one padded batch of all `rollouts`; what `ngu train` does is
    measured in any case, and so are its passes for models that cannot share prompts, padded rows of like length.
    `trl_rollouts`: of a forward pass of TRL, of which the fastest counts.
    """

    rollouts: PositiveInt = 384
    repeats: PositiveInt = 7
    micro_batch_tokens: tuple[PositiveInt, ...] = (512, 1024, 2048, 4096, 8192)
    trl_rollouts: tuple[PositiveInt, ...] = (32, 96, 384)

    def run(self, say: Say) -> list[Row]:
        groups = sampled_groups(Config(), self.rollouts // GROUP_SIZE)
        num_inputs = sum(
            len(r.prompt_array()) + len(r.completion_array()) - 1 for group in groups for r in group.rollouts
        )
        with tempfile.TemporaryDirectory(prefix="ngu-bench-") as scratch, ExitStack() as stack:
            file = Path(scratch) / "groups.msgpack"
            file.write_bytes(msgspec.msgpack.encode(groups))
            children = {kind: stack.enter_context(child) for kind, child in self._children(file, say).items()}
            num_bytes: dict[str, list[float]] = {kind: [] for kind in children}
            sides = {kind: _step(child, num_bytes[kind]) for kind, child in children.items()}
            seconds = interleaved(sides, self.repeats)
        return _rows(num_inputs, seconds, {kind: found[1:] for kind, found in num_bytes.items()})

    def _children(self, file: Path, say: Say) -> dict[str, Measurer]:
        sides = {PADDED: (1 << 30, "padded"), f"padded {_passes(_default())}": (_default(), "padded")}
        sides |= {_passes(n): (n,) for n in (*self.micro_batch_tokens, _default())}
        children = {
            kind: Measurer(THIS_PYTHON, "bench.suite.learner_steps", str(file), *map(str, argv), env=ROLE_ENV)
            for kind, argv in sides.items()
        }
        python = find_python("trl")
        if python is None:
            say(say_missing(TRL))
            return children
        fitting = [n for n in self.trl_rollouts if self.rollouts % n == 0 and n % GROUP_SIZE == 0]
        return children | {
            f"{TRL}, {n} rollouts a pass": Measurer(python, "bench.peers.grpo_step", str(file), str(n)) for n in fitting
        }


def _default() -> int:
    return LearnerConfig().micro_batch_tokens


def _passes(budget: int) -> str:
    return f"micro-batches of {budget} tokens"


def _step(child: Measurer, num_bytes: list[float]) -> Callable[[], float]:
    def once() -> float:
        found = child.ask()
        num_bytes.append(found["bytes"])
        return found["cpu_s"]

    return once


def _rows(num_inputs: int, seconds: dict[str, list[float]], num_bytes: dict[str, list[float]]) -> list[Row]:
    rows = []
    for kind, own in seconds.items():
        rows.append(figure(kind, "inputs/CPU s", [num_inputs / s for s in own]))
        rows.append(figure(f"{kind}: peak memory", "MB", [n / 1e6 for n in num_bytes[kind]]))
        if kind != PADDED:
            rows.append(ratio(f"{kind}, against {PADDED}", seconds[PADDED], own))
    theirs = [kind for kind in seconds if kind.startswith(TRL)]
    if theirs:
        ours, best = _passes(_default()), min(theirs, key=lambda kind: median(seconds[kind]))
        rows.append(ratio(f"{ours}, against {best}", seconds[best], seconds[ours]))
        rows.append(ratio(f"peak memory of {ours}, of that of {best}", num_bytes[ours], num_bytes[best]))
    return rows


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

"""Pass@1 of the weights that runs have left: one engine, one verifier and the same problems for all of them."""

from collections.abc import Iterable
from contextlib import closing
from statistics import fmean

from bench.suite.e2e.runs import Run, Trained
from learner.evaluation.generate import Collector, ready_engine
from learner.evaluation.outcomes import RolloutOutcome
from pipeline.config import Config
from pipeline.tasks.registry import make_task
from pipeline.verifiers.pool import VerifierPool


def judge(key: str, arm: str, seed: int, trained: Trained, num_rollouts: int, num_final: int) -> Run:
    """Pass@1 of the weights that a run left, `num_rollouts` rollouts of each hard problem; all problems at the end."""
    config = Config()
    task = make_task(config.task, 0)
    problems, weights = task.eval_problems(), task.level_weights()
    hard_problems = [p for p in problems if p.level in task.hard_levels]
    hard: dict[int, float] = {}
    levels: dict[str, float] = {}
    with VerifierPool.of_run(config) as pool:
        for step, model in sorted(trained.models.items()):
            last = step == max(trained.models)
            asked, num = (problems, num_final) if last else (hard_problems, num_rollouts)
            with closing(ready_engine(config, str(model), f"bench/{seed}/{step}")) as engine:
                outcomes = Collector(engine, pool, asked, num, config.sampling).run()
            levels = _by_level(outcomes)
            hard[step] = fmean(levels[level] for level in task.hard_levels)
    overall = sum(weights[level] * levels[level] for level in weights)
    last_hard = hard[max(hard)]
    marks = trained.marks
    idle = trained.engine_idle, trained.learner_idle
    return Run(key, arm, seed, marks, hard, last_hard, overall, trained.startup_s, *idle)


def _by_level(outcomes: Iterable[RolloutOutcome]) -> dict[str, float]:
    right: dict[str, list[bool]] = {}
    for outcome in outcomes:
        right.setdefault(outcome.level, []).append(outcome.correct)
    return {level: fmean(found) for level, found in right.items()}

"""What a sweep runs: (B_problem, n) under several seeds, each with the same rollouts to spend.

The third axis of IsoCompute (arXiv 2603.12151), the number of steps M, is read off each run: at a constant learning
rate what a run is after M steps is what a run of M steps gives.

base = "run.toml"        # optional: a run's config, by default the built-in job's
seeds = [0, 1, 2]
budget = 12288           # rollouts of each run
eval_every = 1024        # rollouts from one evaluation to the next, the same in every run
n = [2, 4, 8, 16]
b_problem = [8, 32]      # with every n
batch = [256]            # B_problem * n: with every n
[set]                    # settings of every run
staleness.max_lag = 0
[targets]                # beside reward, best@k and worst@k over all levels: the same over some
hard = ["*3", "*4", "*5"]
"""

from pathlib import Path
from typing import Annotated, Any

import msgspec

from bench.files import config_key, read_plan
from bench.settings import Table, nested, overlay
from bench.stability.grid import check_runnable
from pipeline.config import Config, dump_config, load_config, parse_config
from pipeline.errors import ConfigError
from pipeline.model_path import model_for_task, resolve_model_path
from pipeline.tasks.registry import make_task

Positives = tuple[Annotated[int, msgspec.Meta(ge=1)], ...]
COLUMNS = ("run_id", "seed", "b_problem", "n", "step", "compute", "reward", "best_at_k", "worst_at_k", "ending")


class SweepConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sweep file. `base` is relative to it.

    A batch larger than `eval_every` has no evaluation at each of its multiples and is left out.
    """

    budget: Annotated[int, msgspec.Meta(ge=1)]
    eval_every: Annotated[int, msgspec.Meta(ge=1)]
    n: Annotated[tuple[Annotated[int, msgspec.Meta(ge=2)], ...], msgspec.Meta(min_length=1)]
    b_problem: Positives = ()
    batch: Positives = ()
    base: str = ""
    seeds: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)] = (0, 1, 2)
    set: Table = {}
    targets: dict[str, Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]] = {}


class SweepArm(msgspec.Struct, frozen=True):
    """One run. `key` identifies its resolved config."""

    key: str
    b_problem: int
    n: int
    config: Config


class Plan(msgspec.Struct, frozen=True):
    """`arms` are all of one seed before the next. `weights`: of each level in each target, `reward` among them."""

    arms: list[SweepArm]
    weights: dict[str, dict[str, float]]
    left_out: list[tuple[int, int]]


def load_plan(path: Path) -> Plan:
    """Every run of the sweep, checked before any is started; raises ConfigError."""
    config = read_plan(path, SweepConfig, "sweep", "docs/STUDY.md")
    if len(set(config.seeds)) < len(config.seeds):
        raise ConfigError(f"{path}: seeds names one seed twice")
    if config.budget % config.eval_every:
        raise ConfigError(f"{path}: budget = {config.budget} is no multiple of eval_every = {config.eval_every}")
    pairs = _pairs(config, path)
    fitting = [(b, n) for b, n in pairs if b * n <= config.eval_every]
    if not fitting:
        raise ConfigError(f"{path}: every batch is larger than eval_every = {config.eval_every}; raise it")
    base = overlay(
        dump_config(load_config(path.parent / config.base if config.base else None)), nested(config.set, path)
    )
    arms = [_arm(config, base, seed, b, n, path) for seed in config.seeds for b, n in fitting]
    return Plan(arms, _weights(config, arms[0].config, path), [pair for pair in pairs if pair not in fitting])


def _pairs(config: SweepConfig, path: Path) -> list[tuple[int, int]]:
    """(B_problem, n), the smallest batches first: they take most steps and longest, and should not come last."""
    pairs = {(b, n) for b in config.b_problem for n in config.n}
    for batch in config.batch:
        for n in config.n:
            if batch % n:
                raise ConfigError(f"{path}: batch = {batch} is no multiple of n = {n}")
            pairs.add((batch // n, n))
    if not pairs:
        raise ConfigError(f"{path}: give b_problem, batch or both")
    for b, n in sorted(pairs):
        if b * n <= config.eval_every and config.eval_every % (b * n):
            raise ConfigError(
                f"{path}: eval_every = {config.eval_every} is no multiple of {b} problems x {n} rollouts; all runs are "
                "compared at the same rollouts"
            )
    return sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair))


def _arm(config: SweepConfig, base: Table, seed: int, b_problem: int, n: int, path: Path) -> SweepArm:
    batch = b_problem * n
    learner: dict[str, Any] = {"batch_by": "attempts", "batch_size": batch}
    # The learning rate of the config is that of its own batch size, and of others by the square root.
    learner["reference_batch"] = base["learner"]["reference_batch"] or base["learner"]["batch_size"]
    evaluation = {"every_steps": config.eval_every // batch, "final_num_rollouts": base["eval"]["num_rollouts"]}
    own = {"sampler": {"kind": "fixed", "num_rollouts": n}, "learner": learner, "eval": evaluation}
    own |= {"seed": seed, "max_steps": 0, "max_rollouts": config.budget}
    found = parse_config(overlay(base, own), str(path))
    return SweepArm(config_key(found), b_problem, n, found)


def _weights(config: SweepConfig, run: Config, path: Path) -> dict[str, dict[str, float]]:
    """Also refuses what a run would refuse."""
    try:
        check_runnable(run)
        resolve_model_path(model_for_task(run.model.path, str(run.task.__struct_config__.tag)))
        task = make_task(run.task, run.seed)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e.message}") from None
    levels = {p.level for p in task.eval_problems()}
    if not levels:
        raise ConfigError(f"{path}: the task holds out no problems; raise task.eval_size or task.eval_per_level")
    for name, wanted in config.targets.items():
        if name in COLUMNS:
            raise ConfigError(f"{path}: [targets] {name} is the name of another column; choose another")
        if missing := sorted(set(wanted) - levels):
            raise ConfigError(
                f"{path}: [targets] {name}: no level {missing[0]!r}; there are {', '.join(sorted(levels))}"
            )
    return {"reward": task.level_weights()} | {name: dict.fromkeys(of, 1.0) for name, of in config.targets.items()}

"""What a study runs: variants of one job ("arms"), each under the same seeds.

base = "run.toml"             # optional: a run's config, by default the built-in job's
seeds = [0, 1, 2, 3, 4]
set.eval.every_steps = 2      # for every arm
arms.ngu = {}                 # what sets each arm apart; the first is what the others are compared with
arms.fixed_8.sampler = { kind = "fixed", num_rollouts = 8 }
[grid]                        # optional: every combination, of every arm if there are arms
staleness.max_lag = [1, 4]
"""

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from bench.files import config_key, read_plan
from bench.lab.config import LabConfig
from bench.settings import Table, flat, nested, overlay, put
from pipeline.config import Config, dump_config, load_config, parse_config
from pipeline.errors import ConfigError
from pipeline.model_path import model_for_task, resolve_model_path
from pipeline.tasks.registry import make_task
from pipeline.verifiers.preflight import resolve_verifier

Outcome = Literal["hard", "overall"]
PassRate = Annotated[float, msgspec.Meta(gt=0.0, lt=1.0)]

# An arm's name is the name of a directory.
ARM_NAME = re.compile(r"[\w+-][\w.,=+-]{0,99}")


class StudyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The study file. `base` is relative to it. `outcome` is the pass@1 that `thresholds` are levels of.

    `lab`: simulate the same arms in the lab too; the table holds what [lab] of `ngu lab` holds. Its population is by
    default that of the runs: their levels, with the pass rates that the evaluations before training found.
    """

    base: str = ""
    seeds: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)] = (0, 1, 2, 3, 4)
    outcome: Outcome = "hard"
    thresholds: tuple[PassRate, ...] = (0.3, 0.6)
    set: Table = {}
    arms: dict[str, Table] = {}
    grid: Table = {}
    lab: Table | None = None


@dataclass(frozen=True)
class Arm:
    """`settings` are what sets it apart, as dotted keys."""

    name: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One run. `key` identifies its config, so that a changed study file runs again what changed and nothing else."""

    arm: str
    seed: int
    config: Config
    key: str


@dataclass(frozen=True)
class Study:
    config: StudyConfig
    arms: list[Arm]
    jobs: list[Job]


def load_study(path: Path) -> Study:
    """Every run of the study, checked before any is started: settings, data, model and verifier. Raises ConfigError."""
    config = read_plan(path, StudyConfig, "study", "docs/STUDY.md")
    if len(set(config.seeds)) < len(config.seeds):
        raise ConfigError(f"{path}: seeds names one seed twice")
    base = dump_config(load_config(path.parent / config.base if config.base else None))
    base = overlay(base, nested(config.set, path))
    arms = _arms(config, path)
    jobs = [_job(arm, seed, base, path) for seed in config.seeds for arm in arms]
    _refuse_twins(jobs, path)
    for job in jobs[: len(arms)]:
        _check_inputs(job, path)
        if config.lab is not None:
            lab_config(job, config.lab, path)
    return Study(config, arms, jobs)


def lab_config(job: Job, lab: Table, where: Path) -> LabConfig:
    """The run of a job in the lab; `lab` is its table [lab]. Raises ConfigError."""
    config = parse_config(dump_config(job.config) | {"lab": lab}, str(where), LabConfig)
    assert isinstance(config, LabConfig)
    return config


# --- arms ---


def _arms(config: StudyConfig, path: Path) -> list[Arm]:
    """The product of arms and grid; either may be missing, but not both."""
    grid = flat(nested(config.grid, path))
    for name, values in grid.items():
        if not (isinstance(values, list) and values):
            raise ConfigError(f"{path}: [grid] {name} must be a list of the values to try")
    short = _short_names(list(grid))
    arms = []
    for (name, table), *cell in itertools.product(config.arms.items() or [("", {})], *grid.values()):
        settings = flat(nested(table, path)) | dict(zip(grid, cell, strict=True))
        words = [name] if name else []
        words += [f"{short[key]}={value}" for key, value in zip(grid, cell, strict=True)]
        arms.append(Arm(",".join(words), settings))
    if not arms[0].name:
        raise ConfigError(f"{path}: no arms; name what to compare under [arms] or [grid] (docs/STUDY.md)")
    for arm in arms:
        if not ARM_NAME.fullmatch(arm.name):
            raise ConfigError(f"{path}: {arm.name!r} is no name for an arm: it becomes the name of a directory")
    return arms


def _short_names(keys: list[str]) -> dict[str, str]:
    """The last word of each key, or the one before `kind`; whole keys where that would be ambiguous."""
    short = {key: key.removesuffix(".kind").rpartition(".")[2] for key in keys}
    return short if len(set(short.values())) == len(keys) else {key: key for key in keys}


def _job(arm: Arm, seed: int, base: Table, path: Path) -> Job:
    settings: Table = {}
    for key, value in arm.settings.items():
        put(settings, key, value, path)
    config = parse_config(overlay(base, settings) | {"seed": seed}, f"{path}, arm {arm.name}")
    return Job(arm.name, seed, config, config_key(config))


def _refuse_twins(jobs: list[Job], path: Path) -> None:
    by_key: dict[str, Job] = {}
    for job in jobs:
        if (twin := by_key.setdefault(job.key, job)) is not job:
            raise ConfigError(f"{path}: the arms {twin.arm} and {job.arm} have the same settings")


def _check_inputs(job: Job, path: Path) -> None:
    """What `ngu train` would refuse, hours from now."""
    config = job.config
    try:
        task = make_task(config.task, config.seed)
        resolve_model_path(model_for_task(config.model.path, str(config.task.__struct_config__.tag)))
        resolve_verifier(config)
    except ConfigError as e:
        raise ConfigError(f"{path}, arm {job.arm}: {e.message}") from None
    if not task.eval_problems() or not config.eval.every_steps:
        raise ConfigError(f"{path}, arm {job.arm}: nothing is evaluated during training, so there is no curve")

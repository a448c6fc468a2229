"""Take recorded optimizer steps again: to prove that a run did what it says, or under another loss or advantage."""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from learner.checkpoint import open_learner, reference_path
from learner.learner import Learner
from learner.model import load_reference
from learner.recording import StepRecord, read_record, recorded_steps
from learner.report import StepReport
from pipeline import checkpoints
from pipeline.config import Config, override_config
from pipeline.errors import ConfigError, WeightError
from pipeline.learner_config import LearnerConfig
from pipeline.manifest import verify_manifest
from pipeline.weights import weights_checksum

# How batches were cut, and what a model is built with: a step that is taken again has the run's own.
FIXED = ("learner.batch", "learner.num_processes", "learner.gradient_checkpointing", "learner.lora")
COMPARED = ("loss", "grad_norm", "ess", "clipped_frac", "reward_mean")


class Taken(NamedTuple):
    """One step as taken: its report, the gradient after clipping ([P], zeros if refused) and the update ([P])."""

    report: StepReport
    gradient: Tensor
    update: Tensor


class Variant(msgspec.Struct, frozen=True):
    """The same batch from the same weights and optimizer state under other settings.

    `gradient_cosine` and `update_cosine` are cosines with the original's clipped gradient and parameter update (Adam
    carries the original's momentum into both updates, so theirs is nearer to 1); None where one of the two is zero.
    """

    metrics: dict[str, float]
    gradient_cosine: float | None
    update_cosine: float | None
    warning: str


class ReplayedStep(msgspec.Struct, frozen=True):
    """`is_identical` says whether every byte of the weights is the one that was published."""

    step: int
    is_identical: bool
    metrics: dict[str, float]
    warning: str
    variant: Variant | None


class Plan(NamedTuple):
    """Begin at `checkpoint` (None: at the model the run began with), which is policy version `base`."""

    base: int
    checkpoint: Path | None


def plan(run_dir: Path, first: int, last: int) -> Plan:
    """The newest place to begin from which every step up to `last` is recorded; raises ConfigError if there is none."""
    recorded = set(recorded_steps(run_dir))
    starts = [Plan(step, path) for step, path in _intact_checkpoints(run_dir)] + [Plan(0, None)]
    for start in starts:
        if start.base < first and all(step in recorded for step in range(start.base + 1, last + 1)):
            return start
    able = sorted({step for start in starts for step in _reach(start.base, recorded)})
    raise ConfigError(
        f"{run_dir}: steps {first}..{last} cannot be replayed; "
        + (f"those that can are {_spans(able)}" if able else "no step is recorded, see daemon.replay_gib")
    )


def replay(
    run_dir: Path, config: Config, start: Plan, first: int, last: int, overrides: Sequence[str] = ()
) -> Iterator[ReplayedStep]:
    """Take steps `start.base` + 1 to `last` again; yields those from `first` on.

    With `overrides` each step is also taken under other settings, from where the run itself stood before it.
    Raises ConfigError for overrides that are not settings of a step, NguError for a torn record.
    """
    torch.set_num_threads(1)  # as in the learner: another number would add up in another order
    learner, _ = open_learner(config, start.checkpoint)
    reference, aside = learner.reference, overridden(config, config.learner, overrides)
    if aside.kl.coef and (reference is None or aside.kl.reference != config.learner.kl.reference):
        path = reference_path(msgspec.structs.replace(config, learner=aside))
        reference = load_reference(path, learner.model)
    for step in range(start.base + 1, last + 1):
        record = read_record(run_dir, step)
        learner.config = record.config  # a live change of the learning rate is part of the record
        other = None
        if overrides and step >= first:
            other = _take_aside(learner, record, overridden(config, record.config, overrides), reference)
        own = _take(learner, record)
        if step >= first:
            yield ReplayedStep(
                step=step,
                is_identical=weights_checksum(learner.state_dict()) == record.checksum,
                metrics=own.report.metrics,
                warning=own.report.warning,
                variant=None if other is None else _compared(other, own),
            )


def overridden(config: Config, own: LearnerConfig, overrides: Sequence[str]) -> LearnerConfig:
    """`own` under overrides of [learner]; raises ConfigError for any other, and for `FIXED`, which would do nothing."""
    config = msgspec.structs.replace(config, learner=own)
    for override in overrides:
        key = override.partition("=")[0].strip()
        if not key.startswith("learner.") or key.startswith(FIXED):
            names = ", ".join(name.removeprefix("learner.") for name in FIXED)
            raise ConfigError(
                f"{key!r} has no part in a step taken again; replay takes settings of [learner] but {names}"
            )
        config = override_config(config, override)
    return config.learner


def _take(learner: Learner, record: StepRecord) -> Taken:
    parameters = list(learner.model.parameters())
    before = _flat(parameters)
    gradient = torch.zeros_like(before)

    def keep_gradient(*_: object) -> None:
        gradient.copy_(_flat([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]))

    hook = learner.optimizer.register_step_pre_hook(keep_gradient)
    try:
        report = learner.step(record.batch.groups, record.batch.num_attempts)
    finally:
        hook.remove()
    return Taken(report, gradient, _flat(parameters) - before)


def _take_aside(
    learner: Learner, record: StepRecord, config: LearnerConfig, reference: PreTrainedModel | None
) -> Taken:
    """Take the step under `config` with the learner's model and a copy of its optimizer; leaves it as it was."""
    other = Learner(learner.model, config, learner.temperature, learner.policy_version, reference)
    other.load_optimizer_tensors({name: tensor.clone() for name, tensor in learner.optimizer_tensors().items()})
    if other.critic is not None and learner.critic is not None and other.critic.is_like(learner.critic):
        other.critic.load_tensors({name: tensor.clone() for name, tensor in learner.critic.tensors().items()})
    saved = copy.deepcopy(learner.model.state_dict())
    try:
        return _take(other, record)
    finally:
        learner.model.load_state_dict(saved)


def _compared(other: Taken, own: Taken) -> Variant:
    return Variant(
        metrics=other.report.metrics,
        gradient_cosine=_cosine(other.gradient, own.gradient),
        update_cosine=_cosine(other.update, own.update),
        warning=other.report.warning,
    )


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _cosine(a: Tensor, b: Tensor) -> float | None:
    norms = float(a.double().norm() * b.double().norm())
    return float(a.double() @ b.double()) / norms if norms else None


def _intact_checkpoints(run_dir: Path) -> Iterator[tuple[int, Path]]:
    """(policy version, directory), the newest first."""
    for path in reversed(checkpoints.published(run_dir)):
        try:
            verify_manifest(path)
        except WeightError:
            continue
        yield checkpoints.step_of(path), path


def _reach(base: int, recorded: set[int]) -> Iterator[int]:
    while (base := base + 1) in recorded:
        yield base


def _spans(steps: Sequence[int]) -> str:
    """1, 2, 3, 7 as "1..3, 7..7"."""
    ends = [i for i in range(len(steps)) if i + 1 == len(steps) or steps[i + 1] != steps[i] + 1]
    starts = [0] + [i + 1 for i in ends[:-1]]
    return ", ".join(f"{steps[a]}..{steps[b]}" for a, b in zip(starts, ends, strict=True))

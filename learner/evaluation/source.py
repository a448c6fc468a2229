"""What `ngu eval` and `ngu coverage` can evaluate, and under which settings."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.checkpoints import published
from pipeline.config import Config, load_config
from pipeline.errors import ConfigError, WeightError
from pipeline.manifest import MANIFEST, verify_manifest
from pipeline.model_path import resolve_model_path
from pipeline.verifiers.preflight import resolve_verifier

BUILTIN = "builtin:"


class ModelSource(NamedTuple):
    """`model_path` is one of `[model] path`; `run_dir` is the run that trained the model, if there is one."""

    name: str
    model_path: str
    run_dir: Path | None


def find_model(name: str) -> ModelSource:
    """A run (its newest intact checkpoint), a checkpoint, or whatever `[model] path` may name; raises ConfigError."""
    path = Path(name)
    if (path / "run_id").is_file():
        checkpoint = _newest_checkpoint(path)
        if checkpoint is None:
            raise ConfigError(f"{name}: this run has no intact checkpoint; it saves one when it ends, see `ngu status`")
        return ModelSource(name, str(checkpoint / "model"), path)
    if (path / MANIFEST).is_file():
        try:
            verify_manifest(path)
        except WeightError as e:
            raise ConfigError(e.message) from None
        run_dir = path.resolve().parents[1]
        return ModelSource(name, str(path / "model"), run_dir if (run_dir / "run_id").is_file() else None)
    resolve_model_path(name)
    return ModelSource(name, name, None)


def _newest_checkpoint(run_dir: Path) -> Path | None:
    """The newest checkpoint whose model is intact; the coordinator's part, which only resuming needs, may be torn."""
    for path in reversed(published(run_dir)):
        with contextlib.suppress(WeightError):
            verify_manifest(path)
            return path
    return None


def eval_config(sources: Sequence[ModelSource], settings: Sequence[str], task: str | None) -> Config:
    """The settings of the first source that has a run, else the defaults, with overrides; raises ConfigError.

    `settings` are those of `ngu train`: at most one TOML file, which replaces the run's, and `section.key=value`.
    Without a run a built-in model is evaluated on the task it was made for.
    """
    files = [s for s in settings if "=" not in s or Path(s).is_file()]
    if len(files) > 1:
        raise ConfigError(f"one config file at most, but {', '.join(files)} were given; a setting is written key=value")
    overrides = [s for s in settings if s not in files]
    if task is not None:
        overrides.insert(0, f"task.kind={task}")
    base: str | Path | None = files[0] if files else None
    if base is None:
        base = next((s.run_dir / "config.toml" for s in sources if s.run_dir is not None), None)
    if base is None and sources[0].model_path.startswith(BUILTIN):
        overrides.insert(0, f"task.kind={sources[0].model_path.removeprefix(BUILTIN)}")
    return resolve_verifier(load_config(base, overrides))

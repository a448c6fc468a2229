"""Where `[model] path` leads; checked when a run is created, before anything is written."""

from importlib import resources
from pathlib import Path

from pipeline.errors import ConfigError

# The tasks that a model ships for: "builtin:NAME" is that model, and "builtin" alone the one of the run's task.
BUILTIN_MODELS = ("show_your_work", "manufactoria")


def model_for_task(path: str, task: str) -> str:
    """`path`, with "builtin" made the model of `task`; raises ConfigError when none ships for it."""
    if path != "builtin":
        return path
    if task not in BUILTIN_MODELS:
        known = " and ".join(BUILTIN_MODELS)
        raise ConfigError(f"no model ships for task {task}, only for {known}; set model.path to a model directory")
    return f"builtin:{task}"


def resolve_model_path(path: str, setting: str = "model.path") -> Path:
    """The directory or .gguf file that `path`, the value of `setting`, names; raises ConfigError when nothing can be
    loaded from it.
    """
    path = model_for_task(path, BUILTIN_MODELS[0])
    name = path.removeprefix("builtin:")
    if path != name:
        if name not in BUILTIN_MODELS:
            raise ConfigError(f"{setting} {path}: no such built-in model; there are {' and '.join(BUILTIN_MODELS)}")
        return Path(str(resources.files("pipeline") / "assets" / name))
    try:
        found = Path(path).expanduser()
        exists = found.exists()
    except (OSError, RuntimeError) as e:  # a name that is too long, or an unknown ~user
        raise ConfigError(f"{setting} {path}: {getattr(e, 'strerror', None) or e}") from None
    if not exists:
        raise ConfigError(f"{setting} {path}: no such directory or file; download the model first")
    if found.is_file():
        if found.suffix != ".gguf":
            raise ConfigError(f"{setting} {path}: a file must be .gguf; otherwise name the model's directory")
        return found
    if not (found / "config.json").is_file():
        raise ConfigError(f"{setting} {path}: the directory has no config.json; it is not a Hugging Face model")
    if not any(found.glob("*.safetensors")) and not any(found.glob("pytorch_model*.bin")):
        raise ConfigError(f"{setting} {path}: the directory has a config.json but no weights (*.safetensors)")
    return found

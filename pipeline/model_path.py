"""Where `[model] path` leads; checked when a run is created, before anything is written."""

from importlib import resources
from pathlib import Path

from pipeline.errors import ConfigError

# The models that ship with the package, by the task they were made for.
BUILTIN_MODELS = {"builtin": "show_your_work", "builtin:manufactoria": "manufactoria"}


def resolve_model_path(path: str) -> Path:
    """The directory or .gguf file that `[model] path` names; raises ConfigError when nothing can be loaded from it."""
    if path in BUILTIN_MODELS:
        return Path(str(resources.files("pipeline") / "assets" / BUILTIN_MODELS[path]))
    found = Path(path).expanduser()
    if not found.exists():
        raise ConfigError(f"model.path {path}: no such directory or file; download the model first")
    if found.is_file():
        if found.suffix != ".gguf":
            raise ConfigError(f"model.path {path}: a file must be .gguf; otherwise name the model's directory")
        return found
    if not (found / "config.json").is_file():
        raise ConfigError(f"model.path {path}: the directory has no config.json; it is not a Hugging Face model")
    if not any(found.glob("*.safetensors")) and not any(found.glob("pytorch_model*.bin")):
        raise ConfigError(f"model.path {path}: the directory has a config.json but no weights (*.safetensors)")
    return found

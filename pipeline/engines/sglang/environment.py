"""Where SGLang is installed: an environment of its own, since its pins are not those of this project."""

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from pipeline.config import EnginesConfig
from pipeline.errors import ConfigError

ENVIRONMENT = ".venv-sglang"


def find_python(config: EnginesConfig) -> str:
    """The interpreter that has SGLang: as configured, or of `.venv-sglang` here or beside the source, or this one."""
    if config.python:
        if shutil.which(config.python) is None:
            raise ConfigError(f"engines.python = {config.python!r} is no program; name the python that has sglang")
        return str(Path(config.python).absolute()) if Path(config.python).is_file() else config.python
    found = next((p for p in _candidates() if p.is_file()), None)
    if found is not None:
        return str(found)
    package = find_spec("sglang")
    if package is not None and package.origin is not None:  # not any directory of that name on the path
        return sys.executable
    raise ConfigError(
        "engines.kind = sglang, and no SGLang is installed: run `just sglang`, set engines.python to the python of an "
        "environment that has it, or engines.urls to servers that run"
    )


def _candidates() -> list[Path]:
    source = Path(__file__).parents[3]
    return [directory / ENVIRONMENT / "bin" / "python" for directory in (Path.cwd(), source)]


def has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))

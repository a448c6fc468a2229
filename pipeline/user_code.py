"""Functions of the user's own, named `package.module:function` or `file.py:function`."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeline.errors import ConfigError


def load_function(spec: str, what: str, parameters: Sequence[str]) -> Callable[..., Any]:
    """Import the function; raises ConfigError, naming the setting `what`, when it is missing or cannot be called with
    as many arguments as there are `parameters`.
    """
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise ConfigError(f"{what} = {spec!r} must be written package.module:function or file.py:function")
    function = getattr(_load_module(where, what), name, None)
    if function is None:
        raise ConfigError(f"{what}: {where} has no function {name!r}")
    try:
        inspect.signature(function).bind(*parameters)
    except (TypeError, ValueError):
        raise ConfigError(f"{what}: {spec} must be a function of ({', '.join(parameters)})") from None
    return function


def _load_module(where: str, what: str) -> ModuleType:
    if where.endswith(".py") and not Path(where).is_file():
        raise ConfigError(f"{what}: {where}: no such file")
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        own_name = f"ngu_user_code_{what.strip('-').replace('.', '_')}"
        spec = importlib.util.spec_from_file_location(own_name, where)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[own_name] = module  # dataclasses and pickle look their module up there
        spec.loader.exec_module(module)
    except Exception as e:
        raise ConfigError(f"{what}: cannot import {where}: {type(e).__name__}: {e}") from None
    return module

"""A user's own reward function, named `package.module:function` or `file.py:function`, for a child process."""

import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeline.errors import ConfigError
from pipeline.messages import Verdict
from pipeline.verifiers.triage import Question, WholeText, shown
from samplers.base import Problem

Reward = Callable[[Problem, str, bool], float | Verdict]
_FILE_MODULE = "ngu_custom_reward"


def resolve_reward(spec: str) -> str:
    """`spec` as it means the same from any directory; raises ConfigError unless the function can be called."""
    where, _, name = spec.rpartition(":")
    if where.endswith(".py"):
        spec = f"{Path(where).absolute()}:{name}"
    load_reward(spec)
    return spec


def load_reward(spec: str) -> Reward:
    """Import the function; raises ConfigError when it is missing or does not take (problem, text, truncated)."""
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise ConfigError(f"verifier.reward = {spec!r} must be written package.module:function or file.py:function")
    reward = getattr(_load_module(where), name, None)
    if reward is None:
        raise ConfigError(f"verifier.reward: {where} has no function {name!r}")
    try:
        inspect.signature(reward).bind(None, "", False)
    except (TypeError, ValueError):
        raise ConfigError(f"verifier.reward: {spec} must be a function of (problem, text, truncated)") from None
    return reward


def _load_module(where: str) -> ModuleType:
    if where.endswith(".py") and not Path(where).is_file():
        raise ConfigError(f"verifier.reward: {where}: no such file")
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        spec = importlib.util.spec_from_file_location(_FILE_MODULE, where)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[_FILE_MODULE] = module  # dataclasses and pickle look their module up there
        spec.loader.exec_module(module)
    except Exception as e:
        raise ConfigError(f"verifier.reward: cannot import {where}: {type(e).__name__}: {e}") from None
    return module


class CustomVerifier:
    """Calls the function; what it raises or returns by mistake is `unknown`, never a reward."""

    def __init__(self, spec: str):
        self._reward = load_reward(spec)

    def verify(self, problem: Problem, text: str, truncated: bool) -> Verdict:
        return self.judge(WholeText(problem, text, truncated))

    def judge(self, question: Question | WholeText) -> Verdict:
        """May take for ever, like any code of somebody else."""
        assert isinstance(question, WholeText)
        try:
            value = self._reward(question.problem, question.text, question.truncated)
        except Exception as e:
            last = traceback.extract_tb(e.__traceback__)[-1]
            place = f"{Path(last.filename).name}:{last.lineno}"
            return Verdict(
                "unknown", 0.0, detail=shown(f"the reward function failed: {type(e).__name__} at {place}: {e}")
            )
        return _verdict(value)


def _verdict(value: Any) -> Verdict:
    if isinstance(value, Verdict):
        return value if math.isfinite(value.reward) else _unusable(value)
    try:
        reward = float(value)  # numpy's and torch's scalars too
    except (TypeError, ValueError):
        reward = math.nan
    if not math.isfinite(reward):
        return _unusable(value)
    return Verdict("correct" if reward >= 1 else "incorrect", reward)


def _unusable(value: Any) -> Verdict:
    return Verdict("unknown", 0.0, detail=shown(f"the reward function returned {value!r}, not a finite number"))

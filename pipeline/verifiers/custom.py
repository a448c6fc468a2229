"""A user's own reward function, named `package.module:function` or `file.py:function`, for a child process."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from pipeline.errors import WireError
from pipeline.messages import Verdict
from pipeline.user_code import load_function
from pipeline.verifiers.triage import Question, WholeText, shown
from samplers.base import Problem

Reward = Callable[[Problem, str, bool], float | Verdict]


def resolve_reward(spec: str) -> str:
    """`spec` as it means the same from any directory; raises ConfigError unless the function can be called."""
    where, _, name = spec.rpartition(":")
    if where.endswith(".py"):
        spec = f"{Path(where).absolute()}:{name}"
    load_reward(spec)
    return spec


def load_reward(spec: str) -> Reward:
    """Import the function; raises ConfigError when it is missing or does not take (problem, text, truncated)."""
    return load_function(spec, "verifier.reward", ("problem", "text", "truncated"))


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
    try:
        reward = float(value.reward if isinstance(value, Verdict) else value)  # numpy's and torch's scalars too
        if isinstance(value, Verdict):
            found = msgspec.structs.replace(value, reward=reward)
        else:
            found = Verdict("correct" if reward >= 1 else "incorrect", reward)
        found.check()
        # Types are only checked where a message is read; there a wrong one would end the whole pool.
        return msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Verdict)
    except (TypeError, ValueError, OverflowError, WireError) as e:
        said = f"the reward function returned {value!r}, neither a finite number nor a sound Verdict: {e}"
        return Verdict("unknown", 0.0, detail=shown(said))

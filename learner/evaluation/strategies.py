"""By which strategy a rollout went about its problem: labels by a task's own rule, or by a function of the user's."""

import traceback
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.messages import Problem
from pipeline.tasks.show_your_work import SOURCE as SHOW_YOUR_WORK
from pipeline.tasks.show_your_work import strategy as show_your_work
from pipeline.user_code import load_function

Label = Callable[[Problem, str], str]
OPTION = "--strategy"


def by_rule(problem: Problem, text: str) -> str:
    """Working or guessing for the built-in job; empty where the task does not tell its strategies apart."""
    return show_your_work(text) if problem.source == SHOW_YOUR_WORK else ""


def find_label(spec: str | None) -> Label:
    """The user's function, or `by_rule` for None; raises ConfigError, and so does a function that fails later."""
    if spec is None:
        return by_rule
    function = load_function(spec, OPTION, ("problem", "text"))

    def label(problem: Problem, text: str) -> str:
        try:
            found = function(problem, text)
        except Exception as e:
            last = traceback.extract_tb(e.__traceback__)[-1]
            place = f"{Path(last.filename).name}:{last.lineno}"
            raise ConfigError(f"{OPTION}: {spec} failed: {type(e).__name__} at {place}: {e}") from None
        if not isinstance(found, str) or not found:
            raise ConfigError(f"{OPTION}: {spec} returned {found!r}; return the name of a strategy")
        return found

    return label

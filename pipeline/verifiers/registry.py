"""Which scorer judges a problem, by `Problem.source`, and how it is made inside a child process."""

from typing import TYPE_CHECKING, Literal, Protocol

from pipeline.tasks.registry import ReasoningGymConfig
from samplers.base import Problem

if TYPE_CHECKING:
    from pipeline.messages import Verdict
    from pipeline.verifiers.triage import Question

Scorer = Literal["math", "reasoning_gym", "manufactoria"]


class Judge(Protocol):
    """The slow half of a verifier; it may hang, crash or eat memory, so only a child process calls it."""

    def judge(self, question: "Question") -> "Verdict": ...


def scorer_of(problem: Problem) -> Scorer:
    """Problems of a reasoning-gym generator and of Manufactoria have their own scorers, all others are mathematics."""
    match problem.source:
        case "reasoning_gym" | "manufactoria":
            return problem.source
        case _:
            return "math"


def make_judge(gym: ReasoningGymConfig | None) -> Judge:
    """The scorer of a run: `gym` is the task's config when the problems come from reasoning-gym."""
    if gym is not None:
        from pipeline.verifiers.gym import GymVerifier

        return GymVerifier(gym)
    from pipeline.verifiers.math import MathVerifier

    return MathVerifier()

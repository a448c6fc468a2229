"""Which scorer judges a problem, by `Problem.source`, and how it is made inside a child process."""

from typing import TYPE_CHECKING, Literal, Protocol

from pipeline.tasks.registry import CodeConfig, ReasoningGymConfig
from samplers.base import Problem

if TYPE_CHECKING:
    from pipeline.messages import Verdict
    from pipeline.verifiers.triage import Question, WholeText

Scorer = Literal["math", "reasoning_gym", "manufactoria", "code"]

# The tasks whose problems are judged by a scorer that has settings; None for all others.
Scoring = ReasoningGymConfig | CodeConfig | None


class Judge(Protocol):
    """The slow half of a verifier; it may hang, crash or eat memory, so only a child process calls it."""

    def judge(self, question: "Question | WholeText") -> "Verdict":
        """Takes what `triage` makes of this scorer's problems: a `Question` or a `WholeText`."""
        ...


def scorer_of(problem: Problem) -> Scorer:
    """Generated puzzles, Manufactoria and programs have their own scorers, all others are mathematics."""
    match problem.source:
        case "reasoning_gym" | "manufactoria" | "code":
            return problem.source
        case _:
            return "math"


def make_judge(scoring: Scoring, reward: str) -> Judge:
    """The scorer of a run: the user's function `reward`, or else what the problems of the task `scoring` need."""
    if reward:
        from pipeline.verifiers.custom import CustomVerifier

        return CustomVerifier(reward)
    match scoring:
        case ReasoningGymConfig():
            from pipeline.verifiers.gym import GymVerifier

            return GymVerifier(scoring)
        case CodeConfig():
            from pipeline.verifiers.code import CodeVerifier

            return CodeVerifier(scoring)
    from pipeline.verifiers.math import MathVerifier

    judge = MathVerifier()
    judge.verify(Problem("", "", "", "x+1"), "\\boxed{1+x}", False)  # builds caches for a quarter of a second
    return judge

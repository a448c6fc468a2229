"""The `Verifier` seam."""

from typing import Protocol

from pipeline.messages import Verdict
from samplers.base import Problem


class Verifier(Protocol):
    """Judges one completion; every implementation passes `tests/contract/test_verifiers.py`."""

    def verify(self, problem: Problem, text: str, truncated: bool) -> Verdict:
        """Exactly one verdict, never an exception: `unknown` when no judgement can be made."""
        ...

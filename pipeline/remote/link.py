"""An ordered stream of messages that outlives its connections."""

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Link(Generic[T]):
    """One end: numbers what it sends and keeps it until it is acknowledged, takes in what comes next and nothing twice.

    A connection delivers in order until it breaks, and what was under way is lost then, so there is no timer here:
    whoever sees a new connection sends `unacknowledged` again, and whatever of it arrives out of turn is dropped.
    """

    def __init__(self):
        self._kept: deque[tuple[int, T]] = deque()
        self._num_sent = 0
        self.received = 0  # messages taken in so far

    def send(self, body: T) -> int:
        """The number under which `body` is to be sent."""
        number, self._num_sent = self._num_sent, self._num_sent + 1
        self._kept.append((number, body))
        return number

    def acknowledged(self, received: int) -> None:
        """The other end has taken in its first `received` messages."""
        while self._kept and self._kept[0][0] < received:
            self._kept.popleft()

    @property
    def unacknowledged(self) -> Iterable[tuple[int, T]]:
        return self._kept

    def accept(self, number: int) -> bool:
        """Whether message `number` is the next one; one that was here before, or after one that is missing, is not."""
        if number != self.received:
            return False
        self.received += 1
        return True

"""Which engine serves which weights, and what becomes of those that cannot load the newest."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

# An engine tries each notice twice, and between two refusals the learner publishes the version again.
MAX_REFUSALS = 3

# Publish it again, wait for that, leave the engine out, or end the run.
Remedy = Literal["publish", "wait", "leave", "end"]


class Rotation:
    """`versions` of the engines that serve."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self.versions: dict[str, int] = {}
        self._newest = -1  # that anybody has loaded
        self._refused = -1  # the version that `_refusals` counts by engine
        self._refusals: Counter[str] = Counter()
        self._is_asked = False  # the learner is to publish it again, and has not yet
        self._behind_since: float | None = None
        self._failed: set[str] = set()  # since any engine has loaded weights

    def loaded(self, version: int) -> None:
        """Some engine, of whatever kind, can load it."""
        self._newest = max(self._newest, version)
        self._failed.clear()

    def failed(self, name: str, engines: Sequence[str]) -> bool:
        """Engine `name` cannot go on; whether that leaves none of `engines`.

        Those that failed before do not count, though they are started again, until something has been loaded: where all
        fail for one reason, the run would else go from one to the other for as long as it may restart them.
        """
        self._failed.add(name)
        return not set(engines) - self._failed

    def refused(self, name: str, version: int, engines: Sequence[str]) -> Remedy:
        """What to do about engine `name`, one of `engines`, which cannot load the newest version.

        If all of them refuse it to the end, and no other has loaded it, there is no such version; if this one alone
        does, the engine is at fault.
        """
        if version != self._refused:
            self._refused, self._is_asked = version, False
            self._refusals.clear()
        self._refusals[name] += 1
        if self._newest < version and all(self._refusals[engine] >= MAX_REFUSALS for engine in engines):
            return "end"
        if self._refusals[name] >= MAX_REFUSALS:
            return "leave"
        was_asked, self._is_asked = self._is_asked, True
        return "wait" if was_asked else "publish"

    def published_again(self, version: int, engines: Sequence[str], is_other: bool) -> list[str]:
        """Those of `engines` that are to load it, once more or for the first time; all of them if it `is_other` bytes
        than before, as after steps repeated on a GPU.
        """
        self._is_asked = False
        return [name for name in engines if is_other or self.versions.get(name) != version]

    def is_current(self, version: int) -> bool:
        """Whether an engine serves, and none serves another version."""
        return bool(self.versions) and all(v == version for v in self.versions.values())

    def overdue(self, version: int, limit_s: float) -> list[str]:
        """Engines behind `version` for which the others have been waiting too long. Asked again and again meanwhile."""
        behind = [name for name, v in self.versions.items() if v != version]
        if not behind:
            self._behind_since = None
            return []
        if self._behind_since is None:
            self._behind_since = self._clock()
        is_over = self._clock() - self._behind_since > limit_s
        return behind if is_over and len(behind) < len(self.versions) else []

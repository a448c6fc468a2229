"""The learner's turn: where it stands, and what it is given next.

A learner that starts again alone stands at a checkpoint, behind the books. It is given the batches since once more, in
the same order, until it is where the books are, which stay there meanwhile.
"""

from pathlib import Path
from typing import NamedTuple

import msgspec

from pipeline.checkpoints import partial_dir, remove_partial
from pipeline.coordinator.flow import AttemptFlow
from pipeline.messages import Batch, Group, Save, SetLearningRate, Stop

FREED_A_TURN = 64  # groups; to free the thousands of rollouts of a batch at once would hold a turn up


class NotKept(Exception):
    """The learner is so far behind that only a restart of everything brings it and the books together."""


class Lesson(NamedTuple):
    batch: Batch
    lr: float  # learner.lr in force when it was given


class Lineage:
    """Knows one learner at a time. Batches are kept by reference, and for one step longer than the newest checkpoint
    needs: a learner that was started just before it was published stands at the one before. They are as many bytes as
    the journal has, which asks for a checkpoint before it grows without end.
    """

    def __init__(self, run_dir: Path, flow: AttemptFlow):
        self._run_dir, self._flow = run_dir, flow
        self.training: Batch | None = None  # taken from the books for the next step, which is not on record yet
        self.version: int | None = None  # of the learner, once it has published
        self.is_waiting = False  # the learner has asked for a batch
        self.is_closing = False  # the learner was told to save and end
        self._is_given = False  # this learner has got `training`
        self._lr = 0.0
        self._lessons: dict[int, Lesson] = {}  # by the version that each made
        self._forgotten: list[Group] = []  # of batches that nobody needs any more
        self._saved = 0

    @property
    def has_all(self) -> bool:
        """Whether the learner stands where the books do, and has the batch in training, if there is one."""
        return self.version == self._flow.policy_version and (self.training is None or self._is_given)

    @property
    def is_in_step(self) -> bool:
        """Whether this learner has got the batch in training."""
        return self.training is not None and self._is_given

    def gauges(self) -> dict[str, float]:
        """Of the batch in training; none without one."""
        if self.training is None:
            return {}
        rollouts = [rollout for group in self.training.groups for rollout in group.rollouts]
        lags = [self._flow.policy_version - v for r in rollouts if (v := r.oldest_version) is not None]
        return {
            "in_step/groups": len(self.training.groups),
            "in_step/rollouts": len(rollouts),
            "in_step/tokens": sum(rollout.num_tokens for rollout in rollouts),
            "in_step/longest_tokens": max((len(r.prompt_ids) // 4 + r.num_tokens for r in rollouts), default=0),
            "in_step/lag_max": max(lags, default=0),
        }

    def lost(self) -> None:
        """The learner is gone, and with it whoever could finish what it has left half written."""
        remove_partial(self._run_dir)
        self.version = None
        self.is_waiting = self.is_closing = self._is_given = False

    def stands_at(self, version: int) -> None:
        """The learner has published `version`; raises NotKept when it cannot be brought to where the books stand."""
        newest = self._flow.policy_version
        missing = [v for v in range(version + 1, newest + 1) if v not in self._lessons]
        if missing:
            raise NotKept(f"the learner stands at step {version} of {newest}, and batch {missing[0]} is kept no more")
        self.version = version

    def next(self, may_step: bool, may_save: bool) -> list[Batch | Save | SetLearningRate]:
        """What the learner is to be sent now: what it has missed before anything else, then a checkpoint if it
        `may_save` one, or a new batch if it `may_step` and there is one.
        """
        if not self.is_waiting or self.version is None:
            return []
        if self.version < self._flow.policy_version:
            self.is_waiting = False
            batch, lr = self._lessons[self.version + 1]
            return [SetLearningRate(lr), batch]
        if self.training is not None:
            return [SetLearningRate(self._flow.config.learner.lr), self._give(self.training)]
        if may_save:
            self.is_waiting = False
            return [Save(self._partial())]
        if not may_step or not (groups := self._flow.next_batch()):
            return []
        every = self._flow.config.daemon.checkpoint_every_steps
        checkpoint = bool(every) and (self._flow.policy_version + 1) % every == 0
        return [self._give(Batch(tuple(groups), self._num_launched(groups), checkpoint))]

    def _num_launched(self, groups: list[Group]) -> int:
        """`Batch.num_attempts` of a batch of these groups."""
        learner = self._flow.config.learner
        return learner.batch_size if learner.batch_by == "attempts" else sum(group.num_attempts for group in groups)

    def _give(self, batch: Batch) -> Batch:
        self.training, self._lr = batch, self._flow.config.learner.lr
        self._is_given, self.is_waiting = True, False
        return batch

    def close(self) -> Stop:
        """What asks the learner for the closing checkpoint."""
        self.is_closing = True
        return Stop(self._partial())

    def _partial(self) -> str:
        return str(partial_dir(self._run_dir, self._flow.policy_version))

    def stepped(self, version: int) -> Batch:
        """The step of the batch in training, which is returned, has made `version`."""
        batch, self.training, self._is_given = self.training, None, False
        assert batch is not None
        # Taken again it saves nothing: the books have gone on since.
        self._lessons[version] = Lesson(msgspec.structs.replace(batch, checkpoint=False), self._lr)
        for old in [v for v in self._lessons if v <= self._saved]:
            self._forgotten += self._lessons.pop(old).batch.groups
        return batch

    def forget(self) -> None:
        """Free some of what is not needed, once a turn."""
        del self._forgotten[-FREED_A_TURN:]

    def saved(self, version: int) -> None:
        """The checkpoint of the books at `version` is published."""
        self._saved = version

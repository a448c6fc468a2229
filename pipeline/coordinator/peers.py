"""Who is there, what each may say, and what becomes of what a peer held when it goes."""

from collections.abc import Callable
from typing import Any

from pipeline.channels import Unreadable
from pipeline.coordinator.evaluator import Evaluator
from pipeline.coordinator.flow import AttemptFlow
from pipeline.coordinator.lineage import Lineage
from pipeline.coordinator.records import Records
from pipeline.coordinator.rotation import Rotation
from pipeline.errors import RunFailed, WireError
from pipeline.guards import is_process
from pipeline.messages import (
    PROTOCOL_VERSION,
    Heartbeat,
    Hello,
    Identify,
    NewWeights,
    PublishAgain,
    Role,
    Stop,
    WeightsLoaded,
    WeightsNotice,
    WeightsRefused,
)
from pipeline.soundness import check

MAX_UNSOUND = 8
_FROM_STRANGERS = (Hello, Unreadable)


class Peers:
    """`known`: the Hello of everybody who is there, by name."""

    def __init__(
        self,
        flow: AttemptFlow,
        evaluator: Evaluator,
        lineage: Lineage,
        records: Records,
        stats: dict[str, dict[str, float]],
        clock: Callable[[], float],
        say: Callable[[str, Any], None],
    ):
        """`stats` is filled from heartbeats; `say` sends a message to a name, with those of the turn."""
        self._flow, self._evaluator, self._lineage, self._records = flow, evaluator, lineage, records
        self._clock, self._say = clock, say
        self.known: dict[str, Hello] = {}
        self.stats = stats
        self.last_heard: dict[str, float] = {}  # from a peer's first word after Hello on: it loads its model in between
        self.rotation = Rotation(clock)
        self._dismissed: set[str] = set()  # engines, by boot id

    def named(self, *roles: Role) -> list[str]:
        return [name for name, hello in self.known.items() if hello.role in roles]

    @property
    def learner(self) -> str | None:
        return next(iter(self.named("learner")), None)

    def engine_gauges(self) -> dict[str, float]:
        return {f"{name}/{k}": v for name in self.rotation.versions for k, v in self.stats.get(name, {}).items()}

    # --- what they say ---

    def may_say(self, name: str, message: Any, now: float) -> bool:
        """Whether a message is sound, and that peer's to send; one that is not has no other effect than this."""
        sender, kind = self.known.get(name), type(message)
        if sender is None and kind not in _FROM_STRANGERS:
            self._say(name, Identify())
            return False
        try:
            check(message, sender, self._flow.policy_version)
        except WireError as e:
            self._flow.tally.refused(e.kind, f"{name}: {e.message}")
            return False
        if kind is not Hello:
            self.last_heard[name] = now
        return True

    def hello(self, name: str, hello: Hello, weights: WeightsNotice | None) -> None:
        """Somebody is new, or known and asked who it is. Engines get the newest `weights`."""
        if hello.protocol != PROTOCOL_VERSION:
            speaks = f"{name} speaks protocol {hello.protocol}, this run {PROTOCOL_VERSION}"
            self._flow.tally.refused("protocol", speaks)
            self._say(name, Stop())
            return
        if hello.boot_id in self._dismissed:
            self._say(name, Stop())
            return
        known = self.known.get(name)
        if known is not None and known.boot_id != hello.boot_id:
            self.lose(name)
        self.known[name] = hello
        if hello.role == "gateway":  # those for whom an earlier one spoke are out of reach
            for lost in [n for n, peer in self.known.items() if peer.via not in ("", hello.boot_id)]:
                self.lose(lost)
        if hello.role == "engine" and weights is not None:
            self._say(name, NewWeights(weights))
        if hello.role == "evaluator":
            self._evaluator.join(name, hello.slots)
        if hello.role == "verifier":
            self._flow.jobs.add_peer(name, hello.slots)

    def heartbeat(self, name: str, message: Heartbeat) -> None:
        self.stats[name] = message.stats
        self._flow.tally.spent(self.known[name].role, self.known[name].boot_id, message.cpu_s)

    def weights_loaded(self, name: str, message: WeightsLoaded) -> None:
        self.rotation.loaded(message.policy_version)
        if self.known[name].role == "evaluator":
            self._evaluator.loaded(name, message)
            return
        if name not in self.rotation.versions:  # an engine takes work only once it has weights
            self._flow.work.add_peer(name, message.slots or self.known[name].slots)
        self.rotation.versions[name] = message.policy_version
        self._flow.tally.weights_loaded(message)

    def weights_refused(self, name: str, message: WeightsRefused) -> None:
        """Raises RunFailed when no engine can load the newest weights."""
        tally, version = self._flow.tally, message.policy_version
        tally.count("error/weights")
        if version != self._flow.policy_version:
            return  # newer ones are on their way
        tally.warn(f"{name} refused weights {version}: {message.reason}")
        match self.rotation.refused(name, version, self.named("engine", "evaluator")):
            case "end":
                raise RunFailed(f"every engine refused weights {version}, last {name}: {message.reason}")
            case "leave":
                self.lose(name)  # its Identify brings it back, but nobody waits for it
            case "publish":
                for learner in self.named("learner"):
                    self._say(learner, PublishAgain(version))

    # --- who goes ---

    def lose(self, name: str) -> None:
        """A peer is gone: what it held goes elsewhere."""
        flow = self._flow
        if (peer := self.known.get(name)) is not None and peer.role == "learner":
            if self._lineage.is_in_step:
                self.record_failure(f"the learner was lost in step {flow.policy_version + 1}")
            self._lineage.lost()
        for known in (self.known, self.stats, self.last_heard, self.rotation.versions, flow.num_unsound):
            known.pop(name, None)
        self._evaluator.leave(name)
        for attempt_id in flow.work.remove_peer(name):
            flow.fail(attempt_id, f"{name} was lost")
        for attempt_id, job in flow.jobs.remove_peer(name).items():
            flow.jobs.put(attempt_id, job, urgent=True)

    def leave(self, name: str, boot_id: str) -> None:
        """It says farewell, as the one that said Hello with `boot_id`."""
        if boot_id == self.known[name].boot_id:
            self.lose(name)

    def lose_dead(self) -> None:
        """Engines and the learner, if their processes on this machine have ended: the next of that name may be long in
        coming, or, where the run stops, never come.
        """
        for name in self.named("engine", "evaluator", "learner"):
            if not is_process(self.known[name].pid):
                self.lose(name)

    def failed(self, name: str, reason: str) -> None:
        """Raises RunFailed, unless it is an engine and another goes on."""
        is_engine = self.known[name].role in ("engine", "evaluator")
        if not is_engine or self.rotation.failed(name, self.named("engine")):
            raise RunFailed(f"{name}: {reason}")
        tally = self._flow.tally
        tally.count("error/engine")
        tally.warn(f"{name} failed, and the run goes on without it until it is started again: {reason}")
        self.lose(name)

    def dismiss_unsound(self) -> None:
        """An engine that sends nothing sound costs every problem that it gets. The last engine stays: if nothing
        comes of its attempts, the run ends with the reason.
        """
        for name, num_unsound in [*self._flow.num_unsound.items()]:
            if num_unsound >= MAX_UNSOUND and self.rotation.versions.keys() - {name}:
                self._flow.tally.warn(f"{name} sent {MAX_UNSOUND} unsound rollouts in a row: it is stopped")
                self._dismissed.add(self.known[name].boot_id)
                self.lose(name)
                self._say(name, Stop())

    def engines_current(self) -> bool:
        """Whether all engines that serve have the newest weights; the run waits `daemon.hang_s` for the last."""
        version, limit_s = self._flow.policy_version, self._flow.config.daemon.hang_s
        for name in self.rotation.overdue(version, limit_s):
            self._flow.tally.warn(f"{name} has not loaded weights {version}: the run goes on without it")
            self.lose(name)
        return self.rotation.is_current(version)

    def record_failure(self, reason: str) -> None:
        """Of the run or its learner, with what was measured since the last step and of the step in training."""
        said = self.stats.get(self.learner or "", {})
        self._records.failure(reason, self._lineage.gauges() | {f"learner/{k}": v for k, v in said.items()})

"""A worker on another machine as its gateway sees it: one connection to the coordinator in its name."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from pipeline.channels import PeerSocket
from pipeline.errors import WeightError, WireError
from pipeline.messages import (
    AttemptFailed,
    Cancel,
    Heartbeat,
    Hello,
    Judgements,
    Leave,
    NewWeights,
    PeerFailed,
    Rollouts,
    Stop,
    ToPeer,
    VerifyJobs,
    WeightsLoaded,
    WeightsRefused,
    WorkItems,
)
from pipeline.remote.host import Host, Ware
from pipeline.remote.link import Link
from pipeline.remote.parcels import Parcels
from pipeline.remote.wire import Down, FromWorker, Pull, Received, Resume, ToWorker, Up
from pipeline.soundness import check_heartbeat, check_loaded, one_line

# A worker says its first word after importing its libraries.
STARTING_S = 600.0


class Session:
    """From one Hello to its end. To the coordinator this is an engine, or a verifier, like others; to the worker, the
    coordinator.

    The worker has `held`: results of other attempts are not passed on, so that what was given to somebody else, or is
    made up, has no effect.
    """

    def __init__(
        self,
        hello: Hello,
        routing_id: bytes,
        peer: PeerSocket,
        host: Host,
        parcels: Parcels,
        transmit: Callable[[bytes, Any], None],
        clock: Callable[[], float],
    ):
        self.id, self.name, self.host = hello.boot_id, hello.name, hello.host
        self.role, self.place = hello.role, hello.place
        self.store = hello.store or hello.boot_id  # what it shares with the others of its host
        self._relay = hello.relay
        self.routing_id = routing_id
        self.peer = peer
        self.held: set[int] = set()
        # `late` results of attempts that it does not hold, `rejected` messages, `sent_bytes` of weights and tokenizer
        self.counts: Counter[str] = Counter()
        self.end_reason = ""  # why it is over, once it is
        self._parcels = parcels
        self._transmit = transmit
        self._clock = clock
        self._link: Link[ToWorker] = Link()
        self._shares = host
        self._on_offer: Ware | None = None  # until it is loaded
        self._newest = -1  # version that the coordinator has announced
        self._given = -1  # version that was on offer last
        self.is_stopped = False
        self._has_spoken = False
        self._heard = clock()
        peer.say_hello()

    # --- from the worker ---

    def on_frame(self, frame: Up | Resume | Pull | Received) -> None:
        self._heard = self._clock()
        match frame:
            case Pull():
                self._on_pull(frame)
            case Received():
                self._link.acknowledged(frame.received)
            case Resume():
                self._link.acknowledged(frame.received)
                self._transmit(self.routing_id, Received(self.id, self._link.received))
                for number, body in self._link.unacknowledged:
                    self._transmit(self.routing_id, Down(self.id, number, self._link.received, body))
            case Up():
                self._has_spoken = True
                self._link.acknowledged(frame.received)
                if self._link.accept(frame.seq):
                    try:
                        self._on_message(frame.body)
                    except WireError:
                        self.counts["rejected"] += 1
                if isinstance(frame.body, Heartbeat | Leave):
                    self._transmit(self.routing_id, Received(self.id, self._link.received))

    def _on_message(self, message: FromWorker) -> None:
        match message:
            case Rollouts():
                if mine := tuple(rollout for rollout in message.rollouts if self._gives_back(rollout.attempt_id)):
                    self.peer.send(Rollouts(mine))  # the coordinator looks into them, as into those of any engine
            case Judgements():
                if mine := tuple(j for j in message.judgements if self._gives_back(j.attempt_id)):
                    self.peer.send(Judgements(mine))
            case AttemptFailed():
                if self._gives_back(message.attempt_id):
                    self.peer.send(msgspec.structs.replace(message, reason=one_line(message.reason)))
            case WeightsLoaded():
                self._is_over(message.policy_version)
                check_loaded(message, self._newest)
                self._shares.loaded(self.id, message.policy_version, self._relay)
                self.peer.send(message)
            case WeightsRefused():
                if self._has_source:
                    self._shares.relay_failed(message.policy_version)
                self._is_over(message.policy_version)
                if message.policy_version <= self._newest:
                    self.peer.send(WeightsRefused(message.policy_version, one_line(message.reason)))
            case Heartbeat():
                check_heartbeat(message)
                self.peer.send(message)
            case PeerFailed():  # one machine of many: the run goes on without it
                self.end_reason = one_line(message.reason)
            case Leave():
                self.end_reason = "left"

    def _gives_back(self, attempt_id: int) -> bool:
        is_held = attempt_id in self.held
        self.held.discard(attempt_id)
        self.counts["late"] += not is_held
        return is_held

    @property
    def _has_source(self) -> bool:
        return self._on_offer is not None and self._on_offer.offer.source != ""

    def _is_over(self, version: int) -> None:
        """The worker has loaded or refused a version: it is offered the next."""
        if self._on_offer is not None and self._on_offer.version == version:
            self._on_offer = None
            self._shares.leave(self.id)
            self._offer_next()

    def _on_pull(self, pull: Pull) -> None:
        content = self._parcels.find(pull.checksum)
        if content is not None:
            piece = content.piece(pull.offset)
            self.counts["sent_bytes"] += len(piece.data)
            self._shares.sent(piece, content.parcel.num_bytes)
            if (
                self._on_offer is not None
                and self._has_source
                and pull.checksum == self._on_offer.weights.parcel.checksum
            ):
                self._shares.relay_failed(self._on_offer.version)
            self._transmit(self.routing_id, piece)

    def _offer_next(self) -> None:
        """What the worker's host is given, unless it was on offer here, or is for others yet."""
        current = self._shares.current
        if self._on_offer is None and current is not None and self._given < current.version <= self._newest:
            self._on_offer = self._shares.give(self.id)
            if self._on_offer is not None:
                self._given = self._on_offer.version
                self._send(self._on_offer.offer)

    # --- from the coordinator ---

    def forward(self) -> None:
        """Pass on what the coordinator has sent to the worker."""
        while (message := self.peer.recv(0)) is not None:
            self._on_order(message)
        self._offer_next()

    def _on_order(self, message: ToPeer) -> None:
        match message:
            case WorkItems():
                self.held.update(work.attempt_id for work in message.items)
                self._send(message)
            case VerifyJobs():
                self.held.update(job.attempt_id for job in message.jobs)
                self._send(message)
            case Cancel():
                self.held.difference_update(message.attempt_ids)
                self._send(message)
            case NewWeights():
                try:
                    self._shares.announce(Ware(*self._parcels.offer(message.notice)))
                except WeightError as e:  # damaged; or replaced already, and the newer one is announced next
                    self.peer.send(WeightsRefused(message.notice.policy_version, e.message))
                    return
                self._newest = max(self._newest, message.notice.policy_version)
                self._given = min(self._given, message.notice.policy_version - 1)  # it may be asked to try once more
            case Stop():
                self.is_stopped = True
                self._send(message)

    def _send(self, body: ToWorker) -> None:
        number = self._link.send(body)
        self._transmit(self.routing_id, Down(self.id, number, self._link.received, body))

    # --- the end ---

    def silent_s(self) -> float:
        return self._clock() - self._heard

    def is_cut_off(self, limit_s: float) -> bool:
        """Whether nothing was heard for too long; before the first word it may take its time."""
        return self.silent_s() > (limit_s if self._has_spoken else max(limit_s, STARTING_S))

    @property
    def is_done(self) -> bool:
        """The run has ended, and the worker knows."""
        return self.is_stopped and not any(self._link.unacknowledged)

    def close(self) -> None:
        """Give the coordinator back what the worker holds."""
        if not self.is_stopped:
            self.peer.send(Leave(self.id))
        self._shares.end(self.id)
        self.peer.close()

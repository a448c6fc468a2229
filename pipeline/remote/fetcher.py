"""Turns what a run offers into weights that lie on this machine."""

import re
import time
from collections.abc import Callable, Sequence

import msgspec

from pipeline.errors import WeightError
from pipeline.messages import WeightsNotice
from pipeline.remote.download import Download
from pipeline.remote.store import Held, HostStore
from pipeline.remote.wire import Offer, Parcel, Piece

# As many as a learner keeps: the version that serves, and the one that comes next while the engine has yet to load it.
_KEPT = 2
_CHECKSUM = re.compile(r"[0-9a-f]{16}")
LOOK_S = 0.02  # between two looks at what another worker of this host fetches
STALLED_S = 20.0  # without a byte: longer than it takes a broken connection to be replaced


class Fetcher:
    """One parcel at a time: the model's files before the first weights, then those on offer.

    What another worker of this host has is taken from there, and what it fetches is waited for: until it has ended, or
    nothing came to it for STALLED_S.
    """

    def __init__(
        self,
        store: HostStore,
        pull: Callable[[str, int], None],
        give: Callable[[Sequence[Held]], None] = lambda held: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`give` is told what there is to pass on, before anything that was is closed."""
        self._store = store
        self._pull = pull
        self._give = give
        self._clock = clock
        self._model: Held | None = None
        self._offer: Offer | None = None  # the one under way
        self._download: Download | None = None
        self._kept: list[Held] = []
        self._progress = (0, 0.0)  # bytes that have come to another worker, and since when no more have

    @property
    def is_waiting(self) -> bool:
        """For another worker of this host: `look` every LOOK_S."""
        return self._offer is not None and self._download is None

    def on_offer(self, offer: Offer) -> WeightsNotice | None:
        """Begin to fetch; the notice of the weights on offer, if they are here already. Raises WeightError."""
        if not (_CHECKSUM.fullmatch(offer.model.checksum) and _CHECKSUM.fullmatch(offer.notice.checksum)):
            raise WeightError("the run offers weights under what is no checksum; files are named after it")
        self._offer = offer
        self._progress = (0, self._clock())
        return self._advance()

    def on_piece(self, piece: Piece) -> WeightsNotice | None:
        """The notice of the weights that this piece completes, with paths of this machine; raises WeightError."""
        if self._download is None:
            return None
        self._download.put(piece)
        if not self._store.is_claimed(self._download.held):  # it came too late for those who wait
            self._give_up()
        return self._advance()

    def look(self) -> WeightsNotice | None:
        """As `on_piece`, of what another worker fetches; goes on in its place where it has ended or stands still."""
        if not self.is_waiting:
            return None
        ready = self._advance()
        if self.is_waiting and self._offer is not None:
            parcel, now = self._missing(self._offer), self._clock()
            if parcel is not None and (here := self._store.num_here(parcel)) != self._progress[0]:
                self._progress = (here, now)
            elif parcel is not None and now - self._progress[1] > STALLED_S:
                self._store.depose(parcel)
        return ready

    def ask_again(self) -> None:
        """After a new connection: what was on its way is lost."""
        self._progress = (self._progress[0], self._clock())  # nor did the others get anything
        if self._download is not None:
            self._download.ask_again()

    def forget(self) -> None:
        """What came was refused: the next offer, though it be of the same version, is fetched anew."""
        refused, self._kept = self._kept, []
        self._give(self._kept)
        for held in refused:
            self._store.discard(held)

    def abandon(self) -> None:
        """The session is over; the next one has an offer of its own."""
        self._give_up()
        self._offer = None

    def _give_up(self) -> None:
        """Let another worker of this host go on."""
        if self._download is not None:
            self._store.done(self._download.held)
            self._download.held.close()
            self._download = None

    def _advance(self) -> WeightsNotice | None:
        """Put away a download that is complete and start what is missing; the notice once nothing is."""
        if self._offer is None:
            return None
        if self._download is not None:
            if not self._download.is_complete:
                return None
            held, self._download = self._download.held, None
            self._store.done(held)
            self._put_away(held, self._offer)
        while parcel := self._missing(self._offer):
            held = self._store.find(parcel)
            if held is None:
                held = self._store.claim(parcel)
                if held is None:
                    return None
                self._download = Download(held, self._pull)
                return self._advance() if self._download.is_complete else None
            self._put_away(held, self._offer)
        self._store.unfollow()
        ready, self._offer = self._local(self._offer), None
        return ready

    def _put_away(self, held: Held, offer: Offer) -> None:
        if held.parcel == offer.model:
            self._store.unpacked(held)
            if self._model is not None:
                self._store.release(self._model)
            self._model = held
        else:
            kept = [*self._kept, held]
            old, self._kept = kept[:-_KEPT], kept[-_KEPT:]
            self._give(self._kept)
            for one in old:
                self._store.release(one)

    def _missing(self, offer: Offer) -> Parcel | None:
        if self._model is None or offer.model != self._model.parcel:
            return offer.model
        weights = Parcel(offer.notice.checksum, offer.notice.num_bytes)
        return None if any(held.parcel == weights for held in self._kept) else weights

    def _local(self, offer: Offer) -> WeightsNotice:
        assert self._model is not None
        path = next(held.path for held in self._kept if held.parcel.checksum == offer.notice.checksum)
        return msgspec.structs.replace(offer.notice, path=path, model_dir=str(self._store.unpacked(self._model)))

    def close(self) -> None:
        self.abandon()
        self._give(())
        for held in (*self._kept, *filter(None, [self._model])):
            self._store.release(held)
        self._kept, self._model = [], None
        self._store.close()

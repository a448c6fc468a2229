"""Turns what a run offers into weights that lie on this machine."""

from collections.abc import Callable

import msgspec
import xxhash

from pipeline.errors import WeightError
from pipeline.messages import WeightsNotice
from pipeline.remote.download import Download
from pipeline.remote.parcels import unpack_model
from pipeline.remote.wire import Offer, Parcel, Piece
from pipeline.scratch import Scratch

# As many as a learner keeps: the version that serves, and the one that comes next while the engine has yet to load it.
_KEPT = 2


class Fetcher:
    """One download at a time: the model's files before the first weights, then those on offer."""

    def __init__(self, pull: Callable[[str, int], None]):
        self._pull = pull
        self._scratch = Scratch("ngu-worker-")
        self._model: Parcel | None = None  # the one in the scratch directory
        self._offer: Offer | None = None  # the one under way
        self._download: Download | None = None
        self._kept: list[Download] = []

    def on_offer(self, offer: Offer) -> WeightsNotice | None:
        """Begin to fetch; the notice of the weights on offer, if they are here already."""
        self._offer = offer
        return self._advance()

    def on_piece(self, piece: Piece) -> WeightsNotice | None:
        """The notice of the weights that this piece completes, with paths of this machine; raises WeightError."""
        if self._download is None:
            return None
        self._download.put(piece)
        return self._advance()

    def ask_again(self) -> None:
        """After a new connection: what was on its way is lost."""
        if self._download is not None:
            self._download.ask_again()

    def forget(self) -> None:
        """What came was refused: the next offer, though it be of the same version, is fetched anew."""
        for download in self._kept:
            download.close()
        self._kept = []

    def abandon(self) -> None:
        """The session is over; the next one has an offer of its own."""
        if self._download is not None:
            self._download.close()
        self._download = self._offer = None

    def _advance(self) -> WeightsNotice | None:
        """Put away a download that is complete and start what is missing; the notice once nothing is."""
        if self._offer is None:
            return None
        if self._download is not None:
            if not self._download.is_complete:
                return None
            self._put_away(self._download, self._offer)
            self._download = None
        if missing := self._missing(self._offer):
            self._download = Download(missing, self._pull)
            return None
        ready, self._offer = self._local(self._offer), None
        return ready

    def _put_away(self, download: Download, offer: Offer) -> None:
        if download.parcel == offer.model:
            data = download.read()
            download.close()
            if xxhash.xxh3_64_hexdigest(data) != download.parcel.checksum:
                raise WeightError("the model's config and tokenizer did not arrive whole; start the worker again")
            unpack_model(data, self._scratch.path)
            self._model = download.parcel
        else:
            self._kept.append(download)
            while len(self._kept) > _KEPT:
                self._kept.pop(0).close()

    def _missing(self, offer: Offer) -> Parcel | None:
        if offer.model != self._model:
            return offer.model
        weights = Parcel(offer.notice.checksum, offer.notice.num_bytes)
        return None if any(d.parcel == weights for d in self._kept) else weights

    def _local(self, offer: Offer) -> WeightsNotice:
        path = next(d.path for d in self._kept if d.parcel.checksum == offer.notice.checksum)
        return msgspec.structs.replace(offer.notice, path=path, model_dir=str(self._scratch.path))

    def close(self) -> None:
        self.abandon()
        self.forget()
        self._scratch.close()

"""What a gateway has to give away in pieces: weights of some version, and the model's config and tokenizer."""

import mmap
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec
import xxhash

from pipeline.errors import WeightError
from pipeline.messages import WeightsNotice
from pipeline.remote.wire import PIECE_BYTES, Offer, Parcel, Piece
from pipeline.weights import map_weights


class Content:
    """The bytes of a parcel. A mapped file stays readable after a newer version has replaced it."""

    def __init__(self, data: bytes | mmap.mmap, checksum: str):
        self.data = data
        self.parcel = Parcel(checksum, len(data))

    def piece(self, offset: int) -> Piece:
        end = max(offset, 0) + PIECE_BYTES
        return Piece(self.parcel.checksum, offset, self.data[max(offset, 0) : end])


class Parcels:
    """Every content that somebody holds; sessions hold what they have on offer, or will have next."""

    def __init__(self):
        self._known: WeakValueDictionary[str, Content] = WeakValueDictionary()
        self._models: dict[str, Content] = {}  # by directory, of which a run has one

    def offer(self, notice: WeightsNotice) -> tuple[Offer, Content]:
        """What to tell a worker, and the content that must be held until it has it.

        Raises WeightError when the file is missing or not the announced bytes.
        """
        weights = self._known.get(notice.checksum)
        if weights is None:
            weights = self._known[notice.checksum] = Content(map_weights(notice), notice.checksum)
        model = self._models.get(notice.model_dir)
        if model is None:
            model = self._models[notice.model_dir] = self._pack(Path(notice.model_dir))
        return Offer(notice, model.parcel), weights

    def find(self, checksum: str) -> Content | None:
        return self._known.get(checksum)

    def _pack(self, model_dir: Path) -> Content:
        try:
            files = {path.name: path.read_bytes() for path in sorted(model_dir.iterdir()) if path.is_file()}
        except OSError as e:
            raise WeightError(f"{model_dir}: cannot read the model's config and tokenizer: {e.strerror}") from None
        data = msgspec.msgpack.encode(files)
        content = Content(data, xxhash.xxh3_64_hexdigest(data))
        self._known[content.parcel.checksum] = content
        return content


def unpack_model(data: bytes, model_dir: Path) -> None:
    """Write the files of a model parcel into `model_dir`; raises WeightError unless each is a plain name."""
    files = msgspec.msgpack.decode(data, type=dict[str, bytes])
    for name, content in files.items():
        if Path(name).name != name:
            raise WeightError(f"the run sent a model file named {name!r}, which is no plain name")
        (model_dir / name).write_bytes(content)

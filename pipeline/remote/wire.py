"""Frames between the gateway of a run and a worker on another machine.

Encoded like all messages (`pipeline.messages`): msgpack arrays, to which a field may be appended. A worker begins with
a plain `Hello`, and `Refused` never changes, so that workers of any version can be told why they are not admitted.
"""

from typing import Any

import msgspec

from pipeline.messages import Cancel, FromEngine, Hello, Judgements, Stop, VerifyJobs, WeightsNotice, WorkItems

# Large enough for a rollout of some million tokens; a peer that announces more is disconnected before it is read.
MAX_FRAME_BYTES = 64 << 20
# Small, as only whole frames are signs of life: a link must carry one within `door.SILENT_S`.
PIECE_BYTES = 128 << 10


class Parcel(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Bytes that a worker may ask for piece by piece; `checksum` is xxh3_64 (hex) of all of them, and their name."""

    checksum: str
    num_bytes: int


class Offer(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="offer"):
    """`NewWeights` from afar: the worker fetches the parcel that the notice describes, and `model` before the first.

    `model` holds the files of the notice's model_dir: msgpack, name to bytes. `source` is the door of a worker on
    another host, to be asked for the weights first; empty, or when it fails, the gateway is.
    """

    notice: WeightsNotice
    model: Parcel
    source: str = ""


ToWorker = WorkItems | Cancel | Stop | Offer | VerifyJobs
FromWorker = FromEngine | Judgements

# --- worker to gateway ------------------------------------------------------------------------------------------------


class Up(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="up"):
    """Message number `seq` of a session; `received` is how many of the other side's have been taken in."""

    session: str
    seq: int
    received: int
    body: FromWorker


class Resume(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="resume"):
    """First frame on a new connection of a session: what was not received goes over it once more."""

    session: str
    received: int


class Pull(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="pull"):
    """A request (and the credit) for the piece of a parcel that begins at `offset`, of at most `PIECE_BYTES`."""

    session: str
    checksum: str
    offset: int


class Received(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="received"):
    """An acknowledgement that had no message to go with, in either direction."""

    session: str
    received: int


ToGateway = Hello | Up | Resume | Pull | Received

# --- gateway to worker ------------------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="welcome"):
    """The worker is `name` from now on; `config` is the part of the run's config that an engine needs, as tables."""

    session: str
    name: str
    config: dict[str, Any]


class Refused(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="refused"):
    reason: str


class Over(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="over"):
    """The session is not known (any more): its work is with others. The worker may say Hello again."""

    session: str


class Down(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="down"):
    """As `Up`, the other way."""

    session: str
    seq: int
    received: int
    body: ToWorker


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="piece"):
    checksum: str
    offset: int
    data: bytes


FromGateway = Welcome | Refused | Over | Down | Piece | Received

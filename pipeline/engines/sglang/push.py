"""Ways to get a weights file into a running server: a broadcast to a process group it joins, or a path it reads."""

import asyncio
import contextlib
import mmap
import shutil
import socket
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

from pipeline.engines.sglang.capabilities import Capabilities
from pipeline.engines.sglang.client import Client
from pipeline.errors import EngineError
from pipeline.messages import WeightsNotice
from pipeline.weights import open_weights
from pipeline.weights_layout import TensorEntry

T = TypeVar("T")
PushKind = Literal["gloo", "nccl", "disk"]
# The server holds one bucket beside its weights.
BUCKET_BYTES = 1 << 30


class WeightsFile(NamedTuple):
    """A checked file: what its notice says, its bytes and where each tensor lies in them."""

    notice: WeightsNotice
    view: mmap.mmap
    entries: list[TensorEntry]

    @classmethod
    def open(cls, notice: WeightsNotice) -> "WeightsFile":
        return cls(notice, *open_weights(notice))

    @property
    def layout(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {e.name: (e.dtype, tuple(e.shape)) for e in self.entries}


class Pusher(Protocol):
    """Raises EngineError when the server did not take all of the weights: it may then hold a part of them."""

    async def push(self, weights: WeightsFile, flush: bool) -> None:
        """Load `weights` under their version, into a server that is paused; the caller bounds the time."""
        ...

    def close(self) -> None: ...


class DiskPusher:
    """The server reads the file itself, so it must see the same file system."""

    def __init__(self, client: Client):
        self._client = client
        self._scratch = Path(tempfile.mkdtemp(prefix="ngu-sglang-"))

    async def push(self, weights: WeightsFile, flush: bool) -> None:
        notice = weights.notice
        directory = self._scratch / str(notice.policy_version)
        shutil.rmtree(directory, ignore_errors=True)  # the same version again, after a load that failed
        directory.mkdir()
        for file in Path(notice.model_dir).glob("*.json"):
            (directory / file.name).symlink_to(file)
        (directory / "model.safetensors").symlink_to(notice.path)
        body = {
            "model_path": str(directory),
            "load_format": "auto",
            "weight_version": str(notice.policy_version),
            "flush_cache": flush,
        }
        await self._client.post("/update_weights_from_disk", body, None)
        shutil.rmtree(directory)

    def close(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)


class GroupPusher:
    """Broadcasts the bytes of the file, in buckets, from rank 0 to the server's ranks."""

    def __init__(self, client: Client, has_sessions: bool, group_name: str, group: Any, device: str):
        self._client = client
        self._has_sessions = has_sessions
        self._group_name = group_name
        self._group = group
        self._device = device

    @classmethod
    async def connect(cls, client: Client, server: Capabilities, backend: Literal["gloo", "nccl"], timeout_s: float):
        """Form the group with the server; `timeout_s` bounds this and every broadcast after it."""
        import torch
        from torch._C._distributed_c10d import TCPStore

        name = f"ngu-{uuid.uuid4().hex}"
        address = _address_towards(client.url)
        world_size = 1 + server.tp
        timeout = timedelta(seconds=timeout_s)
        device = f"cuda:{torch.cuda.device_count() - 1}" if backend == "nccl" else "cpu"
        store = TCPStore(address, 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        joining = asyncio.ensure_future(_in_thread(lambda: _join(store, name, backend, world_size, timeout, device)))
        body = {
            "master_address": address,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        try:
            await client.post("/init_weights_update_group", body, timeout_s)
            group = await joining
        except RuntimeError as e:  # what torch.distributed raises
            raise EngineError(f"{client.url}: no process group with the server: {e}") from None
        finally:
            joining.cancel()
        return cls(client, server.has_sessions, name, group, device)

    async def push(self, weights: WeightsFile, flush: bool) -> None:
        if self._has_sessions:
            await self._client.post("/begin_weight_update", {}, None)
        buckets = list(buckets_of(weights.entries))
        for i, bucket in enumerate(buckets):
            body: dict[str, Any] = {
                "names": [e.name for e in bucket],
                "dtypes": [e.dtype for e in bucket],
                "shapes": [e.shape for e in bucket],
                "group_name": self._group_name,
                "load_format": "flattened_bucket",
                "flush_cache": False,
            }
            if i == len(buckets) - 1:
                body |= {"weight_version": str(weights.notice.policy_version), "flush_cache": flush}
            sending = asyncio.ensure_future(_in_thread(lambda bucket=bucket: self._broadcast(weights.view, bucket)))
            try:
                await self._client.post("/update_weights_from_distributed", body, None)
                await sending
            except RuntimeError as e:
                raise EngineError(f"{self._client.url}: the broadcast of the weights failed: {e}") from None
            finally:
                sending.cancel()
        if self._has_sessions:
            await self._client.post("/end_weight_update", {}, None)

    def _broadcast(self, view: mmap.mmap, bucket: Sequence[TensorEntry]) -> None:
        import torch

        begin, end = bucket[0].begin, bucket[-1].end
        flat = torch.frombuffer(view, dtype=torch.uint8, count=end - begin, offset=begin)
        self._group.broadcast(flat.to(self._device), 0).wait()

    def close(self) -> None:
        import torch.distributed

        with contextlib.suppress(RuntimeError, ValueError):  # the other side may be gone
            torch.distributed.destroy_process_group(self._group)


def buckets_of(entries: Sequence[TensorEntry], max_bytes: int = BUCKET_BYTES) -> Iterator[list[TensorEntry]]:
    """Neighbours in the file, together at most `max_bytes` (or one tensor that is larger); tensors without bytes are
    left out.
    """
    bucket: list[TensorEntry] = []
    for entry in entries:
        if entry.begin == entry.end:
            continue
        if bucket and entry.end - bucket[0].begin > max_bytes:
            yield bucket
            bucket = []
        bucket.append(entry)
    if bucket:
        yield bucket


def choose_push(server: Capabilities, num_spare_gpus: int) -> PushKind:
    """The fastest way that needs nothing else: NCCL wants a GPU that no server uses for its rank 0."""
    if server.device == "cpu":
        return "gloo"
    return "nccl" if num_spare_gpus > 0 else "disk"


def _join(store: Any, name: str, backend: str, world_size: int, timeout: timedelta, device: str) -> Any:
    """Rank 0 of the group that SGLang forms: the same store prefix and the same (private) call of torch as there."""
    import torch
    from torch.distributed import distributed_c10d as c10d

    if device != "cpu":
        torch.cuda.set_device(device)
    prefixed: Any = c10d.PrefixStore(name, store)
    group_name: Any = name
    group, _ = c10d._new_process_group_helper(
        world_size, 0, [], c10d.Backend(backend), prefixed, group_name, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}  # without it no group is destroyed
    return group


def _address_towards(url: str) -> str:
    """This host's address as the server sees it."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))  # a datagram socket sends nothing by this
        return probe.getsockname()[0]


async def _in_thread(function: Callable[[], T]) -> T:
    """Run what blocks in a thread that no exit waits for: a broadcast to a stopped server ends only by its timeout."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except Exception as e:
            error = e
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True).start()
    return await done

"""The processes of one learner: who they are, what one tells the others, and what all add up.

Every rank runs the same code on the same batch and differs only in which rollouts it computes. Rank 0 alone talks to
the coordinator and writes files. Nothing is pickled: what crosses is bytes that rank 0 received, or tensors.
"""

import contextlib
import datetime
import fcntl
import os
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.cluster.head import ranks_here
from pipeline.config import Config
from pipeline.errors import ConfigError

# Gradients are added up in pieces of this many numbers: few messages, and no second copy of all gradients.
BUCKET_NUMEL = 1 << 24
_SIOCGIFADDR = 0x8915  # Linux; Python has no name for it


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process's view of its group; alone, every exchange is a no-op.

    `shards`: parameters and optimizer state are split over the ranks (FSDP2) instead of repeated on each.
    `per_node`: so many ranks are on one host, the first of them on that of rank 0; 0: all.
    An exchange with a rank that is gone or silent for too long raises RuntimeError (torch).
    """

    rank: int
    size: int
    device: torch.device
    shards: bool = False
    per_node: int = 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, data: bytes | None) -> bytes:
        """Rank 0's `data`, on every rank; the others pass None."""
        if self.size == 1:
            assert data is not None
            return data
        length = torch.tensor([len(data or b"")])
        dist.broadcast(length, 0)
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        if not self.is_first:
            content = torch.empty(int(length), dtype=torch.uint8)
        if content.numel():
            dist.broadcast(content, 0)
        return content.numpy().tobytes()

    def collect(self, tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """On rank 0 what every rank gave, in the order of ranks; elsewhere the caller's own alone."""
        if self.size == 1:
            return [tensors]
        # Copies, because safetensors refuses tensors that share memory.
        packed = safetensors.torch.save({name: tensor.clone() for name, tensor in tensors.items()})
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(packed)]))
        if not self.is_first:
            dist.send(torch.frombuffer(bytearray(packed), dtype=torch.uint8), 0)
            return [tensors]
        collected = [tensors]
        for rank in range(1, self.size):
            content = torch.empty(int(lengths[rank]), dtype=torch.uint8)
            dist.recv(content, rank)
            collected.append(safetensors.torch.load(content.numpy().tobytes()))
        return collected

    def total(self, value: float) -> float:
        """The sum of every rank's `value`, in float64 and the same on all of them."""
        if self.size == 1:
            return value
        total = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total)

    def add_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace each gradient by its sum over the ranks; FSDP2 has already done so for what it shards."""
        if self.size == 1:
            return
        own = [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]
        for parameter in own:
            if parameter.grad is None:  # this rank had no rollout
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets([p.grad for p in own if p.grad is not None]):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat)
            for gradient, summed in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(summed.view_as(gradient))


def alone() -> Ranks:
    return Ranks(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def join_ranks(rank: int, size: int, rendezvous: str, timeout_s: float, per_node: int = 0) -> Ranks:
    """Meet the other ranks, and wait for all of them: on one host over the file `rendezvous`, new for every group; with
    `per_node` of them on each of several, at the port that rank 0 opens there, tcp://HOST:PORT.

    Gloo on CPUs, with a copy of the model on every rank; NCCL on GPUs, one for each rank, with the model sharded. An
    exchange that takes longer than `timeout_s` fails. Raises ConfigError when there are fewer GPUs than ranks, or GPUs
    on some hosts only.
    """
    from accelerate import PartialState  # a second to import, which a learner of one process does not need

    on_gpu = torch.cuda.is_available()
    here = per_node or size
    # On its own host every rank sees all GPUs, elsewhere its own alone.
    local_rank, num_gpus = (rank, here) if rank < here else (0, 1)
    if on_gpu and torch.cuda.device_count() < num_gpus:
        raise ConfigError(
            f"learner.num_processes: {num_gpus} of them here, but there are {torch.cuda.device_count()} GPUs; lower it"
        )
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
    os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(here)}
    timeout = datetime.timedelta(seconds=timeout_s)
    where: dict[str, Any]
    if per_node:
        store, first_host = _meet(rank, size, rendezvous, "GPUs" if on_gpu else "no GPU")
        store.set_timeout(timeout)
        where = {"store": store}
        os.environ |= {"MASTER_ADDR": first_host, "MASTER_PORT": rendezvous.rpartition(":")[2]}  # accelerate wants them
        interface = os.environ.get("GLOO_SOCKET_IFNAME") or interface_towards(first_host)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    else:
        where = {"init_method": Path(rendezvous).absolute().as_uri()}
        interface = "lo"  # the host's name need not resolve to an address, and what crosses is for this host only
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout, **where)
    state = PartialState(cpu=not on_gpu)
    assert state.device is not None
    return Ranks(state.process_index, state.num_processes, state.device, shards=on_gpu, per_node=per_node)


def _meet(rank: int, size: int, address: str, has: str) -> tuple[Any, str]:
    """The TCPStore of all ranks, once all are there, however long a node takes to be found; and the host of rank 0 as
    others reach it. Raises ConfigError when they are not on hosts alike.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    patient = datetime.timedelta(days=365)  # of a client whose server is not up yet
    make_store: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    store = make_store(host, int(port), size, is_master=rank == 0, timeout=patient, wait_for_workers=False)
    store.set(f"rank {rank}", f"{host} {has}")
    names = [f"rank {other}" for other in range(size)]
    while not store.check(names):
        time.sleep(0.1)
    found = [store.get(name).decode().split(" ", 1) for name in names]
    if others := {what for _, what in found} - {found[0][1]}:
        raise ConfigError(
            f"the learner's first node has {found[0][1]}, and another {others.pop()}; set cluster.gpus_per_rank"
        )
    return store, found[-1][0]  # the last is on another node, where `host` is no name for that node itself


def interface_towards(host: str) -> str:
    """The name of this machine's network interface on the way to `host`, itself included; raises ConfigError if
    there is none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # nothing is sent
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # it has no address
                if socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]) == own:
                    return name
    raise ConfigError(f"no network interface of this machine has the address {own}; set GLOO_SOCKET_IFNAME")


def num_on_node(config: Config) -> int:
    """`Ranks.per_node` of a run: how many of its ranks Ray has on one host; 0 where all are on this one."""
    here = ranks_here(config)
    return here if here < config.learner.num_processes else 0


def leave_ranks(ranks: Ranks) -> None:
    if ranks.size > 1:
        dist.destroy_process_group()


def _buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """In order, each of one dtype and at most BUCKET_NUMEL numbers (or of one gradient)."""
    buckets: list[list[Tensor]] = []
    numel = 0
    for gradient in gradients:
        if not buckets or numel + gradient.numel() > BUCKET_NUMEL or buckets[-1][0].dtype != gradient.dtype:
            buckets.append([])
            numel = 0
        buckets[-1].append(gradient)
        numel += gradient.numel()
    return buckets

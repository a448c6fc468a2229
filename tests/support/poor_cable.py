"""A long, thin, lossy cable in user space, for kernels without netem.

`python poor_cable.py HERE THERE BIT_S DELAY LOSS`

Two network devices, HERE and THERE, and every packet that is sent to one comes out of the other: after it has been
through a queue that is emptied at BIT_S, and DELAY seconds, unless it is one of the share LOSS or the queue is full.
Says "ready" when the devices exist, and lives until it is ended.
"""

import contextlib
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU = 1500
_QUEUE_S = 0.1  # of packets that wait for the link, as many as a router would hold
_BATCH = 64


def _device(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return fd


class Direction:
    def __init__(self, source: int, target: int, bit_s: float, delay_s: float, loss: float):
        self.source, self.target = source, target
        self._byte_s, self._delay_s, self._loss = 8 / bit_s, delay_s, loss
        self._random = random.Random(source)
        self._free_at = 0.0
        self._under_way: deque[tuple[float, bytes]] = deque()

    def take(self, now: float) -> None:
        for _ in range(_BATCH):
            try:
                packet = os.read(self.source, _MTU)
            except BlockingIOError:
                return
            begins = max(now, self._free_at)
            if begins - now > _QUEUE_S:
                continue
            self._free_at = begins + len(packet) * self._byte_s
            if self._random.random() >= self._loss:
                self._under_way.append((self._free_at + self._delay_s, packet))

    def deliver(self, now: float) -> float:
        """Seconds until the next packet arrives."""
        while self._under_way and self._under_way[0][0] <= now:
            packet = self._under_way.popleft()[1]
            with contextlib.suppress(OSError):  # the device has no address yet, or is down
                os.write(self.target, packet)
        return self._under_way[0][0] - now if self._under_way else 1.0


def main() -> None:
    here, there, *figures = sys.argv[1:]
    bit_s, delay_s, loss = map(float, figures)
    first, second = _device(here), _device(there)
    print("ready", flush=True)
    directions = Direction(first, second, bit_s, delay_s, loss), Direction(second, first, bit_s, delay_s, loss)
    while True:
        wait_s = min(direction.deliver(time.monotonic()) for direction in directions)
        ready, _, _ = select.select([first, second], [], [], max(wait_s, 0.0))
        now = time.monotonic()
        for direction in directions:
            if direction.source in ready:
                direction.take(now)


if __name__ == "__main__":
    main()

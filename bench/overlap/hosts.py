"""Engines on many hosts: how new weights reach them, by the gateway's own rules, on the virtual clock."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from pipeline.messages import WeightsNotice
from pipeline.remote.host import Host, Ware
from pipeline.remote.parcels import Content
from pipeline.remote.tree import FAN_OUT, Tree
from pipeline.remote.wire import Offer, Parcel

_HEAD = -1  # the gateway, among the numbers of hosts


class _Engine(msgspec.Struct):
    """As `pipeline.remote.session` sees a worker: versions announced, last on offer, and on offer now."""

    host: int
    announced: int = -1
    given: int = -1
    on_offer: Ware | None = None
    is_loading: bool = False


class _Transfer(msgspec.Struct):
    source: int
    ware: Ware
    left: float = 1.0


class Skew(NamedTuple):
    """Over a stretch of time: versions between the newest and the oldest host at most, and the time above one."""

    largest: int
    above_one_s: float


class Fabric:
    """Hosts fetch whole versions from the head or from each other. One place sends a copy in `copy_s` seconds, or k at
    a time in k times as long; what a host has, its engines load at once.
    """

    def __init__(self, hosts: Sequence[Sequence[str]], copy_s: float, clock: Callable[[], float]):
        self._tree = Tree(clock)
        self._clock, self._copy_s = clock, copy_s
        self._hosts = [Host(self._tree) for _ in hosts]
        self._engines = {name: _Engine(i) for i, names in enumerate(hosts) for name in names}
        self._transfers: dict[int, _Transfer] = {}  # by host
        self._here = [-1] * len(hosts)  # the version that each host has
        self._now = 0.0
        self._published: dict[int, float] = {}
        self.delays: list[tuple[int, float]] = []  # version, and seconds until some host had it
        self.serving = [-1] * len(hosts)  # the oldest version among a host's engines
        self._versions = dict.fromkeys(self._engines, -1)
        self.skews: list[tuple[float, int]] = []  # from when on, how many versions

    def announce(self, name: str, notice: WeightsNotice) -> None:
        engine = self._engines[name]
        self._published.setdefault(notice.policy_version, self._clock())
        self._hosts[engine.host].announce(Ware(Offer(notice, Parcel("", 0)), Content(b"", "")))
        engine.announced = max(engine.announced, notice.policy_version)

    def due_s(self) -> float:
        """When the next transfer ends."""
        self._offer()
        ends = (t.left * self._copy_s * self._num_from(t.source) for t in self._transfers.values())
        return self._now + min(ends, default=math.inf)

    def take(self, now: float) -> list[tuple[str, WeightsNotice]]:
        """Go on to `now`; which engines begin to load what."""
        while (due := self.due_s()) <= now:
            self._run_until(due)
            for host in [h for h, t in self._transfers.items() if t.left < 1e-9]:
                version = self._transfers.pop(host).ware.version
                self._here[host] = version
                self.delays.append((version, self._now - self._published[version]))
        self._run_until(now)
        begin = []
        for name, engine in self._engines.items():
            ware = engine.on_offer
            if ware is not None and not engine.is_loading and self._here[engine.host] >= ware.version:
                engine.is_loading = True
                begin.append((name, ware.offer.notice))
        return begin

    def loaded(self, name: str, version: int) -> None:
        engine = self._engines[name]
        host = self._hosts[engine.host]
        engine.on_offer, engine.is_loading = None, False
        host.leave(name)
        host.loaded(name, version, str(engine.host))
        self._versions[name] = version
        mates = (n for n, e in self._engines.items() if e.host == engine.host)
        self.serving[engine.host] = min(self._versions[n] for n in mates)
        self.skews.append((self._clock(), max(self.serving) - min(self.serving)))

    def skew(self, begin_s: float, end_s: float) -> Skew:
        """Each value holds until the next."""
        ends = [time_s for time_s, _ in self.skews[1:]] + [end_s]
        within = [
            (min(end, end_s) - max(time_s, begin_s), value)
            for (time_s, value), end in zip(self.skews, ends, strict=True)
            if end > begin_s and time_s < end_s
        ]
        lasting = [(lasts_s, value) for lasts_s, value in within if lasts_s > 0]
        return Skew(max(value for _, value in lasting), sum(lasts_s for lasts_s, value in lasting if value > 1))

    def _offer(self) -> None:
        for name, engine in self._engines.items():
            current = self._hosts[engine.host].current
            if engine.on_offer is None and current and engine.given < current.version <= engine.announced:
                engine.on_offer = ware = self._hosts[engine.host].give(name)
                if ware is None:
                    continue
                engine.given = ware.version
                if engine.host not in self._transfers and self._here[engine.host] < ware.version:
                    source = int(ware.offer.source) if ware.offer.source else _HEAD
                    self._transfers[engine.host] = _Transfer(source, ware)

    def _num_from(self, source: int) -> int:
        return sum(t.source == source for t in self._transfers.values())

    def _run_until(self, now: float) -> None:
        shares = {source: self._num_from(source) for source in {t.source for t in self._transfers.values()}}
        for transfer in self._transfers.values():
            transfer.left -= (now - self._now) / (self._copy_s * shares[transfer.source])
        self._now = now


def spread_s(hosts: int, copy_s: float) -> float:
    """Seconds until a host has a version, in the mean: those who have one send FAN_OUT copies at a time."""
    having, left, delays, time_s = 1, hosts, 0.0, 0.0
    while left:
        sent = min(left, FAN_OUT * having)
        time_s += copy_s * min(FAN_OUT, math.ceil(sent / having))
        delays += sent * time_s
        having, left = having + sent, left - sent
    return delays / hosts

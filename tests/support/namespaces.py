"""Other machines of this kernel: network namespaces behind a cable, which the test can cut, slow down or spoil."""

import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import poor_cable


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(argv)}: {done.stderr.strip()}")


class Machine:
    """`here` and `there` are the two addresses, `cable` is the interface here; raises OSError where namespaces are not
    permitted.
    """

    def __init__(self):
        number = secrets.randbelow(1 << 14)
        net = f"10.{200 + (number >> 12)}.{(number >> 4) & 255}"
        first = 16 * (number & 15)
        self.here, self.there = f"{net}.{first + 1}", f"{net}.{first + 2}"
        self.name = f"ngu{os.getpid()}x{number}"
        self.cable = f"ngu{number}"
        _run("ip", "netns", "add", self.name)
        try:
            self._lay_cable()
            for inside, address, device in ((False, self.here, self.cable), (True, self.there, "eth0")):
                ip = ["ip", *(["-n", self.name] if inside else [])]
                _run(*ip, "addr", "add", f"{address}/30", "dev", device)
                _run(*ip, "link", "set", device, "up")
        except OSError:
            self.close()
            raise

    def _lay_cable(self) -> None:
        _run("ip", "link", "add", self.cable, "type", "veth", "peer", "name", "eth0", "netns", self.name)

    def argv(self, *argv: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *argv]

    def cut(self) -> None:
        """Packets are dropped in both directions and nobody is told."""
        _run("ip", "-n", self.name, "link", "set", "eth0", "down")

    def mend(self) -> None:
        _run("ip", "-n", self.name, "link", "set", "eth0", "up")

    def deafen(self) -> None:
        """Half-open: what it sends arrives here, what is sent to it goes to a card that does not exist."""
        _run("ip", "neigh", "replace", self.there, "lladdr", "02:00:00:00:00:99", "dev", self.cable, "nud", "permanent")

    def undeafen(self) -> None:
        _run("ip", "neigh", "del", self.there, "dev", self.cable)

    def slow(self, kbit_per_s: int) -> None:
        """What is sent to it queues for up to a second at that rate."""
        tbf = ["tbf", "rate", f"{kbit_per_s}kbit", "burst", "16kb", "latency", "1s"]
        _run("tc", "qdisc", "replace", "dev", self.cable, "root", *tbf)

    def quicken(self) -> None:
        _run("tc", "qdisc", "del", "dev", self.cable, "root")

    def close(self) -> None:
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True, check=False)  # and the cable with it
        subprocess.run(["ip", "link", "del", self.cable], capture_output=True, check=False)


class FarMachine(Machine):
    """One that is far away: `delay_s` each way, a share `loss` of the packets lost, `bit_per_s` in each direction."""

    def __init__(self, bit_per_s: float = 100e6, delay_s: float = 0.02, loss: float = 0.01):
        self._quality = [str(bit_per_s), str(delay_s), str(loss)]
        self._pump: subprocess.Popen[str] | None = None
        super().__init__()

    def _lay_cable(self) -> None:
        far = f"{self.cable}f"
        argv = [sys.executable, poor_cable.__file__, self.cable, far, *self._quality]
        self._pump = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self._pump.stdout is not None
        if self._pump.stdout.readline() != "ready\n":
            raise OSError("no /dev/net/tun, or no right to use it")
        _run("ip", "link", "set", far, "netns", self.name, "name", "eth0")

    def num_bytes_here(self) -> int:
        """That have arrived from there."""
        return int(Path(f"/sys/class/net/{self.cable}/statistics/rx_bytes").read_text())

    def close(self) -> None:
        if self._pump is not None:
            assert self._pump.stdout is not None
            self._pump.kill()
            self._pump.wait()
            self._pump.stdout.close()
        super().close()


def why_not_permitted(kind: type[Machine] = Machine) -> str:
    """Empty where this process may make such a machine."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"no {' and no '.join(missing)} (iproute2) here"
    try:
        kind().close()
    except OSError as e:
        return str(e)
    return ""

"""A second machine of this kernel: a network namespace behind one cable, which the test can cut, slow down or spoil."""

import os
import secrets
import shutil
import subprocess


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(argv)}: {done.stderr.strip()}")


class Machine:
    """`here` and `there` are the two addresses; raises OSError where namespaces are not permitted."""

    def __init__(self):
        number = secrets.randbelow(1 << 14)
        net = f"10.{200 + (number >> 12)}.{(number >> 4) & 255}"
        first = 16 * (number & 15)
        self.here, self.there = f"{net}.{first + 1}", f"{net}.{first + 2}"
        self.name = f"ngu{os.getpid()}x{number}"
        self._cable = f"ngu{number}"
        _run("ip", "netns", "add", self.name)
        try:
            _run("ip", "link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns", self.name)
            _run("ip", "addr", "add", f"{self.here}/30", "dev", self._cable)
            _run("ip", "link", "set", self._cable, "up")
            _run("ip", "-n", self.name, "addr", "add", f"{self.there}/30", "dev", "eth0")
            _run("ip", "-n", self.name, "link", "set", "eth0", "up")
        except OSError:
            self.close()
            raise

    def argv(self, *argv: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *argv]

    def cut(self) -> None:
        """Packets are dropped in both directions and nobody is told."""
        _run("ip", "-n", self.name, "link", "set", "eth0", "down")

    def mend(self) -> None:
        _run("ip", "-n", self.name, "link", "set", "eth0", "up")

    def deafen(self) -> None:
        """Half-open: what it sends arrives here, what is sent to it goes to a card that does not exist."""
        _run(
            "ip", "neigh", "replace", self.there, "lladdr", "02:00:00:00:00:99", "dev", self._cable, "nud", "permanent"
        )

    def undeafen(self) -> None:
        _run("ip", "neigh", "del", self.there, "dev", self._cable)

    def slow(self, kbit_per_s: int) -> None:
        """What is sent to it queues for up to a second at that rate."""
        tbf = ["tbf", "rate", f"{kbit_per_s}kbit", "burst", "16kb", "latency", "1s"]
        _run("tc", "qdisc", "replace", "dev", self._cable, "root", *tbf)

    def quicken(self) -> None:
        _run("tc", "qdisc", "del", "dev", self._cable, "root")

    def close(self) -> None:
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True, check=False)  # and the cable with it
        subprocess.run(["ip", "link", "del", self._cable], capture_output=True, check=False)


def why_not_permitted() -> str:
    """Empty where this process may make a machine."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"no {' and no '.join(missing)} (iproute2) here"
    try:
        Machine().close()
    except OSError as e:
        return str(e)
    return ""

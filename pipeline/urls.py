"""Which servers a run may talk to: beyond this machine nothing goes in the clear unless the user says so."""

import contextlib
import ipaddress
from urllib.parse import SplitResult, urlsplit


def check_server_url(url: str, push: str, is_private: bool) -> None:
    """Raise ValueError unless a server at `url` may get prompts over HTTP and weights by `push` (`EnginesConfig`)."""
    parts = _split(url)
    if is_private or _is_near(parts.hostname or ""):
        return
    if parts.scheme == "http":
        raise ValueError(
            f"urls: {url} is plain HTTP to another machine, and whoever is on the way could change tokens and weights; "
            "use https, or `ngu worker` there, or set private_network if nobody else is on that network"
        )
    if push != "disk":
        raise ValueError(
            f"urls: {url} is another machine, and only push = disk sends it nothing that is not encrypted; set that, "
            "or private_network if nobody else is on that network"
        )


def _split(url: str) -> SplitResult:
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        # A port that is none raises only when it is asked for.
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    raise ValueError(f'urls: {url!r} is no address of a server; write it as in "http://127.0.0.1:30000"')


def _is_near(host: str) -> bool:
    """Whether `host` is this machine under every resolver; another name may lead anywhere."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"

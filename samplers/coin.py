"""Chance without a state: a number that depends on its key only."""

import hashlib


def uniform(seed: int, *key: int) -> float:
    """A number in [0, 1) that depends on its arguments only: the order in which rounds finish cannot change a coin."""
    digest = hashlib.blake2b("/".join(map(str, (seed, *key))).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little") / 2**56

"""A manifest seals a directory of files: names, sizes and checksums, written last, so that any torn byte is found."""

import os
from collections.abc import Iterable
from pathlib import Path

import xxhash

from pipeline.errors import WeightError

MANIFEST = "learner.manifest"
_SEAL_BYTES = 17  # 16 hexadecimal digits and a line end


def write_manifest(directory: Path, files: Iterable[Path]) -> None:
    """Seal `files`, all below `directory`, which whoever publishes it syncs to the disk."""
    body = "".join(f"{_entry(directory, path)}\n" for path in files).encode()
    (directory / MANIFEST).write_bytes(body + _seal(body))


def verify_manifest(directory: Path) -> None:
    """Raise WeightError unless every byte of every sealed file is the one that was written."""
    path = directory / MANIFEST
    try:
        written = path.read_bytes()
    except OSError:
        raise WeightError(f"{path}: missing, so the checkpoint is unfinished; resume from another one") from None
    body, seal = written[:-_SEAL_BYTES], written[-_SEAL_BYTES:]
    if _seal(body) != seal:
        raise WeightError(f"{path}: torn; resume from another checkpoint")
    for line in body.decode().splitlines():
        file = directory / line.split(" ", 2)[2]
        if not file.is_file() or _entry(directory, file) != line:
            raise WeightError(f"{file}: torn or missing; resume from another checkpoint")


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _entry(directory: Path, path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return f"{digest.hexdigest()} {path.stat().st_size} {path.relative_to(directory)}"


def _seal(body: bytes) -> bytes:
    """The manifest's last line: the checksum of those before it."""
    return f"{xxhash.xxh3_64_hexdigest(body)}\n".encode()

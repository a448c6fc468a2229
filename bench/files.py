"""Files of long studies: what to run, and results as a JSON object a line, so that an interruption loses only what was
running.
"""

import hashlib
import os
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from pipeline import rundir
from pipeline.config import Config, dump_config
from pipeline.errors import ConfigError


class Keyed(Protocol):
    @property
    def key(self) -> str: ...


T = TypeVar("T")
Work = TypeVar("Work", bound=Keyed)
Done = TypeVar("Done", bound=Keyed)


def read_plan(path: Path, kind: type[T], what: str, page: str) -> T:
    """The TOML file that says what to run. Raises ConfigError for one that is not a `kind`, which messages call `what`
    and of which `page` shows an example.
    """
    try:
        return msgspec.toml.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; {page} shows one") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.DecodeError) as e:
        raise ConfigError(f"{path}: not a {what}: {e}") from None


def read_report(path: Path, kind: type[T], what: str, remedy: str) -> T:
    """What another verb wrote as JSON. Raises ConfigError for anything but `what`; `remedy` says how to get one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; {remedy}") from None
    except (OSError, msgspec.DecodeError) as e:
        raise ConfigError(f"{path}: not {what} ({e})") from None


def read_results(path: Path, kind: type[T], repair: bool = True) -> list[T]:
    """The results so far; none when there is no such file. A line torn by a kill is cut off, to be run again, unless
    `repair` is off: then somebody may be writing it.

    `kind` is a struct whose first field is `key`. Raises ConfigError for a file of something else, which then stays as
    it is.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from None
    torn = bool(lines) and not lines[-1].endswith(b"\n")
    try:
        results = [msgspec.json.decode(line, type=kind) for line in (lines[:-1] if torn else lines)]
    except msgspec.DecodeError as e:
        raise ConfigError(f"{path}: not a file of results ({e}); choose another --out") from None
    if torn:
        if not results and not lines[-1].startswith(b'{"key":'):
            raise ConfigError(f"{path}: not a file of results; choose another --out")
        if repair:
            os.truncate(path, sum(map(len, lines[:-1])))
    return results


def run_rest(
    todo: Sequence[Work],
    out: Path,
    kind: type[Done],
    run: Callable[[list[Work]], Iterable[Done]],
    on_done: Callable[[Done, int], object],
) -> list[Done]:
    """Run what `out` does not hold yet and append its results as they come; those of all of `todo`, in its order.

    `on_done` is told each new result and how many are left. Raises ConfigError.
    """
    done = {result.key: result for result in read_results(out, kind)}
    rest = [work for work in todo if work.key not in done]
    try:
        with out.open("ab") as file:
            for result in run(rest):
                file.write(msgspec.json.encode(result) + b"\n")
                file.flush()
                done[result.key] = result
                on_done(result, sum(work.key not in done for work in rest))
    except OSError as e:
        raise ConfigError(f"{out}: cannot be written: {e.strerror}; choose another --out") from None
    return [done[work.key] for work in todo]


def make_directory(out: Path) -> None:
    """Where results go; raises ConfigError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"{out}: cannot be created: {e.strerror}; choose another --out") from None


def hold(out: Path, verb: str) -> rundir.RunLock:
    """Make the directory of a study and keep others of `verb` out of it; raises ConfigError."""
    make_directory(out)
    try:
        return rundir.lock(out)
    except OSError as e:
        raise ConfigError(f"{out}: cannot be created: {e.strerror}; choose another --out") from None
    except ConfigError:
        raise ConfigError(f"{out} is in use by another `{verb}`; wait for it, or choose another --out") from None


def config_key(config: Config) -> str:
    """Names a resolved config: results of equal configs are interchangeable."""
    encoded = msgspec.json.encode(dump_config(config), order="deterministic")
    return hashlib.blake2b(encoded, digest_size=8).hexdigest()

"""The verbs that reach into a run: `ngu ctl` commands it, `ngu logs` reads what its processes print."""

import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from pipeline import rundir
from pipeline.control import Request, Verb, ask
from pipeline.engine_control import USAGE
from pipeline.errors import ConfigError, NguError
from pipeline.logs import LogTail

POLL_S = 0.2
ExistingRun = Annotated[Path, Parameter(help="The directory of a run.")]


def ctl(
    run: ExistingRun,
    verb: Annotated[Verb, Parameter(help="What to do.")],
    *arguments: Annotated[str, Parameter(show_default=False, help="learner.lr=1e-4; add N; remove engine-1.")],
) -> int:
    """Command a running run: pause, resume, drain, checkpoint, eval, set key=value, engines add N, shutdown.

    `pause` lets what runs finish and starts nothing new; `drain` still trains what fills a batch; `resume` ends both.
    `set` changes a live field, for this run and its resumption. `engines add N` starts engines on this machine, and
    `engines remove NAME` has one give its work back and end. Every command is a line of RUN/control.jsonl.
    """
    path = rundir.find(run)
    num_taken = {"set": 1, "engines": 2}.get(verb, 0)
    if len(arguments) != num_taken:
        raise ConfigError(f"`set` takes one key=value, the other commands take none; {USAGE}")
    if not rundir.is_running(path):
        if rundir.read_status(path).get("state") == "finished":
            raise ConfigError(f"{run} has finished")
        raise ConfigError(f"{run} is not running; `ngu resume {run}` goes on with it")
    reply = ask(path, Request(verb, " ".join(arguments)))
    if not reply.ok:
        raise (ConfigError if num_taken else NguError)(reply.text)
    print(reply.text)
    return 0


def logs(
    run: ExistingRun,
    /,
    *,
    role: Annotated[str, Parameter(show_default=False, help="One process, as engine-0. Default: all of them.")] = "",
    follow: Annotated[bool, Parameter(negative="", help="Go on printing until the run ends.")] = False,
) -> int:
    """Print what the processes of a run wrote, each line after the name of its process."""
    path = rundir.find(run)
    known = sorted(p.stem for p in (path / "logs").glob("*.log"))
    if role and role not in known:
        raise ConfigError(
            f"{role!r} has printed nothing in {run}; logs are there of {', '.join(known) or 'no role yet'}"
        )
    tails: dict[Path, LogTail] = {}
    try:
        while True:
            running = follow and rundir.is_running(path)  # before reading, so that the last lines are not missed
            for file in sorted((path / "logs").glob(f"{role or '*'}.log")):
                if file not in tails:
                    tails[file] = LogTail(file)
                for line in tails[file].read(final=not running):
                    print(f"{file.stem} | {line}", flush=True)
            if not running:
                return 0
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return 0
    finally:
        for tail in tails.values():
            tail.close()

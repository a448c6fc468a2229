"""`just chaos`: real runs whose processes are killed or stopped at random moments, and what that does to their books.

A seed is a run, with fake engines (odd seeds) or embedded ones (even), that takes every blow of `DECK` once, in random
order. After each blow the run has to come back, its books have to balance and its steps to be those of before; in the
end it has to finish by itself. Exit status 1, with the reason, when anything of that fails.
"""

import argparse
import contextlib
import math
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from chaos_audit import Audit, Findings, Usage, descendants

from pipeline import rundir

SETTINGS = (
    *("task.eval_per_level=1", "eval.final_num_rollouts=1", "eval.every_steps=0", "learner.batch_size=48"),
    *("max_rollouts=0", "max_steps=1000000", "daemon.checkpoint_every_steps=2", "daemon.ledger_keep_steps=1000000"),
    "staleness.min_ess=0",  # the fake engine's logprobs are made up
    *("daemon.max_restarts=1000", "daemon.restart_wait_s=0"),
)
MODULES = {
    "pipeline.coordinator": "coordinator",
    "learner": "learner",
    "pipeline.verifiers": "verifier",
    "pipeline.worker": "engine",
}
ROLES = (*MODULES.values(), "daemon")
PATIENCE_S = 900.0  # for anything that has to happen, on a busy machine too
MAX_PAUSE_S = 1.5  # between a recovery and the next blow
POLL_S = 0.05
# How often a blow falls while the run is still coming back from the one before.
HASTE = 0.2
MAX_HASTE_S = 3.0


class Blow(NamedTuple):
    role: str
    signum: signal.Signals
    at_checkpoint: bool = False

    def __str__(self) -> str:
        how = "kill -9" if self.signum == signal.SIGKILL else "SIGSTOP"
        return f"{self.role} {how}{', mid-checkpoint' if self.at_checkpoint else ''}"

    def spread(self, before: dict[str, int], after: dict[str, int]) -> list[str]:
        """What is wrong with the roles that have another process after it."""
        changed = {role for role in ROLES if before[role] != after[role]}
        if self.role == "daemon":
            expected = set(ROLES) if self.signum == signal.SIGKILL else set()
        else:
            expected = set(ROLES) - {"daemon"} if self.role == "coordinator" else {self.role}
        return [f"{self}: {sorted(changed)} were started again"] if changed != expected else []


DECK = (
    *(Blow(role, signal.SIGKILL) for role in ROLES),
    *(Blow(role, signal.SIGSTOP) for role in ROLES),
    *(Blow(role, signal.SIGKILL, at_checkpoint=True) for role in ("coordinator", "learner", "daemon")),
)


class Outcome(NamedTuple):
    """Of one blow, or of the end of a run; times in seconds, NaN where there is none.

    `gone_s`: until the stopped process, or with a killed daemon every process of the run, was gone. `recovery_s`: until
    all roles were there again and one more step was trained (`status.json` shows it up to half a second late).
    """

    blow: Blow | Literal["the end"]
    gone_s: float = math.nan
    recovery_s: float = math.nan
    found: Findings = Findings(0, 0, [])


class Broken(Exception):
    """The run did not do in time what it had to do, or ended when it should not."""


class Victim:
    """A run in the background."""

    def __init__(self, run_dir: Path, engine: str, seed: int):
        self.dir = run_dir
        self.resumed: list[subprocess.Popen[bytes]] = []
        done = ngu("start", "--run-dir", str(run_dir), *SETTINGS, f"engines.kind={engine}", f"seed={seed}")
        if done.returncode:
            raise Broken(done.stderr)

    def status(self) -> dict[str, Any]:
        status = rundir.read_status(self.dir)
        if status.get("state") == "failed":
            raise Broken(status["reason"])
        return status

    def roles(self) -> dict[str, int]:
        """The process of each role that lives."""
        daemon = rundir.supervisor_pid(self.dir)
        found = {"daemon": daemon} if daemon is not None else {}
        for pid in descendants(daemon) if daemon is not None else ():
            with contextlib.suppress(OSError):
                argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                if len(argv) > 2 and argv[2] in MODULES:
                    found[MODULES[argv[2]]] = pid
        return found

    def wait_for(self, condition: Callable[[], Any], what: str, poll_s: float = POLL_S) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            for process in self.resumed:
                process.poll()  # or a killed one stays a zombie
            if time.monotonic() > deadline:
                raise Broken(f"{PATIENCE_S:.0f} s without {what}")
            time.sleep(poll_s)
        return found

    def resume(self) -> None:
        argv = [sys.executable, "-m", "pipeline.cli", "resume", "--no-tui", str(self.dir)]
        with self.dir.with_suffix(".log").open("ab") as log:
            self.resumed.append(subprocess.Popen(argv, stdout=log, stderr=log))

    def serves(self) -> bool:
        """Whether every role lives and has spoken, as the coordinator that lives reports it."""
        status, roles = self.status(), self.roles()
        heard = {peer["pid"] for peer in status.get("peers", {}).values()}
        peers = {pid for role, pid in roles.items() if role not in ("coordinator", "daemon")}
        is_complete = set(roles) == set(ROLES) and status.get("pid") == roles["coordinator"]
        return is_complete and peers <= heard and status["state"] == "training"

    def await_recovery(self) -> dict[str, int]:
        """Wait until a whole run has trained one more step; its processes."""
        self.wait_for(self.serves, "a whole run")
        step = self.status()["step"]
        self.wait_for(lambda: self.status().get("step", 0) > step, "another step")
        return self.roles()

    def end(self) -> None:
        """Let it finish by itself, a few steps from now."""
        done = ngu("ctl", str(self.dir), "set", f"max_steps={self.status()['step'] + 4}")
        if done.returncode:
            raise Broken(done.stderr)
        self.wait_for(lambda: not rundir.is_running(self.dir), "its end")
        if (state := self.status()["state"]) != "finished":
            raise Broken(f"it ended {state}")

    def stop(self) -> None:
        """Whatever state it is in; returns when it is gone."""
        daemon = rundir.supervisor_pid(self.dir)
        if daemon is not None:
            os.kill(daemon, signal.SIGCONT)
            os.kill(daemon, signal.SIGTERM)
            self.wait_for(lambda: not rundir.is_running(self.dir), "its end")
        for process in self.resumed:
            process.wait()


def ngu(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pipeline.cli", *args], capture_output=True, text=True, check=False)


def strike(victim: Victim, blow: Blow, rng: random.Random) -> tuple[float, float]:
    """When it fell, and `Outcome.gone_s`; a daemon that was killed is started again, one that was stopped goes on."""
    if blow.at_checkpoint:
        victim.wait_for(lambda: list((victim.dir / "checkpoints").glob(".step_*.partial")), "a checkpoint", 0.001)
    pid = victim.wait_for(lambda: victim.roles().get(blow.role), blow.role)
    watched = [pid, *descendants(pid)] if blow.role == "daemon" else [pid]
    with ended(watched) as wait:
        struck = time.monotonic()
        os.kill(pid, blow.signum)
        if (blow.role, blow.signum) == ("daemon", signal.SIGSTOP):
            time.sleep(rng.uniform(0.0, 2.0))
            os.kill(pid, signal.SIGCONT)
            return struck, math.nan
        gone_s = wait() - struck
    if blow.role == "daemon":
        victim.wait_for(lambda: not rundir.is_running(victim.dir), "the end of its daemon")
        victim.resume()
    return struck, gone_s if blow.role == "daemon" or blow.signum == signal.SIGSTOP else math.nan


@contextlib.contextmanager
def ended(pids: list[int]) -> Iterator[Callable[[], float]]:
    """Gives a function that waits until all these processes are gone, and returns when that was."""
    fds = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            fds.append(os.pidfd_open(pid))

    def wait() -> float:
        for fd in fds:
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            if not poller.poll(1000 * PATIENCE_S):
                raise Broken("a process that does not end")
        return time.monotonic()

    try:
        yield wait
    finally:
        for fd in fds:
            os.close(fd)


def play(
    run_dir: Path, engine: str, seed: int, deck: Sequence[Blow] = DECK, say: Callable[[str], None] = lambda line: None
) -> tuple[list[Outcome], Usage]:
    """One run under all blows of `deck`; `say` gets a line for each.

    Raises Broken when the run does not come back, or does not end by itself.
    """
    rng = random.Random(seed)
    victim = Victim(run_dir, engine, seed)
    audit, usage, outcomes = Audit(run_dir), Usage(), []
    try:
        roles: dict[str, int] | None = victim.await_recovery()  # None while the run is coming back
        usage.note(roles)
        for blow in rng.sample(deck, len(deck)):
            before = roles
            (struck, gone_s), recovery_s, spread = strike(victim, blow, rng), math.nan, []
            if rng.random() < HASTE:
                roles = None
                time.sleep(rng.uniform(0.0, MAX_HASTE_S))
            else:
                roles = victim.await_recovery()
                recovery_s = time.monotonic() - struck
                usage.note(roles)
                spread = blow.spread(before, roles) if before is not None else []
                time.sleep(rng.uniform(0.0, MAX_PAUSE_S))
            outcomes.append(Outcome(blow, gone_s, recovery_s, audit.look().plus(spread)))
            say(f"{blow}: back after {recovery_s:.1f} s, {outcomes[-1].found}")
        victim.await_recovery()
        victim.end()
        outcomes.append(Outcome("the end", found=audit.close()))
    except Broken as e:
        raise Broken(f"{run_dir}: {e}, after {', '.join(str(o.blow) for o in outcomes) or 'the start'}") from None
    finally:
        victim.stop()
    return outcomes, usage


# --- the command ---


def row(name: str, outcomes: list[Outcome]) -> str:
    """A line of the table."""
    cells = []
    for times, per_s in (([o.recovery_s for o in outcomes], 1), ([o.gone_s for o in outcomes], 1000)):
        known = [per_s * t for t in times if not math.isnan(t)]
        cells += [f"{np.percentile(known, q):.1f}" for q in (50, 99)] if known else ["-", "-"]
    lost, doubled = (sum(getattr(o.found, field) for o in outcomes) for field in ("lost", "doubled"))
    faults = sum(len(o.found.faults) for o in outcomes)
    return f"| {name} | {len(outcomes)} | {' | '.join(cells)} | {lost} | {doubled} | {faults} |"


def table(outcomes: list[Outcome]) -> str:
    by_blow = defaultdict(list)
    for outcome in sorted(outcomes, key=lambda o: str(o.blow)):
        by_blow[str(outcome.blow)].append(outcome)
    head = "| blow | number | back after s, p50 | p99 | gone after ms, p50 | p99 | lost | doubled | other faults |"
    lines = [head, "|---" * head.count(" | ") + "|---|", *(row(name, of) for name, of in by_blow.items())]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", help="as 1..16, or 3")
    first, _, last = parser.parse_args().seeds.partition("..")
    seeds = range(int(first), int(last or first) + 1)
    every: list[Outcome] = []
    reasons: list[str] = []
    started = time.monotonic()
    for seed in seeds:
        directory = Path(tempfile.mkdtemp(prefix="ngu-chaos-"))
        engine = "fake" if seed % 2 else "embedded"
        try:
            outcomes, usage = play(directory / "run", engine, seed, say=lambda line: print(f"  {line}", flush=True))
        except Broken as e:
            reasons.append(f"seed {seed}: {e}")
            print(reasons[-1], flush=True)
            continue
        every += outcomes
        new = [*(fault for o in outcomes for fault in o.found.faults), *usage.faults()]
        num = sum(isinstance(o.blow, Blow) for o in every)
        print(f"seed {seed} ({engine}): {num} blows, {time.monotonic() - started:.0f} s; {usage}", flush=True)
        if new:
            reasons += [f"seed {seed}, {directory}: {fault}" for fault in new]
        else:
            shutil.rmtree(directory)
    if every:
        print(table(every))
    print("\n".join(reasons) or "nothing lost, nothing trained twice, every run ended by itself")
    return 1 if reasons else 0


if __name__ == "__main__":
    sys.exit(main())

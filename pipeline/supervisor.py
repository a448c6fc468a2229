"""The supervisor: starts the roles of a run by argv, restarts what dies, and leaves nothing behind.

What dies is replaced alone; of the learner all ranks together, from the newest checkpoint, and the coordinator brings
them to where the run is. When the coordinator dies, or the learner twice at the same step, everything starts again
from the last checkpoint. A coordinator or learner that ends with an expected error (status 1 or 2) ends the run, or
with the same words twice at one step: trying again would end the same way. So does a budget of restarts that is spent,
but an engine's only if no other generates. While a run stops, only its coordinator matters.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from pipeline import checkpoints, rundir
from pipeline.cluster.config import RayConfig
from pipeline.cluster.head import draw_port, ranks_here
from pipeline.config import Config
from pipeline.cores import Cores
from pipeline.engine_control import EngineControl
from pipeline.guards import MAX_RESTART_WAIT_S, HangWatch, RestartBudget
from pipeline.lifeline import LIFELINE_ENV, tie
from pipeline.logs import RoleLog
from pipeline.role import EXIT_CRASH, LEAVE_SIGNAL, PARENT_ENV, ROLE_ENV

POLL_S = 0.1
STOP_GRACE_S = 60.0  # a learner may be in the middle of a step and then writes a checkpoint
LAST_GRACE_S = 15.0  # for the coordinator, if the learner was not done by then
KILL_GRACE_S = 5.0
RAY_GRACE_S = 30.0  # for engines elsewhere to clear up, and a cluster that was started for the run
# A stopped process is killed when so many looks in a row find it so. Looks, not seconds: where a scheduler stops all of
# a job and lets it go on later, the supervisor may be the first to wake up.
STOPPED_LOOKS = 5


class Role(msgspec.Struct):
    name: str
    argv: list[str]
    rank: int | None = None  # of the learner
    process: subprocess.Popen[bytes] | None = None
    due: float | None = None  # it died, and is started again then
    looks_stopped: int = 0
    is_leaving: bool = False  # an engine that was told to go, or a role that a run which stops can do without
    grace_s: float = KILL_GRACE_S  # to end by itself with the run


class RoleEnded(Exception):
    """A role ended in a way that ends the run (`fatal`), or needs a restart of everything; with status 0 as a stop."""

    def __init__(self, reason: str, fatal: bool, status: int):
        super().__init__(reason)
        self.reason, self.fatal, self.status = reason, fatal, status


class Supervisor:
    """Owns the processes of one run; everything happens in the thread that called `run`."""

    def __init__(self, run_dir: Path, config: Config):
        self.run_dir = run_dir
        self.config = config
        self.roles: list[Role] = []
        self.logs: dict[str, RoleLog] = {}
        self._budgets: dict[str, RestartBudget] = {}  # by engine, and of all other roles together
        self.stop_requested = False
        self._learner_died_at = -1  # the step, since everything was started
        self._last_crash = (-1, "")  # of a role without which nothing goes on: the step, and its words
        self._lifeline = run_dir / "ipc" / "lifeline"
        self._engine_names = [f"engine-{i}" for i in range(config.engines.count)]
        self._cores = Cores(config.engines)

    def run(self, resume: bool) -> int:
        (self.run_dir / "logs").mkdir(exist_ok=True)
        while (ended := self._live(resume)) is not None:
            if not ended.fatal:
                resume = True
                print(f"supervisor: {ended.reason}; starting again from the last checkpoint", file=sys.stderr)
                ended = self._pause(self._budget().take())
            if ended is not None:
                self._record(ended)
                return ended.status
        return 0

    def _pause(self, seconds: float) -> RoleEnded | None:
        """Wait before everything is started again; the end of the run if it is stopped meanwhile."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.stop_requested:
            time.sleep(POLL_S)
        return RoleEnded("", fatal=True, status=0) if self.stop_requested else None

    def _live(self, resume: bool) -> RoleEnded | None:
        """Start every role, and return when all have ended: None at the end of the run, else why it was cut short."""
        checkpoints.remove_unfinished(self.run_dir)
        checkpoint = checkpoints.latest(self.run_dir) if resume else None
        shutil.rmtree(self.run_dir / "ipc", ignore_errors=True)  # of a supervisor that was killed
        self._learner_died_at = -1
        with contextlib.ExitStack() as stack:
            try:
                (self.run_dir / "ipc").mkdir(mode=0o700)
                stack.callback(os.close, tie(self._lifeline))
                self._start_all(checkpoint)
                self._watch(stack.enter_context(contextlib.closing(EngineControl(self.run_dir, self))))
                return None
            except RoleEnded as ended:
                ended.fatal |= self.stop_requested
                return ended
            except OSError as e:  # no room on the disk, or for processes
                return RoleEnded(f"the supervisor cannot go on: {e}", fatal=True, status=1)
            finally:
                self._end_all()

    # --- engines that come and go (`engine_control.Processes`) ---

    def engines(self) -> list[str]:
        return list(self._engine_names)

    def is_alive(self, name: str) -> bool:
        role = self._role(name)
        return role is not None and (role.due is not None or (role.process is not None and role.process.poll() is None))

    def add_engine(self, name: str) -> None:
        self._engine_names.append(name)
        role = self._engine_role(name)
        self.roles = [*(r for r in self.roles if r.name != name), role]
        self._start(role)

    def remove_engine(self, name: str) -> None:
        self._engine_names.remove(name)
        role = self._role(name)
        assert role is not None and role.process is not None
        role.is_leaving, role.due = True, None
        role.process.send_signal(LEAVE_SIGNAL)

    def _role(self, name: str) -> Role | None:
        return next((role for role in self.roles if role.name == name), None)

    # --- processes ---

    def _start_all(self, checkpoint: Path | None) -> None:
        run, python = str(self.run_dir), [sys.executable, "-m"]
        self.roles = [
            Role("coordinator", [*python, "pipeline.coordinator", run, *_resume(checkpoint)]),
            *self._learner_roles(checkpoint),
            Role("verifier", [*python, "pipeline.verifiers", run, "--name", "verifier"]),
        ]
        self.roles += [self._engine_role(name) for name in self._engine_names]
        if self.config.eval.pinned and self.config.eval.every_steps:
            # Numbered after the engines, so that what they divide by number has a share for it.
            name = f"evaluator-{self.config.engines.count}"
            argv = [*python, "pipeline.worker", run, "--name", name, "--evaluator"]
            self.roles.append(Role(name, argv))
        if self.config.daemon.listen:
            self.roles.append(Role("gateway", [*python, "pipeline.remote.gateway", run]))
        if isinstance(self.config.cluster, RayConfig):
            self.roles.append(Role("ray", [*python, "pipeline.cluster.ray_role", run], grace_s=RAY_GRACE_S))
        for role in self.roles:
            self._start(role)

    def _engine_role(self, name: str) -> Role:
        argv = [sys.executable, "-m", "pipeline.worker", str(self.run_dir), "--name", name]
        return Role(name, argv)

    def _learner_argv(self, checkpoint: Path | None) -> list[str]:
        return [sys.executable, "-m", "learner", str(self.run_dir), *_resume(checkpoint)]

    def _learner_roles(self, checkpoint: Path | None) -> list[Role]:
        """One process, or the ranks of one learner, which meet where no earlier group has met: over a file, or at a
        port if some are on other nodes, each of which is one process here, too.
        """
        size, argv, here = self.config.learner.num_processes, self._learner_argv(checkpoint), ranks_here(self.config)
        if size == 1:
            return [Role("learner", argv, rank=0)]
        file, address = self.run_dir / "ipc" / f"learner-{secrets.token_hex(4)}", f"tcp://127.0.0.1:{draw_port()}"
        meet = ["--rendezvous", str(file) if here == size else address]
        names = ["learner", *(f"learner-{rank}" for rank in range(1, size))]
        roles = [Role(names[i], [*argv, *meet, "--rank", str(i)], rank=i) for i in range(here)]
        far = [sys.executable, "-m", "pipeline.cluster.ray_learner", str(self.run_dir), *_resume(checkpoint), *meet]
        return roles + [Role(names[i], [*far, "--node", str(i // here)], rank=i) for i in range(here, size, here)]

    def _start(self, role: Role) -> None:
        env = os.environ | ROLE_ENV | {PARENT_ENV: str(os.getpid()), LIFELINE_ENV: str(self._lifeline)}
        # A process group of its own: Ctrl-C in the terminal reaches only the supervisor, which stops the run in order.
        role.process = subprocess.Popen(
            role.argv,
            cwd=self.run_dir,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        self._cores.place(role.name, role.process.pid)
        log = self.logs.setdefault(role.name, RoleLog(self.run_dir / "logs", role.name))
        log.follow(role.process)
        role.due, role.looks_stopped = None, 0

    def _watch(self, control: EngineControl) -> None:
        """Return when the coordinator has ended the run; raise RoleEnded when it cannot go on."""
        coordinator = self.roles[0]
        watch = HangWatch(self.run_dir, self.config.daemon.hang_s)
        deadline: float | None = None
        while True:
            time.sleep(POLL_S)
            control.serve()
            if self.stop_requested and deadline is None:
                deadline = time.monotonic() + STOP_GRACE_S
                assert coordinator.process is not None
                coordinator.process.send_signal(signal.SIGTERM)
            if deadline is not None and time.monotonic() > deadline:
                if all(role.is_leaving for role in self.roles if role.rank is not None):
                    raise RoleEnded(f"the run did not stop within {STOP_GRACE_S:.0f} s", fatal=True, status=1)
                reason = f"the learner has not saved within {STOP_GRACE_S:.0f} s"
                print(f"supervisor: {reason}; the run stops without it", file=sys.stderr)
                for role in self._end_learner():
                    role.is_leaving = True
                deadline += LAST_GRACE_S
            hung = watch.hung()
            for role in self.roles:
                assert role.process is not None
                if role.due is not None:
                    if time.monotonic() >= role.due and not self.stop_requested:
                        self._start(role)
                    continue
                self._end_if_hung(role, hung.get(role.process.pid, ""))
                status = role.process.poll()
                if status is None or role.is_leaving or (status == 0 and role is not coordinator):
                    continue
                if status == 0:
                    return
                self._on_death(role, status)

    def _end_if_hung(self, role: Role, why: str) -> None:
        """Kill a role that is stopped, or that hangs, as `why` says."""
        process = role.process
        assert process is not None
        role.looks_stopped = role.looks_stopped + 1 if _is_stopped(process) else 0
        if role.looks_stopped >= STOPPED_LOOKS:
            why = "is stopped (SIGSTOP)"
        if why:
            print(f"supervisor: {role.name} {why}: it is killed", file=sys.stderr, flush=True)
            process.kill()
            process.wait()

    def _on_death(self, role: Role, status: int) -> None:
        how = f"{role.name} was killed by signal {-status}" if status < 0 else f"{role.name} exited with {status}"
        reason = f"{how} ({self._last_line(role)})"
        is_coordinator, is_learner = role is self.roles[0], role.rank is not None
        if self.stop_requested and not is_coordinator:
            print(f"supervisor: {reason}; the run stops without it", file=sys.stderr)
            for gone in [role] if not is_learner else self._end_learner():
                gone.is_leaving = True
            return
        if self.stop_requested and status == -signal.SIGTERM:  # it was told before it could listen
            raise RoleEnded("", fatal=True, status=0)
        budget = self._budget(role.name)
        if budget.is_spent and not self._others_generate(role):
            reason = f"{reason}; no restarts are left in this hour (daemon.max_restarts)"
            raise RoleEnded(reason, fatal=True, status=1)
        if (is_coordinator or is_learner) and status in (1, 2):
            # The coordinator exits with an expected error for its peers too, with the reason already on record.
            if not is_coordinator:
                self._let_coordinator_end()
            raise RoleEnded(reason, fatal=True, status=status)
        if (is_coordinator or is_learner) and status == EXIT_CRASH and self._is_repeated(reason):
            reason = f"{reason}, twice at step {self._last_crash[0]} in these words; mend that and `ngu resume`"
            raise RoleEnded(reason, fatal=True, status=1)
        if is_coordinator or (is_learner and self._is_beyond_help()):
            raise RoleEnded(reason, fatal=False, status=1)
        wait_s = budget.take()
        print(f"supervisor: {reason}; starting it again in {round(wait_s, 1):g} s", file=sys.stderr)
        for again in [role] if not is_learner else self._renewed_learner():
            again.due = time.monotonic() + wait_s

    def _is_repeated(self, reason: str) -> bool:
        """Whether a crash is the last one over again. Addresses, times and amounts, which differ, do not count."""
        before = self._last_crash
        self._last_crash = rundir.read_status(self.run_dir).get("step", 0), re.sub(r"0x[0-9a-f]+|\d+", "", reason)
        return before == self._last_crash

    def _budget(self, name: str = "") -> RestartBudget:
        """An engine that dies again and again takes nothing from the others, nor from the roles that all need."""
        daemon = self.config.daemon
        new = RestartBudget(daemon.max_restarts, daemon.restart_wait_s)
        return self._budgets.setdefault(name if name in self._engine_names else "", new)

    def _others_generate(self, role: Role) -> bool:
        """Whether `role` is an engine and another lives, or soon will; one that waits for its budget does not count."""
        if role.name not in self._engine_names or not self.config.daemon.max_restarts:
            return False
        soon = time.monotonic() + MAX_RESTART_WAIT_S
        others = [r for r in self.roles if r is not role and r.name in self._engine_names]
        if any(self.is_alive(r.name) and (r.due is None or r.due <= soon) for r in others):
            return True
        peers = rundir.read_status(self.run_dir).get("peers", {}).values()
        return any(peer["role"] == "engine" and peer["host"] for peer in peers)

    def _is_beyond_help(self) -> bool:
        """Whether a learner that has died is not replaced alone: it came no further than the one before it."""
        before, self._learner_died_at = self._learner_died_at, rundir.read_status(self.run_dir).get("step", 0)
        return before == self._learner_died_at

    def _renewed_learner(self) -> list[Role]:
        """Its ranks, which are to begin at the newest checkpoint, with a meeting of their own."""
        ranks = self._end_learner()
        for role, new in zip(ranks, self._learner_roles(checkpoints.latest(self.run_dir)), strict=True):
            role.argv = new.argv
        return ranks

    def _end_learner(self) -> list[Role]:
        """Its ranks. What is left of them is killed: told to end, the first would take away weights that engines may
        still load. The next learner does.
        """
        ranks = [role for role in self.roles if role.rank is not None]
        for role in ranks:
            assert role.process is not None
            role.process.kill()
            role.process.wait()
        return ranks

    def _let_coordinator_end(self) -> None:
        """A learner that fails says why to the coordinator, which puts it on record: give it the time."""
        process = self.roles[0].process
        assert process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_GRACE_S)

    def _last_line(self, role: Role) -> str:
        log = self.logs[role.name]
        return (log.last_lines() or [f"nothing in {log.path}"])[-1].removeprefix("error: ")

    def _end_all(self) -> None:
        """Peers of an ended run exit by themselves; whoever does not is told, then killed."""
        began = time.monotonic()
        processes = [(r.process, r.grace_s) for r in self.roles if r.process is not None]
        ended_well = bool(processes) and processes[0][0].poll() == 0
        for process, _ in processes:
            if not ended_well and process.poll() is None:
                process.terminate()
        for process, grace_s in processes:
            try:
                process.wait(max(0.0, began + grace_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.run_dir / "ipc", ignore_errors=True)

    def _record(self, ended: RoleEnded) -> None:
        """Put the end into status.json, unless it is a failure of which the coordinator, which knows more, already did.
        Once that one has ended: it writes there to its end, in which it was only told to stop.
        """
        checkpoints.remove_unfinished(self.run_dir)  # which may be what the disk is full of
        status = rundir.read_status(self.run_dir)
        state = "failed" if ended.status else "stopped"
        if status.get("state") != "failed" or state == "stopped":
            status |= {"state": state, "reason": ended.reason, "time": time.time()}
            rundir.write_last(self.run_dir / "status.json", msgspec.json.encode(status))


def _resume(checkpoint: Path | None) -> list[str]:
    return ["--resume", str(checkpoint)] if checkpoint else []


def _is_stopped(process: subprocess.Popen[bytes]) -> bool:
    """Whether a signal has stopped this child, which then neither ends nor says anything."""
    if process.poll() is not None:
        return False
    state = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return state is not None and state.si_code == os.CLD_STOPPED

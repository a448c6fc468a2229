"""The verbs that start, watch and end runs. Each works from any terminal: a run is found by its directory."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from pipeline import rundir
from pipeline.cluster.config import RayConfig
from pipeline.cluster.head import resolve_ray
from pipeline.cluster.nodes import read_view
from pipeline.config import Config, load_config
from pipeline.engines.sglang.environment import find_python
from pipeline.errors import ConfigError, NguError
from pipeline.model_path import model_for_task, resolve_model_path
from pipeline.progress import Progress, duration, number, of
from pipeline.remote.keys import run_keys
from pipeline.room import check_room
from pipeline.tasks.base import TaskSource
from pipeline.tasks.jsonl import FileTask
from pipeline.tasks.registry import FileConfig, make_task
from pipeline.verifiers.preflight import resolve_verifier

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 120.0
POLL_S = 0.1

Arguments = Annotated[
    str, Parameter(show_default=False, help="A TOML file, and settings such as learner.lr=1e-4 that override it.")
]
RunDir = Annotated[Path | None, Parameter(help="A new or empty directory. Default: runs/TIME-TASK-SAMPLER.")]
Seed = Annotated[int | None, Parameter(help="Short for seed=N.")]
Plain = Annotated[bool, Parameter(name="--no-tui", negative="", help="A line a step, for a log file.")]
Profile = Annotated[
    bool, Parameter(negative="", show_default=False, help="Short for telemetry.profile=true: a trace for Perfetto.")
]
ExistingRun = Annotated[Path, Parameter(help="The directory of a run.")]


def train(
    *arguments: Arguments, run_dir: RunDir = None, seed: Seed = None, profile: Profile = False, no_tui: Plain = False
) -> int:
    """Train in this terminal; without a file, the built-in job."""
    return _foreground(_new_run(arguments, run_dir, seed, profile), resume=False, live=not no_tui)


def start(*arguments: Arguments, run_dir: RunDir = None, seed: Seed = None, profile: Profile = False) -> int:
    """Train in the background."""
    path = _new_run(arguments, run_dir, seed, profile)
    status = _spawn_supervisor(path)
    if status is not None:
        raise NguError(f"{path}: the run ended at once with status {status}; see {path}/logs/daemon.log")
    run = shown(path)
    print(f"{run}\n  ngu watch {run}\n  ngu status {run}\n  ngu stop {run}")
    return 0


def resume(run: ExistingRun, /, *, no_tui: Plain = False) -> int:
    """Go on with a stopped, failed or killed run from its last checkpoint, in this terminal."""
    path = rundir.find(run)
    if rundir.read_status(path).get("state") == "finished":
        raise ConfigError(f"{run}: the run has finished; start a new one with `ngu train {run}/config.toml`")
    with rundir.lock(path):  # says so here if it is running, before a view opens
        pass
    return _foreground(path, resume=True, live=not no_tui)


def watch(run: ExistingRun, /, *, no_tui: Plain = False) -> int:
    """Watch a run until it ends; Ctrl-C leaves the run alone."""
    from pipeline.view import follow, make_view

    path = rundir.find(run)
    try:
        follow(path, make_view(not no_tui), lambda: not rundir.is_running(path))
    except KeyboardInterrupt:
        print(f"the run goes on; `ngu stop {run}` ends it")
        return 0
    return _close(path)


def status(run: ExistingRun, /, *, json: bool = False) -> int:
    """Say where a run stands.

    Parameters
    ----------
    json:
        Print the whole status as one JSON object.
    """
    path = rundir.find(run)
    progress = Progress(path)
    progress.refresh()
    facts: dict[str, Any] = progress.status | {"running": rundir.is_running(path)}
    if facts["running"] and (cluster := read_view(path)):
        facts["cluster"] = cluster
    if json:
        print(msgspec.json.encode(facts).decode())
        return 0
    print(_headline(facts))
    for line in [*_status_lines(progress), *(facts["cluster"].lines() if "cluster" in facts else [])]:
        print(f"  {line}")
    return 0


def stop(run: ExistingRun, /) -> int:
    """End a run: it saves a checkpoint and every process of it exits."""
    path = rundir.find(run)
    if not rundir.is_running(path):
        print(f"{run} is not running")
        return 0
    pid = rundir.supervisor_pid(path)
    if pid is None:
        raise NguError(f"{run} is only starting or already ending; try again in a moment")
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while rundir.is_running(path):
        if time.monotonic() > deadline:
            raise NguError(f"{run} is still stopping after {STOP_TIMEOUT_S:.0f} s; see {path}/logs, or kill -9 {pid}")
        time.sleep(POLL_S)
    print(_saved(path))
    return 0


def _new_run(arguments: tuple[str, ...], run_dir: Path | None, seed: int | None, profile: bool) -> Path:
    more = [] if seed is None else [f"seed={seed}"]
    if profile:
        more.append("telemetry.profile=true")
    return create_run(read_arguments(arguments, more), run_dir)


def read_arguments(arguments: tuple[str, ...], more: Sequence[str] = ()) -> Config:
    """The config that a command line gives: a file, and settings that override it, `more` after them."""
    files = [a for a in arguments if "=" not in a or _is_file(a)]
    if len(files) > 1:
        raise ConfigError(f"one config file at most, but {', '.join(files)} were given; a setting is written key=value")
    overrides = [a for a in arguments if a not in files]
    return load_config(files[0] if files else None, [*overrides, *more])


def create_run(config: Config, run_dir: Path | None) -> Path:
    """Check everything that can be checked at once, then create the run directory."""
    _check_budget(config)
    config, task = _resolve_task(resolve_ray(config))
    path = rundir.create(run_dir, _resolve_engines(_resolve_model(resolve_verifier(config))))
    if isinstance(config.cluster, RayConfig):
        run_keys(path)  # gateway and engines start at the same time: neither is to make them
    list_set_aside(task, path)
    return path


def _check_budget(config: Config) -> None:
    budget, batch = config.max_rollouts, config.learner.batch_size
    if 0 < budget < batch:
        raise ConfigError(
            f"max_rollouts={budget} is less than learner.batch_size={batch}, so no step would be trained; raise the "
            "one or lower the other"
        )


def _is_file(argument: str) -> bool:
    """False too for a setting that is longer than the name of a file may be, where Path.is_file raises."""
    with contextlib.suppress(OSError):
        return Path(argument).is_file()
    return False


# The roles work in the run directory, so relative paths are fixed to where the command was given.


def _resolve_task(config: Config) -> tuple[Config, TaskSource]:
    task = config.task
    if isinstance(task, FileConfig):
        eval_path = str(Path(task.eval_path).absolute()) if task.eval_path else ""
        task = msgspec.structs.replace(task, path=str(Path(task.path).absolute()), eval_path=eval_path)
    source = make_task(task, config.seed)  # a missing or malformed data set is an error now, not a failed run later
    return msgspec.structs.replace(config, task=task), source


def list_set_aside(task: TaskSource, run_dir: Path) -> None:
    """Write the problems that no answer could solve to `set_aside.jsonl`, and say so; nothing when there is none."""
    if not (isinstance(task, FileTask) and task.set_aside):
        return
    rows = (msgspec.json.encode(problem._asdict()) + b"\n" for problem in task.set_aside)
    (run_dir / "set_aside.jsonl").write_bytes(b"".join(rows))
    num = len(task.set_aside)
    print(f"{num} problem{'s' * (num > 1)} set aside: {shown(run_dir)}/set_aside.jsonl says why")


def _resolve_model(config: Config) -> Config:
    task, kl = str(config.task.__struct_config__.tag), config.learner.kl
    model = msgspec.structs.replace(config.model, path=_found_model(config.model.path, task))
    if kl.reference:
        kl = msgspec.structs.replace(kl, reference=_found_model(kl.reference, task, "learner.kl.reference"))
    learner = msgspec.structs.replace(config.learner, kl=kl)
    config = msgspec.structs.replace(config, model=model, learner=learner)
    check_room(config)
    return config


def _found_model(path: str, task: str, setting: str = "model.path") -> str:
    path = model_for_task(path, task)
    found = resolve_model_path(path, setting)
    return path if path.startswith("builtin:") else str(found.absolute())


def _resolve_engines(config: Config) -> Config:
    starts_servers = config.engines.count > 0 and not config.engines.urls
    if config.engines.kind != "sglang" or not starts_servers:
        return config
    engines = msgspec.structs.replace(config.engines, python=find_python(config.engines))
    return msgspec.structs.replace(config, engines=engines)


def _foreground(run_dir: Path, resume: bool, live: bool) -> int:
    from pipeline import daemon
    from pipeline.view import followed

    print(shown(run_dir), flush=True)
    with followed(run_dir, live):
        exit_status = daemon.run(run_dir, resume=resume)
    _close(run_dir)
    return exit_status


def _close(run_dir: Path) -> int:
    """Print the closing tables; the supervisor has written the report unless it was killed."""
    from pipeline.closing import print_closing
    from pipeline.report import current_summary

    print_closing(current_summary(run_dir), run_dir)
    return 0


def _spawn_supervisor(run_dir: Path) -> int | None:
    """Start the supervisor in a session of its own; returns its exit status if it ended before it was up."""
    logs = run_dir / "logs"
    logs.mkdir(exist_ok=True)
    with (logs / "daemon.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.daemon", str(run_dir)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return process.returncode or None
        if rundir.read_status(run_dir) and rundir.is_running(run_dir):
            return None
        time.sleep(POLL_S)
    raise NguError(f"{run_dir}: not up after {START_TIMEOUT_S:.0f} s; see {logs}/daemon.log, or `ngu stop {run_dir}`")


def _headline(facts: dict[str, Any]) -> str:
    state, reason = facts.get("state", "starting"), facts.get("reason", "")
    if state == "training" and facts.get("mode") in ("pause", "drain"):
        state = "paused" if facts["mode"] == "pause" else "draining"
    if not facts["running"] and "state" not in facts:
        return "not started, or ended before it was up; `ngu resume`, or its Slurm job, starts it"
    if not facts["running"] and state not in rundir.END_STATES:
        return f"dead: its processes ended while it was {state}; `ngu resume` goes on from the last checkpoint"
    return f"{state}: {reason}" if reason else state


def _status_lines(progress: Progress) -> list[str]:
    s = progress.status
    has_ended = s.get("state") in rundir.END_STATES
    attempts = ", ".join(f"{count} {fate.replace('_', ' ')}" for fate, count in s.get("attempts", {}).items() if count)
    lines = [
        f"step {of(s.get('step', 0), s.get('max_steps'))}, rollouts {of(s.get('rollouts', 0), s.get('max_rollouts'))}, "
        f"{duration(progress.elapsed_s)} gone, {duration(progress.time_left_s)} left",
        f"hard pass@1 {number(s.get('hard_pass_at_1'))}, pass@1 {number(s.get('mix_pass_at_1'))}, "
        f"reward {number(s.get('reward_mean'))}",
        f"lag {number(s.get('lag_mean'), 2)} (max {number(s.get('lag_max'), 0)}), ESS {number(s.get('ess'))}, "
        f"{number(s.get('rollouts_per_s'), 0)} rollouts/s, {number(s.get('tokens_per_s'), 0)} tokens/s",
    ]
    if attempts:
        lines.append(f"attempts: {attempts}")
    if errors := s.get("errors"):
        lines.append("errors: " + ", ".join(f"{name.removeprefix('error/')} {n}" for name, n in errors.items()))
    if learner := s.get("learner"):
        ranks = learner["ranks"]
        lines.append(f"learner: {ranks:.0f} rank{'s' * (ranks > 1)}, up in {learner['startup_s']:.1f} s")
    if behind := s.get("catching_up"):
        lines.append(f"learner: started again, catching up: step {behind['at']} of {behind['to']}")
    if (gateway := s.get("gateway")) and not has_ended:
        counts = ", ".join(f"{name.replace('_', ' ')} {n:.0f}" for name, n in gateway.items())
        lines.append(f"gateway at {s['peers']['gateway']['host']}: {counts}")
    peers = s.get("peers", {}) if not has_ended else {}
    lines += [_peer_line(name, peer) for name, peer in peers.items() if peer["role"] == "engine"]
    return lines + [f"warning: {w}" for w in s.get("warnings", [])]


def _peer_line(name: str, peer: dict[str, Any]) -> str:
    where = f" on {peer['host']}" if peer["host"] else ""
    version = "loading" if peer["version"] is None else f"weights {peer['version']}"
    return f"{name}{where}: {version}, {peer['held']} rollouts, heard {number(peer['silent_s'], 1)} s ago"


def _saved(run_dir: Path) -> str:
    from pipeline import checkpoints

    facts = rundir.read_status(run_dir)
    state, step = facts.get("state", "stopped"), facts.get("step", 0)
    kept = checkpoints.published(run_dir)
    if not (kept or step):
        return f"{state}; no step was finished, so there is no checkpoint"
    saved = f"saved {shown(kept[-1])}" if kept else "no checkpoint was saved"
    if step > (checkpoints.step_of(kept[-1]) if kept else 0):  # the learner was away
        saved += ", and the batches since"
    saved = f"{state} at step {step}; {saved}"
    return saved if state == "finished" else f"{saved}; ngu resume {shown(run_dir)}"


def shown(path: Path) -> str:
    """As short as it can be typed from here."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)

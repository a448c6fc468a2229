"""The text of a Slurm job that carries one run from its start to its end, over as many allocations as that takes."""

import re
import shlex
from pathlib import Path

from pipeline.cluster.config import SlurmConfig
from pipeline.remote.keys import DIRECTORY, WORKER_FILE

_ABOUT = """\
#!/usr/bin/env bash
# shellcheck disable=SC2329 # functions that are called by name
# `ngu slurm` wrote this; docs/CLUSTER.md says what it relies on.
"""

_HEAD = r"""
ngu resume "$run" --no-tui &
head=$!

why=""
stop() { # REASON: the run saves a checkpoint and ends
    why=$1
    trap '' TERM USR1
    kill -TERM "$head" 2>/dev/null || true
}
trap 'stop told' TERM # Slurm, before it ends the allocation
"""

_LEND = r"""
# One engine, which works for the run until that ends. If it dies it is started again; the others go on meanwhile.
lend() { # ADDRESS KEY
    local status leaves=""
    trap 'trap "" TERM; leaves=yes; kill -TERM $!' TERM # Slurm tells this shell, and not its children
    while [ -z "$leaves" ]; do
        ngu worker --connect "$1" --key "$2" &
        if [ -n "$leaves" ]; then kill -TERM $!; fi # told just before there was anyone to tell
        wait $!
        status=$?
        if [ -n "$leaves" ]; then
            wait $!
            return
        fi
        case $status in 0 | 2) return "$status" ;; esac # the run is over, or every new start would end the same way
        sleep 5
    done
}

# Engines that end before the run were told of a preemption that the batch script was not told of; or none can work.
serve() {
    local signal=TERM
"""

_SERVE = r"""
    if [ $signal = USR1 ] || [[ "$(ngu status "$run")" =~ ^(starting|evaluating|training|paused|draining) ]]; then
        kill "-$signal" "$$"
    fi
}
trap 'stop alone' USR1
serve &
"""

_WAIT = r"""
status=0
wait "$head" || status=$?
if [ -n "$why" ]; then # what has ended may have been the wait alone
    status=0
    wait "$head" || status=$?
fi
if [[ "$(ngu status "$run")" == finished* ]]; then exit 0; fi
"""

_ALONE = r"""if [ "$why" = alone ]; then
    echo "no engine is left: the run was stopped" >&2
    exit 1
fi
"""

_REQUEUE = r"""if [ "$why" = told ]; then scontrol requeue "$SLURM_JOB_ID"; fi
"""


def job_script(slurm: SlurmConfig, run_dir: Path, port: int) -> str:
    """A script for `sbatch` that goes on with the run in `run_dir`, wherever it stands; its engines join at `port`."""
    has_engines = slurm.engine_nodes > 0
    parts = [_ABOUT, "#\n# The head: everything but the engines.\n" if has_engines else "#\n"]
    parts += _directives(_head_options(slurm, run_dir))
    if has_engines:
        nodes = "one node" if slurm.engine_nodes == 1 else f"each of {slurm.engine_nodes} nodes"
        parts += [f"#\n# The engines: {slurm.engines_per_node} on {nodes}.\n#SBATCH hetjob\n"]
        parts += _directives(_engine_options(slurm))
    parts += ["set -euo pipefail\n", f"{slurm.setup.strip()}\n" if slurm.setup else ""]
    parts += [f"run={shlex.quote(str(run_dir))}\n", _HEAD]
    if has_engines:
        parts += [_LEND, _srun(slurm, port), _SERVE]
    parts += [_WAIT, _ALONE if has_engines else "", _REQUEUE if slurm.requeue else "", 'exit "$status"\n']
    return "".join(parts)


def _directives(options: list[str]) -> list[str]:
    return [f"#SBATCH {option}\n" for option in options]


def _head_options(slurm: SlurmConfig, run_dir: Path) -> list[str]:
    directory = str(run_dir).replace("%", "%%")  # Slurm has patterns such as %j
    return [
        f"--job-name=ngu-{re.sub(r'[^A-Za-z0-9_.-]', '_', run_dir.name)}",
        f"--output={shlex.quote(f'{directory}/slurm-%j.out')}",
        "--open-mode=append",
        f"--time={slurm.time}",
        f"--signal=B:TERM@{slurm.grace_s}",
        "--requeue" if slurm.requeue else "--no-requeue",
        *_place(slurm),
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={slurm.head_cpus}",
        *([f"--gpus-per-node={slurm.head_gpus}"] if slurm.head_gpus else []),
        *slurm.head_options,
    ]


def _engine_options(slurm: SlurmConfig) -> list[str]:
    """Time, signal and requeueing are those of the head."""
    return [*_place(slurm), *_tasks(slurm), *slurm.engine_options]


def _place(slurm: SlurmConfig) -> list[str]:
    named = (("partition", slurm.partition), ("account", slurm.account))
    return [f"--{option}={name}" for option, name in named if name]


def _tasks(slurm: SlurmConfig) -> list[str]:
    """A task for each engine: said to sbatch, and again to srun, whose defaults are those of the head."""
    return [
        f"--nodes={slurm.engine_nodes}",
        f"--ntasks={slurm.engine_nodes * slurm.engines_per_node}",
        f"--ntasks-per-node={slurm.engines_per_node}",
        f"--cpus-per-task={slurm.cpus_per_engine}",
        *([f"--gpus-per-task={slurm.gpus_per_engine}"] if slurm.gpus_per_engine else []),
    ]


def _srun(slurm: SlurmConfig, port: int) -> str:
    """The engines as one step, in which a dead one is no reason to end the others."""
    return rf"""    srun --het-group=1 {" ".join(_tasks(slurm))} \
        --label --wait=0 --kill-on-bad-exit=0 \
        bash -c "$(declare -f lend); lend \"\$@\"" lend "tcp://$(hostname):{port}" "$run/{DIRECTORY}/{WORKER_FILE}" ||
        signal=USR1"""

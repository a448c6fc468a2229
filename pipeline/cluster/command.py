"""`ngu slurm`: a run, made here, that Slurm carries to its end."""

import shutil
import subprocess
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from pipeline.cluster.config import SlurmConfig
from pipeline.cluster.head import check_gpus, without_engines
from pipeline.cluster.slurm import job_script
from pipeline.commands import Arguments, RunDir, create_run, read_arguments, shown
from pipeline.config import Config
from pipeline.errors import ConfigError, NguError
from pipeline.remote.keys import run_keys

SCRIPT = "job.sbatch"


def slurm(
    *arguments: Arguments,
    run_dir: RunDir = None,
    out: Annotated[Path | None, Parameter(help="Where to write the script. Default: RUN/job.sbatch.")] = None,
    submit: Annotated[bool, Parameter(negative="", show_default=False, help="Run sbatch on it, too.")] = False,
) -> int:
    """Make a run and the Slurm job that starts it, goes on with it when it is queued again, and lends it engines."""
    if submit and shutil.which("sbatch") is None:
        raise ConfigError("--submit: there is no sbatch on PATH; leave it out, and run `sbatch` where there is one")
    if out is not None and out.exists():
        raise ConfigError(f"{out} exists already; give another --out or remove it")
    config = read_arguments(arguments)
    table = config.cluster
    if not isinstance(table, SlurmConfig):
        raise ConfigError('the config has no table [cluster] with kind = "slurm"; `ngu init` writes one to fill in')
    _check(config, table)
    if table.engine_nodes:
        config = without_engines(config, "0.0.0.0")
    run = create_run(config, run_dir)
    if table.engine_nodes:
        run_keys(run)  # now, so that engines need not wait for it
    script = out or run / SCRIPT
    try:
        script.write_text(job_script(table, run, int(config.daemon.listen.rpartition(":")[2] or 0)))
    except OSError as e:
        raise ConfigError(f"{script}: cannot write it: {e.strerror}; {run} holds the run all the same") from None
    job = _submit(script) if submit else ""
    print(f"{shown(run)}\n  {f'job {job}' if job else f'sbatch {shown(script)}'}\n  ngu watch {shown(run)}")
    return 0


def _check(config: Config, table: SlurmConfig) -> None:
    """What the table says must fit the others."""
    ranks = config.learner.num_processes
    if 0 < table.head_gpus < ranks:
        raise ConfigError(
            f"cluster.head_gpus = {table.head_gpus}, but each of learner.num_processes = {ranks} needs a GPU; "
            "raise it, or set it to 0 to train on CPUs"
        )
    if table.engine_nodes:
        check_gpus(config, table.gpus_per_engine)


def _submit(script: Path) -> str:
    """The id of the new job."""
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        why = " ".join(done.stderr.split())
        raise NguError(f"sbatch refused {script} ({why}); correct it there, then: sbatch {script}")
    return done.stdout.strip().partition(";")[0]

"""`ngu slurm` without Slurm: what it makes, what it asks for, and what it refuses."""

from pathlib import Path

import pytest

from pipeline import rundir
from pipeline.cli import main
from pipeline.config import Config, load_config
from pipeline.remote.keys import WorkerKeys, read_keys

SLURM = ["engines.kind=fake", "cluster.kind=slurm"]


def made(path: Path, *settings: str) -> tuple[Config, str]:
    assert main(["slurm", *SLURM, *settings, "--run-dir", str(path / "run")]) == 0
    return rundir.read_config(path / "run"), (path / "run" / "job.sbatch").read_text()


def test_the_head_leaves_generation_to_engines_that_find_a_port_and_a_key(tmp_path: Path):
    config, script = made(tmp_path, "engines.count=3", "cluster.engine_nodes=4", "cluster.engines_per_node=2")
    assert config.engines.count == 0
    assert config.daemon.listen.startswith("tcp://0.0.0.0:2")
    assert f"tcp://$(hostname):{config.daemon.listen.rpartition(':')[2]}" in script
    read_keys(tmp_path / "run" / "keys" / "worker.key", WorkerKeys)
    head, engines = script.split("#SBATCH hetjob")
    assert "--ntasks=1\n" in head and "--signal=B:TERM@120\n" in head and "--requeue\n" in head
    assert "#SBATCH --nodes=4\n#SBATCH --ntasks=8\n#SBATCH --ntasks-per-node=2\n" in engines


def test_a_port_that_is_set_is_used_and_options_come_last(tmp_path: Path):
    config, script = made(
        tmp_path,
        "daemon.listen=tcp://0.0.0.0:5555",
        "cluster.partition=gpu",
        "cluster.time=12:00:00",
        'cluster.engine_options=["--partition=big"]',
        'cluster.head_options=["--mem=64G"]',
        "cluster.requeue=false",
    )
    assert config.daemon.listen == "tcp://0.0.0.0:5555" and "tcp://$(hostname):5555" in script
    head, engines = script.split("#SBATCH hetjob")
    assert "#SBATCH --time=12:00:00\n" in head
    assert head.index("--partition=gpu") < head.index("--mem=64G")
    assert engines.index("--partition=gpu") < engines.index("--partition=big")
    assert "scontrol" not in script and "--no-requeue" in script


def test_without_nodes_for_engines_the_head_has_its_own(tmp_path: Path):
    config, script = made(tmp_path, "engines.count=3", "cluster.engine_nodes=0", 'cluster.setup="module load x"')
    assert (config.engines.count, config.daemon.listen) == (3, "")
    assert "hetjob" not in script and "srun" not in script and "\nmodule load x\n" in script
    assert not (tmp_path / "run" / "keys").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["engines.kind=fake"], "no table [cluster]"),
        ([*SLURM, "cluster.learner_nodes=2"], "learner_nodes must be 1"),
        ([*SLURM, "cluster.time=tomorrow"], "time = 'tomorrow'"),
        ([*SLURM, "cluster.partition=a b"], "partition = 'a b'"),
        ([*SLURM, 'cluster.engine_options=["mem=0"]'], "'mem=0' is no option of sbatch"),
        ([*SLURM, 'cluster.head_options=["--mem=0\\n#SBATCH --hold"]'], "is no option of sbatch"),
        ([*SLURM, "cluster.grace_s=5"], ">= 60"),
        ([*SLURM, "cluster.nodes=5"], "unknown key 'nodes'"),
        ([*SLURM, "learner.num_processes=4"], "each of learner.num_processes = 4 needs a GPU"),
        (["cluster.kind=slurm", "engines.kind=sglang", "engines.tp=2"], "engines.tp = 2"),
        (["cluster.kind=slurm", "engines.kind=sglang", 'engines.urls=["http://localhost:1"]'], "engines.urls"),
        ([*SLURM, "--submit"], "no sbatch on PATH"),
        ([*SLURM, "--out", __file__], "exists already"),
        (["engines.count=0"], "engines.count is 0: set daemon.listen"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(settings, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert main(["slurm", *settings, "--run-dir", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_job_that_slurm_refuses_leaves_a_script_to_correct(tmp_path: Path, capsys, monkeypatch):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert main(["slurm", *SLURM, "--run-dir", str(tmp_path / "run"), "--submit"]) == 1
    assert "invalid partition" in capsys.readouterr().err
    assert (tmp_path / "run" / "job.sbatch").exists()


def test_the_table_is_read_from_a_file_too(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text('[cluster]\nkind = "slurm"\nsetup = """\na\nb\n"""\n')
    table = load_config(file).cluster
    assert table is not None and table.setup == "a\nb\n"

"""`cluster.kind = "ray"` without Ray: what a run is made of it, what is refused, what `ngu status` says."""

import json
import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gateways import until

from pipeline import rundir
from pipeline.cli import main
from pipeline.cluster import head, ray_role
from pipeline.cluster.config import RayConfig
from pipeline.cluster.nodes import ClusterView, Node, read_view, write_view
from pipeline.commands import create_run
from pipeline.config import load_config
from pipeline.errors import ConfigError
from pipeline.init_config import render_config
from pipeline.remote.command import given_gpus
from pipeline.remote.keys import WorkerKeys, read_keys

RAY = ["engines.kind=fake", "cluster.kind=ray"]


@pytest.fixture(autouse=True)
def ray_is_installed(monkeypatch):
    monkeypatch.setattr(head, "find_spec", lambda name: name)


@pytest.mark.parametrize(
    ("settings", "listen"),
    [
        ([], "tcp://127.0.0.1:2"),
        (["cluster.address=auto"], "tcp://0.0.0.0:2"),
        (["cluster.address=10.0.0.1:6379", "daemon.listen=tcp://10.0.0.2:5555"], "tcp://10.0.0.2:5555"),
    ],
)
def test_the_head_has_a_port_and_a_key_for_engines_and_none_of_its_own(settings, listen, tmp_path: Path):
    path = create_run(load_config(None, [*RAY, "engines.count=3", *settings]), tmp_path / "run")
    config = rundir.read_config(path)
    assert config.engines.count == 0 and config.daemon.listen.startswith(listen)
    read_keys(path / "keys" / "worker.key", WorkerKeys)
    again = create_run(load_config(path / "config.toml"), tmp_path / "again")
    assert rundir.read_config(again) == config


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["cluster.address=ray://10.0.0.1:1"], "is not written"),
        (["cluster.engines=0"], ">= 1"),
        (["cluster.partition=gpu"], "unknown key 'partition'"),
        (["engines.kind=sglang", "engines.tp=2", "cluster.gpus_per_engine=1"], "engines.tp = 2"),
        (["engines.kind=sglang", 'engines.urls=["http://a:1"]', "engines.private_network=true"], "engines.urls"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(settings, said, tmp_path, capsys):
    assert main(["train", *RAY, *settings, "--run-dir", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("verb", ["train", "resume"])
def test_without_ray_one_line_says_what_to_install(verb, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    if verb == "resume":
        create_run(load_config(None, RAY), run)
    monkeypatch.setattr(head, "find_spec", lambda name: None)
    arguments = [*RAY, "--run-dir", str(run)] if verb == "train" else [str(run)]
    assert main([verb, *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "pip install" in said and "ray" in said


def test_an_address_without_a_cluster_is_refused_at_once():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}': no Ray cluster answers there"):
        ray_role._connect(f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("listen", "found"),
    [("tcp://0.0.0.0:20001", "tcp://10.0.0.7:20001"), ("tcp://10.1.0.7:5555", "tcp://10.1.0.7:5555")],
)
def test_engines_join_where_the_head_can_be_reached(listen, found):
    assert ray_role._reachable(listen, "10.0.0.7") == found


def test_slurm_says_whose_table_it_is(capsys):
    assert main(["slurm", *RAY]) == 2
    assert 'kind = "slurm"' in capsys.readouterr().err


def test_init_offers_both_clusters():
    text = render_config(load_config(None), alternatives=True)
    assert '# kind = "slurm"' in text and '# kind = "ray"' in text
    table = load_config(None, ["cluster.kind=ray", "cluster.strategy=pack"]).cluster
    assert isinstance(table, RayConfig) and table.strategy == "pack"


# --- what `ngu status` says ---


def test_status_names_nodes_with_engines_and_lost_ones(tmp_path, capsys):
    run = create_run(load_config(None, RAY), tmp_path / "run")
    assert read_view(run) is None
    lost = Node("bbbbbbbb", "gpu08", "10.0.0.8", False, ())
    write_view(run, ClusterView("10.0.0.1:6379", (Node("aaaaaaaa", "gpu07", "10.0.0.7", True, (0, 2)), lost), (1,)))
    assert main(["status", str(run)]) == 0
    assert "gpu07" not in capsys.readouterr().out  # it is not running
    with rundir.lock(run):
        assert main(["status", str(run)]) == 0
        said = capsys.readouterr().out
        assert main(["status", str(run), "--json"]) == 0
    assert "Ray at 10.0.0.1:6379: 1 node; no room for engine 1\n" in said
    assert "node aaaaaaaa on gpu07 (10.0.0.7): engines 0, 2\n" in said
    assert "node bbbbbbbb on gpu08 (10.0.0.8): gone\n" in said
    assert '"waiting":[1]' in capsys.readouterr().out


# --- an engine's host ---


# Stands for `ngu worker`: it notes its arguments and what it finds, and ends as `ends` says, or stays.
WORKER = """
import json, os, sys, time
from pathlib import Path
from pipeline import lifeline
lifeline.hold()
key = Path(sys.argv[5])
said = {"argv": sys.argv[1:], "key": key.read_text(), "mode": key.stat().st_mode & 0o777, "pid": os.getpid()}
calls = Path(os.environ["CALLS"])
with calls.open("a") as file:
    file.write(json.dumps(said) + "\\n")
ends = sys.argv[0].split()
num = len(calls.read_text().splitlines())
print("ngu: error: no SGLang here", file=sys.stderr, flush=True)
if num > len(ends):
    time.sleep(600)
sys.exit(int(ends[num - 1]))
"""
HOST = r"""
import sys
from pipeline.cluster import engine_host
engine_host.RESTART_S = 0.0
host = engine_host.EngineHost(3, "tcp://127.0.0.1:1", "the key")
host._ngu = [sys.executable, "-c", "import sys; sys.argv[0] = sys.argv.pop(1)\n" + sys.argv[1], sys.argv[2]]
print(*host.serve())
"""


def started(directory: Path, ends: str) -> subprocess.Popen[str]:
    env = os.environ | {"CALLS": str(directory / "calls"), "TMPDIR": str(directory)}
    argv = [sys.executable, "-c", HOST, WORKER, ends]
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def calls(directory: Path) -> list[dict[str, Any]]:
    file = directory / "calls"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_worker_that_dies_is_started_again_and_one_that_cannot_work_is_not(tmp_path):
    out, err = started(tmp_path, "1 137 2").communicate()
    assert out == "2 no SGLang here\n"
    assert len(calls(tmp_path)) == 3
    assert "status 1: it is started again" in err and "no SGLang here" in err
    said = calls(tmp_path)[0]
    assert (said["key"], said["mode"]) == ("the key", 0o600)
    assert said["argv"][:3] == ["worker", "--connect", "tcp://127.0.0.1:1"] and said["argv"][-2:] == ["--place", "3"]
    assert [path.name for path in tmp_path.iterdir()] == ["calls"]


def test_a_worker_dies_with_its_host(tmp_path):
    with started(tmp_path, "") as host:
        worker = os.pidfd_open(until(lambda: calls(tmp_path), "the worker")[0]["pid"])
        host.kill()
        assert select.select([worker], [], [], 60)[0], "it goes on alone"
        os.close(worker)


def test_a_worker_takes_the_gpus_that_it_was_given(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    assert given_gpus(2) == (6, 7) and given_gpus(1) == (6,)
    with pytest.raises(ConfigError, match=r"engines\.tp = 3"):
        given_gpus(3)
    for nothing in ("", "GPU-1a2b"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
        assert given_gpus(2) == ()

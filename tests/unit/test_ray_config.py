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
from pipeline.cluster import head, joining, ray_learner, ray_role
from pipeline.cluster.bundles import bundles_of, learner_bundle, worker_argv
from pipeline.cluster.config import RayConfig
from pipeline.cluster.nodes import ClusterView, Node, read_view, write_view
from pipeline.commands import create_run
from pipeline.config import load_config, parse_config
from pipeline.errors import ConfigError
from pipeline.init_config import render_config
from pipeline.remote.command import given_gpus
from pipeline.remote.keys import WorkerKeys, read_keys
from pipeline.supervisor import Supervisor

RAY = ["engines.kind=fake", "cluster.kind=ray"]
FAR = ["cluster.address=auto", "cluster.private_network=true"]


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
        (["cluster.learner_nodes=2"], "name a cluster of several machines"),
        (["cluster.learner_nodes=2", "cluster.address=auto"], "nothing encrypts what the ranks"),
        ([*FAR, "cluster.learner_nodes=2", "learner.num_processes=3"], "num_processes = 3 ranks cannot be shared out"),
        (["cluster.gpus_per_rank=2"], "<= 1"),
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
        joining._connect(f"127.0.0.1:{port}", "run")


@pytest.mark.parametrize(
    ("listen", "found"),
    [("tcp://0.0.0.0:20001", "tcp://10.0.0.7:20001"), ("tcp://10.1.0.7:5555", "tcp://10.1.0.7:5555")],
)
def test_engines_join_where_the_head_can_be_reached(listen, found):
    assert ray_role._reachable(listen, "10.0.0.7") == found


def test_what_ray_places_and_what_stands_for_it_on_the_head(tmp_path):
    nodes = ["cluster.learner_nodes=3", "learner.num_processes=6", "cluster.cpus_per_rank=4", "cluster.gpus_per_rank=1"]
    settings = ["cluster.engines=2", "cluster.verifiers=1", "verifier.num_workers=3"]
    config = load_config(None, [*RAY, *FAR, *settings, *nodes])
    found = [(bundle.name, bundle.resources) for bundle in bundles_of(config)]
    assert found == [
        ("engine 0", {"CPU": 1}),
        ("engine 1", {"CPU": 1}),
        ("verifier 0", {"CPU": 3}),
        ("learner ranks 2 to 3", {"CPU": 8, "GPU": 2}),
        ("learner ranks 4 to 5", {"CPU": 8, "GPU": 2}),
    ]
    assert bundles_of(config)[learner_bundle(config, 2)].name == "learner ranks 4 to 5"
    joins = ["worker", "--connect", "tcp://h:1", "--key", "worker.key", "--place", "0", "--role", "verifier"]
    assert worker_argv(bundles_of(config)[2], "tcp://h:1")[2:] == joins

    first, second, *others = Supervisor(tmp_path, config)._learner_roles(tmp_path / "saved")
    assert [(role.name, role.rank) for role in (first, second)] == [("learner", 0), ("learner-1", 1)]
    assert [(role.name, role.rank, role.argv[-2:]) for role in others] == [
        ("learner-2", 2, ["--node", "1"]),
        ("learner-4", 4, ["--node", "2"]),
    ]
    meets = {role.argv[role.argv.index("--rendezvous") + 1] for role in (first, second, *others)}
    assert len(meets) == 1 and meets.pop().startswith("tcp://127.0.0.1:")
    assert all(role.argv[role.argv.index("--resume") + 1] == str(tmp_path / "saved") for role in others)


def test_a_rank_elsewhere_is_started_as_on_the_head_and_traces_nothing():
    argv = ray_learner.rank_argv(2, "tcp://10.0.0.7:20001", "runs/a/checkpoints/step_4")
    assert argv[:5] == ["-m", "learner", ".", "--name", "learner-2"]
    assert argv[5:] == ["--rank", "2", "--rendezvous", "tcp://10.0.0.7:20001", "--resume", "runs/a/checkpoints/step_4"]
    config = load_config(None, [*RAY, "telemetry.profile=true", "learner.lr=0.5"])
    sent = parse_config(json.loads(ray_learner._config_file(config)), "test")
    assert (sent.telemetry.profile, sent.learner.lr) == (False, 0.5)


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
    has = Node("aaaaaaaa", "gpu07", "10.0.0.7", True, ("engine 0", "learner ranks 4 to 7"))
    write_view(run, ClusterView("10.0.0.1:6379", (has, lost), ("engine 1",)))
    assert main(["status", str(run)]) == 0
    assert "gpu07" not in capsys.readouterr().out  # it is not running
    with rundir.lock(run):
        assert main(["status", str(run)]) == 0
        said = capsys.readouterr().out
        assert main(["status", str(run), "--json"]) == 0
    assert "Ray at 10.0.0.1:6379: 1 node; no room for engine 1\n" in said
    assert "node aaaaaaaa on gpu07 (10.0.0.7): engine 0, learner ranks 4 to 7\n" in said
    assert "node bbbbbbbb on gpu08 (10.0.0.8): gone\n" in said
    assert '"waiting":["engine 1"]' in capsys.readouterr().out


# --- an engine's host ---


# Stands for `ngu worker`: it notes what it finds, and ends as `ends` says, or stays.
WORKER = """
import json, os, sys, time
from pathlib import Path
from pipeline import lifeline
lifeline.hold()
key = Path(sys.argv[3])
said = {"key": key.read_text(), "mode": key.stat().st_mode & 0o777, "pid": os.getpid()}
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
from pipeline.cluster import actor
actor.RESTART_S = 0.0
argv = ["-c", "import sys; sys.argv[0] = sys.argv.pop(1)\n" + sys.argv[1], sys.argv[2], "join", "--key", "worker.key"]
host = actor.ProcessHost("engine 3", argv, {"worker.key": "the key"})
print(*getattr(host, sys.argv[3])())
"""


def started(directory: Path, ends: str, serve: str = "serve") -> subprocess.Popen[str]:
    env = os.environ | {"CALLS": str(directory / "calls"), "TMPDIR": str(directory)}
    argv = [sys.executable, "-c", HOST, WORKER, ends, serve]
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
    assert [path.name for path in tmp_path.iterdir()] == ["calls"]


def test_a_rank_that_dies_is_not_started_again_by_its_host(tmp_path):
    out, _ = started(tmp_path, "70 0", "serve_once").communicate()
    assert out == "70 no SGLang here\n" and len(calls(tmp_path)) == 1


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

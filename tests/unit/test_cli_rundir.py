"""The run directory: how one is made, who holds it, and what is refused."""

import os
import stat
from pathlib import Path

import pytest

from pipeline import rundir
from pipeline.config import Config, EnginesConfig, load_config
from pipeline.errors import ConfigError, NguError
from pipeline.ledger import Ledger


def test_a_new_run_holds_its_config_and_an_id(tmp_path: Path):
    config = Config(seed=3, engines=EnginesConfig(count=2))
    run = rundir.create(tmp_path / "deep" / "run", config)
    assert rundir.read_config(run) == config
    assert load_config(run / "config.toml") == config
    assert len(bytes.fromhex((run / "run_id").read_text())) == 6
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert rundir.find(run) == run
    assert not rundir.is_running(run)


def test_default_names_tell_what_runs_and_never_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    runs = [rundir.create(None, Config()) for _ in range(3)]
    assert len(set(runs)) == 3
    assert all(run.parent == tmp_path / "runs" and "-show_your_work-never_give_up" in run.name for run in runs)


@pytest.mark.parametrize("content", ["notes.txt", "config.json"])
def test_an_occupied_directory_is_refused_and_left_alone(tmp_path: Path, content: str):
    (tmp_path / content).write_text("mine")
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="--run-dir"):
        rundir.create(tmp_path, Config())
    assert [p.name for p in tmp_path.iterdir()] == [content]
    assert (tmp_path / content).read_text() == "mine"
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_a_path_that_cannot_be_a_directory_is_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose another --run-dir"):
        rundir.create(tmp_path / "file" / "run", Config())


def test_a_run_has_one_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rundir, "LOCK_PATIENCE_S", 0.0)
    run = rundir.create(tmp_path / "run", Config())
    with rundir.lock(run):
        assert rundir.is_running(run)
        with pytest.raises(ConfigError, match="in use"):
            rundir.lock(run)
        with pytest.raises(ConfigError, match="in use"):
            rundir.create(run, Config())
    assert not rundir.is_running(run)
    rundir.lock(run).release()


def test_a_pid_file_alone_proves_nothing(tmp_path: Path):
    run = rundir.create(tmp_path / "run", Config())
    (run / "daemon.pid").write_text(str(os.getpid()))
    assert rundir.supervisor_pid(run) is None
    with rundir.lock(run):
        assert rundir.supervisor_pid(run) == os.getpid()
        (run / "daemon.pid").write_text(str(os.getppid()))  # alive, but not the holder
        assert rundir.supervisor_pid(run) is None
        (run / "daemon.pid").write_text("torn")
        assert rundir.supervisor_pid(run) is None


def test_find_refuses_what_is_not_a_run(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        rundir.find(tmp_path)
    with pytest.raises(ConfigError, match="no such directory"):
        rundir.find(tmp_path / "nowhere")


def test_a_damaged_config_is_named(tmp_path: Path):
    run = rundir.create(tmp_path / "run", Config())
    (run / "config.json").write_bytes(b'{"seed": ')
    with pytest.raises(ConfigError, match=r"config\.json: damaged"):
        rundir.read_config(run)


def test_status_is_empty_before_it_is_written_and_may_hold_nan(tmp_path: Path):
    assert rundir.read_status(tmp_path) == {}
    (tmp_path / "status.json").write_text('{"ess": NaN, "step": 2}')
    assert rundir.read_status(tmp_path)["step"] == 2
    (tmp_path / "status.json").write_text("torn")
    assert rundir.read_status(tmp_path) == {}, "it is written anew twice a second"
    with pytest.raises(NguError, match=r"status\.json"):
        rundir.read_json(tmp_path / "status.json")


def test_a_config_that_is_replaced_survives_a_power_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = rundir.create(tmp_path / "run", Config(seed=1))
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(rundir, "sync", lambda path: seen.append((path.name, rundir.read_config(run).seed)))
    rundir.write_config(run, Config(seed=2))
    (partial, before), (directory, after) = seen[2:]
    assert partial.startswith(".config.json.") and (before, directory, after) == (1, "run", 2)


def test_an_atomic_write_replaces_the_whole_file_and_leaves_nothing_else(tmp_path: Path):
    path = tmp_path / "file"
    rundir.write_atomic(path, b"a long first version")
    rundir.write_atomic(path, b"short")
    assert path.read_bytes() == b"short"
    assert list(tmp_path.iterdir()) == [path]


def test_a_name_that_no_directory_can_have_is_one_line():
    with pytest.raises(ConfigError, match="File name too long"):
        rundir.find("x" * 300)


def test_a_path_too_long_for_the_ledger_is_refused(tmp_path: Path):
    deep = tmp_path.joinpath(*["x" * 100] * 4)
    longest = deep / ("y" * (rundir.MAX_PATH_BYTES - len(str(deep)) - 1))
    Ledger(rundir.create(longest, Config()) / "ledger.sqlite").close()
    with pytest.raises(ConfigError, match="shorter --run-dir"):
        rundir.create(longest.with_name(longest.name + "y"), Config())

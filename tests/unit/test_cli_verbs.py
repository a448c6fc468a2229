"""The command `ngu`: usage, errors, and the verbs that only look."""

import os
import signal
import subprocess
import sys
import time
from importlib.metadata import EntryPoint
from pathlib import Path

import msgspec
import pytest

from pipeline import cli, rundir
from pipeline.cli import main
from pipeline.config import Config
from pipeline.errors import RunFailed

VERBS = {"train", "start", "stop", "resume", "watch", "status", "init", "doctor"}


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing them takes a second, and the report has its own tests."""
    monkeypatch.setattr("pipeline.plots.to_png", lambda figure: b"a picture")


def write_status(run: Path, **status: object) -> None:
    rundir.write_atomic(run / "status.json", msgspec.json.encode(status))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return rundir.create(tmp_path / "run", Config())


def test_help_names_every_verb_with_a_line_of_its_own(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for verb in cli.entry_points(group=cli.GROUP):
        line = cli._first_line(verb)
        assert line, f"{verb.value} has no docstring"
        assert verb.name in out and line.split()[0] in out
    assert {v.name for v in cli.entry_points(group=cli.GROUP)} >= VERBS


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_each_verb_has_help(verb: str, capsys):
    assert main([verb, "--help"]) == 0
    assert f"ngu {verb}" in capsys.readouterr().out


def test_a_verb_that_cannot_be_found_has_no_line():
    assert cli._first_line(EntryPoint("x", "no_such_module:f", cli.GROUP)) == ""
    assert cli._first_line(EntryPoint("x", "math:sqrt", cli.GROUP)) == ""
    assert cli._first_line(EntryPoint("x", "pipeline.cli:nothing", cli.GROUP)) == ""


@pytest.mark.parametrize("argv", [["bogus"], ["status"], ["status", "a", "b"], ["train", "--bogus", "1"]])
def test_wrong_usage_exits_2(argv: list[str], capsys):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["train", "learner.lr=-1"], "[learner.lr]"),
        (["train", "learner.rl=1"], "did you mean 'lr'"),
        (["train", "missing.toml"], "missing.toml: no such file"),
        (["train", "a.toml", "b.toml"], "one config file at most"),
        (["train", "model.path=missing"], "model.path missing"),
        (["train", "task.kind=jsonl", "task.path=missing.jsonl"], "missing.jsonl"),
        (["status", "nowhere"], "no such directory"),
        (["stop", "."], "not a run directory"),
    ],
)
def test_wrong_input_is_one_line_exits_2_and_leaves_nothing(argv, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("ngu: error: ") and words in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_several_lines_is_shown_on_one(monkeypatch, capsys):
    def fail() -> None:
        raise RunFailed("first\n  second")

    monkeypatch.setattr("pipeline.doctor.doctor", fail)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == "ngu: error: first second\n"


def test_train_passes_the_checked_config_to_the_supervisor(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("seed = 1\n[learner]\nlr = 1e-3\n")
    (tmp_path / "data.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n' * 9)
    seen = []

    def supervise(run_dir: Path, resume: bool) -> int:
        seen.append((run_dir, resume, rundir.read_config(run_dir)))
        write_status(run_dir, state="failed", reason="on purpose")
        return 7

    monkeypatch.setattr("pipeline.daemon.run", supervise)
    argv = ["train", "run.toml", "task.kind=jsonl", "task.path=data.jsonl", "task.eval_size=2", "--seed", "9"]
    (tmp_path / "reference.gguf").write_bytes(b"")
    argv += ["model.path=builtin:manufactoria", "learner.kl.reference=reference.gguf"]
    assert main([*argv, "--no-tui", "--run-dir", "out"]) == 7
    (run_dir, resume, config) = seen[0]
    assert (run_dir, resume) == (tmp_path / "out", False)
    assert (config.seed, config.learner.lr) == (9, 1e-3)
    assert config.model.path == "builtin:manufactoria"
    assert config.task.path == str(tmp_path / "data.jsonl")  # the roles work in another directory
    assert config.learner.kl.reference == str(tmp_path / "reference.gguf")
    assert "failed: on purpose" in capsys.readouterr().out

    assert main(["resume", "out", "--no-tui"]) == 7
    assert seen[1][:2] == (tmp_path / "out", True)


def test_a_finished_run_is_not_resumed(run: Path, capsys):
    write_status(run, state="finished")
    assert main(["resume", str(run)]) == 2
    assert "has finished" in capsys.readouterr().err


def test_a_finished_run_takes_no_commands(run: Path, capsys):
    write_status(run, state="finished")
    assert main(["ctl", str(run), "pause"]) == 2
    assert capsys.readouterr().err == f"ngu: error: {run} has finished\n"


def test_a_role_without_a_log_is_named_with_those_that_have_one(run: Path, capsys):
    (run / "logs").mkdir()
    (run / "logs" / "daemon.log").touch()
    assert main(["logs", str(run), "--role", "learner"]) == 2
    assert "'learner' has printed nothing in" in (said := capsys.readouterr().err)
    assert "logs are there of daemon" in said


def test_status_says_what_a_run_is_doing(run: Path, capsys):
    figures = {"step": 3, "max_rollouts": 100, "rollouts": 30, "attempts": {"trained": 5}, "warnings": ["w"]}
    learner = {"ranks": 2.0, "startup_s": 1.0}
    write_status(run, state="training", learner=learner, catching_up={"at": 1, "to": 3}, **figures)
    with rundir.lock(run):
        assert main(["status", str(run)]) == 0
        assert main(["status", str(run), "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "training"
    assert "rollouts 30/100" in lines[1]
    assert "  attempts: 5 trained" in lines and "  warning: w" in lines
    assert "  learner: 2 ranks, up in 1.0 s" in lines
    assert "  learner: started again, catching up: step 1 of 3" in lines
    assert msgspec.json.decode(lines[-1])["running"] is True


@pytest.mark.parametrize(
    ("status", "first_line"),
    [
        ({"state": "training"}, "dead: "),
        ({}, "not started"),
        ({"state": "failed", "reason": "the disk is full"}, "failed: the disk is full"),
        ({"state": "finished"}, "finished"),
    ],
)
def test_status_of_a_run_that_is_not_running(run: Path, status: dict, first_line: str, capsys):
    engine = {"role": "engine", "host": "", "version": 4, "held": 0, "silent_s": 0.3}
    write_status(run, peers={"engine-0": engine}, **status)
    assert main(["status", str(run)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(first_line)
    assert ("engine-0" in out) == (status.get("state") not in rundir.END_STATES)


def test_watch_of_an_ended_run_shows_how_it_closed(run: Path, capsys):
    write_status(run, state="stopped", attempts={"trained": 4})
    assert main(["watch", str(run)]) == 0
    assert "stopped; 0 steps" in capsys.readouterr().out


def test_ctrl_c_leaves_a_watched_run_alone(run: Path, monkeypatch, capsys):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.view.follow", interrupt)
    assert main(["watch", str(run)]) == 0
    assert "the run goes on" in capsys.readouterr().out


def test_stop_of_a_run_that_is_not_running(run: Path, capsys):
    assert main(["stop", str(run)]) == 0
    assert "is not running" in capsys.readouterr().out


def test_doctor_speaks_of_every_check(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for subject in ("python", "torch", "cores", "memory", "/dev/shm", "directory", "ports", "gpu", "sglang"):
        assert f" {subject} " in out
    assert list(tmp_path.iterdir()) == []


def test_doctor_fails_where_a_run_cannot_live(tmp_path, monkeypatch, capsys):
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fcntl.flock", refuse)
    assert main(["doctor"]) == 1
    assert "fail  directory" in capsys.readouterr().out


def test_a_reader_that_leaves_is_no_error():
    command = [sys.executable, "-m", "pipeline.cli", "train", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


def test_a_kill_lets_a_command_clear_up(monkeypatch: pytest.MonkeyPatch):
    done: list[list[str]] = []

    def verb(tokens: list[str]) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            done.append(tokens)
        return 0

    monkeypatch.setattr(cli, "_app", lambda: verb)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        cli.main(["sweep"])
    assert done == [["sweep"]] and signal.getsignal(signal.SIGTERM) == before

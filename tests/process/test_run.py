"""Whole runs of the built-in job in real processes, small ones: what they leave, and what kills do to them."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import rundir
from pipeline.metrics import read_records

pytestmark = pytest.mark.timeout(280)  # real processes import torch, and the machine may be busy

# Long enough that a signal sent after a look at status.json, which is rewritten twice a second, finds the run at work.
STEPS = 40
SMALL = ["task.eval_per_level=1", "eval.final_num_rollouts=1", "eval.every_steps=0", "learner.batch_size=48"]


class Run:
    """`ngu train` in a child process."""

    def __init__(self, run_dir: Path, *settings: str):
        self.dir = run_dir
        self.process = self._ngu("train", "--run-dir", str(run_dir), "--no-tui", *SMALL, *settings)

    @staticmethod
    def _ngu(*args: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "pipeline.cli", *args]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def resume(self) -> None:
        self.process = self._ngu("resume", "--no-tui", str(self.dir))

    def status(self) -> dict[str, Any]:
        return rundir.read_status(self.dir)

    def wait_until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Poll status.json; fails with the run's output if the run ends first."""
        while not condition(status := self.status()):
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended early: {self.output()}")
            time.sleep(0.05)
        return status

    def output(self) -> str:
        return self.process.communicate()[0]

    def end(self) -> str:
        text = self.output()
        assert self.process.returncode == 0, text + self.logs()
        return text

    def logs(self) -> str:
        return "".join(f"\n--- {p.name}\n{p.read_text()}" for p in sorted((self.dir / "logs").glob("*.log")))

    def pids(self, role: str) -> list[int]:
        """Processes of this run whose command line names the role."""
        return [pid for pid, line in processes_of(self.dir) if role in line]

    def open_and_total(self) -> tuple[int, int]:
        with sqlite3.connect(f"file:{self.dir / 'ledger.sqlite'}?mode=ro", uri=True) as db:
            row = db.execute("SELECT sum(fate = 0), count(*) FROM attempts").fetchone()
        db.close()
        return row

    def kill_everything(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.communicate()


def processes_of(run_dir: Path) -> list[tuple[int, str]]:
    """(pid, command line) of every live process that was started for the run."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            line = (proc / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            cwd = str((proc / "cwd").readlink())
        except OSError:
            continue
        if str(run_dir) in line or cwd == str(run_dir):
            found.append((int(proc.name), line))
    return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(*settings: str) -> Run:
        runs.append(Run(tmp_path / "run", *settings))
        return runs[-1]

    yield make
    for run in runs:
        run.kill_everything()
        assert processes_of(run.dir) == []
        run_id = (run.dir / "run_id").read_text().strip()
        assert not Path(f"/dev/shm/ngu-{run_id}").exists()


LISTEN = "daemon.listen=tcp://127.0.0.1:0"  # with a gateway, since it is one of the roles


def test_a_run_leaves_everything_a_user_was_promised(start):
    begin_us = time.monotonic_ns() / 1000
    run = start("max_rollouts=20000", "max_steps=5", "daemon.checkpoint_every_steps=2", LISTEN, "--profile")
    text = run.end()
    assert "pass@1" in text
    check_trace(run.dir, begin_us, time.monotonic_ns() / 1000)
    summary = json.loads((run.dir / "summary.json").read_text())
    assert summary["steps"] == 5
    assert summary["rollouts"] >= 240
    for key in ("hard_pass_at_1", "mix_pass_at_1", "tokens", "wall_s", "lag_mean", "lag_max", "ess_mean"):
        assert summary[key] is not None, key
    assert len(list(run.dir.glob("*.png"))) >= 4
    assert list((run.dir / "tensorboard").iterdir())
    kinds = {r["kind"] for r in read_records(run.dir / "metrics.jsonl")}
    assert kinds == {"eval", "step", "levels"}
    assert run.open_and_total()[0] == 0

    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = run.dir / "checkpoints" / "step_000005" / "model"
    assert AutoModelForCausalLM.from_pretrained(checkpoint).num_parameters() == 447_104
    assert AutoTokenizer.from_pretrained(checkpoint).decode([1]) is not None


def check_trace(run_dir: Path, begin_us: float, end_us: float) -> None:
    """Every role is there, at work within the run's time, and all go by one clock: no effect before its cause."""
    events = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert set(names.values()) == {"coordinator", "learner", "engine-0", "verifier", "gateway"}
    timed = [e for e in events if e["ph"] != "M"]
    assert {names[e["pid"]] for e in timed} == set(names.values())
    assert all(begin_us <= e["ts"] <= e["ts"] + e.get("dur", 0) <= end_us for e in timed)
    spans = {(names[e["pid"]], e["name"], e["args"].get("version")): e for e in events if e["ph"] == "X"}
    assert {("learner", "checkpoint", None), ("verifier", "submit", None), ("coordinator", "turn", None)} <= set(spans)
    assert ("engine-0", "step", None) in spans
    for version in range(1, 6):
        step, publish = (spans["learner", name, version] for name in ("step", "publish"))
        assert step["ts"] + step["dur"] <= publish["ts"]
        if load := spans.get(("engine-0", "load weights", version)):  # versions that come too fast are skipped
            assert publish["ts"] + publish["dur"] <= load["ts"]
    assert ("engine-0", "load weights", 5) in spans
    queues = [e["args"] for e in events if e["ph"] == "C"]
    assert queues and all(q.keys() >= {"launch", "in_flight", "verify", "batches"} for q in queues)


def test_a_pinned_evaluation_during_training_is_that_of_the_checkpoint(start):
    run = start(
        *("max_steps=2", "max_rollouts=20000", "staleness.max_lag=0", "daemon.checkpoint_every_steps=1"),
        *("eval.every_steps=1", "eval.pinned=true", "eval.num_rollouts=24"),
    )
    run.end()
    [record] = [r for r in read_records(run.dir / "metrics.jsonl") if r["kind"] == "eval" and r["phase"] == "during"]
    assert record["step"] == record["version_min"] == record["version_max"] == 1
    assert record["core_s"]["evaluator"] > 0

    from learner.evaluate import roll_out
    from learner.evaluation.source import eval_config, find_model
    from pipeline.tasks.registry import make_task

    source = find_model(str(run.dir / "checkpoints" / "step_000001"))
    config = eval_config([source], [], None)
    rows = roll_out(source, config, make_task(config.task, config.seed).eval_problems(), 24, "offline")
    n = len(rows)
    assert n == sum(record["num_rollouts"].values())
    offline = sum(r.correct for r in rows) / n
    during = sum(record["pass_at_1"][level] * num for level, num in record["num_rollouts"].items()) / n
    p = (offline + during) / 2
    # Five standard errors of the difference, were all problems alike; they are not, which makes it smaller.
    assert abs(offline - during) <= 5 * (p * (1 - p) * 2 / n) ** 0.5
    tokens = sum(r.num_tokens for r in rows) / n
    assert record["mean_tokens"] == pytest.approx(tokens, rel=0.2)


def test_a_run_with_interruptions_trains_on_what_was_sampled(start):
    cut = '{min_tokens=4, max_tokens=30, answer_tokens=10, phrase="\\n\\\\boxed{", thought_end="\\\\boxed{"}'
    run = start("max_rollouts=20000", "max_steps=2", "staleness.max_lag=0", f"sampling.interruption={cut}")
    run.end()
    steps = [r["metrics"] for r in read_records(run.dir / "metrics.jsonl") if r["kind"] == "step"]
    assert len(steps) == 2
    assert any(m["interrupted_frac"] > 0 for m in steps)
    assert all(m["grad_norm"] > 0 and m["skipped"] == 0 for m in steps)
    # All of the first step is of the first weights: a ratio off 1 would be that of a token that nobody sampled.
    assert steps[0]["ratio_max"] == pytest.approx(1.0, abs=1e-3)


def test_stop_then_resume_goes_on_where_it_was(start):
    run = start("max_rollouts=20000", f"max_steps={STEPS}", "sampler.max_attempts=16")
    run.wait_until(lambda s: s.get("step", 0) >= 2)
    stop = Run._ngu("stop", str(run.dir))
    assert "checkpoint" in stop.communicate()[0]
    run.output()
    status = run.status()
    assert status["state"] == "stopped"
    stopped_at = status["step"]
    assert 2 <= stopped_at < STEPS
    run.resume()
    run.end()
    assert run.status()["state"] == "finished"
    steps = [r["step"] for r in read_records(run.dir / "metrics.jsonl") if r["kind"] == "step"]
    assert steps == list(range(1, STEPS + 1)), "no step twice, none missing"
    assert run.open_and_total()[0] == 0


def test_a_killed_learner_alone_is_started_again_and_every_step_can_be_replayed(start):
    run = start("max_rollouts=20000", "max_steps=16", "daemon.checkpoint_every_steps=2")
    run.wait_until(lambda s: s.get("step", 0) >= 3)
    (pid,) = run.pids("-m learner ")
    os.kill(pid, signal.SIGKILL)
    text = run.end()
    assert "starting it again" in text and "starting again from the last checkpoint" not in text
    assert json.loads((run.dir / "summary.json").read_text())["steps"] == 16
    steps = [r["step"] for r in read_records(run.dir / "metrics.jsonl") if r["kind"] == "step"]
    assert steps == list(range(1, 17)), "no step is on record twice"
    assert run.open_and_total()[0] == 0
    replay = Run._ngu("replay", str(run.dir), "--steps", "1..16")
    text = replay.communicate()[0]
    assert (replay.returncode, text.count("identical")) == (0, 16), text


def test_no_process_outlives_a_killed_supervisor_and_the_run_can_be_resumed(start):
    run = start("max_rollouts=20000", f"max_steps={STEPS}", "daemon.checkpoint_every_steps=1")
    run.wait_until(lambda s: s.get("step", 0) >= 2)
    run.process.kill()
    run.output()
    deadline = time.monotonic() + 10
    while processes_of(run.dir) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes_of(run.dir) == []
    run.resume()
    run.end()
    assert json.loads((run.dir / "summary.json").read_text())["steps"] == STEPS


def test_a_directory_in_use_is_refused_with_status_2(start):
    run = start("max_rollouts=20000")
    run.wait_until(lambda s: s.get("state") is not None)
    other = Run._ngu("train", "--no-tui", "--run-dir", str(run.dir))
    text = other.communicate()[0]
    assert other.returncode == 2
    assert text.startswith("ngu: error: ")
    assert len(text.splitlines()) == 1

"""The pool with real children: hanging, dying and hostile answers, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.errors import VerifierError
from pipeline.messages import Verdict, VerifyJob
from pipeline.tasks.reasoning_gym import ReasoningGymTask
from pipeline.tasks.registry import ReasoningGymConfig
from pipeline.verifiers import worker as worker_module
from pipeline.verifiers.pool import VerifierPool
from samplers.base import Problem

# Past every limit on the text, and still beyond any computer.
HANGS = r"\boxed{\sum_{k=1}^{10^9} \frac{1}{k}}"
HANGS_FAST_SEEN = r"\boxed{\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}}"
SLOW_PATH = r"\boxed{1+x}"
GOLD = Problem("p", "jsonl", "", "x+1")


def job(attempt_id: int, text: str, problem: Problem = GOLD) -> VerifyJob:
    return VerifyJob(attempt_id, problem, text, False)


def collect(pool: VerifierPool, num: int, patience_s: float = 90.0) -> dict[int, Verdict]:
    """Exactly `num` verdicts, each attempt once, and none after them."""
    got: list[tuple[int, Verdict]] = []
    end = time.monotonic() + patience_s
    while len(got) < num and time.monotonic() < end:
        got += pool.poll(0.5)
    got += pool.poll(0.05)
    assert len(got) == num == len({attempt_id for attempt_id, _ in got})
    return dict(got)


def open_fds() -> set[str]:
    """Descriptors that outlast this call, each with what it points to."""
    seen = {fd.name: os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()}
    return {f"{name}: {target}" for name, target in seen.items() if Path("/proc/self/fd", name).is_symlink()}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_gone(pids: list[int]) -> None:
    end = time.monotonic() + 20
    while any(map(is_running, pids)):
        assert time.monotonic() < end, f"still running: {pids}"
        time.sleep(0.01)


@pytest.fixture
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(num_workers=1, deadline_s=1.0) as made:
        yield made


def test_the_fast_path_answers_without_any_child(pool: VerifierPool):
    for i in range(500):
        pool.submit(job(i, rf"\boxed{{{i}}}", Problem("p", "jsonl", "", "7")))
    verdicts = dict(pool.poll(0))
    assert len(verdicts) == 500
    assert [i for i, v in verdicts.items() if v.outcome == "correct"] == [7]
    assert pool.stats()["fast_frac"] == 1.0


def test_a_hanging_answer_is_unknown_its_child_killed_and_replaced(pool: VerifierPool):
    [old] = pool.child_pids()
    pool.submit(job(1, HANGS))
    pool.submit(job(2, SLOW_PATH))
    verdicts = collect(pool, 2)
    assert verdicts[1].outcome == "unknown" and "within 1 s" in verdicts[1].detail
    assert verdicts[2].outcome == "correct"
    assert not is_running(old)
    stats = pool.stats()
    assert (stats["num_kills"], stats["num_restarts"], stats["num_children_ready"]) == (1, 1, 1)


def test_the_published_power_tower_is_recognized_before_it_hangs(pool: VerifierPool):
    pool.submit(job(1, HANGS_FAST_SEEN, Problem("p", "jsonl", "", "5")))
    [(_, verdict)] = pool.poll(0)
    assert verdict.outcome == "unknown" and "power tower" in verdict.detail


@pytest.mark.timeout(400)  # twenty processes import sympy, one second of a core each
def test_twenty_hanging_answers_in_a_row_leave_the_pool_at_full_strength():
    before = open_fds()
    with VerifierPool(num_workers=2, deadline_s=0.2) as pool:
        for i in range(20):
            pool.submit(job(i, HANGS))
        assert {v.outcome for v in collect(pool, 20, patience_s=300).values()} == {"unknown"}
        assert pool.stats()["num_kills"] == 20
        for i in range(20, 120):  # 0.2 s may be too short for an honest answer on a busy machine, but not for ever
            pool.submit(job(i, SLOW_PATH))
            if collect(pool, 1)[i].outcome == "correct":
                break
        else:
            pytest.fail("the pool never judged again")
        pids = pool.child_pids()
        assert len(pids) == 2 and all(map(is_running, pids))
    wait_gone(pids)
    assert open_fds() == before


def children() -> set[int]:
    """Processes that this one started and has not waited for."""
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_thousand_hanging_answers_leak_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The children only say that they are ready: a thousand that import sympy would cost a quarter of an hour."""
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nprintf '\\001\\000\\000\\000\\001'\nexec sleep 1000\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(worker_module.sys, "executable", str(hanging))
    fds, before, deadline_s = open_fds(), children(), 0.05
    elapsed_s: list[float] = []
    longest_turn_s = 0.0
    with VerifierPool(num_workers=4, deadline_s=deadline_s) as pool:
        for i in range(1000):
            pool.submit(job(i, HANGS))
        settled_bytes = 0
        while len(elapsed_s) < 1000:
            asked = time.monotonic()
            verdicts = [verdict for _, verdict in pool.poll(1.0)]
            longest_turn_s = max(longest_turn_s, time.monotonic() - asked)
            assert {v.outcome for v in verdicts} <= {"unknown"}
            elapsed_s += [v.elapsed_s for v in verdicts]
            if not settled_bytes and len(elapsed_s) >= 300:
                settled_bytes = resident_bytes()
        # An answer is asked in one turn and given up in another, and either may stand still on a busy machine.
        assert max(elapsed_s) <= deadline_s + 0.5 + 2 * longest_turn_s
        stats = pool.stats()
        assert (stats["num_unknown"], stats["num_kills"], stats["num_restarts"]) == (1000, 1000, 1000)
        assert stats["num_waiting"] == 0
        assert children() - before == set(pool.child_pids()) and len(pool.child_pids()) == 4
        assert resident_bytes() - settled_bytes < 4 << 20
    assert open_fds() == fds and children() == before


def test_a_child_killed_in_the_middle_of_a_job_is_unknown():
    with VerifierPool(num_workers=1, deadline_s=60.0) as pool:
        pool.submit(job(1, SLOW_PATH))
        assert collect(pool, 1)[1].outcome == "correct"
        pool.submit(job(2, HANGS))
        os.kill(pool.child_pids()[0], signal.SIGKILL)
        verdict = collect(pool, 1)[2]
        assert verdict.outcome == "unknown" and "-9" in verdict.detail
        pool.submit(job(3, SLOW_PATH))
        assert collect(pool, 1)[3].outcome == "correct"
        assert pool.stats()["num_crashes"] == 1


def test_a_stopped_child_does_not_stop_the_parent(pool: VerifierPool):
    pool.submit(job(1, SLOW_PATH))
    collect(pool, 1)
    os.kill(pool.child_pids()[0], signal.SIGSTOP)
    pool.submit(job(2, SLOW_PATH))
    pool.submit(job(3, r"\boxed{x+1}"))
    verdicts = collect(pool, 2)
    assert (verdicts[2].outcome, verdicts[3].outcome) == ("unknown", "correct")


def test_a_job_asked_twice_is_judged_once(pool: VerifierPool):
    for _ in range(3):
        pool.submit(job(1, SLOW_PATH))
        pool.submit(job(2, r"\boxed{x+1}"))
    assert set(collect(pool, 2)) == {1, 2}


def test_hostile_answers_run_nothing(tmp_path: Path):
    config = ReasoningGymConfig(name="n_queens", num_problems=1, eval_size=0)
    victim = tmp_path / "victim"
    code = f"[[__import__('pathlib').Path({str(victim)!r}).touch()]]"
    with VerifierPool(1, 20.0, scoring=config) as pool:
        pool.submit(job(1, f"<answer>{code}</answer>", ReasoningGymTask(config, 1).next_problem()))
        assert collect(pool, 1)[1].outcome == "incorrect"
    with VerifierPool(1, 20.0) as pool:
        pool.submit(job(1, rf"\boxed{{{code}}}"))
        assert collect(pool, 1)[1].outcome == "incorrect"
    assert not victim.exists()


def test_no_child_outlives_a_parent_that_is_killed(tmp_path: Path):
    script = (
        "import sys, time\n"
        "from pipeline.verifiers.pool import VerifierPool\n"
        "from pipeline.messages import VerifyJob\n"
        "from samplers.base import Problem\n"
        "pool = VerifierPool(2, 60.0)\n"
        f"pool.submit(VerifyJob(1, Problem('p', 'jsonl', '', 'x+1'), {HANGS!r}, False))\n"
        "while pool.stats()['num_children_ready'] < 2: pool.poll(0.05)\n"
        "print(*pool.child_pids(), flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    wait_gone(pids)


def test_children_that_never_start_are_an_error_not_a_loop(monkeypatch, tmp_path: Path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(worker_module.sys, "executable", str(broken))
    with VerifierPool(1, 1.0) as pool, pytest.raises(VerifierError, match="exit status 3"):
        for _ in range(100):
            pool.poll(0.5)

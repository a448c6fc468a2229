"""Hostile programs in the sandbox: each is contained, judged, and leaves nothing running and nothing written."""

import errno
import json
import os
import socket
import time
from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.messages import Verdict, VerifyJob
from pipeline.tasks.registry import CodeConfig
from pipeline.verifiers import preflight, sandbox, sandbox_init
from pipeline.verifiers.code import CodeVerifier
from pipeline.verifiers.pool import VerifierPool
from pipeline.verifiers.sandbox import Limits, Ran, refusal, run_sandboxed
from samplers.base import Problem

REFUSAL = refusal()
needs_sandbox = pytest.mark.skipif(REFUSAL is not None, reason=f"no sandbox here: {REFUSAL}")
LIMITS = Limits(cpu_s=1, wall_s=20, memory_bytes=256 << 20, processes=4)


def run(program: str, stdin: str = "", limits: Limits = LIMITS) -> Ran:
    return run_sandboxed(program, stdin, limits)


@needs_sandbox
def test_an_honest_program_reads_and_writes():
    ran = run("import math, sys\nprint(math.gcd(*map(int, sys.stdin.read().split())), 'é')", "12 18\n")
    assert ran == Ran("ok", "6 é\n".encode())


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "end"),
    [
        ("while True: pass", "time"),
        ("while True: print('x' * 1000)", "output"),
        ("x = bytearray(1 << 30)", "failed"),
        ("raise SystemExit(3)", "failed"),
        ("def f(: pass", "failed"),
        ("import ctypes; ctypes.string_at(0)", "failed"),
    ],
)
def test_limits_end_a_program(program, end):
    assert run(program).end == end


@needs_sandbox
def test_sleeping_costs_no_core_but_ends_too():
    started = time.monotonic()
    assert run("import time; time.sleep(60)", limits=LIMITS._replace(wall_s=2)).end == "time"
    assert time.monotonic() - started < 30


@needs_sandbox
def test_a_fork_bomb_is_small_and_dies_with_its_sandbox():
    name = f"bomb{os.getpid()}"
    program = (
        "import ctypes, os\n"
        f"ctypes.CDLL(None).prctl(15, {name.encode()!r}, 0, 0, 0)\n"
        "while True:\n"
        "    try: os.fork()\n"
        "    except OSError: print('refused', flush=True)\n"
    )
    ran = run(program, limits=LIMITS._replace(wall_s=3))
    assert b"refused" in ran.output and ran.end in ("time", "output")
    end = time.monotonic() + 20
    while name in process_names():
        assert time.monotonic() < end, "processes of the bomb are left"
        time.sleep(0.02)


def process_names() -> set[str]:
    names = set()
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            names.add(comm.read_text().strip())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return names


@needs_sandbox
def test_filling_the_disk_fills_nothing_but_its_own():
    program = (
        "import os\n"
        "written = 0\n"
        "try:\n"
        "    for i in range(64):\n"
        "        with open(f'/tmp/{i}', 'wb', buffering=0) as f:\n"
        "            for _ in range(8): written += f.write(bytes(1 << 20))\n"
        "except OSError as e: print(e.errno, written >> 20)\n"
    )
    errno_, mib = map(int, run(program).output.split())
    assert errno_ in (27, 28) and mib <= sandbox.TMP_BYTES >> 20
    many = "for i in range(10 ** 6): open(f'/tmp/{i}', 'w').close()"
    assert run(many, limits=LIMITS._replace(cpu_s=10)).end == "failed"


@needs_sandbox
def test_the_rest_of_the_disk_is_not_there(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    private = (str(secret), str(Path.home() / ".bashrc"), "/etc/passwd", "/proc/1/environ", "/var", "/sys")
    program = (
        "import os\n"
        f"for path in {private!r}: print(os.path.exists(path))\n"
        "for path in ('/usr/x', '/x', '/bin/x', '/dev/x'):\n"
        "    try: open(path, 'w'); print('written', path)\n"
        "    except OSError: print('refused')\n"
        "print(sorted(os.environ))\n"
    )
    lines = run(program).output.decode().splitlines()
    assert lines[:6] == ["False"] * 6 and lines[6:10] == ["refused"] * 4
    assert lines[10] == "['HOME', 'LANG', 'OMP_NUM_THREADS', 'PATH']"


@needs_sandbox
@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6"])
def test_there_is_no_network(family):
    host = {"AF_INET": "127.0.0.1", "AF_INET6": "::1"}[family]
    program = (
        "import errno, socket\n"
        f"s = socket.socket(socket.{family})\n"
        f"try: s.connect(({host!r}, 80)); print('connected')\n"
        "except OSError as e: print(errno.errorcode[e.errno])\n"
    )
    assert run(program).output.decode().strip() in ("ENETUNREACH", "EADDRNOTAVAIL")


@needs_sandbox
def test_there_is_nobody_to_kill_and_no_way_up():
    program = (
        "import ctypes, os, signal\n"
        "print(os.getpid(), os.getppid(), os.getpgrp(), os.getsid(0))\n"
        f"for pid in ({os.getpid()}, {os.getppid()}):\n"
        "    try: os.kill(pid, signal.SIGKILL); print('killed')\n"
        "    except OSError as e: print(e.errno)\n"
        "libc = ctypes.CDLL(None)\n"
        "print(libc.unshare(0x10000000), libc.unshare(0x00020000), libc.chroot(b'/tmp'))\n"
        "print(libc.mount(b'none', b'/tmp', b'tmpfs', 0, b''), libc.setuid(0))\n"
    )
    assert run(program).output.decode().splitlines() == ["1 0 1 1", "3", "3", "-1 -1 -1", "-1 -1"]


@needs_sandbox
def test_what_no_limit_or_namespace_covers_is_refused():
    """Memory that stays when its process ends, the keys of whoever runs the judge, the host of a virtual machine."""
    calls = sandbox_init.MACHINES[os.uname().machine].refused
    program = (
        "import ctypes, socket\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        f"for call in {calls!r}: print(libc.syscall(call, 0, 0, 0, 0), ctypes.get_errno())\n"
        f"for family in {[*map(int, (socket.AF_VSOCK, socket.AF_NETLINK))]}:\n"
        "    try: socket.socket(family, socket.SOCK_STREAM); print('made')\n"
        "    except OSError as e: print(-1, e.errno)\n"
    )
    assert run(program).output.decode().splitlines() == [f"-1 {errno.EPERM}"] * (len(calls) + 2)


@needs_sandbox
def test_a_program_that_would_outlive_its_judge_is_gone_when_its_time_is_up():
    name = f"late{os.getpid()}"
    program = (
        "import ctypes, time\n"
        "libc = ctypes.CDLL(None)\n"
        f"libc.prctl(15, {name.encode()!r}, 0, 0, 0)\n"
        "print(libc.prctl(1, 0, 0, 0, 0), flush=True)\n"  # PR_SET_PDEATHSIG
        "time.sleep(600)\n"
    )
    assert run(program, limits=LIMITS._replace(wall_s=3)) == Ran("time", b"-1\n")
    assert name not in process_names(), "not even waiting to be reaped"


@needs_sandbox
def test_a_child_left_behind_ends_with_the_program():
    program = (
        "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(60)\nprint('done', flush=True); os._exit(0)"
    )
    assert run(program) == Ran("ok", b"done\n")


def judge(program: str, *tests: object, time_limit_s: float = 2.0) -> Verdict:
    problem = Problem("p", "code", "", json.dumps(tests))
    verifier = CodeVerifier(CodeConfig(path="", time_limit_s=time_limit_s))
    return verifier.verify(problem, f"```python\n{program}\n```", False)


DOUBLE = {"input": "2\n", "output": "4"}


@needs_sandbox
def test_the_reward_is_the_share_of_tests_passed():
    tests = (DOUBLE, {"input": "3", "output": "6\n\n"}, {"input": "-1", "output": "1"}, {"input": "x", "output": ""})
    verdict = judge("print(int(input()) * 2, ' ')", *tests)
    assert (verdict.outcome, verdict.reward) == ("incorrect", 0.5)
    assert verdict.detail == "2 of 4 tests passed; test 3: wrong result"
    assert judge("print(int(input()) * 2)", *tests[:2]).outcome == "correct"


@needs_sandbox
def test_unit_tests_run_in_the_scope_of_the_program():
    verdict = judge(
        "def f(x): return 2 * x", "assert f(2) == 4", "assert f(3) == 7", "import math\nassert math.pi > f(1)"
    )
    assert (verdict.outcome, verdict.reward) == ("incorrect", pytest.approx(2 / 3))


@needs_sandbox
@pytest.mark.parametrize(
    "trick",
    ["exit(0)", "import os; os._exit(0)", "import sys; sys.stdout.close()", "print('passed'); raise SystemExit"],
)
def test_leaving_early_passes_no_test(trick):
    assert judge(trick, "assert False", "assert f(1)").reward == 0.0


@needs_sandbox
def test_a_program_that_never_ends_costs_one_time_limit():
    verdict = judge("while True: pass", *([DOUBLE] * 50), time_limit_s=0.5)
    assert (verdict.outcome, verdict.reward) == ("incorrect", 0.0)
    assert verdict.detail == "0 of 50 tests passed; test 1: out of time"


@needs_sandbox
def test_programs_go_through_the_pool():
    config = CodeConfig(path="", time_limit_s=1.0)
    problem = Problem("p", "code", "", json.dumps([DOUBLE]))
    with VerifierPool(1, 60.0, scoring=config) as pool:
        for i, program in enumerate(("print(2 * int(input()))", "import os\nwhile True: os.fork()")):
            pool.submit(VerifyJob(i, problem, f"```python\n{program}\n```", False))
        done: dict[int, Verdict] = {}
        end = time.monotonic() + 90
        while len(done) < 2 and time.monotonic() < end:
            done |= dict(pool.poll(1.0))
        assert (done[0].outcome, done[1].outcome) == ("correct", "incorrect")


def test_a_machine_without_a_sandbox_is_told_so_and_judges_nothing(monkeypatch, tmp_path: Path):
    broken = tmp_path / "init.py"
    broken.write_text("import os; os.write(2, b'unshare: Operation not permitted'); os._exit(1)")
    monkeypatch.setattr(sandbox.sandbox_init, "__file__", str(broken))
    why = refusal()
    assert why is not None and "Operation not permitted" in why
    assert judge("print(4)", DOUBLE).outcome == "unknown"
    with pytest.raises(ConfigError, match=r"task.kind = code needs a sandbox .*not permitted"):
        preflight.resolve_verifier(Config(task=CodeConfig(path="x")))

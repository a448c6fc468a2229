"""The example for systemd: it parses, and starts, stops and goes on with a run as it says."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
# Stands for `ngu`: says what it was asked and ends like a run, at SIGTERM or at once.
NGU = """#!/usr/bin/env bash
echo "ngu $*" >> calls
[ "$1" = train ] || exit 0
trap 'echo "ngu stopped" >> calls; exit 0' TERM
mkdir "$4" && touch "$4/config.json"
for _ in $(seq 600); do sleep 0.05; done
exit 9
"""


@pytest.fixture
def job(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ngu").write_text(NGU)
    (tmp_path / "bin" / "ngu").chmod(0o755)
    return tmp_path, os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_systemd_unit_is_one_that_systemd_takes(tmp_path):
    unit = tmp_path / "ngu@run.service"
    unit.write_text((DEPLOY / "ngu@.service").read_text())
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "ngu@" in line]) == (0, [])


def test_the_systemd_unit_starts_a_run_and_then_goes_on_with_it(job):
    path, env = job
    (line,) = [x for x in (DEPLOY / "ngu@.service").read_text().splitlines() if x.startswith("ExecStart=")]
    script = line.partition("-c '")[2].rstrip("'").replace("/var/lib/ngu/%i", "state").replace("%i", "name")
    with subprocess.Popen(["/bin/sh", "-c", script], cwd=path, env=env) as process:
        while not (path / "state" / "config.json").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, "the shell is replaced by the run, so that the signal reaches it"
    assert subprocess.run(["/bin/sh", "-c", script], cwd=path, env=env, check=False).returncode == 0
    assert (path / "calls").read_text().splitlines() == [
        "ngu train /etc/ngu/name.toml --run-dir state --no-tui",
        "ngu stopped",
        "ngu resume state --no-tui",
    ]

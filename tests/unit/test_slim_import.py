"""What only a role process needs must not be loaded by importing the pipeline or by asking the command for help."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numba", "sglang", "sympy", "matplotlib", "tensorboard", "reasoning_gym", "pyarrow")

PROBE = """
import sys
exec(sys.argv[1])
print(",".join(name for name in sys.argv[2:] if name in sys.modules), file=sys.stderr)
"""


def heavy_modules_after(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, code, *HEAVY], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stderr.strip()


def test_the_probe_sees_a_heavy_module():
    assert heavy_modules_after("import matplotlib") == "matplotlib"


@pytest.mark.parametrize(
    "code",
    [
        "import samplers.registry",
        "import pipeline",
        "import pipeline.cli",
        "import pipeline.commands, pipeline.doctor, pipeline.init_config, pipeline.metrics, pipeline.report",
        "import pipeline.daemon, pipeline.rundir, pipeline.view",
        "from pipeline.cli import main; main(['--help'])",
    ],
)
def test_nothing_heavy_is_loaded(code: str):
    assert heavy_modules_after(code) == ""

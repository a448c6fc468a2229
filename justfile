# What a person does with this repository. `just` alone lists it.

export OMP_NUM_THREADS := "1"
export OMP_WAIT_POLICY := "PASSIVE"

bin := ".venv/bin"

[private]
default:
    @{{ just_executable() }} --list --unsorted

# Create .venv with the locked versions and this package; returns at once when that is done.
[group('run')]
setup:
    #!/usr/bin/env bash
    set -euo pipefail
    stamp="$(cat requirements.lock pyproject.toml | sha256sum)"
    if [ "$(cat .venv/setup.stamp 2>/dev/null || true)" = "$stamp" ]; then exit 0; fi
    for python in python3.11 python3; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi
        python=""
    done
    if [ -z "$python" ]; then echo "error: Python 3.11 or newer is needed (python3.11 or python3 on PATH)" >&2; exit 1; fi
    echo "setting up .venv (some GB of packages, some minutes)" >&2
    [ -x {{ bin }}/python ] || "$python" -m venv .venv
    # torch first and with what it needs, which differs between machines with and without a GPU; the lock names the rest.
    {{ bin }}/python -m pip install --quiet "$(grep '^torch==' requirements.lock)"
    {{ bin }}/python -m pip install --quiet --no-deps --requirement requirements.lock
    {{ bin }}/python -m pip install --quiet --no-deps --editable .
    echo "$stamp" > .venv/setup.stamp

# Create .venv-sglang, for engines.kind=sglang: the locked versions on a CPU, a tested release where there is a GPU.
[group('run')]
sglang: setup
    #!/usr/bin/env bash
    set -euo pipefail
    lock=pipeline/engines/sglang/requirements-cpu.lock
    if compgen -G '/dev/nvidia[0-9]*' >/dev/null; then kind=gpu; else kind=cpu; fi
    stamp="$kind $(sha256sum < $lock)"
    if [ "$(cat .venv-sglang/sglang.stamp 2>/dev/null || true)" = "$stamp" ]; then exit 0; fi
    [ -x .venv-sglang/bin/python ] || {{ bin }}/python -m venv .venv-sglang
    pip=".venv-sglang/bin/python -m pip install --quiet"
    if [ $kind = gpu ]; then
        $pip "sglang>=0.5.6,<0.5.24"
    else
        $pip "$(grep '^torch==' $lock)"
        $pip --no-deps --requirement $lock
    fi
    echo "$stamp" > .venv-sglang/sglang.stamp

# Create .venv-peers, what `ngu bench` compares with: TRL, Ray, Redis and what they need, at the locked versions.
[group('run')]
peers: setup
    #!/usr/bin/env bash
    set -euo pipefail
    lock=bench/peers/lock.txt
    stamp="$(sha256sum < $lock)"
    if [ "$(cat .venv-peers/peers.stamp 2>/dev/null || true)" = "$stamp" ]; then exit 0; fi
    [ -x .venv-peers/bin/python ] || {{ bin }}/python -m venv .venv-peers
    .venv-peers/bin/python -m pip install --quiet "$(grep '^torch==' $lock)"
    .venv-peers/bin/python -m pip install --quiet --no-deps --requirement $lock
    echo "$stamp" > .venv-peers/peers.stamp

# Set up, then run the built-in job: `just demo seed=1 learner.lr=5e-5` passes settings on.
[group('run')]
demo *arguments: setup
    {{ bin }}/ngu train {{ arguments }}

# Everything a change must pass: lint, types, import rules, tests.
[group('develop')]
[parallel]
test: setup sglang lint types imports
    {{ bin }}/python -m pytest -n 3 --dist loadgroup --durations 20

# Style and formatting.
[group('develop')]
lint: setup
    {{ bin }}/ruff check .
    {{ bin }}/ruff format --check .

# Static types.
[group('develop')]
types: setup
    {{ bin }}/basedpyright

# Kills and stops at random moments: 60 simulated runs, then real ones, 13 blows each, and a table of what they did.
[group('develop')]
chaos seeds="1..16": setup
    NGU_CHAOS_SEEDS="$(seq -s, 60)" {{ bin }}/python -m pytest -q tests/unit -k chaos
    {{ bin }}/python tests/support/chaos.py {{ seeds }}

# The cable of a remote worker cut and half-open for so many seconds (needs the right to make network namespaces).
[group('develop')]
cable seconds="30": setup
    NGU_CUT_S={{ seconds }} {{ bin }}/python -m pytest -q -rs tests/process/test_remote_faults.py -k cable

# Two hosts far away (20 ms, 1% lost, 100 Mbit/s): trajectories a second against what the cables carry.
[group('develop')]
far seconds="30": setup
    {{ bin }}/python tests/support/far_hosts.py {{ seconds }}

# The built-in job on a Ray cluster, without and with the loss of a node in the middle: the same pass@1, nothing lost?
[group('develop')]
nodes *seeds="0": setup
    {{ bin }}/python tests/support/ray_run.py {{ seeds }}

# A simulated run at full rate: attempts a second, and whether memory or disk grow.
[group('develop')]
soak minutes="30": setup
    {{ bin }}/python tests/support/soak.py {{ minutes }}

# The direction of imports between the rooms.
[group('develop')]
imports: setup
    {{ bin }}/lint-imports

# Repair style and formatting.
[group('develop')]
fmt: setup
    {{ bin }}/ruff check --fix .
    {{ bin }}/ruff format .

# Write requirements.lock from what is installed in .venv.
[group('develop')]
lock:
    {{ bin }}/python -m pip freeze --exclude-editable | sed 's/+cpu$//' > requirements.lock

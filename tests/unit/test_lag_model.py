"""The lag model against the coordinator on a virtual clock, and against a run's files."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import Simulation

from bench.lag_model import Lag, Load, load_of, main, predict
from pipeline.config import parse_config
from pipeline.engines.fake import FakeScript

WARM_UP, STEPS = 12, 90


def narrow(rng: random.Random) -> int:
    return rng.randint(16, 32)


def log_normal(rng: random.Random) -> int:
    return max(1, round(rng.lognormvariate(2.9, 0.7)))


def simulate(
    path: Path, length: Callable[[random.Random], int], slots: int, batch_size: int, step_turns: int
) -> tuple[Lag, Lag]:
    """Measured and predicted lag of a run with more room than its engines need."""
    config = parse_config(
        {
            "max_steps": STEPS,
            "max_rollouts": 0,
            "engines": {"slots": slots},
            "learner": {"batch_size": batch_size},
            "sampler": {"kind": "fixed", "num_rollouts": 2, "drop_zero_variance": False},
            "sampling": {"max_new_tokens": 400},
            "staleness": {"max_lag": 32},
            "eval": {"every_steps": 0, "final_num_rollouts": 1},
            "daemon": {"checkpoint_every_steps": 0},
        },
        "test",
    )
    run = Simulation(path, config, script=FakeScript(length=length), step_turns=step_turns)
    while not run.coordinator.ended:
        run.turn()
    rollouts = [(s, r) for s, b in enumerate(run.batches) if s > WARM_UP for g in b.groups for r in g.rollouts]
    lags = [(s - r.version_array()) for s, r in rollouts]
    tokens, num_tokens = sum(int(lag.sum()) for lag in lags), sum(lag.size for lag in lags)
    launch = sum(int(lag[0]) for lag in lags) / len(lags)
    steps = [r for r in run.sink.of_kind("step") if r["step"] > WARM_UP]
    lengths = [r.num_tokens for _, r in rollouts]
    return Lag(tokens / num_tokens, launch, max(int(lag.max()) for lag in lags)), predict(load_of(steps, lengths))


@pytest.mark.parametrize(
    ("length", "slots", "batch_size", "step_turns"),
    [
        (narrow, 48, 32, 1),
        (log_normal, 32, 32, 1),
        (log_normal, 96, 24, 1),
        (log_normal, 64, 32, 6),
        (log_normal, 64, 32, 9),
    ],
)
def test_lag_is_what_the_model_says(tmp_path, length, slots, batch_size, step_turns):
    measured, predicted = simulate(tmp_path, length, slots, batch_size, step_turns)
    assert measured.token == pytest.approx(predicted.token, rel=0.05)
    assert measured.launch == pytest.approx(predicted.launch, rel=0.05)
    assert abs(measured.largest - predicted.largest) <= max(1.0, 0.05 * predicted.largest), "a whole number of versions"


def test_the_formulas():
    load = Load(64, 0, 0, 0, 0, 16, 1600, mean=1.0, cv2=0.5, longest=6.0)
    assert predict(load) == Lag(token=3.0, launch=4.0, largest=24)
    longer = load._replace(mean=1.5)
    assert predict(longer) == Lag(token=4.5, launch=6.0, largest=24)
    waiting = load._replace(ended=8, ended_tokens=400, batches=1.5, most_batches=2.0)
    assert predict(waiting) == Lag(token=3.0 + 0.25 + 1.5, launch=4.0 + 0.5 + 1.5, largest=26)


def test_what_cannot_be_compared_exits_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["lag_model", str(tmp_path)])
    assert main() == 2
    (tmp_path / "config.json").write_text("{}")
    assert main() == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and "0 steps after the first 3" in errors[1]

"""TRL's GRPOTrainer on the built-in job, in the peers' environment (`bench.peers.grpo`)."""

import json
import shutil
import subprocess
import time
from pathlib import Path

from bench.suite.e2e.runs import Mark, Trained
from bench.suite.peers import environment
from bench.suite.results import ROOT
from pipeline.errors import NguError


def train(python: Path, directory: Path, seed: int, num_steps: int, num_threads: int, every_steps: int) -> Trained:
    """Run to its end in `directory`, which is emptied first. Raises NguError when the run fails."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    log = directory / "log"
    settings = {"seed": seed, "num_steps": num_steps, "num_threads": num_threads, "save_every": every_steps}
    argv = [str(python), "-m", "bench.peers.grpo", str(directory), json.dumps(settings)]
    started = time.monotonic()
    with log.open("wb") as file:
        done = subprocess.run(
            argv,
            cwd=ROOT,
            env=environment(num_threads),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            check=False,
        )
    wall_s = time.monotonic() - started
    if done.returncode:
        raise NguError(f"{directory}: {log.read_text(errors='replace').strip().splitlines()[-1]}")
    found = json.loads((directory / "figures.json").read_bytes())
    marks = [Mark(0, 0.0, 0, 0, 0.0), *(Mark(**mark) for mark in found["marks"])]
    models = {int(path.name): path for path in (directory / "models").iterdir()}
    train_s = marks[-1].seconds
    # One process does both in turn, so each side of it waits for the other.
    return Trained(marks, models, wall_s - train_s, 1 - found["generate_s"] / train_s, 1 - found["learn_s"] / train_s)

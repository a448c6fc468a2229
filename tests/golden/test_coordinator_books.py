"""What the coordinator sends to whom, writes and decides in simulated runs, pinned by a hash: making its loop faster
must change none of it.

`python tests/golden/test_coordinator_books.py` prints the hashes of the code as it is, for a change that is meant.
"""

import hashlib
import sqlite3
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.append(str(Path(__file__).parents[1] / "support"))  # for the command

from fakes import Simulation

from pipeline.config import parse_config
from pipeline.engines.fake import FakeScript
from pipeline.messages import Batch, Cancel, VerifyJobs, WorkItems

SCRIPT = FakeScript(lambda problem: 0.6 if problem.level == "easy" else 0.1, fail_frac=0.03)
COLUMNS = (
    "attempt_id, chain_id, round, problem_id, level, fate, outcome, reward, num_tokens, oldest_version, newest_version,"
    " step"
)

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "never give up": ({}, "31db4672e4fa4284"),
    "continued": ({"sampling": {"max_new_tokens": 6}, "sampler": {"seq_multiplier": 3}}, "c2b2e3ca7387f3e9"),
    "interrupted": (
        {"sampling": {"interruption": {"min_tokens": 4, "max_tokens": 9, "answer_tokens": 3}}},
        "4c0b52319f8bab71",
    ),
    "paced": (
        {"staleness": {"policy": "pace", "max_lag": 1}, "sampler": {"kind": "fixed", "num_rollouts": 5}},
        "623606a0cd112b42",
    ),
    "dropped": (
        {"staleness": {"policy": "drop", "max_lag": 1}, "learner": {"batch_order": "ticket"}},
        "afbe72ff1d522f0f",
    ),
    "by groups": ({"learner": {"batch_by": "groups", "batch_size": 5}}, "40cd4b1025bfe004"),
    "evaluated beside": ({"eval": {"every_steps": 2, "pinned": True, "num_rollouts": 3}}, "a44b6dbe868f8f46"),
}


class Observed(Simulation):
    """Hashes what is sent, as it is sent."""

    def __init__(self, run_dir: Path, changes: dict[str, Any]):
        self.digest = hashlib.blake2b(digest_size=8)
        raw: dict[str, Any] = {
            "max_steps": 12,
            "max_rollouts": 0,
            "engines": {"slots": 7},
            "learner": {"batch_size": 40},
            "eval": {"every_steps": 5, "num_rollouts": 2, "final_num_rollouts": 1},
            "daemon": {"checkpoint_every_steps": 4},
        }
        for section, values in changes.items():
            raw[section] = raw.get(section, {}) | values
        super().__init__(run_dir, parse_config(raw, "golden"), script=SCRIPT, num_engines=3, unknown_every=17)
        if "pinned" in raw["eval"]:
            self.add_engine("evaluator-3", role="evaluator")

    def send(self, name: str, message: Any) -> bool:
        self.digest.update(msgspec.json.encode([name, type(message).__name__, _ids(message)]))
        return super().send(name, message)


def _ids(message: Any) -> Sequence[Any]:
    match message:
        case WorkItems():
            return [(w.attempt_id, w.chain_id, w.round, w.problem.problem_id, w.purpose) for w in message.items]
        case VerifyJobs():
            return [(j.attempt_id, j.text, j.truncated) for j in message.jobs]
        case Cancel():
            return sorted(message.attempt_ids)
        case Batch():
            return [(g.chain_id, g.draw_indices, g.chain_rewards, g.round_sizes) for g in message.groups]
    return ()


def fate(run_dir: Path, changes: dict[str, Any]) -> str:
    """Run to the end, an engine lost on the way; the hash of all that was sent, of the ledger and of every total."""
    run = Observed(run_dir, changes)
    for turn in range(20_000):
        if run.coordinator.ended:
            break
        if turn == 90:
            run.add_engine("engine-1", boot="2")
        run.turn()
    run.ledger.close()
    assert run.coordinator.state == "finished"
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as db:
        rows = db.execute(f"SELECT {COLUMNS} FROM attempts ORDER BY attempt_id").fetchall()
        books = db.execute("SELECT * FROM books").fetchall()
    tally = run.coordinator.tally
    counters = {name: n for name, n in sorted(tally.counters.items()) if n and not name.startswith("cpu_ms/")}
    run.digest.update(msgspec.json.encode([rows, books, counters, tally.by_level(), run.coordinator.sampler.state()]))
    return run.digest.hexdigest()


@pytest.mark.parametrize("name", CASES)
def test_nothing_that_is_sent_written_or_decided_has_changed(name: str, tmp_path: Path):
    changes, expected = CASES[name]
    assert fate(tmp_path, changes) == expected


if __name__ == "__main__":
    for name, (changes, _) in CASES.items():
        with tempfile.TemporaryDirectory() as directory:
            print(f"{name}: {fate(Path(directory), changes)}")

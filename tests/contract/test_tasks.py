"""Every task source: endless, deterministic, resumable, with ids that are unique and a held-out set that stays."""

import json
from collections.abc import Callable
from typing import get_args

import msgspec
import pytest

from pipeline.tasks.base import TaskSource
from pipeline.tasks.registry import TaskConfig, make_task


def config_for(kind: str, tmp_path) -> object:
    path = tmp_path / "problems.jsonl"
    rows = [{"question": f"{i}+1?", "answer": f"#### {i + 1}", "tests": [f"assert f({i})"]} for i in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {
        "show_your_work": {"num_problems": 30, "eval_per_level": 2},
        "jsonl": {"path": str(path), "eval_size": 5},
        "code": {"path": str(path), "eval_size": 5},
        "reasoning_gym": {"name": "chain_sum", "num_problems": 30, "eval_size": 5},
        "manufactoria": {},
    }[kind]
    return msgspec.convert({"kind": kind} | fields, TaskConfig)


@pytest.fixture(params=[c.__struct_config__.tag for c in get_args(TaskConfig)])
def make(request, tmp_path) -> Callable[[int], TaskSource]:
    config = config_for(request.param, tmp_path)
    return lambda seed: make_task(config, seed)  # pyright: ignore[reportArgumentType]


def draw(task: TaskSource, n: int) -> list[str]:
    return [task.next_problem().problem_id for _ in range(n)]


def test_the_same_seed_gives_the_same_problems_and_each_pass_every_problem_once(make):
    task = make(1)
    n = task.num_problems
    assert n is not None
    ids = draw(task, 2 * n)
    assert ids == draw(make(1), 2 * n)
    assert len(set(ids[:n])) == n
    assert sorted(ids[:n]) == sorted(ids[n:])
    assert ids[:n] != ids[n:], "each pass has an order of its own"


@pytest.mark.parametrize("drawn", [0, 1, 7])
def test_a_restored_task_goes_on_where_the_state_was_taken(make, drawn):
    task = make(1)
    n = task.num_problems
    assert n is not None
    draw(task, n + drawn)
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(task.state()))
    again = make(1)
    again.restore(state)
    assert draw(again, n) == draw(task, n)


def test_the_held_out_problems_do_not_change_and_are_not_trained_on(make):
    task = make(1)
    held_out = [p.problem_id for p in task.eval_problems()]
    assert held_out
    assert len(set(held_out)) == len(held_out)
    assert held_out == [p.problem_id for p in make(1).eval_problems()]
    n = task.num_problems
    assert n is not None
    assert not set(held_out) & set(draw(task, n))


def test_level_weights_are_the_shares_of_the_training_mixture(make):
    task = make(1)
    weights = task.level_weights()
    assert sum(weights.values()) == pytest.approx(1.0)
    n = task.num_problems
    assert n is not None
    levels = [task.next_problem().level for _ in range(n)]
    assert weights == pytest.approx({level: levels.count(level) / n for level in set(levels)})
    assert set(task.hard_levels) <= {p.level for p in task.eval_problems()}

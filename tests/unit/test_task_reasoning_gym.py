"""Generated problems by name: deterministic, resumable, and refused by the nearest name."""

import json

import pytest

from pipeline.errors import ConfigError
from pipeline.tasks.registry import ReasoningGymConfig, make_task

CONFIG = ReasoningGymConfig(name="chain_sum", params={"max_terms": 3}, num_problems=10, eval_size=3)


def test_the_same_seed_gives_the_same_problems():
    one, two, other = make_task(CONFIG, 1), make_task(CONFIG, 1), make_task(CONFIG, 2)
    first = [one.next_problem() for _ in range(20)]
    assert first == [two.next_problem() for _ in range(20)]
    assert first != [other.next_problem() for _ in range(20)]
    assert len({p.problem_id for p in first}) == 10 == one.num_problems


def test_held_out_problems_are_never_trained_on():
    task = make_task(CONFIG, 1)
    trained = {task.next_problem().problem_id for _ in range(10)}
    held_out = {p.problem_id for p in task.eval_problems()}
    assert len(held_out) == 3 and not trained & held_out
    assert task.eval_problems() == task.eval_problems()


def test_resumes_where_it_stood():
    task = make_task(CONFIG, 1)
    for _ in range(13):
        task.next_problem()
    state = json.loads(json.dumps(task.state()))
    expected = [task.next_problem() for _ in range(20)]
    again = make_task(CONFIG, 1)
    again.restore(state)
    assert [again.next_problem() for _ in range(20)] == expected
    with pytest.raises(ConfigError, match="seed"):
        make_task(CONFIG, 2).restore(state)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("chain_sums", {}, "did you mean 'chain_sum'"),
        ("chain_sum", {"max_term": 3}, "did you mean 'max_terms'"),
        ("chain_sum", {"seed": 3}, "task.params.seed is set by the run"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "chain_sum refuses"),
        ("chain_sum", {"max_terms": "many"}, "chain_sum"),
        ("game_of_life_halting", {}, "its scorer takes any answer"),
    ],
)
def test_wrong_names_and_values_are_refused_in_one_line(name: str, params: dict, message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        make_task(ReasoningGymConfig(name=name, params=params), seed=0)
    assert "\n" not in caught.value.message


def test_sizes_and_template_are_checked():
    with pytest.raises(ConfigError, match="num_problems"):
        make_task(ReasoningGymConfig(name="chain_sum", num_problems=0), seed=0)
    with pytest.raises(ConfigError, match="prompt_template"):
        make_task(ReasoningGymConfig(name="chain_sum", prompt_template="x"), seed=0)

from collections import Counter

import pytest

from pipeline.errors import ConfigError
from pipeline.tasks.manufactoria.judge import decode_rubric, verify
from pipeline.tasks.manufactoria.ladder import build_ladder
from pipeline.tasks.manufactoria.language import to_words
from pipeline.tasks.manufactoria.task import UNSOLVED, Manufactoria, catalogue, held_out, to_problem
from pipeline.tasks.registry import ManufactoriaConfig, make_task

# Training problems by the families chosen.
SIZES = {"accept": 448, "transform": 171, "all": 619}


def task(seed: int = 0, **settings) -> Manufactoria:
    made = make_task(ManufactoriaConfig(**settings), seed)
    assert isinstance(made, Manufactoria)
    return made


def test_a_fifth_of_every_level_is_held_out_and_never_trained_on():
    held = Counter(spec.level for spec in catalogue() if spec.statement in held_out())
    everything = Counter(spec.level for spec in catalogue())
    assert all(held[level] == round(0.2 * count) for level, count in everything.items())
    source = task(families="transform")
    drawn = {source.next_problem().problem_id for _ in range(171)}
    evaluated = {problem.problem_id for problem in source.eval_problems()}
    assert (len(drawn), len(evaluated)) == (171, 43)
    assert not drawn & evaluated
    assert {f"manufactoria/{statement}" for statement in held_out()} >= evaluated


def test_a_problem_carries_its_prompt_level_and_tests():
    spec = next(spec for spec in catalogue() if spec.statement == "starts R B and mod B 2 1")
    problem = to_problem(spec, "mixed")
    assert problem.prompt == "starts R B and mod B 2 1 ?"
    assert problem.problem_id == "manufactoria/starts R B and mod B 2 1"
    assert (problem.source, problem.level) == ("manufactoria", "t3_starts_mod")
    rubric = decode_rubric(problem.answer)
    assert (rubric.reward, rubric.tests) == ("mixed", build_ladder(spec).tests)
    assert verify(problem, to_words(build_ladder(spec).rungs[-1]), truncated=False).outcome == "correct"


@pytest.mark.parametrize(("families", "size"), SIZES.items())
def test_families_choose_the_pool(families: str, size: int):
    source = task(families=families)
    assert source.num_problems == size
    assert sum(source.level_weights().values()) == pytest.approx(1)


def test_level_weights_are_the_shares_of_the_pool_and_hard_levels_the_hardest_tier():
    source = task(families="transform")
    drawn = Counter(source.next_problem().level for _ in range(171))
    assert {level: count / 171 for level, count in drawn.items()} == pytest.approx(source.level_weights())
    assert task(families="all").hard_levels == ("t3_repaint", "t3_starts_ends", "t3_starts_mod")
    assert task().hard_levels == ("t3_starts_ends", "t3_starts_mod")


def test_the_unsolved_pool_is_part_of_the_training_problems():
    sizes = {families: task(families=families, pool="unsolved").num_problems for families in SIZES}
    assert all(0 < (sizes[families] or 0) < size for families, size in SIZES.items())
    unsolved = task(pool="unsolved")
    drawn = {unsolved.next_problem().problem_id.removeprefix("manufactoria/") for _ in range(40)}
    assert len(drawn) == 40
    assert drawn <= set(UNSOLVED.read_text().splitlines()) - held_out()


def test_a_restored_source_goes_on_where_the_other_stood():
    first, second = task(seed=3, families="transform"), task(seed=3, families="transform")
    for _ in range(180):
        first.next_problem()
    state = first.state()
    expected = [first.next_problem() for _ in range(20)]
    second.restore(state)
    assert [second.next_problem() for _ in range(20)] == expected
    assert all(isinstance(value, int) for value in state.values())


def test_a_state_of_another_pool_is_refused():
    with pytest.raises(ConfigError, match="448 problems"):
        task(families="all").restore(task().state())


def test_seeds_change_the_order_of_training_and_nothing_of_evaluation():
    one, other = task(seed=1, eval_per_level=3), task(seed=2, eval_per_level=3)
    assert [one.next_problem() for _ in range(20)] != [other.next_problem() for _ in range(20)]
    assert one.eval_problems() == other.eval_problems()


def test_eval_per_level_caps_each_level():
    counts = Counter(problem.level for problem in task(families="all", eval_per_level=3).eval_problems())
    assert len(counts) == 14
    assert counts == {level: 2 if level == "t0_drop" else 3 for level in counts}
    assert len(held_out()) == 155
    assert task(eval_per_level=0).eval_problems() == []
    with pytest.raises(ConfigError, match="eval_per_level"):
        task(eval_per_level=-1)

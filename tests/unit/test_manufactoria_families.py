import random
from collections import Counter
from itertools import product

import pytest

from pipeline.tasks.manufactoria.judge import passes
from pipeline.tasks.manufactoria.ladder import NUM_TESTS, Ladder, Spec, build_ladder
from pipeline.tasks.manufactoria.language import ACCEPT, Program, run, to_words
from pipeline.tasks.manufactoria.task import catalogue

LEVELS = sorted({spec.level for spec in catalogue()})
NUM_PROBLEMS = {
    "t0_starts": 124,
    "t0_drop": 8,
    "t1_contains": 60,
    "t1_atleast": 20,
    "t1_exactly": 20,
    "t1_starts_atleast": 100,
    "t1_paint": 32,
    "t2_ends": 60,
    "t2_mod": 56,
    "t2_paint": 64,
    "t2_starts_paint": 48,
    "t3_starts_ends": 72,
    "t3_starts_mod": 48,
    "t3_repaint": 62,
}


def find(statement: str) -> Spec:
    return next(spec for spec in catalogue() if spec.statement == statement)


def ladders(kind: str, per_level: int) -> list[tuple[Spec, Ladder]]:
    """A few problems of every level; to choose tests for all of them takes seconds."""
    rng = random.Random(0)
    by_level = {level: [s for s in catalogue() if s.level == level and s.kind == kind] for level in LEVELS}
    chosen = [spec for specs in by_level.values() for spec in rng.sample(specs, min(per_level, len(specs)))]
    return [(spec, build_ladder(spec)) for spec in chosen]


def num_passed(program: Program, ladder: Ladder) -> int:
    return sum(passes(program, test) for test in ladder.tests)


def test_the_catalogue_has_every_problem_once():
    assert Counter(spec.level for spec in catalogue()) == NUM_PROBLEMS
    assert len({spec.statement for spec in catalogue()}) == sum(NUM_PROBLEMS.values()) == 774
    assert sum(spec.kind == "accept" for spec in catalogue()) == 560


def test_every_right_program_agrees_with_its_definition_on_every_short_tape():
    tapes = {pair: ["".join(t) for n in range(7) for t in product(pair, repeat=n)] for pair in ("RB", "YG")}
    for spec in catalogue():
        right = spec.candidates()[-1]
        for tape in tapes[spec.pair]:
            final, expected = run(right, tape), spec.expected(tape)
            assert (final if isinstance(expected, str) else final is not None) == expected, (spec.statement, tape)


def test_every_program_fits_the_models_words_and_the_default_token_limit():
    for spec in catalogue():
        for program in spec.candidates():
            assert len(program.nodes) <= 7
            assert len(to_words(program).split()) < 40


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("starts Y G", "START n0 PULLER_YG n0 n1 NONE NONE PULLER_YG n1 NONE END NONE"),
        (
            "contains R B R",
            "START n0 PULLER_RB n0 n1 n0 NONE PULLER_RB n1 n1 n2 NONE PULLER_RB n2 END n0 NONE",
        ),
        ("ends B", "START n0 PULLER_RB n0 n0 n1 NONE PULLER_RB n1 n0 n1 END"),
        ("mod B 2 1", "START n0 PULLER_RB n0 n0 n1 NONE PULLER_RB n1 n1 n0 END"),
        (
            "starts R and mod R 2 0",
            "START n0 PULLER_RB n0 n1 NONE NONE PULLER_RB n1 n2 n1 NONE PULLER_RB n2 n1 n2 END",
        ),
        ("drop R B 2", "START n0 PULLER_RB n0 n1 n1 END PULLER_RB n1 END END END"),
        ("paint R Y G and B", "START n0 PULLER_RB n0 n1 n0 END PAINTER_YELLOW n1 n2 PAINTER_GREEN n2 n0"),
        (
            "repaint Y and G G Y",
            "START n0 PAINTER_RED n0 n1 PULLER_YG n1 n1 n2 n4 PAINTER_GREEN n2 n3 PAINTER_YELLOW n3 n1 "
            "PULLER_RB n4 END NONE NONE",
        ),
    ],
)
def test_the_right_program_of_a_known_problem(statement: str, words: str):
    assert to_words(build_ladder(find(statement)).rungs[-1]) == words


@pytest.mark.parametrize(
    ("statement", "tape", "expected"),
    [
        ("starts R B and ends B R", "RBR", True),
        ("starts R B and ends B R", "RB", False),
        ("starts Y and atleast G 2", "YGG", True),
        ("exactly B 0", "RR", True),
        ("drop R B 3", "RBRB", "B"),
        ("drop R B 3", "RB", ""),
        ("paint R Y G and B", "RBR", "YGYG"),
        ("starts R and paint R Y and B G", "RRB", "YG"),
        ("starts R and paint R Y and B G", "BRB", False),
        ("repaint R B and B R", "RRB", "BBR"),
    ],
)
def test_what_a_known_problem_asks_for(statement: str, tape: str, expected: bool | str):
    assert find(statement).expected(tape) == expected


def test_the_tests_of_a_known_problem_are_the_same_on_every_machine():
    tests = build_ladder(find("repaint R B and B R")).tests
    assert [(test.tape, test.expected) for test in tests] == [
        ("", ""),
        ("RRRRRRRR", "BBBBBBBB"),
        ("RRR", "BBB"),
        ("RR", "BB"),
        ("RRRR", "BBBB"),
        ("R", "B"),
        ("RRRRRR", "BBBBBB"),
        ("RRRRR", "BBBBB"),
        ("RBR", "BRB"),
        ("B", "R"),
        ("RRBRBRRRR", "BBRBRBBBB"),
        ("BB", "RR"),
    ]


def test_every_test_is_true_and_asked_once():
    for kind in ("accept", "transform"):
        for spec, ladder in ladders(kind, 3):
            assert len({test.tape for test in ladder.tests}) == len(ladder.tests) == NUM_TESTS
            assert all(test.expected == spec.expected(test.tape) for test in ladder.tests)
            assert num_passed(ladder.rungs[-1], ladder) == NUM_TESTS


def test_accept_problems_have_one_killer_a_rung_behind_easy_tests_of_both_kinds():
    for spec, (rungs, tests) in ladders("accept", 4):
        num_easy = NUM_TESTS - (len(rungs) - 1)
        easy, killers = tests[:num_easy], tests[num_easy:]
        assert all(passes(rung, test) for rung in rungs for test in easy), spec.statement
        assert abs(2 * sum(test.expected is True for test in easy) - num_easy) <= 1, spec.statement
        for i, killer in enumerate(killers):
            assert not passes(rungs[i], killer), spec.statement
            assert all(passes(rung, killer) for rung in rungs[i + 1 :]), spec.statement


def test_accepting_or_rejecting_everything_is_worth_little_and_the_last_rung_but_one_almost_all():
    for spec, ladder in ladders("accept", 4):
        assert num_passed(Program(ACCEPT), ladder) <= 8, spec.statement
        assert num_passed(ladder.rungs[-2], ladder) == NUM_TESTS - 1, spec.statement


def test_transform_problems_get_harder_test_by_test_and_reward_each_rung():
    for spec, ladder in ladders("transform", 4):
        counts = [num_passed(rung, ladder) for rung in ladder.rungs]
        assert len(counts) >= 2, spec.statement
        assert counts[0] >= 1, spec.statement
        assert counts[-2] <= NUM_TESTS - 2, spec.statement
        hardest_failed = [
            max((i for i, rung in enumerate(ladder.rungs) if not passes(rung, test)), default=-1)
            for test in ladder.tests
        ]
        assert hardest_failed == sorted(hardest_failed), spec.statement
        assert set(hardest_failed) == set(range(-1, len(ladder.rungs) - 1)), spec.statement


def test_a_word_of_five_has_a_rung_for_each_prefix():
    rungs = build_ladder(find("starts R B B R B")).rungs
    assert [len(rung.nodes) for rung in rungs] == [1, 2, 3, 4, 5]


def test_a_word_with_no_self_overlap_has_no_forgetful_rung():
    assert len(build_ladder(find("contains R R")).rungs) == 2
    assert len(build_ladder(find("contains R R B")).rungs) == 4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.tasks.manufactoria.language import (
    ACCEPT,
    MAX_CHARS,
    MAX_STEPS,
    REJECT,
    Painter,
    Program,
    ProgramError,
    Puller,
    parse,
    run,
    to_text,
    to_words,
)

# No deadline: a busy machine is not a failure. No database: a test leaves no file behind.
QUIET = settings(max_examples=60)

ENDS_WITH_B = """# a tape of R and B that ends with B
START start:
    NEXT last_r
PULLER_RB last_r:
    [R] last_r      # still R
    [B] last_b

PULLER_RB last_b:
    [B] last_b
    [R] last_r
    [EMPTY] end
END end
"""
FLIP = """
START start:
    NEXT mark
PAINTER_YELLOW mark:
    NEXT loop
PULLER_RB loop:
    [R] blue
    [B] red
    [EMPTY] unmark
PAINTER_BLUE blue:
    NEXT loop
PAINTER_RED red:
    NEXT loop
PULLER_YG unmark:
    [Y] done
END done
"""


@st.composite
def programs(draw) -> Program:
    size = draw(st.integers(0, 8))
    target = st.integers(REJECT, size - 1)
    puller = st.builds(Puller, st.sampled_from(("RB", "YG")), target, target, target)
    painter = st.builds(Painter, st.sampled_from("RBYG"), target)
    nodes = draw(st.lists(st.one_of(puller, painter), min_size=size, max_size=size))
    return Program(draw(target), tuple(nodes))


def test_a_text_becomes_numbered_nodes_and_a_missing_route_rejects():
    assert parse(ENDS_WITH_B) == Program(0, (Puller("RB", 0, 1, REJECT), Puller("RB", 0, 1, ACCEPT)))


def test_the_word_form_of_a_known_program():
    words = "START n0 PULLER_RB n0 n0 n1 NONE PULLER_RB n1 n0 n1 END"
    assert to_words(parse(ENDS_WITH_B)) == words
    assert parse(words) == parse(ENDS_WITH_B)
    assert to_words(parse("START END")) == "START END"


def test_the_text_form_of_a_known_program():
    assert to_text(parse("START n4 PAINTER_GREEN n4 n7 PULLER_YG n7 n4 NONE END")) == (
        "START start:\n    NEXT n0\n"
        "PAINTER_GREEN n0:\n    NEXT n1\n"
        "PULLER_YG n1:\n    [Y] n0\n    [G] NONE\n    [EMPTY] end\n"
        "END end\n"
    )


@pytest.mark.parametrize(
    ("tape", "final"), [("", None), ("R", None), ("B", ""), ("RRB", ""), ("BR", None), ("BY", "Y"), ("YB", None)]
)
def test_a_puller_takes_its_colours_and_leaves_others(tape: str, final: str | None):
    assert run(parse(ENDS_WITH_B), tape) == final


@pytest.mark.parametrize(("tape", "final"), [("", ""), ("R", "B"), ("RRB", "BBR"), ("RG", None)])
def test_painters_append_behind_a_marker(tape: str, final: str | None):
    assert run(parse(FLIP), tape) == final


def test_none_rejects_from_every_place():
    assert run(parse("START NONE"), "R") is None
    assert run(parse("START n0 PAINTER_RED n0 NONE"), "R") is None
    assert run(parse("START n0 PULLER_RB n0 NONE END END"), "R") is None
    assert run(parse("START n0 PULLER_RB n0 NONE END END"), "B") == ""


def test_exactly_the_step_limit_is_allowed():
    # Each colour is one step and the end of the tape one more.
    sweep = parse("START n0 PULLER_RB n0 n0 n0 END")
    assert run(sweep, "R" * (MAX_STEPS - 1)) == ""
    assert run(sweep, "R" * MAX_STEPS) is None


def test_a_loop_rejects():
    assert run(parse("START n0 PULLER_RB n0 n0 n0 n0"), "RB") is None
    assert run(parse("START n0 PAINTER_RED n0 n0"), "") is None
    assert run(parse("START s:\n NEXT s\nEND e"), "") is None


def test_a_route_to_start_goes_where_start_goes():
    text = "START s:\n NEXT a\nPULLER_RB a:\n [R] s\n [B] e\nEND e"
    assert parse(text) == Program(0, (Puller("RB", 0, ACCEPT, REJECT),))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("START s:\n NEXT n\nEND e", "line 2: no node is called n"),
        ("START s:\n NEXT e\n\nPULLER_RB a:\n [Y] e\nEND e", "line 5: PULLER_RB has no route Y"),
        ("START s:\n NEXT e\nPULLER_RB a:\n [R] e\n [R] a\nEND e", "line 5: a second route R"),
        ("START s:\n NEXT e\nPAINTER_RED a:\nEND e", "line 3: PAINTER_RED needs a NEXT"),
        ("START s:\nEND e", "line 1: START needs a NEXT"),
        ("START s:\n NEXT e\nPAINTER_RED s:\n NEXT e\nEND e", "line 3: the name s is taken"),
        ("START s:\n NEXT e\nPAINTER_RED NONE:\n NEXT e\nEND e", "line 3: the name NONE is taken"),
        (
            "START s:\n NEXT e\nPAINTER_PINK p:\n NEXT e\nEND e",
            "line 3: neither a statement nor a route: 'PAINTER_PINK p:'",
        ),
        ("START s:\n NEXT e\nEND e:", "line 3: neither a statement nor a route: 'END e:'"),
        ("START s\n NEXT e\nEND e # :", "line 1: neither a statement nor a route: 'START s'"),
        ("[R] s:", "line 1: neither a statement nor a route: '[R] s:'"),
        ("NEXT e\nSTART s:", "line 1: the beginning has no route NEXT"),
        ("START s:\n NEXT NONE", "0 END statements; a program has exactly one"),
        ("START s:\n NEXT e\nEND e\nEND f", "2 END statements; a program has exactly one"),
        ("", "0 START statements; a program has exactly one"),
        ("PAINTER_RED n0 END", "0 START statements; a program has exactly one"),
        ("START", "word 1: START lacks 1 of its words"),
        ("START n0", "word 2: no node is called n0"),
        ("START END END", "word 3: 'END' is not a statement"),
        ("START n0 PULLER_RB n0 END END", "word 3: PULLER_RB lacks 1 of its words"),
        ("START END PAINTER_RED END END", "word 4: 'END' is not the name of a node"),
        ("START END PAINTER_RED n0 n1", "word 5: no node is called n1"),
        ("START END PAINTER_RED n0 END PAINTER_RED n0 END", "word 6: the name n0 is taken"),
        ("START END START END", "2 START statements; a program has exactly one"),
        ("starts R", "word 1: 'starts' is not a statement"),
    ],
)
def test_a_wrong_program_is_refused_by_line_or_word(text: str, message: str):
    with pytest.raises(ProgramError) as caught:
        parse(text)
    assert caught.value.message == message


def test_an_endless_text_is_refused_before_it_is_read():
    with pytest.raises(ProgramError, match="at most"):
        parse("START END " + "PAINTER_RED n0 END " * MAX_CHARS)


@QUIET
@given(programs())
def test_both_forms_give_the_same_program_back(program: Program):
    assert parse(to_words(program)) == program
    assert parse(to_text(program)) == program


@QUIET
@given(programs(), st.text("RBYG", max_size=6))
def test_a_run_ends_with_a_tape_or_a_rejection(program: Program, tape: str):
    final = run(program, tape)
    assert final is None or set(final) <= set("RBYG")
    assert run(parse(to_text(program)), tape) == final


HOSTILE = st.one_of(
    st.text(max_size=80),
    st.lists(st.sampled_from([*"RB", "START", "END", "NONE", "PULLER_RB", "n0", "n1", "PAINTER_RED"])).map(" ".join),
    st.lists(st.sampled_from(["START s:", "NEXT e", "END e", "[R] e", "[EMPTY] p", "PULLER_RB p:", "#"])).map(
        "\n".join
    ),
)


@QUIET
@given(HOSTILE)
def test_any_text_is_a_program_or_a_program_error(text: str):
    try:
        program = parse(text)
    except ProgramError as e:
        assert e.message
        assert "\n" not in e.message
    else:
        assert parse(to_words(program)) == program

"""The exact fast path decides what it can and never guesses; the limits keep bombs away from sympy."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.verifiers.exact import compare, normalize, plain_number
from pipeline.verifiers.limits import MAX_CHARS, excess


@given(st.integers(-(10**30), 10**30))
def test_integers_however_they_are_written(n: int):
    for written in (f"{n:,}", f"${n}$", f"{n}.0", f"{n} apples", rf"\({n}\)", f"{n}."):
        assert compare(str(n), written) is True
    assert compare(str(n), str(n + 1)) is False
    assert compare(str(n), f"-{abs(n) + 1}") is False


@given(st.fractions(max_denominator=10**6))
def test_fractions_however_they_are_written(f: Fraction):
    gold = f"{f.numerator}/{f.denominator}"
    sign = "-" if f < 0 else ""
    top = abs(f.numerator)
    assert compare(gold, rf"{sign}\frac{{{top}}}{{{f.denominator}}}") is True
    assert compare(gold, rf"{sign}\dfrac{{{3 * top}}}{{{3 * f.denominator}}}") is True
    whole, rest = divmod(top, f.denominator)
    assert compare(gold, rf"{sign}{whole}\frac{{{rest}}}{{{f.denominator}}}") is True
    assert compare(gold, f"{f.numerator + f.denominator}/{f.denominator}") is False


ANSWERS = st.text("0123456789.,-+/%$ \\{}()x", max_size=12) | st.sampled_from(("\\frac12", "3 cm", "3 m", "1/2", "50%"))


@given(ANSWERS, ANSWERS)
def test_false_only_between_two_plain_numbers(a: str, b: str):
    same = compare(a, b)
    if same is False:
        assert plain_number(normalize(a)) is not None and plain_number(normalize(b)) is not None
    assert compare(a, a) in (True, None)
    assert compare(b, a) == same


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1,23",
        "1/0",
        "--5",
        "5 000",
        "18 over",
        "2 million thousand",
        "18 or 19",
        "3^2",
        "5!",
        "1:2",
        "³",
        "½",
        "€",
        "5cm",
        "1 2 3",
        "1e5",
        "+-2",
    ],
)
def test_not_a_plain_number(text: str):
    assert plain_number(normalize(text)) is None


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("7" * 1_000_000, "7" * 1_000_000, True),
        ("7" * 1_000_000, "7" * 999_999 + "8", False),
        ("5", "9" * 1_000_000, False),
        ("5", "0" * 1_000_000 + "5", True),
        ("5", "5." + "0" * 1_000_000, True),
        ("1/3", "0." + "3" * 1_000_000, None),
        ("5", "1/" + "9" * 1_000_000, None),
        ("5", "x" * 1_000_000, None),
        ("5", "1," * 500_000, None),
        ("5", r"\frac{" * 150_000, None),
        ("5", r"\text{" * 150_000, None),
        ("5", " " * 1_000_000 + "5", True),
    ],
    ids=lambda value: f"{value!s:.12}",
)
def test_a_megabyte_is_compared(gold: str, answer: str, same: bool | None):
    assert compare(gold, answer) is same


@pytest.mark.parametrize(
    "text",
    [
        r"\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}",
        "9^9^9^9",
        "2^{2^{2^{2}}}",
        "10^{100000}",
        "x^{99999999}",
        "99999999!",
        "9" * 1_001,
        "(" * 50 + "1" + ")" * 50,
        "{" * 50,
        "x+" * MAX_CHARS,
        "1" * 1_000_000,
    ],
    ids=lambda value: f"{value:.12}",
)
def test_bombs_are_recognized(text: str):
    assert excess(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "42",
        "9" * 1_000,
        "2^{2023}",
        "e^{-x^{2}}",
        "x^2+y^2+z^2",
        "x^2y^2z^2",
        "(a^2)^{3}(b^2)^{3}",
        "2004!",
        "2000000 + 1",
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
        r"\left\{ x \mid x^2 < 3 \right\}",
        ")]}" * 100,
    ],
    ids=lambda value: f"{value:.12}",
)
def test_ordinary_answers_are_within_the_limits(text: str):
    assert excess(text) is None

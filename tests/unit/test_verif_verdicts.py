"""A table of known verdicts: what counts as the same mathematical answer, and what must not.

Each row goes through the whole math verifier in this process: extraction, exact arithmetic, math-verify, second look.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline.verifiers.math import MathVerifier
from samplers.base import Problem

VERIFIER = MathVerifier()

SAME = [
    # plain numbers
    ("42", "42"),
    ("42", "42.0"),
    ("42", "+42"),
    ("-42", "−42"),
    ("0", "-0"),
    ("007", "7"),
    ("1,080", "1080"),
    ("1080", "1,080.00"),
    ("10{,}000", "10000"),
    ("10000", r"10{,}000"),
    ("10000", r"10,\!000"),
    ("10000", r"10\,000"),
    ("5", "5."),
    (".5", "0.5"),
    ("0.50", "1/2"),
    (r"\frac{1}{2}", "0.5"),
    (r"\frac12", r"\dfrac{2}{4}"),
    ("1/2", r"\tfrac{1}{2}"),
    ("-3/4", r"-\frac{3}{4}"),
    (r"\frac{-3}{4}", r"-\frac{3}{4}"),
    ("3.5", r"3\frac{1}{2}"),
    (r"3\frac{1}{2}", "7/2"),
    ("3 1/2", "3.5"),
    ("-3.5", r"-3\frac{1}{2}"),
    (r"\frac{1}{3}", "0.333333"),
    (r"\frac{2}{3}", "0.666667"),
    ("1500", r"1.5\times10^3"),
    ("1000", "10^3"),
    # money, percent, units
    ("18", "$18"),
    ("18", r"\$18"),
    (r"\$18", "18.00"),
    (r"$\$18$", "$18"),
    ("-5", "-$5"),
    ("10", r"10\%"),
    (r"10\%", "0.1"),
    (r"10\%", "10"),
    ("0.1", "10%"),
    ("12.5%", r"12.5\%"),
    ("18", "18 dollars"),
    ("18", r"18\text{ apples per day}"),
    (r"5\text{ cm}", "5"),
    ("90", r"90^\circ"),
    ("42", "４２"),
    ("42", "٤٢"),
    ("1,234.5", "１,２３４.５"),
    ("€5", "5"),
    ("5", "£5.00"),
    ("5", "5 USD"),
    ("$5", "5 dollars"),
    ("5", "5 cents"),
    ("3 hours", "3 hrs"),
    ("2 million", "2,000,000"),
    ("3/10", r"3\text{ tenths}"),
    ("5%", "5 percent"),
    (r"\frac{1}{6}", r"0.1\overline{6}"),
    ("10:00", r"\text{10:00}"),
    ("90", "90°"),
    (r"(2,\infty)", "(2, ∞)"),
    (r"\sqrt{12}", "√12"),
    (r"3+4i", "3 + 4 i"),
    ("0.05", "5%"),
    ("2.5", r"2\frac{1}{2}"),
    (r"2\tfrac12", "5/2"),
    (r"1\frac{1}{2}", "1.50"),
    (r"\frac{1}{-2}", "-0.5"),
    ("60", r"60\ \text{mph}"),
    (r"3\text{ cm}^2", "3"),
    (r"\$1.50", "1.5"),
    (r"\angle ABC = 30^\circ", "30"),
    # spelling
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"\left(3,\pi/2\right)"),
    (r"\text{even}", "Even"),
    ("Monday", r"\text{monday}"),
    ("A", "(A)"),
    (r"\text{(B)}", "B"),
    ("x^2+1", "$x^2 + 1$"),
    (r"\(x^2+1\)", r"\[x^2+1\]"),
    # algebra
    ("x^2+1", "1+x^2"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"\sqrt{8}", r"2\sqrt2"),
    (r"4\sqrt{2}", r"4\sqrt(2)"),
    (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2"),
    (r"2\pi", r"\pi\cdot 2"),
    ("2^{10}", "1024"),
    ("5!", "120"),
    (r"\frac{1}{2004!}", r"\frac{1}{2004!}"),
    (r"\frac{1}{2004!}", r"\frac{2005}{2005!}"),
    ("1+i", "i+1"),
    (r"\log_2 8", "3"),
    # sets, tuples, intervals, relations
    ("1,2,3", "3,2,1"),
    (r"\{1,2\}", "2, 1"),
    (r"\pm 3", "3,-3"),
    ("(1,2)", "(1, 2)"),
    ("[0,1]", r"[0, 1.0]"),
    (r"(2,\infty)", "x>2"),
    (r"(-\infty, 3]", r"x \le 3"),
    (r"(0,1)\cup(2,3)", r"(2,3)\cup(0,1)"),
    (r"\emptyset", r"\{\}"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("x=1,2", "1,2"),
    (r"\text{no solution}", "No solution"),
    (r"\sin^2 x+\cos^2 x", "1"),
    (r"\frac{a}{b}", "a/b"),
    ("x>2", r"(2,\infty)"),
    ("[0,1]", r"0\le x\le 1"),
    (r"x \in [0,1]", "[0,1]"),
    ("x<3", "3>x"),
    ("x=5", "5"),
    ("5", "x=5"),
    ("y=2x+1", "2x-y+1=0"),
    ("2x+4y=6", "x+2y=3"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&8/2\end{pmatrix}"),
]

DIFFERENT = [
    # plain numbers
    ("42", "43"),
    ("42", "-42"),
    ("42", "4.2"),
    ("42", "420"),
    ("1/2", "0.51"),
    (r"\frac{1}{2}", r"\frac{2}{1}"),
    (r"\frac{1}{3}", "0.33"),
    (r"\frac{1}{3}", "0.3333"),
    ("3 1/2", "31/2"),
    ("12", "1 2"),
    ("100", r"1\%"),
    (r"10\%", r"11\%"),
    ("0", "0.0000001"),
    ("0.0000012", "0.0000014"),
    ("12345678901234567890", "12345678901234567891"),
    ("2", "-1.8 billion"),
    ("18", "18 million"),
    ("18", "18 or 19"),
    ("3", "3 and a half"),
    ("42", "４３"),
    ("€5", "$5"),
    (r"\$5", "5 cents"),
    (r"\$5", "5 euros"),
    ("3 hours", "3 minutes"),
    (r"5\text{ cm}", r"5\text{ km}"),
    ("2", r"2\text{ billion}"),
    ("2", r"2\text{ dozens}"),
    ("3", r"3\text{ tenths}"),
    (r"0.1\overline{6}", "0.16"),
    # a ratio to nothing, for math-verify
    ("10:00", "10:30"),
    ("7:00", "5"),
    ("60 mph", "60 km/h"),
    ("0.999999", "1"),
    (r"\frac{22}{7}", r"\pi"),
    # equal to math-verify, and wrong
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
    ("4", r"4\sqrt(2)"),
    ("3*x-1*y+13=0", "3x + 4y + 14=0"),
    ("x^2+y^2=-1", "x^2+y^2=-2"),
    ("10^{-20}", "10^{-21}"),
    ("e^{-100}", "e^{-101}"),
    (r"\frac{x}{2004!}", r"\frac{x}{2006!}"),
    (r"(1, \frac{1}{2004!})", r"(1, \frac{1}{2006!})"),
    ("12_8", "12_9"),
    # half an answer, or more than one
    (r"\left( 3, \frac{\pi}{2} \right)", "3"),
    ("3", r"3\\4"),
    ("3", r"3 \text{ or } 4"),
    ("3", "3, 4"),
    ("3", "3; 4"),
    ("3", r"\pm 3"),
    (r"\pm 3", "3"),
    ("5", "5^"),
    ("5", "5+"),
    ("5", "5)7"),
    ("5", r"5\foo{7}"),
    ("5", r"5\sqrt(4)"),
    # words
    ("Monday", "Tuesday"),
    ("listen", "silent"),
    (r"\text{even}", r"\text{odd}"),
    ("A", "B"),
    # algebra
    ("x^2+1", "x^2-1"),
    ("x", "y"),
    ("1+i", "1-i"),
    ("100!", "101!"),
    (r"\infty", r"-\infty"),
    # sets, tuples, intervals, relations
    ("(1,2)", "(2,1)"),
    ("1,2,3", "1,2"),
    ("[0,1]", "[0,1)"),
    (r"(2,\infty)", "x>3"),
    (r"(-\infty,3]", r"(-\infty,3)"),
    ("(1,2,3)", "(1,3,2)"),
    (r"\sin x", r"\cos x"),
    (r"\text{none}", "0"),
    ("x<3", "x>3"),
    ("x=3", "y=3"),
    ("y=2x+1", "y=3x+1"),
    ("2x+z=1", "1"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
    # no mathematics at all
    ("5", "__import__('os').system('true')"),
    ("5", "the answer"),
]


MEGABYTE = "x" * 1_000_000

# Whole completions: gold, text, whether the token limit cut it, verdict.
TEXTS = [
    ("2", r"\boxed{1}, no, \boxed{2}", False, "correct"),
    ("1", r"\boxed{1}, no, \boxed{2}", False, "incorrect"),
    ("3", r"\boxed{1} but the answer is: 3", False, "incorrect"),
    ("3", "the answer is 3", False, "incorrect"),
    ("3", "3", False, "incorrect"),
    ("3", "", False, "incorrect"),
    ("3", r"\boxed{}", False, "incorrect"),
    ("3", r"\boxed{3", False, "incorrect"),
    ("3", "#### 3", False, "correct"),
    ("3", "Answer: 3 apples", False, "correct"),
    ("3", "Answer: 3", True, "incorrect"),
    ("3", r"\boxed{3} and", True, "correct"),
    ("7", MEGABYTE + r"\boxed{7}", False, "correct"),
    ("7", rf"\boxed{{{MEGABYTE}}}", False, "unknown"),
    ("7", MEGABYTE, False, "incorrect"),
    ("7", rf"\boxed{{{'7' * 1_000_000}}}", False, "incorrect"),
]


def outcome(gold: str, answer: str) -> str:
    problem = Problem("p", "jsonl", "", gold)
    return VERIFIER.verify(problem, rf"Thus \boxed{{{answer}}}.", False).outcome


def test_the_table_is_as_long_as_it_should_be():
    assert len({*SAME, *DIFFERENT, *TEXTS}) == len(SAME) + len(DIFFERENT) + len(TEXTS) >= 150


@pytest.mark.parametrize(("gold", "text", "truncated", "expected"), TEXTS, ids=lambda value: f"{value!s:.24}")
def test_whole_completions(gold: str, text: str, truncated: bool, expected: str):
    assert VERIFIER.verify(Problem("p", "jsonl", "", gold), text, truncated).outcome == expected


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_same(gold: str, answer: str):
    assert outcome(gold, answer) == "correct"


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different(gold: str, answer: str):
    assert outcome(gold, answer) == "incorrect"


def test_off_the_main_thread_too():
    """The library's own timeouts are signals, which only the main thread may set (Math-Verify#50)."""
    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(outcome, "x^2+7", "7+x^2").result() == "correct"


@pytest.mark.parametrize("gold", sorted({gold for gold, _ in SAME + DIFFERENT}))
def test_every_gold_verifies_against_itself(gold: str):
    assert outcome(gold, gold) == "correct"

"""Where the final answer of a completion stands."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.verifiers.extract import extract_answer, last_boxed, last_tagged


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{ \frac{1}{2} }", r"\frac{1}{2}"),
        (r"\boxed{\left\{1, 2\right\}}", r"\left\{1, 2\right\}"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"{ \boxed{7}", "7"),
        (r"} \boxed{7}", "7"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\fbox{8}", "8"),
        (r"\boxed {9}", "9"),
        (r"\boxed{a\\}", r"a\\"),
        ("\\boxed{a\nb}", "a\nb"),
        (r"\boxed{}", None),
        (r"\boxed{  }", None),
        (r"\boxed 5", None),
        ("no box", None),
        ("", None),
    ],
)
def test_boxed(text: str, answer: str | None):
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "rule", "truncated", "answer"),
    [
        ("work\n#### 42", "hash", False, "42"),
        ("#### 1\n#### 2\nmore", "hash", False, "2"),
        ("####", "hash", False, None),
        ("no", "hash", False, None),
        ("Answer: 42", "answer", False, "42"),
        ("**Answer:** 42\n", "answer", False, "42"),
        ("**Answer**: 42", "answer", False, "42"),
        ("The final answer is: **42**\nbye", "answer", False, "42"),
        ("answer: 1\nANSWER: 2", "answer", False, "2"),
        ("Answer:\n\n42\n", "answer", False, "42"),
        ("Answer:", "answer", False, None),
        # the token limit may have cut the line: 12 may be the start of 128
        ("#### 12", "hash", True, None),
        ("#### 12\n", "hash", True, "12"),
        ("Answer: 12", "answer", True, None),
        (r"\boxed{12} and so", "boxed", True, "12"),
        (r"\boxed{12", "boxed", True, None),
        # a rule looks at its own form only; auto takes the first kind there is
        ("#### 3", "boxed", False, None),
        (r"\boxed{3}", "hash", False, None),
        ("Answer: 1\n#### 2\n\\boxed{3}", "auto", False, "3"),
        ("Answer: 1\n#### 2", "auto", False, "2"),
        ("Answer: 1", "auto", False, "1"),
        ("I give up", "auto", False, None),
    ],
)
def test_rules(text, rule, truncated, answer):
    assert extract_answer(text, rule, truncated) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>4</answer>", "4"),
        ("<answer>1</answer> <answer>\n2\n</answer>", "2"),
        ("<answer>open", None),
        ("</answer>", None),
        ("<answer> </answer>", None),
    ],
)
def test_tagged(text: str, answer: str | None):
    assert last_tagged(text, "answer") == answer


PIECES = st.sampled_from(["\\boxed{", "{", "}", "\\{", "\\}", "\\", "1", " ", "####", "Answer: ", "\n"])


@given(st.lists(PIECES, max_size=30).map("".join), st.booleans())
def test_whatever_is_found_stands_in_the_text(text: str, truncated: bool):
    answer = extract_answer(text, "auto", truncated)
    assert answer is None or (answer and answer in text and answer == answer.strip())


@pytest.mark.parametrize("unit", ["\\boxed{", "{", "}", "\\boxed", "####", "Answer: ", "\\", "answer is", " ", "a"])
def test_a_megabyte_of_anything_is_read(unit: str):
    text = unit * (1_000_000 // len(unit)) + r" \boxed{7}"
    assert extract_answer(text, "auto", False) == "7"

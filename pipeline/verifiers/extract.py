r"""The final answer of a completion: the last `\boxed{x}`, `#### x` or `Answer: x` (`A: x` at the start of a line).

Everything is one pass over the text, so a megabyte of unclosed braces costs milliseconds. A text that was cut by the
token limit may end in the middle of an answer line; such a line counts only when its line break was written too.
"""

import re

from pipeline.config import ExtractRule

_BRACES = re.compile(r"\\(?:boxed|fbox)[ ]?\{|\\.|[{}]", re.DOTALL)
# `A: 26` is how the solutions published with GSM8K end; in the middle of a line it is anything.
_ANSWER = re.compile(r"(?:answer(?: is)?\*{0,2} ?|^a): ?\*{0,2}", re.IGNORECASE | re.MULTILINE)
_HASH = "####"
_FENCED = re.compile(r"^```[^\n`]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def extract_answer(text: str, rule: ExtractRule, truncated: bool) -> str | None:
    """The answer as written, stripped, or None when there is none (an empty answer is None too).

    `auto` takes the first of boxed, hash and answer that the text holds.
    """
    if rule == "boxed":
        return last_boxed(text)
    if rule == "hash":
        return _last_hash(text, truncated)
    if rule == "answer":
        return _last_answer_line(text, truncated)
    return last_boxed(text) or _last_hash(text, truncated) or _last_answer_line(text, truncated)


def last_boxed(text: str) -> str | None:
    r"""Contents of the last `\boxed{...}` whose braces balance; of nested boxes the innermost."""
    last = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if last < 0:
        return None
    found = _scan_boxes(text, last)  # nearly always enough, and the working before it may be long
    if found is None:
        found = _scan_boxes(text, 0)
    return found.strip() or None if found else None


def _scan_boxes(text: str, begin: int) -> str | None:
    open_braces: list[int] = []  # where the contents of each begin, or -1 if it is not a box
    found: str | None = None
    last_start = -1
    for match in _BRACES.finditer(text, begin):
        token = match.group()
        if token == "}":
            start = open_braces.pop() if open_braces else -1
            if start > last_start:  # an enclosing box starts earlier: the inner one already stands for it
                found, last_start = text[start : match.start()], start
        elif token[-1] == "{" and token != "\\{":
            open_braces.append(match.end() if len(token) > 1 else -1)
    return found


def last_tagged(text: str, tag: str) -> str | None:
    """Contents of the last `<tag>...</tag>`, stripped."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return text[start + len(tag) + 2 : end].strip() or None if start >= 0 else None


def last_code_block(text: str) -> str | None:
    """Contents of the last fenced block that is closed; None when there is none or it is blank."""
    blocks = _FENCED.findall(text)
    return blocks[-1] if blocks and blocks[-1].strip() else None


def _last_hash(text: str, truncated: bool) -> str | None:
    start = text.rfind(_HASH)
    return _rest_of_line(text, start + len(_HASH), truncated) if start >= 0 else None


def _last_answer_line(text: str, truncated: bool) -> str | None:
    end = max((match.end() for match in _ANSWER.finditer(text)), default=-1)
    return _rest_of_line(text, end, truncated) if end >= 0 else None


def _rest_of_line(text: str, start: int, truncated: bool) -> str | None:
    while start < len(text) and text[start].isspace():  # "Answer:" may stand on a line of its own
        start += 1
    end = text.find("\n", start)
    if end < 0:
        if truncated:
            return None
        end = len(text)
    return text[start:end].strip().strip("*").strip() or None

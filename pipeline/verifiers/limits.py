"""What is too large to be handed to a computer algebra system, decided by one look at the text.

The limits are far above any answer a person writes and keep the common bombs (power towers, huge factorials, deep
nesting) from costing a killed child each. What slips through meets the deadline.
"""

import re

MAX_CHARS = 1_000
MAX_NESTING = 12
MAX_TOWER = 2
MAX_EXPONENT = 10_000
MAX_FACTORIAL = 10_000

_TOKENS = re.compile(r"\\[a-zA-Z]+|\\.|[0-9]+|\S", re.DOTALL)


def excess(text: str) -> str | None:
    """The limit that `text` breaks, in words, or None; linear in the length of the text."""
    if len(text) > MAX_CHARS:
        return f"{len(text)} characters (limit {MAX_CHARS})"
    open_heights = [0]  # height of the power tower inside each open bracket
    height = 0  # of the exponent that the next token begins; 0 if it begins none
    below = 0  # height of the exponent just read, on which a `^` without brackets stacks
    for match in _TOKENS.finditer(text):
        token = match.group()
        if token in ("\\left", "\\right"):
            continue
        if token == "^":
            height = max(below, open_heights[-1]) + 1
            if height > MAX_TOWER:
                return f"a power tower higher than {MAX_TOWER}"
            continue
        if token in "{([":
            open_heights.append(height or open_heights[-1])
            if len(open_heights) > MAX_NESTING:
                return f"brackets nested deeper than {MAX_NESTING}"
        elif token in "})]" and len(open_heights) > 1:
            open_heights.pop()
        elif token[0] in "0123456789":
            following = text[match.end() : match.end() + 1]
            if problem := _number_excess(token, bool(height or open_heights[-1]), following):
                return problem
        below, height = height, 0
    return None


def _number_excess(digits: str, in_exponent: bool, following: str) -> str | None:
    if in_exponent and int(digits) > MAX_EXPONENT:
        return f"an exponent above {MAX_EXPONENT}"
    if following == "!" and int(digits) > MAX_FACTORIAL:
        return f"a factorial above {MAX_FACTORIAL}"
    return None

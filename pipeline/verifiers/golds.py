r"""Whether a gold can be answered at all: put into `\boxed{}` and judged against itself.

A gold that fails here gives reward 0 to every right answer, so a task sets it aside when it is read.
"""

from pipeline.messages import Verdict
from pipeline.verifiers.exact import compare, is_words, normalize, plain_number
from pipeline.verifiers.extract import last_boxed
from pipeline.verifiers.limits import excess
from pipeline.verifiers.triage import Question


def triage_gold(gold: str) -> Verdict | Question:
    """A verdict where exact arithmetic decides, in microseconds; otherwise the question to put to a child.

    That the gold is the same text as itself decides nothing: the next right answer is spelt in another way.
    """
    found = last_boxed(f"\\boxed{{{gold}}}")
    if found is None or compare(gold, found) is not True:
        return Verdict("incorrect", 0.0, gold, detail="its braces do not balance, so no box can hold it")
    normalized = normalize(gold)
    if plain_number(normalized) is not None or is_words(normalized):
        return Verdict("correct", 1.0, gold)
    if broken := excess(gold):
        return Verdict("unknown", 0.0, gold, detail=f"oversize: {broken}")
    return Question("", gold, gold)

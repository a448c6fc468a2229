r"""Equality of two written answers without a computer algebra system.

`compare` is True for equal text and for numbers of equal value, False only when both sides are plain numbers that
differ, and None when it cannot tell. A plain number is an integer, decimal, simple fraction or mixed number with
optional thousands separators, currency sign, percent sign and a unit in words: `-1,234.50`, `\frac{3}{4}`, `3 1/2`,
`12.5\%`, `18 dollars`, `€5`, `2 million`, `0.1\overline{6}`. Digits may be those of any script.
"""

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

# Longer decimals are compared as Decimals: parsing an int is quadratic in its digits (and refused from 4,300 on).
MAX_FRACTION_DIGITS = 400
# A rounded decimal counts as equal under both: math-verify's own six decimals, and five significant digits so that
# two tiny numbers are not "equal" because both round to nothing.
ROUNDING = Fraction(1, 2 * 10**6)
RELATIVE = Fraction(1, 10**5)

_DROPPED = re.compile(r"\\(?:left|right|displaystyle|textstyle)(?![a-zA-Z])|\\[,;:!]|\{\}")
_TEXT = re.compile(r"\\(?:text(?:bf|rm|it|normal|sf|tt)?|mathrm|mathbf|mathit|mbox) ?\{([^{}]*)\}")
_SQRT_OF_GROUP = re.compile(r"\\sqrt ?\(([^()]*)\)")
_ROOT = re.compile("√ ?([0-9]+|[A-Za-z])")
_LOOSE_SPACE = re.compile(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])")
_REPLACED = (
    ("\\dfrac", "\\frac"),
    ("\\tfrac", "\\frac"),
    ("\\cfrac", "\\frac"),
    ("\\$", "$"),
    ("\\%", "%"),
    ("{,}", ","),
    ("−", "-"),
    ("–", "-"),
    ("~", " "),
    ("\\ ", " "),
)
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"))

_DECIMAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_TEX_FRACTION = r"\\frac ?(?:\{(?P<n1>[0-9]+)\}|(?P<n2>[0-9])) ?(?:\{(?P<d1>[0-9]+)\}|(?P<d2>[0-9]))"
_FRACTION = rf"(?:{_TEX_FRACTION}|(?P<n3>[0-9]+)/(?P<d3>[0-9]+))"
_REPEAT = r"(?:\\overline ?\{(?P<repeat>[0-9]+)\})"
_SIGN = r"(?P<sign>[+-]?(?P<currency>[$€£¥]?)[+-]?)"
_NUMBER = re.compile(
    rf"{_SIGN}(?:(?:(?P<whole>[0-9]+)(?: |(?=\\)))?{_FRACTION}|(?P<decimal>{_DECIMAL}){_REPEAT}?)(?P<percent>%?)"
)
_UNIT = re.compile(r"[A-Za-z]{2,}(?: [A-Za-z]{2,})*")
_SCALES = {
    "dozen": Fraction(12),
    "hundred": Fraction(100),
    "thousand": Fraction(10**3),
    "million": Fraction(10**6),
    "billion": Fraction(10**9),
    "trillion": Fraction(10**12),
    "halve": Fraction(1, 2),
    "third": Fraction(1, 3),
    "fourth": Fraction(1, 4),
    "fifth": Fraction(1, 5),
    "tenth": Fraction(1, 10),
    "hundredth": Fraction(1, 100),
    "thousandth": Fraction(1, 1000),
}
_SCALES |= {f"{word}s": scale for word, scale in _SCALES.items()}
# Words elsewhere after a number that change its value or hedge, so that the number alone is not the answer.
_CHANGING_WORDS = (
    "and or to not minus plus times over squared cubed factorial half score percent mod base if for except pi sqrt"
)
_NOT_UNITS = frozenset(_CHANGING_WORDS.split()) | _SCALES.keys()
# The spellings of one unit on each line.
_SPELLINGS = """
dollar usd $
euro eur €
pound gbp lb £
yen jpy ¥
cent
second sec
minute min
hour hr
day
week
month
year yr
mm millimeter millimetre
cm centimeter centimetre
meter metre
km kilometer kilometre
inch inches
foot feet ft
yard yd
mile mi
gram
kg kilogram
ounce oz
liter litre
ml milliliter millilitre
"""
_MEASURES = {f"{word}{end}": line for line in _SPELLINGS.split("\n") for word in line.split() for end in ("", "s")}


class PlainNumber(NamedTuple):
    """`value` is a Decimal for a decimal too long for a Fraction; `unit` is in lower case, "" for none; `measure` is
    the same for every spelling of a unit or currency, "" for one that is not known.
    """

    value: Fraction | Decimal
    is_decimal: bool
    percent: bool
    unit: str
    measure: str


def normalize(text: str) -> str:
    """The same answer with delimiters, spacing, text wrappers and spelling variants of LaTeX taken out."""
    text = _strip_delimiters(" ".join(text.split()))
    text = in_tex(text)
    for old, new in _REPLACED:
        text = text.replace(old, new)
    text = _TEXT.sub(r"\1", _DROPPED.sub("", text))
    text = _SQRT_OF_GROUP.sub(r"\\sqrt{\1}", text)
    text = _LOOSE_SPACE.sub("", " ".join(text.split()))
    text = text.rstrip(".,;: ") if text[-2:] != ".." else text
    return _strip_delimiters(text)


def in_tex(text: str) -> str:
    """Digits of any script as ASCII, and symbols that math-verify cannot read as LaTeX."""
    if text.isascii():
        return text
    text = "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text)
    return _ROOT.sub(r"\\sqrt{\1}", text).replace("√(", "\\sqrt(").replace("°", "^\\circ ").replace("∞", "\\infty ")


def _strip_delimiters(text: str) -> str:
    for start, end in _DELIMITERS:
        inner = text[len(start) : -len(end)]
        if text.startswith(start) and text.endswith(end) and inner and start not in inner.replace("\\$", ""):
            return inner.strip()
    return text


def plain_number(text: str) -> PlainNumber | None:
    """The number that normalized `text` writes out, or None."""
    match = _NUMBER.match(text)
    if match is None:
        return None
    unit = text[match.end() :].strip().lower()
    if unit and (not text[match.end()].isspace() or not _UNIT.fullmatch(unit)):
        return None
    words = unit.split()
    is_percentage = bool(match["percent"]) or words[:1] == ["percent"]
    scale = _SCALES.get(words[0]) if words else None
    words = words[1:] if scale or words[:1] == ["percent"] else words
    value = _decimal_value(match["decimal"], match["repeat"]) if match["decimal"] else _fraction_value(match)
    if value is None or _NOT_UNITS & set(words) or match["sign"].count("-") + match["sign"].count("+") > 1:
        return None
    if scale:
        if isinstance(value, Decimal):
            return None
        value *= scale
    return PlainNumber(
        value=-value if "-" in match["sign"] else value,
        is_decimal="." in (match["decimal"] or "") and not match["repeat"],
        percent=is_percentage,
        unit=" ".join(words),
        measure=_MEASURES.get(match["currency"] or " ".join(words), ""),
    )


def _decimal_value(written: str, repeat: str | None) -> Fraction | Decimal | None:
    """`repeat` is what stands under a line after the decimals and goes on for ever."""
    whole, point, part = written.replace(",", "").partition(".")
    digits = f"{whole.lstrip('0') or '0'}.{part.rstrip('0') or '0'}"
    if repeat is None:
        return Fraction(digits) if len(digits) <= MAX_FRACTION_DIGITS else Decimal(digits)
    if not point or len(written) + len(repeat) > MAX_FRACTION_DIGITS:
        return None
    return Fraction(digits) + Fraction(int(repeat), 10 ** len(part) * (10 ** len(repeat) - 1))


def _fraction_value(match: re.Match[str]) -> Fraction | None:
    top = match["n1"] or match["n2"] or match["n3"]
    bottom = match["d1"] or match["d2"] or match["d3"]
    whole = match["whole"] or "0"
    if max(len(top), len(bottom), len(whole)) > MAX_FRACTION_DIGITS or int(bottom) == 0:
        return None
    return int(whole) + Fraction(int(top), int(bottom))


def compare(gold: str, answer: str) -> bool | None:
    """Whether `answer` says the same as `gold`: True, False, or None when this module cannot tell."""
    gold, answer = normalize(gold), normalize(answer)
    if not gold or not answer:
        return None
    if gold == answer or (is_words(gold) and gold.casefold() == answer.casefold()):
        return True
    a, b = plain_number(gold), plain_number(answer)
    if a is None or b is None:
        return None
    if a.measure and b.measure:  # math-verify looks at the numbers alone
        return _same_number(a, b) if a.measure == b.measure else False
    return _same_number(a, b) if not (a.unit and b.unit) or a.unit == b.unit else None


def is_words(text: str) -> bool:
    """Plain words, which a parser would read as a product of letters and find equal to any anagram."""
    return len(text) >= 4 and text.isascii() and text.replace(" ", "").isalpha()


def _same_number(a: PlainNumber, b: PlainNumber) -> bool | None:
    rounded = a.is_decimal or b.is_decimal
    if isinstance(a.value, Decimal) or isinstance(b.value, Decimal):
        if a.percent != b.percent or (rounded and a.value != b.value):
            return None
        return a.value == b.value
    if a.percent == b.percent:
        return _close(a.value, b.value, rounded)
    percent, other = (a.value, b.value) if a.percent else (b.value, a.value)
    # "What percent" is answered by 10 as well as by 10%, and 10% is 0.1.
    return _close(percent, other, rounded) or _close(percent / 100, other, rounded)


def _close(a: Fraction, b: Fraction, rounded: bool) -> bool:
    if a == b:
        return True
    return rounded and abs(a - b) <= min(ROUNDING, RELATIVE * max(abs(a), abs(b)))

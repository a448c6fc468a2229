r"""Equality of two written answers without a computer algebra system.

`compare` is True for equal text and for numbers of equal value, False only when both sides are plain numbers that
differ, and None when it cannot tell. A plain number is an integer, decimal, simple fraction or mixed number with
optional thousands separators, currency sign, percent sign and a unit in words: `-1,234.50`, `\frac{3}{4}`, `3 1/2`,
`12.5\%`, `18 dollars`, `€5`. Digits may be those of any script.
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
_SIGN = r"(?P<sign>[+-]?(?P<currency>[$€£¥]?)[+-]?)"
_NUMBER = re.compile(
    rf"{_SIGN}(?:(?:(?P<whole>[0-9]+)(?: |(?=\\)))?{_FRACTION}|(?P<decimal>{_DECIMAL}))(?P<percent>%?)"
)
_UNIT = re.compile(r"[A-Za-z]{2,}(?: [A-Za-z]{2,})*")
# Words after a number that change its value or hedge, so that the number alone is not the answer.
_CHANGING_WORDS = (
    "and or to not minus plus times over squared cubed factorial half halves third thirds fourths fifths tenths "
    "hundredths thousandths dozen dozens score hundred hundreds thousand thousands million millions billion billions "
    "trillion trillions percent mod base if for except pi sqrt"
)
_NOT_UNITS = frozenset(_CHANGING_WORDS.split())
_MONEY = {
    "$": "dollar dollars usd",
    "€": "euro euros eur",
    "£": "pound pounds gbp",
    "¥": "yen jpy",
    "¢": "cent cents",
}
_CURRENCIES = {word: sign for sign, words in _MONEY.items() for word in words.split()}


class PlainNumber(NamedTuple):
    """`value` is a Decimal for a decimal too long for a Fraction; `unit` is in lower case, "" for none. `currency` is a
    sign, also where the unit says it in words, or "".
    """

    value: Fraction | Decimal
    is_decimal: bool
    percent: bool
    unit: str
    currency: str


def normalize(text: str) -> str:
    """The same answer with delimiters, spacing, text wrappers and spelling variants of LaTeX taken out."""
    text = _strip_delimiters(" ".join(text.split()))
    if not text.isascii():
        text = "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text)
    for old, new in _REPLACED:
        text = text.replace(old, new)
    text = _TEXT.sub(r"\1", _DROPPED.sub("", text))
    text = _SQRT_OF_GROUP.sub(r"\\sqrt{\1}", text)
    text = _LOOSE_SPACE.sub("", " ".join(text.split()))
    text = text.rstrip(".,;: ") if text[-2:] != ".." else text
    return _strip_delimiters(text)


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
    if unit and (not text[match.end()].isspace() or not _UNIT.fullmatch(unit) or _NOT_UNITS & set(unit.split())):
        return None
    value = _decimal_value(match["decimal"]) if match["decimal"] else _fraction_value(match)
    if value is None or match["sign"].count("-") + match["sign"].count("+") > 1:
        return None
    return PlainNumber(
        value=-value if "-" in match["sign"] else value,
        is_decimal="." in (match["decimal"] or ""),
        percent=bool(match["percent"]),
        unit=unit,
        currency=match["currency"] or _CURRENCIES.get(unit, ""),
    )


def _decimal_value(written: str) -> Fraction | Decimal:
    whole, _, part = written.replace(",", "").partition(".")
    digits = f"{whole.lstrip('0') or '0'}.{part.rstrip('0') or '0'}"
    return Fraction(digits) if len(digits) <= MAX_FRACTION_DIGITS else Decimal(digits)


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
    kinds = (a.currency, b.currency) if a.currency and b.currency else (a.unit, b.unit)
    if all(kinds) and kinds[0] != kinds[1]:
        return None
    return _same_number(a, b)


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

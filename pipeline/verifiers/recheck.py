"""A look in exact arithmetic at what math-verify would call equal.

It compares numbers by their absolute difference, so two tiny numbers, or two expressions with tiny coefficients, are
"equal" to it; and it takes two equations for equal when solving them gives nothing to compare. `refuted` catches
these, also inside tuples, sets, intervals and matrices. It never turns a "different" into an "equal".
"""

from typing import Any

import sympy
from sympy import Eq, Expr, Float, Interval, MatrixBase, Mul, Rational, Tuple, UnevaluatedExpr
from sympy import FiniteSet as SympyFiniteSet

# Relative, so that size does not matter; a decimal is taken as rounded to at least five significant digits.
TOLERANCE = Rational(1, 10**15)
FLOAT_TOLERANCE = Rational(1, 10**5)
DIGITS = 30
# Where expressions with symbols are compared: positive, because math-verify simplifies over positive reals too.
POINTS = (Rational(7, 3), Rational(11, 5), Rational(13, 7))
_PERCENT = UnevaluatedExpr(Rational(1, 100))


def refuted(gold: Any, answer: Any) -> str | None:
    """Why `answer` is not `gold` after all, or None when nothing speaks against it. Takes parsed sympy objects."""
    if isinstance(gold, Eq) and isinstance(answer, Eq):
        return _equations(gold, answer)
    if isinstance(answer, Eq) and isinstance(gold, Expr):
        answer = answer.rhs
    if isinstance(gold, Eq) and isinstance(answer, Expr):
        gold = gold.rhs
    if isinstance(gold, SympyFiniteSet) and isinstance(answer, SympyFiniteSet):
        missing = [a for a in answer.args if all(refuted(g, a) for g in gold.args)]
        return f"{missing[0]} is not in the set" if missing else None
    for a, b in _parts(gold, answer):
        if why := refuted(a, b):
            return why
    if isinstance(gold, Expr) and isinstance(answer, Expr):
        return _expressions(gold, answer)
    return None


def _parts(gold: Any, answer: Any) -> list[tuple[Any, Any]]:
    if isinstance(gold, Tuple) and isinstance(answer, Tuple):
        return list(zip(gold.args, answer.args, strict=False))
    if isinstance(gold, Interval) and isinstance(answer, Interval):
        return [(gold.start, answer.start), (gold.end, answer.end)]
    if isinstance(gold, MatrixBase) and isinstance(answer, MatrixBase):
        return list(zip(gold.flat(), answer.flat(), strict=False))
    return []


def _expressions(gold: Expr, answer: Expr) -> str | None:
    symbols = sorted(gold.free_symbols, key=str)
    if gold.free_symbols != answer.free_symbols:
        return None  # a name spelt in another way; there is nothing to substitute
    for shift in range(len(POINTS) if symbols else 1):
        point = [(s, POINTS[(shift + i) % len(POINTS)] + i) for i, s in enumerate(symbols)]
        if _numbers_differ(gold.subs(point), answer.subs(point)):
            return "different value"
    return None


def _numbers_differ(gold: Any, answer: Any) -> bool:
    gold_percent, answer_percent = _percent_value(gold), _percent_value(answer)
    if gold_percent is not None and answer_percent is None:
        return _values_differ(answer, gold_percent) and _values_differ(answer, gold)  # 10% is 0.1 and, when asked
    if answer_percent is not None and gold_percent is None:
        return _values_differ(gold, answer_percent) and _values_differ(gold, answer)  # "what percent", 10
    return _values_differ(gold, answer)


def _percent_value(number: Any) -> Any | None:
    if isinstance(number, Mul) and len(number.args) == 2 and number.args[1] == _PERCENT:
        return number.args[0]
    return None


def _values_differ(a: Any, b: Any) -> bool:
    a, b = a.doit(), b.doit()
    if a.is_Rational and b.is_Rational and not (a.has(Float) or b.has(Float)):
        return a != b
    near_a, near_b = a.evalf(DIGITS), b.evalf(DIGITS)
    if not (near_a.is_finite and near_b.is_finite) or near_a == 0 or near_b == 0:
        return False  # an evaluated zero may be rounding noise; there is no scale to judge it by
    tolerance = FLOAT_TOLERANCE if a.has(Float) or b.has(Float) else TOLERANCE
    return bool(abs(near_a - near_b) > tolerance * max(abs(near_a), abs(near_b)))


def _equations(gold: Eq, answer: Eq) -> str | None:
    """Polynomial equations agree when their square-free parts are proportional; others are left to math-verify."""
    if gold.free_symbols != answer.free_symbols:
        return "equations in different unknowns"
    symbols = sorted(gold.free_symbols, key=str)
    sides = [_numerator(gold.lhs, gold.rhs), _numerator(answer.lhs, answer.rhs)]
    if not symbols or not all(side.is_polynomial(*symbols) for side in sides):
        return None
    f, g = (sympy.Poly(sympy.nsimplify(side), *symbols).sqf_part() for side in sides)
    if f.is_zero or g.is_zero:
        return None if f == g else "different equations"
    same = (f * g.LC() - g * f.LC()).is_zero
    return None if same else "different equations"


def _numerator(lhs: Any, rhs: Any) -> Any:
    return sympy.fraction(sympy.together((lhs - rhs).doit()))[0]

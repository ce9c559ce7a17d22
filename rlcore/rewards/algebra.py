"""math-verify, asked faster: what it would take long to find different is told by values, and its
parser looks ahead without context where that is enough. Verdicts stay its own."""

import zlib
from typing import Any

import sympy
from antlr4 import PredictionMode
from latex2sympy2_extended import latex2sympy2
from math_verify.grader import is_assignment_relation, is_equation, is_relation
from sympy.core.function import AppliedUndef

_NO_VALUE = (sympy.Integral, sympy.Derivative, sympy.Sum, sympy.Product, sympy.Limit)
_NO_POINT = (sympy.UnevaluatedExpr, sympy.MatrixBase, sympy.MatrixExpr)
"""Percentages, which are compared in two ways, and what has no single value."""
_APART = 1e-4
"""Relative to the larger one, or to 1."""
_SCALES = (1.0, 1.7)


class _QuickParser(latex2sympy2.PSParser):
    """SLL prediction finds the tree that LL prediction finds, or an error (ANTLR 4,
    PredictionMode); it learns decisions that LL makes anew every time."""

    def math(self) -> Any:
        """The parse tree; raises what the error listener raises."""
        self._interp.predictionMode = PredictionMode.SLL
        try:
            return super().math()
        except Exception:  # the listener of latex2sympy2 raises no narrower one
            self.reset()
            self._interp.predictionMode = PredictionMode.LL
            return super().math()


def use_quick_parser() -> None:
    """From now on math-verify parses LaTeX with it, in this process."""
    latex2sympy2.PSParser = _QuickParser


def differ(gold: object, answer: object, decimals: int) -> bool:
    """Whether math-verify (strict, rounding to `decimals`) is certain to find two parsed answers
    different. False says nothing."""
    apart = max(_APART, 2 * 10.0**-decimals)
    if isinstance(gold, str) and isinstance(answer, str):
        return gold.strip() != answer.strip()
    if isinstance(gold, str) or isinstance(answer, str):
        return True
    if not isinstance(gold, sympy.Basic) or not isinstance(answer, sympy.Basic):
        return False
    if is_equation(answer) and not is_relation(gold):
        answer = _right_side(answer)
    elif is_assignment_relation(gold) and not is_relation(answer):
        gold = _right_side(gold)
    try:
        if isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq):
            return _equations_differ(gold, answer, apart)
        if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
            return _values_differ(gold, answer, apart)
    except Exception:  # sympy raises anything on odd input; math-verify will say what it is
        return False
    return False


def _right_side(relation: Any) -> Any:
    return relation.rhs if isinstance(relation, sympy.Eq) else relation._unsorted_args[-1].rhs


def _values_differ(gold: sympy.Expr, answer: sympy.Expr, apart: float) -> bool:
    """Both have values, which are apart at two points."""
    if any(_is_letters(x) or x.has(*_NO_VALUE, *_NO_POINT) for x in (gold, answer)):
        return False
    a, b = _without_functions(gold), _without_functions(answer)
    for scale in _SCALES:
        x, y = _value(a, scale), _value(b, scale)
        if not abs(x - y) > apart * max(abs(x), abs(y), 1.0):
            return False
    return True


def _equations_differ(gold: sympy.Eq, answer: sympy.Eq, apart: float) -> bool:
    """One of them depends on something that the other one does not have."""
    if gold.has(*_NO_VALUE, *_NO_POINT) or answer.has(*_NO_VALUE, *_NO_POINT):
        return False
    a, b = (_without_functions(e.lhs - e.rhs) for e in (gold, answer))
    return any(
        _depends(e, symbol, apart)
        for e, other in ((a, b), (b, a))
        for symbol in e.free_symbols - other.free_symbols
    )


def _depends(expr: sympy.Expr, symbol: sympy.Symbol, apart: float) -> bool:
    one, other = _value(expr, 1.0), _value(expr, 1.0, symbol)
    return abs(one - other) > apart * max(abs(one), abs(other), 1.0)


def _is_letters(expr: sympy.Expr) -> bool:
    """A word: math-verify compares those by their letters."""
    if isinstance(expr, sympy.Mul):
        return all(arg == sympy.E or arg.is_Symbol for arg in expr.args)
    return expr == sympy.E or expr.is_Symbol


def _without_functions(expr: sympy.Expr) -> sympy.Expr:
    """f(x) is an unknown of its own."""
    return expr.xreplace({f: sympy.Symbol(str(f), real=True) for f in expr.atoms(AppliedUndef)})


def _value(expr: sympy.Expr, scale: float, moved: sympy.Symbol | None = None) -> complex:
    """At a point that depends on the names alone; TypeError where it has none."""
    point = {s: scale * _coordinate(s.name) for s in expr.free_symbols}
    if moved is not None:
        point[moved] *= 1.3
    return complex(expr.evalf(15, subs=point))


def _coordinate(name: str) -> float:
    """Between 0.5 and 1.5, the same in every process."""
    return 0.5 + zlib.crc32(name.encode()) % 9973 / 9973

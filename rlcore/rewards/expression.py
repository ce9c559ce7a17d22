"""Are two formulas equal? Answered by their values at a few points, without a computer algebra
system: microseconds instead of milliseconds.

Polynomials, fractions, roots, powers, trigonometric functions and ln of LaTeX text. Whatever else
there is (relations, sets, units, \\pm, \\log without a base, ...) cannot be told here.
"""

import cmath
import math
import operator
import re
from collections.abc import Callable
from typing import NamedTuple

Point = dict[str, complex]
Node = Callable[[Point], complex]

_TOKEN = re.compile(
    r"(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)|(?P<command>\\[a-zA-Z]+)|(?P<letter>[a-zA-Z])"
    r"|(?P<sign>[-+*/^_!(){}\[\]])"
)
_FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    "\\sin": cmath.sin,
    "\\cos": cmath.cos,
    "\\tan": cmath.tan,
    "\\cot": lambda z: 1 / cmath.tan(z),
    "\\sec": lambda z: 1 / cmath.cos(z),
    "\\csc": lambda z: 1 / cmath.sin(z),
    "\\arcsin": cmath.asin,
    "\\arccos": cmath.acos,
    "\\arctan": cmath.atan,
    "\\sinh": cmath.sinh,
    "\\cosh": cmath.cosh,
    "\\tanh": cmath.tanh,
    "\\ln": cmath.log,
}
_CONSTANTS: dict[str, complex] = {"e": math.e, "i": 1j, "\\pi": math.pi}
_GREEK = re.compile(
    r"\\(?:alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma"
    r"|tau|(?:var)?phi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega)"
)
_TIMES = ("*", "\\cdot", "\\times")
_OVER = ("/", "\\div")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_FUNCTION_NAMES = "fghFGHP"
_DEEPEST = 40
_NOTHING = 1e-12
"""What is smaller may be a rounding error of zero."""
_EQUAL, _DIFFERENT = 1e-9, 1e-5
"""Relative distances; between them it is left to others."""
_POSITIVE, _MIXED = (0.7391, 1.6180), (-1.2720, 0.8660, -0.5671)


class Formula(NamedTuple):
    """A formula that was read, and its variables."""

    value: Node
    names: frozenset[str]


class _Unknown(Exception):
    """Text that is no formula of this language."""


def same(gold: Formula, answer: Formula) -> bool | None:
    """Whether both have the same values, where c and C are one variable; None where that is not
    certain."""
    ours, theirs = ({n.lower() for n in f.names} for f in (gold, answer))
    if ours != theirs:  # without a variable on one side the others may be units
        return False if ours and theirs else None
    if len(ours) < max(len(gold.names), len(answer.names)):  # v and V are two here
        return None
    found = [_agree(gold, answer, base) for base in _POSITIVE]
    if not ours:
        return found[0]
    if False in found:
        return False
    # roots and logarithms of negative numbers have several values: no proof that they differ
    return True if all([*found, *(_agree(gold, answer, base) for base in _MIXED)]) else None


def _point(names: frozenset[str], base: float) -> Point:
    """Every variable gets a number of its own."""
    in_order = sorted(names, key=str.lower)
    return {name: base * (1 + 0.3137 * i) for i, name in enumerate(in_order)}


def _agree(gold: Formula, answer: Formula, base: float) -> bool | None:
    try:
        a = gold.value(_point(gold.names, base))
        b = answer.value(_point(answer.names, base))
        size = max(abs(a), abs(b))
        distance = abs(a - b) / size
    except (ArithmeticError, ValueError, RecursionError):
        return None
    if size < _NOTHING:
        return None
    if distance < _EQUAL:
        return True
    return False if distance > _DIFFERENT else None  # not a number: neither


def read(text: str) -> Formula | None:
    """A formula from normalised LaTeX (`answers.normalise`); None where it is none, or says things
    that are not told apart by values."""
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            return None
        tokens.append(match.group())
        at = match.end()
    reader = _Reader(tokens)
    try:
        value = reader.sum(0)
        if reader.at < len(tokens):
            return None
    except (_Unknown, RecursionError):
        return None
    return Formula(value, frozenset(reader.names))


class _Reader:
    """Recursive descent: sum, product, power, atom."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self.at = 0
        self.names: set[str] = set()

    def _next(self) -> str:
        return self._tokens[self.at] if self.at < len(self._tokens) else ""

    def _take(self, *wanted: str) -> str:
        """The next token, if it is one of these (any, if none is named)."""
        token = self._next()
        if not token or (wanted and token not in wanted):
            raise _Unknown
        self.at += 1
        return token

    def sum(self, depth: int) -> Node:
        if depth > _DEEPEST:
            raise _Unknown
        value = self._signed(depth)
        while self._next() in ("+", "-"):
            function = operator.add if self._take() == "+" else operator.sub
            value = _both(function, value, self._product(depth))
        return value

    def _signed(self, depth: int) -> Node:
        if self._next() not in ("+", "-"):
            return self._product(depth)
        is_minus = self._take() == "-"
        value = self._product(depth)
        return (lambda at: -value(at)) if is_minus else value

    def _product(self, depth: int) -> Node:
        value = self._power(depth)
        while (token := self._next()) and token not in ("+", "-", ")", "]", "}"):
            function = operator.truediv if token in _OVER else operator.mul
            if token in _TIMES or token in _OVER:
                self._take()
            elif token[0].isdigit() or token[0] == ".":
                raise _Unknown  # a number behind another factor: x 2
            elif token == "\\frac" and self._tokens[self.at - 1][0].isdigit():
                raise _Unknown  # 3 1/2: a product, or a mixed number
            value = _both(function, value, self._power(depth))
        return value

    def _power(self, depth: int) -> Node:
        base = self._atom(depth)
        if self._next() == "^":
            self._take()
            return _both(operator.pow, base, self._argument(depth))
        return base

    def _argument(self, depth: int) -> Node:
        """What follows ^, or a command: a group, or one digit or letter."""
        if self._next() == "{":
            return self._group("{", depth)
        token = self._next()
        if token[:1].isdigit() and len(token) > 1:  # ^12 is ^1 2
            raise _Unknown
        return self._atom(depth)

    def _group(self, opening: str, depth: int) -> Node:
        self._take(opening)
        value = self.sum(depth + 1)
        self._take(_CLOSING[opening])
        return value

    def _atom(self, depth: int) -> Node:
        token = self._next()
        if token in _CLOSING:
            return self._group(token, depth)
        self._take()
        if token[0].isdigit() or token[0] == ".":
            return _constant(float(token))
        if token == "\\frac":
            return _both(operator.truediv, self._argument(depth), self._argument(depth))
        if token == "\\sqrt":
            return self._root(depth)
        if token in _FUNCTIONS:
            return self._function(_FUNCTIONS[token], depth)
        if self._next() == "_":
            self._take()
            token += "_" + self._index()
        elif token in _CONSTANTS:
            return _constant(_CONSTANTS[token])
        if token[0].isalpha() or _GREEK.fullmatch(token.partition("_")[0]):
            if token[0] in _FUNCTION_NAMES and self._next() == "(":
                raise _Unknown  # f(2x) is no product
            self.names.add(token)
            return lambda at: at[token]
        raise _Unknown

    def _index(self) -> str:
        """Of a variable: one token or a group of them."""
        token = self._take()
        if token != "{":
            return token
        words = []
        while (token := self._take()) != "}":
            words.append(token)
        return "".join(words)

    def _root(self, depth: int) -> Node:
        degree = self._group("[", depth) if self._next() == "[" else _constant(2.0)
        return _both(lambda z, n: complex(z) ** (1 / n), self._argument(depth), degree)

    def _function(self, function: Callable[[complex], complex], depth: int) -> Node:
        power: Node | None = None
        if self._next() == "^":  # \sin^2 x
            self._take()
            power = self._argument(depth)
        if self._next() in _CLOSING:
            inner = self._group(self._next(), depth)
        else:  # \sin 2x takes a number and a letter
            inner = self._power(depth)
            token = self._next()
            if token and (token.isalpha() or token in _CONSTANTS or _GREEK.fullmatch(token)):
                inner = _both(operator.mul, inner, self._power(depth))

        def value(at: Point) -> complex:
            return function(inner(at))

        return value if power is None else _both(operator.pow, value, power)


def _constant(number: complex) -> Node:
    return lambda at: number


def _both(function: Callable[[complex, complex], complex], a: Node, b: Node) -> Node:
    return lambda at: function(a(at), b(at))

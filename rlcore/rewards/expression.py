"""Are two formulas equal? Answered by their values at a few points, without a computer algebra
system: microseconds instead of milliseconds.

Polynomials, fractions, mixed numbers, roots, powers, trigonometric functions, logarithms,
factorials, floors and absolute values of LaTeX text, and equations of such. Whatever else there is
(inequalities, sets, \\pm, \\log without a base, ...) cannot be told here.
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
    r"|(?P<sign>[-+*/^_!|(){}\[\]])"
)


def _real(z: complex) -> float:
    """ValueError where it has another part than a real one."""
    z = complex(z)
    if abs(z.imag) > _NOTHING:
        raise ValueError(f"{z} is not real")
    return z.real


def _step(function: Callable[[float], int]) -> Callable[[complex], complex]:
    """A floor or a ceiling; ValueError where rounding decides which one it is."""

    def value(z: complex) -> complex:
        x = _real(z)
        if x != round(x) and abs(x - round(x)) < _EQUAL * max(abs(x), 1):
            raise ValueError(f"{x} may be a rounded whole number")
        return function(x)

    return value


def _factorial(z: complex) -> complex:
    return math.gamma(_real(z) + 1)


def _binomial(n: complex, k: complex) -> complex:
    return _factorial(n) / (_factorial(k) * _factorial(n - k))


_NOTHING = 1e-12
"""What is smaller may be a rounding error of zero."""
_EQUAL, _DIFFERENT = 1e-9, 1e-5
"""Relative distances; between them it is left to others."""
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
    "\\exp": cmath.exp,
}
_CONSTANTS: dict[str, complex] = {"e": math.e, "i": 1j}
_GREEK = re.compile(
    r"\\(?:alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma"
    r"|tau|(?:var)?phi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega)"
)
_DEGREES = re.compile(r"\^(?:\\circ|\{\\circ\})$")
_PERHAPS_UNIT = re.compile(r"[0-9)}\]][a-zA-Z]+$")
_ACCENTS = ("\\dot", "\\ddot", "\\bar", "\\hat", "\\tilde", "\\vec", "\\overline")
_TIMES = ("*", "\\cdot", "\\times")
_OVER = ("/", "\\div")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_STEPS: dict[str, tuple[str, Callable[[complex], complex]]] = {
    "\\lfloor": ("\\rfloor", _step(math.floor)),
    "\\lceil": ("\\rceil", _step(math.ceil)),
    "|": ("|", abs),
    "\\lvert": ("\\rvert", abs),
}
"""Brackets that are functions, and how they close."""
_ENDS = ("", "+", "-", ")", "]", "}", "\\rfloor", "\\rceil", "\\rvert")
"""What a product ends before."""
_FUNCTION_NAMES = "fghFGHP"
_DEEPEST = 40
_POSITIVE, _MIXED = (0.7391, 1.6180), (-1.2720, 0.8660, -0.5671)
_FAR = (7.391, 16.18, 73.91)


class Formula(NamedTuple):
    """A formula that was read, and its variables."""

    value: Node
    names: frozenset[str]
    has_steps: bool = False
    """It has kinks or steps: agreement at a few points proves nothing."""
    may_have_unit: bool = False
    """Its last letters stand where a unit may stand."""


class Equation(NamedTuple):
    """The sides of an equation that was read; `name` is what it gives the value of, if anything."""

    left: Formula
    right: Formula
    name: str


class _Unknown(Exception):
    """Text that is no formula of this language."""


class _Ones(dict[str, complex]):
    """The point at which every name is 1, e and i with them: what is left of letters that may be a
    unit is the number before it."""

    def __missing__(self, name: str) -> complex:
        return 1.0

    def get(self, name: str, default: complex | None = None) -> complex:
        return 1.0


def same(gold: Formula, answer: Formula) -> bool | None:
    """Whether both have the same values, where c and C are one variable; None where that is not
    certain."""
    ours, theirs = ({n.lower() for n in f.names} for f in (gold, answer))
    if ours != theirs:
        return False if _differ_with_names(gold, answer) else None
    if len(ours) < max(len(gold.names), len(answer.names)):  # v and V are two here
        return None
    found = [_agree(gold, answer, base) for base in _POSITIVE]
    if not ours:
        return found[0]
    if gold.has_steps or answer.has_steps:
        found += [_agree(gold, answer, base) for base in _FAR]
        return False if False in found else None
    if False in found:
        return False
    # roots and logarithms of negative numbers have several values: no proof that they differ
    return True if all([*found, *(_agree(gold, answer, base) for base in _MIXED)]) else None


def _differ_with_names(gold: Formula, answer: Formula) -> bool:
    """They have other names, and other values: the names do not cancel. Where one of them is a
    number the letters of the other one may also be its unit."""
    if any(_agree(gold, answer, base) is not False for base in _POSITIVE):
        return False
    number, other = (gold, answer) if answer.names else (answer, gold)
    if number.names or not other.may_have_unit:
        return True
    try:
        return _distance(number.value({}), other.value(_Ones())) is False
    except (ArithmeticError, ValueError, RecursionError):
        return False


def number_in(formula: Formula) -> complex | None:
    """The value of a formula without names; None where it has none."""
    try:
        value = complex(formula.value({}))
    except (ArithmeticError, ValueError, RecursionError):
        return None
    return value if cmath.isfinite(value) else None


def same_equation(gold: Equation, answer: Equation) -> bool | None:
    """Whether two equations say the same: their differences are equal but for the sign, or one of
    them does not hold where the other one does; None where that is not certain."""
    ours, theirs = (e.left.names | e.right.names for e in (gold, answer))
    if ours != theirs:
        return False if {n.lower() for n in ours} != {n.lower() for n in theirs} else None
    if len({n.lower() for n in ours}) < len(ours):
        return None
    first, second = (_difference(e) for e in (gold, answer))
    minus = second._replace(value=lambda at: -second.value(at))
    if same(first, second) or same(first, minus):
        return True
    for given, other in ((gold, answer), (answer, gold)):
        if given.name and all(_fails_at(given, other, base) for base in _POSITIVE):
            return False
    return None


def _difference(e: Equation) -> Formula:
    return Formula(
        _both(operator.sub, e.left.value, e.right.value),
        e.left.names | e.right.names,
        e.left.has_steps or e.right.has_steps,
    )


def _fails_at(given: Equation, other: Equation, base: float) -> bool:
    """`other` is certainly false at a point where `given` is true."""
    names = given.left.names | given.right.names
    at = _point(names, base, names)
    try:
        at[given.name] = given.right.value(at)
        return _distance(other.left.value(at), other.right.value(at)) is False
    except (ArithmeticError, ValueError, RecursionError):
        return False


def _point(names: frozenset[str], base: float, among: frozenset[str]) -> Point:
    """Every variable gets a number of its own, c and C the same."""
    in_order = sorted({name.lower() for name in among})
    return {name: base * (1 + 0.3137 * in_order.index(name.lower())) for name in names}


def _agree(gold: Formula, answer: Formula, base: float) -> bool | None:
    all_names = gold.names | answer.names
    try:
        a, b = (f.value(_point(f.names, base, all_names)) for f in (gold, answer))
        return _distance(a, b)
    except (ArithmeticError, ValueError, RecursionError):
        return None


def _distance(a: complex, b: complex) -> bool | None:
    """Whether two values are one; None where rounding decides. ZeroDivisionError for 0 and 0."""
    size = max(abs(a), abs(b))
    distance = abs(a - b) / size
    if size < _NOTHING:
        return None
    if distance < _EQUAL:
        return True
    return False if distance > _DIFFERENT else None  # not a number: neither


def read_equation(text: str) -> Equation | None:
    """An equation from normalised LaTeX; None where it is none, or one with sides that `read` does
    not know."""
    left, sign, right = text.partition("=")
    if not sign or "=" in right or left.endswith("!"):
        return None
    sides = read(left), read(right)
    if sides[0] is None or sides[1] is None:
        return None
    name = left if sides[0].names == {left} and left not in sides[1].names else ""
    return Equation(sides[0], sides[1], name)


def read(text: str) -> Formula | None:
    """A formula from normalised LaTeX (`answers.normalise`), degrees at its end left out; None
    where it is none, or says things that are not told apart by values."""
    text = _DEGREES.sub("", text)
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
    may_have_unit = bool(_PERHAPS_UNIT.search(text))
    return Formula(value, frozenset(reader.names), reader.has_steps, may_have_unit)


def constant(number: complex) -> Formula:
    """A formula that is a number."""
    return Formula(_constant(number), frozenset())


class _Reader:
    """Recursive descent: sum, product, power, atom."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self.at = 0
        self.names: set[str] = set()
        self.has_steps = False
        self._in_bars = False

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
        value = self._mixed_number() or self._power(depth)
        while (token := self._next()) not in _ENDS and not (token == "|" and self._in_bars):
            function = operator.truediv if token in _OVER else operator.mul
            if token in _TIMES or token in _OVER:
                self._take()
            elif (token[0].isdigit() or token[0] == ".") and self._tokens[self.at - 1] != ")":
                raise _Unknown  # a number behind another factor: x 2
            elif token == "\\frac" and self._tokens[self.at - 1][0].isdigit():
                raise _Unknown  # 3 1/2 x: of a product, or of a mixed number
            value = _both(function, value, self._mixed_number() or self._power(depth))
        return value

    def _mixed_number(self) -> Node | None:
        """3\\frac{1}{2} is 7/2, where nothing but it is multiplied; None where there is none."""
        whole, *fraction, end = (*self._tokens[self.at : self.at + 9], "", "")[:9]
        above, below = fraction[2:3], fraction[5:6]
        if fraction != ["\\frac", "{", *above, "}", "{", *below, "}"]:
            return None
        if end not in _ENDS or not all(n.isdigit() for n in (whole, *above, *below)):
            return None
        if not float(below[0]):
            raise _Unknown
        self.at += 8
        return _constant(float(whole) + float(above[0]) / float(below[0]))

    def _power(self, depth: int) -> Node:
        base = self._atom(depth)
        while self._next() == "!":
            self._take()
            base = _of(_factorial, base)
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
        if token == "\\binom":
            return _both(_binomial, self._argument(depth), self._argument(depth))
        if token == "\\sqrt":
            return self._root(depth)
        if token == "\\log":
            self._take("_")  # without a base it is ln or lg
            base = self._argument(depth)
            if self._next() == "^":
                raise _Unknown
            return _both(operator.truediv, self._function(cmath.log, depth), _of(cmath.log, base))
        if token in _STEPS:
            return self._stepped(token, depth)
        accent = token if token in _ACCENTS else ""
        if accent:
            token = self._index()
        if token in _FUNCTIONS:
            return self._function(_FUNCTIONS[token], depth)
        if self._next() == "_":
            self._take()
            token += "_" + self._index()
        elif token == "\\pi":
            return _constant(math.pi)
        elif token in _CONSTANTS and not accent:
            constant = _CONSTANTS[token]
            return lambda at: at.get(token, constant)
        if token[0].isalpha() or _GREEK.fullmatch(token.partition("_")[0]):
            if token[0] in _FUNCTION_NAMES and self._next() == "(":
                raise _Unknown  # f(2x) is no product
            name = accent + token
            self.names.add(name)
            return lambda at: at[name]
        raise _Unknown

    def _stepped(self, opening: str, depth: int) -> Node:
        """An absolute value, a floor, a ceiling."""
        closing, function = _STEPS[opening]
        outside, self._in_bars = self._in_bars, opening == "|"
        inner = self.sum(depth + 1)
        self._in_bars = outside
        self._take(closing)
        self.has_steps = True
        return _of(function, inner)

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
            if token and (token.isalpha() or token == "\\pi" or _GREEK.fullmatch(token)):
                inner = _both(operator.mul, inner, self._power(depth))

        value = _of(function, inner)
        return value if power is None else _both(operator.pow, value, power)


def _constant(number: complex) -> Node:
    return lambda at: number


def _of(function: Callable[[complex], complex], a: Node) -> Node:
    return lambda at: function(a(at))


def _both(function: Callable[[complex, complex], complex], a: Node, b: Node) -> Node:
    return lambda at: function(a(at), b(at))

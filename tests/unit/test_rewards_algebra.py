"""What is decided before math-verify is asked, against math-verify itself."""

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.rewards import algebra, answers
from rlcore.rewards.math import MathReward, MathRewardConfig

TEXTS = [
    "\\left( \\frac{1}{5}, -\\frac{1}{6} \\right)",
    "(2, 12) \\cup (12, 102]",
    "x(t) = 2\\sqrt[3]{t} + \\log_{10} 2",
    "\\begin{pmatrix} 1 & 2 \\\\ 3 & \\pi \\end{pmatrix}",
    "1 \\le |z| < \\frac{3}{2}",
    "3\\frac{1}{2} \\text{ cm}",
    "\\lfloor \\frac{n}{2} \\rfloor + n!",
    "no formula \\at all {",
]


@pytest.fixture(scope="module")
def reward() -> MathReward:
    return MathReward(MathRewardConfig())


def parsed(reward: MathReward, text: str) -> str:
    """What math-verify makes of a text, without its own memory of it."""
    from math_verify import parser

    parser.parse_latex_cached.cache_clear()
    parser.extract_latex.cache_clear()
    return sympy.srepr(reward._parse(text))


def test_the_quick_parser_finds_what_the_one_of_math_verify_finds(reward, monkeypatch):
    quick = [parsed(reward, text) for text in TEXTS]
    monkeypatch.setattr(algebra.latex2sympy2, "PSParser", algebra._QuickParser.__mro__[1])
    assert [parsed(reward, text) for text in TEXTS] == quick


@pytest.mark.parametrize(
    ("gold", "answer", "differ"),
    [
        ("\\sin^2 x", "1 - \\cos^2 x", False),
        ("\\sin^2 x", "1 - \\cos^3 x", True),
        ("f(x) + 1", "f(x)", True),
        ("f(x) + 1", "1 + f(x)", False),
        ("y + f(t) = 3x", "y + g(t) = 3x", True),
        ("y + z = 3 + z", "y = 3", False),  # z is of no consequence
        ("y = 3x", "2y = 6x", False),
        ("3", "x = 3", False),
        ("3", "x = 4", True),
        ("e", "\\text{e}", False),
        ("28\\%", "28", False),
        ("0.12345678", "0.12345699", False),
        ("(1, 2)", "\\{1, 3\\}", False),  # left to math-verify
        ("\\int_0^1 x dx", "5", False),
    ],
)
def test_parsed_answers_differ_by_their_values(reward, gold, answer, differ):
    one, other = (reward._parse(text)[0] for text in (gold, answer))
    assert algebra.differ(one, other, 6) is differ


# ---- random answers against math-verify

NUMBERS = st.integers(1, 12).map(str)
NAMES = st.sampled_from(["x", "y", "n", "\\pi", "\\theta"])
FORMULAS = st.recursive(
    NUMBERS | NAMES,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda t: f"\\frac{{{t[0]}}}{{{t[1]}}}"),
        inner.map(lambda t: f"\\sqrt{{{t}}}"),
        st.tuples(inner, NUMBERS).map(lambda t: f"({t[0]})^{{{t[1]}}}"),
        st.tuples(inner, inner).map(lambda t: f"{t[0]} + {t[1]}"),
        st.tuples(inner, inner).map(lambda t: f"{t[0]} - ({t[1]})"),
        st.tuples(inner, inner).map(lambda t: f"({t[0]}) \\cdot ({t[1]})"),
        st.tuples(NUMBERS, inner).map(lambda t: f"{t[0]} \\cdot ({t[1]})"),
    ),
    max_leaves=4,
)
PLAIN = st.one_of(
    st.integers(-9, 9).map(str),
    st.tuples(NUMBERS, NUMBERS).map(lambda t: f"\\frac{{{t[0]}}}{{{t[1]}}}"),
    NUMBERS.map(lambda n: f"\\sqrt{{{n}}}"),
    NUMBERS.map(lambda n: f"{n}\\pi"),
)
BRACKETS = ["{}", "({})", "\\{{{}\\}}", "x = {}"]
INTERVALS = ["[{})", "({}]", "[{}]"]
LISTS = st.one_of(
    st.tuples(st.lists(PLAIN, min_size=1, max_size=4, unique=True), st.sampled_from(BRACKETS)),
    st.tuples(
        st.tuples(st.integers(-9, 9), st.integers(1, 9)).map(lambda t: [str(t[0]), str(sum(t))]),
        st.sampled_from(INTERVALS),
    ),
).map(lambda t: t[1].format(", ".join(t[0])))


def decided_as_by_math_verify(reward: MathReward, gold: str, answer: str) -> None:
    """But for [2, 1): math-verify says that all such are empty, and the same; but for equal
    values that it does not find equal."""
    ours = answers.compare(answers.normalise(gold), answers.normalise(answer))
    one, other = reward._parse(gold), reward._parse(answer)
    if ours is None or sympy.S.EmptySet in one:
        return
    theirs = reward._verify(one, other, timeout_seconds=None)
    if ours and not theirs:
        a, b = (algebra._value(parsed[0], 1.0) for parsed in (one, other))
        theirs = abs(a - b) < 1e-12 * abs(a)
    assert ours == theirs, f"{gold}   |   {answer}"


@pytest.mark.slow
@pytest.mark.timeout(1200)  # two minutes, on a machine that others may use
@settings(max_examples=60)
@given(gold=FORMULAS, answer=FORMULAS)
def test_random_formulas_are_told_apart_as_by_math_verify(reward, gold, answer):
    decided_as_by_math_verify(reward, gold, answer)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # two minutes, on a machine that others may use
@settings(max_examples=60)
@given(formula=FORMULAS, factor=NUMBERS, shift=FORMULAS)
def test_a_formula_in_other_words_is_the_same_as_by_math_verify(reward, formula, factor, shift):
    other = f"\\frac{{{factor} \\cdot ({formula}) + {shift} - ({shift})}}{{{factor}}}"
    decided_as_by_math_verify(reward, formula, other)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # two minutes, on a machine that others may use
@settings(max_examples=100)
@given(gold=LISTS, answer=LISTS)
def test_random_lists_and_intervals_are_told_apart_as_by_math_verify(reward, gold, answer):
    decided_as_by_math_verify(reward, gold, answer)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # two minutes, on a machine that others may use
@settings(max_examples=60)
@given(parts=st.lists(PLAIN, min_size=1, max_size=4, unique=True), data=st.data())
def test_the_same_numbers_in_other_brackets_and_orders_are_judged_as_by_math_verify(
    reward, parts, data
):
    brackets = st.sampled_from(BRACKETS + INTERVALS * (len(parts) == 2))
    one, other = data.draw(brackets), data.draw(brackets)
    moved = data.draw(st.permutations(parts))
    decided_as_by_math_verify(reward, one.format(", ".join(parts)), other.format(", ".join(moved)))

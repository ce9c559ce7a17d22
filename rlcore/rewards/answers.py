"""Extraction of final answers, and comparison of the answers that do not need math-verify.

Own code in addition to math-verify: this code reads `4e33` and `A: 12`, distinguishes 2.8e-6 from
2.9e-6, reads `(C) 5` as choice C, and is fast on any text.
"""

import re
from fractions import Fraction
from typing import NamedTuple

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BETWEEN = re.compile(
    r"(?:\s|\$|\\[\]\[()]|[,;.]|\\quad|\\qquad|\\ |and|or|\\text\s*\{[^{}]{0,40}\}){0,12}"
)
"""Pattern of the text between two LaTeX boxes of one answer. The text must also contain a
separator (`_JOINT`), such as a comma."""
_JOINT = re.compile(r"[,;]|\b(?:and|or)\b|\\quad")
_HASHES = "####"
_LABEL = re.compile(  # the label A needs a colon: `a = 3` and `A = 50` are steps of a calculation
    r"^[ \t*#>]*(?:(?i:final answer|answer)[ \t*]*[:=]|A[ \t*]*:)[ \t*]*(\S.*)$", re.MULTILINE
)
_MOST_BOXES = 8

_SIGN_AND_DIGITS = r"[-+]?(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]*)?"
_NUMBER = re.compile(
    rf"({_SIGN_AND_DIGITS})(?:(?:[eE]|\*10\^|\\times10\^|x10\^)\{{?([-+]?[0-9]{{1,4}})\}}?)?"
)
_FRACTION = re.compile(
    r"([-+]?)\\frac(?:\{([-+]?[0-9.,]+)\}\{([-+]?[0-9.,]+)\}|([0-9])([0-9]))"
    r"|([-+]?[0-9.,]+)/([0-9.,]+)"
)
_UNIT = re.compile(
    r"(?:\\(?:text|mathrm|textbf|mbox|textnormal|mathbf|textit|operatorname)\s*\{[^{}]*\}"
    r"(?:\^\{?[0-9]\}?)?|\^\{?\\circ\}?|\\degree|\\circ|\\%|%)+$"
)
_SPACES = re.compile(
    r"(?<!\\)\\[!,;:> ]|\\q?quad(?![a-zA-Z])|[~\s]|\\(?:left|right|displaystyle)(?![a-z])"
)
_TWICE_ESCAPED = re.compile(r"\\\\(?=[a-zA-Z])")
_FRAC = re.compile(r"\\[dtc]frac(?![a-z])")
_FRAC_OF_DIGITS = re.compile(r"\\frac ?([0-9]) ?([0-9])(?![0-9])")
_WHITE = re.compile(r"\s+")
_SYMBOLS = str.maketrans(
    {
        "\u2212": "-",
        "\u00d7": "\\times ",
        "\u00b7": "\\cdot ",
        "\u22c5": "\\cdot ",
        "\u03c0": "\\pi ",
        "\u221e": "\\infty ",
        "\u00b0": "^\\circ ",
    }
)
_LIST_COMMA = re.compile(r"(?<=[0-9]),\s+(?=[0-9])")
_WRAPPED = re.compile(r"\\(?:text|mathrm|textbf|mbox|textnormal|mathbf|textit)\s*\{([^{}]*)\}")
_CHOICE = re.compile(r"\(?([A-J])\)?")
_BEGINS_WITH_CHOICE = re.compile(r"\(([A-J])\)|([A-J])(?:[).:]|$)")
_NAME = r"\\?[a-zA-Z]+(?:_\{?\w+\}?)?(?:\([a-zA-Z,]{1,9}\))?"
_NAMED = re.compile(rf"({_NAME}|\({_NAME}(?:,{_NAME})+\))=([^=<>]+)")
_RELATION_OR_LIST = re.compile(r"[,;<>!]|\\(?:neq?|leq?|geq?|lt|gt|approx|in|begin)(?![a-z])")
_UNEVALUATED = re.compile(
    r"\\(?:sum|prod|int|lim|sin|cos|tan|cot|sec|csc|log|ln|binom|sinh|cosh|tanh)(?![a-zA-Z])|[0-9)]!"
)
_COMMAND = re.compile(r"\\text *\{[^{}]*\}|\\[a-zA-Z]+")
_LAST_LETTER = re.compile(r"([0-9}])\s*([a-zA-Z])([\s.$]*)$")
_LONGEST = 4000
_DIGITS_THAT_COUNT = 10_000
"""Inverse of the largest relative difference between numbers that count as equal. Thus 2.78e-6
differs from 2.9e-6, although both round to 0.000003 at six decimal places."""
_DIGITS = 2000
"""Maximum length of a text that is parsed as a number, and maximum size of its exponent; exact
arithmetic on longer numbers is slow."""


class Number(NamedTuple):
    """Number parsed from the text of an answer."""

    value: Fraction
    is_decimal: bool
    """Whether the text has a decimal point or an exponent; the number may then be rounded."""
    is_percent: bool


def boxed(text: str) -> str | None:
    """Return the content of the last LaTeX box. If earlier boxes belong to the same answer, their
    contents come first, separated by commas. Return None if there is no box."""
    boxes = _last_boxes(text)
    return ", ".join(boxes) if boxes else None


def labelled(text: str) -> str | None:
    """Return the answer after the last ####, or after the last label `A:` or `Answer:` at the start
    of a line. Ignore a #### that only begins a heading with text below. Return None if
    there is neither."""
    if _HASHES in text:
        line, _, more = text.rpartition(_HASHES)[2].strip().partition("\n")
        if not more.strip() or number_of(normalise(line)) is not None:
            return line.strip()
    labels = _LABEL.findall(text)
    return labels[-1].strip().rstrip("*").strip() if labels else None


def without_name(text: str) -> str:
    """Return the right-hand side of a normalised answer such as `x = 5` or `2 + 3 = 5`. Lists of
    equations and inequalities stay unchanged."""
    found = _NAMED.fullmatch(text)
    if found:
        return found[2]
    return text if _RELATION_OR_LIST.search(text) else text.rpartition("=")[2] or text


def with_variable(text: str, other: str) -> str:
    """Write `2t` as `2{t}` if `other`, the answer to compare with, contains letters. Without the
    braces, math-verify drops a final t, m, s, ... as a unit."""
    is_variable = re.search("[a-zA-Z]", _COMMAND.sub("", other))
    return _LAST_LETTER.sub(r"\1{\2}\3", text) if is_variable else text


def is_unevaluated(gold: str, answer: str) -> bool:
    """Return True if the gold answer is a number but the given answer has an unevaluated sum,
    integral or function. The given answer may then only repeat the question."""
    return bool(_UNEVALUATED.search(answer)) and number_of(gold) is not None


def _last_boxes(text: str) -> list[str]:
    """Return the contents of the last closed LaTeX box and of the earlier boxes that belong to the
    same answer, in their order."""
    boxes: list[str] = []
    start = None
    for match in reversed(list(_BOXED.finditer(text))[-_MOST_BOXES:]):
        end = _closing(text, match.end() - 1)
        if end is None or (start is not None and end > start):  # skip unclosed and outer boxes
            continue
        if start is not None and not _are_joined(text[end + 1 : start]):
            break
        boxes.insert(0, text[match.end() : end].strip())
        start = match.start()
    return boxes if len(set(boxes)) > 1 else boxes[-1:]


def _are_joined(gap: str) -> bool:
    """Return whether two LaTeX boxes form one answer, given the text between the boxes."""
    return len(gap) < 100 and bool(_JOINT.search(gap)) and bool(_BETWEEN.fullmatch(gap))


def _closing(text: str, start: int) -> int | None:
    """Return the index of the brace that closes the brace at `start`; None if it is missing."""
    depth = 0
    for i in range(start, len(text)):
        if text[i] == "{" and text[i - 1] != "\\":
            depth += 1
        elif text[i] == "}" and text[i - 1] != "\\":
            depth -= 1
            if depth == 0:
                return i
    return None


def normalise(text: str) -> str:
    """Normalise an answer: remove white space, formula delimiters and spelling variants."""
    text = _WHITE.sub(" ", text).strip().rstrip(" .,:;")  # runs of spaces would slow the regexes
    for left, right in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right):
            text = text[len(left) : -len(right)]
            break
    if "\\" in text:
        text = re.sub(r"\\!\s*", "", text).replace("\\$", "")
        if "matrix" not in text:  # in a matrix, `\\` ends a row
            text = _TWICE_ESCAPED.sub(r"\\", text)
        text = _FRAC.sub(r"\\frac", text)
        text = _FRAC_OF_DIGITS.sub(r"\\frac{\1}{\2}", text)
    text = text.translate(_SYMBOLS).replace("{,}", ",")
    text = _LIST_COMMA.sub(";", text)  # `32, 349` is a list, not the number 32349
    text = _SPACES.sub("", text).replace("$", "")
    return text.rstrip(".")


def number_of(text: str) -> Number | None:
    """Parse normalised text as a plain number, simple fraction or percentage, ignoring units.
    Returns None if the text has another form."""
    if len(text) > _DIGITS:
        return None
    is_percent = text.endswith("%")
    bare = _UNIT.sub("", text)
    if not bare:
        return None
    if found := _FRACTION.fullmatch(bare):
        sign, above, below, one, two, up, down = found.groups()
        top, bottom = _decimal(above or one or up), _decimal(below or two or down)
        if top is None or not bottom:
            return None
        part = top / bottom
        return Number(-part if sign == "-" else part, "." in bare, is_percent)
    found = _NUMBER.fullmatch(bare)
    if found is None:
        return None
    mantissa, exponent = found.groups()
    value = _decimal(mantissa)
    if value is None:
        return None
    if exponent is not None:
        if abs(int(exponent)) > _DIGITS:
            return None
        value *= Fraction(10) ** int(exponent)
    return Number(value, "." in bare or exponent is not None, is_percent)


def _decimal(text: str) -> Fraction | None:
    text = text.replace(",", "")
    return Fraction(text) if any(c.isdigit() for c in text) and text.count(".") < 2 else None


def same_number(gold: Number, answer: Number, decimals: int) -> bool:
    """Return whether two numbers are equal. 28 % equals 28 and .28. A number with a decimal point
    may be rounded to `decimals` places, or large numbers to as many digits; but if the gold answer
    is an integer, 1234568.0 does not equal 1234567."""
    a, b = gold.value, answer.value
    if gold.is_percent != answer.is_percent:
        part, whole = (a, b) if gold.is_percent else (b, a)
        return part == whole or part / 100 == whole
    if a == b:
        return True
    if not (gold.is_decimal or answer.is_decimal):
        return False
    difference, size = abs(a - b), max(abs(a), abs(b))
    is_integer = a.denominator == 1 and not gold.is_decimal
    room = 1 if is_integer else max(size, 1)
    return difference * 10**decimals <= room and difference * _DIGITS_THAT_COUNT <= size


def compare(gold: str, answer: str, decimals: int = 6) -> bool | None:
    """Compare two normalised answers as text, number or choice; None: math-verify must decide."""
    if gold == answer:
        return bool(gold)
    if len(gold) > _LONGEST or len(answer) > _LONGEST:
        return False
    numbers = number_of(gold), number_of(answer)
    if numbers[0] is not None and numbers[1] is not None:
        return same_number(numbers[0], numbers[1], decimals)
    choice = _CHOICE.fullmatch(_unwrapped(gold))
    chosen = _BEGINS_WITH_CHOICE.match(_unwrapped(answer)) if choice else None
    return None if choice is None or chosen is None else (chosen[1] or chosen[2]) == choice[1]


def _unwrapped(text: str) -> str:
    """Replace LaTeX text commands by their content: `\\text{(A)}` becomes (A)."""
    return _WRAPPED.sub(r"\1", text)

"""What a response gives as its final answer, and comparisons of answers that need no algebra.

Text only, microseconds. `compare` says yes, no, or that it cannot tell; math.py asks a computer
algebra system then.
"""

import math
import re
from fractions import Fraction
from typing import NamedTuple

from rlcore.rewards import expression

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BETWEEN = re.compile(
    r"(?:\s|\$|\\[\]\[()]|[,;.]|\\quad|\\qquad|\\ |and|or|\\text\s*\{[^{}]{0,40}\}){0,12}"
)
"""What may stand between boxes that are one answer together, `_JOINT` is what must."""
_JOINT = re.compile(r"[,;]|\b(?:and|or)\b|\\quad")
_HASHES = "####"
_LABEL = re.compile(  # `a = 3` and `A = 50` are steps: a bare letter is a label as `A:` alone
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
_AND = re.compile(r" ?,? ?\\(?:text|mathrm|textbf) ?\{[ ,]*(?:and|or) ?\} ?|,? (?:and|or) ")
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
_WORD = re.compile(r"[a-z]{2,}")
_NAME = r"\\?[a-zA-Z]+(?:_\{?\w+\}?)?(?:\([a-zA-Z,]{1,9}\))?"
_NAMED = re.compile(rf"({_NAME}|\({_NAME}(?:,{_NAME})+\))=([^=<>]+)")
_RELATION_OR_LIST = re.compile(r"[,;<>!]|\\(?:neq?|leq?|geq?|lt|gt|approx|in|begin)(?![a-z])")
_UNEVALUATED = re.compile(
    r"\\(?:sum|prod|int|lim|sin|cos|tan|cot|sec|csc|log|ln|binom|sinh|cosh|tanh)(?![a-zA-Z])|[0-9)]!"
)
_MATRIX = re.compile(r"\\begin\{([pbvBV]?)matrix\}(.*)\\end\{\1matrix\}", re.DOTALL)
_ENDS = {"(": ")]", "[": ")]"}
_UNION = "\\cup"
_UNORDERED = ("list", "set")
_MAY_BE_ONE_NUMBER = re.compile(r"[0-9],[0-9]{3}(?![0-9])|(?<![0-9])0,[0-9]")
"""2,125 and 0,5 are lists, or numbers."""
_LONGEST = 4000
_MOST_MEMBERS = 16
_DIGITS_THAT_COUNT = 10_000
"""2.78e-6 is not 2.9e-6, although both are 0 to six places."""
_APART = 1e-5
"""Numbers of lists that differ by more, relative to the larger one or to 1, are not the same."""
_LARGEST = 10**300
_DIGITS = 2000
"""Longer numbers are none: their arithmetic would take long."""


class Number(NamedTuple):
    """A number that was written out."""

    value: Fraction
    is_decimal: bool
    """It has a decimal point or an exponent: it may be rounded."""
    is_percent: bool


def boxed(text: str) -> str | None:
    """What stands in the last box, or in all of them where they are one answer; None where there is
    none."""
    boxes = _last_boxes(text)
    return ", ".join(boxes) if boxes else None


def labelled(text: str) -> str | None:
    """What stands behind the last ####, unless that is a heading of more text, or on the last line
    that begins with `A:` or `Answer:`; None where there is neither."""
    if _HASHES in text:
        line, _, more = text.rpartition(_HASHES)[2].strip().partition("\n")
        if not more.strip() or number_of(normalise(line)) is not None:
            return line.strip()
    labels = _LABEL.findall(text)
    return labels[-1].strip().rstrip("*").strip() if labels else None


def without_name(text: str) -> str:
    """What the answer (normalised) is where it is written as `x = 5`, or `2 + 3 = 5`; lists of such
    and relations stay as they are."""
    found = _NAMED.fullmatch(text)
    if found:
        return found[2]
    return text if _RELATION_OR_LIST.search(text) else text.rpartition("=")[2] or text


def is_unevaluated(gold: str, answer: str) -> bool:
    """The answer (normalised) is a sum, an integral, ... where a number was asked for: it may be
    the question itself."""
    return bool(_UNEVALUATED.search(answer)) and number_of(gold) is not None


def _last_boxes(text: str) -> list[str]:
    """The contents of the last closed box, after those of boxes that are joined to it."""
    boxes: list[str] = []
    start = None
    for match in reversed(list(_BOXED.finditer(text))[-_MOST_BOXES:]):
        end = _closing(text, match.end() - 1)
        if end is None or (start is not None and end > start):  # or it is around the one after it
            continue
        if start is not None and not _are_joined(text[end + 1 : start]):
            break
        boxes.insert(0, text[match.end() : end].strip())
        start = match.start()
    return boxes if len(set(boxes)) > 1 else boxes[-1:]


def _are_joined(gap: str) -> bool:
    """Two boxes with this between them are one answer."""
    return len(gap) < 100 and bool(_JOINT.search(gap)) and bool(_BETWEEN.fullmatch(gap))


def _closing(text: str, start: int) -> int | None:
    """Where the brace at `start` closes; None where it never does."""
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
    """The same answer without white space, delimiters of formulas and spelling variants."""
    text = _WHITE.sub(" ", text).strip().rstrip(" .,:;")  # what follows is linear in what is left
    for left, right in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right):
            text = text[len(left) : -len(right)]
            break
    if "\\" in text:
        text = re.sub(r"\\!\s*", "", text).replace("\\$", "")
        if "matrix" not in text:  # there \\\\ ends a row
            text = _TWICE_ESCAPED.sub(r"\\", text)
        text = _FRAC.sub(r"\\frac", text)
        text = _FRAC_OF_DIGITS.sub(r"\\frac{\1}{\2}", text)
    text = text.translate(_SYMBOLS).replace("{,}", ",")
    text = _AND.sub(";", text)
    text = _LIST_COMMA.sub(";", text)  # 32, 349 is no thousands
    text = _SPACES.sub("", text).replace("$", "")
    return text.rstrip(".")


def number_of(text: str) -> Number | None:
    """A plain number, simple fraction or percentage from normalised text, units left out."""
    if len(text) > _DIGITS:
        return None
    is_percent = text.endswith("%")
    bare = _UNIT.sub("", text)
    if not bare:
        return None
    if found := _FRACTION.fullmatch(bare):
        sign, above, below, one, two, up, down = found.groups()
        parts = _decimal(above or one or up), _decimal(below or two or down)
        if None in parts or not parts[1]:
            return None
        value = parts[0] / parts[1]
        return Number(-value if sign == "-" else value, "." in bare, is_percent)
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
    """28 % is 28 and .28; what has a decimal point may be rounded to `decimals` places."""
    a, b = gold.value, answer.value
    if gold.is_percent != answer.is_percent:
        part, whole = (a, b) if gold.is_percent else (b, a)
        return part == whole or part / 100 == whole
    if a == b:
        return True
    if not (gold.is_decimal or answer.is_decimal):
        return False
    difference, size = abs(a - b), max(abs(a), abs(b))
    return difference * 10**decimals <= max(size, 1) and difference * _DIGITS_THAT_COUNT <= size


def compare(gold: str, answer: str, decimals: int = 6) -> bool | None:
    """Whether two answers (normalised) are equal; None where that takes algebra."""
    if gold == answer:
        return bool(gold)
    if len(gold) > _LONGEST or len(answer) > _LONGEST:
        return False
    numbers = number_of(gold), number_of(answer)
    if numbers[0] is not None and numbers[1] is not None:
        return same_number(numbers[0], numbers[1], decimals)
    if choice := _CHOICE.fullmatch(_unwrapped(gold)):
        return _chosen(_unwrapped(answer), choice[1])
    words = _unwrapped(gold).lower(), _unwrapped(answer).lower()
    if _WORD.fullmatch(words[0]) and words[0] == words[1]:
        return True
    if any(w.isalpha() and len(w) > 1 for w in words):
        return _compare_with_words(words, numbers)
    same = _compare_parts(gold, answer, decimals)
    if same is not None:
        return same
    if "=" in gold or "=" in answer:
        return _compare_equations(gold, answer, decimals)
    return _compare_values(gold, answer)


def _compare_with_words(
    words: tuple[str, str], numbers: tuple[Number | None, Number | None]
) -> bool | None:
    """Where one of them is letters only: perhaps a product. It is no number, and nothing that has
    other letters."""
    if numbers != (None, None):
        return False
    is_word = words[0].isalpha() and words[1].isalpha()
    return False if is_word and sorted(words[0]) != sorted(words[1]) else None


def _compare_equations(gold: str, answer: str, decimals: int) -> bool | None:
    """Where one of them is an equation. `x = 3` is 3, and not y = 3."""
    named = _NAMED.fullmatch(gold), _NAMED.fullmatch(answer)
    names = [None if n is None else n[1].lower() for n in named]
    values = [t if n is None else n[2] for t, n in zip((gold, answer), named, strict=True)]
    if not any("=" in v for v in values) and (None in names or names[0] == names[1]):
        return compare(values[0], values[1], decimals)
    equations = expression.read_equation(gold), expression.read_equation(answer)
    if equations[0] is None or equations[1] is None:
        return None
    return expression.same_equation(equations[0], equations[1])


def _compare_values(gold: str, answer: str) -> bool | None:
    formulas = _formula(gold), _formula(answer)
    if formulas[0] is None or formulas[1] is None:
        return None
    return expression.same(formulas[0], formulas[1])


def _formula(text: str) -> expression.Formula | None:
    number = number_of(text)
    if number is None:
        return expression.read(text)
    if number.is_percent or abs(number.value) > _LARGEST:
        return None
    return expression.constant(float(number.value))


def _unwrapped(text: str) -> str:
    """`\\text{(A)}` is (A)."""
    return _WRAPPED.sub(r"\1", text)


def _chosen(answer: str, choice: str) -> bool | None:
    found = _BEGINS_WITH_CHOICE.match(answer)
    return None if found is None else (found[1] or found[2]) == choice


def _compare_parts(gold: str, answer: str, decimals: int) -> bool | None:
    """Tuples, intervals, lists, unions and matrices, part by part."""
    a, b = _parts_of(gold), _parts_of(answer)
    if a is None and b is None:
        return None
    a, b = a or ("", [gold]), b or ("", [answer])
    if len(a[1]) == len(b[1]) and a[0] in _UNORDERED and b[0] in (*_UNORDERED, "()"):
        kind = "set"  # written as a tuple it is one, too
    elif len(a[1]) == len(b[1]) and a[0] == b[0]:
        kind = a[0]
    else:
        return False if _differ(a, b, decimals) else None
    ours, theirs = a[1], b[1]
    if kind in ("set", "union"):
        same = _same_members(ours, theirs, decimals)
        return same if kind != "union" or same else None  # other pieces may be the same points
    verdicts = [compare(x, y, decimals) for x, y in zip(ours, theirs, strict=True)]
    if all(verdicts):
        return True
    return None if None in verdicts else False


def _differ(gold: tuple[str, list[str]], answer: tuple[str, list[str]], decimals: int) -> bool:
    """Whether two of different kinds or lengths are certainly not the same: a number stands in one
    of them and not in the other one, or an end belongs to one interval and not to the other one."""
    kinds = {gold[0], answer[0]}
    if any(k == "union" or k.startswith("matrix") for k in kinds):
        return False
    if any(_MAY_BE_ONE_NUMBER.search(",".join(parts)) for _, parts in (gold, answer)):
        return False
    ours, theirs = _numbers_in(gold[1]), _numbers_in(answer[1])
    apart = max(_APART, 2 * 10.0**-decimals)
    if _lacks_one(theirs, ours, apart) or _lacks_one(ours, theirs, apart):
        return True
    if not (_is_interval(gold[0], ours) and _is_interval(answer[0], theirs)):
        return False
    return gold[0] != answer[0]


def _numbers_in(parts: list[str]) -> list[complex | None]:
    """The numbers of all parts, and of their parts; None for what is not a plain number."""
    found: list[complex | None] = []
    for part in parts:
        named = _NAMED.fullmatch(part)
        text = part if named is None else named[2]
        inner = _parts_of(text)
        if inner is None:
            found.append(_plain_number(text))
        elif inner[0].startswith("matrix") or inner[0] == "union":
            found.append(None)
        else:
            found += _numbers_in(inner[1])
    return found


def _plain_number(text: str) -> complex | None:
    if text.lstrip("+-") == "\\infty":
        return -math.inf if text[0] == "-" else math.inf
    formula = _formula(text)
    if formula is None or formula.names:
        return None
    return expression.number_in(formula)


def _lacks_one(values: list[complex | None], wanted: list[complex | None], apart: float) -> bool:
    """A number of `wanted` is certainly not among the values."""
    if None in values:
        return False
    return any(w is not None and all(_are_apart(v, w, apart) for v in values) for w in wanted)


def _are_apart(a: complex, b: complex, apart: float) -> bool:
    if math.inf in (abs(a), abs(b)):
        return a != b
    return abs(a - b) > apart * max(abs(a), abs(b), 1)


def _is_interval(kind: str, ends: list[complex | None]) -> bool:
    """It can only be an interval, or by its brackets also a pair."""
    if len(kind) != 2 or len(ends) != 2 or None in ends:
        return False
    left, right = map(complex, ends)
    return not left.imag and not right.imag and left.real < right.real


def _same_members(ours: list[str], theirs: list[str], decimals: int) -> bool | None:
    """Whether the parts are the same in some order."""
    if len(ours) > _MOST_MEMBERS:
        return None
    left, is_certain = list(theirs), True
    for x in ours:
        verdicts = [compare(x, y, decimals) for y in left]
        is_certain &= None not in verdicts
        if True not in verdicts:
            return False if is_certain else None
        del left[verdicts.index(True)]
    return True


def _parts_of(text: str) -> tuple[str, list[str]] | None:
    """What it is, and its parts; None for what has none."""
    if matrix := _MATRIX.fullmatch(text):
        rows = [row.split("&") for row in matrix[2].strip().removesuffix("\\\\").split("\\\\")]
        return f"matrix {len(rows)}", [cell for row in rows for cell in row]
    if text[:1] in _ENDS and text[-1:] in _ENDS[text[0]]:
        inner = _split(text[1:-1])
        if inner is not None:
            return (text[0] + text[-1], inner) if len(inner) > 1 else None
    if text.startswith("\\{") and text.endswith("\\}"):
        inner = _split(text[2:-2])
        if inner is not None:
            return "set", inner
    if text.startswith("{") and text.endswith("}"):
        inner = _split(text[1:-1])
        if inner is not None and len(inner) > 1:
            return "set", inner
    if _UNION in text:
        return "union", text.split(_UNION)
    inner = _split(text)
    return ("list", inner) if inner is not None and len(inner) > 1 else None


def _split(text: str) -> list[str] | None:
    """At the commas and semicolons outside of all brackets; None where brackets do not match or a
    part is empty."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
            if depth < 0:
                return None
        elif c in ",;" and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return parts if depth == 0 and all(parts) else None

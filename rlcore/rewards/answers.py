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
_TAGGED = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
_THINK, _END_OF_THINKING = "<think>", "</think>"
_END_CHARS, _MOST_SKIPPED = 300, 100
"""Number of last characters of a response that are its end (verl has the same), and how many of
them may be skipped to begin with a sentence."""
_SENTENCE_END = re.compile(r"\n|[.!?] ")
_LABEL = re.compile(  # the label A needs a colon: `a = 3` and `A = 50` are steps of a calculation
    r"^[ \t*#>]*(?:(?i:final answer|answer)[ \t*]*[:=]|A[ \t*]*:)[ \t*]*(\S.*)$", re.MULTILINE
)
_MOST_BOXES = 8

_SIGN_AND_DIGITS = r"[-+]?(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]*)?"
_NUMBER = re.compile(
    rf"({_SIGN_AND_DIGITS})(?:(?:[eE]|(?:\*|\\times|\\cdot|x)10\^)\{{?([-+]?[0-9]{{1,4}})\}}?)?"
)
_FRACTION = re.compile(
    r"([-+]?)\\frac(?:\{([-+]?[0-9.,]+)\}\{([-+]?[0-9.,]+)\}|([0-9])([0-9]))"
    r"|([-+]?[0-9.,]+)/([0-9.,]+)"
)
_MIXED = re.compile(r"([-+]?)([0-9]+)\\frac\{([0-9]+)\}\{([0-9]+)\}")
_REPEATING = re.compile(r"([-+]?)([0-9]*)\.([0-9]*)\\overline\{?([0-9]+)\}?")
_TEXT = r"\\(?:text|mathrm|textbf|mbox|textnormal|mathbf|textit|operatorname)\s*\{"
_WORD = rf"{_TEXT}[^{{}}]*\}}(?:\^\{{?-?[0-9]\}}?)?"
_UNIT = re.compile(
    rf"(?:{_WORD}|\\frac\{{{_WORD}\}}\{{{_WORD}\}}|(?<=[0-9])[cmk]m\^\{{?[23]\}}?"
    rf"|(?<=[0-9])\^?\{{?(?:{_TEXT})?(?:st|nd|rd|th)\}}{{0,2}}"  # an ordinal number
    r"|\^\{?\\circ\}?[CF]?|\\degree|\\circ|\\pmod\{?[0-9]+\}?|\\%|%)+$"
)
_DECIMAL = re.compile(r"[.eE^]")
_NUMBER_AS_TEXT = re.compile(rf"{_TEXT}([-+]?[0-9][0-9,.]*)([^{{}}0-9]*)\}}")
_SCALES = {
    f"{word}{end}": value
    for word, size in {
        "ten": 10,
        "hundred": 100,
        "thousand": 10**3,
        "million": 10**6,
        "billion": 10**9,
    }.items()
    for end, value in (("th", Fraction(1, size)), ("", Fraction(size)))
}
_SCALE = re.compile(rf"(?<=[0-9])(?:{_TEXT})?({'|'.join(_SCALES)})[^0-9]*$")
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
_SPACED_MIXED = re.compile(r"(?<![0-9.,/])([0-9]+) ([0-9]+) ?/ ?([0-9]+)(?![0-9./])")
_PERCENT = re.compile(r"(?<=[0-9$]) ?(?:\\text ?\{ ?)?(?:percent|pct) ?\}?$")
_LIST_COMMA = re.compile(r"(?<=[0-9]),\s+(?=[0-9])")
_WRAPPED = re.compile(r"\\(?:text|mathrm|textbf|mbox|textnormal|mathbf|textit)\s*\{([^{}]*)\}")
_CHOICE = re.compile(r"\(?([A-J])\)?")
_BEGINS_WITH_CHOICE = re.compile(
    r"(?:(?i:option|choice|answer)(?:is)?:?)?(?:\(([A-J])\)|([A-J])(?:[).:]|$))"
)
_STATED_CHOICE = re.compile(
    r"\b(?i:answer|option|choice)(?: is)?:?[ *$]+\(?([A-J])\)?[*$]*(?=[.,;]|\s*$)", re.MULTILINE
)
_TUPLE, _SET = re.compile(r"\([^(){}]*,[^(){}]*\)"), re.compile(r"\\\{[^(){}]*,[^(){}]*\\\}")
_NAME = r"\\?[a-zA-Z]+(?:_\{?\w+\}?)?(?:\([a-zA-Z,]{1,9}\))?"
_NAMED = re.compile(rf"({_NAME}|\({_NAME}(?:,{_NAME})+\))=([^=<>]+)")
_RELATION_OR_LIST = re.compile(
    r"[,;<>!]|\\(?:neq?|leq?|geq?|lt|gt|approx|in|begin)(?![a-z])"
    r"|\{(?:and|or)\}|(?<=[0-9])(?:and|or)"
)
_UNEVALUATED = re.compile(
    r"\\(?:sum|prod|int|lim|sin|cos|tan|cot|sec|csc|log|ln|binom|sinh|cosh|tanh)(?![a-zA-Z])|[0-9)]!"
)
_COMMAND = re.compile(r"\\text *\{[^{}]*\}|\\[a-zA-Z]+")
_LAST_LETTER = re.compile(r"([0-9}])\s*([a-hj-zA-Z])([\s.$]*)$")
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


def without_thinking(text: str) -> str:
    """Return the part of a response after its reasoning, which ends at the last `</think>`. Return
    "" if a `<think>` has no end, because the response then states no answer."""
    after = text.rpartition(_END_OF_THINKING)[2]
    return "" if _THINK in after else after


def end_of(text: str) -> str:
    """Return the last 300 characters of a text, less the rest of a sentence or line at their begin.
    Return the whole text if it is shorter."""
    text = text.strip()
    if len(text) <= _END_CHARS:
        return text
    tail = text[-_END_CHARS:]
    found = _SENTENCE_END.search(tail, 0, _MOST_SKIPPED)
    return tail[found.end() :] if found else tail


def stated_choice(text: str) -> str | None:
    """Return the last choice that a sentence states, as in `The answer is (B).`"""
    found = _STATED_CHOICE.findall(text)
    return found[-1] if found else None


def labelled(text: str) -> str | None:
    """Return the answer in the last `<answer>` tag, or after the last ####, or after the last label
    `A:` or `Answer:` at the start of a line. Ignore a #### that only begins a heading with text
    below. Return None if there is none of them."""
    if tagged := _TAGGED.findall(text):
        return tagged[-1].strip()
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
        text = text.replace("\\varnothing", "\\emptyset").replace("{}", "")
    if "/" in text:
        text = _SPACED_MIXED.sub(r"\1\\frac{\2}{\3}", text)
    if "percent" in text or "pct" in text:
        text = _PERCENT.sub(r"\\%", text)
    text = text.translate(_SYMBOLS).replace("{,}", ",")
    text = _LIST_COMMA.sub(";", text)  # `32, 349` is a list, not the number 32349
    text = _SPACES.sub("", text).replace("$", "")
    return text.rstrip(".")


def number_of(text: str) -> Number | None:
    """Parse normalised text as a plain number, a simple or mixed fraction, a repeating decimal or a
    percentage, perhaps in millions or tenths, ignoring units and the ending of an ordinal number.
    Returns None if the text has another form."""
    if len(text) > _DIGITS:
        return None
    bare, scale = text, None
    if not _NUMBER.fullmatch(text):  # most are plain numbers
        if found := _NUMBER_AS_TEXT.fullmatch(text):  # \text{5 apples}
            text = f"{found[1]}\\text{{{found[2]}}}"
        scale = _SCALE.search(text)
        bare = _UNIT.sub("", text[: scale.start()] if scale else text)
    value = _value_of(bare) if bare else None
    if value is None:
        return None
    is_decimal = bool(_DECIMAL.search(bare)) and not _REPEATING.fullmatch(bare)
    value *= _SCALES[scale[1]] if scale else 1
    return Number(value, is_decimal, text.endswith("%"))


def _value_of(text: str) -> Fraction | None:
    """Parse a number without unit; None if the text has another form."""
    if found := _FRACTION.fullmatch(text):
        sign, above, below, one, two, up, down = found.groups()
        top, bottom = _decimal(above or one or up), _decimal(below or two or down)
        if top is None or not bottom:
            return None
        return -top / bottom if sign == "-" else top / bottom
    if found := _MIXED.fullmatch(text):
        whole, over, under = int(found[2]), int(found[3]), int(found[4])
        if not under:
            return None
        mixed = whole + Fraction(over, under)
        return -mixed if found[1] == "-" else mixed
    if found := _REPEATING.fullmatch(text):
        sign, before, first, period = found.groups()
        shifted = int(before + first + period) - int(before + first or 0)
        exact = Fraction(shifted, 10 ** len(first) * (10 ** len(period) - 1))
        return -exact if sign == "-" else exact
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    mantissa, exponent = _decimal(found[1]), int(found[2] or 0)
    if mantissa is None or abs(exponent) > _DIGITS:
        return None
    return mantissa * Fraction(10) ** exponent


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
    if _SET.fullmatch(gold) and _TUPLE.fullmatch(answer):
        return False
    if _TUPLE.fullmatch(gold) and _SET.fullmatch(answer):
        return False
    choice = choice_of(gold)
    chosen = _BEGINS_WITH_CHOICE.match(_unwrapped(answer)) if choice else None
    return None if choice is None or chosen is None else (chosen[1] or chosen[2]) == choice


def choice_of(text: str) -> str | None:
    """Return the letter of a normalised answer that is a choice, such as (A); None if it is not."""
    found = _CHOICE.fullmatch(_unwrapped(text))
    return found[1] if found else None


def _unwrapped(text: str) -> str:
    """Replace LaTeX text commands by their content: `\\text{(A)}` becomes (A)."""
    return _WRAPPED.sub(r"\1", text)

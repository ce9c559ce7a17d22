"""Math answers: the last boxed expression against the row's answer, by value.

Two plain numbers are compared here, which costs microseconds; everything else goes through
math-verify (parsing with sympy), which costs milliseconds and on odd input seconds, so its own
time-outs are off and the service's deadline rules.
"""

import re
from decimal import Decimal
from functools import lru_cache
from typing import Any

from rlcore.config.schema import RewardConfig, Section
from rlcore.records import Prompt
from rlcore.rewards.kind import Kind

_NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?")
_BOXED = ("\\boxed{", "\\fbox{")
_HASHES = "####"


@Section
class MathRewardConfig(RewardConfig):
    require_boxed: bool = False
    """Score 0 without looking further where the response has no \\boxed{...} and no ####."""


class MathReward:
    def __init__(self, config: MathRewardConfig) -> None:
        import math_verify  # half a second of sympy: paid when a child starts, not at a sample

        self._require = config.require_boxed
        self._verify = math_verify.verify
        self._parse = math_verify.parse
        self._gold = lru_cache(4096)(self._parse_gold)

    def score(self, sample: Any, prompt: Prompt, text: str) -> float:
        """1 where the final answer equals `prompt.answer`, else 0."""
        answer = final_answer(text)
        if answer is None:
            if self._require:
                return 0.0
            return self._slow(prompt.answer, text)
        same = compare_numbers(prompt.answer, answer)
        if same is not None:
            return float(same)
        return self._slow(prompt.answer, "\\boxed{" + answer + "}")

    def _slow(self, gold: str, text: str) -> float:
        parsed = self._gold(gold)
        if not parsed:  # nothing that sympy can read: text is all that can be compared
            return float(gold.strip() == (final_answer(text) or text).strip())
        found = self._parse(text, parsing_timeout=None)
        return float(bool(found) and self._verify(parsed, found, timeout_seconds=None))

    def _parse_gold(self, gold: str) -> list[Any]:
        return self._parse("\\boxed{" + gold + "}", parsing_timeout=None)


def final_answer(text: str) -> str | None:
    """What stands in the last \\boxed{...}, or behind the last ####; None where neither is
    there."""
    start = max(text.rfind(mark) for mark in _BOXED)
    if start >= 0:
        return _in_braces(text, text.index("{", start))
    if _HASHES in text:
        return text.rpartition(_HASHES)[2].strip().partition("\n")[0].strip()
    return None


def _in_braces(text: str, start: int) -> str | None:
    """The text between the brace at `start` and its partner; None where it is never closed."""
    depth = 0
    for i in range(start, len(text)):
        if text[i] == "{" and text[i - 1] != "\\":
            depth += 1
        elif text[i] == "}" and text[i - 1] != "\\":
            depth -= 1
            if depth == 0:
                return text[start + 1 : i].strip()
    return None


def compare_numbers(gold: str, answer: str) -> bool | None:
    """Whether two plain numbers are equal; None where one is not plain, or where two decimals
    differ and rounding has to decide."""
    a, b = _plain(gold), _plain(answer)
    if a is None or b is None:
        return None
    if a == b:
        return True
    return None if "." in gold or "." in answer else False


def _plain(text: str) -> Decimal | None:
    text = text.strip().removeprefix("\\$").strip("$").removesuffix(".").strip()
    return Decimal(text.replace(",", "")) if _NUMBER.fullmatch(text) else None


KIND = Kind(MathRewardConfig, score=MathReward)

"""Math reward: compares the final answer of a response with the row's answer, by value.

Numbers and choices are compared by answers.py; other answers by math-verify (sympy). math-verify
usually takes milliseconds, but tenths of a second in a new process, and minutes on unusual input. A
comparison ends after `algebra_timeout_s`, before the service's deadline kills the child process
with its loaded parser. This limit counts CPU time, so a verdict does not depend on the machine's
load.
"""

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rlcore.config.schema import RewardConfig
from rlcore.records import Prompt
from rlcore.rewards import answers
from rlcore.rewards.kind import RewardKind

_LONGEST_ANSWER = 1000
_AGAIN_S = 0.2
"""Interval in seconds of the repeated time-out signal; a bare `except` may catch the first one."""
_FORMULA = ("$", "\\boxed", "\\[", "\\(")


@dataclass(frozen=True, kw_only=True)
class MathRewardConfig(RewardConfig):
    """Keys of `--reward math`."""

    require_boxed: bool = False
    """Whether a response scores 0 unless it marks its final answer by \\boxed{...}, #### or a last
    line `Answer: ...`."""
    decimals: int = 6
    """Number of decimal places in which numbers with a decimal point must agree."""
    algebra_timeout_s: float = 3.0
    """CPU seconds per algebraic comparison, after which the answers count as different; 0: limited
    only by reward.timeout_s."""


class MathReward:
    """Math reward that caches comparisons: equal final answers to one prompt are compared once."""

    def __init__(self, config: MathRewardConfig, strict: bool = True) -> None:
        """Import math-verify and build the caches. `strict` is an option of math-verify: with it,
        names of variables matter."""
        import math_verify  # importing sympy takes 0.5 s, so do it when the child starts

        # Silence the warnings that math-verify's own time-outs are off.
        for module in ("parser", "grader"):
            logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)
        self._require, self._decimals, self._strict = config.require_boxed, config.decimals, strict
        self._limit_s = config.algebra_timeout_s
        self._verify, self._parse_text = math_verify.verify, math_verify.parse
        self._boxed_only = (math_verify.LatexExtractionConfig(boxed_match_priority=0),)
        self._gold = lru_cache(4096)(self._read_gold)
        self._parse_gold = lru_cache(4096)(self._parse_gold_text)
        self._cached = lru_cache(1 << 14)(self._compare)

    def score(self, sample: Any, prompt: Prompt, text: str) -> float:
        """Return 1 if the final answer equals `prompt.answer`, else 0. A response that was cut
        states no answer in its last line, except in a box."""
        text = answers.without_thinking(text)
        gold, answer = prompt.answer, answers.boxed(text)
        if answer is not None:
            return float(self._same(gold, answer))
        is_cut = sample is not None and sample.finish == "length"
        if is_cut:
            text = text.rpartition("\n")[0]
        answer = answers.labelled(text)
        if answer is not None:
            is_number = answers.number_of(answers.normalise(answer)) is not None
            found = self._same(gold, answer) or not is_number and self._search(gold, answer)
            return float(found)  # text after the mark may contain the answer among other words
        return float(not (self._require or is_cut) and self._search(gold, text))

    def answer(self, text: str) -> str:
        """Return the marked final answer of a response in a normal form; "" if none is marked."""
        text = answers.without_thinking(text)
        return answers.normalise(answers.boxed(text) or answers.labelled(text) or "")

    def _same(self, gold: str, answer: str) -> bool:
        return len(answer) <= _LONGEST_ANSWER and self._cached(gold, answer)

    def _compare(self, gold: str, answer: str) -> bool:
        ours, theirs = self._gold(gold), answers.normalise(answer)
        if "=" not in ours and (value := answers.without_name(theirs)) != theirs:
            theirs, answer = value, answer.rpartition("=")[2].strip(" $")
        if answers.is_unevaluated(ours, theirs):
            return False
        same = answers.compare(ours, theirs, self._decimals)
        if same is False and gold.count("\\boxed") > 1:
            same = None  # let math-verify decide whether several boxes are one answer
        if same is not None:
            return same
        gold, answer = answers.with_variable(gold, theirs), answers.with_variable(answer, ours)
        return self._algebra(gold, answer, self._parse)

    def _search(self, gold: str, text: str) -> bool:
        """Compare the gold answer with the end of a text that has no answer mark: with all of it,
        then with the choice that it states or the answer that math-verify extracts from it."""
        ours, text = self._gold(gold), answers.end_of(text)
        if answers.compare(ours, answers.normalise(text), self._decimals):
            return True
        if (choice := answers.choice_of(ours)) and (stated := answers.stated_choice(text)):
            return stated == choice
        return self._algebra(gold, text, lambda t: self._parse_text(t, parsing_timeout=None))

    def _algebra(self, gold: str, text: str, parse: Callable[[str], list[Any]]) -> bool:
        try:
            with _limited(self._limit_s):
                return self._verify(
                    self._parse_gold(gold),
                    parse(text),
                    float_rounding=self._decimals,
                    strict=self._strict,
                    timeout_seconds=None,
                )
        except _TooLongError:
            return False

    def _parse(self, answer: str) -> list[Any]:
        """Parse an answer with sympy."""
        return self._parse_text(
            "\\boxed{" + answer + "}",
            extraction_config=self._boxed_only,
            parsing_timeout=None,
        )

    def _read_gold(self, gold: str) -> str:
        return answers.normalise(answers.boxed(gold) or answers.labelled(gold) or gold)

    def _parse_gold_text(self, gold: str) -> list[Any]:
        if any(mark in gold for mark in _FORMULA):
            return self._parse_text(gold, parsing_timeout=None)
        return self._parse(gold)


class _TooLongError(BaseException):
    """Time-out of a comparison; a BaseException, because math-verify and sympy catch Exception."""


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise `_TooLongError` after this many seconds of CPU time. There is no limit if `seconds` is
    0 or the thread is not the main thread."""
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: object) -> None:
        raise _TooLongError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_S)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    finally:  # stop the timer again: a signal may have interrupted the first stop
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def reference(config: MathRewardConfig, prompt: Prompt) -> str:
    """Return the row's answer if it is marked as the final one, else the answer in a box."""
    marked = answers.boxed(prompt.answer) or answers.labelled(prompt.answer)
    return prompt.answer if marked or not prompt.answer else f"\\boxed{{{prompt.answer}}}"


KIND = RewardKind(MathRewardConfig, score=MathReward, reference=reference)

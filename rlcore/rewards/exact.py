"""Exact-match reward: 1 if the response, or its part after a marker, equals the answer; else 0."""

from dataclasses import dataclass
from typing import Any, Literal

from rlcore.config.schema import RewardConfig
from rlcore.records import Prompt
from rlcore.rewards.kind import RewardKind


@dataclass(frozen=True, kw_only=True)
class ExactRewardConfig(RewardConfig):
    """Keys of `--reward exact`."""

    answer_marker: str = ""
    """Marker after which the compared part of a response begins; a response without it scores 0.
    Empty: compare the whole response."""
    occurrence: Literal["first", "last"] = "first"
    """Which occurrence of reward.answer_marker counts as the marker."""


class ExactReward:
    def __init__(self, config: ExactRewardConfig) -> None:
        self._after, self._first = config.answer_marker, config.occurrence == "first"

    def score(self, sample: Any, prompt: Prompt, text: str) -> float:
        """Return 1 if the response, or its part after the marker, equals the answer; else 0. White
        space at both ends is ignored. A row without an answer scores 0."""
        gold = prompt.answer.strip()
        return float(bool(gold) and self.answer(text) == gold)

    def answer(self, text: str) -> str:
        """Return the compared part of a response; "" if it has no marker."""
        if not self._after:
            return text.strip()
        _, marker, rest = (text.partition if self._first else text.rpartition)(self._after)
        return rest.strip() if marker else ""


def reference(config: ExactRewardConfig, prompt: Prompt) -> str:
    """Return the row's answer after the marker."""
    return config.answer_marker + prompt.answer if prompt.answer else ""


KIND = RewardKind(ExactRewardConfig, score=ExactReward, reference=reference)

"""Adapt the deadlines of rewards to prompts. RollPacker, arXiv 2509.21009.

Scoring a response that loops forever takes the whole deadline. Once a prompt has had a right
response, its scoring time is known, and further responses get a deadline that is little longer:

    T = min(max(T_min, factor * anchor), T_max)

`anchor` is the longest scoring time of a right response to the prompt, in all epochs. Without a
right response, T is T_max. The paper keeps these reference latencies by test case, with factor 1.5.
The paper's code keeps them by prompt, with factor 2.
"""

from collections.abc import Mapping
from typing import Any

from rlcore.records import Prompt


def key_of(prompt: Prompt) -> str:
    """Return a key of the prompt that is stable across epochs and restarts."""
    return f"{prompt.dataset}/{prompt.index}"


def reasons_of(error: str) -> list[str]:
    """Return the reasons, one per failed reward, under which a failed score is counted. A reason is
    the first word of the reward's error, such as `timeout` or `crash`, or else `exception` (the
    function raised or returned an invalid value)."""
    words = [part.replace(":", " ").partition(" ")[0] for part in error.split("; ")]
    return [word if word.isalpha() and word.islower() else "exception" for word in words]


class AdaptiveTimeout:
    """Deadlines by prompt. Each rank has one object for the rewards that it requests, and gets the
    other ranks' scoring times when a round ends."""

    def __init__(self, least_s: float, most_s: float, factor: float) -> None:
        self._least_s, self._most_s, self._factor = least_s, most_s, factor
        self._reference_latency: dict[str, float] = {}

    def timeout_s(self, prompt: str) -> float:
        """Return the deadline in seconds for the next response to this prompt."""
        anchor = self._reference_latency.get(prompt)
        if anchor is None:
            return self._most_s
        return min(max(self._least_s, self._factor * anchor), self._most_s)

    def scored(self, prompt: str, seconds: float, is_right: bool) -> None:
        """Record the scoring time of a response; `is_right` is False after a timeout."""
        if is_right:
            self._reference_latency[prompt] = max(seconds, self._reference_latency.get(prompt, 0.0))

    def learn(self, reference_latency: Mapping[str, float]) -> None:
        """Merge scoring times of right responses from other ranks, by prompt."""
        for prompt, seconds in reference_latency.items():
            self.scored(prompt, seconds, is_right=True)

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as plain JSON."""
        return {"reference_latency": dict(self._reference_latency)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self._reference_latency = dict(state["reference_latency"])

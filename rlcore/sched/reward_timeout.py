"""Adaptive deadlines of rewards. RollPacker, arXiv 2509.21009.

A wrong program that loops uses up its whole deadline. Once one response to a prompt was right, the
time that a right one needs is known, and further responses get little more than that:

    T = min(max(T_min, factor * anchor), T_max)

with `anchor` the longest time of a right response to the prompt, in all epochs; T is T_max before
there is one. The paper keeps reference latencies by test case with the factor 1.5; its code keeps
them by prompt with 2.
"""

from collections.abc import Mapping
from typing import Any

from rlcore.records import Prompt


def key_of(prompt: Prompt) -> str:
    """Return a prompt key that is stable across epochs and restarts."""
    return f"{prompt.dataset}/{prompt.index}"


def reasons_of(error: str) -> list[str]:
    """Return the reasons under which a failed score is counted. It is the first word of each
    reward's error, such as `timeout` or `crash`; or `exception` if the function raised or returned
    a wrong value."""
    words = [part.replace(":", " ").partition(" ")[0] for part in error.split("; ")]
    return [word if word.isalpha() and word.islower() else "exception" for word in words]


class AdaptiveTimeout:
    """Deadlines by prompt. Every rank has its own for the rewards that it requests; values of other
    ranks arrive at the end of a round."""

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
        """Record the scoring time of a response; a response that timed out is not right."""
        if is_right:
            self._reference_latency[prompt] = max(seconds, self._reference_latency.get(prompt, 0.0))

    def learn(self, reference_latency: Mapping[str, float]) -> None:
        """Merge the times of right responses from other ranks, by prompt."""
        for prompt, seconds in reference_latency.items():
            self.scored(prompt, seconds, is_right=True)

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as plain JSON."""
        return {"reference_latency": dict(self._reference_latency)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self._reference_latency = dict(state["reference_latency"])

"""Adapt the deadline of each reward to its prompt. RollPacker, arXiv 2509.21009.

Scoring a response that loops forever takes the whole deadline. Once a prompt has had a right
response, its scoring time is known. Further responses get a deadline T not far above this time:

    T = min(max(T_min, factor * anchor), T_max)

`anchor` is the longest scoring time of a right response to the prompt, in all epochs. Without a
right response, T is T_max. The paper has one `anchor` per test case, with factor 1.5. The paper's
code has one `anchor` per prompt, with factor 2."""

from collections.abc import Mapping
from typing import Any

from rlcore.records import Prompt


def key_of(prompt: Prompt) -> str:
    """Return a key of the prompt that is stable across epochs and restarts."""
    return f"{prompt.dataset}/{prompt.index}"


def reasons_of(error: str) -> list[str]:
    """Return one reason per failed reward, for counting failures. A reason is the first word of the
    reward's error, such as `timeout` or `crash`, or else `exception` (the function raised or
    returned an invalid value)."""
    words = [part.replace(":", " ").partition(" ")[0] for part in error.split("; ")]
    return [word if word.isalpha() and word.islower() else "exception" for word in words]


class AdaptiveTimeout:
    """Reward deadlines by prompt. Each rank has one object for the rewards that it requests. When a
    round ends, the rank gets the scoring times of the other ranks."""

    def __init__(self, least_s: float, most_s: float, factor: float) -> None:
        self._least_s, self._most_s, self._factor = least_s, most_s, factor
        self._reference_latency: dict[str, float] = {}

    def timeout_s(self, prompt: str) -> float:
        """Return the deadline in seconds for scoring the next response to this prompt."""
        anchor = self._reference_latency.get(prompt)
        if anchor is None:
            return self._most_s
        return min(max(self._least_s, self._factor * anchor), self._most_s)

    def scored(self, prompt: str, seconds: float, is_right: bool) -> None:
        """Record the scoring time of a response if `is_right` (False after a timeout)."""
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
        """Load the scoring times from a saved `state`."""
        self._reference_latency = dict(state["reference_latency"])

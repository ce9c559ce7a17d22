"""How long a reward may take. RollPacker, arXiv 2509.21009.

A wrong program that loops costs its whole deadline. What a right one needs is known as soon as one
answer to the prompt was right, so from then on others get a little more than that:

    T = min(max(T_min, factor * anchor), T_max)

with `anchor` the longest time of a right answer to the prompt, in all epochs; T_max before there is
one. The paper keeps anchors by test case and takes the factor 1.5, its code by prompt and 2.
"""

from collections.abc import Mapping
from typing import Any

from rlcore.records import Prompt


def key_of(prompt: Prompt) -> str:
    """The name of a prompt in all epochs and over restarts."""
    return f"{prompt.source}/{prompt.index}"


def reasons_of(error: str) -> list[str]:
    """What a failed score is counted by: the first word of each reward's error, such as `timeout`
    or `crash`, or `exception` for what a function raised or wrongly returned."""
    words = [part.replace(":", " ").partition(" ")[0] for part in error.split("; ")]
    return [word if word.isalpha() and word.islower() else "exception" for word in words]


class AdaptiveTimeout:
    """Deadlines by prompt. Every rank has one for the rewards that it asks for; what the others saw
    comes at the end of a round."""

    def __init__(self, least_s: float, most_s: float, factor: float) -> None:
        self._least_s, self._most_s, self._factor = least_s, most_s, factor
        self._anchors: dict[str, float] = {}

    def timeout_s(self, prompt: str) -> float:
        """For the next answer to this prompt."""
        anchor = self._anchors.get(prompt)
        if anchor is None:
            return self._most_s
        return min(max(self._least_s, self._factor * anchor), self._most_s)

    def scored(self, prompt: str, seconds: float, is_right: bool) -> None:
        """An answer was scored in this time; one that ran out of time is not right."""
        if is_right:
            self._anchors[prompt] = max(seconds, self._anchors.get(prompt, 0.0))

    def learn(self, anchors: Mapping[str, float]) -> None:
        """What right answers took elsewhere, by prompt."""
        for prompt, seconds in anchors.items():
            self.scored(prompt, seconds, is_right=True)

    def state(self) -> dict[str, Any]:
        """What `restore` needs; plain JSON."""
        return {"anchors": dict(self._anchors)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self._anchors = dict(state["anchors"])

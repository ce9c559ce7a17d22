"""Which prompts come next."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import structs

from rlcore.records import BASELINE, GroupId, Prompt, Sampling, Work
from rlcore.sched.roles import Kind, Round
from rlcore.sched.stop import All


class EpochOrder:
    """Prompts in the order of a resumable sampler; each issue of a prompt gets the next number, so
    ids never repeat within a run."""

    def __init__(
        self,
        next_prompts: Callable[[int], list[Prompt]],
        num_prompts: int,
        num_samples: int,
        greedy_baseline: bool = False,
    ) -> None:
        """`next_prompts(n)` gives the next n prompts of the epoch order. With `greedy_baseline`
        every prompt is answered once more with the most likely tokens, as group `b<id>`."""
        self._next_prompts = next_prompts
        self._num_prompts, self._num_samples = num_prompts, num_samples
        self._greedy_baseline = greedy_baseline
        self.issued = 0

    def next_round(self, sampling: Sampling) -> Round:
        """The work of one synchronous round: all of it is waited for."""
        return Round(work=self.issue(self._num_prompts, sampling), stop=All())

    def issue(self, count: int, sampling: Sampling) -> list[Work]:
        """The work of the next `count` prompts."""
        work = []
        for prompt in self._next_prompts(count):
            work.append(
                Work(
                    id=f"t{self.issued}",
                    prompt=prompt,
                    num_samples=self._num_samples,
                    sampling=sampling,
                )
            )
            if self._greedy_baseline:
                likely = structs.replace(sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
                work.append(
                    Work(
                        id=f"{BASELINE}t{self.issued}",
                        prompt=prompt,
                        num_samples=1,
                        sampling=likely,
                    )
                )
            self.issued += 1
        return work

    def next_kind(self) -> Kind:
        """All rounds are alike."""
        return "all"

    def settle(self, kept: Iterable[GroupId], dropped: Mapping[GroupId, str]) -> None:
        """The round is over: nothing of it comes back."""

    def metrics(self) -> dict[str, float]:
        """Of the step that was just settled."""
        return {}

    def state(self) -> dict[str, Any]:
        """What `restore` needs; plain JSON."""
        return {"issued": self.issued}

    def restore(self, state: Mapping[str, Any], num_rows: int | None) -> None:
        """Go on from `state`."""
        self.issued = state["issued"]

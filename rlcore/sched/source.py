"""Which prompts come next."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import structs

from rlcore.records import GroupId, Prompt, Sampling, Work, baseline_of, training_group
from rlcore.sched.roles import Kind, Round
from rlcore.sched.stop import All, First


class EpochOrder:
    """Prompts in the order of a resumable sampler; each issue of a prompt gets the next number, so
    ids never repeat within a run."""

    def __init__(
        self,
        next_prompts: Callable[[int], list[Prompt]],
        num_prompts: int,
        num_samples: int,
        greedy_baseline: bool = False,
        num_started: int = 0,
        group_size: int = 0,
    ) -> None:
        """`next_prompts(n)` gives the next n prompts of the epoch order. With `greedy_baseline`
        every prompt is answered once more with the most likely tokens, as group `b<id>`.

        Redundancy (ROLL Flash's `num_env_groups x group_size`): of `num_started` prompts the first
        `num_prompts` that are complete are taken, of `group_size` responses to each the first
        `num_samples`. What is late is dropped: its prompt is not asked again in this epoch."""
        self._next_prompts = next_prompts
        self._num_prompts, self._num_samples = num_prompts, num_samples
        self._greedy_baseline = greedy_baseline
        self._num_started = max(num_started, num_prompts)
        self._group_size = max(group_size, num_samples)
        self.issued = 0

    def next_round(self, sampling: Sampling) -> Round:
        """The work of one synchronous round: all of it is waited for, or the first groups."""
        work = self.issue(self._num_started, sampling)
        if self._num_started == self._num_prompts:
            return Round(work=work, stop=All())
        return Round(work=work, stop=First({"": self._num_prompts}, {w.id: "" for w in work}))

    def issue(self, count: int, sampling: Sampling) -> list[Work]:
        """The work of the next `count` prompts."""
        work = []
        for prompt in self._next_prompts(count):
            work.append(
                Work(
                    id=training_group(self.issued),
                    prompt=prompt,
                    num_samples=self._group_size,
                    wanted=self._num_samples if self._group_size > self._num_samples else 0,
                    sampling=sampling,
                )
            )
            if self._greedy_baseline:
                likely = structs.replace(sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
                work.append(
                    Work(
                        id=baseline_of(training_group(self.issued)),
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

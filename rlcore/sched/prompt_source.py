"""Issue prompts in epoch order, as work for the engines."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import structs

from rlcore.records import GroupId, Prompt, Sampling, Work, baseline_of, training_group
from rlcore.sched.roles import Kind, Round
from rlcore.sched.stop import StopAtAll, StopAtFirst


class EpochPrompts:
    """Prompt source that follows a resumable data order. Each prompt gets the next issue number, so
    group ids never repeat within a run."""

    def __init__(
        self,
        next_prompts: Callable[[int], list[Prompt]],
        num_prompts: int,
        num_samples: int,
        greedy_baseline: bool = False,
        num_started: int = 0,
        group_size: int = 0,
    ) -> None:
        """Make the source. `next_prompts(n)` returns the next n prompts of the epoch order. With
        `greedy_baseline`, every prompt also gets one greedy response, as group `b<id>`.

        Redundancy (ROLL Flash's `num_env_groups x group_size`): `num_started` prompts start with
        `group_size` responses each. The round uses the first `num_prompts` complete prompts and the
        first `num_samples` responses of each. Late responses are dropped. Late prompts are not
        sampled again in this epoch."""
        self._next_prompts = next_prompts
        self._num_prompts, self._num_samples = num_prompts, num_samples
        self._greedy_baseline = greedy_baseline
        self._num_started = max(num_started, num_prompts)
        self._group_size = max(group_size, num_samples)
        self.issued = 0

    def next_round(self, sampling: Sampling) -> Round:
        """Return the work of one synchronous round, which waits for all groups or, with redundancy,
        for the first groups to complete."""
        work = self.issue(self._num_started, sampling)
        if self._num_started == self._num_prompts:
            return Round(work=work, stop=StopAtAll())
        return Round(work=work, stop=StopAtFirst({"": self._num_prompts}, {w.id: "" for w in work}))

    def issue(self, count: int, sampling: Sampling) -> list[Work]:
        """Return the work of the next `count` prompts."""
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
        """Return "all": this source has only one kind of rounds."""
        return "all"

    def settle(self, kept: Iterable[GroupId], dropped: Mapping[GroupId, str]) -> None:
        """Do nothing: late and dropped groups are not sampled again."""

    def metrics(self) -> dict[str, float]:
        """Return no metrics: this source has none."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as plain JSON."""
        return {"issued": self.issued}

    def restore(self, state: Mapping[str, Any], num_rows: int | None) -> None:
        """Continue issue numbers from a saved `state`; the data order is resumed separately."""
        self.issued = state["issued"]

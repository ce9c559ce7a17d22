"""Issue prompts in epoch order, as work for the engines."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import structs

from rlcore.records import GroupId, Prompt, Sampling, Work, baseline_of, training_group
from rlcore.sched.roles import Kind, Round
from rlcore.sched.stop import StopAtAll, StopAtFirst
from rlcore.utils.errors import ConfigError


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
        max_replaced: int = 0,
    ) -> None:
        """Make the source. `next_prompts(n)` returns the next n prompts of the epoch order. With
        `greedy_baseline`, every prompt also gets one greedy response, as group `b<id>`.

        Redundancy (ROLL Flash's `num_env_groups x group_size`): `num_started` prompts start with
        `group_size` responses each. The round uses the first `num_prompts` complete prompts and the
        first `num_samples` responses of each. Late responses are dropped. Late prompts are not
        sampled again in this epoch.

        `max_replaced`: number of groups of equal rewards (DAPO) in a round that the next prompts
        replace; at the limit the round ends with fewer groups. 0: such groups count. Without
        redundancy the groups of a round do not depend on the order of completion."""
        self._next_prompts = next_prompts
        self._num_prompts, self._num_samples = num_prompts, num_samples
        self._greedy_baseline = greedy_baseline
        self._num_started = max(num_started, num_prompts)
        self._group_size = max(group_size, num_samples)
        self._max_replaced = self._may_replace = max_replaced
        self._sampling: Sampling | None = None
        self.issued = 0

    def next_round(self, sampling: Sampling) -> Round:
        """Return the work of one synchronous round, which waits for all groups. With redundancy or
        replacement, it waits for the first groups that are complete and count."""
        self._sampling, self._may_replace = sampling, self._max_replaced
        work = self.issue(self._num_started, sampling)
        if self._num_started == self._num_prompts and not self._max_replaced:
            return Round(work=work, stop=StopAtAll())
        more = self._more if self._max_replaced else None
        stop = StopAtFirst({"": self._num_prompts}, {w.id: "" for w in work}, more)
        return Round(work=work, stop=stop)

    def _more(self, _: str) -> Work | None:
        """Issue a prompt to replace a dropped group; return None if the round is at its limit."""
        if not self._may_replace:
            return None
        self._may_replace -= 1
        assert self._sampling is not None, "next_round sets it"
        (work,) = self.issue(1, self._sampling)
        return work

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
        """Return the number of groups that were replaced in the most recent round."""
        if not self._max_replaced:
            return {}
        return {"training/replaced_groups": float(self._max_replaced - self._may_replace)}

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as plain JSON."""
        return {"issued": self.issued}

    def restore(self, state: Mapping[str, Any], num_rows: int | None) -> None:
        """Continue issue numbers from a saved `state`; the data order is resumed separately.

        Raises:
            ConfigError: the state has prompts that `TailBatching` has drawn and not yet sampled.
        """
        waiting = [state.get(part, {}).values() for part in ("queue", "ahead")]
        if count := sum(len(keys) for queues in waiting for keys in queues):
            raise ConfigError(
                f"the checkpoint has {count} prompts that --schedule tail_batching has drawn and "
                "not finished; resume with that schedule, or start a new run from the checkpoint's "
                "weights"
            )
        self.issued = state["issued"]

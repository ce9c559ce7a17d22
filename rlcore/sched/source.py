"""Which prompts come next."""

from collections.abc import Callable
from typing import Any

from msgspec import structs

from rlcore.records import BASELINE, Prompt, Sampling, Work


class EpochOrder:
    """Prompts in the order of a resumable sampler; each issue of a prompt gets the next number, so
    ids never repeat within a run."""

    def __init__(
        self,
        next_rows: Callable[[int], list[Any]],
        num_samples: int,
        greedy_baseline: bool = False,
    ) -> None:
        """`next_rows(n)` gives the next n prompts of the epoch order. With `greedy_baseline` every
        prompt is answered once more with the most likely tokens, as group `b<id>`."""
        self._next_rows = next_rows
        self._num_samples = num_samples
        self._greedy_baseline = greedy_baseline
        self.issued = 0

    def next_round(self, num_prompts: int, sampling: Sampling) -> list[Work]:
        """The work of one synchronous round."""
        rows: list[Prompt] = self._next_rows(num_prompts)
        work = []
        for prompt in rows:
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

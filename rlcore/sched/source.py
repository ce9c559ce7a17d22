"""Which prompts come next."""

from collections.abc import Callable
from typing import Any

from rlcore.records import Prompt, Sampling, Work


class EpochOrder:
    """Prompts in the order of a resumable sampler; each issue of a prompt gets the next number, so
    ids never repeat within a run."""

    def __init__(self, next_rows: Callable[[int], list[Any]], num_samples: int) -> None:
        """`next_rows(n)` gives the next n prompts of the epoch order."""
        self._next_rows = next_rows
        self._num_samples = num_samples
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
            self.issued += 1
        return work

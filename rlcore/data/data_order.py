"""Order of the data rows: shuffled epochs, or increasing row numbers in an endless data set.

Own code instead of torchdata's StatefulDataLoader, because a single integer is enough to resume.
"""

from typing import Any

import numpy as np

from rlcore.utils.errors import ConfigError
from rlcore.utils.seed import derive


class ShuffledEpochs:
    """Row numbers in an order that depends only on (seed, epoch)."""

    def __init__(self, num_rows: int | None, seed: int, shuffle: bool = True) -> None:
        """Start at the first row. If `num_rows` is None, the data set is endless: rows are not
        shuffled, and the epoch is always 0."""
        if num_rows is not None and num_rows < 1:
            raise ValueError(f"a data set of {num_rows} rows: needs at least one")
        self._num_rows, self._seed, self._shuffle = num_rows, seed, shuffle
        self._position = 0
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def position(self) -> int:
        """Number of rows returned so far."""
        return self._position

    @property
    def epoch(self) -> int:
        """Epoch of the next row; 0 in an endless data set."""
        return self._position // self._num_rows if self._num_rows else 0

    def next(self, n: int) -> list[tuple[int, int]]:
        """Return the next `n` rows as (epoch, row number); the rows may span several epochs."""
        out = [self._at(p) for p in range(self._position, self._position + n)]
        self._position += n
        return out

    def state(self) -> dict[str, Any]:
        """Return the state that `restore` needs, as plain JSON."""
        return {
            "num_rows": self._num_rows,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "position": self._position,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the position in `state`. Raises ValueError if `state` has another number of
        rows, seed or shuffle setting."""
        names = {"num_rows": "rows in data.train", "seed": "run.seed", "shuffle": "data.shuffle"}
        for key, now in self.state().items():
            if key != "position" and state[key] != now:
                raise ConfigError(
                    f"{names[key]}: the checkpoint has {state[key]}, this run has {now}, so the "
                    "order of the prompts would change; use the same data and settings, or start "
                    "a new run from the checkpoint's weights"
                )
        self._position = state["position"]

    def _at(self, position: int) -> tuple[int, int]:
        if self._num_rows is None:
            return 0, position
        epoch, place = divmod(position, self._num_rows)
        if not self._shuffle:
            return epoch, place
        if self._order is None or self._order[0] != epoch:
            generator = np.random.Generator(np.random.PCG64(derive(self._seed, "epoch", epoch)))
            self._order = epoch, generator.permutation(self._num_rows)
        return epoch, int(self._order[1][place])

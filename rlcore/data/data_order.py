"""Order of the data rows: shuffled epochs, mixtures of data sets, or increasing row numbers in an
endless data set.

Own code instead of torchdata's StatefulDataLoader, because a single integer is enough to resume.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
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
        out = self.rows(self._position, n)
        self._position += n
        return out

    def rows(self, start: int, n: int) -> list[tuple[int, int]]:
        """Return the `n` rows from position `start` on, as `next` does; the position stays."""
        return [self._at(p) for p in range(start, start + n)]

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
        _refuse_changes(state, self.state())
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


class WeightedEpochs:
    """Row numbers of several data sets in given proportions, each data set in `ShuffledEpochs` of
    its own. Rows are numbered over all data sets, one after the other; a pair (epoch, row number)
    never repeats."""

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool = True
    ) -> None:
        """Start at the first row. `sizes`: number of rows of each data set; `weights`: proportions,
        of any sum."""
        self._sizes, self._seed, self._shuffle = list(sizes), seed, shuffle
        self._weights = [float(weight) for weight in weights]
        exact = [Fraction(str(weight)) for weight in self._weights]  # .1 is a tenth
        self._shares = [weight / sum(exact) for weight in exact]
        self._first_rows = list(accumulate(sizes, initial=0))
        self._sets = [
            ShuffledEpochs(size, derive(seed, "data set", i), shuffle)
            for i, size in enumerate(sizes)
        ]

    @property
    def position(self) -> int:
        """Number of rows returned so far."""
        return sum(rows.position for rows in self._sets)

    @property
    def epoch(self) -> int:
        """Epoch of the next row in its data set."""
        return self._sets[self._next_set()].epoch

    def next(self, n: int) -> list[tuple[int, int]]:
        """Return the next `n` rows as (epoch of the row's data set, row number)."""
        out = []
        for _ in range(n):
            i = self._next_set()
            ((epoch, row),) = self._sets[i].next(1)
            out.append((epoch, self._first_rows[i] + row))
        return out

    def state(self) -> dict[str, Any]:
        """Return the state that `restore` needs, as plain JSON."""
        return {
            "num_rows": sum(self._sizes),
            "sizes": self._sizes,
            "weights": self._weights,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "position": self.position,
            "positions": [rows.position for rows in self._sets],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the positions in `state`. Raises ValueError if `state` has other numbers of
        rows, weights, seed or shuffle setting."""
        _refuse_changes(state, self.state())
        for rows, position in zip(self._sets, state["positions"], strict=True):
            rows.restore(rows.state() | {"position": position})

    def _next_set(self) -> int:
        """Return the data set of the next row. After n rows, a data set of share p has given p * n
        rows, give or take one. Sets that have given more than that are passed over. Of the others,
        the one that falls behind first is next."""
        drawn, total = [rows.position for rows in self._sets], self.position + 1
        behind = [i for i, share in enumerate(self._shares) if drawn[i] < share * total]
        return min(behind, key=lambda i: (drawn[i] + 1) / self._shares[i])


_SETTINGS = {
    "num_rows": "rows in data.train",
    "sizes": "rows in each entry of data.train",
    "weights": "data.weights",
    "seed": "run.seed",
    "shuffle": "data.shuffle",
}
"""Parts of a state that must not change, and their names in errors."""


def _refuse_changes(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ConfigError if the settings of a saved state are not those of this run."""
    for key, name in _SETTINGS.items():
        if saved.get(key) != now.get(key):
            raise ConfigError(
                f"{name}: the checkpoint has {saved.get(key)}, this run has {now.get(key)}, so the "
                "order of the prompts would change; use the same data and settings, or start a new "
                "run from the checkpoint's weights"
            )

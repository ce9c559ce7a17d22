"""What a teacher returns, and the interface of a teacher."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TeacherRow:
    """One packed sequence that a teacher scores."""

    tokens: Tensor  # [n] int64, on the CPU
    mask: Tensor  # [n] bool: tokens that are scored; never the first


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """A teacher's scores of the m tokens in the mask of a row, on the CPU."""

    log_probs: Tensor  # [m] float32: log-prob of the token
    top_ids: Tensor  # [m, K] int64: likeliest tokens in its place; K is 0 unless asked for
    top_log_probs: Tensor  # [m, K] float32


class TokenScorer(Protocol):
    """A model that scores tokens which it has not sampled."""

    def loaded(self) -> AbstractContextManager[None]:
        """Hold the model's memory during the block."""

    def score(self, rows: Sequence[TeacherRow]) -> list[TeacherScores]:
        """Return the scores of each row; only inside `loaded`."""

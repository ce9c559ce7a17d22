"""Drafting for the torch engine, from each row's own text and from earlier responses.

One call drafts for all rows of a batch. `rollout/histospec.py` has the index of earlier responses.
A draft is a guess of the next tokens. The engine samples every drafted position as without a draft,
with the random number of this position. It accepts the draft tokens before the first that differs
from the sampled token. So the output is that of plain decoding for every draft.

Letters: N rows, W longest draft.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rlcore.config.schema import DraftConfig
from rlcore.ops.suffix import Forest
from rlcore.records import History
from rlcore.rollout.histospec import Draft, Index
from rlcore.sched.histospec import DraftGate

KNEE = 1 << 20
"""Constant `knee` of the forest, which limits drafts to knee // running - 1 tokens. Callers choose
`running` so that this is the limit of the gate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftSettings:
    """Settings of a drafter; `DraftConfig` documents each field."""

    max_length: int = DraftConfig.max_length
    initial_length: int = DraftConfig.initial_length
    length_growth: int = DraftConfig.length_growth
    min_match: int = DraftConfig.min_match
    max_match: int = DraftConfig.max_match
    max_spec_factor: float = DraftConfig.max_spec_factor
    min_token_prob: float = DraftConfig.min_token_prob
    threads: int = 2
    """Number of threads that build the index."""
    adaptive: bool = DraftConfig.adaptive
    wait: bool = False
    """If true, wait until each index is built, so that drafts do not depend on timing. Requires
    `adaptive` to be false."""

    def forest_options(self) -> dict[str, Any]:
        """Return these settings as options of `Forest`."""
        return dict(
            limit=self.max_match,
            min_match=self.min_match,
            live_match=self.min_match,
            factor=self.max_spec_factor,
            min_prob=self.min_token_prob,
            max_window=self.max_length,
            start_window=min(self.initial_length, self.max_length),
            growth=self.length_growth,
            knee=KNEE if self.adaptive else 0,
        )


class DraftRow(Protocol):
    """A running request."""

    prompt: np.ndarray  # [P] int32
    prompt_key: int


class Drafter:
    """Drafter of one engine. A seat is the fixed number of a running request."""

    def __init__(self, kind: Draft, settings: DraftSettings, num_seats: int) -> None:
        s = settings
        self.gate = DraftGate(window=s.max_length, switches=s.adaptive)
        self._forest = Forest(**s.forest_options(), threads=s.threads)
        self._index: Index | None = None
        if kind != "ngram":
            self._index = Index(self._forest, rewards=kind == "history_reward", wait=s.wait)
        self._handle = np.full(num_seats, -1)
        self._fed = np.zeros(num_seats, np.int64)  # number of response tokens given to the forest
        self._accepted = np.zeros(num_seats, np.int32)  # draft tokens accepted in the last step
        self._had_histories = False

    def remember(self, histories: Sequence[History], wanted: Collection[int]) -> None:
        """Index `histories`. Remove earlier histories of prompts that are not in `wanted`."""
        if self._index is not None and histories:
            self._index.remember(histories, wanted)

    def propose(
        self,
        seats: np.ndarray,
        rows: Sequence[DraftRow],
        tokens: np.ndarray,
        counts: np.ndarray,
        longest: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return drafts [N, W] int32, padded with -1, and their lengths [N] int32.

        Args:
            longest: maximum draft length, from the gate.
            seats: [N] seats of the batch's requests.
            rows: the batch's requests, in the order of `seats`.
            tokens, counts: response tokens and response lengths, by seat.
        """
        if self._index is not None and self._index.take_news():
            self._close(np.flatnonzero(self._handle >= 0))  # requests reopen with the new index
            if not self._had_histories:
                self._had_histories = True
                self.gate.renew()
        new = np.flatnonzero(self._handle[seats] < 0)
        if len(new):
            self._open(seats[new], [rows[i] for i in new.tolist()])
        fed, count = self._fed[seats], counts[seats]
        sizes = count - fed
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        row = np.repeat(np.arange(len(seats)), sizes)
        column = np.arange(offsets[-1]) - offsets[row] + fed[row]
        text = np.ascontiguousarray(tokens[seats[row], column], np.int32)
        drafts, lengths = self._forest.step(
            self._handle[seats],
            self._accepted[seats],
            text,
            offsets,
            running=KNEE // (longest + 1),
        )
        self._fed[seats] = count
        self._accepted[seats] = 0
        return drafts, lengths

    def accepted(self, seats: np.ndarray, counts: np.ndarray) -> None:
        """Record how many tokens of the last drafts were accepted: `counts` [N] for `seats` [N]."""
        self._accepted[seats] = counts

    def leave(self, seats: np.ndarray) -> None:
        """Free the seats (fixed numbers) of requests that no longer run."""
        self._close(seats[self._handle[seats] >= 0])

    def close(self) -> None:
        """Stop the thread that builds the index."""
        if self._index is not None:
            self._index.close()

    def _open(self, seats: np.ndarray, rows: Sequence[DraftRow]) -> None:
        handles = self._forest.open(np.array([row.prompt_key for row in rows], np.int64))
        self._forest.advance(
            handles,
            np.concatenate([row.prompt for row in rows]),
            np.cumsum([0, *(len(row.prompt) for row in rows)], dtype=np.int64),
        )
        self._handle[seats], self._fed[seats], self._accepted[seats] = handles, 0, 0

    def _close(self, seats: np.ndarray) -> None:
        if len(seats):
            self._forest.close(self._handle[seats])
            self._handle[seats] = -1

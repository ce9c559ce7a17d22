"""Adapter between `torch_engine/drafter.py` and the requests of SGLang's scheduler.

`Drafts` gives every decoded request a seat (a fixed number), reads its new tokens, and counts
drafted and accepted tokens. It depends on SGLang only through the field names of a request.

Letters: N requests, W width of a step (the last token of a request and its draft).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlcore.records import History
from rlcore.rollout.histospec import Draft
from rlcore.rollout.sglang_engine.counters import Counters
from rlcore.rollout.sglang_engine.names import PROMPT_KEY
from rlcore.rollout.torch_engine.drafter import Drafter, DraftSettings

_NEVER = 1 << 30
_NEAR = 2.0
"""Limit as a multiple of a step's duration. If the ends of two steps are closer than this limit,
the pause between the two steps counts as part of the second step."""


@dataclass(slots=True)
class _Row:
    """A running request."""

    prompt: np.ndarray  # [P] int32; a resumed request's response tokens are included
    prompt_key: int
    seat: int


class Drafts:
    """Drafter of an SGLang engine, on its first tensor-parallel rank."""

    def __init__(
        self,
        kind: Draft,
        settings: DraftSettings,
        *,
        num_seats: int,
        stream_interval: int,
        counters: Counters,
    ) -> None:
        self._drafter = Drafter(kind, settings, num_seats)
        self._counters = counters
        self._interval = stream_interval
        self._rows: dict[str, _Row] = {}
        self._free = list(range(num_seats - 1, -1, -1))
        self._tokens = np.zeros((num_seats, 64), np.int32)
        self._counts = np.zeros(num_seats, np.int64)
        self._length = 0  # maximum draft length of this step
        self._seats = np.zeros(0, np.int64)
        self._sizes = np.zeros(0, np.int64)
        self._begin = self._end = 0.0

    def remember(self, histories: Sequence[History], wanted: Sequence[int]) -> None:
        """Index `histories`. Remove earlier histories of prompts that are not in `wanted`."""
        self._drafter.remember(histories, set(wanted))

    def propose(self, reqs: Sequence[Any], longest: int) -> tuple[np.ndarray, int]:
        """Return drafts [N, longest] int64 for these requests, padded with -1, and their maximum
        length in this step."""
        self._begin = time.monotonic()
        out = np.full((len(reqs), longest), -1, np.int64)
        self._length = self._drafter.gate.length(len(reqs))
        if not self._length:
            return out, 0
        self._seat(reqs)
        rows = [self._rows[req.rid] for req in reqs]
        drafts, sizes = self._drafter.propose(
            self._seats, rows, self._tokens, self._counts, self._length
        )
        # The draft and one more token must fit into the response.
        room = [req.sampling_params.max_new_tokens - len(req.output_ids) - 1 for req in reqs]
        self._sizes = np.minimum(sizes, np.minimum(room, longest)).astype(np.int64)
        width = min(longest, drafts.shape[1])
        kept = np.arange(width) < self._sizes[:, None]
        out[:, :width] = np.where(kept, drafts[:, :width], -1)
        self._counters.add(draft_s=time.monotonic() - self._begin)
        return out, self._length

    def verified(self, reqs: Sequence[Any], tokens: np.ndarray, taken: np.ndarray) -> None:
        """Record the result of the step after the last `propose`. `tokens` [N, W]: sampled tokens.
        `taken` [N]: number of accepted tokens per request, counted from the first."""
        gained = taken.copy()
        for i, req in enumerate(reqs):
            stops = req.sampling_params.stop_token_ids or ()
            for j in range(taken[i]):
                if int(tokens[i, j]) in stops:  # a stop token ends the response
                    gained[i] = j + 1
                    break
            self._stream(req, int(gained[i]))
        running, num, now = len(reqs), int(gained.sum()), time.monotonic()
        step_s = now - self._begin
        near = now - self._end < _NEAR * step_s
        self._drafter.gate.note(
            running,
            length=self._length,
            gained=num,
            seconds=now - self._end if near else step_s,  # includes SGLang's work between steps
        )
        self._end = now
        self._counters.step(running, num, self._length > 0)
        if not self._length:
            return
        accepted = taken - 1
        self._drafter.accepted(self._seats, accepted)
        self._counters.add(
            verify_steps=1,
            verify_rows=running,
            verify_inputs=tokens.size,
            verify_tokens=num,
            drafted_tokens=int(self._sizes.sum()),
            accepted_tokens=int(np.minimum(gained, accepted).sum()),
            verify_s=step_s,
        )

    def _stream(self, req: Any, gained: int) -> None:
        """Make SGLang stream the request's tokens in this step if the response's length passes a
        multiple of the stream interval. SGLang itself streams only at a multiple plus 1, a length
        that a step of several tokens may skip."""
        before = len(req.output_ids) - 1
        crossed = (before + gained) // self._interval > before // self._interval
        req.sampling_params.stream_interval = 1 if crossed else _NEVER

    def _seat(self, reqs: Sequence[Any]) -> None:
        """Give new requests a seat (table index), free unused seats, and store new tokens."""
        here = {req.rid for req in reqs}
        gone = [rid for rid in self._rows if rid not in here]
        if gone:
            seats = [self._rows.pop(rid).seat for rid in gone]
            self._drafter.leave(np.array(seats))
            self._free += seats
        for req in reqs:
            row = self._rows.get(req.rid)
            if row is None:
                row = self._rows[req.rid] = _Row(
                    prompt=np.array(req.origin_input_ids, np.int32),
                    prompt_key=req.sampling_params.custom_params[PROMPT_KEY],
                    seat=self._free.pop(),
                )
                self._counts[row.seat] = 0
            have, count = int(self._counts[row.seat]), len(req.output_ids)
            if count > self._tokens.shape[1]:
                more = max(count, 2 * self._tokens.shape[1]) - self._tokens.shape[1]
                self._tokens = np.pad(self._tokens, ((0, 0), (0, more)))
            self._tokens[row.seat, have:count] = req.output_ids[have:count]
            self._counts[row.seat] = count
        self._seats = np.fromiter((self._rows[r.rid].seat for r in reqs), np.int64, len(reqs))

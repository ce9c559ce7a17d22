"""Adapter between drafting and the requests of SGLang's scheduler.

`HostDrafts` matches on the host, `device_drafts.py` on the engine's device. Both choose the draft
length of a step, and count drafted and accepted tokens when the scheduler processes the step's
result. They depend on SGLang only through the field names of a batch and its requests.

Letters: N requests, W width of a step (the last token of a request and its draft), L maximum draft
length of a step.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.records import History
from rlcore.rollout.histospec import Draft
from rlcore.rollout.sglang_engine.counters import Counters
from rlcore.rollout.sglang_engine.names import PROMPT_KEY
from rlcore.rollout.torch_engine.drafter import Drafter, DraftSettings
from rlcore.sched.histospec import DraftGate

_NEVER = 1 << 30
_NEAR = 2.0
"""Limit as a multiple of a step's duration. If the ends of two steps are closer than this limit,
the pause between the two steps counts as part of the second step."""


@dataclass(slots=True)
class Step:
    """A decode step whose result the scheduler has not processed yet."""

    begin: float
    length: int
    """Maximum draft length; 0: no drafts."""
    drafted: Tensor
    """Number of drafted tokens, on the host; valid once the step has ended."""


class Drafts(ABC):
    """Base of the drafters of an SGLang engine, on its first tensor-parallel rank."""

    def __init__(self, gate: DraftGate, *, stream_interval: int, counters: Counters) -> None:
        self._gate = gate
        self._counters = counters
        self._interval = stream_interval
        self._steps: deque[Step] = deque()
        self._end = 0.0

    @abstractmethod
    def remember(self, histories: Sequence[History], wanted: Sequence[int]) -> None:
        """Index `histories`. Remove earlier histories of prompts that are not in `wanted`."""

    @abstractmethod
    def propose(self, batch: Any) -> Tensor:
        """Return drafts [N, L] int32 for a decode batch, padded with -1."""

    @abstractmethod
    def prefill(self, batch: Any) -> None:
        """Forget the requests of a batch, which is prefilled, some of them again. The next
        `propose` reads their tokens from the start."""

    @abstractmethod
    def close(self) -> None:
        """Stop the thread that indexes histories."""

    def verified(self, reqs: Sequence[Any], tokens: np.ndarray, taken: np.ndarray) -> None:
        """Record the result of the oldest step that was proposed, before SGLang processes it.
        `tokens` [N, W]: sampled tokens. `taken` [N]: number of accepted tokens per request, counted
        from the first."""
        step = self._steps.popleft()
        gained = np.zeros_like(taken)
        for i, req in enumerate(reqs):
            # With the overlapped scheduler, a request that ends runs for one more step.
            if req.finished() or req.is_retracted:
                continue
            gained[i] = taken[i]
            stops = req.sampling_params.stop_token_ids or ()
            for j in range(taken[i]):
                if int(tokens[i, j]) in stops:  # a stop token ends the response
                    gained[i] = j + 1
                    break
            self._stream(req, int(gained[i]))
        running, num, now = len(reqs), int(gained.sum()), time.monotonic()
        step_s = now - step.begin
        near = now - self._end < _NEAR * step_s
        seconds = now - self._end if near else step_s  # includes SGLang's work between steps
        self._gate.note(running, length=step.length, gained=num, seconds=seconds)
        self._end = now
        self._counters.step(running, num, step.length > 0)
        if not step.length:
            return
        self._accepted(taken - 1)
        self._counters.add(
            verify_steps=1,
            verify_rows=running,
            verify_inputs=tokens.size,
            verify_tokens=num,
            drafted_tokens=int(step.drafted),
            accepted_tokens=int(np.minimum(gained, taken - 1).sum()),
            verify_s=min(seconds, step_s),  # overlapped steps begin before the last one ends
        )

    @abstractmethod
    def _accepted(self, counts: np.ndarray) -> None:
        """Record the number of accepted draft tokens [N] of the step that has just ended."""

    def _stream(self, req: Any, gained: int) -> None:
        """Make SGLang stream the request's tokens in this step if the response's length passes a
        multiple of the stream interval. SGLang itself streams only at a multiple plus 1, a length
        that a step of several tokens may skip."""
        before = len(req.output_ids) - 1
        crossed = (before + gained) // self._interval > before // self._interval
        req.sampling_params.stream_interval = 1 if crossed else _NEVER


@dataclass(slots=True)
class _Row:
    """A running request."""

    prompt: np.ndarray  # [P] int32; a resumed request's response tokens are included
    prompt_key: int
    seat: int


class HostDrafts(Drafts):
    """Drafts from a forest on the host. Gives every decoded request a seat (a fixed number) and
    reads its new tokens, so every result must be processed before the next `propose`."""

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
        super().__init__(self._drafter.gate, stream_interval=stream_interval, counters=counters)
        self._rows: dict[str, _Row] = {}
        self._free = list(range(num_seats - 1, -1, -1))
        self._tokens = np.zeros((num_seats, 64), np.int32)
        self._counts = np.zeros(num_seats, np.int64)
        self._seats = np.zeros(0, np.int64)

    def remember(self, histories: Sequence[History], wanted: Sequence[int]) -> None:
        """Index `histories`. Remove earlier histories of prompts that are not in `wanted`."""
        self._drafter.remember(histories, set(wanted))

    def propose(self, batch: Any) -> Tensor:
        """Return drafts [N, L] int32 for a decode batch, padded with -1."""
        begin, reqs = time.monotonic(), batch.reqs
        length = self._gate.length(len(reqs))
        out = np.full((len(reqs), length), -1, np.int32)
        if length:
            self._seat(reqs)
            rows = [self._rows[req.rid] for req in reqs]
            drafts, sizes = self._drafter.propose(
                self._seats, rows, self._tokens, self._counts, length
            )
            # The draft and one more token must fit into the response.
            room = [req.sampling_params.max_new_tokens - len(req.output_ids) - 1 for req in reqs]
            kept = np.arange(length) < np.minimum(sizes, room)[:, None]
            out[:] = np.where(kept, drafts[:, :length], -1)
            self._counters.add(draft_s=time.monotonic() - begin)
        self._steps.append(Step(begin, length, torch.tensor(int((out >= 0).sum()))))
        return torch.from_numpy(out)

    def prefill(self, batch: Any) -> None:
        """Forget the requests of a batch, which is prefilled, some of them again. The next
        `propose` reads their tokens from the start."""
        self._leave([req.rid for req in batch.reqs if req.rid in self._rows])

    def close(self) -> None:
        """Stop the thread that indexes histories."""
        self._drafter.close()

    def _accepted(self, counts: np.ndarray) -> None:
        self._drafter.accepted(self._seats, counts)

    def _leave(self, rids: Sequence[str]) -> None:
        if rids:
            seats = [self._rows.pop(rid).seat for rid in rids]
            self._drafter.leave(np.array(seats))
            self._free += seats

    def _seat(self, reqs: Sequence[Any]) -> None:
        """Give new requests a seat (table index), free unused seats, and store new tokens."""
        here = {req.rid for req in reqs}
        self._leave([rid for rid in self._rows if rid not in here])
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

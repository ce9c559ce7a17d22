"""Drafts from a forest in the memory of the engine's device, without a wait for the device.

The matcher reads the tokens of the last step where SGLang left them, on the device, and its drafts
stay there. So the next step is launched while the last one runs, and the host knows its result one
step late. The host opens and closes requests, uploads histories and chooses the draft length.

Letters: N requests, W width of a step (the last token of a request and its draft), L maximum draft
length of a step, S rows of SGLang's table of requests.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.ops.suffix import Forest
from rlcore.ops.suffix_device import DeviceForest
from rlcore.records import History
from rlcore.rollout.histospec import Draft, Index
from rlcore.rollout.sglang_engine.counters import Counters
from rlcore.rollout.sglang_engine.drafts import Drafts, Step
from rlcore.rollout.sglang_engine.names import PROMPT_KEY
from rlcore.rollout.torch_engine.drafter import KNEE, DraftSettings
from rlcore.sched.histospec import DraftGate


class DeviceDrafts(Drafts):
    """Drafts that are those of `HostDrafts` for the same steps, token by token."""

    def __init__(
        self,
        kind: Draft,
        settings: DraftSettings,
        *,
        num_seats: int,
        max_tokens: int,
        device: str | torch.device,
        stream_interval: int,
        counters: Counters,
    ) -> None:
        """`max_tokens`: maximum number of tokens of a request, with its prompt."""
        gate = DraftGate(window=settings.max_length, switches=settings.adaptive)
        super().__init__(gate, stream_interval=stream_interval, counters=counters)
        options = settings.forest_options()
        self._forest = DeviceForest(device, requests=num_seats, stream=max_tokens, **options)
        self._index: Index | None = None
        if kind != "ngram":
            self._index = Index(
                Forest(**options, threads=settings.threads),
                rewards=kind == "history_reward",
                wait=settings.wait,
                upload=self._forest.upload,
            )
        self._had_histories = False
        self._open: dict[str, tuple[int, int]] = {}
        """Handle and prompt key of each open request."""
        self._prefilled: dict[str, int] = {}
        """Number of prefilled tokens of each request that has not decoded since."""
        self._table: Tensor | None = None
        """[S, 2] int64, on the device: handle, and maximum number of tokens with the prompt."""

    def remember(self, histories: Sequence[History], wanted: Sequence[int]) -> None:
        """Index `histories`. Remove earlier histories of prompts that are not in `wanted`."""
        if self._index is not None and histories:
            self._index.remember(histories, set(wanted))

    def propose(self, batch: Any) -> Tensor:
        """Return drafts [N, L] int32 for a decode batch, padded with -1, on the device.
        `batch.spec_info` has the tokens that the last step accepted."""
        begin, count = time.monotonic(), len(batch.reqs)
        length = self._gate.length(count)
        self._follow(batch)
        mine = self._rows(batch)[batch.req_pool_indices]
        handles, new = mine[:, 0].contiguous(), batch.spec_info
        tokens, counts = new.accept_tokens.view(count, -1), new.accept_lens
        if not length:
            self._forest.advance(handles, counts - 1, tokens, counts=counts)
            self._steps.append(Step(begin, 0, torch.zeros(())))
            return tokens[:, :0]
        # A renewed request has not drafted from its new histories yet.
        accepted = None if self._renew() else counts - 1
        drafts, _ = self._forest.step(
            handles, accepted, tokens, counts=counts, running=KNEE // (length + 1)
        )
        # The draft and one more token must fit into the response.
        room = mine[:, 1] - batch.seq_lens - 2
        kept = torch.arange(length, device=room.device) < room[:, None]
        drafts = torch.where(kept, drafts[:, :length], -1)
        self._steps.append(Step(begin, length, _to_host((drafts >= 0).sum())))
        self._counters.add(draft_s=time.monotonic() - begin)
        return drafts

    def prefill(self, batch: Any) -> None:
        """Forget the requests of a batch, which is prefilled, some of them again. The next
        `propose` reads their tokens from the start."""
        self._leave([req.rid for req in batch.reqs if req.rid in self._open])
        rids = (req.rid for req in batch.reqs)
        self._prefilled.update(zip(rids, batch.seq_lens_cpu.tolist(), strict=True))

    def close(self) -> None:
        """Stop the thread that indexes histories."""
        if self._index is not None:
            self._index.close()

    def _accepted(self, counts: np.ndarray) -> None:
        """Do nothing: the forest has read the counts on the device."""

    def _rows(self, batch: Any) -> Tensor:
        if self._table is None:
            size = len(batch.req_to_token_pool.req_to_token)
            self._table = torch.full((size, 2), -1, dtype=torch.int64, device=self._forest.device)
        return self._table

    def _renew(self) -> bool:
        """Give all open requests the newest histories. Return whether there were any."""
        if self._index is None or not self._index.take_news():
            return False
        self._forest.swap()
        rows = np.array(list(self._open.values()), np.int64).reshape(-1, 2)
        self._forest.renew(*np.ascontiguousarray(rows.T))
        if not self._had_histories:
            self._had_histories = True
            self._gate.renew()
        return True

    def _leave(self, rids: Sequence[str]) -> None:
        if rids:
            self._forest.close(np.array([self._open.pop(rid)[0] for rid in rids], np.int64))

    def _follow(self, batch: Any) -> None:
        """Close requests that no longer run, and open new ones. A new request begins with the
        tokens of its prefill. `batch.spec_info` has the one that followed."""
        here = {req.rid for req in batch.reqs}
        self._leave([rid for rid in self._open if rid not in here])
        new = [i for i, req in enumerate(batch.reqs) if req.rid not in self._open]
        if not new:
            return
        reqs = [batch.reqs[i] for i in new]
        texts = [_tokens(req, self._prefilled[req.rid]) for req in reqs]
        self._prefilled.clear()
        keys = [req.sampling_params.custom_params[PROMPT_KEY] for req in reqs]
        handles = self._forest.open(np.array(keys, np.int64))
        self._open.update(
            (req.rid, pair)
            for req, pair in zip(reqs, zip(handles.tolist(), keys, strict=True), strict=True)
        )
        most = [len(r.origin_input_ids) + r.sampling_params.max_new_tokens for r in reqs]
        rows = self._forest.put(np.stack((handles, np.array(most, np.int64)), 1))
        self._rows(batch)[self._forest.put(batch.req_pool_indices_cpu[new].numpy())] = rows
        offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
        self._forest.advance(
            rows[:, 0].contiguous(),
            None,
            self._forest.put(np.concatenate(texts)),
            self._forest.put(offsets),
        )


def _tokens(req: Any, count: int) -> np.ndarray:
    """Return the first `count` tokens of a request, its prompt first."""
    parts = [np.asarray(x, np.int32) for x in (req.origin_input_ids, req.output_ids)]
    found = np.concatenate(parts)[:count]
    assert len(found) == count, f"{req.rid}: {len(found)} tokens, but {count} were prefilled"
    return found


def _to_host(number: Tensor) -> Tensor:
    """Copy to pinned memory without waiting for the device."""
    if number.device.type == "cpu":
        return number
    host = torch.empty(number.shape, dtype=number.dtype, pin_memory=True)
    return host.copy_(number, non_blocking=True)

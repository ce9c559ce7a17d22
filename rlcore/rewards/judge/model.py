"""Model of the judge: probabilities of verdict tokens after a prefill, or a few greedy tokens.

The forward pass is `hf.model.CausalLM`, as in the torch engine; its layers come from a
`LayerPipeline`. Before each batch, the number of resident layers is recomputed from free memory. It
falls at once, but rises only after several batches with room, so that small changes of free memory
move no layers.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from rlcore.hf import residency
from rlcore.hf.cache import Cache
from rlcore.hf.config import HFConfig
from rlcore.hf.layer_pipeline import Carrier, FileCarrier, LayerPipeline, OnRead, PinnedCarrier
from rlcore.hf.model import CausalLM, ForwardInputs
from rlcore.hf.names import EMBED, HEAD, NORM, expected
from rlcore.hf.residency import num_resident, sizes_of, work_bytes
from rlcore.hf.weights import WeightReader
from rlcore.rewards.judge.residency import STEADY

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(slots=True)
class BatchStats:
    """Statistics of the latest batch."""

    rows: int = 0
    prefill_tokens: int = 0
    """Number of prompt tokens, without padding."""
    prefill_s: float = 0.0
    streamed_layers: int = 0


class JudgeModel:
    """Causal language model from a Hugging Face folder. All calls come from one thread."""

    def __init__(
        self,
        folder: str | Path,
        *,
        dtype: str = "bfloat16",
        device: torch.device,
        resident_ratio: float = 1.0,
        memory_bytes: float = 0.0,
        overlap: bool = True,
        on_read: OnRead | None = None,
        free: Callable[[], float] | None = None,
    ) -> None:
        """Load the weights that always stay on the device.

        `memory_bytes` is the judge's limit on the device; 0: all free memory. In tests, the
        function `free` returns the free bytes. Raises ValueError if the folder has no supported
        model.
        """
        self.hf = HFConfig.from_folder(folder, "--reward.model")
        self.dtype, self.device = _DTYPES[dtype], device
        self._ratio, self._memory = resident_ratio, memory_bytes
        self._free = free or self._free_here
        self.is_small = False
        """Whether all layers are streamed until `may_grow` is called."""
        reader = WeightReader(folder)
        reader.check(expected(self.hf))
        carrier: Carrier
        if device.type == "cuda":
            carrier = PinnedCarrier(reader, device, on_read)
        else:
            carrier = FileCarrier(reader, on_read)
        self.layers = LayerPipeline(self.hf, self.dtype, device, carrier, overlap)
        self._model = CausalLM(
            self.hf, dtype=self.dtype, device=device, max_tokens=self.hf.max_positions
        )
        self._model.allocate(self.layers)
        for name in (EMBED, NORM, HEAD):
            if name in self._model.views:
                self._model.load(name, reader.get(name))
        self._sizes = sizes_of(self.hf, self.dtype)
        self._fits: deque[int] = deque(maxlen=STEADY)
        """Numbers of resident layers that recent batches had room for."""
        self.last = BatchStats()

    def load_layers(self, work: int) -> None:
        """Load all layers: as many as fit on the device beside a batch that takes `work` bytes, the
        others into host memory. Without this call, the first batch loads them."""
        self._decide(work)
        self.layers.load()

    @torch.no_grad()
    def probabilities(self, rows: Sequence[Sequence[int]], ids: Sequence[int]) -> Tensor:
        """Return the probability of each token in `ids` as the next token of each row: [rows, ids]
        float32 on the CPU. The softmax is over the whole vocabulary. Only the KV of
        the current layer is kept, because no token is generated."""
        longest = max(map(len, rows))
        self._decide(work_bytes(self.hf, self.dtype, len(rows), longest))
        logits = self._prefill(rows, self._model.batch_cache(len(rows), longest, shared=True))
        return logits.softmax(-1)[:, torch.as_tensor(ids, device=self.device)].float().cpu()

    @torch.no_grad()
    def generate(
        self, rows: Sequence[Sequence[int]], max_tokens: int, stop_ids: Collection[int]
    ) -> list[list[int]]:
        """Generate tokens greedily for each row, up to `max_tokens` or a stop token, which is not
        returned. Streamed layers are copied to the device once per token."""
        count, longest = len(rows), max(map(len, rows))
        self._decide(work_bytes(self.hf, self.dtype, count, longest, max_tokens))
        cache = self._model.batch_cache(count, longest + max_tokens, shared=False)
        token = self._prefill(rows, cache).argmax(-1)  # [B]
        found: list[list[int]] = [[] for _ in rows]
        alive = set(range(count))
        ends = torch.tensor([len(row) for row in rows], device=self.device)
        step = ForwardInputs(
            token[:, None], ends[:, None].clone(), 0, [(0, count, longest + 1)], False
        )
        for number in range(max_tokens):
            for row, value in enumerate(token.tolist()):
                if row in alive and value in stop_ids:
                    alive.discard(row)
                elif row in alive:
                    found[row].append(value)
            if not alive or number + 1 == max_tokens:
                break
            if number:
                step.advance(token[:, None])
            hidden = self._model.forward(step, cache)
            token = self._model.logits(hidden[:, 0]).argmax(-1)
        return found

    def close(self) -> None:
        """Release all memory."""
        self.layers.close()
        self._model.free()

    def rest(self) -> None:
        """Return cached device memory to other processes while the judge is idle."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def shrink(self) -> None:
        """Stream all layers, after a batch ran out of memory that another process had taken. No
        layer becomes resident until `may_grow` is called, however much memory seems free."""
        self.is_small = True
        self._fits.append(0)
        self.layers.set_resident(0)

    def may_grow(self) -> None:
        """Allow layers to become resident again, after several batches with room."""
        self.is_small = False

    def _prefill(self, rows: Sequence[Sequence[int]], cache: Cache) -> Tensor:
        """Return the logits after each row's last token, [rows, vocab] float32."""
        begin = time.monotonic()
        longest = max(map(len, rows))
        padded = [[*row, *[0] * (longest - len(row))] for row in rows]
        hidden = self._model.prefill(torch.tensor(padded, device=self.device), cache)
        last = torch.tensor([len(row) - 1 for row in rows], device=self.device)
        hidden = hidden[torch.arange(len(rows), device=self.device), last]
        logits = self._model.logits(hidden)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.last = BatchStats(
            rows=len(rows),
            prefill_tokens=sum(map(len, rows)),
            prefill_s=time.monotonic() - begin,
            streamed_layers=self.layers.num_streamed,
        )
        return logits

    def _decide(self, work: int) -> None:
        """Keep as many layers resident as fit in memory beside a batch that takes `work` bytes, now
        and in the recent batches."""
        if self.is_small:
            return
        held = self.layers.num_buffers * self._sizes.layer
        room = self._free() + held
        if self._memory:
            room = min(room, self._memory - self._sizes.outer)
        self._fits.append(num_resident(self._sizes, self._ratio, room - work))
        self.layers.set_resident(min(self._fits))

    def _free_here(self) -> float:
        return residency.free_on(self.device, lambda: psutil.virtual_memory().available)

"""Teacher from a Hugging Face folder: a forward pass whose layers are streamed if they do not fit.

Every rank scores its own samples with the whole model, so a teacher needs no parallel layout and
may be larger than a device. Outside `loaded` the model takes no memory of the device. Inside, as
many layers as fit beside the learner stay there, and the others are copied from host memory while
earlier layers compute (`hf/layer_pipeline.py`).

Log-probs are of logits / temperature over the policy's vocabulary. Models of one family may have
different numbers of padding columns, which are left out.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from rlcore.hf import residency
from rlcore.hf.config import HFConfig
from rlcore.hf.layer_pipeline import Carrier, FileCarrier, LayerPipeline, PinnedCarrier
from rlcore.hf.model import CausalLM
from rlcore.hf.names import EMBED, HEAD, NORM, expected
from rlcore.hf.weights import WeightReader
from rlcore.ops import head
from rlcore.teacher.scores import TeacherRow, TeacherScores

CHUNK_TOKENS = 1024
"""Number of tokens whose logits exist at a time."""


class TeacherModel:
    """`TokenScorer` that computes on this rank's device. All calls come from one thread."""

    def __init__(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        vocab_size: int,
        temperature: float,
        top_k: int,
        batch_tokens: int,
        resident_ratio: float = 1.0,
        free: Callable[[], float] | None = None,
    ) -> None:
        """Open the folder; weights are loaded later.

        Args:
            vocab_size: size of the policy's vocabulary.
            top_k: number of likeliest tokens that are returned; 0: none.
            batch_tokens: maximum number of tokens of a forward pass, padding included, unless one
                row is longer.
            resident_ratio: maximum share of the layers that stay on the device during `loaded`.
            free: returns the free bytes of the device, in tests.

        Raises:
            ConfigError: the folder has no supported model.
        """
        self.hf = HFConfig.from_folder(folder, "--teacher.models")
        self._dtype, self._device = dtype, device
        self._vocab_size = min(vocab_size, self.hf.vocab_size)
        self._temperature, self._top_k = temperature, top_k
        self._batch_tokens, self._ratio = batch_tokens, resident_ratio
        self._free = free or self._free_here
        self._reader = WeightReader(folder)
        self._reader.check(expected(self.hf))
        carrier: Carrier = FileCarrier(self._reader)
        if device.type == "cuda":
            carrier = PinnedCarrier(self._reader, device)
        self._layers = LayerPipeline(self.hf, dtype, device, carrier)
        self._model = CausalLM(
            self.hf, dtype=dtype, device=device, max_tokens=self.hf.max_positions
        )
        self._sizes = residency.sizes_of(self.hf, dtype)
        self.streamed_layers = 0
        """Number of layers that did not stay on the device in the latest `loaded`."""

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Hold the model on the device during the block (`TokenScorer.loaded`)."""
        self._model.allocate(self._layers)
        try:
            for name in (EMBED, NORM, HEAD):
                if name in self._model.views:
                    self._model.load(name, self._reader.get(name))
            room = self._free() - self._work_bytes()
            self._layers.set_resident(residency.num_resident(self._sizes, self._ratio, room))
            self.streamed_layers = self._layers.num_streamed
            yield
        finally:
            self._layers.release()
            self._model.free()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # the learner's process allocates in other sizes

    @torch.no_grad()
    def score(self, rows: Sequence[TeacherRow]) -> list[TeacherScores]:
        """Return the scores of each row (`TokenScorer.score`).

        Raises:
            ValueError: a row is longer than the model's positions, or has an unknown token.
        """
        found: list[TeacherScores | None] = [None] * len(rows)
        for batch in self._batches(rows):
            for i, scores in zip(batch, self._score([rows[i] for i in batch]), strict=True):
                found[i] = scores
        return [scores for scores in found if scores is not None]

    def close(self) -> None:
        """Release all memory."""
        self._layers.close()
        self._model.free()

    def _batches(self, rows: Sequence[TeacherRow]) -> Iterator[list[int]]:
        """Yield the indices of rows of similar length whose padded tokens fit `batch_tokens`."""
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].tokens), reverse=True)
        start = 0
        while start < len(order):
            longest = len(rows[order[start]].tokens)
            if longest > self.hf.max_positions:
                raise ValueError(
                    f"--teacher.models: a sample has {longest} tokens, and the teacher has "
                    f"{self.hf.max_positions} positions; lower --rollout.max_tokens"
                )
            count = max(1, self._batch_tokens // longest)
            yield order[start : start + count]
            start += count

    def _score(self, rows: Sequence[TeacherRow]) -> list[TeacherScores]:
        counts = [int(row.mask.sum()) for row in rows]
        hidden, targets = self._hidden(rows)
        where: dict[str, Any] = {
            "vocab_size": self._vocab_size,
            "chunk_tokens": CHUNK_TOKENS,
            "temperature": self._temperature,
        }
        weight = self._model.head
        logp = head.log_probs(hidden, weight, targets, fp32_logits=True, **where).logp
        ids, top = head.top_log_probs(hidden, weight, self._top_k, **where)
        return [
            TeacherScores(*parts)
            for parts in zip(
                logp.float().cpu().split(counts),
                ids.cpu().split(counts),
                top.float().cpu().split(counts),
                strict=True,
            )
        ]

    def _hidden(self, rows: Sequence[TeacherRow]) -> tuple[Tensor, Tensor]:
        """Return the final hidden states that predict the tokens in the masks, [m, hidden], and
        these tokens, [m]."""
        longest, device = max(len(row.tokens) for row in rows), self._device
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
        mask = torch.zeros(len(rows), longest, dtype=torch.bool)
        for i, row in enumerate(rows):
            tokens[i, : len(row.tokens)] = row.tokens
            mask[i, : len(row.mask)] = row.mask
        cache = self._model.batch_cache(len(rows), longest, shared=True)
        tokens, place = tokens.to(device), mask[:, 1:].to(device)
        hidden = self._model.prefill(tokens, cache)
        return hidden[:, :-1][place], tokens[:, 1:][place]

    def _work_bytes(self) -> int:
        return work_bytes(self.hf, self._dtype, self._batch_tokens)

    def _free_here(self) -> float:
        return residency.free_on(self._device, lambda: psutil.virtual_memory().available)


def work_bytes(hf: HFConfig, dtype: torch.dtype, batch_tokens: int) -> int:
    """Estimate the bytes of a forward pass besides weights: activations, keys and values of one
    layer, and the logits of a chunk, in float32 and sorted."""
    logits = min(batch_tokens, CHUNK_TOKENS) * hf.vocab_size * 4
    return residency.work_bytes(hf, dtype, 1, batch_tokens) + 4 * logits

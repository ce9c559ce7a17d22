"""What the ranks of test_stream.py run."""

from typing import Any

import torch

from rlcore.mcore.learner import MegatronLearner
from rlcore.tensors import Batch
from tests.ranks import learner_ranks as base

PACKED, DENSE = 256, 1
"""Tokens of a micro-batch: several sequences in each, or one."""


def gradients(rank: int) -> dict[str, float]:
    """How far apart the gradients are, relative to the largest, of a step that is trained at its
    end and one of which rank 1 has trained a part before."""
    found: dict[str, float] = {}
    for name, tokens in (("packed", PACKED), ("dense", DENSE)):
        for optimizer in (False, True):
            layout = {"tokens_per_micro_batch": tokens, "distributed_optimizer": optimizer}
            found[f"{name} {optimizer}"] = _apart(layout, rank)
    return found


def _apart(layout: dict[str, Any], rank: int) -> float:
    batch = base.rows(0)
    every = list(range(batch.num_sequences))
    at_end = _gradient(layout, [batch.select(every[rank::2])], batch)
    early = [every[1:3], every[5:6], every[8:11]] if rank else []
    rest = [i for i in every if i not in (1, 2, 5, 8, 9, 10)]
    parts = [batch.select(part) for part in (*early, rest[rank::2])]
    streamed = _gradient(layout, parts, batch)
    return float((streamed - at_end).abs().max() / at_end.abs().max())


def _gradient(layout: dict[str, Any], parts: list[Batch], whole: Batch) -> torch.Tensor:
    """Reduced and divided, as the optimizer sees it."""
    learner: MegatronLearner = base.make(layout)
    for part in parts:
        learner.accumulate(part, base.Loss())
    seen: list[torch.Tensor] = []
    step = learner._step

    def watched(rate: float) -> float:
        seen.extend(t.clone().flatten() for t in learner._gradient_buffers())
        return step(rate)

    learner._step = watched  # type: ignore[method-assign]
    learner.apply(float(whole.mask.sum()))
    learner.close()
    found = torch.cat(seen)
    if layout["distributed_optimizer"]:  # each rank has the sum of its part alone
        size = found.numel() // 2
        return found[torch.distributed.get_rank() * size :][:size]
    return found

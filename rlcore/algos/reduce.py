"""Aggregation of per-token losses, verl's `loss_agg_mode`, always by global counts.

    L = sum_t weight_t mask_t l_t / N

    mode                      weight_t             N
    token-mean                1                    trained tokens of the update, all ranks
    seq-mean-token-sum        1                    sequences of the update, all ranks
    seq-mean-token-mean       1 / |o_i|            sequences of the update, all ranks
    seq-mean-token-sum-norm   1 / max_tokens       sequences of the update, all ranks

N is handed to `Learner.apply`; nothing here averages over what one rank happens to hold.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlcore.tensors import Batch


def weights(mode: str, batch: Batch, max_tokens: int) -> Tensor:
    """[T] aggregation weights; |o_i| counts the trained tokens of a sequence."""
    if mode in ("token-mean", "seq-mean-token-sum"):
        return torch.ones(batch.num_tokens)
    if mode == "seq-mean-token-sum-norm":
        return torch.full((batch.num_tokens,), 1.0 / max_tokens)
    index = batch.sequence_index
    count = torch.zeros(batch.num_sequences).index_add_(0, index, batch.mask.float())
    return 1.0 / count.clamp(min=1)[index]


def count(mode: str, lengths: Sequence[int]) -> float:
    """N of an update whose sequences have these numbers of trained tokens, over all ranks."""
    return float(sum(lengths)) if mode == "token-mean" else float(len(lengths))

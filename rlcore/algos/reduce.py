"""Aggregation of per-token losses, verl's `loss_agg_mode`, always by global counts.

    L = sum_t weight_t mask_t l_t / N

    mode                      weight_t             N
    token-mean                1                    trained tokens of the update, all ranks
    seq-mean-token-sum        1                    sequences of the update, all ranks
    seq-mean-token-mean       1 / |o_i|            sequences of the update, all ranks
    seq-mean-token-sum-norm   1 / max_tokens       sequences of the update, all ranks

|o_i| is the number of tokens of the sequence. Rejected tokens and sequences without a kept token
are not counted. The rows of an episode that branched are one sequence. N is passed to
`Learner.apply`; no function here averages over the tokens of one rank.

Differs from verl's trainer, whose N in the seq-mean modes also counts rejected sequences.
"""

import torch
from torch import Tensor

from rlcore.algos import sequence as sequences


def weights(
    mode: str,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    max_tokens: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return each token's aggregation weight, [T]; |o_i| counts a sequence's tokens in `mask`."""
    if mode == "seq-mean-token-mean":
        count = sequences.count(mask, sequence, num_sequences).to(dtype)
        return 1.0 / count.clamp(min=1)[sequence]
    scale = 1.0 / max_tokens if mode == "seq-mean-token-sum-norm" else 1.0
    return torch.full(mask.shape, scale, dtype=dtype, device=mask.device)


def normaliser(mode: str, num_tokens: float, num_sequences: float) -> float:
    """Return the divisor N of an update, given its kept tokens and the sequences that have some, on
    all ranks. Before the loss has run, the trained tokens are known (`StepPlan.lengths`); a loss
    that rejects tokens needs `Learner.kept`."""
    return float(num_tokens if mode == "token-mean" else num_sequences)

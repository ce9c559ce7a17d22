"""Convert samples to the learner's packed `Batch`: each prompt followed by its response."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from rlcore.records import Sample
from rlcore.tensors import Batch, cumulative


def pack_samples(samples: Sequence[Sample]) -> Batch:
    """Pack samples, in their order, into a batch on the CPU. Without samples, the batch is empty.

    The mask marks the sampled tokens: responses without the environment's tokens. Outside the mask,
    `rollout_log_probs` is 0 and `versions` is -1. Raises ValueError for a sample without a prompt,
    because the first token of a sequence has no log-prob."""
    for s in samples:
        if not len(s.prompt):
            raise ValueError(f"sample {s.id}: has no prompt tokens; a prompt needs at least one")
        if not len(s.tokens) == len(s.logps) == len(s.versions):
            raise ValueError(
                f"sample {s.id}: has {len(s.tokens)} tokens, {len(s.logps)} log-probs and "
                f"{len(s.versions)} versions; the engine must return one of each per token"
            )
    parts = list(chain.from_iterable((s.prompt, s.tokens) for s in samples))
    lengths = np.array([len(p) for p in parts], dtype=np.int64)
    response = np.repeat(np.arange(len(parts)) % 2 == 1, lengths)
    logps = np.zeros(response.size, np.float32)
    versions = np.full(response.size, -1, np.int32)
    if samples:
        logps[response] = np.concatenate([s.logps for s in samples])
        versions[response] = np.concatenate([s.versions for s in samples])
    mask = versions >= 0
    logps[~mask] = 0.0
    tokens = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
    return Batch(
        tokens=torch.from_numpy(tokens),
        cu_seqlens=cumulative(lengths.reshape(-1, 2).sum(1).tolist()),
        mask=torch.from_numpy(mask),
        rollout_log_probs=torch.from_numpy(logps),
        versions=torch.from_numpy(versions),
        ids=tuple(s.id for s in samples),
    )


def per_token(values: Sequence[float], batch: Batch) -> Tensor:
    """Expand one value per sequence to one value per token, prompts included: [T] float32 on the
    batch's device."""
    assert len(values) == batch.num_sequences, (len(values), batch.num_sequences)
    lengths = (batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).to(torch.int64)
    expanded = torch.tensor(values, dtype=torch.float32).repeat_interleave(lengths)
    return expanded.to(batch.tokens.device)

"""Convert samples to the learner's packed `Batch`: each prompt followed by its response."""

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from rlcore.records import Branch, RequestId, Sample
from rlcore.tensors import Batch, cumulative


def pack_samples(samples: Sequence[Sample]) -> Batch:
    """Pack samples, in their order, into a batch on the CPU. Without samples, the batch is empty.
    Every row of a sample is a sequence; the rows of a sample have its id.

    The mask marks the sampled tokens: responses without the environment's tokens. Outside the mask,
    `rollout_log_probs` is 0 and `versions` is -1. Raises ValueError for a sample without a prompt,
    because the first token of a sequence has no log-prob."""
    rows = [(s.id, row) for s in samples for row in s.rows]
    for id, row in rows:
        if not len(row.prompt):
            raise ValueError(f"sample {id}: has no prompt tokens; a prompt needs at least one")
        if not len(row.tokens) == len(row.logps) == len(row.versions):
            raise ValueError(
                f"sample {id}: has {len(row.tokens)} tokens, {len(row.logps)} log-probs and "
                f"{len(row.versions)} versions; the engine must return one of each per token"
            )
    parts = list(chain.from_iterable((row.prompt, row.tokens) for _, row in rows))
    lengths = np.array([len(p) for p in parts], dtype=np.int64)
    response = np.repeat(np.arange(len(parts)) % 2 == 1, lengths)
    logps = np.zeros(response.size, np.float32)
    versions = np.full(response.size, -1, np.int32)
    if rows:
        logps[response] = np.concatenate([row.logps for _, row in rows])
        versions[response] = np.concatenate([row.versions for _, row in rows])
    mask = versions >= 0
    logps[~mask] = 0.0
    routes = _routes([row for _, row in rows], lengths.reshape(-1, 2).sum(1))
    tokens = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
    read = [s.teacher_prompt for s in samples for _ in s.rows]
    others = [None if p is None else torch.from_numpy(p.astype(np.int64)) for p in read]
    return Batch(
        tokens=torch.from_numpy(tokens),
        cu_seqlens=cumulative(lengths.reshape(-1, 2).sum(1).tolist()),
        mask=torch.from_numpy(mask),
        rollout_log_probs=torch.from_numpy(logps),
        versions=torch.from_numpy(versions),
        routes=routes,
        ids=tuple(id for id, _ in rows),
        teacher_prompts=tuple(others) if any(p is not None for p in read) else (),
    )


def _routes(rows: Sequence[Sample | Branch], lengths: np.ndarray) -> Tensor | None:
    """Return the routes of all tokens, [T, layers * K] int8 or int16; None if no row has some."""
    widths = {row.routes.shape[1] for row in rows if row.routes is not None}
    if not widths:
        return None
    (width,) = widths
    kind = np.result_type(*(row.routes for row in rows if row.routes is not None))
    packed = np.full((int(lengths.sum()), width), -1, kind)
    for row, start in zip(rows, np.cumsum(lengths) - lengths, strict=True):
        if row.routes is not None:
            packed[start : start + len(row.routes)] = row.routes
    return torch.from_numpy(packed)


def by_id(values: Mapping[RequestId, float], batch: Batch) -> Tensor:
    """Expand one value per sample to one value per token of its rows: [T] float32."""
    return per_token([values[id] for id in batch.ids], batch)


def per_token(values: Sequence[float], batch: Batch) -> Tensor:
    """Expand one value per sequence to one value per token, prompts included: [T] float32 on the
    batch's device."""
    assert len(values) == batch.num_sequences, (len(values), batch.num_sequences)
    lengths = (batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).to(torch.int64)
    expanded = torch.tensor(values, dtype=torch.float32).repeat_interleave(lengths)
    return expanded.to(batch.tokens.device)

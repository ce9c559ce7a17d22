"""Make the inputs of policy and value losses from micro-batches and model outputs."""

import torch
from torch import Tensor

from rlcore.mcore.microbatch import MicroBatch
from rlcore.tensors import Batch, LossInputs, ValueInputs


def of_policy(
    micro: MicroBatch, logp: Tensor, entropy: Tensor, top: Tensor | None = None
) -> LossInputs:
    """Combine log-prob and entropy [T] with the batch's tensors to the inputs of a policy loss.
    `top`: log-probs of the teacher's likeliest tokens, [T, K]. Tensors that the batch lacks get
    neutral values."""
    batch, own = micro.batch, logp.detach()
    versions = batch.versions
    if versions is None:
        versions = torch.full_like(batch.tokens, -1, dtype=torch.int32)
    return LossInputs(
        log_probs=logp,
        entropy=entropy,
        mask=batch.mask & micro.predicted,
        score=torch.zeros_like(own) if batch.score is None else batch.score,
        advantage=torch.zeros_like(own) if batch.advantage is None else batch.advantage,
        old_log_probs=own if batch.old_log_probs is None else batch.old_log_probs,
        rollout_log_probs=own if batch.rollout_log_probs is None else batch.rollout_log_probs,
        correction=torch.ones_like(own) if batch.correction is None else batch.correction,
        ref_log_probs=batch.ref_log_probs,
        sequence=micro.sequence,
        num_sequences=batch.num_sequences,
        versions=versions,
        teacher_log_probs=batch.teacher_log_probs,
        teacher_top_log_probs=batch.teacher_top_log_probs,
        top_log_probs=top,
    )


def of_value(micro: MicroBatch, value: Tensor) -> ValueInputs:
    """Return value-loss inputs from values [T] and the batch. An empty batch may lack returns."""
    batch, own = micro.batch, value.detach()
    return ValueInputs(
        value=value,
        value_old=own if batch.value_old is None else batch.value_old,
        returns=torch.zeros_like(own) if batch.returns is None else batch.returns,
        mask=batch.mask & micro.predicted,
        sequence=micro.sequence,
        num_sequences=batch.num_sequences,
    )


def placeholder(head: str, device: torch.device, batch: Batch) -> LossInputs | ValueInputs:
    """Return loss inputs of one token outside the mask, with the optional tensors that `batch`
    has."""
    zero = torch.zeros(1, device=device)
    mask = torch.zeros(1, dtype=torch.bool, device=device)
    sequence = torch.zeros(1, dtype=torch.int64, device=device)
    if head == "value":
        return ValueInputs(
            value=zero, value_old=zero, returns=zero, mask=mask, sequence=sequence, num_sequences=1
        )
    top = None if batch.teacher_top_log_probs is None else zero.unsqueeze(-1)
    return LossInputs(
        log_probs=zero,
        entropy=zero,
        mask=mask,
        score=zero,
        advantage=zero,
        old_log_probs=zero,
        rollout_log_probs=zero,
        correction=zero + 1,
        ref_log_probs=None if batch.ref_log_probs is None else zero,
        sequence=sequence,
        num_sequences=1,
        versions=torch.zeros(1, dtype=torch.int32, device=device),
        teacher_log_probs=None if batch.teacher_log_probs is None else zero,
        teacher_top_log_probs=top,
        top_log_probs=top,
    )

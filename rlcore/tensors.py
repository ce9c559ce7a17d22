"""Tensors for training: `Batch` (packed samples), `LossInputs` and `LossOutput`.

Index t of a per-token value always refers to token t: `logp[t]` is log p(tokens[t] | tokens before
t), and 0 for the first token of a sequence. Only inside the learner are values shifted by one.

Letters in shapes: T packed tokens, B sequences, K likeliest tokens of a teacher.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

_SEVERAL = "teacher_top_ids", "teacher_top_log_probs", "routes"
"""Tensors of a batch with several values per token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Samples packed one after the other; each is a prompt followed by its response. Tensors are on
    the CPU or on the learner's device; `cu_seqlens` is always on the CPU."""

    tokens: Tensor  # [T] int64
    cu_seqlens: Tensor  # [B+1] int32, on the CPU
    mask: Tensor  # [T] bool: whether the token is trained on (only tokens of responses)
    rollout_log_probs: Tensor | None = None  # [T] float32: log-prob under the sampling distribution
    versions: Tensor | None = None  # [T] int32: policy version of each token, -1 on the prompt
    score: Tensor | None = None  # [T] float32: raw reward of the token's sequence
    advantage: Tensor | None = None  # [T] float32
    old_log_probs: Tensor | None = None  # [T] float32: learner's log-prob before the first update
    log_sum_pi_squared: Tensor | None = None
    """[T] float32: log of the sum of squared probabilities of all tokens of the vocabulary in the
    token's place, under the policy of `old_log_probs`."""
    ref_log_probs: Tensor | None = None  # [T] float32: log-prob under the reference model
    teacher_log_probs: Tensor | None = None  # [T] float32: log-prob under the teacher
    teacher_top_ids: Tensor | None = None  # [T, K] int64: the teacher's likeliest tokens
    teacher_top_log_probs: Tensor | None = None  # [T, K] float32: their log-probs
    routes: Tensor | None = None
    """[T, layers * K] int8 or int16: experts that each layer's router has chosen for the token, -1
    if they are not known; see mcore/routing.py."""
    value_old: Tensor | None = None  # [T] float32: critic's value before the step's first update
    returns: Tensor | None = None  # [T] float32: target of the critic's value
    correction: Tensor | None = None  # [T] float32: rollout-correction weight, detached
    weight: Tensor | None = None  # [T] float32: factor on the loss of each token
    ids: tuple[str, ...] = ()  # [B] request ids; the rows of an episode that branched share one
    teacher_prompts: tuple[Tensor | None, ...] = ()
    """[B] prompts [Q] int64 that a teacher reads in place of the row's own; empty: none."""

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each sequence, prompt included."""
        return (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).tolist()

    @property
    def sequence_index(self) -> Tensor:
        """Index of the sequence that each token belongs to, [T] int64, on the CPU."""
        return torch.repeat_interleave(self.cu_seqlens.diff().long())

    def check(self) -> None:
        """Raise ValueError if a tensor does not have one value per token, or has a value that is
        not finite at a token in `mask`. The message names the first such tensor or token."""
        for f in fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, Tensor) or f.name == "cu_seqlens":
                continue
            per_token = value.shape[:1] if f.name in _SEVERAL else value.shape
            if per_token != (self.num_tokens,):
                raise ValueError(
                    f"batch: {f.name} has shape {list(value.shape)} for {self.num_tokens} tokens; "
                    "every tensor needs one value per token"
                )
            if value.is_floating_point():
                finite = value.isfinite() if value.dim() == 1 else value.isfinite().all(-1)
                bad = (~finite & self.mask).nonzero()
                if bad.numel():
                    t = int(bad[0])
                    row = int(self.sequence_index[t])
                    name = self.ids[row] if self.ids else f"row {row}"
                    raise ValueError(
                        f"sample {name}: {f.name} of token {t - int(self.cu_seqlens[row])} is "
                        f"{value[t].tolist()}; must be finite, so check the pass that produced it"
                    )
        if int(self.cu_seqlens[-1]) != self.num_tokens:
            raise ValueError(
                f"batch: cu_seqlens ends at {int(self.cu_seqlens[-1])} but the batch has "
                f"{self.num_tokens} tokens; both must be equal"
            )

    def with_(self, **changes) -> "Batch":
        """Return a copy with some fields replaced."""
        return replace(self, **changes)

    def select(self, rows: Sequence[int]) -> "Batch":
        """Return a batch of the sequences with the indices `rows`, packed in this order."""
        starts, lengths = self.cu_seqlens.tolist(), self.lengths
        if rows:
            index = torch.cat([torch.arange(starts[r], starts[r] + lengths[r]) for r in rows])
        else:
            index = torch.zeros(0, dtype=torch.int64)
        changes: dict[str, Tensor] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor) and f.name != "cu_seqlens":
                changes[f.name] = value[index.to(value.device)]
        return replace(
            self,
            cu_seqlens=cumulative([lengths[r] for r in rows]),
            ids=tuple(self.ids[r] for r in rows) if self.ids else (),
            teacher_prompts=tuple(self.teacher_prompts[r] for r in rows)
            if self.teacher_prompts
            else (),
            **changes,
        )


def cumulative(lengths: Sequence[int]) -> Tensor:
    """Return the running sums of `lengths`, beginning with 0: [B+1] int32."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """Inputs of a policy loss for one micro-batch. All tensors are [T], float32 unless stated
    otherwise; only `log_probs`, `entropy` and `top_log_probs` have gradients. Values outside `mask`
    are arbitrary but finite."""

    log_probs: Tensor
    """Log-prob of the sampled token under the learner, with the sampling temperature applied."""
    entropy: Tensor
    """Entropy of the learner's distribution at the token, with the sampling temperature applied.
    Has a gradient only if the algorithm's config sets `uses_entropy` or `entropy_coef`."""
    mask: Tensor
    """bool: whether the token is trained on."""
    score: Tensor
    """Raw reward of the token's sequence, before shaping and baseline."""
    advantage: Tensor
    old_log_probs: Tensor
    """Log-prob under the learner before the first update of this step. If the log-prob is not
    recomputed, `log_probs.detach()`."""
    rollout_log_probs: Tensor
    correction: Tensor
    """Rollout-correction weight (TIS), detached, by which a policy loss is multiplied; 1 if the
    correction is off."""
    ref_log_probs: Tensor | None
    sequence: Tensor
    """int64: index of the token's sequence in the micro-batch."""
    num_sequences: int
    versions: Tensor
    """int32: policy version that produced the token; -1 on prompts."""
    teacher_log_probs: Tensor | None = None
    """Log-prob of the sampled token under the teacher."""
    teacher_top_log_probs: Tensor | None = None
    """[T, K]: log-probs of the teacher's K likeliest tokens under the teacher."""
    top_log_probs: Tensor | None = None
    """[T, K]: log-probs of these tokens under the learner; has a gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueInputs:
    """Inputs of a value loss for one micro-batch. All tensors are [T], float32 unless stated
    otherwise; only `value` has a gradient."""

    value: Tensor
    """The critic's estimate of the return before the token is sampled."""
    value_old: Tensor
    """The critic's estimate of the return, made before the first update of this step."""
    returns: Tensor
    mask: Tensor
    """bool: whether the token is trained on."""
    sequence: Tensor
    """int64: index of the token's sequence in the micro-batch."""
    num_sequences: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """Loss and metrics per token. The learner masks and sums the loss, and `apply` divides the sum
    by the global normaliser. Metrics are averaged over the kept tokens of all ranks."""

    per_token: Tensor  # [T]
    metrics: dict[str, Tensor]  # metrics by name, [T] each, detached
    mask: Tensor | None = None
    """[T] bool: tokens that the loss keeps; None: all tokens in the inputs' `mask`."""

    def kept(self, mask: Tensor) -> Tensor:
        """Return the tokens that count in loss, metrics and normaliser, [T] bool: those of the
        inputs' `mask` that the loss keeps."""
        return mask if self.mask is None else mask & self.mask


Loss = Callable[[LossInputs], LossOutput]
ValueLoss = Callable[[ValueInputs], LossOutput]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySpec:
    """Settings of the fused policy loss (ops/policy.py); the defaults give a plain clipped loss."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float = 0.0
    """Dual clip: maximum ratio where the advantage is negative; 0 or inf: off."""
    is_threshold: float | None = None
    """Cap of the correction weight p_old / p_sampler; inf: no cap; None: no weight is applied."""
    is_mean: float = 1.0
    """Divisor of the correction weights; 1: no batch normalisation."""
    bounds: tuple[float, float] | None = None
    """Bounds of log(p_sampler / p_old); tokens outside the bounds are rejected. None: keep all."""
    kl_type: str = "none"
    """Estimator of the KL against ref_log_probs (rlcore/algos/kl.py), or none."""
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    log_limit: float = 20.0


class PolicyInputs(NamedTuple):
    """Inputs of the fused policy loss: one value per token, [T] each, without gradients."""

    advantage: Tensor
    weight: Tensor
    """Factor of each token's loss in the sum: the mask times the aggregation weight."""
    rollout_log_probs: Tensor
    old_log_probs: Tensor | None = None
    """Log-prob under the old policy; None: the log-prob of this forward pass, detached."""
    ref_log_probs: Tensor | None = None
    """Log-prob under the reference model; required if kl_coef is not 0."""

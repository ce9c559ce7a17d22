"""Compute the loss of one update from rows, in one process and with the trainer's functions: kept
tokens, normaliser N, mean correction weight, objective. `algos.loss_of` is the interface.

Shapes: padded rows [B, R] of B responses, or T packed tokens; K likeliest tokens of a teacher.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import ModuleType

import torch
from torch import Tensor

from rlcore.algos import correction, reduce
from rlcore.algos import sequence as sequences
from rlcore.algos.base import AlgoConfig
from rlcore.algos.objective import Objective
from rlcore.tensors import LossInputs
from rlcore.utils.errors import ConfigError

NAMES = tuple(f.name for f in fields(LossInputs) if f.name not in ("num_sequences", "correction"))
"""Tensors that rows may have."""
SEVERAL = ("teacher_top_log_probs", "top_log_probs")
"""Tensors with K values per token."""
TRAINED = ("log_probs", "entropy", "top_log_probs")
"""Tensors with a gradient."""
OF_ROWS = ("advantage", "score")
"""Tensors that may have one value per padded row instead of one per token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateLoss:
    """Loss of an update, and what the trainer computes with it."""

    loss: Tensor
    """Sum of the kept tokens' losses, divided by N; a scalar with the gradient of the update."""
    kept: Tensor
    """bool, in the shape of the mask: tokens that count in loss, metrics and N."""
    normaliser: float
    """N: number of kept tokens, or of rows with a kept token (rlcore/algos/reduce.py). 0 if no
    token is kept; then the loss is 0, and the trainer makes no optimizer step."""
    correction_mean: float
    """Mean weight by which rollout_is_batch_normalize divides the correction weights, else 1."""
    metrics: dict[str, float]
    """Metrics as the trainer logs them: `rollout_corr/*` over the trained tokens, all others as
    means over the kept tokens."""


def of_rows(
    rows: LossInputs | Mapping[str, Tensor],
    module: ModuleType,
    cfg: AlgoConfig,
    max_tokens: int | None,
) -> UpdateLoss:
    """Compute the loss of an update; `algos.loss_of` describes arguments and errors."""
    given = _present(rows)
    if problems := _missing(given, cfg, max_tokens) or _malformed(given, rows):
        raise ConfigError("\n".join(problems))
    x = rows if isinstance(rows, LossInputs) else _packed(given)
    where = (x.sequence, x.num_sequences)
    mean = 1.0
    if cfg.rollout_is_batch_normalize and cfg.rollout_is != "none":
        log_w = x.old_log_probs - x.rollout_log_probs
        mean = correction.mean(*correction.normalisation_sums(cfg, log_w, x.mask, *where).tolist())
    objective = Objective(module, cfg, max_tokens=max_tokens or 1, correction_mean=mean)
    out = objective(x)
    kept = out.kept(x.mask)
    num_kept = float(sequences.count(kept, *where).gt(0).sum())
    n = reduce.normaliser(cfg.loss_agg_mode, float(kept.sum()), num_kept)
    metrics = objective.mismatch(lambda values, op="sum": values)
    metrics |= {name: float(m[kept].double().mean()) for name, m in out.metrics.items() if n}
    for name, figure in (("score", "rollout_corr/score_is"), ("entropy", "actor/entropy")):
        if name not in given:
            metrics.pop(figure, None)
    return UpdateLoss(
        loss=torch.where(kept, out.per_token, 0.0).sum() / (n or 1.0),
        kept=kept.view(given["mask"].shape),
        normaliser=n,
        correction_mean=mean,
        metrics=metrics,
    )


def _present(rows: LossInputs | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the given tensors by name; a field that is None counts as not given."""
    if isinstance(rows, LossInputs):
        rows = {name: getattr(rows, name) for name in NAMES}
    return {name: value for name, value in rows.items() if value is not None}


def _missing(given: Mapping[str, Tensor], cfg: AlgoConfig, max_tokens: int | None) -> list[str]:
    """Return one error message for each input that the config needs and the rows lack."""
    needed = {
        "log_probs": "every loss needs it",
        "mask": "every loss needs it",
    }
    if cfg.adv_estimator != "none":
        needed["advantage"] = f"adv_estimator is {cfg.adv_estimator}"
    if cfg.entropy_coef or cfg.uses_entropy:
        needed["entropy"] = "the loss has a term of the entropy"
    if cfg.uses_score:
        needed["score"] = "the loss depends on the score"
    if cfg.kl_coef:
        needed["ref_log_probs"] = f"kl_coef is {cfg.kl_coef:g}"
    if cfg.teacher_kl_coef:
        needed["teacher_log_probs"] = f"teacher_kl_coef is {cfg.teacher_kl_coef:g}"
    if cfg.uses_teacher_top:
        needed |= dict.fromkeys(SEVERAL, "the loss compares these tokens")
    if "mask" in given and given["mask"].dim() == 1:
        needed["sequence"] = "packed rows need the row of each token; padded rows are [B, R]"
    out = [f"rows: {name} is missing: {why}" for name, why in needed.items() if name not in given]
    if cfg.loss_agg_mode == "seq-mean-token-sum-norm" and not (max_tokens and max_tokens > 0):
        out.append(
            f"max_tokens {max_tokens}: loss_agg_mode seq-mean-token-sum-norm divides by the "
            "maximum response length; give it"
        )
    return out


def _malformed(given: Mapping[str, Tensor], rows: LossInputs | Mapping[str, Tensor]) -> list[str]:
    """Return one error message for each tensor with an unknown name, a wrong shape, or a value
    inside the mask that is not finite."""
    mask, out = given["mask"], []
    inside = mask.bool()
    if not torch.equal(inside.to(mask.dtype), mask) or mask.dim() not in (1, 2):
        return [f"rows: mask {list(mask.shape)} must be [B, R] or [T], with 1 on trained tokens"]
    for name, value in given.items():
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"allowed are {', '.join(NAMES)}"
            out.append(f"rows: {name} is unknown; {hint}")
            continue
        shape = tuple(value.shape[:-1] if name in SEVERAL else value.shape)
        per_row = name in OF_ROWS and mask.dim() == 2 and shape == mask.shape[:1]
        if shape != mask.shape and not per_row:
            also = ", or one per padded row" if name in OF_ROWS else ""
            also = ", and K of them" if name in SEVERAL else also
            out.append(
                f"rows: {name} has shape {list(value.shape)}, mask {list(mask.shape)}; it needs "
                f"one value per token{also}"
            )
        elif name == "sequence" and (value.is_floating_point() or bool((value < 0).any())):
            out.append("rows: sequence must hold the row of each token: integers from 0")
        elif value.is_floating_point():
            finite = value.isfinite().all(-1) if name in SEVERAL else value.isfinite()
            bad = (~(finite[:, None] if per_row else finite) & inside).nonzero()
            if len(bad):
                at = bad[0].tolist()
                out.append(
                    f"rows: {name} is not finite at {at}, where the mask is 1; check the pass "
                    "that produced it"
                )
    return out


def _packed(given: Mapping[str, Tensor]) -> LossInputs:
    """Return the rows as inputs of a loss. Values outside the mask become 0."""
    shape = given["mask"].shape
    mask = given["mask"].bool().reshape(-1)
    of_padded = torch.arange(shape[0], device=mask.device).view(-1, *[1] * (len(shape) - 1))
    sequence = given.get("sequence", of_padded.expand(shape)).long().reshape(-1)
    flat: dict[str, Tensor] = {}
    for name, value in given.items():
        if value.dim() < len(shape):
            value = value[:, None].expand(shape)
        value = value.reshape(len(mask), *value.shape[len(shape) :])
        inside = mask.view(-1, *[1] * (value.dim() - 1))
        value = value if name in TRAINED else value.detach()
        flat[name] = torch.where(inside, value, torch.zeros_like(value))
    own = flat["log_probs"].detach()
    zero, old = torch.zeros_like(own), flat.get("old_log_probs", own)
    return LossInputs(
        log_probs=flat["log_probs"],
        entropy=flat.get("entropy", zero),
        mask=mask,
        score=flat.get("score", zero),
        advantage=flat.get("advantage", zero),
        old_log_probs=old,
        rollout_log_probs=flat.get("rollout_log_probs", old),
        correction=zero + 1,
        ref_log_probs=flat.get("ref_log_probs"),
        sequence=sequence,
        num_sequences=int(sequence.max()) + 1 if len(sequence) else 0,
        versions=flat.get("versions", torch.full_like(sequence, -1, dtype=torch.int32)),
        teacher_log_probs=flat.get("teacher_log_probs"),
        teacher_top_log_probs=flat.get("teacher_top_log_probs"),
        top_log_probs=flat.get("top_log_probs"),
    )

"""Compute the learner's loss: rollout correction and rejection, policy loss, KL to the reference,
entropy, aggregation. `Objective.policy` expresses the same loss for the fused op."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import cast

import torch

from rlcore.algos import correction, fused, kl, mismatch, ratio, reduce
from rlcore.algos.base import LOG_LIMIT, AlgoConfig
from rlcore.tensors import LossInputs, LossOutput, PolicyInputs, PolicySpec
from rlcore.utils.errors import ConfigError


class Objective:
    """Loss of the learner. The rollout correction is computed in the training pass, because this
    pass may yield the old log-probs of the first update."""

    def __init__(
        self,
        algo: ModuleType,
        cfg: AlgoConfig,
        *,
        max_tokens: int,
        version: int = 0,
        correction_mean: float = 1.0,
        kl_scale: float = 1.0,
    ) -> None:
        """
        Args:
            max_tokens: maximum response length, the divisor of seq-mean-token-sum-norm.
            version: version of the weights that this step trains; staleness is relative to it.
            correction_mean: divisor of the correction weights, see rollout_is_batch_normalize.
            kl_scale: factor on the KL coefficient, from the adaptive controller.
        """
        self._algo, self._cfg = algo, cfg
        self._max_tokens, self._version = max_tokens, version
        self._mean, self._kl_scale = correction_mean, kl_scale
        self.needs_entropy_grad = cfg.entropy_coef != 0 or cfg.uses_entropy
        self._watches = True
        self._sums: list[mismatch.Sums] = []

    @property
    def rejects(self) -> bool:
        """Whether tokens may be rejected. If so, `learner.kept()` gives the loss denominators."""
        return bool(self._cfg.rollout_rs) or self._cfg.drops_tokens

    def stop_watching(self) -> None:
        """Stop measuring the sampler-learner mismatch, which only the first epoch reports."""
        self._watches = False

    def __call__(self, x: LossInputs) -> LossOutput:
        cfg, trained = self._cfg, x.mask
        x, keep, log_w = self._corrected(x)
        if self._watches:
            self._sums.append(mismatch.sums(x, log_w, trained, cfg, self._version))
        x, added = self._taught(x, trained)
        out = self._algo.loss(x, cfg)
        if out.mask is not None:
            if not cfg.drops_tokens:
                raise ConfigError(
                    f"{self._algo.__name__}: its loss returns a mask, so its config must set "
                    "drops_tokens = True; otherwise the denominators count dropped tokens"
                )
            keep = keep & out.mask
        policy = out.per_token
        if cfg.off_policy_mask_threshold:
            masked = correction.off_policy(cfg, x, trained)
            policy = torch.where(masked, 0.0, policy)
            added["rollout_corr/off_policy_masked_fraction"] = masked.float()
        total = policy
        metrics = (
            {
                "actor/pg_loss": policy.detach(),
                "actor/ppo_kl": (x.old_log_probs - x.log_probs).detach(),
                "actor/entropy": x.entropy.detach(),
            }
            | out.metrics
            | added
        )
        if cfg.entropy_coef:
            total = total - cfg.entropy_coef * x.entropy
        if cfg.kl_coef:
            assert x.ref_log_probs is not None
            # Outside the mask, a large log-prob difference would make the KL's gradients NaN.
            ref = torch.where(trained, x.ref_log_probs, x.log_probs.detach())
            divergence = kl.estimate(cfg.kl_type, x.log_probs, ref)
            if cfg.kl_unbiased:
                divergence = divergence * ratio.log_ratio(x).exp()
            total = total + cfg.kl_coef * self._kl_scale * divergence
            metrics["actor/kl_loss"] = divergence.detach()
        weight = reduce.weights(
            cfg.loss_agg_mode,
            keep & trained,
            x.sequence,
            x.num_sequences,
            self._max_tokens,
            total.dtype,
        )
        return LossOutput(per_token=total * weight, metrics=metrics, mask=keep)

    def policy(self, x: LossInputs, *, old_is_own: bool) -> tuple[PolicyInputs, PolicySpec]:
        """Return inputs with which the op `ops.policy.policy_loss` gives this loss and gradient.

        Args:
            x: loss inputs. Log-probs and entropies are not computed yet; only their dtype is read.
            old_is_own: whether the old log-probs come from the same pass as the loss.

        Raises:
            ConfigError: the fused op does not support the settings.
        """
        cfg = self._cfg
        name = self._algo.__name__.removeprefix("rlcore.algos.")
        if found := fused.problems(name, cfg):
            raise ConfigError("\n".join(found))
        where = (x.mask, x.sequence, x.num_sequences)
        weight = reduce.weights(cfg.loss_agg_mode, *where, self._max_tokens, x.log_probs.dtype)
        old = None if old_is_own else x.old_log_probs
        weighed = cfg.rollout_is != "none" and not cfg.bypass_mode
        given = PolicyInputs(
            # The correction is a non-negative factor, so it can be moved into the advantage.
            advantage=x.advantage if weighed else x.advantage * x.correction,
            weight=torch.where(x.mask, weight, 0.0),
            rollout_log_probs=x.rollout_log_probs,
            old_log_probs=x.rollout_log_probs if cfg.bypass_mode else old,
            ref_log_probs=x.ref_log_probs if cfg.kl_coef else None,
        )
        bounds = None
        if cfg.rollout_rs:
            (rule,) = correction.thresholds(cfg)
            bounds = (rule.lower, rule.upper)
        clip = cast(fused.Clipped, cfg)
        spec = PolicySpec(
            clip_low=clip.clip_low,
            clip_high=clip.clip_high,
            clip_dual=clip.clip_dual if math.isfinite(clip.clip_dual) else 0.0,
            is_threshold=cfg.rollout_is_threshold if weighed else None,
            is_mean=self._mean if weighed else 1.0,
            bounds=bounds,
            kl_type=cfg.kl_type if cfg.kl_coef else "none",
            kl_coef=cfg.kl_coef * self._kl_scale,
            entropy_coef=cfg.entropy_coef,
            log_limit=LOG_LIMIT,
        )
        return given, spec

    def _corrected(self, x: LossInputs) -> tuple[LossInputs, torch.Tensor, torch.Tensor]:
        """Return three values: the inputs with correction weights and a mask without rejected
        tokens; the mask of kept tokens; the log-probs of learner minus sampler, [T]."""
        cfg = self._cfg
        learner = x.old_log_probs
        if cfg.bypass_mode:
            learner = x.log_probs.detach()
            x = replace(x, old_log_probs=x.rollout_log_probs)
        log_w = (learner - x.rollout_log_probs).detach()
        where = (x.mask, x.sequence, x.num_sequences)
        keep = correction.keep(cfg, log_w, *where)
        if cfg.rollout_is != "none" and not (cfg.bypass_mode and cfg.has_ratio):
            weights = correction.weights(cfg, log_w, *where) / self._mean
            x = replace(x, correction=weights)
        return replace(x, mask=x.mask & keep), keep, log_w

    def _taught(
        self, x: LossInputs, trained: torch.Tensor
    ) -> tuple[LossInputs, dict[str, torch.Tensor]]:
        """Return the inputs with the reverse KL to the teacher subtracted from the advantages, and
        its metric."""
        if x.teacher_log_probs is None:
            return x, {}
        gap = torch.where(trained, x.old_log_probs - x.teacher_log_probs, 0.0)
        taught = replace(x, advantage=x.advantage - self._cfg.teacher_kl_coef * gap)
        return taught, {"actor/teacher_kl": gap}

    def mismatch(self, reduce_floats: Callable[..., list[float]]) -> dict[str, float]:
        """Return the `rollout_corr/*` and staleness metrics over all ranks and micro-batches so
        far. Collective. Tensor- and context-parallel ranks share tokens and count them several
        times, which does not change a mean."""
        total = mismatch.Sums.total(self._sums)
        added = reduce_floats(total.added.tolist(), "sum")
        highest = reduce_floats(total.highest.tolist(), "max")
        return mismatch.metrics(added, highest, self._cfg)

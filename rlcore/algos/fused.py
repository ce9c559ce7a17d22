"""Objectives that the fused policy loss supports (`--train.fused_loss`, rlcore/ops/policy.py).

An objective is supported if its policy loss is a clipped ratio, and if all other inputs for a token
are known before the logits are read or depend on this token only.
"""

from typing import Protocol

from rlcore.algos.base import AlgoConfig

NAMES = ("ppo", "grpo", "dapo", "dr_grpo")
"""Algorithms whose policy loss is `ratio.clipped` times the correction weight."""


class Clipped(Protocol):
    """Clip settings that every algorithm in NAMES has in addition to `AlgoConfig`."""

    @property
    def clip_low(self) -> float: ...

    @property
    def clip_high(self) -> float: ...

    @property
    def clip_dual(self) -> float: ...


def problems(name: str, cfg: AlgoConfig) -> list[str]:
    """Return one error message per setting of algorithm `name` that the fused loss cannot have."""
    if name not in NAMES:
        return [
            f"--train.fused_loss: loss {name} cannot be fused, only {', '.join(NAMES)}; turn it "
            "off, log-probs and gradients stay fused"
        ]
    out = []
    if cfg.teacher_kl_coef:
        out.append(
            f"--train.fused_loss: --algo.teacher_kl_coef {cfg.teacher_kl_coef:g} cannot be fused, "
            "since advantages then depend on log-probs; set it to 0, or turn fused_loss off"
        )
    if cfg.rollout_is not in ("none", "token") and not cfg.bypass_mode:
        out.append(
            f"--train.fused_loss: --algo.rollout_is {cfg.rollout_is} weights each token by all "
            "tokens of its response; use token or none, or turn fused_loss off"
        )
    if cfg.off_policy_mask_threshold:
        out.append(
            f"--train.fused_loss: --algo.off_policy_mask_threshold "
            f"{cfg.off_policy_mask_threshold:g} masks a token by all tokens of its response; set "
            "it to 0, or turn fused_loss off"
        )
    if cfg.kl_coef and cfg.kl_unbiased:
        out.append(
            "--train.fused_loss: --algo.kl_unbiased multiplies the KL by a ratio, which cannot be "
            "fused; leave it out, or turn fused_loss off"
        )
    given = ",".join(cfg.rollout_rs)
    if cfg.rollout_rs and (cfg.rollout_rs != ("token_k1",) or cfg.bypass_mode):
        out.append(
            "--train.fused_loss: --algo.rollout_rs "
            f"{given}{' with bypass_mode' if cfg.bypass_mode else ''} cannot be fused; use "
            "token_k1 without bypass_mode or none, or turn fused_loss off"
        )
    elif cfg.rollout_rs and cfg.loss_agg_mode == "seq-mean-token-mean":
        out.append(
            "--train.fused_loss: --algo.loss_agg_mode seq-mean-token-mean with rollout_rs "
            f"{given} counts tokens after rejection; use another mode, or turn fused_loss off"
        )
    return out

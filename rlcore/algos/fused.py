"""Which objectives the fused policy loss can say (`--train.fused_loss`, rlcore/ops/policy.py): a
clipped ratio, with everything else of a token known before its logits are read, or its own."""

from typing import Protocol

from rlcore.algos.base import AlgoConfig

NAMES = ("ppo", "grpo", "dapo", "dr_grpo")
"""Algorithms whose policy loss is ratio.clipped times the correction."""


class Clipped(Protocol):
    """What the settings of all of them have beside those of every algorithm."""

    @property
    def clip_low(self) -> float: ...

    @property
    def clip_high(self) -> float: ...

    @property
    def clip_dual(self) -> float: ...


def problems(name: str, cfg: AlgoConfig) -> list[str]:
    """What of algorithm `name` with these settings cannot be fused, one sentence each."""
    if name not in NAMES:
        return [
            f"--train.fused_loss: {name} is not among the losses that can be fused "
            f"({', '.join(NAMES)}); leave it off, log-probs and gradients run fused all the same"
        ]
    out = []
    if cfg.rollout_is == "sequence" and not cfg.bypass_mode:
        out.append(
            "--train.fused_loss: --algo.rollout_is sequence weighs a token by all tokens of its "
            "response; take token or none, or leave fused_loss off"
        )
    given = ",".join(cfg.rollout_rs)
    if cfg.rollout_rs and (cfg.rollout_rs != ("token_k1",) or cfg.bypass_mode):
        out.append(
            f"--train.fused_loss: --algo.rollout_rs {given}"
            f"{' with bypass_mode' if cfg.bypass_mode else ''} cannot be fused; take token_k1 "
            "without bypass_mode or none, or leave fused_loss off"
        )
    elif cfg.rollout_rs and cfg.loss_agg_mode == "seq-mean-token-mean":
        out.append(
            f"--train.fused_loss: --algo.loss_agg_mode seq-mean-token-mean with rollout_rs {given} "
            "counts a response's tokens after rejection; take another mode, or leave fused_loss off"
        )
    return out

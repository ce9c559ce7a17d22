"""An objective that is not finite: its gradient, or its loss alone."""

from dataclasses import dataclass, replace
from typing import Literal

from rlcore.algos import grpo
from rlcore.tensors import LossInputs, LossOutput


@dataclass(frozen=True, kw_only=True)
class NanConfig(grpo.GRPOConfig):
    where: Literal["gradient", "loss"] = "gradient"


def loss(x: LossInputs, cfg: NanConfig) -> LossOutput:
    """GRPO's, times or plus NaN."""
    found, nan = grpo.loss(x, cfg), float("nan")
    broken = found.per_token * nan if cfg.where == "gradient" else found.per_token + nan
    return replace(found, per_token=broken)

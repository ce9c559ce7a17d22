"""An algorithm outside of rlcore, as a user writes it: `--algo tests.own_algo`."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlcore.algos.advantage import GroupRewards
from rlcore.algos.base import AlgoConfig
from rlcore.tensors import LossInputs, LossOutput


@dataclass(frozen=True, kw_only=True)
class OwnConfig(AlgoConfig):
    push: float = 1.0
    """Factor of the loss."""


def advantages(groups: Sequence[GroupRewards], cfg: OwnConfig) -> list[list[float]]:
    """The best answer of a group against the others."""
    return [[1.0 if r == max(g.rewards) else -1.0 for r in g.rewards] for g in groups]


def loss(x: LossInputs, cfg: OwnConfig) -> LossOutput:
    """Policy gradient."""
    return LossOutput(
        per_token=-cfg.push * x.correction * x.advantage * x.log_probs,
        metrics={"algo/advantage": x.advantage},
    )

"""The loss that the learner is given: rollout correction, then the algorithm of the recipe."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

from rlcore.algos import ratio
from rlcore.algos.base import AlgoConfig
from rlcore.tensors import LossInputs, LossOutput


class Objective:
    """A `Loss`. Where nobody recomputed old log-probs they are the learner's own of this very pass
    (the first update of a rollout), so the correction is made here and not before."""

    def __init__(self, algo: ModuleType, cfg: AlgoConfig) -> None:
        self._algo, self._cfg = algo, cfg
        self.needs_entropy_grad = cfg.entropy_coef != 0
        self.watch_mismatch = True
        self._sums: list[dict[str, float]] = []

    def __call__(self, x: LossInputs) -> LossOutput:
        cap = self._cfg.rollout_is_threshold
        if self._cfg.rollout_is == "token":
            x = replace(x, correction=ratio.token_tis(x.logp_old, x.logp_sampler, cap))
        if self.watch_mismatch:
            weight = x.correction
            self._sums.append(ratio.mismatch_sums(x.logp_old, x.logp_sampler, weight, x.mask, cap))
        return self._algo.loss(x, self._cfg)

    def mismatch(self, reduce_floats: Callable[..., list[float]]) -> dict[str, float]:
        """`rollout_corr/*` over all ranks and micro-batches since the start. Collective. Ranks that
        hold the same tokens (tensor parallel) count them twice, which no mean notices."""
        empty = ratio.NO_SUMS
        total = {k: pick(k)([s[k] for s in self._sums] or [empty[k]]) for k in empty}
        for op in ("sum", "max", "min"):
            names = [k for k in empty if operation(k) == op]
            reduced = reduce_floats([total[k] for k in names], op)
            total |= dict(zip(names, reduced, strict=True))
        return ratio.mismatch_metrics(total)


def operation(name: str) -> str:
    """How sums of this name combine."""
    return {"max": "max", "min": "min"}.get(name[:3], "sum")


def pick(name: str) -> Callable[[list[float]], float]:
    return {"max": max, "min": min, "sum": sum}[operation(name)]

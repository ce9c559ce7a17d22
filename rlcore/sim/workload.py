"""How long responses are. A prompt keeps its character: the long ones are long again."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlcore.utils.seed import derive


@dataclass(frozen=True, kw_only=True, slots=True)
class Generator:
    """PAPERS.md A8: a log-normal body, and with a prompt's own probability a tail up to the cap.

    z, e ~ N(0, 1) per prompt    q = sigmoid(a + b z + s e)
    body = exp(mu + sp z + sr e')    tail = exp(log cap + pt (0.3 - |e''|))
    """

    cap: int
    mu: float
    sp: float
    sr: float
    pt: float
    a: float
    b: float
    s: float
    prompt_tokens: int = 300

    def lengths(self, row: int, count: int, seed: int) -> np.ndarray:
        """int64 [count], of responses to the prompt of `row`; `seed` tells rounds apart."""
        own = np.random.default_rng(derive(7, "prompt", row))
        z, e = own.standard_normal(2)
        q = 1 / (1 + math.exp(-(self.a + self.b * z + self.s * e)))
        dice = np.random.default_rng(derive(seed, "lengths", row))
        body = np.exp(self.mu + self.sp * z + self.sr * dice.standard_normal(count))
        tail = np.exp(math.log(self.cap) + self.pt * (0.3 - np.abs(dice.standard_normal(count))))
        is_tail = dice.random(count) < q
        drawn = np.where(is_tail, np.maximum(tail, body), body)
        return np.clip(drawn, 16, self.cap).astype(np.int64)


GENERATORS: Mapping[str, Generator] = {
    "16k": Generator(cap=16_384, mu=6.212, sp=0.434, sr=0.968, pt=1.151, a=-3.496, b=0.903, s=0.66),
    "32k": Generator(cap=32_768, mu=6.709, sp=0.005, sr=0.674, pt=1.683, a=-4.037, b=1.646, s=0.06),
}
"""Fitted on the ratios of figure 11 of RollPacker (PAPERS.md A8), each on its own column."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Lengths that were measured: of every prompt those that it had. More are drawn from them."""

    by_prompt: Sequence[Sequence[int]]
    prompt_tokens: int = 300

    def lengths(self, row: int, count: int, seed: int) -> np.ndarray:
        """int64 [count]; without replacement while there are enough."""
        own = np.asarray(self.by_prompt[row % len(self.by_prompt)], np.int64)
        dice = np.random.default_rng(derive(seed, "lengths", row))
        if count <= len(own):
            return dice.permutation(own)[:count]
        return np.concatenate([dice.permutation(own), dice.choice(own, count - len(own))])

"""Response lengths of a workload. Each prompt has its own distribution of lengths, so a prompt with
long responses has long responses in later rounds, too."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Protocol

import numpy as np

from rlcore.utils.seed import derive


@dataclass(frozen=True, kw_only=True, slots=True)
class Generator:
    """Generator of response lengths, fitted to published lengths: a log-normal body and, with a
    probability q of the prompt, a tail up to the cap. e', e'' ~ N(0, 1) per response.

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
    seed: int = 0
    """Seed of the data set, which determines the prompts."""

    def lengths(self, row: int, count: int, seed: int) -> list[int]:
        """Return the lengths of `count` responses to the prompt in data set row `row`. `seed`
        should differ between rounds."""
        z, e = _characters(self.seed, row // BLOCK)[row % BLOCK]
        q = 1 / (1 + math.exp(-(self.a + self.b * z + self.s * e)))
        dice = np.random.default_rng(derive(seed, "lengths", row))
        noise, chance = dice.standard_normal((2, count)).tolist(), dice.random(count).tolist()
        middle, top = self.mu + self.sp * z, math.log(self.cap)
        out = []
        for body, tail, dice_q in zip(*noise, chance, strict=True):
            log_length = middle + self.sr * body
            if dice_q < q:
                log_length = max(log_length, top + self.pt * (0.3 - abs(tail)))
            out.append(int(math.exp(max(LOG_LEAST, min(log_length, top))) + 1e-9))
        return out


LOG_LEAST = math.log(16)
BLOCK = 1024


@lru_cache(maxsize=4096)
def _characters(seed: int, block: int) -> list[list[float]]:
    """Return the random numbers (z, e) that characterize each prompt in a block."""
    dice = np.random.default_rng(derive(seed, "prompts", block))
    return dice.standard_normal((BLOCK, 2)).tolist()


_16K = Generator(cap=16_384, mu=6.212, sp=0.434, sr=0.968, pt=1.151, a=-3.496, b=0.903, s=0.66)
GENERATORS: Mapping[str, Generator] = {
    "8k": replace(_16K, cap=8_192),
    "16k": _16K,
    "32k": Generator(cap=32_768, mu=6.709, sp=0.005, sr=0.674, pt=1.683, a=-4.037, b=1.646, s=0.06),
}
"""Length generators by name. 16k and 32k are fitted on the ratios in their columns of RollPacker's
figure 11; 8k is 16k with a lower cap."""


HARD = 0.05
FLASH_8K = Generator(
    cap=8_192,
    mu=7.6,
    sp=0.3,
    sr=0.4,
    pt=0.0,
    a=-20 * NormalDist().inv_cdf(1 - HARD),
    b=20.0,
    s=0.0,
)
"""Lengths for ROLL Flash's queue scheduling and prompt replication. The median is 2,000 tokens; for
1 in 20 prompts (`HARD`), all responses reach the limit. Fitted on the two published ratios of queue
scheduling, with the scheduler of ROLL, which rlcore does not have."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Measured response lengths by prompt, from which the lengths of a round are drawn."""

    by_prompt: Sequence[Sequence[int]]
    prompt_tokens: int = 300

    @property
    def cap(self) -> int:
        return max(map(max, self.by_prompt))

    def lengths(self, row: int, count: int, seed: int) -> list[int]:
        """Draw `count` recorded lengths of the row's prompt. If fewer are recorded, repeat some."""
        own = self.by_prompt[row % len(self.by_prompt)]
        dice = random.Random(derive(seed, "lengths", row))
        if count <= len(own):
            return dice.sample(own, count)
        return [*dice.sample(own, len(own)), *dice.choices(own, k=count - len(own))]


class Workload(Protocol):
    """Source of response lengths, such as a `Generator` or a `Recorded`."""

    @property
    def cap(self) -> int: ...

    @property
    def prompt_tokens(self) -> int: ...

    def lengths(self, row: int, count: int, seed: int) -> list[int]: ...

"""A reward that waits for a given time, for tools/bench_reward_overlap.py."""

import time
from dataclasses import dataclass
from typing import Any

from rlcore.config.schema import RewardConfig


@dataclass(frozen=True, kw_only=True)
class WaitConfig(RewardConfig):
    """Keys of this reward."""

    wait_s: float = 0.0
    """Seconds that every score takes."""


def score(sample: Any, prompt: Any, text: str, config: WaitConfig) -> float:
    """The share of distinct characters, after a while."""
    time.sleep(config.wait_s)
    return len(set(text)) / 34

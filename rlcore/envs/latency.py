"""Environment with simulated latency, for experiments, as in ROLL Flash. Every step takes max(0,
N(mean, std)) seconds; some steps take longer (fail-slow), some never end (fail-stop).

Rows of any data set can be used. The observation after a turn is a fixed text; `--reward` scores
the last turn.
"""

import time
from dataclasses import dataclass
from typing import Annotated, Any

import gymnasium
from gymnasium.spaces import Text

from rlcore.config.schema import EnvConfig, Share
from rlcore.envs.kind import EnvKind
from rlcore.utils.bounds import at_least
from rlcore.utils.seed import rng

_FOR_EVER_S = 1e7


@dataclass(frozen=True, kw_only=True)
class LatencyConfig(EnvConfig):
    """Keys of `--env latency`."""

    turns: Annotated[int, at_least(1)] = 4
    """Number of turns in an episode."""
    mean_s: Annotated[float, at_least(0)] = 0.1
    """Mean seconds of a step; durations are normally distributed, cut at 0."""
    std_s: Annotated[float, at_least(0)] = 0.1
    """Standard deviation in seconds of a step's duration."""
    fail_slow: Share = 0.0
    """Share of the steps that take env.slow_factor times as long."""
    slow_factor: Annotated[float, at_least(0)] = 10.0
    """Ratio of a slow step's duration to that of a normal step, with env.fail_slow."""
    fail_stop: Share = 0.0
    """Share of the steps that never end."""
    answer: str = ";"
    """Text of every observation."""

    def problems(self) -> list[str]:
        """Return errors for conflicting keys (`EnvConfig.problems`)."""
        if self.turns <= self.max_turns:
            return []
        return [f"--env.turns {self.turns}: must be at most env.max_turns {self.max_turns}"]


class Latency(gymnasium.Env[str, str]):
    """Environment that sleeps. Its latencies depend only on the episode's seed and name."""

    observation_space = action_space = Text(max_length=1 << 20, min_length=0)

    def __init__(self, config: LatencyConfig) -> None:
        self._config, self._left = config, config.turns
        self._random = rng(0, "latency")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode without delay."""
        super().reset(seed=seed)
        self._random = rng(seed or 0, "latency", (options or {}).get("episode", ""))
        self._left = self._config.turns
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Sleep, then return the fixed observation."""
        seconds = self.next_s()
        time.sleep(seconds)
        self._left -= 1
        return self._config.answer, 0.0, self._left == 0, False, {"latency_s": seconds}

    def next_s(self) -> float:
        """Return the seconds that the next step takes."""
        c, random = self._config, self._random
        seconds = max(0.0, random.gauss(c.mean_s, c.std_s))
        if random.random() < c.fail_slow:
            seconds *= c.slow_factor
        return _FOR_EVER_S if random.random() < c.fail_stop else seconds


KIND = EnvKind(LatencyConfig, Latency, scored_by="reward")

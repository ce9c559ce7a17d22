"""Environment with a single turn: the same task as a run without an environment."""

from typing import Any

import gymnasium
from gymnasium.spaces import Text

from rlcore.config.schema import EnvConfig
from rlcore.envs.kind import EnvKind

_ANY = Text(max_length=1 << 20, min_length=0)


class SingleTurn(gymnasium.Env[str, str]):
    """Environment that ends after the first turn, which `--reward` scores."""

    observation_space = action_space = _ANY

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode. There is no observation: the policy sees only the prompt."""
        super().reset(seed=seed)
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """End the episode."""
        return "", 0.0, True, False, {}


KIND = EnvKind(EnvConfig, lambda config: SingleTurn(), scored_by="reward")

"""gymnasium's Blackjack as text: a turn is hit or stick, and the observation is the new hand.

The prompt is the first hand (`rlcore/data/cards_task.py`); the score is 1 for a win, 0 for a draw,
-1 for a loss.
"""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
from gymnasium.envs.toy_text.blackjack import BlackjackEnv
from gymnasium.spaces import Text

from rlcore.config.schema import EnvConfig
from rlcore.data import cards_task
from rlcore.envs.kind import EnvKind

_ACTION = re.compile(r"\b(hit|stick|stand|h|s)\b", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class BlackjackConfig(EnvConfig):
    """Keys of `--env blackjack`."""

    TASK: ClassVar[str] = cards_task.NAME


class Blackjack(gymnasium.Env[str, str]):
    """Blackjack environment. The action is the last hit or stick in a turn, as a word or its first
    letter; a turn without an action changes nothing."""

    observation_space = Text(max_length=1 << 8, min_length=0, charset=cards_task.CHARS)
    action_space = Text(max_length=1 << 20, min_length=0)

    def __init__(self) -> None:
        self._table = BlackjackEnv()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Deal the first hand. `options["game"]` is the seed of the cards whose first hand the
        prompt shows. Without this option, `seed` is the seed of the cards, and the first hand is
        returned as the observation."""
        super().reset(seed=seed)
        game = (options or {}).get("game")
        seen, _ = self._table.reset(seed=seed if game is None else int(game))
        return cards_task.hand(seen) if game is None else "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one action. The info has `valid` (whether the turn had an action) and `success`
        (whether the game is won)."""
        found = _ACTION.findall(action)
        if not found:
            seen = cards_task.hand(self._table._get_obs())
            return seen, 0.0, False, False, {"valid": 0.0, "success": 0.0}
        seen, reward, ended, cut, _ = self._table.step(int(found[-1][0].lower() == "h"))
        info = {"valid": 1.0, "success": float(reward > 0)}
        return cards_task.hand(seen), float(reward), ended, cut, info


KIND = EnvKind(BlackjackConfig, lambda config: Blackjack())

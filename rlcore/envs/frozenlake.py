"""gymnasium's FrozenLake as text: a turn is a direction, and the observation is the new board.

Directions are left, down, right and up. The prompt is the first board (`rlcore/data/lake_task.py`);
the score is 1 at the goal.
"""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from gymnasium.spaces import Text

from rlcore.config.schema import EnvConfig
from rlcore.data import lake_task
from rlcore.envs.kind import EnvKind

_ACTION = re.compile(r"\b(left|down|right|up|[LDRU])\b", re.IGNORECASE)
_EMPTY = ("SF", "FG")


@dataclass(frozen=True, kw_only=True)
class FrozenLakeConfig(EnvConfig):
    """Keys of `--env frozenlake`."""

    TASK: ClassVar[str] = lake_task.NAME
    max_turns: int = 10
    slippery: bool = False
    """Whether a move slips to either side of its direction in two of three cases."""


class FrozenLake(gymnasium.Env[str, str]):
    """FrozenLake environment. The move is the last direction in a turn, as a word or its first
    letter; a turn without a direction changes nothing."""

    observation_space = Text(max_length=1 << 12, charset=lake_task.CHARS)
    action_space = Text(max_length=1 << 20, min_length=0)

    def __init__(self, slippery: bool = False) -> None:
        self._slippery = slippery
        self._desc: list[str] = list(_EMPTY)
        self._lake: FrozenLakeEnv | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start a game. `options["desc"]` is the map that the prompt shows. Without this option, a
        small default map is used and becomes the observation. Raises ValueError if the map is
        invalid."""
        super().reset(seed=seed)
        given = (options or {}).get("desc")
        self._desc = list(given or _EMPTY)
        if {"S", "G"} - set("".join(self._desc)) or len({len(line) for line in self._desc}) > 1:
            raise ValueError(f"desc {self._desc}: must be rows of one length with an S and a G")
        self._lake = FrozenLakeEnv(desc=self._desc, is_slippery=self._slippery)
        self._lake.reset(seed=seed)
        return "" if given else self._board(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Make one move. The info has `valid` (whether the turn had a move) and `success` (whether
        the goal is reached)."""
        assert self._lake is not None, "call reset first"
        found = _ACTION.findall(action)
        if not found:
            return self._board(), 0.0, False, False, {"valid": 0.0, "success": 0.0}
        move = list(lake_task.MOVES).index(found[-1][0].upper())
        _, reward, ended, cut, _ = self._lake.step(move)
        info = {"valid": 1.0, "success": float(reward > 0)}
        return self._board(), float(reward), ended, cut, info

    def _board(self) -> str:
        assert self._lake is not None
        return lake_task.board(self._desc, divmod(int(self._lake.s), len(self._desc[0])))


KIND = EnvKind(FrozenLakeConfig, lambda config: FrozenLake(config.slippery))

"""ALFWorld's household tasks as text. Optional: needs the package alfworld and its games.

A row of `--data.train` has the path of a game (`game.tw-pddl`) in its field `game`. Its prompt is
the text before the description of the first room. The score is 1 if the task is done.

The package is used only through `Game`; the contract test replaces it with a stub. This environment
has not been run with the real package.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium
from gymnasium.spaces import Text

from rlcore.config.schema import EnvConfig
from rlcore.envs.kind import EnvKind


class Game(Protocol):
    """Interface of one ALFWorld game."""

    def reset(self) -> tuple[str, Sequence[str]]:
        """Start the game. Returns the observation and the admissible commands."""

    def step(self, command: str) -> tuple[str, bool, bool, Sequence[str]]:
        """Run a command. Returns the observation, whether the game is over, whether it is won, and
        the admissible commands."""

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class AlfworldConfig(EnvConfig):
    """Keys of `--env alfworld`."""

    max_turns: int = 50
    show_commands: bool = True
    """Whether to list the admissible commands after every observation."""


class Alfworld(gymnasium.Env[str, str]):
    """Environment over one ALFWorld game. The command is the text after the last `action:` of a
    turn; without `action:`, the turn's last line."""

    observation_space = action_space = Text(max_length=1 << 20, min_length=0)

    def __init__(self, config: AlfworldConfig, open_game: Callable[[str], Game]) -> None:
        self._config, self._open = config, open_game
        self._game: Game | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start the game and describe its first room. Raises ValueError if the row has no game."""
        super().reset(seed=seed)
        path = (options or {}).get("game")
        if not path:
            raise ValueError("the row has no field game; set it to the path of an ALFWorld game")
        self.close()
        self._game = self._open(str(path))
        return self._shown(*self._game.reset()), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Run one command; the game itself answers unknown commands."""
        assert self._game is not None, "call reset first"
        seen, over, won, commands = self._game.step(command_of(action))
        return self._shown(seen, commands), float(won), over, False, {"success": float(won)}

    def close(self) -> None:
        """Close the game."""
        if self._game is not None:
            self._game.close()
            self._game = None

    def _shown(self, seen: str, commands: Sequence[str]) -> str:
        listed = f"\nCommands: {', '.join(commands)}" if self._config.show_commands else ""
        return f"{seen.strip()}{listed}\n"


def command_of(text: str) -> str:
    """Extract the command of a turn: `Think. Action: Go to desk 1` becomes `go to desk 1`."""
    _, found, after = text.lower().rpartition("action:")
    lines = (after if found else text.lower()).strip().splitlines() or [""]
    return (lines[0] if found else lines[-1]).strip().rstrip(".")


class TextWorldGame:
    """`Game` that uses the package alfworld, with a batch size of 1."""

    def __init__(self, path: str) -> None:
        import textworld
        import textworld.gym
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler

        name = textworld.gym.register_games(
            [path],
            textworld.EnvInfos(won=True, admissible_commands=True),
            batch_size=1,
            asynchronous=False,
            wrappers=[AlfredDemangler()],
        )
        self._env = textworld.gym.make(name)

    def reset(self) -> tuple[str, Sequence[str]]:
        """Start the game (`Game.reset`)."""
        seen, infos = self._env.reset()
        return seen[0], infos["admissible_commands"][0]

    def step(self, command: str) -> tuple[str, bool, bool, Sequence[str]]:
        """Run a command (`Game.step`)."""
        seen, _, over, infos = self._env.step([command])
        return seen[0], bool(over[0]), bool(infos["won"][0]), infos["admissible_commands"][0]

    def close(self) -> None:
        """Close the game (`Game.close`)."""
        self._env.close()


def _make(config: AlfworldConfig) -> Alfworld:
    if importlib.util.find_spec("alfworld") is None:
        raise ModuleNotFoundError("the package alfworld is not installed; pip install alfworld")
    return Alfworld(config, TextWorldGame)


KIND = EnvKind(AlfworldConfig, _make)

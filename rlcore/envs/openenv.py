"""Environments of OpenEnv: a server that is known by its URL. Optional: needs openenv-core.

    --env openenv --env.url http://localhost:8000 --env.action message --env.observation text

An episode is a session of the server. The text of a turn is a field of its action (`env.action`),
and a field of its observation (`env.observation`) is what the policy sees next. A row of
`--data.train` may have a field `reset`, an object with further arguments of the server's reset.

The package is used only through `Session`. Other protocols need a class with gymnasium's interface
instead (README.md).
"""

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import gymnasium
from gymnasium.spaces import Text

from rlcore.config.schema import EnvConfig
from rlcore.envs.kind import EnvKind


class SessionStep(NamedTuple):
    """Answer of the server to a reset or an action."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


class Session(Protocol):
    """Interface of one session of an OpenEnv server."""

    def reset(self, arguments: Mapping[str, Any]) -> SessionStep: ...

    def step(self, action: Mapping[str, Any]) -> SessionStep:
        """Take an action. Raises ValueError if the server has no such action."""

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class OpenEnvConfig(EnvConfig):
    """Keys of `--env openenv`."""

    url: str = ""
    """Address of the environment's server, such as http://localhost:8000."""
    action: str = "message"
    """Field of the action that holds the text of a turn; the other fields have the server's
    defaults. Empty: the text is the whole action, as JSON."""
    observation: str = ""
    """Field of the observation that the policy sees. Empty: the whole observation, as JSON."""

    def problems(self) -> list[str]:
        """Return errors for conflicting keys (`EnvConfig.problems`)."""
        if self.url.startswith(("http://", "https://", "ws://", "wss://")):
            return []
        return [
            f"--env.url {self.url!r}: is not the address of a server; give one such as "
            "http://localhost:8000"
        ]


class OpenEnv(gymnasium.Env[str, str]):
    """Environment with one session of the server per episode."""

    observation_space = action_space = Text(max_length=1 << 20, min_length=0)

    def __init__(self, config: OpenEnvConfig, connect: Callable[[], Session]) -> None:
        self._config, self._connect = config, connect
        self._session: Session | None = None
        self._score = 0.0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin a session. Raises ValueError if the row's field `reset` is no object."""
        super().reset(seed=seed)
        row = options or {}
        more = row.get("reset") or {}
        if not isinstance(more, Mapping):
            raise ValueError(f"field reset of the row: {more!r:.80} is not an object")
        self.close()
        self._score = 0.0
        self._session = self._connect()
        step = self._session.reset({"seed": seed, "episode_id": row.get("episode"), **more})
        return self._shown(step.observation), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Send a turn. If it is no valid action, the observation is the reason."""
        assert self._session is not None, "call reset first"
        try:
            sent = {self._config.action: action} if self._config.action else _action(action)
            step = self._session.step(sent)
        except ValueError as error:
            return f"error: {error}", 0.0, False, False, {"return": self._score}
        reward = float(step.reward or 0.0)
        self._score += reward
        shown = self._shown(step.observation)
        return shown, reward, bool(step.done), False, {"return": self._score}

    def close(self) -> None:
        """End the session."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _shown(self, observation: Mapping[str, Any]) -> str:
        name = self._config.observation
        if name and name not in observation:
            there = ", ".join(sorted(observation)) or "none"
            raise ValueError(f"--env.observation {name}: the server's fields are {there}")
        value = observation[name] if name else observation
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _action(text: str) -> Mapping[str, Any]:
    """Read the action of a turn. Raises ValueError if it is no JSON object."""
    try:
        found = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the action is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError("the action is not a JSON object")
    return found


class ServerSession:
    """`Session` that uses the package openenv-core."""

    def __init__(self, config: OpenEnvConfig) -> None:
        from openenv.core import GenericEnvClient

        client = GenericEnvClient(base_url=config.url, message_timeout_s=config.timeout_s)
        self._client = client.sync()
        self._client.connect()

    def reset(self, arguments: Mapping[str, Any]) -> SessionStep:
        """Begin the episode (`Session.reset`)."""
        return _step(self._client.reset(**arguments))

    def step(self, action: Mapping[str, Any]) -> SessionStep:
        """Take an action (`Session.step`)."""
        try:
            return _step(self._client.step(dict(action)))
        except RuntimeError as error:  # the package has no class for what the server refuses
            if "VALIDATION_ERROR" in str(error):
                raise ValueError("the environment does not know this action") from error
            raise

    def close(self) -> None:
        """End the session (`Session.close`)."""
        self._client.close()


def _step(result: Any) -> SessionStep:
    return SessionStep(result.observation, result.reward, result.done)


def _make(config: OpenEnvConfig) -> OpenEnv:
    if importlib.util.find_spec("openenv") is None:
        raise ModuleNotFoundError("the package openenv is not installed; pip install openenv-core")
    return OpenEnv(config, lambda: ServerSession(config))


KIND = EnvKind(OpenEnvConfig, _make)

"""Messages between a rank and the processes that run its environments: frames of msgpack."""

from typing import Any, Literal

from msgspec import Struct

from rlcore.envs.kind import ToolTurn
from rlcore.records import Prompt

READY = -1
"""Number of the reply that reports whether the child could load the environment."""


class EnvStart(Struct, frozen=True, kw_only=True):
    """First message to a child: the environment to run."""

    env: str
    config: dict[str, Any]
    sys_path: tuple[str, ...]


class EnvCall(Struct, frozen=True, kw_only=True):
    number: int
    key: int
    """Key that identifies the environment."""
    what: Literal["reset", "step", "close"]
    """Kind of call. `reset` creates the environment. `close` is answered once the environment is
    closed."""
    seed: int = 0
    prompt: Prompt | None = None
    episode: str = ""
    text: str = ""
    """Text of the policy's turn, for `step`."""
    tokens: tuple[int, ...] = ()
    """Token ids of the policy's turn, for `step`."""
    turn: ToolTurn | None = None
    """The turn with its calls, for `step` of a kind with tools."""


class EnvReply(Struct, frozen=True, kw_only=True):
    number: int
    seen: str | list[int | str] = ""
    reward: float = 0.0
    is_over: bool = False
    numbers: dict[str, float] = {}
    seconds: float = 0.0
    error: str = ""

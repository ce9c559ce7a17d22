"""Interface of an environment kind: its config section, and how to create an environment.

Each environment module in `envs/` defines one `KIND`; `registry.ENVS` names the module. An
environment has gymnasium's interface, on text: `step` takes the text of the policy's turn. `reset`
and `step` return the next observation, as text or as token ids. The environment runs in a child
process (child.py). If it blocks, raises, crashes or loops there, only its episode fails.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from msgspec import Struct

from rlcore.config.schema import EnvConfig
from rlcore.utils.scores import LARGEST, number, plain_name

Seen = str | Sequence[int | str]
"""Observation: text, or token ids that are used unchanged, or a result for each call of a turn."""
_MOST_NUMBERS, _NAME_CHARS = 16, 40


@runtime_checkable
class TextEnv(Protocol):
    """Interface of an environment: gymnasium's interface on text, for one episode."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Seen, dict[str, Any]]:
        """Begin the episode. `options` has the data row as `prompt`, `answer` and its other fields,
        and the episode's name as `episode`. The policy sees the prompt, then the returned
        observation, which is usually empty."""

    def step(self, action: Any) -> tuple[Seen, float, bool, bool, dict[str, Any]]:
        """Take one turn. `action` is the turn's text without special tokens, or its token ids if
        the class sets `wants_tokens = True`. Numbers in the last `info` of an episode become the
        metrics `env/<name>`."""

    def close(self) -> None:
        """Close the environment at the end of the episode."""


class TurnCall(Struct, frozen=True):
    """Call of a tool: a name that `EnvKind.tools` has, and its arguments."""

    name: str
    arguments: dict[str, Any]


class ToolTurn(Struct, frozen=True):
    """Turn of the policy, as an environment with `EnvKind.tools` gets it."""

    content: str
    """Text of the turn before its calls."""
    calls: tuple[TurnCall, ...]
    num_malformed: int = 0
    """Number of further calls, which cannot be made; the policy is told the reason of each."""


def no_tools(config: Any) -> Sequence[Mapping[str, Any]]:
    """Return the tools of a kind without any."""
    return ()


class EnvKind(NamedTuple):
    """Environment kind: a config section and a function that creates environments."""

    config: type[EnvConfig]
    make: Callable[[Any], TextEnv]
    """Function that creates an environment from the config section; called for every episode."""
    scored_by: Literal["env", "reward"] | Callable[[Any], str] = "env"
    """Source of an episode's score. `env`: the sum of the environment's rewards. `reward`: that sum
    plus the score of `--reward` for the text of the last turn. A function of the config section
    returns `reward`, or another text for `env`."""
    host: Callable[..., Any] | None = None
    """Class whose object plays the episodes of a rank, instead of environments in processes
    (`engine.EpisodeHost`). Its arguments are those of `harness_env.HarnessHost`."""
    tools: Callable[[Any], Sequence[Mapping[str, Any]]] = no_tools
    """Function that returns the tools of a config section in OpenAI's form. If there are any, the
    chat template shows them, `step` takes a `ToolTurn`, and it returns a result per call, a list of
    texts, or a text for the next message of the user."""


class EnvStep(NamedTuple):
    """Checked result of a call to an environment."""

    seen: Seen
    reward: float
    is_over: bool
    numbers: dict[str, float]
    seconds: float


def checked(
    seen: Any, reward: Any, info: Any
) -> tuple[str | list[int | str], float, dict[str, float]]:
    """Check an observation, a reward and the numbers of an `info` dict. Raises TypeError or
    ValueError if any is invalid."""
    if not isinstance(seen, str):
        if not isinstance(seen, Sequence) and not hasattr(seen, "tolist"):
            raise TypeError(
                f"the observation is a {type(seen).__name__}; return text or a sequence of token "
                "ids"
            )
        seen = [i if isinstance(i, str) else int(i) for i in seen]
    value = number("the reward", reward)
    if not isinstance(info, Mapping):
        raise TypeError(f"info is a {type(info).__name__}; return a dict")
    plain = {k: v.item() if isinstance(v, np.generic) else v for k, v in info.items()}
    numbers = {
        plain_name(k, _NAME_CHARS): float(v)
        for k, v in plain.items()
        if isinstance(v, int | float) and abs(v) <= LARGEST
    }
    return seen, value, dict(list(numbers.items())[:_MOST_NUMBERS])

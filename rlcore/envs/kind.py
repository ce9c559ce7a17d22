"""What a kind of environment is: its section, and how one is made.

A module of `envs/` has one `KIND`, and `registry.ENVS` names the module. An environment has
gymnasium's interface, on text: `step` gets what the policy wrote in its turn, `reset` and `step`
give what it reads next, as text or as token ids. It runs in a process of its own (child.py), where
it may block, raise, crash or loop: that costs its episode.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from rlcore.config.schema import EnvConfig

Seen = str | Sequence[int]
"""What an environment shows: text, or token ids that are taken as they are."""
_MOST_NUMBERS, _NAME_CHARS = 16, 40


@runtime_checkable
class TextEnv(Protocol):
    """gymnasium's interface, of one episode."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Seen, dict[str, Any]]:
        """Begin. `options` have the row of the data as `prompt`, `answer` and its other fields, and
        the episode's name as `episode`. The policy has read the prompt; what is returned comes
        after it, and is mostly empty."""

    def step(self, action: Any) -> tuple[Seen, float, bool, bool, dict[str, Any]]:
        """`action` is the text of the turn without special tokens, or, where the class says
        `wants_tokens = True`, its token ids. Numbers of the last `info` of an episode are shown as
        `env/<name>`."""

    def close(self) -> None:
        """The episode is over."""


class Kind(NamedTuple):
    """See the module."""

    config: type[EnvConfig]
    make: Callable[[Any], TextEnv]
    """From the section to an environment, for every episode."""
    scored_by: Literal["env", "reward"] = "env"
    """`env`: an episode scores the sum of the environment's rewards. `reward`: that, and what
    `--reward` gives for the text of the last turn."""


class Step(NamedTuple):
    """What an environment answered, checked."""

    seen: Seen
    reward: float
    is_over: bool
    numbers: dict[str, float]
    seconds: float


def checked(seen: Any, reward: Any, info: Any) -> tuple[str | list[int], float, dict[str, float]]:
    """Observation, reward and the numbers of an info. TypeError or ValueError in one sentence for
    what is none."""
    if not isinstance(seen, str):
        if not isinstance(seen, Sequence) and not hasattr(seen, "tolist"):
            raise TypeError(
                f"the observation is a {type(seen).__name__}; return text or a sequence of token "
                "ids"
            )
        seen = [int(i) for i in seen]
    value = float(reward)
    if not math.isfinite(value):
        raise ValueError(f"the reward is {value}; return a finite number")
    if not isinstance(info, Mapping):
        raise TypeError(f"info is a {type(info).__name__}; return a dict")
    numbers = {
        str(k).replace("/", "_")[:_NAME_CHARS]: float(v)
        for k, v in info.items()
        if isinstance(v, int | float) and math.isfinite(v)
    }
    return seen, value, dict(list(numbers.items())[:_MOST_NUMBERS])

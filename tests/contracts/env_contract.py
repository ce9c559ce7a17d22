"""What every environment must do, whatever its world: point `check_env` at a name.

check_env("frozenlake", prompt, ["Left", "Down"], scores={0.0, 1.0})
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from rlcore.config.schema import EnvConfig
from rlcore.envs.kind import EnvKind, checked
from rlcore.envs.pool import EnvPool
from rlcore.envs.registry import resolve
from rlcore.records import Prompt

ODD_TURNS = [
    "",
    " ",
    "\n" * 100,
    "\x00",
    "\u00e9\u4e2d\U0001f600",
    "}" * 50,
    "9" * 5000,
    "<|im_end|>",
]
Told = list[tuple[Any, float, bool]]
"""What an environment showed, its reward, whether it is over; of reset and every step."""


def prompt_of(text: str = "q", answer: str = "", **fields: Any) -> Prompt:
    """A row of data."""
    tokens = np.arange(5, dtype=np.int32)
    return Prompt(index=0, dataset="test", tokens=tokens, text=text, answer=answer, fields=fields)


def check_env(
    name: str,
    prompt: Prompt,
    turns: Sequence[str],
    *,
    settings: dict[str, Any] | None = None,
    kind: EnvKind | None = None,
) -> Told:
    """The suite: the section, one world for one seed, odd turns, and the same told by a process.
    Returns what the environment told of `turns`. `kind` with a stub takes the place of the name's,
    and no process is asked then."""
    found = kind or resolve(name)
    assert issubclass(found.config, EnvConfig)
    config = found.config(**(settings or {}))
    sent = msgspec.to_builtins(config)
    assert msgspec.convert(sent, found.config) == config, "the section must survive JSON"
    told = _play(found.make(config), prompt, turns)
    assert told == _play(found.make(config), prompt, turns), "one seed must give one world"
    assert all(not over for _, _, over in told[:-1]), "nothing comes after the end"
    _play(found.make(config), prompt, ODD_TURNS)  # raises nothing
    unused = found.make(config)
    unused.close()  # before any reset, too
    if kind is None:
        assert asyncio.run(_ask(name, config, prompt, turns)) == told
    return told


def _play(env: Any, prompt: Prompt, turns: Sequence[str]) -> Told:
    options = {**prompt.fields, "prompt": prompt.text, "answer": prompt.answer, "episode": "t0.0"}
    seen, info = env.reset(seed=3, options=options)
    seen, _, _ = checked(seen, 0.0, info)
    told: Told = [(seen, 0.0, False)]
    for turn in turns:
        action = [len(turn)] if getattr(env, "wants_tokens", False) else turn
        seen, reward, ended, cut, info = env.step(action)
        seen, reward, _ = checked(seen, reward, info)
        assert math.isfinite(reward)
        told.append((seen, reward, bool(ended) or bool(cut)))
        if told[-1][2]:
            break
    env.close()
    return told


async def _ask(name: str, config: EnvConfig, prompt: Prompt, turns: Sequence[str]) -> Told:
    pool = EnvPool(name, config)
    try:
        place = await pool.open()
        step = await place.reset(3, prompt, "t0.0")
        told: Told = [(step.seen, 0.0, False)]
        for turn in turns:
            step = await place.step(turn, (len(turn),))
            told.append((step.seen, step.reward, step.is_over))
            if step.is_over:
                break
        place.close()
        return told
    finally:
        await pool.close()

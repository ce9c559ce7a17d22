"""Generated task: hands of blackjack (`--env blackjack`), dealt by gymnasium.

A prompt is a hand, such as `you 15, dealer 7`. A turn of the policy is `h` (hit) or `s` (stick);
after a hit, the environment shows the new hand. One number, the seed of the cards, defines a game:
in the same game, equal turns give equal hands.
"""

from collections.abc import Callable, Sequence

import numpy as np

from rlcore.data.generated import Split, TaskRow, check, split_of
from rlcore.records import Prompt
from rlcore.utils.seed import rng

NAME = "blackjack"
PAD, EOS = 0, 1
CHARS = "0123456789 ,\nadefhilorstuy"
"""Characters of the vocabulary: one token each, with ids after <pad> and <eos>."""

_STICK_AT = 17
"""Smallest sum at which the demonstration sticks, also for a soft hand (with a usable ace)."""


def make(split: Split, seed: int, index: int) -> TaskRow:
    """Generate row `index` of a split, such as `train`. Equal arguments give equal rows."""
    from gymnasium.envs.toy_text.blackjack import BlackjackEnv

    check(split, index)
    random, env = rng(seed, NAME, split, index), BlackjackEnv()
    while True:
        game = random.randrange(1 << 31)
        prompt = hand(env.reset(seed=game)[0])
        if split_of(prompt) == split:
            return TaskRow(prompt, _demonstration(env), str(game))


def to_prompt(row: TaskRow, index: int, encode: Callable[[str], Sequence[int]]) -> Prompt:
    """Convert a row to `Prompt` number `index`, with the field `game` for `--env blackjack`."""
    tokens = np.array(encode(row.prompt), np.int32)
    return Prompt(
        index=index, dataset=NAME, tokens=tokens, text=row.prompt, fields={"game": int(row.answer)}
    )


def hand(seen: tuple[int, int, int]) -> str:
    """Return gymnasium's observation (sum, dealer's card, usable ace) as text."""
    total, dealer, ace = map(int, seen)
    return f"you {total}{' soft' if ace else ''}, dealer {dealer}\n"


def _demonstration(env) -> str:
    """Play a game to its end and return its text: the turns, and the hands shown in between."""
    out, over = "", False
    while not over:
        hits = env._get_obs()[0] < _STICK_AT
        seen, _, over, _, _ = env.step(int(hits))
        out += "h" if hits else "s"
        out += "" if over else hand(seen)
    return out

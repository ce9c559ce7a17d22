"""Hands of blackjack to be played (`--env blackjack`), as gymnasium deals them.

    you 15, dealer 7        a turn is h (hit) or s (stick), and the answer to a hit is the new hand

A hand is one number, the seed of the cards: what follows is the same for all who play it alike.
"""

from collections.abc import Callable, Sequence

import numpy as np

from rlcore.data.generated import Row, Split, check, split_of
from rlcore.records import Prompt
from rlcore.utils.seed import rng

NAME = "blackjack"
PAD, EOS = 0, 1
CHARS = "0123456789 ,\nadefhilorstuy"
"""The tokens after <pad> and <eos>, one for each character."""

_STICK_AT = 17
"""The demonstration hits below; a soft hand counts as it stands."""


def make(split: Split, seed: int, index: int) -> Row:
    """The row number `index` of a split: endless, the same for the same three arguments."""
    from gymnasium.envs.toy_text.blackjack import BlackjackEnv

    check(split, index)
    random, env = rng(seed, NAME, split, index), BlackjackEnv()
    while True:
        game = random.randrange(1 << 31)
        prompt = hand(env.reset(seed=game)[0])
        if split_of(prompt) == split:
            return Row(prompt, _demonstration(env), str(game))


def to_prompt(row: Row, index: int, encode: Callable[[str], Sequence[int]]) -> Prompt:
    """A row as the prompt number `index`; the game is where `--env blackjack` looks for it."""
    tokens = np.array(encode(row.prompt), np.int32)
    return Prompt(
        index=index, source=NAME, tokens=tokens, text=row.prompt, fields={"game": int(row.answer)}
    )


def hand(seen: tuple[int, int, int]) -> str:
    """What there is to see: gymnasium's sum, dealer's card, usable ace."""
    total, dealer, ace = map(int, seen)
    return f"you {total}{' soft' if ace else ''}, dealer {dealer}\n"


def _demonstration(env) -> str:
    """Turns, and the hands between them."""
    out, over = "", False
    while not over:
        hits = env._get_obs()[0] < _STICK_AT
        seen, _, over, _, _ = env.step(int(hits))
        out += "h" if hits else "s"
        out += "" if over else hand(seen)
    return out

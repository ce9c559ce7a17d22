"""The tiny task of several turns: walk over a frozen lake, made on the fly (`--env frozenlake`).

    P..O        P you, G where to go, O holes, . ice; a turn is one of L D R U, and the answer to
    .O..        it is the board after the move
    ...G
    O...

Start and goal lie anywhere, so some walks are one step and some are six; a right one always exists.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from rlcore.data.generated import Row, Split, check, split_of
from rlcore.records import Prompt
from rlcore.utils.seed import rng

NAME = "frozenlake"
PAD, EOS = 0, 1
CHARS = ".OPG\nLDRU"
"""The tokens after <pad> and <eos>, one for each character."""

TURNS = "LDRU"
"""The characters of a demonstration that the policy says; the others are the environment's."""

MOVES = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}
"""In the order of gymnasium's actions: row and column."""
_SIDE, _HOLES = 4, 0.2


def make(split: Split, seed: int, index: int) -> Row:
    """The row number `index` of a split: endless, the same for the same three arguments."""
    check(split, index)
    random = rng(seed, NAME, split, index)
    while True:
        desc = _draw(random)
        walk = shortest(desc)
        prompt = board(desc, _find(desc, "S"))
        if walk and split_of(prompt) == split:
            return Row(prompt, _demonstration(desc, walk), walk)


def to_prompt(row: Row, index: int, encode: Callable[[str], Sequence[int]]) -> Prompt:
    """A row as the prompt number `index`; the map is where `--env frozenlake` looks for it."""
    tokens = np.array(encode(row.prompt), np.int32)
    fields = {"desc": [line.translate(_TO_DESC) for line in row.prompt.split()]}
    return Prompt(
        index=index, source=NAME, tokens=tokens, answer=row.answer, text=row.prompt, fields=fields
    )


def board(desc: Sequence[str], at: tuple[int, int]) -> str:
    """What there is to see: gymnasium's map `desc` (S F H G), with the walker at row and column."""
    rows = [line.translate(_TO_BOARD) for line in desc]
    row, column = at
    rows[row] = rows[row][:column] + "P" + rows[row][column + 1 :]
    return "\n".join(rows) + "\n"


def shortest(desc: Sequence[str]) -> str:
    """The letters of a shortest walk from S to G; empty where there is none."""
    start = _find(desc, "S")
    found: dict[tuple[int, int], str] = {start: ""}
    queue = deque([start])
    while queue:
        at = queue.popleft()
        if desc[at[0]][at[1]] == "G":
            return found[at]
        for letter in MOVES:
            to = moved(desc, at, letter)
            if to not in found and desc[to[0]][to[1]] != "H":
                found[to] = found[at] + letter
                queue.append(to)
    return ""


def moved(desc: Sequence[str], at: tuple[int, int], letter: str) -> tuple[int, int]:
    """Where a move leads; nowhere at the edge."""
    row, column = at[0] + MOVES[letter][0], at[1] + MOVES[letter][1]
    inside = 0 <= row < len(desc) and 0 <= column < len(desc[0])
    return (row, column) if inside else at


_TO_BOARD = str.maketrans("SFH", "..O")
_TO_DESC = str.maketrans("P.O", "SFH")


def _draw(random: random.Random) -> list[str]:
    cells = ["H" if random.random() < _HOLES else "F" for _ in range(_SIDE * _SIDE)]
    start, goal = random.sample(range(len(cells)), 2)
    cells[start], cells[goal] = "S", "G"
    return ["".join(cells[i : i + _SIDE]) for i in range(0, len(cells), _SIDE)]


def _find(desc: Sequence[str], letter: str) -> tuple[int, int]:
    row = next(i for i, line in enumerate(desc) if letter in line)
    return row, desc[row].index(letter)


def _demonstration(desc: Sequence[str], walk: str) -> str:
    """Moves, and the boards between them."""
    at, out = _find(desc, "S"), walk[0]
    for last, letter in zip(walk, walk[1:], strict=False):
        at = moved(desc, at, last)
        out += board(desc, at) + letter
    return out

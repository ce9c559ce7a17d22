"""Generated task of several turns: walk over a frozen lake (`--env frozenlake`).

    P..O
    .O..
    ...G
    O...

P is the player, G the goal, O a hole, and a dot is ice. A turn of the policy is one of L D R U;
then the environment shows the new board. Start and goal are random, so that some solutions have one
move and others six. A solution always exists.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from rlcore.data.generated import Split, TaskRow, check, split_of
from rlcore.records import Prompt
from rlcore.utils.seed import rng

NAME = "frozenlake"
PAD, EOS = 0, 1
CHARS = ".OPG\nLDRU"
"""Characters of the vocabulary: one token each, with ids after <pad> and <eos>."""

TURNS = "LDRU"
"""Characters that the policy produces in a demonstration; others come from the environment."""

MOVES = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}
"""Change of (row, column) by move; the moves are in the order of gymnasium's actions."""
_SIDE, _HOLES = 4, 0.2


def make(split: Split, seed: int, index: int) -> TaskRow:
    """Generate row `index` of a split, such as `train`. Equal arguments give equal rows."""
    check(split, index)
    random = rng(seed, NAME, split, index)
    while True:
        desc = _draw(random)
        walk = shortest(desc)
        prompt = board(desc, _find(desc, "S"))
        if walk and split_of(prompt) == split:
            return TaskRow(prompt, _demonstration(desc, walk), walk)


def to_prompt(row: TaskRow, index: int, encode: Callable[[str], Sequence[int]]) -> Prompt:
    """Convert a row to `Prompt` number `index`, with the field `desc` for `--env frozenlake`."""
    tokens = np.array(encode(row.prompt), np.int32)
    fields = {"desc": [line.translate(_TO_DESC) for line in row.prompt.split()]}
    return Prompt(
        index=index, dataset=NAME, tokens=tokens, answer=row.answer, text=row.prompt, fields=fields
    )


def board(desc: Sequence[str], at: tuple[int, int]) -> str:
    """Return the text of gymnasium's map `desc` (letters S F H G), with the player at `at`."""
    rows = [line.translate(_TO_BOARD) for line in desc]
    row, column = at
    rows[row] = rows[row][:column] + "P" + rows[row][column + 1 :]
    return "\n".join(rows) + "\n"


def shortest(desc: Sequence[str]) -> str:
    """Return the moves of a shortest walk from start to goal; "" if there is no such walk."""
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
    """Return (row, column) after a move; a move over the edge changes nothing."""
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
    """Return the text of a walk: the moves, and the board between each two moves."""
    at, out = _find(desc, "S"), walk[0]
    for last, letter in zip(walk, walk[1:], strict=False):
        at = moved(desc, at, last)
        out += board(desc, at) + letter
    return out

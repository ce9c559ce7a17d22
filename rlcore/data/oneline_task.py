"""Generated code task: a chain of operations, to be written as a function of one line.

For the prompt `+3*5-2=`, `f=lambda x:(x+3)*5-2` is right; a test is `assert f(2) == 23`. The policy
must know the number of opening brackets before writing the first operation. Every answer that
passes the tests is right, even with extra brackets. The number of operations (1 to 8) has a
geometric tail.
"""

from collections.abc import Callable, Sequence

import numpy as np

from rlcore.data.generated import Split, TaskRow, check, split_of
from rlcore.records import Prompt
from rlcore.utils.seed import rng

NAME = "oneline"
PAD, EOS = 0, 1
CHARS = "0123456789+-*=():f lambdx"
"""Characters of the vocabulary: one token each, with ids after <pad> and <eos>."""

_LEAST, _MOST, _STOP = 1, 8, 0.28
_HEAD = "f=lambda x:"
_AT = (2, -3, 10)


def make(split: Split, seed: int, index: int) -> TaskRow:
    """Generate row `index` of a split, such as `train`. Equal arguments give equal rows."""
    check(split, index)
    random = rng(seed, NAME, split, index)
    count = _LEAST
    while count < _MOST and random.random() > _STOP:
        count += 1
    while True:
        steps = [(random.choice("+-*"), random.randint(1, 9)) for _ in range(count)]
        prompt = "".join(f"{op}{n}" for op, n in steps) + "="
        if split_of(prompt) == split:
            body = _body(steps)
            tests = tuple(f"assert f({x}) == {_value(steps, x)}" for x in _AT)
            return TaskRow(prompt, _HEAD + body, _HEAD + body, tests)


def to_prompt(row: TaskRow, index: int, encode: Callable[[str], Sequence[int]]) -> Prompt:
    """Convert a row to `Prompt` number `index`, with field `test_list` for `--reward code`."""
    tokens = np.array(encode(row.prompt), np.int32)
    fields = {"test_list": list(row.tests)}
    return Prompt(
        index=index, dataset=NAME, tokens=tokens, answer=row.answer, text=row.prompt, fields=fields
    )


def _body(steps: list[tuple[str, int]]) -> str:
    """Return the expression that applies all operations to x, with the fewest brackets."""
    text, is_sum = "x", False
    for op, n in steps:
        if op == "*" and is_sum:
            text, is_sum = f"({text})", False
        text += f"{op}{n}"
        is_sum = is_sum or op != "*"
    return text


def _value(steps: list[tuple[str, int]], x: int) -> int:
    for op, n in steps:
        x = x + n if op == "+" else x - n if op == "-" else x * n
    return x

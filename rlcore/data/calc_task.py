"""Generated task of a chat with a tool: work out a sum with the calculator `calc`.

    user          37+54-68
    assistant     <tool_call>{"name": "calc", "arguments": {"expression": "37+54-68"}}</tool_call>
    tool          23
    assistant     23

A tiny model cannot add such numbers itself, so it must call the tool with the right expression and
repeat the result. Most demonstrations guess a number instead, so that a warm start leaves it to RL
to find out that the tool is worth its call.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlcore.data.generated import Split, TaskRow, check, split_of
from rlcore.records import Prompt
from rlcore.utils.seed import rng

NAME = "calc"
CHARS = "\n" + "".join(map(chr, range(32, 127)))
"""Characters of the vocabulary: one token each, after the tokens for padding and the end of a
message. Errors of tools may have any of them."""
END = "<|im_end|>"
WORDS = (
    *("<|im_start|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("system", "user", "assistant", "name", "arguments", "expression", NAME),
)
"""Words that are one token each, after the characters."""
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }}"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>{{ message.content }}</tool_response>"
    "{% else %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Chat template in the format of Qwen's models. Of a tool it shows only the name."""

_GUESSES = 0.6
"""Share of the demonstrations that do not call the tool."""


def make(split: Split, seed: int, index: int) -> TaskRow:
    """Generate row `index` of a split, such as `train`. Equal arguments give equal rows."""
    check(split, index)
    random = rng(seed, NAME, split, index)
    count = random.choice((2, 3))
    while True:
        terms = [random.randrange(10, 100) for _ in range(count)]
        terms[1:] = [random.choice((-1, 1)) * term for term in terms[1:]]
        prompt = str(terms[0]) + "".join(f"{term:+d}" for term in terms[1:])
        if split_of(prompt) == split:
            return TaskRow(prompt, str(sum(terms)), str(sum(terms)))


def to_prompt(row: TaskRow, index: int, encode: Callable[[str], Sequence[int]]) -> Prompt:
    """Convert a row to `Prompt` number `index`."""
    tokens = np.array(encode(row.prompt), np.int32)
    return Prompt(index=index, dataset=NAME, tokens=tokens, answer=row.answer, text=row.prompt)


def conversation(row: TaskRow) -> list[dict[str, Any]]:
    """Return the messages of a demonstration, in OpenAI's form. A guess is wrong."""
    random, asked = rng(0, NAME, row.prompt), {"role": "user", "content": row.prompt}
    if random.random() < _GUESSES:
        guess = int(row.answer) + random.randint(1, 20)
        return [asked, {"role": "assistant", "content": str(guess)}]
    arguments = json.dumps({"expression": row.prompt})
    call = {"type": "function", "function": {"name": NAME, "arguments": arguments}}
    return [
        asked,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": row.answer},
        {"role": "assistant", "content": row.answer},
    ]

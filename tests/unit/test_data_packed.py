"""Prompts in compressed blocks: the same prompts, in a fraction of the memory."""

import gc
import json
import random
import string
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from rlcore.config.schema import DataConfig
from rlcore.data.packed import BLOCK_ROWS, PackedPrompts
from rlcore.data.prompts import load, overlap
from rlcore.records import Prompt


def _prompt(i: int) -> Prompt:
    return Prompt(
        index=0,
        dataset=f"s{i % 3}",
        tokens=np.arange(i % 7, dtype=np.int32),
        answer=str(i),
        text=f"question {i} \N{GREEK SMALL LETTER PI}",
        fields={"tests": [f"f({i})"], "deep": {"a": [None, 1.5, 2**63, True]}},
    )


@pytest.fixture(scope="module")
def packed() -> PackedPrompts:
    out = PackedPrompts()
    for i in range(3 * BLOCK_ROWS + 5):
        out.append(_prompt(i))
    return out


def test_a_prompt_comes_back_as_it_was_with_its_place_as_its_number(packed: PackedPrompts):
    order = list(range(len(packed)))
    random.Random(0).shuffle(order)
    for i in order:
        found, wanted = packed[i], _prompt(i)
        assert found.index == i
        for name in ("dataset", "answer", "text", "fields"):
            assert getattr(found, name) == getattr(wanted, name)
        assert found.tokens.dtype == np.int32 and found.tokens.tolist() == wanted.tokens.tolist()
        assert found.tokens.flags.writeable


def test_it_is_read_like_a_list(packed: PackedPrompts):
    n = 3 * BLOCK_ROWS + 5
    assert len(packed) == n and [p.index for p in packed] == list(range(n))
    assert packed[-1].index == n - 1
    assert [p.index for p in packed[BLOCK_ROWS - 1 : BLOCK_ROWS + 2]] == [31, 32, 33]
    for i in (n, -n - 1):
        with pytest.raises(IndexError):
            packed[i]


def test_what_is_changed_in_a_prompt_stays_with_the_reader(packed: PackedPrompts):
    packed[0].fields["tests"].append("other")
    packed[3].tokens[:] = 9
    assert packed[0].fields["tests"] == ["f(0)"] and packed[3].tokens.tolist() == [0, 1, 2]


class Words:
    """A tokenizer of words, four characters a token as real ones have."""

    def encode(self, text: str) -> list[int]:
        return [hash(text[i : i + 4]) % 150_000 for i in range(0, len(text), 4)]

    def min_tokens(self, text: str) -> int:
        return 0

    def render_chats(self, chats: list[list[dict[str, str]]]) -> list[str]:
        return ["".join(m["content"] for m in messages) for messages in chats]


def _write(path: Path, num: int) -> str:
    """Rows of 300 characters in questions and in answers."""
    die = random.Random(0)
    words = [
        "".join(die.choices(string.ascii_lowercase, k=k)) for k in range(2, 9) for _ in "12345"
    ]
    with path.open("w") as file:
        for i in range(num):
            question, answer = (" ".join(die.choices(words, k=50)) for _ in range(2))
            file.write(json.dumps({"question": f"{i} {question}", "answer": answer}) + "\n")
    return str(path)


def test_a_million_prompts_fit_into_a_gigabyte(tmp_path: Path):
    """By the bytes of 2,500: also while they are read and compared with others."""
    num, few = 2500, _write(tmp_path / "val.jsonl", 100)
    config = DataConfig(train=(_write(tmp_path / "train.jsonl", num),), val=(few,))
    gc.collect()
    tracemalloc.start()
    train = load(config, "train", Words(), 0)
    held = tracemalloc.get_traced_memory()[0]
    val = load(config, "val", Words(), 0)
    assert overlap(train, val) == 100
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(train) == num
    assert held / num < 600, "bytes of a prompt; as an object it takes more than 1,700"
    assert peak / num < 700, "of all that loading took at a time"

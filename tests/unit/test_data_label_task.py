"""The tiny task: correct rows, clean splits, the length tail of its page."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.data import label_task
from rlcore.data.generated import split_of
from rlcore.data.label_task import make

SPLITS = ("train", "val", "probe")
splits = st.sampled_from(SPLITS)
numbers = st.integers(0, 2**40)


def _terms(prompt: str) -> list[int]:
    assert prompt.endswith("=")
    pairs = [prompt[i : i + 2] for i in range(0, len(prompt) - 1, 2)]
    assert [p[0] for p in pairs] == list(label_task.LABELS[: len(pairs)])
    return [int(p[1]) for p in pairs]


def test_the_vocabulary_is_that_of_the_prototype():
    assert len(label_task.VOCAB) == 34
    assert (
        label_task.VOCAB[label_task.PAD] == "<pad>" and label_task.VOCAB[label_task.EOS] == "<eos>"
    )
    assert "".join(label_task.VOCAB[2:]) == "0123456789+=;>*-abcdefghijklmnop"


@settings(deadline=None, max_examples=50)
@given(splits, numbers, numbers)
def test_a_row_is_right_in_its_split_and_the_same_every_time(split, seed, index):
    row = make(split, seed, index)
    terms = _terms(row.prompt)
    assert 2 <= len(terms) <= 16
    assert row.answer == str(sum(terms))
    steps, _, last = row.demonstration.partition(">")
    assert last == row.answer
    total = terms[0]
    for step, label, t in zip(
        steps.split(";")[:-1], label_task.LABELS[1:], terms[1:], strict=False
    ):
        assert step == f"{label}{t}+{total}={total + t}"
        total += t
    assert steps.count(";") == len(terms) - 1
    assert set(row.prompt + row.demonstration) <= set(label_task.CHARS)
    assert split_of(row.prompt) == split
    assert make(split, seed, index) == row


def test_the_prompt_of_the_documentation_has_the_demonstration_of_the_documentation():
    rows = (make("train", 0, i) for i in range(100_000))
    row = next(r for r in rows if len(r.prompt) == 7)
    a, b, c = _terms(row.prompt)
    assert row.demonstration == f"b{b}+{a}={a + b};c{c}+{a + b}={a + b + c};>{a + b + c}"


def test_splits_share_no_prompt_and_have_the_same_lengths():
    seen = {s: [make(s, seed, i) for seed in (0, 1) for i in range(3000)] for s in SPLITS}
    prompts = {s: {r.prompt for r in rows} for s, rows in seen.items()}
    assert not prompts["train"] & prompts["val"]
    assert not prompts["train"] & prompts["probe"]
    assert not prompts["val"] & prompts["probe"]
    for s, rows in seen.items():
        counts = np.bincount([len(_terms(r.prompt)) for r in rows], minlength=17)
        assert (counts[2:] > 0).all(), s
        assert abs(counts[2] / len(rows) - 0.28) < 0.03, "geometric with stop 0.28"
        assert abs(counts[16] / len(rows) - 0.72**14) < 0.01


def test_every_split_has_two_term_prompts_and_together_they_are_the_hundred():
    parts = [split_of(f"a{a}b{b}=") for a in range(10) for b in range(10)]
    assert len(parts) == 100
    assert all(parts.count(s) >= 5 for s in SPLITS), {s: parts.count(s) for s in SPLITS}


def test_the_longest_answer_is_five_times_the_median():
    lengths = [len(make("train", 0, i).demonstration) + 1 for i in range(4000)]
    assert 4.5 <= max(lengths) / np.median(lengths) <= 6
    assert max(lengths) <= 144


def test_other_seeds_give_other_rows():
    one, two = ([make("train", seed, i).prompt for i in range(50)] for seed in (0, 1))
    assert sum(a == b for a, b in zip(one, two, strict=True)) < 10


def test_wrong_splits_and_indices_are_refused():
    with pytest.raises(ValueError, match="split test: allowed are val, probe, train"):
        make("test", 0, 0)
    with pytest.raises(ValueError, match="index -1"):
        make("train", 0, -1)

"""Routes of samples in turns, branches and packed batches, with one layer and K 1."""

from typing import Any, cast

import numpy as np
from msgspec import structs

from rlcore.data.packing import pack_samples
from rlcore.envs import branches
from rlcore.envs.episode import Transcript
from rlcore.records import Branch, Sample, merge_routes


def column(*experts: int) -> np.ndarray:
    return np.array(experts, np.int8)[:, None]


def turn(prompt: list[int], tokens: list[int], *experts: int) -> Sample:
    return Sample(
        id="t0.0",
        prompt=np.array(prompt, np.int32),
        tokens=np.array(tokens, np.int32),
        logps=np.zeros(len(tokens), np.float32),
        versions=np.zeros(len(tokens), np.int32),
        finish="stop",
        routes=column(*experts) if experts else None,
    )


def test_the_earlier_pass_decides_where_it_knows() -> None:
    merged = merge_routes(column(4, -1, 5), column(1, 2, 3, 6))
    assert merged is not None and merged[:, 0].tolist() == [4, 2, 5, 6]
    assert merge_routes(None, None) is None
    for a, b in ((column(1), None), (None, column(1))):
        found = merge_routes(a, b)
        assert found is not None and found.tolist() == [[1]]


def test_a_dialogue_keeps_the_routes_of_each_turn() -> None:
    so_far = Transcript("t0.0", np.array([7, 8], np.int32))
    so_far.sampled(turn([7, 8], [9, 1], 0, 1, 2, -1), "")
    so_far.observed([5])
    so_far.sampled(turn([7, 8, 9, 1, 5], [6], 3, 3, 3, 4, 5, -1), "")
    so_far.observed([2])
    batch = pack_samples([so_far.sample("stop")])
    assert batch.routes is not None and batch.tokens.tolist() == [7, 8, 9, 1, 5, 6, 2]
    assert batch.routes[:, 0].tolist() == [0, 1, 2, 4, 5, -1, -1]


def test_a_row_of_a_harness_keeps_the_routes_of_each_turn() -> None:
    def asked(number: int, parent: branches.Turn | None, new: list[int]) -> branches.Turn:
        made = branches.Turn(number, parent, cast(Any, None), np.array(new, np.int32), [], True)
        if parent is not None:
            parent.children.append(made)
        return made

    def answer(it: branches.Turn, sample: Sample, size: int) -> None:
        it.set_answer(sample, size, "stop", "", cast(Any, "answered"))

    first = asked(0, None, [7, 8])
    answer(first, turn([7, 8], [9, 1, 3], 0, 1, 2, 3, -1), 2)  # a stop text cut the last token
    second = asked(1, first, [5])
    answer(second, turn([7, 8, 9, 1, 5], [6], 4, 4, 4, 4, 5, -1), 1)
    row = branches._row(first)
    assert row is not None and row.routes is not None
    assert row.routes[:, 0].tolist() == [0, 1, 2, 3, 5, -1]
    assert row.prompt.tolist() == [7, 8] and row.tokens.tolist() == [9, 1, 5, 6]


def test_rows_without_routes_are_packed_as_unknown() -> None:
    with_branch = turn([7, 8], [9], 0, 1, -1)
    more = {"logps": np.zeros(1, np.float32), "versions": np.zeros(1, np.int32)}
    branch = Branch(
        prompt=np.array([7], np.int32), tokens=np.array([2], np.int32), routes=column(3), **more
    )
    batch = pack_samples([turn([5], [6]), structs.replace(with_branch, branches=(branch,))])
    assert batch.routes is not None
    assert batch.routes[:, 0].tolist() == [-1, -1, 0, 1, -1, 3, -1]
    assert pack_samples([turn([5], [6])]).routes is None

"""Drafts for the requests of SGLang's scheduler: without SGLang."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlcore.rollout.histospec import history_of, prompt_key
from rlcore.rollout.sglang_engine.counters import Counters
from rlcore.rollout.sglang_engine.drafts import Drafts, HostDrafts
from rlcore.rollout.sglang_engine.mask import chain_mask
from rlcore.rollout.sglang_engine.names import PROMPT_KEY
from rlcore.rollout.torch_engine.drafter import DraftSettings

PROMPT = np.array([3, 4, 5], np.int32)
ANSWER = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
SETTINGS = DraftSettings(max_length=3, initial_length=3, length_growth=0, adaptive=False, wait=True)
WIDTH = 4


def request(rid: str, output: list[int], limit: int = 50, stops: tuple[int, ...] = ()):
    """The fields of SGLang's `Req` that are read."""
    sampling = SimpleNamespace(
        custom_params={PROMPT_KEY: prompt_key(PROMPT)},
        max_new_tokens=limit,
        stop_token_ids=set(stops),
        stream_interval=8,
    )
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=PROMPT.tolist(),
        output_ids=output,
        sampling_params=sampling,
        finished=lambda: False,
        is_retracted=False,
    )


@pytest.fixture
def page(tmp_path):
    return Counters(str(tmp_path), new=True), Counters(str(tmp_path))


@pytest.fixture
def drafts(page):
    made = HostDrafts("history", SETTINGS, num_seats=2, stream_interval=8, counters=page[0])
    history = history_of("t.0", PROMPT, np.array(ANSWER, np.int32), 1.0)
    made.remember([history], [prompt_key(PROMPT)])
    yield made
    made.close()


def step(drafts: Drafts, reqs: list, found: list[list[int]]) -> list[list[int]]:
    """A step whose forward finds these tokens; the drafts that it had. Requests are given what was
    right of them and one more."""
    proposed = drafts.propose(SimpleNamespace(reqs=reqs))
    rows = [[int(t) for t in row if t >= 0] for row in proposed]
    tokens, taken = np.zeros((len(reqs), WIDTH), np.int64), np.zeros(len(reqs), np.int64)
    for i, (row, new) in enumerate(zip(rows, found, strict=True)):
        tokens[i, : len(new)] = new
        wrong = (k for k, t in enumerate(row) if t != new[k])
        taken[i] = next(wrong, len(row)) + 1
    drafts.verified(reqs, tokens, taken)
    for req, new, count in zip(reqs, found, taken, strict=True):
        req.output_ids += new[:count]
    return rows


def test_drafts_follow_the_history_of_the_prompt_and_never_the_limit(drafts, page):
    one, short = request("a", [10]), request("b", [10], limit=3)
    assert step(drafts, [one, short], [[11, 12, 99], [11, 12]]) == [[11, 12, 13], [11]]
    assert one.output_ids == [10, 11, 12, 99] and short.output_ids == [10, 11, 12]
    assert page[1].take() == {
        "decode_steps": 1,
        "verify_steps": 1,
        "verify_rows": 2,
        "verify_inputs": 2 * WIDTH,
        "verify_tokens": 5,
        "drafted_tokens": 4,
        "accepted_tokens": 3,
        "draft_s": pytest.approx(0, abs=60),
        "verify_s": pytest.approx(0, abs=60),
        "by_batch": ((0, 0, 0), (2, 5, 2)),
    }
    assert step(drafts, [one], [[13]]) == [[]]  # nothing like 12, 99 was seen
    found = page[1].take()
    assert found["decode_steps"] == 1 and found["by_batch"] == ((1, 1, 1),)
    assert page[1].take()["by_batch"] == ()


def test_tokens_behind_a_stop_are_not_gained(drafts, page):
    stopped = request("a", [10], stops=(12,))
    step(drafts, [stopped], [[11, 12, 13, 14]])
    found = page[1].take()
    assert found["verify_tokens"] == 2 and found["accepted_tokens"] == 2
    assert found["drafted_tokens"] == 3


def test_a_request_that_was_away_is_read_again_and_seats_are_taken_back(drafts):
    one, two, three = (request(rid, [10]) for rid in "abc")
    step(drafts, [one, two], [[11, 12, 13, 14]] * 2)
    # SGLang has thrown the first out of its cache, and a third is in its place.
    assert step(drafts, [two, three], [[15, 99], [77]]) == [[15, 16, 17], [11, 12, 13]]
    one.output_ids += [15, 16]
    assert step(drafts, [one], [[17, 99]]) == [[17, 18, 19]]


def test_sglang_tells_of_a_request_when_an_interval_is_over(drafts):
    """Lengths go 1, 5, 9, 11: of 8 tokens more than 1 there are some at the second step."""
    req, told = request("a", [10]), []
    for found in ([11, 12, 13, 14], [15, 16, 17, 18], [19, 1]):
        step(drafts, [req], [found])
        told.append(req.sampling_params.stream_interval)
    assert len(req.output_ids) == 11
    assert told[1] == 1 and told[0] == told[2] > len(req.output_ids)


def test_kernels_are_told_that_a_draft_sees_what_is_before_it():
    """By hand: two requests of 1 and 2 tokens in the cache, two tokens wide."""
    mask = chain_mask(torch.tensor([1, 2]), 2, total=3).tolist()
    assert mask == [1, 1, 0, 1, 1, 1] + [1, 1, 1, 0, 1, 1, 1, 1]

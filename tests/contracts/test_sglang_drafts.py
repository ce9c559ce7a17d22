"""Drafts in SGLang: its samples with them are those without, which are the torch engine's."""

import importlib.util

import numpy as np
import pytest

from rlcore.ops import native
from rlcore.records import Aborted, Partial, Request, Sampling, Stats
from rlcore.rollout.child import ChildEngine
from rlcore.rollout.histospec import history_of
from rlcore.rollout.torch_engine.engine import TorchEngine
from rlcore.sync.pack import load_weights
from tests.contracts.engine_contract import (
    CONFIG,
    HF,
    Lab,
    assert_same,
    collect,
    ended,
    oracle,
    run,
    samples,
    some_tokens,
    weights,
)
from tests.contracts.test_sglang import (
    TOLERANCE,
    patience,  # noqa: F401
    push_to,
    start,
    start_two,
)
from tests.unit.test_histospec import ALWAYS, SHARP, assert_law, pair_law, requests

pytestmark = [
    pytest.mark.ranks(1),
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None,
        reason="needs SGLang: bash tools/setup.sh --sglang",
    ),
]
LENGTH = 160
DRAFTS = {"draft": "history", "draft_width": 8, "draft_settings": ALWAYS}
LAB = Lab(make=start, exact=False, tolerance=4 * TOLERANCE)
"""Sharp weights have larger logits, and these larger rounding errors."""


@pytest.fixture(scope="module", params=["host", "device"])
def engine(request, tmp_path_factory):
    """One for all tests and each matcher, with weights that make drafts right about as often as
    wrong."""
    if request.param == "device" and native.torch_ops("suffix forest", "cpu") is None:
        pytest.skip("no native build of torch ops")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("e")))
        engine = start(max_model_tokens=LENGTH, draft_matcher=request.param, **DRAFTS)
        try:
            load(engine)
            yield engine
        finally:
            engine.close()


def load(engine, std=SHARP) -> None:
    load_weights(engine, weights(HF, 0, std).items(), 0)


def plain(seed=7, std=SHARP) -> TorchEngine:
    engine = TorchEngine(HF, max_model_tokens=LENGTH, dtype="float32", seed=seed)
    load(engine, std)
    return engine


@pytest.fixture(scope="module")
def todo():
    """Groups that are greedy, of temperature 1, of top-k, top-p and min-p."""
    return requests()


@pytest.fixture(scope="module")
def want(todo):
    return run(plain(), todo)


@pytest.fixture(scope="module")
def others(todo):
    """What another seed samples."""
    found = run(plain(seed=100), todo).values()
    return [history_of(s.id, s.prompt, s.tokens, float(k % 2)) for k, s in enumerate(found)]


def finish(engine: ChildEngine, todo, histories):
    """Samples, and sums of the counters."""
    engine.poll(0.0)
    engine.pause("in_place")  # else some are done before the histories are there
    engine.submit(todo)
    engine.remember(histories)
    engine.resume()
    events = collect(
        engine,
        lambda es: ended(len(todo))(es) and any(isinstance(e, Stats) and not e.running for e in es),
    )
    told = [e for e in events if isinstance(e, Stats)]
    names = ("decode_steps", "decode_tokens", "verify_steps", "verify_tokens")
    names += ("drafted_tokens", "accepted_tokens")
    sums = {name: sum(getattr(e, name) for e in told) for name in names}
    sums["rows"] = sum(rows for e in told for rows, _, _ in e.by_batch)
    sums["gained"] = sum(tokens for e in told for _, tokens, _ in e.by_batch)
    return samples(events), sums


def test_tokens_and_log_probs_are_those_of_plain_decoding(engine, todo, want, others):
    got, sums = finish(engine, todo, others)
    assert_same(LAB, got, want, todo, oracle(CONFIG, 0, SHARP))
    # Guesses were taken and refused, or this would show nothing.
    assert 0 < sums["accepted_tokens"] < sums["drafted_tokens"]
    assert sums["verify_steps"] == sums["decode_steps"] > 0
    # The first token of a response comes from the prefill.
    tokens = sum(len(s.tokens) for s in want.values())
    assert sums["decode_tokens"] == tokens == sums["gained"] + len(todo)
    # One token of every request and step, but where a stop token was drafted, and what was right.
    assert sums["gained"] - sums["accepted_tokens"] <= sums["rows"] < 0.9 * sums["gained"]


def test_a_resumed_request_goes_on_as_if_nothing_had_happened(engine, todo, want, others):
    """After a pause, an abort, sleep and a push, as in a step of training."""
    engine.submit(todo)
    engine.remember(others)
    early = some_tokens(engine, {todo[0].id}, 9)
    engine.pause("in_place")
    engine.resume()
    engine.abort([r.id for r in todo])
    events = early + collect(engine, lambda more: ended(len(todo))(early + more))
    cut = {e.id: e.sample for e in events if isinstance(e, Aborted)}
    assert len(cut) > 9 and any(len(s.tokens) > 9 for s in cut.values())
    engine.sleep(("weights", "kv_cache"))
    engine.wake(("weights", "kv_cache"))
    load(engine)
    again = [
        Request(
            id=r.id,
            prompt=r.prompt,
            sampling=r.sampling,
            resume=Partial(
                tokens=cut[r.id].tokens, logps=cut[r.id].logps, versions=cut[r.id].versions
            ),
        )
        for r in todo
        if r.id in cut
    ]
    got, sums = finish(engine, again, others[::2])
    assert sums["accepted_tokens"]
    assert_same(LAB, got, {i: want[i] for i in got}, todo, oracle(CONFIG, 0, SHARP))


@pytest.mark.slow
def test_the_law_of_two_tokens_is_the_models(engine):
    """As for the torch engine: chi-square and total variation, at temperature 1. The second token
    is drafted, and there is a third after it."""
    count, prompt = 1000, np.array([3, 4, 5, 3, 4], np.int32)
    three = Sampling(max_tokens=3)
    todo = [Request(id=f"p{k}.0", prompt=prompt, sampling=three) for k in range(count)]
    law = pair_law(prompt, {})
    best = max(law, key=law.get)
    load(engine, 0.25)
    try:
        guess = history_of("h.0", prompt, np.array([*best, 7], np.int32), 1.0)
        got, sums = finish(engine, todo, [guess])
    finally:
        load(engine)
    assert sums["accepted_tokens"] > 0.5 * count * law[best]
    assert_law(got, law)


@pytest.mark.slow
@pytest.mark.parametrize("matcher", ["host", "device"])
def test_with_the_gate_and_an_index_in_the_background_samples_are_the_same(
    todo, want, others, matcher
):
    options = DRAFTS | {"draft_settings": {}, "draft_matcher": matcher}
    engine = start(max_model_tokens=LENGTH, **options)
    try:
        load(engine)
        for _ in range(3):
            got, sums = finish(engine, todo, others)
            assert_same(LAB, got, want, todo, oracle(CONFIG, 0, SHARP))
        assert sums["verify_steps"] > 0
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("matcher", ["host", "device"])
def test_two_ranks_check_the_same_drafts(todo, want, others, matcher):
    leader, other = ranks = start_two(max_model_tokens=LENGTH, draft_matcher=matcher, **DRAFTS)
    try:
        push_to(leader, 2, SHARP)
        got, sums = finish(leader, todo, others)
        assert_same(LAB, got, want, todo, oracle(CONFIG, 0, SHARP))
        assert 0 < sums["accepted_tokens"] < sums["drafted_tokens"]
        assert not other.failure
    finally:
        for rank in ranks:
            rank.close()


@pytest.mark.slow
@pytest.mark.parametrize("matcher", ["host", "device"])
def test_in_a_small_cache_requests_are_thrown_out_and_change_no_sample(todo, want, others, matcher):
    options = DRAFTS | {"draft_matcher": matcher}
    engine = start(max_model_tokens=LENGTH, max_running=5, cache_tokens=200, **options)
    try:
        load(engine)
        got, sums = finish(engine, todo, others)
        assert_same(LAB, got, want, todo, oracle(CONFIG, 0, SHARP))
        assert sums["accepted_tokens"]
    finally:
        engine.close()

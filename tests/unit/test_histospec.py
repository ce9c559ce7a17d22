"""Drafts change how many tokens a forward gives, never which: the engine's part of HistoSpec."""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from msgspec import structs

from rlcore.hf.model import ForwardInputs
from rlcore.records import (
    Aborted,
    AnyCommand,
    Partial,
    Preempted,
    Prompt,
    Remember,
    Request,
    Sample,
    Sampling,
    Stats,
)
from rlcore.rollout.exchange import SampleExchange
from rlcore.rollout.histospec import HistorySender, HistoryStore, history_of, prompt_key
from rlcore.rollout.round import Rollout
from rlcore.rollout.torch_engine.engine import TorchEngine
from rlcore.rollout.transport import ZmqHub
from rlcore.sched.histospec import DraftGate
from rlcore.sync.pack import load_weights
from tests.contracts.engine_contract import (
    HF,
    STOP,
    VOCAB,
    collect,
    ended,
    run,
    samples,
    weights,
)

OPTIONS = {"max_model_tokens": 160, "dtype": "float64", "seed": 7, "device": "cpu"}
ALWAYS = {"adaptive": False, "wait": True}
"""Nothing depends on the clock."""
SHARP = 0.7
"""Of the weights: drafts are accepted about as often as not."""
SAMPLINGS = (
    {"temperature": 0.0},
    {},
    {"top_k": 4, "temperature": 0.8},
    {"top_p": 0.7},
    {"min_p": 0.1, "temperature": 1.3},
)


def make(draft="none", std=SHARP, settings=ALWAYS, **options):
    engine = TorchEngine(HF, draft=draft, draft_settings=settings, **(OPTIONS | options))
    load_weights(engine, weights(HF, 0, std).items(), 0)
    return engine


def requests(limit=50):
    """A group of three for every sampling, of which the first repeats itself in its prompt."""
    gen = np.random.default_rng(5)
    out = []
    for number, sampling in enumerate(SAMPLINGS):
        prompt = gen.integers(2, VOCAB, int(gen.choice([1, 9, 30]))).astype(np.int32)
        if number == 0:
            prompt = np.tile(prompt[:5], 6)
        s = Sampling(max_tokens=limit, stop_ids=(STOP,) if number % 2 else (), **sampling)
        out += [Request(id=f"d{number}.{k}", prompt=prompt, sampling=s) for k in range(3)]
    return out


@pytest.fixture(scope="module")
def todo():
    return requests()


@pytest.fixture(scope="module")
def want(todo):
    """What plain decoding samples."""
    return run(make(), todo)


@pytest.fixture(scope="module")
def others(todo):
    """What another seed samples, with rewards of 0 and 1."""
    found = run(make(seed=100), todo).values()
    return [history_of(s.id, s.prompt, s.tokens, float(k % 2)) for k, s in enumerate(found)]


def finish(engine, todo, histories=()):
    """Samples, sums of counters, events."""
    engine.submit(todo)
    engine.remember(histories)
    events = collect(engine, ended(len(todo)))
    engine.close()
    totals = [e for e in events if isinstance(e, Stats)]
    names = ("decode_steps", "decode_tokens", "drafted_tokens", "accepted_tokens")
    sums = {name: sum(getattr(e, name) for e in totals) for name in names}
    sums["rows"] = sum(rows for e in totals for rows, _, _ in e.by_batch)
    return samples(events), sums, events


def assert_equal(got, want):
    for i, sample in got.items():
        assert sample.tokens.tolist() == want[i].tokens.tolist(), i
        np.testing.assert_allclose(sample.logps, want[i].logps, atol=1e-6)
        assert sample.finish == want[i].finish


@pytest.mark.parametrize("draft", ["ngram", "history", "history_reward"])
def test_tokens_and_log_probs_are_those_of_plain_decoding(draft, todo, want, others):
    """Greedy, temperature 1, top-k, top-p and min-p in one batch."""
    got, sums, _ = finish(make(draft), todo, others)
    assert len(got) == len(todo)
    assert_equal(got, want)
    # Guesses were taken and refused, or this would show nothing.
    assert 0 < sums["accepted_tokens"] < sums["drafted_tokens"]
    assert sums["decode_tokens"] == sum(len(s.tokens) for s in want.values()) > sums["rows"]


def test_a_resumed_request_goes_on_as_if_nothing_had_happened(todo, want, others):
    engine = make("history")
    engine.submit(todo)
    engine.remember(others)
    while engine._seats.count.max() < 20:
        engine.poll(0.0)
    engine.abort([r.id for r in todo])
    parts = [e.sample for e in engine.poll(0.0) if isinstance(e, Aborted)]
    engine.close()
    limits = {r.id: r for r in todo}
    again = [
        Request(
            id=s.id,
            prompt=s.prompt,
            sampling=limits[s.id].sampling,
            resume=Partial(tokens=s.tokens, logps=s.logps, versions=s.versions),
        )
        for s in parts
    ]
    assert len(again) > 9 and all(len(s.tokens) for s in parts)
    got, sums, _ = finish(make("history"), again, others[::2])
    assert sums["accepted_tokens"]
    assert_equal(got, want)


def test_a_small_cache_and_few_rows_change_nothing(todo, want, others):
    got, sums, events = finish(make("history", max_running=5, cache_tokens=260), todo, others)
    assert any(isinstance(e, Preempted) for e in events) and sums["accepted_tokens"]
    assert_equal(got, want)


def test_histories_that_come_in_the_middle_serve_from_then_on_and_change_nothing(todo, want):
    """The index is built beside decoding. Here it holds what will be sampled."""
    engine, events = make("history", settings={"adaptive": False}), []
    engine.submit(todo)
    while engine._seats.count.max() < 5:
        events += engine.poll(0.0)
    engine.remember([history_of(s.id, s.prompt, s.tokens, 1.0) for s in want.values()])
    index = engine._drafter._index
    with index._lock:
        assert index._lock.wait_for(lambda: index._todo is None and not index._building, 10.0)
    while len(samples(events)) < len(todo):
        events += engine.poll(0.0)
    assert sum(e.decode_steps for e in events if isinstance(e, Stats)) < 30
    assert_equal(samples(events), want)
    engine.close()
    assert not index._thread.is_alive()


@pytest.mark.parametrize(
    "sampling", [{}, {"top_k": 3}, {"top_p": 0.6}], ids=["temperature 1", "top-k", "top-p"]
)
def test_the_law_of_two_tokens_is_the_models(sampling):
    """Chi-square and total variation of 3,000 pairs of tokens against the model's own
    probabilities, in float32, with a draft for every pair that is right about as often as not."""
    count, prompt = 3000, np.array([3, 4, 5, 3, 4], np.int32)
    s = Sampling(max_tokens=2, **sampling)
    todo = [Request(id=f"p{k}.0", prompt=prompt, sampling=s) for k in range(count)]
    likely = pair_law(prompt, sampling)
    best = max(likely, key=likely.get)
    guess = history_of("h.0", prompt, np.array([*best, 7], np.int32), 1.0)
    engine = make("history", std=0.25, dtype="float32", max_running=500)
    got, sums, _ = finish(engine, todo, [guess])
    assert sums["accepted_tokens"] > 0.5 * count * sum(
        p for pair, p in likely.items() if pair[0] == best[0]
    )
    assert_law(got, likely)


def assert_law(got, likely):
    """The first two tokens of these samples are of this law."""
    count, seen = len(got), dict.fromkeys(likely, 0)
    for sample in got.values():
        seen[tuple(sample.tokens[:2].tolist())] += 1
    big = [pair for pair, p in likely.items() if p * count >= 5]
    rest = [pair for pair in likely if pair not in set(big)]
    cells = [(seen[pair], likely[pair] * count) for pair in big]
    cells.append((sum(seen[p] for p in rest), sum(likely[p] for p in rest) * count))
    cells = [(n, e) for n, e in cells if e > 0]
    chi2 = sum((n - e) ** 2 / e for n, e in cells)
    degrees = len(cells) - 1
    assert chi2 < degrees + 4 * (2 * degrees) ** 0.5, (chi2, degrees)
    tv = sum(abs(n - e) for n, e in cells) / 2 / count
    noise = sum((2 / np.pi * e / count * (1 - e / count)) ** 0.5 for _, e in cells) / 2
    assert tv < 1.6 * noise / count**0.5 + 0.01


def pair_law(prompt, sampling):
    """Probabilities of the first two tokens, by the model in float64."""
    engine = make(std=0.25)

    def law(text):
        whole = torch.tensor([text])
        engine._cache.reserve(1, len(text), 0)
        step = ForwardInputs(
            tokens=whole,
            positions=torch.arange(len(text))[None],
            slot=0,
            spans=[(0, 1, len(text))],
            causal=True,
        )
        with torch.no_grad():
            hidden = engine._model.forward(step, engine._cache)
            p = engine._model.logits(hidden[0, -1]).softmax(-1)
        if k := sampling.get("top_k"):
            p[p < p.topk(k).values[-1]] = 0
        if top_p := sampling.get("top_p"):
            ordered, index = p.sort(descending=True)
            p[index[ordered.cumsum(0) - ordered >= top_p]] = 0
        return p / p.sum()

    first = law(prompt.tolist())
    out = {}
    for a in torch.nonzero(first)[:, 0].tolist():
        second = law([*prompt.tolist(), a])
        for b in torch.nonzero(second)[:, 0].tolist():
            out[a, b] = float(first[a] * second[b])
    return out


# ---- the gate

COSTS = {
    "roofline": lambda n, drafts: max(8.0, 8.0 * n / 300) + 0.5 * drafts,
    "stairs": lambda n, drafts: 6.0 + 1.2 * math.ceil(n / 64) + drafts,
    "root": lambda n, drafts: 4.0 + 0.4 * n**0.75 + 0.3 * drafts,
    "cpu": lambda n, drafts: 1.0 + n + 0.2 * drafts,
}
"""Milliseconds of a step over n tokens. The gate knows none of them."""
WINDOW = 7


def decode(gate, cost, running, steps, *, right, matched, noise=0.05, grows=0.0, seed=0):
    """Tokens per second over those of plain decoding, in `steps` steps of one batch. A request has
    a draft with probability `matched`, whose tokens are right with probability `right`. The length
    of its drafts grows by 2, or starts again with 2. `grows`: by how much steps become longer."""
    dice, windows = random.Random(f"{seed} {running}"), [2] * running
    seconds = plain = 0.0
    for step in range(steps):
        longest = gate.length(running)
        sizes = [min(w, longest, WINDOW) * (dice.random() < matched) for w in windows]
        gained = running
        for i, size in enumerate(sizes):
            taken = next((k for k in range(size) if dice.random() >= right), size)
            gained += taken
            if size:
                windows[i] = min(windows[i] + 2, WINDOW) if taken == size else 2
        slow = 1 + grows * step / steps
        took = slow * cost(running * (longest + 1), longest > 0) * math.exp(dice.gauss(0, noise))
        gate.note(running, length=longest, gained=gained, seconds=took)
        seconds += took
        plain += gained / running * slow * cost(running, False)
    return plain / seconds


@pytest.mark.parametrize("right, matched", [(0.05, 0.5), (0.4, 0.6), (0.8, 0.8)])
@pytest.mark.parametrize("name", COSTS)
def test_drafts_never_cost_more_than_two_percent(name, right, matched):
    for running in (1, 3, 8, 40, 150, 512):
        gate, steps = DraftGate(WINDOW), 600 if running > 100 else 1500
        found = decode(gate, COSTS[name], running, steps, right=right, matched=matched)
        assert found > 0.98, running


@pytest.mark.parametrize(
    "name, running, least",
    [("roofline", 1, 2.2), ("roofline", 40, 2.0), ("roofline", 128, 1.4), ("stairs", 8, 2.1),
     ("stairs", 40, 1.5), ("root", 8, 1.35)],
)  # fmt: skip
def test_drafts_gain_where_they_pay(name, running, least):
    gate = DraftGate(WINDOW)
    assert decode(gate, COSTS[name], running, 1500, right=0.8, matched=0.8) > least
    assert gate.rate(running) > least


def test_the_gate_keeps_its_bound_while_contexts_grow_and_steps_take_longer():
    for name, cost in COSTS.items():
        for running in (2, 30, 200):
            how = {"right": 0.2, "matched": 0.6, "grows": 1.0}
            assert decode(DraftGate(WINDOW), cost, running, 1000, **how) > 0.97, name


def test_useless_drafts_are_tried_ever_more_rarely_and_seen_when_they_improve():
    gate, cost, found = DraftGate(WINDOW), COSTS["roofline"], []
    for right in (0.02, 0.02, 0.02, 0.9, 0.9):
        found.append(decode(gate, cost, 150, 1500, right=right, matched=0.9))
    assert found[0] > 0.985 and found[2] > 0.993
    assert found[4] > 1.2


def test_what_pays_in_a_batch_is_tried_first_in_smaller_ones():
    gate, cost, chosen = DraftGate(WINDOW), COSTS["roofline"], []
    decode(gate, cost, 40, 400, right=0.8, matched=0.8)
    for _ in range(12):
        chosen.append(gate.length(8))
        gate.note(8, length=chosen[-1], gained=8 * (1 + 0.4 * chosen[-1]), seconds=8.0)
    assert chosen[:4] == [0] * 4 and min(chosen[4:]) >= 3  # timed without drafts at first
    assert gate.length(60) == 0 and gate.rate(60) == 1  # nothing is known of larger ones


def test_a_gate_that_does_not_switch_always_allows_the_window():
    gate = DraftGate(WINDOW, switches=False)
    gate.note(4, length=WINDOW, gained=4, seconds=1.0)
    assert gate.length(4) == WINDOW and gate.choices == [WINDOW]
    assert DraftGate(32).choices == [0, 1, 3, 7, 15, 32] and DraftGate(1).choices == [0, 1]


def test_drafts_are_tried_anew_when_histories_become_available():
    cost, found = COSTS["roofline"], {}
    for renews in (False, True):
        gate = DraftGate(WINDOW)
        decode(gate, cost, 150, 1500, right=0.02, matched=0.9)
        if renews:
            gate.renew()
        found[renews] = decode(gate, cost, 150, 40, right=0.9, matched=0.9)
    assert found[False] < 1.05 and found[True] > 1.15, found


# ---- the library


def histories(prompt, step, count=2, size=10):
    text = np.array([prompt, prompt + 1], np.int32)
    return [
        history_of(f"t{step}.{k}", text, np.full(size, k, np.int32), float(k)) for k in range(count)
    ]


def test_a_library_keeps_the_last_epochs_of_a_prompt_and_forgets_the_oldest_prompts(tmp_path):
    library = HistoryStore(max_tokens=100, epochs=2)
    for step in range(3):
        library.add(histories(1, step))
    key = prompt_key(np.array([1, 2], np.int32))
    assert [h.id for h in library.of([key])] == ["t1.0", "t1.1", "t2.0", "t2.1"]
    assert library.num_tokens == 4 * 12
    library.add(histories(5, 3) + histories(9, 4))
    assert len(library) == 3 and library.num_tokens == 96
    library.add(histories(13, 5))  # 120 tokens: prompt 1 is the oldest
    assert len(library) == 3 and library.of([key]) == [] and library.num_tokens == 72
    library.save(tmp_path / "histories.npz")
    other = HistoryStore(max_tokens=100, epochs=2)
    other.load(tmp_path / "histories.npz")
    keys = [prompt_key(np.array([p, p + 1], np.int32)) for p in (13, 9, 5)]
    pairs = zip(library.of(keys), other.of(keys), strict=True)
    assert all(
        (a.key, a.id, a.score) == (b.key, b.id, b.score) and (a.tokens == b.tokens).all()
        for a, b in pairs
    )
    assert other.num_tokens == 72
    (tmp_path / "bad.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"bad.npz: not a file of histories"):
        other.load(tmp_path / "bad.npz")


def test_the_order_in_which_responses_came_does_not_matter():
    one, two = HistoryStore(max_tokens=1000), HistoryStore(max_tokens=1000)
    some = histories(1, 0, count=5)
    one.add(some)
    two.add(some[::-1])
    key = some[0].key
    assert [h.id for h in one.of([key])] == [h.id for h in two.of([key])]


def test_rank_zero_learns_what_both_ranks_have_scored_and_tells_a_replica_once():
    """Over real sockets. The baseline of a group is no answer of training."""
    store: dict[str, str] = {}
    store_of = SimpleNamespace(set=store.__setitem__, get=store.__getitem__)
    hubs = [ZmqHub(rank, 2, store_of, "127.0.0.1", bytes(32)) for rank in (0, 1)]
    prompt = np.array([3, 4, 5], np.int32)

    def rollout(hub, timeout_s=10.0):
        ids = [f"t{hub.rank}.0", f"t{hub.rank}.1", f"bt{hub.rank}.0"]
        tokens = np.array([7, 1], np.int32)
        arrays = {"logps": np.zeros(2, np.float32), "versions": np.zeros(2, np.int32)}
        done = {i: Sample(id=i, prompt=prompt, tokens=tokens, finish="stop", **arrays) for i in ids}
        exchange = SampleExchange(hub, timeout_s)
        worker = SimpleNamespace(
            samples=done,
            scores=dict.fromkeys(ids, 0.5),
            prompts={f"t{hub.rank}": SimpleNamespace(tokens=prompt)},
            exchange=exchange,
        )
        return Rollout(hub, worker, None)

    try:
        first = rollout(hubs[0])
        first.library = HistoryStore(max_tokens=1000)
        rollout(hubs[1]).learn_histories()
        first.learn_histories()
        known = first.library.of([prompt_key(prompt)])
        assert [h.id for h in known] == ["t0.0", "t0.1", "t1.0", "t1.1"]
        assert known[3].tokens.tolist() == [3, 4, 5, 7, 1] and known[3].score == 0.5

        teacher = HistorySender(first.library)
        prompts = {"t9": Prompt(index=0, dataset="s", tokens=prompt)}
        told = teacher.before(1, prompts)
        hubs[0].send(1, "worker", told)
        got = hubs[1].receive("worker", AnyCommand, 10.0)
        assert isinstance(got, Remember) and [h.id for h in got.histories] == [h.id for h in known]
        assert teacher.before(1, prompts) is None and teacher.before(0, prompts) is not None
        teacher.lost(1)  # its engine is another one now
        assert teacher.before(1, prompts) is not None
        new = Request(id="t9.0", prompt=prompt, sampling=Sampling())
        assert teacher.before(1, prompts, [new]) is None
        none = np.zeros(1, np.int32)
        part = Partial(tokens=none, logps=np.zeros(1, np.float32), versions=none)
        moved = structs.replace(new, resume=part)
        assert teacher.before(1, prompts, [moved]) is not None  # it may be through with the prompt

        late = rollout(hubs[0], timeout_s=0.05)
        late.library = first.library
        with pytest.raises(TimeoutError, match=r"rank 0 waits .* histories of ranks \[1\]"):
            late.learn_histories()
    finally:
        for hub in hubs:
            hub.close()

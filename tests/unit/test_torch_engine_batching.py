"""What is the torch engine's own: rows, cache, memory, events."""

import numpy as np
import pytest
import torch

from rlcore.hf.cache import Cache
from rlcore.hf.config import HFConfig
from rlcore.records import Finished, LengthReport, Partial, Preempted, Request, Sampling, Stats
from rlcore.rollout.torch_engine import engine as torch_engine
from rlcore.rollout.torch_engine.engine import TorchEngine, _spans
from rlcore.sync.pack import load_weights
from tests.contracts.engine_contract import (
    CONFIG,
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


def make(**options):
    engine = TorchEngine(HF, **(OPTIONS | options))
    load_weights(engine, weights(HF, 0).items(), 0)
    return engine


def mixed(count, seed=3):
    """Groups of two with prompts and limits of very different lengths."""
    gen = np.random.default_rng(seed)
    out = []
    for number in range(count):
        prompt = gen.integers(2, VOCAB, int(gen.choice([1, 4, 12, 60]))).astype(np.int32)
        limit = int(gen.choice([2, 7, 30, 90]))
        sampling = Sampling(max_tokens=limit, stop_ids=(STOP,) if number % 2 else ())
        out += [Request(id=f"m{number}.{k}", prompt=prompt, sampling=sampling) for k in (0, 1)]
    return out


def test_hundreds_of_rows_of_mixed_lengths_sample_what_few_rows_do(monkeypatch):
    todo, spans = mixed(110), set()
    engine = make(max_running=200)
    decode = engine._model.forward
    monkeypatch.setattr(
        engine._model,
        "forward",
        lambda step, cache: (spans.add(len(step.spans)), decode(step, cache))[1],
    )
    many = run(engine, todo)
    assert max(spans) > 1  # long rows do not make short ones pay
    few = run(make(max_running=16, cache_tokens=900), todo)
    for i, sample in many.items():
        assert sample.tokens.tolist() == few[i].tokens.tolist()
        np.testing.assert_allclose(sample.logps, few[i].logps, atol=1e-6)


def test_in_float32_samples_part_only_at_rounding_ties():
    """Samples of one batch and of another part only where the random number lies within 1e-5 of a
    boundary, so a few at most; log-probs agree before."""
    todo = mixed(60)
    one, two = (run(make(dtype="float32", max_running=n), todo) for n in (120, 13))
    ties = 0
    for i, a in one.items():
        b = two[i]
        same = min(len(a.tokens), len(b.tokens))
        differ = np.flatnonzero(a.tokens[:same] != b.tokens[:same])
        common = int(differ[0]) if len(differ) else same
        ties += len(differ) > 0
        np.testing.assert_allclose(a.logps[:common], b.logps[:common], atol=1e-4)
    assert ties <= 2


def test_more_free_memory_at_a_wake_changes_nothing(monkeypatch):
    """Room for other rows would be other forwards; less is what there is."""
    free = {"tokens": 900}
    per_token = 2 * HF.num_layers * HF.num_kv_heads * HF.head_dim * 8
    monkeypatch.setattr(torch_engine, "_free_bytes", lambda device: free["tokens"] * per_token)
    engine = make()
    assert engine._cache.budget == 900
    for tokens, room in ((2000, 900), (700, 700), (900, 700)):
        free["tokens"] = tokens
        engine.sleep(("kv_cache",))
        engine.wake(("kv_cache",))
        assert engine._cache.budget == room


def test_what_ran_before_does_not_show_in_the_forwards(monkeypatch):
    """A run that goes on from a checkpoint has a fresh engine: rows in another order, or attention
    over other lengths, would round differently."""

    def forwards(engine, todo):
        seen, forward, fill = [], engine._model.forward, engine._model.fill

        def note(then):
            def call(step, cache):
                seen.append((step.tokens.tolist(), step.positions.tolist(), list(step.spans)))
                return then(step, cache)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(engine._model, "forward", note(forward))
            patch.setattr(engine._model, "fill", note(fill))
            found = run(engine, todo)
        return seen, {i: s.logps.tobytes() for i, s in found.items()}

    half = [  # of a response: its rest is prefilled beside the others of its group
        Request(
            id=f"h.{k}",
            prompt=np.arange(2, 12, dtype=np.int32),
            sampling=Sampling(max_tokens=80),
            resume=Partial(
                tokens=(np.arange(n) % 20 + 3).astype(np.int32),
                logps=np.zeros(n, np.float32),
                versions=np.zeros(n, np.int32),
            ),
        )
        for k, n in enumerate((0, 40, 3))
    ]
    # One span for all rows is as good as two a few tokens later, when a fresh cache has to grow.
    alike = [
        Request(
            id=f"a{n}.0",
            prompt=np.arange(n, n + (35 if n % 2 else 60)).astype(np.int32) % 20 + 3,
            sampling=Sampling(max_tokens=30),
        )
        for n in range(128)
    ]
    todo = alike + half
    used = make(dtype="float32", max_running=200)
    run(used, mixed(110))
    assert forwards(used, todo) == forwards(make(dtype="float32", max_running=200), todo)


def test_spans_cover_all_rows_and_are_one_when_lengths_are_alike():
    assert _spans(np.full(256, 30)) == [(0, 256, 30)]
    assert _spans(np.array([3, 90])) == [(0, 2, 90)]
    lengths = np.sort(np.random.default_rng(0).integers(5, 140, 200))[::-1]
    spans = _spans(lengths)
    assert [a for a, _, _ in spans] == [0, 64, 128, 192] and spans[-1][1] == 200
    assert all(length == lengths[a:b].max() for a, b, length in spans)


def test_members_that_join_later_share_the_prefill_while_one_of_them_runs():
    prompt = np.arange(2, 22, dtype=np.int32)
    engine = make(max_running=2)
    todo = [
        Request(id=f"late.{k}", prompt=prompt, sampling=Sampling(max_tokens=5 + 3 * k))
        for k in range(7)
    ]
    engine.submit(todo)
    events = collect(engine, ended(7))
    assert sum(e.prefill_tokens for e in events if isinstance(e, Stats)) == 19
    assert sum(e.cached_tokens for e in events if isinstance(e, Stats)) == 6 * 19
    engine.submit([Request(id="late.9", prompt=prompt, sampling=Sampling(max_tokens=2))])
    events = collect(engine, ended(1))  # nobody of the group ran: once more
    assert sum(e.prefill_tokens for e in events if isinstance(e, Stats)) == 19


def test_a_group_name_with_another_prompt_shares_nothing():
    prompts = [np.arange(2, 12, dtype=np.int32), np.arange(3, 13, dtype=np.int32)]
    todo = [
        Request(id=f"same.{k}", prompt=p, sampling=Sampling(max_tokens=20))
        for k, p in enumerate(prompts)
    ]
    both = run(make(), todo)
    for request in todo:
        alone = run(make(), [request])[request.id]
        assert alone.tokens.tolist() == both[request.id].tokens.tolist()


def test_the_cache_stays_in_its_budget_and_preempts_the_latest_of_the_lowest_priority():
    engine = make(cache_tokens=130)
    sampling = Sampling(max_tokens=100)
    prompt = np.array([3, 4, 5], np.int32)
    todo = [
        Request(id=f"b{k}.0", prompt=prompt, sampling=sampling, priority=k == 1) for k in range(3)
    ]
    engine.submit(todo)
    events = []
    while len(samples(events)) < 3:
        events += engine.poll(0.0)
        assert engine._cache.slots * engine._cache.capacity <= 130
    first = next(e for e in events if isinstance(e, Preempted))
    assert first.id == "b1.0"
    ends = [e.id for e in events if isinstance(e, Finished)]
    assert ends == ["b0.0", "b2.0", "b1.0"]


def test_a_request_that_can_never_fit_the_cache_is_refused():
    with pytest.raises(ValueError, match="exceed --rollout.kv_cache_tokens 64"):
        make(cache_tokens=64).submit(
            [Request(id="x.0", prompt=np.array([3], np.int32), sampling=Sampling(max_tokens=64))]
        )


def test_growing_keeps_the_rows_and_moving_copies_them():
    cache = Cache(
        2,
        (2, 1, 2),
        dtype=torch.float64,
        device=torch.device("cpu"),
        max_slots=8,
        max_columns=64,
        budget=512,
    )
    cache.reserve(2, 10, 0)
    for slab in cache.layers:
        slab[:, :2] = torch.randn(slab[:, :2].shape, dtype=slab.dtype)
    before = [slab[:, :2, :, :10].clone() for slab in cache.layers]
    cache.reserve(5, 40, 2)
    assert cache.slots >= 5 and cache.capacity >= 40
    assert all(torch.equal(s[:, :2, :, :10], b) for s, b in zip(cache.layers, before, strict=True))
    cache.move([3, 0, 1], [0, 1, 0], 10)  # sources are read before targets are written
    for slab, old in zip(cache.layers, before, strict=True):
        assert torch.equal(slab[:, 3, :, :10], old[:, 0])
        assert torch.equal(slab[:, 0, :, :10], old[:, 1])
        assert torch.equal(slab[:, 1, :, :10], old[:, 0])
    with pytest.raises(ValueError, match="do not fit"):
        cache.reserve(9, 64, 2)
    cache.free()
    assert cache.num_bytes == 0


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_sleep_returns_the_memory_to_the_system():
    big = HFConfig.from_dict(CONFIG | {"hidden_size": 512, "intermediate_size": 8192})
    engine = TorchEngine(big, **(OPTIONS | {"dtype": "float32", "max_running": 256}))
    load_weights(engine, weights(big, 0).items(), 0)  # 112 MB
    prompt = np.arange(2, 22, dtype=np.int32)
    sampling = Sampling(max_tokens=100)
    engine.submit([Request(id=f"z.{k}", prompt=prompt, sampling=sampling) for k in range(256)])
    engine.poll(0.0)
    weight_bytes = 2 * 3 * 512 * 8192 * 4
    cache_bytes = engine.cache_bytes
    assert cache_bytes > 256 * 32 * 2 * 2 * 2 * 16 * 4 * 0.9
    engine.pause("recompute")
    full = resident_bytes()
    engine.sleep(("weights", "kv_cache"))
    assert engine.cache_bytes == 0
    freed = full - resident_bytes()
    assert freed > 0.9 * (weight_bytes + cache_bytes)
    engine.close()


def test_progress_comes_at_intervals_of_the_clock_with_true_lengths():
    now = [0.0]

    def clock():
        now[0] += 0.01
        return now[0]

    engine = make(progress_s=1.0, clock=clock)
    todo = [
        Request(id=f"t.{k}", prompt=np.array([3], np.int32), sampling=Sampling(max_tokens=90))
        for k in range(2)
    ]
    engine.submit(todo)
    events = collect(engine, ended(2))
    reports = [e for e in events if isinstance(e, LengthReport)]
    times = [e.time for e in reports]
    assert len(reports) >= 3 and all(b - a >= 1.0 for a, b in zip(times, times[1:], strict=False))
    for event in reports:
        assert event.ids == ("t.0", "t.1") and len(set(event.lengths)) == 1
    steps = [
        sum(s.decode_steps for s in events[: events.index(e)] if isinstance(s, Stats))
        for e in reports
    ]
    assert [e.lengths[0] for e in reports][1:] != [e.lengths[0] for e in reports][:-1]
    assert all(s <= e.lengths[0] for s, e in zip(steps, reports, strict=True))


def test_every_decode_step_lasts_at_least_the_floor():
    engine = make(decode_floor_ms=4.0)
    engine.submit(
        [Request(id="f.0", prompt=np.array([3], np.int32), sampling=Sampling(max_tokens=20))]
    )
    events = collect(engine, ended(1))
    assert sum(e.busy_s for e in events if isinstance(e, Stats)) >= 20 * 0.004


def test_the_callers_number_of_threads_comes_back():
    before = torch.get_num_threads()
    engine = make(threads=before + 1)
    run(engine, mixed(1))
    assert torch.get_num_threads() == before


def test_broken_weights_are_named_and_not_sampled_from():
    engine = TorchEngine(HF, **OPTIONS)
    bad = weights(HF, 0) | {"model.norm.weight": torch.full((32,), float("nan"))}
    load_weights(engine, bad.items(), 0)
    engine.submit(
        [Request(id="n.0", prompt=np.array([3], np.int32), sampling=Sampling(max_tokens=5))]
    )
    with pytest.raises(RuntimeError, match="request n.0: the logits are not finite"):
        engine.poll(1.0)

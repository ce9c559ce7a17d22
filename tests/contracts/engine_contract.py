"""What every engine must do. A test module imports these functions and gives them a fixture `lab`.

    from tests.contracts.engine_contract import *  # noqa: F403

    @pytest.fixture(params=["inline", "child"])
    def lab(request): ...a Lab

The oracle is transformers in float64. An engine that cannot compute in float64 says so by
`exact=False`: tokens may then differ where a random number lies within rounding of a boundary of
the distribution. `assert_same` looks whether it does.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from rlcore.hf.config import HFConfig
from rlcore.hf.names import expected
from rlcore.protocols import Engine
from rlcore.records import (
    Aborted,
    AnyEvent,
    Finished,
    LengthReport,
    Partial,
    Preempted,
    Request,
    Sample,
    Sampling,
    Stats,
)
from rlcore.rollout.torch_engine.sampler import GOLDEN, uniform
from rlcore.sync.pack import load_weights, pack
from rlcore.utils.seed import derive

DEADLINE_S = 200.0
VOCAB = 29
STOP = 1
SEED = 7
TIE = 1e-5
"""A random number this near to a boundary of the CDF may fall on either side of it."""
MAX_MODEL_TOKENS = 96
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
HF = HFConfig.from_dict(CONFIG)


@dataclass
class Lab:
    """How a test gets engines. `make(**options)` returns a loaded one of `weights(HF, 0)` as
    version 0; options are `max_running` and `cache_tokens`; the seed is `SEED`."""

    make: Callable[..., Engine]
    exact: bool = True
    tolerance: float = 1e-9
    """Of log-probs, which travel as float32, beyond that rounding."""
    draws: int = 3000
    """That a law is tested with."""
    known: dict = field(default_factory=dict)


def weights(hf: HFConfig, seed: int, std: float = 0.25) -> dict[str, torch.Tensor]:
    """Random weights of a size that makes distributions neither flat nor sharp."""
    gen = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(shape, generator=gen) + 0.5
        if "norm" in name
        else torch.randn(shape, generator=gen) * std
        for name, shape in expected(hf).items()
    }


_oracles: dict[tuple[str, int, float], torch.nn.Module] = {}


def oracle(config: dict, seed: int, std: float = 0.25) -> torch.nn.Module:
    """transformers' model in float64 with `weights(hf, seed, std)`."""
    key = (config["architectures"][0], seed, std)
    if key not in _oracles:
        from transformers import AutoConfig, AutoModelForCausalLM

        rest = {k: v for k, v in config.items() if k != "model_type"}
        hf = AutoConfig.for_model(config["model_type"], **rest)
        model = AutoModelForCausalLM.from_config(hf, attn_implementation="eager").double().eval()
        state = weights(HFConfig.from_dict(config), seed, std)
        load_oracle(model, state)
        _oracles[key] = model
    return _oracles[key]


def load_oracle(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Copy weights by name; experts, which transformers holds stacked, are stacked."""
    stacked: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if ".experts." not in name:
            stacked[name] = tensor
    prefixes = {n.split(".experts.")[0] for n in state if ".experts." in n}
    for prefix in prefixes:
        count = 1 + max(int(n.split(".")[-3]) for n in state if n.startswith(f"{prefix}.experts."))

        def expert(kind: str, prefix: str = prefix, count: int = count) -> torch.Tensor:
            parts = [state[f"{prefix}.experts.{e}.{kind}_proj.weight"] for e in range(count)]
            return torch.stack(parts)

        stacked[f"{prefix}.experts.gate_up_proj"] = torch.cat((expert("gate"), expert("up")), 1)
        stacked[f"{prefix}.experts.down_proj"] = expert("down")
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    missing, unexpected = model.load_state_dict(stacked, strict=False)
    assert set(missing) <= tied and not unexpected, (missing, unexpected)


def full_logits(
    prompt: Iterable[int],
    tokens: Iterable[int],
    seed: int = 0,
    model: torch.nn.Module | None = None,
) -> torch.Tensor:
    """[R, V] float64: what predicts each response token, by one forward over everything."""
    prompt, tokens = list(prompt), list(tokens)
    if model is None:
        model = oracle(CONFIG, seed)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0]
    return logits[len(prompt) - 1 : -1]


def prompts(count: int, seed: int = 0) -> list[np.ndarray]:
    gen = np.random.default_rng(seed)
    return [gen.integers(2, VOCAB, int(gen.integers(1, 20))).astype(np.int32) for _ in range(count)]


def requests(
    count: int, group: int = 3, max_tokens: int = 40, tag: str = "r", **sampling
) -> list[Request]:
    """`count` groups of `group` requests with prompts of different lengths."""
    sampling = Sampling(max_tokens=max_tokens, stop_ids=(STOP,), **sampling)
    return [
        Request(id=f"{tag}{number}.{k}", prompt=prompt, sampling=sampling)
        for number, prompt in enumerate(prompts(count))
        for k in range(group)
    ]


def collect(engine: Engine, until: Callable[[list[AnyEvent]], bool]) -> list[AnyEvent]:
    """Events until `until` holds of them; fails at the deadline."""
    events: list[AnyEvent] = []
    end = time.monotonic() + DEADLINE_S
    while not until(events):
        assert time.monotonic() < end, f"nothing more after {len(events)} events"
        events += engine.poll(0.05)
    return events


def ended(count: int) -> Callable[[list[AnyEvent]], bool]:
    """`count` requests have finished or were aborted."""
    return lambda events: sum(isinstance(e, Finished | Aborted) for e in events) >= count


def run(engine: Engine, todo: list[Request]) -> dict[str, Sample]:
    """Submit and wait for all; samples by id."""
    engine.submit(todo)
    return samples(collect(engine, ended(len(todo))))


def samples(events: list[AnyEvent]) -> dict[str, Sample]:
    return {e.id: e.sample for e in events if isinstance(e, Finished | Aborted)}


def some_tokens(engine: Engine, ids: set[str], least: int) -> list[AnyEvent]:
    """Wait until these requests, all running, have `least` tokens each, by progress events."""

    def long_enough(events: list[AnyEvent]) -> bool:
        lengths: dict[str, int] = {}
        for event in events:
            if isinstance(event, LengthReport):
                lengths.update(zip(event.ids, event.lengths, strict=True))
        return all(lengths.get(i, 0) >= least for i in ids)

    return collect(engine, long_enough)


def assert_same(
    lab: Lab,
    got: dict[str, Sample],
    want: dict[str, Sample],
    todo: Iterable[Request],
    model: torch.nn.Module | None = None,
) -> None:
    """The same tokens with the same log-probs for these requests; samples of an inexact engine may
    part at a tie, a few of many. `model` is the oracle, if not that of `CONFIG` and seed 0."""
    assert got.keys() == want.keys()
    asked, parted = {r.id: r for r in todo}, []
    for i, sample in want.items():
        ours, theirs = got[i].tokens.tolist(), sample.tokens.tolist()
        pairs = enumerate(zip(ours, theirs, strict=False))
        at = next((k for k, (a, b) in pairs if a != b), len(theirs))
        same = slice(0, at)
        np.testing.assert_allclose(
            got[i].logps[same], sample.logps[same], atol=1e-6 + lab.tolerance
        )
        if at < len(theirs):
            parted.append(i)
            assert not lab.exact, (i, at)
            logits = full_logits(sample.prompt, theirs, model=model)[at]
            assert_tie(asked[i], at, ours[at], theirs[at], logits)
        else:
            assert ours == theirs, i
    assert len(parted) <= max(1, len(want) // 50), parted


def assert_tie(request: Request, at: int, ours: int, theirs: int, logits: torch.Tensor) -> None:
    """Rounding may decide between these tokens at position `at` of a response: the logits are
    equal, or the random number lies at the boundary between the two."""
    low, high = sorted((ours, theirs))
    where = f"{request.id} parts at {at} with {ours} for {theirs}"
    if request.sampling.temperature == 0:
        assert abs(float(logits[low] - logits[high])) < 10 * TIE, where
        return
    key = derive(SEED, "sample", request.id)
    counter = (key + at * GOLDEN + 2**63) % 2**64 - 2**63
    drawn = float(uniform(torch.tensor(counter)))
    cdf = kept(logits, request.sampling).exp().cumsum(0)
    for token in (low, high - 1):  # what lies between them has no mass
        assert abs(drawn - float(cdf[token])) < TIE, f"{where}: {drawn}, {float(cdf[token])}"


def kept(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[V] float64 log-probs after temperature, top-k, top-p, min-p, by the slow road."""
    probs = (logits / sampling.temperature).softmax(-1).tolist()
    order = sorted(range(len(probs)), key=lambda t: (-probs[t], t))
    if sampling.top_k:
        order = order[: sampling.top_k]
    total, mass, nucleus = sum(probs[t] for t in order), 0.0, []
    for token in order:
        if mass >= sampling.top_p * total:
            break
        nucleus.append(token)
        mass += probs[token]
    nucleus = [t for t in nucleus if probs[t] >= sampling.min_p * probs[nucleus[0]]]
    out = torch.full((len(probs),), -torch.inf, dtype=torch.float64)
    out[nucleus] = torch.tensor([probs[t] for t in nucleus], dtype=torch.float64)
    out[nucleus] = (out[nucleus] / out[nucleus].sum()).log()
    return out


# ---- ends


def test_every_request_ends_once_with_a_sample_that_says_how(lab):
    engine = lab.make()
    todo = requests(12)
    engine.submit(todo)
    events = collect(engine, ended(len(todo)))
    finished = [e for e in events if isinstance(e, Finished)]
    assert sorted(e.id for e in finished) == sorted(r.id for r in todo)
    reasons = set()
    by_id = {r.id: r for r in todo}
    for event in finished:
        sample = event.sample
        assert sample.id == event.id and sample.finish == event.finish
        assert event.num_tokens == len(sample.tokens) == len(sample.logps) == len(sample.versions)
        assert sample.prompt.tolist() == by_id[event.id].prompt.tolist()
        tokens = sample.tokens.tolist()
        assert STOP not in tokens[:-1]
        assert (tokens[-1] == STOP) == (event.finish == "stop")
        assert len(tokens) == 40 or event.finish == "stop"
        assert set(sample.versions.tolist()) == {0}
        reasons.add(event.finish)
    assert reasons == {"stop", "length"}


def test_a_response_may_be_one_token_long_and_a_prompt_too(lab):
    engine = lab.make()
    todo = [
        Request(id="one.0", prompt=np.array([5], np.int32), sampling=Sampling(max_tokens=1)),
        Request(
            id="one.1",
            prompt=np.array([5], np.int32),
            sampling=Sampling(max_tokens=9, stop_ids=tuple(range(VOCAB))),
        ),
    ]
    got = run(engine, todo)
    assert {i: (len(s.tokens), s.finish) for i, s in got.items()} == {
        "one.0": (1, "length"),
        "one.1": (1, "stop"),
    }


def test_any_of_several_stop_ids_ends_a_response(lab):
    engine = lab.make()
    todo = [
        Request(
            id=f"s{n}.0", prompt=p, sampling=Sampling(max_tokens=60, stop_ids=tuple(range(n + 1)))
        )
        for n, p in enumerate(prompts(12))
    ]
    for n, sample in enumerate(run(engine, todo).values()):
        stops = set(range(int(sample.id[1:-2]) + 1))
        assert not stops & set(sample.tokens[:-1].tolist())
        assert (int(sample.tokens[-1]) in stops) == (sample.finish == "stop"), n


def test_counters_add_up_and_a_group_is_prefilled_once(lab):
    engine = lab.make()
    todo = requests(6, group=4, tag="count")
    engine.submit(todo)
    events = collect(
        engine,
        lambda es: ended(len(todo))(es) and any(isinstance(e, Stats) and not e.running for e in es),
    )
    stats = [e for e in events if isinstance(e, Stats)]
    generated = sum(len(s.tokens) for s in samples(events).values())
    assert sum(s.decode_tokens for s in stats) == generated
    once = sum(len(p) for p in prompts(6))
    assert once - 6 <= sum(s.prefill_tokens for s in stats) <= once
    assert 3 * (once - 6) <= sum(s.cached_tokens for s in stats) <= 3 * once
    assert 40 <= sum(s.decode_steps for s in stats) <= generated
    assert sum(s.busy_s for s in stats) > 0
    held = generated + once
    assert 0 < max(s.cache_used for s in stats) <= 1 and stats[-1].cache_tokens >= held


# ---- the law


def test_greedy_is_the_argmax_of_a_full_forward(lab):
    for sample in run(lab.make(), requests(6, group=1, temperature=0.0, tag="g")).values():
        want = full_logits(sample.prompt, sample.tokens).argmax(-1).tolist()
        assert sample.tokens.tolist() == want
        assert not sample.logps.any()  # a point mass


def test_log_probs_are_those_of_a_full_forward(lab):
    for temperature in (1.0, 0.7):
        todo = requests(
            6, group=2, temperature=temperature, tag=f"lp{temperature}".replace(".", "")
        )
        for sample in run(lab.make(), todo).values():
            logits = full_logits(sample.prompt, sample.tokens) / temperature
            tokens = torch.from_numpy(sample.tokens).long()
            want = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
            np.testing.assert_allclose(sample.logps, want, rtol=2e-6, atol=1e-6 + lab.tolerance)


FILTERS = [
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"top_k": 8, "top_p": 0.8, "min_p": 0.05, "temperature": 1.5},
]


def test_filters_sample_only_what_they_keep_with_renormalised_log_probs(lab):
    engine = lab.make()
    todo = [
        request
        for number, settings in enumerate(FILTERS)
        for request in requests(4, group=2, max_tokens=12, tag=f"f{number}x", **settings)
    ]
    by_id = {r.id: r for r in todo}
    for sample in run(engine, todo).values():
        logits = full_logits(sample.prompt, sample.tokens)
        for row, token, logp in zip(logits, sample.tokens, sample.logps, strict=True):
            want = float(kept(row, by_id[sample.id].sampling)[token])
            assert abs(float(logp) - want) < 3e-6 + lab.tolerance, (sample.id, logp, want)


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.6}, {"top_k": 5, "top_p": 0.9}], ids=["plain", "cold", "cut"]
)
def test_frequencies_follow_the_law(lab, settings):
    """Chi-square over draws of one token, at 1e-4; the seed is fixed, so it never flakes."""
    draws, prompt = lab.draws, np.array([3, 9, 4], np.int32)
    sampling = Sampling(max_tokens=1, **settings)
    todo = [Request(id=f"law.{k}", prompt=prompt, sampling=sampling) for k in range(draws)]
    got = run(lab.make(), todo)
    counts = np.bincount([int(s.tokens[0]) for s in got.values()], minlength=VOCAB)
    probs = kept(full_logits(prompt, [0])[0], sampling).exp().numpy()
    assert counts[probs == 0].sum() == 0
    live = probs > 0
    statistic = ((counts - draws * probs)[live] ** 2 / (draws * probs[live])).sum()
    assert live.sum() > 3
    freedom = torch.tensor(live.sum() - 1.0)
    assert torch.special.gammaincc(freedom / 2, torch.tensor(statistic / 2)) > 1e-4


# ---- what a sample depends on


def test_a_sample_does_not_depend_on_its_batch_mates(lab):
    todo = requests(8)
    together = run(lab.make(), todo)
    alone = {}
    for request in todo[::5]:
        alone |= run(lab.make(), [request])
    assert_same(lab, alone, {i: together[i] for i in alone}, todo)
    narrow = run(lab.make(max_running=3), todo[::-1])
    assert_same(lab, narrow, together, todo)


def test_two_replicas_sample_what_one_does(lab):
    todo = requests(8)
    one = run(lab.make(), todo)
    two = run(lab.make(), todo[::2]) | run(lab.make(), todo[1::2])
    assert_same(lab, two, one, todo)


def test_a_second_run_gives_the_same_bits(lab):
    first, second = (run(lab.make(), requests(6)) for _ in range(2))
    for i, sample in first.items():
        assert sample.tokens.tobytes() == second[i].tokens.tobytes()
        assert lab.exact is False or sample.logps.tobytes() == second[i].logps.tobytes()


def test_ids_give_different_samples_of_one_prompt(lab):
    got = run(lab.make(), requests(1, group=8, max_tokens=30))
    assert len({tuple(s.tokens.tolist()) for s in got.values()}) >= 7


# ---- abort and resume


def test_abort_returns_the_partial_and_resume_goes_on_as_if_nothing_had_been(lab):
    todo = [r for r in requests(8, max_tokens=70, tag="ab")]
    whole = run(lab.make(), todo)
    engine = lab.make()
    engine.submit(todo)
    early = collect(engine, lambda events: any(isinstance(e, Finished) for e in events))
    engine.abort([r.id for r in todo] + ["never.0"])
    events = early + collect(engine, lambda more: ended(len(todo))(early + more))
    cut = {e.id: e.sample for e in events if isinstance(e, Aborted)}
    assert cut and all(s.finish == "abort" for s in cut.values())
    assert any(len(s.tokens) for s in cut.values())
    back = []
    for request in todo:
        if (s := cut.get(request.id)) is None:
            continue
        assert (
            lab.exact is False or s.tokens.tolist() == whole[s.id].tokens[: len(s.tokens)].tolist()
        )
        partial = Partial(tokens=s.tokens, logps=s.logps, versions=s.versions)
        back.append(
            Request(id=request.id, prompt=request.prompt, sampling=request.sampling, resume=partial)
        )
    rest = run(engine, back[::-1])
    assert_same(lab, rest, {i: whole[i] for i in rest}, todo)


def test_unknown_and_finished_ids_are_ignored_by_abort(lab):
    engine = lab.make()
    run(engine, requests(1, group=1, tag="done"))
    engine.abort(["done0.0", "never.1"])
    assert not [e for e in engine.poll(0.05) if isinstance(e, Aborted | Finished)]


def test_a_waiting_request_can_be_aborted_and_its_id_used_again(lab):
    engine = lab.make(max_running=3)
    todo = requests(4, group=1, tag="w")
    engine.pause("in_place")
    engine.submit(todo)
    engine.abort([todo[3].id])
    (gone,) = [e for e in collect(engine, ended(1)) if isinstance(e, Aborted)]
    assert gone.id == todo[3].id and gone.num_tokens == 0 and len(gone.sample.tokens) == 0
    engine.resume()
    engine.submit([todo[3]])
    assert len(samples(collect(engine, ended(4)))) == 4


# ---- weights


def test_tokens_carry_the_version_that_made_them(lab):
    engine = lab.make()
    todo = requests(3, group=1, max_tokens=70, tag="v")
    todo = [Request(id=r.id, prompt=r.prompt, sampling=Sampling(max_tokens=70)) for r in todo]
    engine.submit(todo)
    some_tokens(engine, {r.id for r in todo}, 3)
    engine.pause("recompute")
    load_weights(engine, weights(HF, 1).items(), 5)
    engine.resume()
    for sample in samples(collect(engine, ended(3))).values():
        versions = sample.versions.tolist()
        switch = versions.index(5)
        assert switch >= 3 and versions == [0] * switch + [5] * (70 - switch)
        for seed, part in ((0, slice(0, switch)), (1, slice(switch, 70))):
            logits = full_logits(sample.prompt, sample.tokens, seed)[part]
            tokens = torch.from_numpy(sample.tokens[part]).long()
            want = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
            np.testing.assert_allclose(
                sample.logps[part], want, rtol=2e-6, atol=1e-6 + lab.tolerance
            )


def test_a_push_while_paused_in_place_goes_on_with_the_new_weights(lab):
    engine = lab.make()
    todo = [
        Request(id="ip.0", prompt=prompts(1)[0], sampling=Sampling(max_tokens=60)),
    ]
    engine.submit(todo)
    some_tokens(engine, {"ip.0"}, 2)
    engine.pause("in_place")
    load_weights(engine, weights(HF, 1).items(), 1)
    engine.resume()
    sample = samples(collect(engine, ended(1)))["ip.0"]
    versions = sample.versions.tolist()
    switch = versions.index(1)
    assert versions == [0] * switch + [1] * (60 - switch)
    tokens = torch.from_numpy(sample.tokens[switch:]).long()
    old = full_logits(sample.prompt, sample.tokens, 0)[switch:].log_softmax(-1)
    gap = (torch.from_numpy(sample.logps[switch:]) - old.gather(-1, tokens[:, None])[:, 0]).abs()
    assert gap.max() > 1e-2


def test_an_incomplete_push_is_refused_by_name_and_the_engine_waits_for_a_whole_one(lab):
    engine = lab.make()
    new = weights(HF, 1)
    left_out = ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    engine.begin_load(1)
    for bucket, buffer in pack([(n, t) for n, t in new.items() if n not in left_out], 4096):
        engine.load_bucket(bucket, [buffer])
    with pytest.raises(RuntimeError) as error:
        engine.end_load()
    assert all(name in str(error.value) for name in left_out)
    assert "model.layers.0" not in str(error.value)
    engine.submit(requests(1, group=1, tag="inc"))
    assert not engine.poll(0.1)
    load_weights(engine, new.items(), 1)
    (sample,) = samples(collect(engine, ended(1))).values()
    assert set(sample.versions.tolist()) == {1}


@pytest.mark.parametrize("again", ["bucket", "all"])
def test_a_bucket_that_changed_on_its_way_is_refused_until_all_weights_come_again(lab, again):
    engine = lab.make()
    new = weights(HF, 1)
    every = list(pack(new.items(), 4096))
    assert len(every) > 2
    engine.begin_load(1)
    for number, (bucket, buffer) in enumerate(every):
        if number != 1:
            engine.load_bucket(bucket, [buffer])
            continue
        damaged = bytearray(buffer)
        damaged[5] ^= 1
        with pytest.raises(RuntimeError, match="changed on its way.*send all weights again"):
            engine.load_bucket(bucket, [bytes(damaged)])
        if again == "bucket":
            engine.load_bucket(bucket, [buffer])
    with pytest.raises(RuntimeError, match="tensors are missing"):
        engine.end_load()
    engine.submit(requests(1, group=1, tag="bad"))
    assert not engine.poll(0.1)
    load_weights(engine, new.items(), 1)
    (sample,) = samples(collect(engine, ended(1))).values()
    assert set(sample.versions.tolist()) == {1}


@pytest.mark.parametrize("is_damaged", [False, True])
def test_buckets_may_be_sent_before_earlier_ones_are_loaded(lab, is_damaged):
    engine, other, todo = lab.make(), lab.make(), requests(2, tag="ahead")
    new = weights(HF, 1)
    every = [(bucket, bytearray(buffer)) for bucket, buffer in pack(new.items(), 4096)]
    every[1][1][5] ^= is_damaged
    errors, waits = [], []
    engine.begin_load(1)
    for bucket, buffer in every:
        try:  # an engine in this process loads at once
            waits.append(engine.send_bucket(bucket, [bytes(buffer)]))
        except RuntimeError as error:
            errors.append(str(error))
    for wait in filter(None, waits):
        try:
            wait()
        except RuntimeError as error:
            errors.append(str(error))
    if is_damaged:
        (error,) = errors
        assert "changed on its way" in error
        with pytest.raises(RuntimeError, match="tensors are missing"):
            engine.end_load()
        return
    assert not errors
    engine.end_load()
    load_weights(other, new.items(), 1)
    assert_same(lab, run(engine, todo), run(other, todo), todo)


def test_unknown_names_and_wrong_shapes_are_refused(lab):
    engine = lab.make()
    for name, shape, word in (
        ("model.layers.9.mlp.up_proj.weight", (2, 2), "no tensor of this name"),
        ("model.norm.weight", (5,), "shape"),
    ):
        bucket, buffer = next(pack([(name, torch.zeros(shape))], 4096))
        engine.begin_load(1)
        with pytest.raises(ValueError, match=word) as error:
            engine.load_bucket(bucket, [buffer])
        assert name in str(error.value)


# ---- pause, sleep


@pytest.mark.parametrize("mode", ["in_place", "recompute"])
def test_a_pause_stops_decoding_and_changes_no_sample(lab, mode):
    todo = requests(4, max_tokens=60, tag="pa")
    whole = run(lab.make(), todo)
    engine = lab.make()
    engine.submit(todo)
    early = collect(engine, lambda events: any(isinstance(e, Finished) for e in events))
    engine.pause(mode)
    early += engine.poll(0.0)
    assert not [e for e in engine.poll(0.1) if not isinstance(e, Stats)]
    engine.resume()
    events = early + collect(engine, lambda more: ended(len(todo))(early + more))
    assert_same(lab, samples(events), whole, todo)


def test_pausing_with_abort_ends_every_request(lab):
    engine = lab.make(max_running=3)
    todo = requests(4, group=1, max_tokens=60, tag="pab")
    engine.submit(todo)
    early = engine.poll(0.05)
    engine.pause("abort")
    events = early + collect(engine, lambda more: ended(4)(early + more))
    assert any(isinstance(e, Aborted) for e in events)
    assert sorted(samples(events)) == sorted(r.id for r in todo)
    engine.resume()
    assert len(run(engine, requests(1, tag="after"))) == 3


@pytest.mark.parametrize(
    "tags", [("weights", "kv_cache"), ("kv_cache",), ("weights",)], ids="+".join
)
def test_sleep_and_wake_lose_nothing_but_memory(lab, tags):
    todo = requests(4, max_tokens=60, tag="sl")
    whole = run(lab.make(), todo)
    engine = lab.make()
    engine.submit(todo)
    early = collect(engine, lambda events: any(isinstance(e, Finished) for e in events))
    with pytest.raises(RuntimeError, match="pause"):
        engine.sleep(tags)
    engine.pause("recompute")
    early += engine.poll(0.0)
    engine.sleep(tags)
    engine.resume()
    assert not [e for e in engine.poll(0.05) if not isinstance(e, Stats)]
    engine.wake(tags)
    if "weights" in tags:
        assert not [e for e in engine.poll(0.05) if not isinstance(e, Stats)]
        load_weights(engine, weights(HF, 0).items(), 0)
    events = early + collect(engine, lambda more: ended(len(todo))(early + more))
    assert_same(lab, samples(events), whole, todo)


# ---- scheduling


def test_a_full_cache_preempts_and_changes_no_sample(lab):
    sampling = Sampling(max_tokens=70)
    todo = [Request(id=f"pre{n}.0", prompt=p, sampling=sampling) for n, p in enumerate(prompts(5))]
    whole = run(lab.make(), todo)
    engine = lab.make(cache_tokens=128)
    engine.submit(todo)
    events = collect(
        engine,
        lambda es: ended(len(todo))(es) and any(isinstance(e, Stats) and not e.running for e in es),
    )
    assert any(isinstance(e, Preempted) for e in events)
    assert max(e.cache_used for e in events if isinstance(e, Stats)) > 0.7
    assert_same(lab, samples(events), whole, todo)


def test_lower_priority_numbers_start_first_and_equals_in_order(lab):
    engine = lab.make(max_running=1)
    order = {"p0.0": 1, "p1.0": 0, "p2.0": 1, "p3.0": -5, "p4.0": 0}
    engine.pause("in_place")
    engine.submit(
        [
            Request(
                id=i, prompt=np.array([4], np.int32), sampling=Sampling(max_tokens=3), priority=p
            )
            for i, p in order.items()
        ]
    )
    engine.resume()
    events = collect(engine, ended(5))
    ends = [e.id for e in events if isinstance(e, Finished)]
    assert ends == ["p3.0", "p1.0", "p4.0", "p0.0", "p2.0"]


# ---- refusals

BAD = [
    ({"prompt": np.zeros(0, np.int32)}, "empty"),
    ({"prompt": np.full(90, 3, np.int32)}, "exceed the engine's 96"),
    ({"prompt": np.array([VOCAB], np.int32)}, "outside the vocabulary"),
    ({"prompt": np.array([-1], np.int32)}, "outside the vocabulary"),
    ({"sampling": Sampling(max_tokens=0)}, "max_tokens"),
    ({"sampling": Sampling(temperature=-1.0)}, "temperature"),
    ({"sampling": Sampling(top_p=0.0)}, "top_p"),
    ({"sampling": Sampling(min_p=1.5)}, "min_p"),
    ({"sampling": Sampling(top_k=-1)}, "top_k"),
]


def test_bad_requests_are_refused_in_words_and_nothing_of_the_batch_starts(lab):
    engine = lab.make()
    good = requests(1, group=1, tag="ok")
    for change, word in BAD:
        fields = {"id": "bad.0", "prompt": good[0].prompt, "sampling": Sampling(max_tokens=9)}
        with pytest.raises(ValueError, match=f"request bad.0.*{word}"):
            engine.submit([*good, Request(**(fields | change))])
    full = Partial(
        tokens=np.full(9, 3, np.int32),
        logps=np.zeros(9, np.float32),
        versions=np.zeros(9, np.int32),
    )
    with pytest.raises(ValueError, match="nothing is left"):
        engine.submit([Request(**fields, resume=full)])
    with pytest.raises(ValueError, match="use each id once"):
        engine.submit([*good, *good])
    assert list(run(engine, good)) == ["ok0.0"]  # it was not queued before


def test_only_possible_layouts_are_taken(lab):
    engine = lab.make()
    engine.resize(1)
    with pytest.raises(ValueError, match="tensor-parallel size 3"):
        engine.resize(3)

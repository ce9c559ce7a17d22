"""Quantised weights and the float32 head of the torch engine: the grids by hand, the law of what is
sampled against transformers, pushes, sleep and child processes.

Not covered: the gap that a format makes on a trained model (tools/studies/exp_tis.py --formats)."""

import numpy as np
import pytest
import torch
from torch import nn

from rlcore.hf.cache import Cache
from rlcore.hf.config import HFConfig
from rlcore.hf.model import CausalLM, ForwardInputs, rms_norm
from rlcore.hf.names import HEAD, expected
from rlcore.hf.quantize import (
    FORMATS,
    format_of,
    is_quantized,
    quantize_tokens,
    quantize_weight,
)
from rlcore.protocols import Engine
from rlcore.records import Request, Sample, Sampling
from rlcore.rollout.child import ChildEngine
from rlcore.rollout.torch_engine.engine import TorchEngine
from rlcore.sync.pack import load_weights, pack
from tests import kit
from tests.contracts.engine_contract import CONFIG, HF, load_oracle, requests, run, weights

WEIGHT_ONLY = [name for name, form in FORMATS.items() if form and not form.activations]
OPTIONS = {"max_model_tokens": 64, "seed": 7, "device": "cpu"}
BUILD = "rlcore.rollout.torch_engine.engine:build"


def engine_with(state: dict[str, torch.Tensor], version: int = 0, **options) -> TorchEngine:
    engine = TorchEngine(HF, **OPTIONS | options)
    load_weights(engine, state.items(), version)
    return engine


def quantized(state: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """What a model with these weights in that format computes with."""
    form = format_of(name)
    return {n: quantize_weight(t, form) if is_quantized(n) else t for n, t in state.items()}


def same_samples(ours: dict[str, Sample], theirs: dict[str, Sample]) -> bool:
    """The same tokens and the same bits of the log-probs."""
    assert ours.keys() == theirs.keys()
    pairs = [(ours[i], theirs[i]) for i in ours]
    return all(
        a.tokens.tobytes() == b.tokens.tobytes() and a.logps.tobytes() == b.logps.tobytes()
        for a, b in pairs
    )


# ---- the grids


@pytest.mark.parametrize(
    ("name", "weight", "want"),
    [
        # scales 1 and 0.5: halves go to even, 127 steps on each side
        ("int8", [[127, 2.5, -3.6], [-63.5, 0.74, 0.2]], [[127, 2, -4], [-63.5, 0.5, 0]]),
        # one scale of 1: the second row has fewer steps
        ("int8_tensor", [[127, 2.5, -3.6], [-63.5, 0.74, 0.2]], [[127, 2, -4], [-64, 1, 0]]),
        # scales 1 and 0.5, 7 steps
        ("int4", [[7, 2.6, -0.4], [-3.5, 1.3, 0.8]], [[7, 3, 0], [-3.5, 1.5, 1]]),
        # scales 1 and 2, 3 steps
        ("int3", [[-3, 1.4, 0.6], [6, -2.9, 3.1]], [[-3, 1, 1], [6, -2, 4]]),
        # scales 1 and 2 of 0, .5, 1, 1.5, 2, 3, 4, 6
        ("fp4", [[6, 2.4, -0.3], [-12, 5.2, 11]], [[6, 2, -0.5], [-12, 6, 12]]),
        # scales 1 and 2 of 0, 1, 2, 4: the half goes to 0
        ("fp3", [[4, 1.4, -2.9], [8, 6.3, -1]], [[4, 1, -2], [8, 8, 0]]),
        # scale 1: steps of 2 from 16 to 32, of 2^-9 at zero; scale 1/2: steps of 1/4 from 2 to 4
        ("fp8", [[448, 17.5, -0.0011], [224, 2.3, -3.9]], [[448, 18, -1 / 512], [224, 2.25, -4]]),
    ],
)
def test_a_format_rounds_two_channels_of_three_weights_as_by_hand(name, weight, want):
    found = quantize_weight(torch.tensor(weight, dtype=torch.float64), FORMATS[name])
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-12)


def test_fp8_is_the_e4m3_of_torch():
    x = torch.randn(2, 64, 512, generator=torch.Generator().manual_seed(0))
    x = x[0].mul(3).exp() * x[1].sign()
    scale = x.abs().amax(-1, keepdim=True) / 448
    want = (x / scale).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(quantize_weight(x, FORMATS["fp8"]), want)
    assert (want.abs() < 2**-6 * scale).double().mean() > 0.1  # below the normal numbers


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_a_channel_of_zeros_stays_one_and_the_largest_weight_stays_what_it_was(name):
    weight = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
    weight[2] = 0
    found = quantize_weight(weight, FORMATS[name])
    assert not found[2].any() and found.isfinite().all()
    torch.testing.assert_close(found.abs().max(), weight.abs().max())
    assert found.unique().numel() < weight.unique().numel()
    assert quantize_weight(weight.bfloat16(), FORMATS[name]).dtype == torch.bfloat16


def test_a_tokens_activations_are_rounded_without_regard_to_its_batch():
    form = FORMATS["int8_w8a8"]
    x = torch.tensor([[127, 2.5, -3.6], [-63.5, 0.74, 0.2]])
    assert quantize_tokens(x, form).tolist() == [[127, 2, -4], [-63.5, 0.5, 0]]
    assert quantize_tokens(x[1:], form).tolist() == [[-63.5, 0.5, 0]]


@pytest.mark.parametrize("make", [lambda: format_of("int7"), lambda: engine_with({}, quantize="8")])
def test_an_unknown_format_is_refused_with_those_that_there_are(make):
    with pytest.raises(ValueError, match=r"^--rollout.quantize \S+: unknown; .* none, int8, .*fp4"):
        make()


# ---- the model that samples


@pytest.mark.parametrize("arch", list(kit.ARCHS))
def test_projections_are_quantised_and_nothing_else_is(arch):
    hf = HFConfig.from_dict(kit.tiny_config(arch))
    state = weights(hf, 0)
    model = CausalLM(
        hf, dtype=torch.float32, device=torch.device("cpu"), max_tokens=8, quantize="int4"
    )
    model.allocate()
    for name, tensor in state.items():
        model.load(name, tensor)
    kept = "embed_tokens.weight", "lm_head.weight", "mlp.gate.weight"
    for name, shape in expected(hf).items():
        assert is_quantized(name) == (len(shape) == 2 and not name.endswith(kept)), name
    for name, tensor in state.items():
        view = model.views[name]
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            view = view[0]
        view = view.reshape(tensor.shape)
        if is_quantized(name):
            assert torch.equal(view, quantize_weight(tensor, FORMATS["int4"])), name
            assert all(row.unique().numel() <= 15 for row in view), name
        else:
            assert torch.equal(view, tensor), name


def transformers_logps(model: nn.Module, sample: Sample) -> torch.Tensor:
    """Log-probs of a sample by one forward over all of it."""
    ids = torch.from_numpy(np.concatenate((sample.prompt, sample.tokens))).long()
    with torch.no_grad():
        logits = model(ids[None]).logits[0, len(sample.prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[len(sample.prompt) :, None])[:, 0]


def oracle_with(state: dict[str, torch.Tensor]) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    rest = {k: v for k, v in CONFIG.items() if k != "model_type"}
    config = AutoConfig.for_model(CONFIG["model_type"], **rest)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    load_oracle(model, state)
    return model


@pytest.mark.parametrize("name", WEIGHT_ONLY)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_log_probs_are_those_of_the_model_with_the_rounded_weights(name, dtype):
    state = weights(HF, 0)
    got = run(engine_with(state, quantize=name, dtype=dtype), requests(6, group=2))
    model, full = oracle_with(quantized(state, name)), oracle_with(state)
    worst = away = 0.0
    for sample in got.values():
        logps = torch.from_numpy(sample.logps)
        worst = max(worst, float((logps - transformers_logps(model, sample)).abs().max()))
        away = max(away, float((logps - transformers_logps(full, sample)).abs().max()))
    assert worst <= 1e-5
    assert away > 1e-3  # the unquantised model is another one


def test_with_quantised_activations_log_probs_are_those_of_rounded_inputs_and_weights():
    """The oracle rounds the input of every projection by a hook. It computes norms in float32, so
    an input on the edge between two steps may go the other way there: a few tokens differ."""
    name, state = "int8_w8a8", weights(HF, 0)
    form = format_of(name)
    got = run(engine_with(state, quantize=name, dtype="float64"), requests(6, group=2))
    model = oracle_with(quantized(state, name))
    weight_only = torch.cat([transformers_logps(model, s) for s in got.values()])
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and path != "lm_head":
            module.register_forward_pre_hook(lambda _, x: (quantize_tokens(x[0], form),))
    want = torch.cat([transformers_logps(model, s) for s in got.values()])
    found = torch.from_numpy(np.concatenate([s.logps for s in got.values()]))
    assert len(found) > 150
    assert ((found - want).abs() <= 1e-5).double().mean() > 0.9
    assert (found - want).abs().max() < 0.05
    assert ((found - weight_only).abs() <= 1e-5).double().mean() < 0.05


def test_without_a_format_no_bit_changes():
    state = weights(HF, 0)
    plain = run(engine_with(state), requests(8))
    assert same_samples(
        run(engine_with(state, quantize="none", fp32_head=False), requests(8)), plain
    )
    assert same_samples(run(engine_with(state, fp32_head=True), requests(8)), plain)  # is float32
    assert not same_samples(run(engine_with(state, quantize="int8"), requests(8)), plain)


def test_a_quantised_engine_is_an_engine_with_the_rounded_weights_bit_for_bit():
    state = weights(HF, 0)
    for name in WEIGHT_ONLY:
        ours = run(engine_with(state, quantize=name), requests(4))
        assert same_samples(ours, run(engine_with(quantized(state, name)), requests(4))), name


# ---- pushes


def views(engine: TorchEngine) -> dict[str, torch.Tensor]:
    return {name: view.clone() for name, view in engine._model.views.items()}


def push_half(engine: Engine, state: dict[str, torch.Tensor], version: int) -> None:
    """A push that stops in the middle."""
    engine.begin_load(version)
    buckets = list(pack(state.items(), 4096))
    for bucket, buffer in buckets[: len(buckets) // 2]:
        engine.load_bucket(bucket, [buffer])


def test_a_push_replaces_the_one_before_and_is_rounded_from_what_came():
    """The second weights lie near the first: not replaced, or moved from the rounded ones, they
    would be others."""
    first = weights(HF, 0)
    second = {n: t * (1.03 if is_quantized(n) else 1.0) + 0.01 for n, t in first.items()}
    fresh = {k: views(engine_with(s, quantize="int4")) for k, s in enumerate((first, second))}
    engine = engine_with(first, quantize="int4")
    load_weights(engine, second.items(), 1)
    kit.assert_bitwise(views(engine), fresh[1])
    assert {int(v) for s in run(engine, requests(3, tag="v")).values() for v in s.versions} == {1}
    push_half(engine, first, 2)
    load_weights(engine, second.items(), 3)
    kit.assert_bitwise(views(engine), fresh[1])
    load_weights(engine, first.items(), 4)
    kit.assert_bitwise(views(engine), fresh[0])


def test_what_was_pushed_is_not_changed_by_the_rounding():
    state = weights(HF, 0)
    kept = {name: tensor.clone() for name, tensor in state.items()}
    engine = TorchEngine(HF, **OPTIONS, quantize="int4")
    for name, tensor in state.items():
        engine._model.load(name, tensor)
    kit.assert_bitwise(state, kept)


def test_a_woken_engine_is_quantised_again():
    state = weights(HF, 0)
    engine = engine_with(state, quantize="int8")
    before = run(engine, requests(4))
    engine.sleep(("weights", "kv_cache"))
    engine.wake(("weights", "kv_cache"))
    load_weights(engine, state.items(), 1)
    assert same_samples(run(engine, requests(4)), before)


def test_a_child_quantises_after_a_restart_too_and_refuses_an_unknown_format():
    state = weights(HF, 0)
    want = run(engine_with(state, quantize="int8_w8a8"), requests(4))
    with pytest.raises(Exception, match=r"--rollout.quantize int7: unknown; give one of none,"):
        ChildEngine(BUILD, {"config": CONFIG, "quantize": "int7"} | OPTIONS).submit(requests(1))
    engine = ChildEngine(BUILD, {"config": CONFIG, "quantize": "int8_w8a8"} | OPTIONS)
    try:
        load_weights(engine, state.items(), 0)
        assert same_samples(run(engine, requests(4)), want)
        engine.restart()
        load_weights(engine, state.items(), 0)
        assert same_samples(run(engine, requests(4)), want)
    finally:
        engine.close()


# ---- the head in float32


UNTIED = CONFIG | {"tie_word_embeddings": False}


def model_with(config: dict, state: dict[str, torch.Tensor], **options) -> tuple[CausalLM, Cache]:
    hf, cpu = HFConfig.from_dict(config), torch.device("cpu")
    model = CausalLM(hf, dtype=torch.bfloat16, device=cpu, max_tokens=32, **options)
    model.allocate()
    for name, tensor in state.items():
        model.load(name, tensor)
    cache = Cache(
        hf.num_layers,
        hf.cache_shape,
        dtype=torch.bfloat16,
        device=cpu,
        max_slots=4,
        max_columns=32,
        budget=128,
    )
    cache.reserve(4, 20, 0)
    return model, cache


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
@torch.inference_mode()
def test_a_float32_head_computes_norm_and_logits_from_unrounded_weights(config):
    """The layers below it keep their bits: both models see the same last hidden states."""
    hf = HFConfig.from_dict(config)
    state = weights(hf, 0)
    tokens = torch.randint(29, (4, 20), generator=torch.Generator().manual_seed(0))

    def step() -> ForwardInputs:
        return ForwardInputs(tokens, torch.arange(20).expand(4, -1), 0, [(0, 4, 20)], True)

    wide, cache = model_with(config, state, fp32_head=True)
    plain, plain_cache = model_with(config, state)
    last = wide._run(step(), cache, fill=False)
    assert last.dtype == torch.bfloat16
    assert torch.equal(last, plain._run(step(), plain_cache, fill=False))

    hidden = wide.forward(step(), cache)
    logits = wide.logits(hidden)
    assert hidden.dtype == logits.dtype == torch.float32
    assert plain.forward(step(), plain_cache).dtype == torch.bfloat16
    head = state.get(HEAD, state["model.embed_tokens.weight"]).double()
    want = rms_norm(last.double(), state["model.norm.weight"].double(), hf.rms_norm_eps) @ head.T
    error = (logits - want).abs().max()
    rough = (plain.logits(plain.forward(step(), plain_cache)) - want).abs().max()
    assert error < 1e-5 and rough > 1e-2
    assert (logits.double().log_softmax(-1).exp().sum(-1) - 1).abs().max() < 1e-9


@pytest.mark.parametrize("fp32_head", [False, True])
def test_log_probs_of_a_bfloat16_engine_are_normalised(fp32_head):
    """Every token of the vocabulary is sampled after one prompt: their probabilities make one."""
    engine = engine_with(weights(HF, 0, std=0.05), dtype="bfloat16", fp32_head=fp32_head)
    prompt, sampling = np.array([5, 3], np.int32), Sampling(max_tokens=1)
    todo = [Request(id=f"n{k}.0", prompt=prompt, sampling=sampling) for k in range(600)]
    logp = {int(s.tokens[0]): float(s.logps[0]) for s in run(engine, todo).values()}
    assert len(logp) == HF.vocab_size
    assert abs(sum(np.exp(v) for v in logp.values()) - 1) < 1e-6

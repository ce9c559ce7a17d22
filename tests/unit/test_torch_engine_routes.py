"""Routes that the torch engine records, against transformers' routers on the whole sequence."""

import numpy as np
import torch
from msgspec import structs

from rlcore.config.schema import TrainConfig
from rlcore.data.packing import pack_samples
from rlcore.hf.config import HFConfig
from rlcore.mcore.layout import layout_of
from rlcore.mcore.microbatch import Cutter
from rlcore.records import Aborted, Partial, Preempted, Request, Sample, Sampling
from rlcore.rollout.torch_engine.engine import TorchEngine
from rlcore.sync.pack import load_weights
from tests import kit
from tests.contracts.engine_contract import (
    CONFIG,
    STOP,
    VOCAB,
    collect,
    ended,
    oracle,
    run,
    samples,
    weights,
)

MOE = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
HF = HFConfig.from_dict(MOE)
K = HF.experts_per_token


def make(seed: int = 0, **options):
    usual = {"max_model_tokens": 96, "dtype": "float64", "seed": 7, "device": "cpu"}
    engine = TorchEngine(HF, records_routes=True, **(usual | options))
    load_weights(engine, weights(HF, seed).items(), seed)
    return engine


def test_the_learner_knows_the_routes_of_a_model_whose_first_layer_is_dense() -> None:
    hf = HFConfig.from_dict(kit.tiny_config("glm4_moe"))
    assert hf.moe_layers[0] == 1
    engine = TorchEngine(hf, records_routes=True, max_model_tokens=96, device="cpu")
    load_weights(engine, weights(hf, 0).items(), 0)
    prompt = np.arange(2, 9, dtype=np.int32)
    asks = [Request(id="t0.0", prompt=prompt, sampling=Sampling(max_tokens=5))]
    (sample,) = run(engine, asks).values()
    batch = pack_samples([sample])
    cutter = Cutter(
        layout_of(TrainConfig(), 1, 0),
        sequence_parallel=False,
        head_dim=hf.rope_dim,
        rope=hf.rope,
        dtype=torch.float32,
        device=torch.device("cpu"),
        budget=100,
    )
    (micro,) = cutter.cut(batch, cutter.groups(batch), 1).micro_batches
    k = hf.experts_per_token
    known = (micro.routes[:, k : 2 * k] >= 0).all(1)  # prompts may lack the last layer
    assert known.sum() == len(prompt) + 5 - 1  # all but the last token
    assert batch.routes is not None and batch.routes.dtype == torch.int8
    engine.close()


def asked(count: int, limit: int = 30, *, stops: bool = True) -> list[Request]:
    """Groups of two requests with prompts of different lengths; the second request is shorter. With
    `stops`, every second group may end early."""
    gen = np.random.default_rng(5)
    out = []
    for number in range(count):
        prompt = gen.integers(2, VOCAB, int(gen.choice([1, 4, 12, 30]))).astype(np.int32)
        for k in (0, 1):
            stop = (STOP,) if stops and number % 2 else ()
            sampling = Sampling(max_tokens=limit - 9 * k, stop_ids=stop)
            out.append(Request(id=f"m{limit}-{number}.{k}", prompt=prompt, sampling=sampling))
    return out


def routers(tokens: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return the experts that transformers chooses for all tokens, sorted by id: [n, layers, K]."""
    model = oracle(MOE, seed)
    model.set_experts_implementation("eager")  # the others lack float64
    given = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.no_grad():
        logits = model(given, output_router_logits=True).router_logits
    return torch.stack([x.topk(K).indices.sort(-1).values for x in logits], 1).numpy()


def sets(routes: np.ndarray) -> np.ndarray:
    return np.sort(routes.reshape(len(routes), -1, K), -1)


def check(sample: Sample, begin: int = 0, seed: int = 0) -> None:
    """Compare the routes of the tokens from `begin` on with transformers'. The last token has no
    route; prompt tokens may lack one in the last layer."""
    whole = np.concatenate([sample.prompt, sample.tokens])
    routes, count = sample.routes, len(sample.prompt) - 1
    assert routes is not None and routes.dtype == np.int8 and len(routes) == len(whole)
    assert (routes[-1] == -1).all()
    found, want = sets(routes)[begin:-1], routers(whole, seed)[begin:-1]
    assert (found[:, :-1] == want[:, :-1]).all()
    assert (found[:, -1][count - begin :] == want[:, -1][count - begin :]).all()
    unknown = found[: max(count - begin, 0), -1]
    assert ((unknown == -1) | (unknown == want[: len(unknown), -1])).all()


def test_every_token_has_the_experts_of_a_forward_over_all() -> None:
    for sample in run(make(max_running=8), asked(12)).values():
        check(sample)


def test_preempted_requests_keep_their_routes() -> None:
    engine, todo = make(max_running=8, cache_tokens=130), asked(8)
    engine.submit(todo)
    events = collect(engine, ended(len(todo)))
    assert any(isinstance(e, Preempted) for e in events)
    for sample in samples(events).values():
        check(sample)


def test_accepted_drafts_have_routes_and_rejected_ones_none() -> None:
    todo = asked(6, limit=60)
    engine = make(max_running=8, draft="ngram", draft_settings={"adaptive": False})
    found = run(engine, todo)
    assert sum(sample.drafted.sum() for sample in found.values()) > 10
    for sample in found.values():
        check(sample)


def test_a_resumed_request_keeps_the_routes_of_the_version_that_sampled_its_tokens() -> None:
    first, todo = make(), asked(3)
    first.submit(todo)
    for _ in range(12):
        first.poll(0.0)
    first.abort([request.id for request in todo])
    parts = {e.id: e.sample for e in first.poll(0.0) if isinstance(e, Aborted)}
    later = []
    for request in todo:
        if (s := parts.get(request.id)) is not None:
            check(s)
            part = Partial(tokens=s.tokens, logps=s.logps, versions=s.versions, routes=s.routes)
            later.append(structs.replace(request, resume=part))
    assert len(later) > 3
    for name, sample in run(make(seed=1), later).items():
        old = parts[name].routes
        assert old is not None and sample.routes is not None
        assert (sample.routes[: len(old) - 1, :-K] == old[:-1, :-K]).all()
        known = old[:-1, -K:] >= 0
        assert (sample.routes[: len(old) - 1, -K:] == old[:-1, -K:])[known].all()
        check(sample, begin=len(old), seed=1)


def test_without_the_switch_samples_have_no_routes() -> None:
    engine = TorchEngine(HF, max_model_tokens=96, dtype="float64", seed=7, device="cpu")
    load_weights(engine, weights(HF, 0).items(), 0)
    assert all(sample.routes is None for sample in run(engine, asked(2)).values())


def test_a_model_of_one_layer_knows_the_routes_of_decoded_tokens() -> None:
    """Prefill computes no experts in the last layer."""
    hf = HFConfig.from_dict(MOE | {"num_hidden_layers": 1})
    engine = TorchEngine(
        hf, records_routes=True, max_model_tokens=96, dtype="float64", seed=7, device="cpu"
    )
    load_weights(engine, weights(hf, 0).items(), 0)
    for sample in run(engine, asked(3)).values():
        assert sample.routes is not None
        known = (sample.routes >= 0).all(1)
        assert (
            known[len(sample.prompt) - 1 : -1].all() and not known[: len(sample.prompt) - 1].any()
        )


def test_a_layer_without_experts_has_no_routes() -> None:
    hf = HFConfig.from_dict(MOE | {"mlp_only_layers": [0]})
    engine = TorchEngine(
        hf, records_routes=True, max_model_tokens=96, dtype="float64", seed=7, device="cpu"
    )
    load_weights(engine, weights(hf, 0).items(), 0)
    for sample in run(engine, asked(3)).values():
        assert sample.routes is not None
        routes = sample.routes[len(sample.prompt) : -1].reshape(-1, 3, K)
        assert (routes[:, 0] == -1).all() and (routes[:, 1:] >= 0).all()

"""Routes that SGLang's engine returns, against transformers' routers on the whole sequence."""

import importlib.util

import numpy as np
import pytest
import torch
from msgspec import structs

from rlcore.hf.config import HFConfig
from rlcore.hf.model import CausalLM
from rlcore.records import Aborted, Finished, Partial, Sample
from rlcore.rollout.child import ChildEngine
from rlcore.sync.pack import load_weights, pack
from rlcore.utils.listen import open_store
from tests.contracts import engine_contract
from tests.contracts.engine_contract import collect, full_logits, oracle, run, samples, weights
from tests.unit.test_torch_engine_routes import HF, MOE, K, asked, routers, sets

pytestmark = [
    pytest.mark.ranks(1),
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None,
        reason="needs SGLang: bash tools/setup.sh --sglang",
    ),
]
STD = 0.3  # of weights that no other test here has
FACTORY = "rlcore.rollout.sglang_engine.engine:build"
OPTIONS = {
    "config": MOE | {"decoder_sparse_step": 1},
    "max_model_tokens": 96,
    "dtype": "float32",
    "seed": 7,
    "progress_s": 0.001,
    "stream_interval": 4,
    "device": "cpu",
    "deadline_s": 110.0,
    "max_running": 6,
    "cache_tokens": 300,
    "records_routes": True,
}


@pytest.fixture(scope="module")
def engine():
    made = ChildEngine(FACTORY, OPTIONS, start_s=280.0)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(engine_contract, "DEADLINE_S", 240.0)


def apart(sample: Sample, begin: int = 0, seed: int = 0) -> float:
    """The share of layers of the tokens from `begin` on that have other experts; the last token has
    none. Float32 may break a tie in another way than float64."""
    whole = np.concatenate([sample.prompt, sample.tokens])
    assert sample.routes is not None and sample.routes.dtype == np.int8
    assert len(sample.routes) == len(whole) and (sample.routes[-1] == -1).all()
    differs = sets(sample.routes)[begin:-1] != routers(whole, seed)[begin:-1]
    return float(differs.any(-1).mean())


def test_every_token_has_the_experts_of_a_forward_over_all(engine) -> None:
    load_weights(engine, weights(HF, 0).items(), 0)
    found = run(engine, asked(8, 30, stops=False))
    assert max(apart(sample) for sample in found.values()) < 0.05
    assert sum(apart(sample) for sample in found.values()) / len(found) < 0.01


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("nodes", [1, 2])
def test_experts_divided_over_two_ranks_give_what_one_rank_does(nodes: int) -> None:
    config = MOE | {"tie_word_embeddings": False}  # SGLang samples tied mixtures wrongly
    store, model = open_store(), oracle(config, 0, STD)
    model.set_experts_implementation("eager")  # the others lack float64
    share = {"config": config, "tp": 2, "ep": 2, "shares": 2, "nodes": nodes}
    share |= {"dist_init_addr": f"127.0.0.1:{store.port}"}
    ranks = [
        ChildEngine(FACTORY, OPTIONS | share | {"share": rank, "rank": rank}, start_s=280.0)
        for rank in (0, 1)
    ]
    leader = ranks[0]
    try:
        leader.begin_load(0)
        state = weights(HFConfig.from_dict(config), 0, STD)
        for bucket, buffer in pack(state.items(), 2**20):
            leader.load_bucket(bucket, [bytes(buffer)] * 2)
        leader.end_load()
        found = run(leader, asked(8, 30, stops=False))
    finally:
        for rank in ranks:
            rank.close()
    for sample in found.values():
        logits = full_logits(sample.prompt, sample.tokens, model=model)
        tokens = torch.from_numpy(sample.tokens).long()[:, None]
        logps = logits.log_softmax(-1).gather(-1, tokens)[:, 0].float().numpy()
        np.testing.assert_allclose(sample.logps, logps, atol=1e-4)


def test_a_resumed_request_keeps_the_routes_of_the_version_that_sampled_its_tokens(engine) -> None:
    load_weights(engine, weights(HF, 0).items(), 0)
    todo = asked(3, 60, stops=False)
    engine.submit(todo)
    begun = engine_contract.some_tokens(engine, {r.id for r in todo}, 5)
    engine.abort([request.id for request in todo])
    events = begun + collect(engine, lambda es: len(samples([*begun, *es])) == len(todo))
    assert not any(isinstance(e, Finished) for e in events)
    parts = {e.id: e.sample for e in events if isinstance(e, Aborted)}
    load_weights(engine, weights(HF, 1).items(), 1)
    later = []
    for request in todo:
        s = parts[request.id]
        assert apart(s) < 0.05
        part = Partial(tokens=s.tokens, logps=s.logps, versions=s.versions, routes=s.routes)
        later.append(structs.replace(request, resume=part))
    for name, sample in run(engine, later).items():
        old = parts[name].routes
        assert old is not None and sample.routes is not None and K == 2
        assert (sample.routes[: len(old) - 1] == old[:-1]).all()
        assert apart(sample, begin=len(old), seed=1) < 0.05


def test_routes_of_sigmoid_routers_after_a_dense_layer_are_those_of_the_torch_model() -> None:
    raw = MOE | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "tie_word_embeddings": False,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
    }
    hf = HFConfig.from_dict({k: v for k, v in raw.items() if k != "num_experts"})
    state = weights(hf, 0)
    model = CausalLM(
        hf, dtype=torch.float32, device=torch.device("cpu"), max_tokens=96, records_routes=True
    )
    model.allocate()
    for name, tensor in state.items():
        model.load(name, tensor)
    options = OPTIONS | {"config": hf.to_dict()}
    engine = ChildEngine(FACTORY, options, start_s=280.0)
    try:
        load_weights(engine, state.items(), 0)
        found = run(engine, asked(4, 20, stops=False))
    finally:
        engine.close()
    for sample in found.values():
        whole = torch.from_numpy(np.concatenate([sample.prompt, sample.tokens]).astype(np.int64))
        model.prefill(whole[None], model.batch_cache(1, len(whole), shared=False))
        theirs = sets(model.take_routes().numpy())[:-1, 1:]
        assert sample.routes is not None
        differs = sets(sample.routes)[:-1, 1:] != theirs
        assert differs.any(-1).mean() < 0.05

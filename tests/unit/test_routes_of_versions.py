"""Whatever happens to a request, each of its tokens keeps the experts that computed it first."""

from itertools import islice

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from rlcore.hf.config import HFConfig
from rlcore.protocols import PauseMode
from rlcore.records import Aborted, Finished, Partial, Request, Sample, Sampling
from rlcore.rollout.torch_engine.engine import TorchEngine
from rlcore.sync.pack import load_weights
from tests.contracts.engine_contract import VOCAB, weights
from tests.unit.test_torch_engine_routes import MOE, K

HF = HFConfig.from_dict(MOE | {"tie_word_embeddings": False})
VERSIONS = 3
REQUESTS = 6


def state(version: int) -> dict[str, torch.Tensor]:
    """Weights whose routers choose the experts 2v and 2v + 1 (modulo 6) for every token in version
    v: an entry of the residual stream is large in all tokens, and only it moves the routers."""
    made = {name: tensor.clone() for name, tensor in weights(HF, version % VERSIONS).items()}
    made["model.embed_tokens.weight"][:, 0] = 40.0
    for name, tensor in made.items():
        if name.endswith("mlp.gate.weight"):
            tensor.zero_()
            tensor[[K * (version % VERSIONS) + k for k in range(K)], 0] = 5.0
        elif name.endswith("post_attention_layernorm.weight"):
            tensor.fill_(1.0)
    return made


STATES = [state(version) for version in range(VERSIONS)]


def asked() -> list[Request]:
    gen = np.random.default_rng(3)
    return [
        Request(
            id=f"r{i // 2}.{i % 2}",
            prompt=gen.integers(2, VOCAB, 3 + 4 * (i // 2)).astype(np.int32),
            sampling=Sampling(max_tokens=24 - 5 * (i % 2), stop_ids=()),
        )
        for i in range(REQUESTS)
    ]


def check(sample: Sample) -> None:
    """Every token has the experts of the version that sampled the token after it. Prefill computes
    no experts in the last layer, but for the last token."""
    prompt, routes = len(sample.prompt), sample.routes
    assert routes is not None and len(routes) == prompt + len(sample.tokens)
    assert (routes[-1] == -1).all()
    found = np.sort(routes[:-1].reshape(-1, HF.num_layers, K), -1)
    first = np.full(prompt - 1, sample.versions[0])
    of_token = np.concatenate([first, sample.versions])[: len(found)] % VERSIONS
    want = (K * of_token[:, None] + np.arange(K))[:, None]
    assert (found[:, :-1] == want).all()
    last = found[:, -1:]
    assert (last[prompt - 1 :] == want[prompt - 1 :]).all()
    assert ((last == want) | (last == -1)).all()


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("decode"), st.integers(1, 6)),
        st.tuples(st.sampled_from(("in_place", "recompute", "abort")), st.just(0)),
        st.tuples(st.just("resume later"), st.integers(0, REQUESTS - 1)),
    ),
    max_size=12,
)


@settings(max_examples=25, deadline=None)
@given(events=EVENTS, cache=st.sampled_from((90, 400)), draft=st.sampled_from(("none", "ngram")))
def test_no_token_has_experts_of_another_version(
    events: list[tuple[PauseMode, int]], cache: int, draft: str
) -> None:
    engine = TorchEngine(
        HF,
        records_routes=True,
        max_model_tokens=48,
        dtype="float32",
        seed=7,
        device="cpu",
        max_running=4,
        cache_tokens=cache,
        draft=draft,  # type: ignore[arg-type]
        draft_settings={"adaptive": False},
    )
    load_weights(engine, STATES[0].items(), 0)
    todo = {request.id: request for request in asked()}
    found: dict[str, Sample] = {}
    version = 0

    def take(polls: int) -> None:
        """Let the engine work, and submit again what was aborted, from where it was."""
        for _ in range(polls):
            for event in engine.poll(0.0):
                if isinstance(event, Finished):
                    found[event.id] = event.sample
                elif isinstance(event, Aborted):
                    s = event.sample
                    part = Partial(
                        tokens=s.tokens, logps=s.logps, versions=s.versions, routes=s.routes
                    )
                    resume = part if len(s.tokens) else None
                    engine.submit([structs.replace(todo[event.id], resume=resume)])

    engine.submit(list(todo.values()))
    for kind, number in events:
        if kind == "decode":
            take(number)
        elif kind == "resume later":
            engine.abort(list(islice(todo, number, number + 2)))
        else:
            version += 1
            engine.pause(kind)
            load_weights(engine, STATES[version % VERSIONS].items(), version)
            engine.resume()
    while len(found) < len(todo):
        take(1)
    engine.close()
    for sample in found.values():
        check(sample)


def test_tokens_whose_routes_are_lost_get_none_of_another_version() -> None:
    """As after a failed engine, whose tokens are known and whose routes are not."""
    engine = TorchEngine(
        HF, records_routes=True, max_model_tokens=48, dtype="float32", seed=7, device="cpu"
    )
    load_weights(engine, STATES[1].items(), 1)
    (request, *_) = asked()
    prompt = len(request.prompt)
    part = Partial(
        tokens=np.array([3, 4, 5], np.int32),
        logps=np.full(3, -1.0, np.float32),
        versions=np.array([0, 0, 1], np.int32),
    )
    engine.submit([structs.replace(request, resume=part)])
    found: list[Sample] = []
    while not found:
        found += [event.sample for event in engine.poll(0.0) if isinstance(event, Finished)]
    engine.close()
    routes = found[0].routes
    assert routes is not None
    known = routes[:, 0] >= 0
    assert not known[: prompt + 1].any() and known[prompt + 1 : -1].all()

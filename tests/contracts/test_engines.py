"""The contract of `engine_contract.py`, for the torch engine inline and in a child process."""

import msgspec
import numpy as np
import pytest
import torch

from rlcore.protocols import Engine
from rlcore.records import Request, Sampling
from rlcore.rollout.child import ChildEngine
from rlcore.rollout.torch_engine.engine import TorchEngine
from rlcore.rollout.torch_engine.sampler import GOLDEN, uniform
from rlcore.sync.pack import load_weights
from rlcore.utils.seed import derive
from tests.contracts.engine_contract import *  # noqa: F403
from tests.contracts.engine_contract import (
    CONFIG,
    HF,
    MAX_MODEL_TOKENS,
    SEED,
    Lab,
    assert_same,
    assert_tie,
    full_logits,
    prompts,
    run,
    weights,
)

OPTIONS = {
    "max_model_tokens": MAX_MODEL_TOKENS,
    "dtype": "float64",
    "seed": SEED,
    "progress_s": 0.001,
    "device": "cpu",
}


def _load(engine: Engine) -> Engine:
    load_weights(engine, weights(HF, 0).items(), 0)
    return engine


def _inline(**options) -> Engine:
    return _load(TorchEngine(HF, **(OPTIONS | options)))


@pytest.fixture(scope="module")
def children():
    """One child per set of options, used by all tests: starting one takes seconds."""
    made: dict[tuple, ChildEngine] = {}
    yield made
    for engine in made.values():
        engine.close()


@pytest.fixture(params=["inline", "child"])
def lab(request, children):
    if request.param == "inline":
        return Lab(make=_inline)

    def child(**options) -> Engine:
        key = tuple(sorted(options.items()))
        if key not in children:
            settings = {"config": CONFIG} | OPTIONS | options
            factory = "rlcore.rollout.torch_engine.engine:build"
            children[key] = ChildEngine(factory, settings)
        engine = children[key]
        engine.pause("abort")
        engine.sleep(("weights", "kv_cache"))
        engine.wake(("weights", "kv_cache"))
        engine.resume()
        engine.poll(0.0)
        return _load(engine)

    return Lab(make=child)


def test_samples_of_an_inexact_engine_may_part_at_a_tie_and_nowhere_else():
    request = Request(id="tie.0", prompt=prompts(1)[0], sampling=Sampling(max_tokens=9))
    want = run(_inline(), [request])
    (sample,) = want.values()
    ids = sample.tokens.tolist()
    at = next(k for k, token in enumerate(ids) if 0 < token < HF.vocab_size - 1)
    other = np.array([*ids[:at], ids[at] + 1, *ids[at + 1 :]], np.int32)
    got = {sample.id: msgspec.structs.replace(sample, tokens=other)}
    for exact in (True, False):
        lab = Lab(make=_inline, exact=exact)
        assert_same(lab, want, want, [request])
        with pytest.raises(AssertionError, match="tie.0"):
            assert_same(lab, got, want, [request])

    # With the boundary behind the drawn token moved to the random number, it is a tie.
    probs = full_logits(sample.prompt, ids)[at].softmax(-1)
    key = derive(SEED, "sample", request.id)
    drawn = uniform(torch.tensor((key + at * GOLDEN + 2**63) % 2**64 - 2**63))
    below = probs[: ids[at]].sum()
    assert below <= drawn < below + probs[ids[at]]  # as the sampler had it
    probs[ids[at]] = drawn - below
    probs[ids[at] + 1 :] *= (1 - drawn) / probs[ids[at] + 1 :].sum()
    assert_tie(request, at, ids[at], ids[at] + 1, probs.log())

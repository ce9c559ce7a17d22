"""The contract of `engine_contract.py` for SGLang in a child process on the CPU."""

import importlib.util

import pytest

from rlcore.protocols import Engine
from rlcore.rollout.child import ChildEngine
from rlcore.sync.pack import push
from tests.contracts.engine_contract import *  # noqa: F403
from tests.contracts.engine_contract import CONFIG, HF, MAX_MODEL_TOKENS, Lab, weights

pytestmark = [
    pytest.mark.ranks(1),
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None,
        reason="needs SGLang: bash tools/setup.sh --sglang",
    ),
]

FACTORY = "rlcore.rollout.sglang_engine.engine:build"
OPTIONS = {
    "config": CONFIG,
    "max_model_tokens": MAX_MODEL_TOKENS,
    "dtype": "float32",
    "seed": 7,
    "progress_s": 0.001,
    "stream_interval": 1,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def children():
    """One child per set of options, used by all tests: starting one takes many seconds."""
    made: dict[tuple, ChildEngine] = {}
    yield made
    for engine in made.values():
        engine.close()


@pytest.fixture
def lab(children):
    def child(**options) -> Engine:
        key = tuple(sorted(options.items()))
        if key not in children:
            children[key] = ChildEngine(FACTORY, OPTIONS | options, deadline_s=120.0, start_s=280.0)
        engine = children[key]
        engine.pause("abort")
        engine.sleep(("weights", "kv_cache"))
        engine.wake(("weights", "kv_cache"))
        engine.resume()
        engine.poll(0.0)
        push(engine, weights(HF, 0).items(), 0)
        return engine

    return Lab(make=child, exact=False, tolerance=1e-5)

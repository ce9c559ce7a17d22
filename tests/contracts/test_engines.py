"""The contract of `engine_contract.py`, for the torch engine inline and in a child process."""

import pytest

from rlcore.protocols import Engine
from rlcore.rollout.child import ChildEngine
from rlcore.rollout.torch_engine.engine import TorchEngine
from rlcore.sync.pack import push
from tests.contracts.engine_contract import *  # noqa: F403
from tests.contracts.engine_contract import CONFIG, HF, MAX_MODEL_TOKENS, Lab, weights

OPTIONS = {
    "max_model_tokens": MAX_MODEL_TOKENS,
    "dtype": "float64",
    "seed": 7,
    "progress_s": 0.001,
    "device": "cpu",
}


def _load(engine: Engine) -> Engine:
    push(engine, weights(HF, 0).items(), 0)
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

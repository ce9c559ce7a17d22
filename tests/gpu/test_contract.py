"""The contract of engines, for the torch engine on a GPU, inline and in a child process."""

import pytest

from rlcore.protocols import Engine
from rlcore.rollout.child import ChildEngine
from rlcore.rollout.torch_engine.engine import TorchEngine
from rlcore.sync.pack import load_weights
from tests.contracts.engine_contract import *  # noqa: F403
from tests.contracts.engine_contract import CONFIG, HF, MAX_MODEL_TOKENS, Lab, weights
from tests.gpu import side

pytestmark = pytest.mark.gpu

OPTIONS = {"max_model_tokens": MAX_MODEL_TOKENS, "dtype": "float64", "seed": 7, "progress_s": 1e-3}
FACTORY = "rlcore.rollout.torch_engine.engine:build"


@pytest.fixture(scope="module")
def children():
    """One child per set of options, used by all tests: starting one takes seconds."""
    made: dict[tuple, ChildEngine] = {}
    yield made
    for engine in made.values():
        engine.close()


@pytest.fixture(params=["inline", "child"])
def lab(request, children):
    device = str(side.DEVICE)

    def inline(**options) -> Engine:
        engine = TorchEngine(HF, device=device, **(OPTIONS | options))
        load_weights(engine, weights(HF, 0).items(), 0)
        return engine

    def child(**options) -> Engine:
        key = tuple(sorted(options.items()))
        if key not in children:
            settings = {"config": CONFIG, "device": device} | OPTIONS | options
            children[key] = ChildEngine(FACTORY, settings)
        engine = children[key]
        engine.pause("abort")
        engine.sleep(("weights", "kv_cache"))
        engine.wake(("weights", "kv_cache"))
        engine.resume()
        engine.poll(0.0)
        load_weights(engine, weights(HF, 0).items(), 0)
        return engine

    return Lab(make=inline if request.param == "inline" else child)

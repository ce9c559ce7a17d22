"""SGLang itself on the pretend device, with attention in plain torch, without CUDA graphs, memory
saver and overlapped scheduler. Weights arrive as handles of device memory. test_sglang.py runs it.
"""

import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from rlcore.config.schema import ModelConfig, TrainConfig
from rlcore.mcore.learner import MegatronLearner
from rlcore.protocols import Engine
from rlcore.rollout.child import ChildEngine
from rlcore.rollout.histospec import history_of
from rlcore.rollout.sglang_engine import engine as sglang_engine
from rlcore.rollout.torch_engine.engine import TorchEngine
from rlcore.sync.channel import make_channel
from rlcore.sync.pack import load_weights
from rlcore.sync.peers import Peers
from tests.contracts.engine_contract import (
    CONFIG,
    HF,
    Lab,
    assert_same,
    requests,
    run,
    weights,
)
from tests.contracts.test_sglang_drafts import finish
from tests.gpu.test_push import distance

DEVICE = torch.device("cuda", 0)
OPTIONS = {"max_model_tokens": 96, "dtype": "float32", "seed": 7, "device": str(DEVICE)}
WITHOUT = {
    "enable_memory_saver": False,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "attention_backend": "torch_native",
}


def build(config: dict[str, Any], *, overlap: bool = False, **options: Any) -> Engine:
    """Build the engine with SGLang's stand-ins for a CPU, but on the pretend device."""
    os.environ["SGLANG_FORCE_FUSED_OP_BACKEND"] = "torch"
    os.environ["RLCORE_PRETEND_NATIVE"] = "1"
    os.environ["SGLANG_ENABLE_WAR_BARRIER"] = "1"  # as on a GPU
    prepare = sglang_engine.set_environment
    sglang_engine.set_environment = lambda _, *args: prepare("cpu", *args)
    more = WITHOUT | {"disable_overlap_schedule": not overlap}
    return sglang_engine.build(config, **options, sglang=more, max_running=4, cache_tokens=384)


DRAFTS: dict[str, Any] = {"draft": "ngram", "draft_width": 4}
STEADY = {"adaptive": False, "wait": True}
DEVICE_DRAFTS = DRAFTS | {
    "draft": "history",
    "draft_matcher": "device",
    "draft_settings": STEADY,
}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafts": DRAFTS,
    "matched": DEVICE_DRAFTS,
    "overlapped": DEVICE_DRAFTS | {"overlap": True},
}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    options = {"config": CONFIG} | OPTIONS | ENGINES[request.param]
    with closing(ChildEngine("tests.pretend.sglang_checks:build", options, start_s=200.0)) as made:
        yield made


@pytest.fixture(scope="module")
def learner() -> Iterator[MegatronLearner]:
    model = ModelConfig(dtype="float32", random_init=True)
    with closing(MegatronLearner(HF, model, TrainConfig(), device=DEVICE, seed=3)) as made:
        yield made


@pytest.fixture
def channel() -> Any:
    return make_channel(
        "gather", transport="cuda_ipc", max_bytes=8192, device=DEVICE, peers=Peers(name="gather")
    )


class Fixed:
    """A learner with the weights of the contract, on the device."""

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights(HF, 0).items():
            yield name, tensor.to(DEVICE)


def test_it_samples_what_the_torch_engine_does_on_a_cpu(engine: Engine, channel: Any) -> None:
    assert channel.update_weights(Fixed(), engine, 0)["bytes"] > 3 * 8192
    other = TorchEngine(HF, **(OPTIONS | {"device": "cpu"}))
    load_weights(other, weights(HF, 0).items(), 0)
    todo = requests(4, tag="warm") + requests(2, group=2, tag="greedy", temperature=0.0)
    todo += requests(2, tag="few", top_k=5) + requests(2, tag="most", top_p=0.8)
    lab = Lab(make=TorchEngine, exact=False, tolerance=1e-5)
    assert_same(lab, run(engine, todo), run(other, todo), todo)


def test_drafts_from_histories_are_accepted_and_change_no_sample(
    engine: Engine, channel: Any, request: pytest.FixtureRequest
) -> None:
    if "draft_matcher" not in ENGINES[request.node.callspec.params["engine"]]:
        pytest.skip("no matcher on the device")
    channel.update_weights(Fixed(), engine, 1)
    other = TorchEngine(HF, **(OPTIONS | {"device": "cpu"}))
    load_weights(other, weights(HF, 0).items(), 1)
    todo = requests(6, group=2, tag="drafted")
    want = run(other, todo)
    histories = [history_of(s.id, s.prompt, s.tokens, 1.0) for s in want.values()]
    got, sums = finish(engine, todo, histories)
    assert_same(Lab(make=TorchEngine, exact=False, tolerance=1e-5), got, want, todo)
    assert sums["accepted_tokens"] > 0.5 * sums["gained"]


def test_a_round_of_sleep_and_wake_brings_the_learners_weights(
    engine: Engine, learner: MegatronLearner, channel: Any
) -> None:
    engine.sleep(["weights", "kv_cache"])
    learner.offload(["optimizer", "gradients"])
    engine.wake(["weights"])
    channel.update_weights(learner, engine, 1)
    learner.offload(["weights"])
    engine.wake(["kv_cache"])
    assert not any(learner.resident_bytes().values())
    learner.onload()
    mean, most = distance(learner, engine, "new", 1)
    assert mean < 1e-5 and most < 1e-4

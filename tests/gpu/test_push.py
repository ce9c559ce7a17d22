"""Weights from the learner to the engine, both on the GPU: what the engine samples has the
log-probs that the learner computes."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from rlcore.config.schema import ModelConfig, TrainConfig
from rlcore.data.packing import pack_samples
from rlcore.hf.config import HFConfig
from rlcore.mcore.learner import MegatronLearner
from rlcore.protocols import Engine
from rlcore.rollout.child import ChildEngine
from rlcore.rollout.torch_engine.engine import TorchEngine
from rlcore.sync.channel import make_channel
from rlcore.sync.colocated import IN_FLIGHT, ColocatedChannel
from rlcore.sync.peers import Peers
from rlcore.utils import buckets
from tests import kit
from tests.contracts.engine_contract import requests, run
from tests.gpu import side
from tests.ranks import learner_ranks as ranks

pytestmark = pytest.mark.gpu

FACTORY = "rlcore.rollout.torch_engine.engine:build"
LIMITS = {"float32": (1e-4, 1e-3), "bfloat16": (0.03, 0.5)}
"""Of the mean and of the largest distance of log-probs."""


@pytest.fixture(params=["inline", "child"])
def place(request) -> str:
    return request.param


@pytest.fixture
def engines(place: str) -> Iterator[Any]:
    made: list[Engine] = []

    def make(config: dict[str, Any], dtype: str) -> Engine:
        options = {"max_model_tokens": 96, "dtype": dtype, "seed": 7, "device": str(side.DEVICE)}
        if place == "inline":
            made.append(TorchEngine(HFConfig.from_dict(config), **options))
        else:
            made.append(ChildEngine(FACTORY, {"config": config} | options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def distance(learner: MegatronLearner, engine: Engine, tag: str, version: int) -> tuple:
    """Mean and largest distance of the log-probs of fresh samples."""
    batch = pack_samples(list(run(engine, requests(12, group=2, tag=tag)).values()))
    assert set(batch.versions[batch.mask].tolist()) == {version}
    far = (learner.logprobs(batch) - batch.rollout_log_probs)[batch.mask].abs()
    return float(far.mean()), float(far.max())


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama"])
def test_samples_have_the_learners_log_probs(
    arch: str, dtype: str, place: str, engines: Any
) -> None:
    config = kit.tiny_config(arch)
    train = TrainConfig(lr=2e-2, adam_eps=1e-3)
    model = ModelConfig(dtype=dtype, random_init=True)
    learner = MegatronLearner(HFConfig.from_dict(config), model, train, seed=3)
    # Buckets so small that the weights take several.
    channel = ColocatedChannel(max_bucket_bytes=8192, shared_memory=place == "child")
    mean_limit, max_limit = LIMITS[dtype]
    try:
        engine = engines(config, dtype)
        assert channel.update_weights(learner, engine, 5)["bytes"] > 3 * 8192
        mean, most = distance(learner, engine, "a", 5)
        assert mean < mean_limit and most < max_limit
        assert ranks.step(learner, 0)["actor/skipped"] == 0
        stale, _ = distance(learner, engine, "b", 5)
        assert stale > 3 * mean_limit  # the learner has moved on
        channel.update_weights(learner, engine, 6)
        mean, most = distance(learner, engine, "c", 6)
        assert mean < mean_limit and most < max_limit
    finally:
        learner.close()


def test_an_engine_that_slept_takes_the_weights_again(place: str, engines: Any) -> None:
    config = kit.tiny_config("qwen3")
    channel = ColocatedChannel(shared_memory=place == "child")
    with side.learner() as learner:
        engine = engines(config, "float32")
        channel.update_weights(learner, engine, 0)
        first = {i: s.tokens.tolist() for i, s in run(engine, requests(4)).items()}
        engine.sleep(["weights", "kv_cache"])
        learner.offload()
        learner.onload()
        engine.wake(["weights"])
        channel.update_weights(learner, engine, 0)
        learner.offload()
        engine.wake(["kv_cache"])
        assert {i: s.tokens.tolist() for i, s in run(engine, requests(4)).items()} == first
        learner.onload()


def test_the_export_is_on_the_gpu_in_the_models_dtype() -> None:
    with side.learner(dtype="bfloat16") as learner:
        found = list(learner.export())
        assert {t.dtype for _, t in found} == {torch.bfloat16}
        assert {t.device.type for _, t in found} == {side.DEVICE.type}


@side.needs_gpu
@pytest.mark.parametrize("route", ["gather", "intranode"])
def test_a_bucket_stays_on_the_gpu_and_its_memory_comes_back(route: str) -> None:
    """By its handle: the engine's process reads the learner's memory, and lets go of it."""
    config = kit.tiny_config("qwen3")
    channel = make_channel(
        route, transport="cuda_ipc", max_bytes=8192, device=side.DEVICE, peers=Peers(name=route)
    )
    options = {"max_model_tokens": 96, "dtype": "float32", "seed": 7, "device": str(side.DEVICE)}
    model = ModelConfig(dtype="float32", random_init=True)
    # Not `side.learner`, whose temperature is not that of the requests.
    made = MegatronLearner(HFConfig.from_dict(config), model, TrainConfig(), seed=3)
    with closing(made) as learner:
        engine = ChildEngine(FACTORY, {"config": config} | options)
        try:
            channel.update_weights(learner, engine, 0)
            largest = max(tensor.nbytes for _, tensor in learner.export())
            held = torch.cuda.memory_allocated()
            for version in range(1, 6):
                figures = channel.update_weights(learner, engine, version)
                # Over a relay two buckets, of which one tensor may be the larger, and checksums; in
                # gather a bucket, a bundle (here that is all) and what it is made of. In both, the
                # buckets that the engine has.
                bucket = max(8192, largest)
                room = 2.1 * bucket if route == "intranode" else bucket + 2 * figures["bytes"]
                assert 0 < figures["transient_gb"] * 1e9 <= room + IN_FLIGHT * 8192
            assert torch.cuda.memory_allocated() <= held
            mean, most = distance(learner, engine, "a", 5)
            assert mean < LIMITS["float32"][0] and most < LIMITS["float32"][1]
        finally:
            engine.close()


@side.needs_gpu
def test_a_bucket_whose_handle_nobody_opens_is_freed() -> None:
    """Two megabytes, so that its block of the allocator holds nothing else."""
    before = torch.cuda.memory_allocated()
    buffer = torch.zeros(2**21, dtype=torch.uint8, device=side.DEVICE)
    payload = buckets.cuda_handle(buffer)
    del buffer
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() > before
    buckets.drop_cuda(payload)
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() == before

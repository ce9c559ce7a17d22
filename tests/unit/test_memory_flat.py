"""Host memory over rounds of hand-over and push: flat after the first ones."""

import gc
import os
from pathlib import Path

import psutil
import pytest
import torch

from rlcore.config.schema import ModelConfig, TrainConfig
from rlcore.hf.config import HFConfig
from rlcore.mcore.learner import MegatronLearner
from rlcore.rollout.child import ChildEngine
from rlcore.rollout.torch_engine.engine import TorchEngine
from rlcore.sync.colocated import ColocatedChannel
from tests import kit
from tests.ranks import learner_ranks as ranks

# 5 million parameters: weights of 20 MB, gradients of 20 MB, moments of 40 MB.
LARGE = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3}
ROUNDS = 10
WEIGHTS = 20e6


def resident_bytes() -> list[int]:
    """Of this process and of its children, which keep the order in which they were started."""
    gc.collect()
    me = psutil.Process(os.getpid())
    return [p.memory_info().rss for p in (me, *me.children())]


def graphs() -> list[torch.Tensor]:
    """All tensors whose graphs are alive."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    return [x for x in tensors if x.grad_fn is not None]


@pytest.mark.parametrize(
    "where", ["in this process", pytest.param("in a child", marks=pytest.mark.slow)]
)
def test_ten_rounds_of_offload_onload_and_push_leave_host_memory_flat(
    where: str,
) -> None:
    hf = HFConfig.from_dict(kit.tiny_config("qwen3", **LARGE))
    learner = MegatronLearner(
        hf, ModelConfig(dtype="float32", random_init=True), TrainConfig(), seed=3
    )
    options = {"max_model_tokens": 64, "max_running": 4}
    if where == "in a child":
        settings = {"config": hf.to_dict(), "device": "cpu", **options}
        engine = ChildEngine("rlcore.rollout.torch_engine.engine:build", settings)
    else:
        engine = TorchEngine(hf, device="cpu", **options)
    channel = ColocatedChannel(shared_memory=where == "in a child")
    try:
        sizes = []
        for number in range(ROUNDS):
            engine.sleep(["weights", "kv_cache"])
            learner.onload()
            if number < 2:
                ranks.step(learner, number)
            learner.offload(["optimizer", "gradients"])
            engine.wake(["weights"])
            channel.update_weights(learner, engine, number)
            learner.offload(["weights"])
            engine.wake(["kv_cache"])
            sizes.append(resident_bytes())
        grown = [last - early for early, last in zip(sizes[2], sizes[-1], strict=True)]
        figures = [[round(size / 1e6, 1) for size in row] for row in sizes]
        print(f"{where}: resident MB by round {figures}")
        # A leak of any part would be 7 x 20 MB or more.
        assert all(growth < WEIGHTS for growth in grown), figures
    finally:
        engine.close()
        learner.close()
    assert not list(Path("/dev/shm").glob(f"*{os.getpid()}*"))


def test_a_step_of_experts_with_full_recomputation_leaves_no_activations() -> None:
    hf = HFConfig.from_dict(kit.tiny_config("qwen3_moe"))
    model = ModelConfig(dtype="float32", random_init=True)
    learner = MegatronLearner(hf, model, TrainConfig(recompute="full"), seed=3)
    try:
        before = graphs()
        ranks.step(learner, 0)
        assert not [x.shape for x in graphs() if not any(x is y for y in before)]
    finally:
        learner.close()

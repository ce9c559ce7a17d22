"""Optimizer states and layer inputs in host memory on a GPU, bit by bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.config.schema import ModelConfig, TrainConfig
from rlcore.hf.config import HFConfig
from rlcore.mcore import adam, layer_inputs
from rlcore.mcore.learner import MegatronLearner
from tests import kit
from tests.gpu import side
from tests.ranks import learner_ranks as ranks

pytestmark = [pytest.mark.gpu, side.needs_gpu]

OPTIMIZER = {"offload_optimizer": True}


def observed(settings: dict[str, Any], steps: int = 2, **case: Any) -> dict[str, Any]:
    with side.learner(settings, **case) as learner:
        return ranks.observe(learner, steps)


def assert_same(found: dict[str, Any], want: dict[str, Any]) -> None:
    kit.assert_bitwise(found.pop("weights"), want.pop("weights"))
    kit.assert_bitwise({"logp": found.pop("logp")}, {"logp": want.pop("logp")})
    assert found == want


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_equal_those_of_states_on_the_gpu(
    dtype: str, distributed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adam, "CHUNK_BYTES", 4096)  # about twenty chunks
    plain = {"distributed_optimizer": distributed, "weight_decay": 0.1}
    assert_same(observed(plain | OPTIMIZER, dtype=dtype), observed(plain, dtype=dtype))


def test_moments_in_bfloat16_are_the_same_in_host_memory_and_parked_between_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adam, "CHUNK_BYTES", 4096)
    rounded = {"moments_dtype": "bfloat16"}
    want = observed(rounded | OPTIMIZER)["weights"]
    with side.learner(rounded) as learner:
        ranks.step(learner, 0)
        learner.offload()
        assert not any(learner.resident_bytes().values())
        learner.onload()
        ranks.step(learner, 1)
        kit.assert_bitwise(kit.state(learner.export()), want)


def test_a_checkpoint_of_states_in_host_memory_resumes_on_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adam, "CHUNK_BYTES", 4096)
    with side.learner(OPTIMIZER, dtype="bfloat16") as learner:
        ranks.step(learner, 0)
        learner.save_async(tmp_path / "saved").result()
        want = ranks.step(learner, 1)
        weights = kit.state(learner.export())
    for then in (OPTIMIZER, {}):
        with side.learner(then, dtype="bfloat16") as other:
            other.load(tmp_path / "saved")
            assert ranks.step(other, 1) == want
            kit.assert_bitwise(kit.state(other.export()), weights)


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
def test_gradients_equal_those_of_layer_inputs_on_the_gpu(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_inputs, "PAGE_BYTES", 1000)
    monkeypatch.setattr(layer_inputs, "BLOCK", 4000)  # few pages, which are used again
    plain = {"recompute": "full", "tokens_per_micro_batch": 64}
    found = observed(plain | {"offload_activations": True}, arch=arch)
    assert_same(found, observed(plain, arch=arch))


def test_the_gpu_holds_two_layer_inputs_of_many() -> None:
    layers, hidden, tokens = 12, 64, 500
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "vocab_size": 16}
    hf = HFConfig.from_dict(kit.tiny_config("qwen3", **sizes))
    model = ModelConfig(random_init=True, dtype="float32")
    batch = ranks.rows(0, [50] * (tokens // 50), vocab=16)
    peak = []
    for offload in (False, True):
        train = TrainConfig(recompute="full", offload_activations=offload)
        learner = MegatronLearner(hf, model, train)
        learner.accumulate(batch, ranks.Loss())
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        learner.accumulate(batch, ranks.Loss())
        peak.append(torch.cuda.max_memory_allocated() - held)
        learner.close()
    one = 4 * tokens * hidden
    assert peak[0] - peak[1] == pytest.approx((layers - 2) * one, rel=0.01)

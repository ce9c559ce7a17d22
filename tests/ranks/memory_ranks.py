"""What the memory plan is compared with: Megatron's own storages."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.config.schema import LoraConfig, ModelConfig, TrainConfig
from rlcore.hf.config import HFConfig
from rlcore.mcore.learner import MegatronLearner
from rlcore.trainer import memory
from tests import kit
from tests.ranks import learner_ranks

# Large enough that padding is little: Megatron's flat buffers go by 64 elements and more.
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
}


def held_and_planned(
    rank: int,
    arch: str,
    layouts: Sequence[Mapping[str, Any]],
    dtype: str,
    sizes: Mapping[str, int] | None = None,
    lora: Mapping[str, Any] | None = None,
) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Bytes of every part after a step, and what the plan says, for each layout."""
    found = []
    hf, model = (
        HFConfig.from_dict(kit.tiny_config(arch, **SIZES | dict(sizes or {}))),
        ModelConfig(dtype=dtype, random_init=True),
    )
    adapters = LoraConfig(**(lora or {}))
    for layout in layouts:
        train = TrainConfig(**({"lr": 1e-4, "tokens_per_micro_batch": 64} | dict(layout)))
        learner = MegatronLearner(hf, model, train, lora=adapters, seed=3)
        learner_ranks.step(learner, 0)
        planned = memory.state_bytes(hf, model, train, learner.layout, lora=adapters)
        found.append((learner.resident_bytes(), planned))
        learner.close()
    return found


def copied_inputs(rank: int) -> list[int]:
    """Return the bytes of layer inputs that an update copies to host memory with sequence
    parallelism, without and with adapters."""
    layout = {"recompute": "full", "offload_activations": True, "tp": 2}
    found = []
    for options in ({}, {"lora": {"rank": 3}}):
        learner = learner_ranks.make(layout, arch="qwen3", **options)
        learner.accumulate(learner_ranks.mine(learner, learner_ranks.rows(0)), learner_ranks.Loss())
        learner_ranks.apply(learner, learner_ranks.rows(0))
        assert learner._layer_inputs is not None
        found.append(learner._layer_inputs.copied_bytes)
        learner.close()
    return found

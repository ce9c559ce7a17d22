"""Log-probs and every gradient of the learner beside transformers, for what changes attention: RoPE
scaling, partial rotation, a sliding window."""

import copy
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.config.schema import ModelConfig, TrainConfig
from rlcore.hf.config import HFConfig
from rlcore.hf.weights import read_folder
from rlcore.mcore import bridge
from rlcore.mcore.learner import MegatronLearner
from rlcore.tensors import Batch, LossInputs, LossOutput
from tests import kit
from tests.ranks import learner_ranks as ranks
from tests.ranks.sizes import LENGTHS

SCALED = {"rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
YARN = SCALED | {"rope_type": "yarn"}
# Architecture, changes of its config.json, and further changes for transformers.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "yarn": ("qwen2", {"rope_parameters": YARN}, {}),
    "yarn with its own factor": (
        "qwen3",
        {"rope_parameters": YARN | {"attention_factor": 1.4, "beta_fast": 3, "truncate": False}},
        {},
    ),
    "linear": ("llama", {"rope_parameters": SCALED | {"rope_type": "linear"}}, {}),
    # In transformers the frequencies are those of SGLang for sequences of full length only.
    "dynamic": (
        "llama",
        {"rope_parameters": SCALED | {"rope_type": "dynamic"}, "max_position_embeddings": 8},
        {},
    ),
    # GLM-4.5 without experts is Qwen3 with partial rotation.
    "partial": (
        "qwen3",
        {"rope_parameters": YARN},
        {
            "model_type": "glm4_moe",
            "partial_rotary_factor": 0.5,
            "use_qk_norm": True,
            "first_k_dense_replace": 2,
        },
    ),
    "sliding window": ("mistral", {"sliding_window": max(LENGTHS)}, {}),
}


def reference(config: dict[str, Any], weights: dict[str, Tensor]) -> torch.nn.Module:
    """transformers' model in float64."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoConfig.for_model(**copy.deepcopy(config))
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager").double().eval()
    model.load_state_dict(weights)
    return model


def log_probs(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Log-probs of all tokens, 0 for first tokens."""
    found = []
    for i in range(batch.num_sequences):
        tokens = batch.select([i]).tokens
        logits = model(tokens[None]).logits[0, :-1]
        found += [torch.zeros(1), logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]]
    return torch.cat(found)


def nll(x: LossInputs) -> LossOutput:
    return LossOutput(per_token=-x.log_probs, metrics={})


def gradients(learner: MegatronLearner) -> dict[str, Tensor]:
    """Gradients under the names of the weights, in whose place they are exported."""
    for model in learner._models:
        for parameter in model.parameters():
            parameter.data.copy_(parameter.main_grad)
    return kit.state(bridge.export_hf(learner._models, learner.hf, learner.layout))


@pytest.mark.parametrize("case", CASES)
def test_log_probs_and_every_gradient_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """In float64, with common prefixes computed once. Float32 angles and norms limit it."""
    arch, changes, more = CASES[case]
    changes = {"num_hidden_layers": 2, "tie_word_embeddings": False} | changes
    folder = kit.tiny_hf_folder(tmp_path / "model", arch, **changes)
    hf = HFConfig.from_folder(folder)
    hf = replace(hf, rope=replace(hf.rope, partial=more.get("partial_rotary_factor", 1.0)))
    lengths = LENGTHS if case != "dynamic" else [hf.max_positions] * 2
    assert hf.max_positions >= max(lengths)
    batch = ranks.rows(0, lengths).with_(weight=None)
    weights = {name: tensor.double() for name, tensor in read_folder(folder, hf)}
    model = reference(hf.to_dict() | more, weights)
    wanted = log_probs(model, batch)
    count = batch.mask.sum()
    (-wanted[batch.mask].sum() / count).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert min(grad.abs().max() for grad in grads.values()) > 1e-3

    train = TrainConfig(**ranks.TRAIN | {"distributed_optimizer": False})
    options = ModelConfig(path=str(folder), dtype="float64")
    with closing(MegatronLearner(hf, options, train, temperature=1.0, seed=3)) as learner:
        assert (learner.logprobs(batch) - wanted).abs().max() < 1e-5
        kit.assert_bitwise(kit.state(learner.export()), weights)
        learner.accumulate(batch, nll)
        found = {name: grad / count for name, grad in gradients(learner).items()}
    kit.assert_close_named(found, grads, rtol=1e-5, atol=2e-6)

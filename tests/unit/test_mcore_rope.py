"""Log-probs and gradients of the learner beside transformers, for every RoPE scaling."""

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

YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", YARN),
    "qwen3": ("qwen3", YARN | {"beta_fast": 3, "attention_factor": 1.4, "truncate": False}),
    "llama": ("llama", {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}),
    "llama at full length": (
        "llama",
        {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0},
    ),
    "glm4_moe": ("qwen3", YARN | {"partial_rotary_factor": 0.5}),
}


def nll(x: LossInputs) -> LossOutput:
    return LossOutput(per_token=-x.log_probs, metrics={})


def reference(arch: str, config: dict[str, Any], weights: dict[str, Tensor]) -> torch.nn.Module:
    """transformers' model in float64."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoConfig.for_model(arch, **copy.deepcopy(config))
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager").double().eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    return model


def log_probs(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Log-probs of all tokens, 0 for first tokens."""
    found = []
    for i in range(batch.num_sequences):
        tokens = batch.select([i]).tokens
        logits = model(tokens[None]).logits[0, :-1]
        found += [torch.zeros(1), logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]]
    return torch.cat(found)


def gradients(learner: MegatronLearner) -> dict[str, Tensor]:
    """Gradients under the names of the weights; the learner's weights are lost."""
    for model in learner._models:
        for parameter in model.parameters():
            parameter.data.copy_(parameter.main_grad)
    return kit.state(bridge.export_hf(learner._models, learner.hf, learner.layout))


@pytest.mark.parametrize("case", CASES)
def test_log_probs_and_every_gradient_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """In float64, with common prefixes computed once; transformers' float32 norms limit it."""
    arch, settings = CASES[case]
    partial = settings.get("partial_rotary_factor", 1.0)
    whole = {k: v for k, v in settings.items() if k != "partial_rotary_factor"}
    sizes = {"num_hidden_layers": 2, "rope_parameters": whole, "tie_word_embeddings": False}
    batch = ranks.rows(0).with_(weight=None)
    theirs = kit.tiny_config(arch, **sizes)
    if case == "llama at full length":  # only there transformers has the frequencies of SGLang
        sizes["max_position_embeddings"] = theirs["max_position_embeddings"] = 8
        batch = ranks.rows(0, [32, 32]).with_(weight=None)
    elif case == "glm4_moe":
        theirs |= {"partial_rotary_factor": partial, "use_qk_norm": True}
        theirs |= {"first_k_dense_replace": 2}  # no experts
    folder = kit.tiny_hf_folder(tmp_path / "model", arch, **sizes)
    hf = HFConfig.from_folder(folder)
    hf = replace(hf, rope=replace(hf.rope, partial=partial))
    model = reference(case.split()[0], theirs, dict(read_folder(folder, hf)))
    wanted = log_probs(model, batch)
    count = batch.mask.sum()
    (-wanted[batch.mask].sum() / count).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert min(grad.abs().max() for grad in grads.values()) > 1e-3

    train = TrainConfig(**ranks.TRAIN | {"distributed_optimizer": False})
    options = ModelConfig(path=str(folder), dtype="float64")
    with closing(MegatronLearner(hf, options, train, temperature=1.0, seed=3)) as learner:
        assert (learner.logprobs(batch) - wanted).abs().max() < 1e-5
        saved = {name: tensor.double() for name, tensor in read_folder(folder, hf)}
        kit.assert_bitwise(kit.state(learner.export()), saved)
        learner.accumulate(batch, nll)
        found = {name: grad / count for name, grad in gradients(learner).items()}
    kit.assert_close_named(found, grads, rtol=1e-5, atol=2e-6)

"""Log-probs and every gradient of the learner beside transformers, for every architecture, RoPE
scaling, partial rotation and a sliding window; and the round trip of a folder."""

import copy
import json
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.config.schema import ModelConfig, TrainConfig
from rlcore.hf.config import HFConfig
from rlcore.hf.weights import read_folder, save_folder
from rlcore.mcore import bridge
from rlcore.mcore.learner import MegatronLearner
from rlcore.tensors import Batch, LossInputs, LossOutput
from tests import kit
from tests.contracts.engine_contract import load_oracle
from tests.ranks import learner_ranks as ranks
from tests.ranks.sizes import LENGTHS

SCALED = {"rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
YARN = SCALED | {"rope_type": "yarn"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{arch: (arch, {}) for arch in kit.ARCHS},
    "yarn": ("qwen2", {"rope_parameters": YARN}),
    "yarn with its own factor": (
        "qwen3",
        {"rope_parameters": YARN | {"attention_factor": 1.4, "beta_fast": 3, "truncate": False}},
    ),
    "linear": ("llama", {"rope_parameters": SCALED | {"rope_type": "linear"}}),
    # In transformers the frequencies are those of SGLang for sequences of full length only.
    "dynamic": (
        "llama",
        {"rope_parameters": SCALED | {"rope_type": "dynamic"}, "max_position_embeddings": 8},
    ),
    # With YaRN, transformers takes the share from the top of config.json, if not 0.5.
    "partial": ("glm4_moe", {"rope_parameters": YARN, "partial_rotary_factor": 0.25}),
    "sliding window": ("mistral", {"sliding_window": max(LENGTHS)}),
}


def reference(config: dict[str, Any], weights: dict[str, Tensor]) -> torch.nn.Module:
    """transformers' model in float64."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoConfig.for_model(**copy.deepcopy(config))
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager").double().eval()
    model.set_experts_implementation("eager")  # the others lack float64
    load_oracle(model, weights)
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


def differences(config: dict[str, Any], folder: Path) -> dict[str, float]:
    """Largest differences of log-probs and of any gradient of the mean, of a tiny model beside
    transformers. In float64, with common prefixes computed once; float32 angles and norms limit
    it."""
    (folder / "config.json").write_text(json.dumps(config))
    kit.random_weights(folder)
    hf = HFConfig.from_folder(folder)
    lengths = LENGTHS if hf.rope.kind != "dynamic" else [hf.max_positions] * 2
    assert hf.max_positions >= max(lengths)
    batch = ranks.rows(0, lengths).with_(weight=None)
    weights = {name: tensor.double() for name, tensor in read_folder(folder, hf)}
    model = reference(hf.to_dict(), weights)
    wanted = log_probs(model, batch)
    count = batch.mask.sum()
    (-wanted[batch.mask].sum() / count).backward()
    grads = kit.gradients(model)
    assert min(grad.abs().max() for grad in grads.values()) > 2e-4

    train = TrainConfig(**ranks.TRAIN | {"distributed_optimizer": False})
    options = ModelConfig(path=str(folder), dtype="float64")
    with closing(MegatronLearner(hf, options, train, temperature=1.0, seed=3)) as learner:
        apart = (learner.logprobs(batch) - wanted).abs().max()
        learner.accumulate(batch, nll)
        found = {n: grad / count for n, grad in gradients(learner).items() if n in grads}
    kit.assert_close_named(found, grads, rtol=1e-5, atol=2e-6)
    largest = max((found[name] - grad).abs().max() for name, grad in grads.items())
    return {"log-prob": float(apart), "gradient": float(largest)}


@pytest.mark.parametrize("case", CASES)
def test_log_probs_and_every_gradient_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    arch, changes = CASES[case]
    assert differences(kit.tiny_config(arch, **changes), tmp_path)["log-prob"] < 1e-5


@pytest.mark.parametrize("arch", kit.ARCHS)
def test_an_exported_folder_is_the_loaded_one(tmp_path: Path, arch: str) -> None:
    folder = kit.tiny_hf_folder(tmp_path / "m", arch)
    for dtype in ("float32", "bfloat16"):
        learner = ranks.make({}, str(folder), dtype=dtype)
        out = tmp_path / dtype
        save_folder(learner.export(), learner.hf, None, out)
        learner.close()
        hf = HFConfig.from_folder(out)
        before = dict(read_folder(folder, HFConfig.from_folder(folder)))
        for name, tensor in read_folder(out, hf):
            bias = name.endswith("e_score_correction_bias")
            assert tensor.dtype == (torch.float32 if bias else getattr(torch, dtype)), name
            assert torch.equal(tensor, before[name].to(tensor.dtype)), name


if __name__ == "__main__":
    for name, (arch, changes) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            found = differences(kit.tiny_config(arch, **changes), Path(folder))
        print(f"| {name} | " + " | ".join(f"{value:.1e}" for value in found.values()) + " |")

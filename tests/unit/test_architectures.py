"""Every architecture: log-probs and every gradient of the learner against transformers, and the
round trip of a folder."""

from pathlib import Path

import pytest
import torch

from rlcore.hf.config import HFConfig
from rlcore.hf.names import expected
from rlcore.hf.weights import read_folder, save_folder
from rlcore.mcore import bridge
from rlcore.mcore.learner import MegatronLearner
from rlcore.tensors import LossInputs, LossOutput
from tests import kit
from tests.ranks import learner_ranks

LIMIT = 1e-5
"""Largest difference, in float32."""


def nll(x: LossInputs) -> LossOutput:
    """Minus the log-prob of each trained token."""
    return LossOutput(per_token=-x.log_probs, metrics={})


def gradients(learner: MegatronLearner) -> dict[str, torch.Tensor]:
    """The gradient of every tensor, by its name in transformers."""
    hf, layout, models = learner.hf, learner.layout, learner._models
    params = bridge._parameters(models, hf, layout)
    grads = {n: p.main_grad for n, p in params.items() if isinstance(p, torch.nn.Parameter)}
    made = bridge._shards(bridge.pieces(hf), grads, expected(hf), hf, layout)
    return {shard.name: grad.reshape(shard.shape).clone() for shard, grad in made}


@pytest.mark.parametrize("arch", kit.ARCHS)
def test_log_probs_and_gradients_are_those_of_transformers(tmp_path: Path, arch: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = kit.tiny_hf_folder(tmp_path / "m", arch)
    learner = learner_ranks.make({}, str(folder), temperature=1.0)
    batch = learner_ranks.rows(0)
    batch = batch.with_(weight=torch.ones_like(batch.weight))
    logp = learner.logprobs(batch)
    learner.accumulate(batch, nll)
    ours = gradients(learner)
    learner.close()

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    loss = torch.zeros(())
    wanted = []
    for i in range(batch.num_sequences):
        one = batch.select([i])
        rows = model(one.tokens[None, :-1]).logits[0].log_softmax(-1)
        found = rows.gather(-1, one.tokens[1:, None]).squeeze(-1)
        wanted.append(torch.cat([found.new_zeros(1), found.detach()]))
        loss = loss - (found * one.mask[1:]).sum()
    loss.backward()
    assert (logp - torch.cat(wanted)).abs().max() < LIMIT
    theirs = unstacked(model)
    assert theirs.keys() == ours.keys()
    for name, grad in theirs.items():
        scale = float(grad.abs().max())
        assert scale > 1e-3, name  # every tensor matters
        assert (ours[name] - grad).abs().max() < LIMIT * max(scale, 1), name


def unstacked(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of transformers by the names on disk; in memory, experts are stacked."""
    found: dict[str, torch.Tensor] = {}
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        prefix, stacked, kind = name.partition(".experts.")
        if not stacked:
            found[name] = param.grad
            continue
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for e, grad in enumerate(param.grad):
            for part, half in zip(parts, grad.chunk(len(parts)), strict=True):
                found[f"{prefix}.experts.{e}.{part}.weight"] = half
    return found


@pytest.mark.parametrize("arch", kit.ARCHS)
def test_an_exported_folder_is_the_loaded_one(tmp_path: Path, arch: str) -> None:
    folder = kit.tiny_hf_folder(tmp_path / "m", arch)
    for dtype in ("float32", "bfloat16"):
        learner = learner_ranks.make({}, str(folder), dtype=dtype)
        out = tmp_path / dtype
        save_folder(learner.export(), learner.hf, None, out)
        learner.close()
        hf = HFConfig.from_folder(out)
        before = dict(read_folder(folder, HFConfig.from_folder(folder)))
        for name, tensor in read_folder(out, hf):
            bias = name.endswith("e_score_correction_bias")
            assert tensor.dtype == (torch.float32 if bias else getattr(torch, dtype)), name
            assert torch.equal(tensor, before[name].to(tensor.dtype)), name

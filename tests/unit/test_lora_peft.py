"""Adapters in both directions between the learner and `peft`, which gives the logits of
transformers' model with them. Skipped without `peft` (pip install peft, in an environment of its
own, as it brings accelerate)."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlcore.config.schema import LoraConfig
from rlcore.hf import lora as adapters
from rlcore.hf.config import HFConfig
from rlcore.hf.weights import save_folder
from tests import kit
from tests.ranks import learner_ranks as ranks

peft = pytest.importorskip("peft", reason="peft is not installed")

SETTINGS: dict[str, dict[str, Any]] = {
    "all": {"rank": 3, "alpha": 6.0},
    "some, rs": {"rank": 4, "alpha": 3.0, "rs": True, "targets": ("k_proj", "o_proj", "up_proj")},
}


def log_probs(model: Any) -> Tensor:
    """The log-probs of every token of `ranks.rows(0)`, 0 for first tokens."""
    found = []
    for tokens in ranks.rows(0).tokens.split(ranks.LENGTHS):
        logits = model(tokens[None]).logits[0, :-1] / 0.8
        told = F.log_softmax(logits, -1).gather(-1, tokens[1:, None]).squeeze(-1)
        found += [torch.zeros(1), told.detach()]
    return torch.cat(found)


def base_of(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("arch", ["qwen3", "qwen2"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_peft_loads_our_folder_and_gives_our_log_probs(
    arch: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model, ours = kit.tiny_hf_folder(tmp_path / "model", arch), tmp_path / "adapters"
    with closing(ranks.make({}, str(model), lora=settings)) as learner:
        before = learner.logprobs(ranks.rows(0))
        for number in range(2):
            ranks.step(learner, number)
        wanted = learner.logprobs(ranks.rows(0))
        adapters.save_adapters(
            learner.export_adapters(), learner.hf, learner.lora, str(model), ours
        )
        save_folder(learner.export(), learner.hf, None, tmp_path / "merged")
    loaded = peft.PeftModel.from_pretrained(base_of(model), ours)
    assert (wanted - before).abs().max() > 0.1
    kit.assert_close_named({"l": log_probs(loaded)}, {"l": wanted}, rtol=0, atol=1e-5)
    kit.assert_close_named(
        {"l": log_probs(base_of(tmp_path / "merged"))}, {"l": wanted}, rtol=0, atol=1e-5
    )
    theirs = loaded.merge_and_unload().state_dict()
    merged = base_of(tmp_path / "merged").state_dict()
    kit.assert_close_named(merged, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_learner_loads_a_folder_that_peft_wrote(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    model, theirs = kit.tiny_hf_folder(tmp_path / "model"), tmp_path / "adapters"
    lora = LoraConfig(**settings)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.rs,
        target_modules=list(lora.targets),
        init_lora_weights=False,  # B is random as well
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(base_of(model), config)
    wrapped.save_pretrained(theirs)
    with closing(ranks.make({}, str(model), lora=settings | {"path": str(theirs)})) as learner:
        found = learner.logprobs(ranks.rows(0))
    kit.assert_close_named({"l": found}, {"l": log_probs(wrapped)}, rtol=0, atol=1e-5)
    names = set(adapters.shapes(HFConfig.from_folder(model), lora))
    assert names == set(adapters.reader(theirs, HFConfig.from_folder(model), lora).names())

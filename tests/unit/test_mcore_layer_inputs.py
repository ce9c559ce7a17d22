"""Layer inputs in host memory against those on the device, bit by bit."""

from typing import Any

import pytest

from rlcore.mcore import layer_inputs
from tests import kit
from tests.ranks import learner_ranks as ranks

FULL = {"recompute": "full", "tokens_per_micro_batch": 64}
OFFLOAD = FULL | {"offload_activations": True}


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of several pages, and a last page that is not full."""
    monkeypatch.setattr(layer_inputs, "PAGE_BYTES", 1000)
    monkeypatch.setattr(layer_inputs, "BLOCK", 4000)


def observed(settings: dict[str, Any], **case: Any) -> dict[str, Any]:
    learner = ranks.make(settings, **case)
    found = ranks.observe(learner, 2)
    found["copied"] = learner._layer_inputs.copied_bytes
    found["host"] = learner._layer_inputs.host_bytes
    learner.accumulate(ranks.rows(2), ranks.Loss())
    found["third"] = learner.apply(1.0).get("actor/offloaded_gb", 0.0)
    learner.close()
    return found


@pytest.mark.parametrize(
    "case",
    [{"arch": "qwen3"}, {"arch": "qwen3_moe"}, {"arch": "qwen3", "lora": {"rank": 3}}],
    ids=["dense", "experts", "LoRA"],
)
def test_gradients_equal_those_of_inputs_on_the_device(case: dict[str, Any]) -> None:
    arch, want, found = case["arch"], observed(FULL, **case), observed(OFFLOAD, **case)
    kit.assert_bitwise(found.pop("weights"), want.pop("weights"))
    if "lora" in case:
        kit.assert_bitwise(found.pop("adapters"), want.pop("adapters"))
    kit.assert_bitwise({"logp": found.pop("logp")}, {"logp": want.pop("logp")})
    assert want.pop("copied") == want.pop("host") == 0
    assert want.pop("third") == 0
    hf = kit.tiny_config(arch)
    shared = found["actor/shared_tokens 0"]
    tokens = round(ranks.rows(0).num_tokens * (1 - shared))
    assert 0 < shared < 0.3
    copied = 4 * tokens * hf["hidden_size"] * hf["num_hidden_layers"]
    assert found.pop("copied") == 2 * copied
    assert found.pop("third") == copied / 1e9
    micro_batch = 4 * max(ranks.LENGTHS + [64]) * hf["hidden_size"] * hf["num_hidden_layers"]
    assert 0 < found.pop("host") < 2 * micro_batch + 8000  # pages are used again
    assert found == want

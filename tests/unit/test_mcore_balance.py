"""Balancing of experts in a world of one; tests/ranks/test_balance.py has the layouts."""

from typing import Any

import pytest
import torch

from rlcore.mcore.learner import MegatronLearner
from tests import kit
from tests.ranks import balance_ranks
from tests.ranks import learner_ranks as ranks
from tests.ranks.balance_ranks import NORMALISER, Likelihood


@pytest.mark.parametrize("name", ["moe_aux_loss_coef", "moe_z_loss_coef", "moe_bias_update_rate"])
def test_a_key_without_effect_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"--train.{name} 0.01: the model has no experts"):
        ranks.make({name: 0.01}, arch="qwen3")
    with pytest.raises(ValueError, match=f"--train.{name} 0.01: with --lora.rank the routers are"):
        ranks.make({name: 0.01}, arch="qwen3_moe", lora={"rank": 2})


def test_a_bias_that_routers_lack_cannot_be_updated() -> None:
    with pytest.raises(ValueError, match=r"--train.moe_bias_update_rate 0.001: .* no expert bias"):
        ranks.make({"moe_bias_update_rate": 1e-3}, arch="qwen3_moe")


def test_losses_of_routers_need_an_announced_update() -> None:
    learner = balance_ranks.make({})
    batch = ranks.rows(0)
    with pytest.raises(RuntimeError, match="accumulate without begin_update"):
        learner.accumulate(batch, Likelihood())
    for num_tokens, normaliser in ((batch.num_tokens, 49.0), (batch.num_tokens - 1, NORMALISER)):
        learner.discard()
        learner.begin_update(num_tokens, normaliser)
        learner.accumulate(batch, Likelihood())
        with pytest.raises(ValueError, match=f"apply: the update has {batch.num_tokens} tokens"):
            learner.apply(NORMALISER)
    learner.close()


def trained(learner: MegatronLearner, updates: int = 1) -> dict[str, Any]:
    """Return metrics and weights after some updates."""
    metrics: dict[str, float] = {}
    for number in range(updates):
        batch = ranks.rows(number)
        learner.begin_update(batch.num_tokens, NORMALISER)
        learner.accumulate(batch, Likelihood())
        metrics = learner.apply(NORMALISER)
    return {"metrics": metrics, "weights": kit.state(learner.export())}


def test_the_auxiliary_loss_begins_with_the_second_update() -> None:
    found = {}
    for coef in (0.0, 0.5):
        learner = balance_ranks.make({"moe_aux_loss_coef": coef})
        found[coef] = [trained(learner), trained(learner)]
        learner.close()
    first, second = found[0.0][0], found[0.5][0]
    assert first["metrics"] == second["metrics"]
    kit.assert_bitwise(first["weights"], second["weights"])
    without, with_loss = (found[coef][1]["metrics"] for coef in found)
    assert without["actor/moe_aux_loss"] == with_loss["actor/moe_aux_loss"]
    assert without["actor/grad_norm"] != with_loss["actor/grad_norm"]


def test_the_auxiliary_loss_evens_the_loads() -> None:
    found = {}
    for coef in (0.0, 1.0):
        sizes = {"moe_aux_loss_coef": coef, "moe_z_loss_coef": 1e-9, "lr": 3e-3}
        learner = balance_ranks.make(sizes)
        metrics = [trained(learner)["metrics"] for _ in range(20)][-1]
        found[coef] = metrics["actor/moe_aux_loss"] - 1, metrics["actor/expert_load_max"] - 1
        learner.close()
    assert found[0.0][0] > 0.03 and found[0.0][1] > 0.3
    assert found[1.0][0] < 0.01 and found[1.0][1] < 0.25


def test_the_reference_keeps_its_biases() -> None:
    learner = ranks.make(
        {"moe_bias_update_rate": 5.0, "lr": 1e-12}, arch="glm4_moe", keep_reference=True
    )
    batch = ranks.rows(0)
    before = learner.logprobs(batch)
    trained(learner)
    assert not torch.allclose(learner.logprobs(batch), before, atol=1e-3)
    assert torch.allclose(learner.logprobs(batch, "reference"), before, atol=1e-6)
    learner.close()

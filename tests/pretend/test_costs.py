"""The counted costs of an update: against a GPU's seconds, and against the cost model."""

import pytest

from rlcore.sim import phases
from rlcore.sim.cost import CONSTANTS, model_named
from rlcore.utils.gpus import GPUS
from tests.pretend import costs

pytestmark = pytest.mark.timeout(900)
RECIPE = phases.Layout(gpus=64, tp=4, cp=4, recompute="full", micro_batch=34816)
"""Layout of recipes/grpo_32b.sh."""


def test_counts_and_cost_model_agree_on_an_update_of_32b() -> None:
    found = costs.measure("recipes/grpo_32b.sh")
    work, tokens = found["phases"]["update_actor"]["work"], found["tokens"]
    model, gpu = model_named("32B"), GPUS["H100"]
    assert found["tokens"] == found["longest"] == RECIPE.micro_batch, "one sequence"
    assert costs.arithmetic(work) == pytest.approx(CONSTANTS.arithmetic, rel=0.06)
    passes, ranks = phases.PASSES["full"], RECIPE.tp * RECIPE.cp
    products = sum(w["flops"] for w in work.values() if w["kind"] == "product")
    assert products == pytest.approx(2 * model.dense * tokens * passes / ranks, rel=0.02)
    attention = sum(w["flops"] for w in work.values() if w["kind"] == "attention")
    # Backward has 2.5 times the products of forward; the cost model takes twice.
    wanted = 2 * model.layers * model.attention * tokens**2 * (passes + 0.5) / ranks
    assert attention == pytest.approx(wanted, rel=0.02)
    traffic = phases._traffic_s(model, gpu, RECIPE, CONSTANTS) * passes * tokens
    assert costs.seconds(work, "collective") == pytest.approx(traffic, rel=0.2)


def test_counted_seconds_are_less_than_an_h100_took() -> None:
    (tokens, equal, measured), *_ = costs.VALIDATED.values()
    counted = costs.seconds(costs.validate(tokens, equal))
    assert measured / counted == pytest.approx(1.11, abs=0.02)

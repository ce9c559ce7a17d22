"""The learner of the GPU recipes at its real size, against its memory plan."""

from typing import Any

import pytest

from tests.pretend import profile

pytestmark = pytest.mark.timeout(900)

ALWAYS = ("grpo_7b", "grpo_14b")
"""A small one for every run: selective recomputation; pipeline and context parallelism."""
OTHERS = ("grpo_32b", "dapo_32b", "async_8b", "code_14b", "judge_7b", "agentic_frozenlake")
EXPERTS = "grpo_30b_a3b"
PARTS = ("learner", "copy", "activations", "running", "logits", "reference", "Adam's")
"""First words of the parts that the learner allocates."""


def held_to_its_plan(found: dict[str, Any]) -> None:
    for phase in ("build", "old_log_prob", "update_actor", "optimizer_step"):
        items = found["plan"][phase].items()
        planned = sum(n for part, n in items if part.split()[0] in PARTS)
        peak = found["phases"][phase]["peak"]
        assert abs(peak / planned - 1) < 0.05, f"{phase}: {peak / 1e9} of {planned / 1e9} GB"
    if "offload" in found["phases"]:
        # What stays is Megatron's buffer for gathered sequences.
        assert found["phases"]["offload"]["allocated"] < 0.005 * sum(found["resident"].values())


@pytest.mark.parametrize(
    "recipe", [*ALWAYS, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_the_learner_takes_the_memory_of_its_plan(recipe: str) -> None:
    held_to_its_plan(profile.measure(f"recipes/{recipe}.sh"))


@pytest.mark.parametrize("layers", [2, pytest.param(48, marks=pytest.mark.slow)])
def test_so_does_a_mixture_of_experts(layers: int) -> None:
    keys = "--model.num_layers", str(layers), "--model.random_init"
    held_to_its_plan(profile.measure(f"recipes/{EXPERTS}.sh", *keys, computed=1_200_000))

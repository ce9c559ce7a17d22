"""The learner of the GPU recipes at its real size, against its memory plan."""

import pytest

from tests.pretend import profile

pytestmark = pytest.mark.timeout(900)

ALWAYS = ("grpo_7b", "grpo_14b")
"""A small one for every run: selective recomputation; pipeline and context parallelism."""
OTHERS = ("grpo_32b", "dapo_32b", "async_8b", "code_14b", "judge_7b", "agentic_frozenlake")
"""grpo_30b_a3b is missing: which tokens an expert gets is computed, and here nothing is."""
PARTS = ("learner", "activations", "logits", "Adam's", "reference")
"""First words of the parts that the learner allocates."""


@pytest.mark.parametrize(
    "recipe", [*ALWAYS, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_the_learner_takes_the_memory_of_its_plan(recipe: str) -> None:
    found = profile.measure(f"recipes/{recipe}.sh")
    for phase in ("old_log_prob", "update_actor", "optimizer_step"):
        items = found["plan"][phase].items()
        planned = sum(n for part, n in items if part.split()[0] in PARTS)
        peak = found["phases"][phase]["peak"]
        assert abs(peak / planned - 1) < 0.05, f"{phase}: {peak / 1e9} of {planned / 1e9} GB"
    if "offload" in found["phases"]:
        # What stays is Megatron's buffer for gathered sequences.
        assert found["phases"]["offload"]["allocated"] < 0.005 * sum(found["resident"].values())

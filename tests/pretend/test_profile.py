"""The learner of the GPU recipes at its real size, against its memory plan."""

from typing import Any

import pytest

from tests.pretend import profile

pytestmark = pytest.mark.timeout(900)

CASES: dict[str, dict[str, Any]] = {
    "grpo_7b with critic and reference": {
        "keys": ("--algo.adv_estimator", "gae", "--algo.kl_coef", "0.1")
    },
    "grpo_14b, last stage": {"rank": -1},
    "grpo_32b": {},
    "grpo_32b, offloaded": {
        "keys": (
            *("--train.offload_optimizer", "--train.offload_activations"),
            *("--train.tokens_per_micro_batch", "131072"),
        )
    },
}
OTHERS: dict[str, dict[str, Any]] = {
    "grpo_30b_a3b of 2 layers": {
        "keys": ("--model.num_layers", "2", "--model.random_init"),
        "computed": 1_200_000,
    },
    "judge_7b": {},
    "grpo_7b": {},
    "grpo_14b, first stage": {},
    "dapo_32b": {},
    "async_8b": {},
    "code_14b, first stage": {},
    "code_14b, last stage": {"rank": -1},
    "agentic_frozenlake": {},
    "grpo_30b_a3b": {"computed": 1_200_000},
}
CASES |= OTHERS
PARTS = (
    *("learner", "critic", "copy", "main", "optimizer"),
    *("activations", "running", "logits", "reference"),
)
"""First words of the parts that learner and critic allocate."""

OFFLOADED = "activations", "learner optimizer", "critic optimizer"
"""Parts in host memory while the learner trains."""


def measured(case: str) -> dict[str, Any]:
    options = dict(CASES[case])
    recipe = case.replace(",", "").split()[0]
    return profile.measure(f"recipes/{recipe}.sh", *options.pop("keys", ()), **options)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow) if c in OTHERS else c for c in CASES]
)
def test_a_rank_takes_the_memory_of_its_plan(case: str) -> None:
    found = measured(case)
    for phase in ("build", "old_log_prob", "update_actor", "optimizer_step"):
        items = found["plan"][phase].items()
        planned = sum(n for part, n in items if part.split()[0] in PARTS)
        peak = found["phases"][phase]["peak"]
        # The plan adds the copy of a layer's experts and the logits, which are not held at once:
        # 6 % of what a model of 2 layers takes.
        too_much = 0.07 if case == "grpo_30b_a3b of 2 layers" else 0.05
        assert -too_much < peak / planned - 1 < 0.05, f"{phase}: {peak / 1e9} of {planned / 1e9} GB"
    if not case.startswith("grpo_30b_a3b"):  # experts need their numbers of tokens on the host
        assert found["phases"]["update_actor"]["syncs"] == 0
        assert found["phases"]["old_log_prob"]["syncs"] <= 6
    pinned = found["phases"]["update_actor"]["pinned"]
    planned = sum(n for part, n in found["host"].items() if part in OFFLOADED)
    planned += found["host"].get("reference weights", 0)
    assert abs(pinned - planned) < 0.05 * planned + 1e7, f"{pinned / 1e9} of {planned / 1e9} GB"
    if "offload" in found["phases"]:
        # What stays is Megatron's buffer for gathered sequences.
        assert found["phases"]["offload"]["allocated"] < 0.002 * found["resident"] + 5e6
    assert len(found["judges"]) == (case == "judge_7b")
    for judge in found["judges"]:
        for phase, planned in judge["plan"].items():
            peak = judge["phases"][phase]["peak"]
            assert abs(peak / planned - 1) < 0.05, f"{phase}: {peak / 1e9} of {planned / 1e9} GB"

"""Megatron holds what the memory plan says, under every way to share a model over two ranks."""

from typing import Any

import pytest

from tests import kit

pytestmark = pytest.mark.ranks(2)

DENSE = [
    {},
    {"distributed_optimizer": False},
    {"tp": 2},
    {"pp": 2},
    {"cp": 2},
    {"pp": 2, "pp_layers": (3, 1)},
]
EXPERTS = [{"ep": 2}, {"tp": 2, "ep": 2}, {"pp": 2}]
DIVIDED = [{"tp": 2}, {"etp": 2}, {"tp": 2, "etp": 2}]


LORA = {"rank": 16}
ONE, TWO = {"num_key_value_heads": 1}, {"num_key_value_heads": 2}
LATENTS = {"q_lora_rank": 512}


@pytest.mark.parametrize(
    "arch, layouts, sizes, lora",
    [
        ("qwen2", DENSE, ONE, {}),
        ("qwen3_moe", EXPERTS, TWO, {}),
        ("qwen3_moe", DIVIDED, TWO, {}),
        ("deepseek_v3", EXPERTS, LATENTS, {}),
        ("qwen2", DENSE[1:3], TWO, LORA),
        pytest.param("qwen3_moe", EXPERTS, TWO, LORA | {"experts": True}, marks=pytest.mark.slow),
    ],
)
def test_megatron_holds_what_is_planned(
    arch: str, layouts: list[dict[str, Any]], sizes: dict[str, int], lora: dict[str, Any]
) -> None:
    args = {"arch": arch, "layouts": layouts, "dtype": "bfloat16", "sizes": sizes, "lora": lora}
    for rank in kit.run_ranks(2, "tests.ranks.memory_ranks:held_and_planned", args):
        for layout, (held, planned) in zip(layouts, rank, strict=True):
            for part, count in planned.items():
                assert 0.97 * count <= held[part] <= 1.02 * count, (layout, part)


def test_all_layer_inputs_go_to_host_memory_with_adapters_too() -> None:
    for plain, adapted in kit.run_ranks(2, "tests.ranks.memory_ranks:copied_inputs"):
        assert plain == adapted > 0

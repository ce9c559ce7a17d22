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


LORA = {"rank": 16}


@pytest.mark.parametrize(
    "arch, layouts, heads, lora",
    [
        ("qwen2", DENSE, 1, {}),
        ("qwen3_moe", EXPERTS, 2, {}),
        ("deepseek_v3", EXPERTS, 4, {}),
        ("qwen2", DENSE[1:3], 2, LORA),
        pytest.param("qwen3_moe", EXPERTS, 2, LORA | {"experts": True}, marks=pytest.mark.slow),
    ],
)
def test_megatron_holds_what_is_planned(
    arch: str, layouts: list[dict[str, Any]], heads: int, lora: dict[str, Any]
) -> None:
    sizes = {"num_key_value_heads": heads}
    args = {"arch": arch, "layouts": layouts, "dtype": "bfloat16", "sizes": sizes, "lora": lora}
    for rank in kit.run_ranks(2, "tests.ranks.memory_ranks:held_and_planned", args):
        for layout, (held, planned) in zip(layouts, rank, strict=True):
            for part, count in planned.items():
                assert 0.97 * count <= held[part] <= 1.02 * count, (layout, part)

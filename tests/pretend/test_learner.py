"""The learner under layouts of two pretend devices, against one rank on the CPU."""

from typing import Any

import pytest

from tests import kit
from tests.pretend import ranks

pytestmark = [pytest.mark.ranks(2), pytest.mark.timeout(600)]

DIST = {"distributed_optimizer": True}
OFFLOADED = {"recompute": "full", "offload_activations": True, "offload_optimizer": True}
CASES: dict[str, dict[str, Any]] = {
    "tp2 sequence parallel": {"layout": {"tp": 2, "sp": True} | DIST, "then": {"pp": 2} | DIST},
    "cp2": {"layout": {"cp": 2, "head_chunk_tokens": 16}},
    "pp2 full recompute": {"layout": {"pp": 2, "recompute": "full"}},
    "pp2 offloaded": {"layout": {"pp": 2} | DIST | OFFLOADED, "then": {"tp": 2} | DIST},
    "dp2 distributed optimizer": {"layout": DIST, "then": {"tp": 2} | DIST},
    "ep2": {"layout": {"ep": 2} | DIST, "arch": "qwen3_moe"},
}
ALONE = {"qwen3": {"layout": {}}, "qwen3_moe": {"layout": {}, "arch": "qwen3_moe"}}
TARGET = "tests.pretend.ranks:parity"


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return kit.run_ranks(1, TARGET, {"folder": "", "cases": ALONE})[0]


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return ranks.run_ranks(2, TARGET, {"folder": folder, "cases": CASES})


@pytest.mark.parametrize("case", CASES)
def test_two_updates_on_two_devices_equal_those_of_one_cpu_rank(
    alone: dict[str, Any], gang: list[dict[str, Any]], case: str
) -> None:
    want = alone[CASES[case].get("arch", "qwen3")]
    figures = {k: v for k, v in want.items() if isinstance(v, float) and k != "offloaded to"}
    assert want["device"] == "cpu" and figures["actor/grad_norm 0"] > 0.5
    for rank in gang:
        found = rank[case]
        assert found["device"] == "cuda"
        ours = {name: found[name] for name in figures}
        kit.assert_close_named(ours, figures, rtol=2e-6, atol=1e-6)
        kit.assert_close_named(found["weights"], want["weights"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_offload_empties_the_device_and_onload_restores_it(
    gang: list[dict[str, Any]], case: str
) -> None:
    for rank in gang:
        assert rank[case]["offloaded to"] < 1e-3 and rank[case]["same after onload"]


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if "then" in case])
def test_another_layout_loads_the_checkpoint(gang: list[dict[str, Any]], case: str) -> None:
    for rank in gang:
        kit.assert_bitwise(rank[case]["loaded"], rank[case]["weights"])

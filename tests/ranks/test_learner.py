"""The learner under every layout, in one gang of four ranks, against one rank on the same rows."""

from typing import Any

import pytest

from tests import kit
from tests.ranks.sizes import LENGTHS

pytestmark = pytest.mark.ranks(4)

OFFLOADED = {"recompute": "full", "offload_activations": True, "offload_optimizer": True}
ALL: dict[str, dict[str, Any]] = {
    "dp4": {},
    "dp4 distributed optimizer": {"distributed_optimizer": True, "recompute": "selective"},
    "tp2": {"tp": 2, "sp": False},
    "tp2 sequence parallel distributed optimizer": {"tp": 2, "distributed_optimizer": True},
    "pp2": {"pp": 2},
    "tp2 pp2 full recompute": {"tp": 2, "pp": 2, "recompute": "full"},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "pp2 vpp2 offloaded": {"pp": 2, "vpp": 2} | OFFLOADED,
    "cp2": {"cp": 2},
    "cp2 tp2": {"cp": 2, "tp": 2},
    "cp2 pp2": {"cp": 2, "pp": 2},
    "tp4 of two key-value heads": {
        "tp": 4,
        "recompute": "selective",
        "distributed_optimizer": True,
    },
    "tp4 without sequence parallel": {"tp": 4, "sp": False},
    "pp2 of 3 and 1 layers": {"pp": 2, "pp_layers": (3, 1)},
}
LONG = "tp2", "pp2", "cp2", "tp4 without sequence parallel", "pp2 of 3 and 1 layers"
DENSE = kit.cases(ALL, *LONG)
EXPERTS: dict[str, dict[str, Any]] = kit.cases(
    {
        "ep2": {"ep": 2},
        "tp2 ep2": {"tp": 2, "ep": 2},
        "pp2 ep2 distributed optimizer": {"pp": 2, "ep": 2, "distributed_optimizer": True},
        "tp2 of whole experts": {"tp": 2},
        "tp2 of whole experts distributed optimizer": {"tp": 2, "distributed_optimizer": True},
        "etp2": {"etp": 2},
        "tp2 etp2": {"tp": 2, "etp": 2},
        "pp2 etp2 distributed optimizer": {"pp": 2, "etp": 2, "distributed_optimizer": True},
        "tp2 ep2 etp2": {"tp": 2, "ep": 2, "etp": 2, "distributed_optimizer": True},
        "tp2 etp4 full recompute": {"tp": 2, "etp": 4, "recompute": "full"},
    },
    "ep2",
    "tp2 etp2",
    "pp2 etp2 distributed optimizer",
)
CASES = {name: {"layout": layout} for name, layout in DENSE.items()} | {
    name: {"layout": layout, "arch": "qwen3_moe"} for name, layout in EXPERTS.items()
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
SIX = {"sizes": {"num_hidden_layers": 6, "rope_parameters": YARN}, "arch": "qwen2"}
CASES["pp2 vpp2 of 1, 2, 2 and 1 layers"] = {
    "layout": {"pp": 2, "vpp": 2, "pp_layers": (1, 2, 2, 1)}
} | SIX
CASES["cp2 with YaRN"] = {"layout": {"cp": 2}} | SIX
CASES["pp2 ep2 with a dense layer full recompute"] = {
    "layout": {"pp": 2, "ep": 2, "recompute": "full"},
    "arch": "qwen3_moe_mixed",
}
MLA = {"arch": "deepseek_v3"}
MLA_DENSE = {"arch": "deepseek_v3_dense"}
CASES["MLA tp2 ep2 selective recompute distributed optimizer"] = {
    "layout": {"tp": 2, "ep": 2, "recompute": "selective", "distributed_optimizer": True}
} | MLA
CASES["MLA pp2 of 3 and 1 layers full recompute"] = {
    "layout": {"pp": 2, "pp_layers": (3, 1), "recompute": "full"}
} | MLA
CASES["MLA cp2 tp2 ep2"] = {"layout": {"cp": 2, "tp": 2, "ep": 2}} | MLA
CASES["MLA tp4 without sequence parallel"] = {"layout": {"tp": 4, "sp": False}} | MLA_DENSE
CASES["MLA pp2 vpp2"] = {"layout": {"pp": 2, "vpp": 2}} | MLA_DENSE
CASES["MLA cp2 tp2"] = {"layout": {"cp": 2, "tp": 2}} | MLA_DENSE
GLM = {"arch": "glm4_moe"}
CASES["ep2 of shared experts and expert groups"] = {"layout": {"ep": 2}} | GLM
CASES["pp2 of a dense layer and of experts offloaded"] = {
    "layout": {"pp": 2, "ep": 2, "pp_layers": (1, 3)} | OFFLOADED
} | GLM
CASES["tp2 ep2 of shared experts and expert groups"] = {
    "layout": {"tp": 2, "ep": 2, "recompute": "full", "distributed_optimizer": True}
} | GLM
CASES["tp2 ep2 etp2 of shared experts with overlap"] = {
    "layout": {"tp": 2, "ep": 2, "etp": 2, "moe_shared_expert_overlap": True}
} | GLM
CASES["tp2 ep2 of shared experts with overlap"] = {
    "layout": {"tp": 2, "ep": 2, "moe_shared_expert_overlap": True}
} | GLM
LORA = {"lora": {"rank": 3, "alpha": 6.0, "lr_ratio": 2.0}}
LORA_EXPERTS = {"lora": {"rank": 3, "rs": True, "experts": True}, "arch": "qwen3_moe"}
LORA_SHARED = {"lora": {"rank": 3, "targets": ("up_proj", "down_proj")}} | GLM
ADAPTED: dict[str, dict[str, Any]] = kit.cases(
    {
        "LoRA dp4 distributed optimizer": {"layout": {"distributed_optimizer": True}} | LORA,
        "LoRA tp2": {"layout": {"tp": 2, "sp": False}} | LORA,
        "LoRA tp2 sequence parallel distributed optimizer": {
            "layout": {"tp": 2, "distributed_optimizer": True}
        }
        | LORA,
        "LoRA tp2 pp2 full recompute": {"layout": {"tp": 2, "pp": 2, "recompute": "full"}} | LORA,
        "LoRA pp2 vpp2 offloaded": {"layout": {"pp": 2, "vpp": 2} | OFFLOADED} | LORA,
        "LoRA cp2 tp2": {"layout": {"cp": 2, "tp": 2}} | LORA,
        "LoRA ep2": {"layout": {"ep": 2}} | LORA_EXPERTS,
        "LoRA tp2 ep2": {"layout": {"tp": 2, "ep": 2}} | LORA_EXPERTS,
        "LoRA tp2 ep2 of shared experts": {"layout": {"tp": 2, "ep": 2}} | LORA_SHARED,
        "LoRA pp2 ep2 distributed optimizer": {
            "layout": {"pp": 2, "ep": 2, "distributed_optimizer": True}
        }
        | LORA_EXPERTS,
    },
)
CASES |= ADAPTED
APART = {"share_prefix": "false"}  # all layouts share prefixes
ALONE = {
    "qwen3": {"layout": APART},
    "qwen3_moe": {"layout": APART, "arch": "qwen3_moe"},
    "qwen3_moe_mixed": {"layout": APART, "arch": "qwen3_moe_mixed"},
    "qwen2": {"layout": APART} | SIX,
    "deepseek_v3": {"layout": APART} | MLA,
    "deepseek_v3_dense": {"layout": APART} | MLA_DENSE,
    "glm4_moe": {"layout": APART} | GLM,
    "qwen3 LoRA": {"layout": APART} | LORA,
    "glm4_moe LoRA": {"layout": APART} | LORA_SHARED,
    "qwen3_moe LoRA": {"layout": APART} | LORA_EXPERTS,
}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return kit.run_ranks(1, "tests.ranks.learner_ranks:alone", {"cases": ALONE})[0]


@pytest.fixture(scope="module")
def gang() -> list[dict[str, Any]]:
    target = "tests.ranks.learner_ranks:gang"
    return kit.run_ranks(4, target, {"cases": CASES}, timeout_s=240)


def wanted(alone: dict[str, Any], case: str) -> dict[str, Any]:
    adapted = " LoRA" if case in ADAPTED else ""
    return alone["parity"][CASES[case].get("arch", "qwen3") + adapted]


@pytest.mark.parametrize("case", CASES)
def test_three_updates_equal_those_of_one_rank(
    alone: dict[str, Any], gang: list[dict[str, Any]], case: str
) -> None:
    want = wanted(alone, case)
    figures = {k: v for k, v in want.items() if isinstance(v, float)}
    every = {"grad_norm", "lr", "loss", "skipped", "entropy", "pg_clipfrac"}
    assert {f"actor/{name} {n}" for name in every for n in range(3)} <= figures.keys()
    assert figures["actor/grad_norm 0"] > 0.5  # the clip is at work
    for rank in gang:
        found = rank["parity"][case]
        assert 0.05 < found["actor/shared_tokens 0"] < 0.25
        ours = {k: found[k] for k in figures}
        kit.assert_close_named(ours, figures, rtol=1e-5, atol=1e-5)
        trained = want.get("adapters", {}).values()
        assert all(tensor.abs().max() > 0 for tensor in trained)  # B was 0
        for what in ("weights", "adapters") if case in ADAPTED else ("weights",):
            kit.assert_close_named(found[what], want[what], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_what_the_loss_keeps_is_counted_once_over_all_ranks(
    gang: list[dict[str, Any]], case: str
) -> None:
    for rank in gang:
        found = rank["parity"][case]
        for number in range(3):
            tokens, sequences = found[f"to keep {number}"]
            assert 60 < tokens < 116 and 0 < sequences <= len(LENGTHS)
            assert found[f"kept {number}"] == [tokens, sequences]


@pytest.mark.parametrize("case", CASES)
def test_log_probs_are_on_every_rank_and_equal(
    alone: dict[str, Any], gang: list[dict[str, Any]], case: str
) -> None:
    rows = wanted(alone, case)["logp"].split(LENGTHS)
    for rank in gang:
        found = rank["parity"][case]
        ours = found["logp"].split([LENGTHS[r] for r in found["rows"]])
        theirs = [rows[r] for r in found["rows"]]
        kit.assert_close_named(dict(enumerate(ours)), dict(enumerate(theirs)), atol=1e-5)
        assert all(row[0] == 0 and (row[1:] < 0).all() for row in ours)


def test_packed_equals_one_by_one(alone: dict[str, Any]) -> None:
    found = alone["one by one"]
    kit.assert_close_named({"l": found["packed logp"]}, {"l": found["single logp"]}, atol=2e-6)
    shares = [found[name].pop("actor/shared_tokens") for name in ("packed", "single")]
    assert shares[0] > 0 == shares[1]
    kit.assert_close_named(found["packed"], found["single"], atol=2e-6)
    kit.assert_close_named(found["packed weights"], found["single weights"], atol=1e-5)


def test_an_empty_batch_has_no_log_probs(alone: dict[str, Any]) -> None:
    assert alone["one by one"]["empty logp"].numel() == 0


def test_ranks_without_sequences_keep_step(gang: list[dict[str, Any]]) -> None:
    found = [rank["empty"] for rank in gang]
    assert len({rank["pp2"]["actor/grad_norm"] for rank in found}) == 1
    assert [rank["pp2 logp"].numel() for rank in found] == [33, 0, 33, 0]
    assert [rank["ep2 logp"].numel() for rank in found] == [33, 0, 0, 0]
    assert found[0]["ep2"]["actor/grad_norm"] > 0

"""Checkpoints: the same layout goes on bit for bit, another one up to rounding.

Two updates follow every load: a wrong step count or moment of the optimizer shows in the second.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from rlcore.config.schema import LoraConfig
from rlcore.hf.config import HFConfig
from rlcore.hf.lora import num_adapter_parameters
from rlcore.hf.names import expected
from rlcore.hf.weights import read_folder
from rlcore.mcore import export
from rlcore.mcore.bridge import RandomWeights
from rlcore.utils.errors import ConfigError
from tests import kit

pytestmark = pytest.mark.ranks(2)

DIST = {"distributed_optimizer": True}
ONE_HEAD = {"arch": "qwen2", "sizes": {"num_key_value_heads": 1}}
LORA = {"lora": {"rank": 3}}
LORA_EXPERTS = {"lora": {"rank": 3, "experts": True}, "arch": "qwen3_moe"}
BIASED = {"arch": "glm4_moe"}
SAVED: dict[str, dict[str, Any]] = {
    "tp2": {"layout": {"tp": 2} | DIST},
    "dp2": {"layout": DIST},
    "pp2 vpp2": {"layout": {"pp": 2, "vpp": 2} | DIST},
    "bfloat16": {"layout": DIST, "dtype": "bfloat16"},
    "plain": {"layout": {"tp": 2}},
    "ep2": {"layout": {"ep": 2} | DIST, "arch": "qwen3_moe"},
    "pp2 with a dense layer": {"layout": {"pp": 2} | DIST, "arch": "qwen3_moe_mixed"},
    "tp2 ep2 of routers with biases": {"layout": {"tp": 2, "ep": 2} | DIST} | BIASED,
    "tp2 etp2 of routers with biases": {"layout": {"tp": 2, "etp": 2} | DIST} | BIASED,
    "tp2 of whole experts": {"layout": {"tp": 2} | DIST} | BIASED,
    "etp2": {"layout": {"etp": 2}} | BIASED,
    "cp2": {"layout": {"cp": 2} | DIST},
    "offloaded": {"layout": {"offload_optimizer": True} | DIST},
    "pp2 untied": {"layout": {"pp": 2} | DIST, "arch": "qwen2"},
    "tp2 of one key-value head": {"layout": {"tp": 2} | DIST} | ONE_HEAD,
    "pp2 of 3 and 1 layers": {"layout": {"pp": 2, "pp_layers": (3, 1)} | DIST},
    "tp2 ep2 MLA": {"layout": {"tp": 2, "ep": 2} | DIST, "arch": "deepseek_v3"},
    "LoRA tp2": {"layout": {"tp": 2} | DIST} | LORA,
    "LoRA tp2 ep2": {"layout": {"tp": 2, "ep": 2} | DIST, "dtype": "bfloat16"} | LORA_EXPERTS,
}
RESHARDED: dict[str, dict[str, Any]] = {
    "tp2 to dp2": {"of": "tp2", "layout": DIST},
    "dp2 to pp2": {"of": "dp2", "layout": {"pp": 2} | DIST},
    "pp2 vpp2 to tp2": {"of": "pp2 vpp2", "layout": {"tp": 2} | DIST},
    "pp2 with a dense layer to dp2": {
        "of": "pp2 with a dense layer",
        "layout": DIST,
        "arch": "qwen3_moe_mixed",
    },
    "tp2 etp2 of routers with biases to ep2": {
        "of": "tp2 etp2 of routers with biases",
        "layout": {"ep": 2} | DIST,
    }
    | BIASED,
    "tp2 of whole experts to etp2": {
        "of": "tp2 of whole experts",
        "layout": {"etp": 2} | DIST,
    }
    | BIASED,
    "etp2 to tp2": {"of": "etp2", "layout": {"tp": 2} | DIST} | BIASED,
    "tp2 ep2 of routers with biases to pp2": {
        "of": "tp2 ep2 of routers with biases",
        "layout": {"pp": 2} | DIST,
    }
    | BIASED,
    "cp2 to pp2": {"of": "cp2", "layout": {"pp": 2} | DIST},
    "offloaded to tp2": {"of": "offloaded", "layout": {"tp": 2} | DIST},
    "tp2 to offloaded": {"of": "tp2", "layout": {"offload_optimizer": True} | DIST},
    "plain to dp2": {"of": "plain", "layout": DIST},
    "tp2 to plain": {"of": "tp2", "layout": {}},
    "pp2 untied to tp2": {"of": "pp2 untied", "layout": {"tp": 2} | DIST, "arch": "qwen2"},
    "tp2 ep2 MLA to pp2": {
        "of": "tp2 ep2 MLA",
        "layout": {"pp": 2} | DIST,
        "arch": "deepseek_v3",
    },
    "tp2 of one head to pp2": {"of": "tp2 of one key-value head", "layout": {"pp": 2}} | ONE_HEAD,
    "pp2 of 3 and 1 to 1 and 3": {
        "of": "pp2 of 3 and 1 layers",
        "layout": {"pp": 2, "pp_layers": (1, 3)} | DIST,
    },
    "LoRA tp2 to pp2": {"of": "LoRA tp2", "layout": {"pp": 2} | DIST} | LORA,
}
ALONE: dict[str, dict[str, Any]] = {
    "tp2 to one": {"of": "tp2", "layout": DIST},
    "plain to one": {"of": "plain", "layout": {}},
    "ep2 to one": {"of": "ep2", "layout": DIST, "arch": "qwen3_moe"},
    "tp2 of one head to one": {"of": "tp2 of one key-value head", "layout": DIST} | ONE_HEAD,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(folder: Path) -> list[dict[str, Any]]:
    args = {"folder": str(folder), "cases": SAVED}
    return kit.run_ranks(2, "tests.ranks.learner_ranks:saved", args)


@pytest.fixture(scope="module")
def resumed(folder: Path, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In fresh processes."""
    same = {name: case | {"of": name} for name, case in SAVED.items()}
    args = {"folder": str(folder), "cases": same | RESHARDED}
    return kit.run_ranks(2, "tests.ranks.learner_ranks:resumed", args)


@pytest.fixture(scope="module")
def alone(folder: Path, saved: list[dict[str, Any]]) -> dict[str, Any]:
    args = {"folder": str(folder), "cases": ALONE}
    return kit.run_ranks(1, "tests.ranks.learner_ranks:resumed", args)[0]


@pytest.mark.parametrize("case", SAVED)
def test_an_asynchronous_save_is_of_the_state_before_further_updates(
    saved: list[dict[str, Any]], folder: Path, case: str
) -> None:
    names = [set(rank[case]["same files"]) for rank in saved]
    assert not names[0] & names[1]
    assert names[0] | names[1] == {path.name for path in (folder / case).iterdir()}
    for rank in saved:
        assert rank[case]["same files"] and all(rank[case]["same files"].values())
        assert rank[case]["checksums"]


@pytest.mark.parametrize("case", SAVED)
def test_all_ranks_hear_that_one_has_no_memory_for_the_copy(
    saved: list[dict[str, Any]], case: str
) -> None:
    here, there = (rank[case]["no memory"] for rank in saved)
    assert "GB (on another rank, see its log)" in here and "GB (CUDA error: out of" in there


@pytest.mark.parametrize("case", SAVED)
def test_the_same_layout_resumes_bit_for_bit(
    saved: list[dict[str, Any]], resumed: list[dict[str, Any]], case: str
) -> None:
    for straight, again in zip(saved, resumed, strict=True):
        assert again[case]["version at load"] == 2
        assert again[case]["version"] == straight[case]["version"] == 4
        assert again[case]["metrics"] == straight[case]["metrics"]
        kit.assert_bitwise(again[case]["weights"], straight[case]["weights"])


@pytest.mark.parametrize("case", SAVED)
def test_the_weights_of_a_checkpoint_are_those_that_its_ranks_export(
    folder: Path, saved: list[dict[str, Any]], case: str
) -> None:
    whole = HFConfig.from_folder(f"{folder}_hf/{case}")
    exported = dict(read_folder(f"{folder}_hf/{case}", whole))
    assert len(list(Path(f"{folder}_hf", case).glob("*.safetensors"))) > 4
    dtype = getattr(torch, SAVED[case].get("dtype", "float32"))
    lora, base = LoraConfig(**SAVED[case].get("lora", {})), RandomWeights(whole, 3)
    found = export.read(folder / case, whole, dtype, exported.keys(), lora, base)
    kit.assert_bitwise(dict(found), exported)


@pytest.mark.parametrize("case", [case for case in SAVED if "lora" in SAVED[case]])
def test_a_checkpoint_with_adapters_has_nothing_else(
    folder: Path, saved: list[dict[str, Any]], case: str
) -> None:
    """No weights of the base, and every value once."""
    lora, hf = LoraConfig(**SAVED[case]["lora"]), HFConfig.from_folder(f"{folder}_hf/{case}")
    count = sum(
        math.prod(file.get_slice(key).get_shape())
        for path in (folder / case).glob("*.safetensors")
        for file in [safe_open(path, "pt")]
        for key in file.keys()  # noqa: SIM118 - safe_open is no mapping
    )
    assert count == 3 * num_adapter_parameters(hf, lora)
    with pytest.raises(ConfigError, match="was saved with rank 3 .*, but this model has none; set"):
        dict(export.read(folder / case, hf, torch.float32, set()))


def test_only_wanted_tensors_are_read(folder: Path, saved: list[dict[str, Any]]) -> None:
    hf = HFConfig.from_folder(f"{folder}_hf/tp2")
    name = "model.layers.1.self_attn.k_proj.weight"
    found = dict(export.read(folder / "tp2", hf, torch.float32, {name}))
    read = {key for key, tensor in found.items() if not tensor.is_meta}
    assert read == {name.replace("k_proj", f"{x}_proj") for x in "qkv"}
    assert {key: tensor.shape for key, tensor in found.items()} == expected(hf)


def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = str(tmp_path / "file/hf")
    errors = kit.run_ranks(2, "tests.ranks.learner_ranks:cannot_export", {"path": path})
    assert errors[0].startswith(f"{path}: could not be written")
    assert errors[1] == f"{path}: another rank could not write its shards; see its log"


def test_a_foreign_file_is_refused_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    errors = kit.run_ranks(2, "tests.ranks.learner_ranks:cannot_export", {"path": str(tmp_path)})
    assert errors[0] == errors[1]
    assert errors[0].startswith(f"{tmp_path}: has notes.txt, which is not of an earlier export")


def test_a_checkpoint_that_cannot_be_renamed_is_an_error_on_every_rank(tmp_path: Path) -> None:
    args = {"folder": str(tmp_path)}
    found = kit.run_ranks(2, "tests.ranks.learner_ranks:cannot_publish", args, timeout_s=50)
    errors, files = zip(*found, strict=True)
    assert files == ([], [])
    assert "over quota" in errors[0] and "another rank could not write; see its log" in errors[1]


def test_a_checkpoint_of_another_vocabulary_size_is_refused(tmp_path: Path) -> None:
    args = {"folder": str(tmp_path)}
    for found in kit.run_ranks(2, "tests.ranks.learner_ranks:other_vocabularies", args):
        assert found.pop("53") == found.pop("older") == ""
        for size, said in found.items():
            assert f"with vocab_size 53, but this model has {size}; set model.path" in said


@pytest.mark.parametrize("case", RESHARDED)
def test_another_layout_resumes_up_to_rounding(
    saved: list[dict[str, Any]], resumed: list[dict[str, Any]], case: str
) -> None:
    straight, again = saved[0][RESHARDED[case]["of"]], resumed[0][case]
    kit.assert_close_named(again["metrics"], straight["metrics"])
    kit.assert_close_named(again["weights"], straight["weights"])


@pytest.mark.parametrize("case", ALONE)
def test_one_rank_resumes_what_two_saved(
    saved: list[dict[str, Any]], alone: dict[str, Any], case: str
) -> None:
    straight, again = saved[0][ALONE[case]["of"]], alone[case]
    kit.assert_close_named(again["metrics"], straight["metrics"])
    kit.assert_close_named(again["weights"], straight["weights"])


def test_nothing_but_the_checkpoints_is_left(folder: Path, resumed: list[dict[str, Any]]) -> None:
    assert sorted(p.name for p in folder.iterdir()) == sorted(SAVED)

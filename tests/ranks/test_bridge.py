"""The bridge between Megatron and Hugging Face, in one gang of four ranks for every layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.hf.config import HFConfig
from tests import kit
from tests.ranks.bridge_ranks import CASES, LAYOUTS

pytestmark = pytest.mark.ranks(4)

TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6], [5], [3, 5, 8, 9, 7], [9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8]]
ALL = [(case, layout) for case in CASES for layout in LAYOUTS[case]]


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of the models, and what each rank found by check."""
    folder = tmp_path_factory.mktemp("bridge")
    (folder / "tokens.json").write_text(json.dumps(TOKENS))
    for case in CASES:
        kit.tiny_hf_folder(folder / case, case)
    return folder, kit.run_ranks(4, "tests.ranks.bridge_ranks:bridge", {"folder": str(folder)})


@pytest.fixture(scope="module")
def found(gang: tuple[Path, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return gang[1]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(
    gang: tuple[Path, list[dict[str, Any]]], case: str
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(gang[0] / case, attn_implementation="eager").eval()
    with torch.no_grad():
        theirs = torch.cat([model(torch.tensor([row])).logits[0] for row in TOKENS])
    assert theirs.shape == (sum(map(len, TOKENS)), 53) and theirs.abs().max() > 1
    for rank in gang[1]:
        assert (rank[f"{case} logits"] - theirs).abs().max() <= 1e-5


@pytest.mark.parametrize(("case", "layout"), ALL)
def test_export_equals_the_loaded_file_bitwise_on_every_rank(
    found: list[dict[str, Any]], case: str, layout: str
) -> None:
    for rank in found:
        assert rank[f"{case} {layout} in order"]
        assert rank[f"{case} {layout}"] == rank[case]


@pytest.mark.parametrize("case", ["qwen2", "qwen3"])
def test_ranks_that_share_a_key_value_head_have_it_and_their_own_queries(
    found: list[dict[str, Any]], case: str
) -> None:
    """And nothing else: a view of the group's heads would keep them all in memory."""
    query, key, value = found[0][f"{case} dp4 heads"][3:]
    assert query.shape[2] == 4 and key.shape[2] == value.shape[2] == 2
    for number, rank in enumerate(found):
        *stored, own, shared, its_value = rank[f"{case} tp4 of two key-value heads heads"]
        group = number // 2
        ours = {"q": own, "k": shared, "v": its_value}
        theirs = {
            "q": query[:, :, number : number + 1],
            "k": key[:, :, group : group + 1],
            "v": value[:, :, group : group + 1],
        }
        kit.assert_close_named(ours, theirs, atol=1e-6)
        assert [tensor.numel() for tensor in stored] == [t.numel() for t in ours.values()]


@pytest.mark.parametrize("case", CASES)
def test_random_weights_are_the_same_under_every_layout(
    found: list[dict[str, Any]], case: str
) -> None:
    digests = {rank[f"{case} {layout} random"] for rank in found for layout in LAYOUTS[case]}
    assert len(digests) == 1 and digests != {found[0][case]}


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_weights_are_rounded_to_the_models_dtype_once(
    found: list[dict[str, Any]], dtype: str
) -> None:
    for rank in found:
        assert rank[f"exported {dtype}"] == rank[f"file in {dtype}"]


def test_bundles_of_one_tensor_export_the_same(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["one by one"] == rank["file in float64"]


def test_a_folder_saved_from_four_ranks_is_complete(
    gang: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, found = gang
    assert found[0]["saved"] == found[0]["file in float64"]
    assert HFConfig.from_folder(folder / "saved").dtype == "float64"
    assert not (folder / "saved.part").exists()

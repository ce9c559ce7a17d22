"""The float32 bias of routers stays float32 on every way out of a bfloat16 model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.cli import eval as evaluation
from rlcore.config.schema import LoraConfig
from rlcore.hf import lora as peft
from rlcore.hf.config import HFConfig
from rlcore.hf.names import EXPERT_BIAS, expected
from rlcore.hf.weights import read_folder
from rlcore.mcore import export
from rlcore.sync.base_weights import BaseWeights
from tests import kit

LORA = LoraConfig(rank=2)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kit.tiny_hf_folder(tmp_path_factory.mktemp("model"), "glm4_moe")


def evaluated(folder: Path, hf: HFConfig, monkeypatch: Any) -> Any:
    return evaluation.Weights(hf, folder, None, "bfloat16", CPU).export()


def exported(folder: Path, hf: HFConfig, monkeypatch: Any) -> Any:
    """The export of a checkpoint whose adapters are all 0."""
    monkeypatch.setattr(export, "_read", lambda shards, name, shape: torch.zeros(shape))
    base = SimpleNamespace(get=dict(read_folder(folder, hf)).__getitem__)
    return export._merged(None, hf, torch.bfloat16, expected(hf).keys(), LORA, base)  # type: ignore


def sent(folder: Path, hf: HFConfig, monkeypatch: Any) -> Any:
    base = BaseWeights(folder, hf, LORA, dtype=torch.bfloat16, device=CPU)
    shapes = peft.shapes(hf, LORA).items()
    return base.merged({name: torch.zeros(shape).bfloat16() for name, shape in shapes})


@pytest.mark.parametrize("way", [evaluated, exported, sent])
def test_the_bias_is_not_rounded(way: Any, folder: Path, monkeypatch: Any) -> None:
    hf = HFConfig.from_folder(folder)
    want: dict[str, Tensor] = dict(read_folder(folder, hf))
    found = dict(way(folder, hf, monkeypatch))
    assert found.keys() == want.keys()
    biases = [name for name in want if name.endswith(EXPERT_BIAS)]
    assert biases and all(torch.equal(found[name], want[name]) for name in biases)
    assert all(not torch.equal(want[n], want[n].bfloat16().float()) for n in biases)
    assert {found[n].dtype for n in want.keys() - set(biases)} == {torch.bfloat16}

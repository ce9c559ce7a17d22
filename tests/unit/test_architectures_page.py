"""ARCHITECTURES.md: its table lists what is supported, and its steps add an architecture."""

import re
from pathlib import Path
from textwrap import dedent

import pytest

from rlcore.hf import architectures, config
from rlcore.hf.architectures import ARCHITECTURES, BY_TYPE, Architecture
from rlcore.hf.config import HFConfig
from rlcore.utils.errors import ConfigError
from tests import kit
from tests.unit.test_mcore_transformers import CASES, differences

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "rlcore/hf/ARCHITECTURES.md").read_text()


def test_the_table_has_every_architecture() -> None:
    rows = re.findall(r"^\| `(\w+ForCausalLM)` \|", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(ARCHITECTURES)


def test_every_architecture_is_compared_with_transformers() -> None:
    compared = {HFConfig.from_dict(kit.tiny_config(arch)).arch for arch, _ in CASES.values()}
    assert compared == BY_TYPE.keys()


def test_every_file_and_name_of_the_steps_exists() -> None:
    steps = PAGE[PAGE.index("## Add an architecture") :]
    files = set(re.findall(r"`((?:rlcore|tests|recipes)/[\w./]+)`", steps))
    assert len(files) > 10
    texts = {file: (ROOT / file).read_text() for file in files if (ROOT / file).is_file()}
    assert all((ROOT / file).exists() for file in files)
    for name in re.findall(r"`(\w+)`", steps):
        if name not in ("attention_out_bias",):
            assert any(re.search(rf"\b{name}\b", text) for text in texts.values()), name


def test_the_steps_add_an_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record alone, as the page says: the model then equals transformers'."""
    changes = {"architectures": ["SeedOssForCausalLM"], "attention_bias": True}
    raw = kit.tiny_config("llama") | changes | {"model_type": "seed_oss"}
    raw |= {"attention_out_bias": False, "pad_token_id": None}  # a pad token has no gradient
    with pytest.raises(ConfigError, match="'SeedOssForCausalLM' is not supported; use a model of"):
        HFConfig.from_dict(raw)
    found = re.search(r"^        Architecture\(.*?^        \)", PAGE, re.MULTILINE | re.DOTALL)
    assert found
    record = eval(dedent(found[0]), {"Architecture": Architecture})
    monkeypatch.setitem(ARCHITECTURES, record.class_name, record)
    monkeypatch.setitem(BY_TYPE, record.model_type, record)
    assert config.ARCHITECTURES is architectures.ARCHITECTURES
    assert HFConfig.from_dict(raw).qkv_bias
    assert differences(raw, tmp_path)["log-prob"] < 1e-5

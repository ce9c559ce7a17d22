"""Models that `rlcore tiny` starts from."""

from pathlib import Path

import pytest

from rlcore.cli.tiny import TinyConfig, write_start
from rlcore.hf.config import HFConfig
from rlcore.hf.names import num_parameters
from rlcore.utils.errors import ConfigError


def test_the_experts_of_a_token_have_the_width_of_the_dense_mlp(tmp_path: Path) -> None:
    write_start(TinyConfig(out=tmp_path), tmp_path / "dense")
    write_start(TinyConfig(out=tmp_path, experts=8), tmp_path / "experts")
    dense, moe = (HFConfig.from_folder(tmp_path / name) for name in ("dense", "experts"))
    assert (moe.arch, moe.num_experts, moe.experts_per_token) == ("qwen3_moe", 8, 2)
    assert moe.experts_per_token * moe.moe_intermediate_size == dense.intermediate_size
    width = 3 * dense.hidden_size * dense.intermediate_size
    more = num_parameters(moe) - num_parameters(dense)
    assert more == 3 * (3 * width + 8 * dense.hidden_size)
    write_start(TinyConfig(out=tmp_path, experts=2, experts_per_token=3), tmp_path / "few")
    with pytest.raises(ConfigError, match="num_experts_per_tok 3: must be from 1 to the 2"):
        HFConfig.from_folder(tmp_path / "few")

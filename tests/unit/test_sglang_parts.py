"""What of the SGLang engine needs no SGLang: its stand-ins, its counters, its pins."""

import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rlcore.rollout.sglang_engine.engine import SGLangEngine, _signed
from rlcore.rollout.torch_engine.sampler import GOLDEN
from rlcore.utils.seed import derive
from tests.contracts.engine_contract import HF

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = ROOT / "rlcore/rollout/sglang_engine/cpu"

USE = """
import torchvision
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional
import triton, triton.language as tl
from triton.runtime.jit import JITFunction
assert triton.cdiv(7, 3) == 3 and triton.next_power_of_2(9) == 16
assert InterpolationMode.NEAREST != InterpolationMode.BILINEAR

@triton.autotune(configs=[triton.Config({"BLOCK": 8})], key=["n"])
@triton.jit
def kernel(x, BLOCK: tl.constexpr):
    return x

assert kernel(3, 8) == 3
assert "cpu" not in triton.backends.backends and not isinstance(kernel, JITFunction)
import sgl_kernel
try:
    sgl_kernel.top_k(1)
except NotImplementedError as error:
    assert "sgl_kernel.top_k: there is no CPU version" in str(error)
else:
    raise AssertionError
import torch
assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")
"""


def test_stand_ins_let_kernels_be_declared_and_nothing_be_run():
    env = os.environ | {"PYTHONPATH": str(STAND_INS)}
    done = subprocess.run([sys.executable, "-c", USE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_stand_ins_are_not_seen_by_the_trainer():
    """A torchvision that does nothing would break the model classes of transformers."""
    assert str(STAND_INS) not in sys.path
    assert importlib.util.find_spec("torchvision") is None
    assert importlib.util.find_spec("sgl_kernel") is None


def test_a_seed_and_a_position_give_the_torch_engines_counter():
    for prompt in (1, 7, 40):
        key = derive(3, "sample", f"t1.{prompt}")
        seed = _signed(key + (1 - prompt) * GOLDEN)
        assert -(2**63) <= seed < 2**63
        for count in (0, 1, 1000):
            position = prompt + count - 1  # of the last known token
            assert _signed(seed + position * GOLDEN) == _signed(key + count * GOLDEN)


def test_pins_of_sglang_and_of_torch_are_the_same_for_cuda_and_cpu():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (cuda,) = project["project"]["optional-dependencies"]["sglang"]
    assert cuda in project["tool"]["rlcore"]["sglang-cpu-alone"]
    plugins = project["project"]["entry-points"]["sglang.srt.plugins"]
    module, _, function = plugins["rlcore"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize(
    "settings, word",
    [
        ({"max_running": 0}, "max_running 0"),
        ({"cache_tokens": 1}, "cache_tokens 1"),
        ({"tp": 4, "nnodes": 3, "dist_init_addr": "127.0.0.1:1"}, "3 ranks share"),
        ({"tp": 2, "nnodes": 2}, "where they meet"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_starts(settings, word):
    with pytest.raises(ValueError, match=word):
        SGLangEngine(HF, max_model_tokens=64, **settings)

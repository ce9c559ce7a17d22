"""Which flash attention runs, and what FA4 is given."""

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.algos.base import AlgoConfig
from rlcore.config import rules
from rlcore.config.schema import Config, ModelConfig, TrainConfig
from rlcore.mcore import attention, flash
from rlcore.trainer import sync_loop

CUDA = torch.device("cuda:0")


@pytest.fixture
def fa4(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A stand-in for flash-attn-4 on a Hopper GPU; the list has the arguments of its calls."""
    calls: list[dict[str, Any]] = []

    def call(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, None]:
        calls.append(given)
        return q * 2, None

    package, module = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    module.flash_attn_varlen_func = call  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    flash._load_fa4.cache_clear()
    yield calls
    flash._load_fa4.cache_clear()


def choose(backend: str = "auto", dtype: torch.dtype = torch.bfloat16, head_dim: int = 128) -> Any:
    return flash.choose(backend, CUDA, dtype, head_dim)


def test_fa4_runs_where_it_is_installed(fa4: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rlcore"):
        assert choose() is flash.fa4
    assert "attention: FA4" in caplog.text


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ({"backend": "fa2"}, "set by train.attention_backend"),
        ({"head_dim": 192}, "here 192"),
    ],
)
def test_fa2_runs_otherwise_and_says_why(
    fa4: Any, caplog: pytest.LogCaptureFixture, case: dict[str, Any], why: str
) -> None:
    with caplog.at_level(logging.INFO, "rlcore"):
        assert choose(**case) is flash.fa2
    assert "FA2" in caplog.text and why in caplog.text


def test_an_older_gpu_runs_fa2(fa4: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert choose() is flash.fa2


def test_without_the_package_the_line_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    flash._load_fa4.cache_clear()
    with caplog.at_level(logging.INFO, "rlcore"):
        assert choose() is flash.fa2
    assert "tools/setup.sh --sglang" in caplog.text


@pytest.mark.parametrize(
    "case", [{"dtype": torch.float32}, {"head_dim": 12}, {"head_dim": 264}], ids=str
)
def test_other_tensors_are_padded(fa4: Any, case: dict[str, Any]) -> None:
    assert choose(**case) is None
    assert flash.choose("auto", torch.device("cpu"), torch.bfloat16, 128) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [128, 12, 264])
@pytest.mark.parametrize("cuda", [False, True])
def test_the_plan_of_ranks_shares_prefixes_where_flash_attention_runs(
    fa4: Any, monkeypatch: pytest.MonkeyPatch, dtype: Any, head_dim: int, cuda: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    runs = choose(dtype=getattr(torch, dtype), head_dim=head_dim) is not None

    def shares(train: TrainConfig) -> bool:
        cfg = Config(algo=AlgoConfig(), model=ModelConfig(dtype=dtype), train=train)
        run: Any = SimpleNamespace(
            cfg=cfg, hf=SimpleNamespace(head_dim=head_dim), step=1, num_updates=1
        )
        found = sync_loop.plan_of(run, [], 1).shares_prefix
        assert found == rules.shares_prefix(train, dtype, head_dim, cuda=cuda)
        return found

    assert shares(TrainConfig()) == (runs or not cuda)
    assert shares(TrainConfig(share_prefix="true"))
    assert not shares(TrainConfig(share_prefix="false"))
    assert not shares(TrainConfig(transformer_impl="te"))


@pytest.mark.parametrize("deterministic", [False, True])
def test_fa4_gets_the_boundaries_of_the_plan(fa4: Any, deterministic: bool) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    q, k = torch.ones(4, 4, 8), torch.ones(8, 2, 8)
    made = attention.plan([8], cp=2, cp_rank=1, flash=flash.fa4)
    torch.use_deterministic_algorithms(deterministic)
    try:
        out = attention.attend(q, k, k, made, 0.5)
    finally:
        torch.use_deterministic_algorithms(before)
    assert torch.equal(out, q * 2)
    (given,) = fa4
    assert given.pop("cu_seqlens_q").tolist() == [0, 2, 4]
    assert given.pop("cu_seqlens_k").tolist() == [0, 4, 10]
    assert given == {
        "max_seqlen_q": 2,
        "max_seqlen_k": 6,
        "softmax_scale": 0.5,
        "causal": True,
        "deterministic": deterministic,
    }

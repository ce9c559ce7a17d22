"""Experts in one product equal Megatron's, which run one after the other."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from rlcore.mcore import build, experts, wgrad
from tests import kit
from tests.ranks import learner_ranks as ranks

BOUNDS = [3, 3, 10, 11]
"""The second expert has no token."""


def products(fuses: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Input, output, and gradients of inputs and weights: grouped, and one after the other."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(11, 8, generator=g, requires_grad=True)
    weights = [torch.randn(12, 8, generator=g, requires_grad=True) for _ in BOUNDS]
    grad = torch.randn(11, 12, generator=g)
    offsets = torch.tensor(BOUNDS, dtype=torch.int32)
    grouped = experts._Products.apply(x, offsets, BOUNDS, fuses, *weights)
    starts = [0, *BOUNDS[:-1]]
    parts = [x[a:b] @ w.T for a, b, w in zip(starts, BOUNDS, weights, strict=True)]
    one = torch.cat(parts)
    found = torch.autograd.grad(grouped, [x, *weights], grad, allow_unused=fuses)
    return [grouped, *found], [one, *torch.autograd.grad(one, [x, *weights], grad)], weights


def test_products_and_gradients_are_those_of_each_expert() -> None:
    grouped, one, _ = products(False)
    for mine, theirs in zip(grouped, one, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_fused_gradients_of_weights_are_added_to_the_main_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, where torch's `addmm` adds to float32."""
    monkeypatch.setattr(wgrad, "add", lambda x, grad, total: total.add_(grad.t() @ x))
    main: list[Tensor] = []
    apply = experts._Products.apply

    def with_main(x: Tensor, offsets: Tensor, bounds: Any, fuses: bool, *weights: Tensor) -> Tensor:
        for weight in weights:
            weight.main_grad = torch.full_like(weight, 2.0)  # type: ignore[attr-defined]
            main.append(weight.main_grad)  # type: ignore[attr-defined]
        return apply(x, offsets, bounds, fuses, *weights)

    monkeypatch.setattr(experts._Products, "apply", with_main)
    grouped, one, weights = products(True)
    torch.testing.assert_close(grouped[1], one[1])
    assert grouped[2:] == [None] * len(BOUNDS)
    assert all(weight.grad_added_to_main_grad for weight in weights)  # type: ignore[attr-defined]
    for mine, theirs in zip(main, one[2:], strict=True):
        torch.testing.assert_close(mine, theirs + 2)


@pytest.mark.parametrize("fuses", [False, True])
def test_frozen_weights_get_no_gradient_and_need_no_main_one(fuses: bool) -> None:
    """As with `--lora.rank` and without `--lora.experts`."""
    x, weights = torch.randn(6, 8, requires_grad=True), torch.randn(3, 4, 8)
    ends = torch.tensor([1, 3, 6], dtype=torch.int32)
    found = experts._Products.apply(x, ends, ends.tolist(), fuses, *weights.unbind())
    found.sum().backward()
    of_each = weights.sum(1).repeat_interleave(torch.tensor([1, 2, 3]), 0)
    torch.testing.assert_close(x.grad, of_each)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_updates_with_grouped_experts_are_those_of_megatrons(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for is_grouped in (True, False):
        if not is_grouped:
            monkeypatch.setattr(build, "experts_of", lambda *_: SequentialMLP)
        learner = ranks.make({}, arch="qwen3_moe", dtype=dtype)
        kinds = {type(m) for model in learner._models for m in model.modules()}
        assert (experts.GroupedExperts in kinds) is is_grouped
        found.append(ranks.observe(learner))
        learner.close()
    grouped, one = found
    for name, value in one.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(grouped[name], value, msg=name)
    kit.assert_close_named(grouped["weights"], one["weights"], atol=1e-6)


@pytest.mark.parametrize(
    ("ffn", "etp", "groups", "why"),
    [
        (10, 1, True, "rows of 32 or 10 torch.float32 are no"),
        (20, 2, True, "rows of 32 or 10 torch.float32 are no"),
        (24, 1, False, "torch has no grouped"),
    ],
)
def test_why_experts_run_one_after_the_other_is_said(
    ffn: int,
    etp: int,
    groups: bool,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(experts, "can_group", lambda *_: groups)
    config: Any = SimpleNamespace(
        hidden_size=32,
        moe_ffn_hidden_size=ffn,
        expert_tensor_parallel_size=etp,
        params_dtype=torch.float32,
    )
    with caplog.at_level(logging.INFO, "rlcore"):
        assert experts.experts_of(config, torch.device("cpu")) is SequentialMLP
    assert f"experts: one by one, since {why}" in caplog.text


def test_torch_without_grouped_products_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert experts.can_group.__wrapped__(device, torch.float32)
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    assert not experts.can_group.__wrapped__(device, torch.float32)

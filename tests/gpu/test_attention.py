"""Attention on a GPU: flash attention on packed tokens against padded sequences in float32."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcore.mcore import attention, flash, microbatch, prefix_tree
from tests.gpu import side

pytestmark = pytest.mark.gpu

LENGTHS = [300, 37, 5, 64, 1, 513, 129, 20, 2]
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def _mode():
    """torch's deterministic mode as it is before a learner is made, and again afterwards."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(before, warn_only=True)


Attend = Callable[..., Tensor]


@pytest.fixture(params=["fa2", "auto"])
def attend(request: pytest.FixtureRequest) -> Attend:
    """Attention of q, k, v over sequences of these lengths, as a learner with this backend."""
    if request.param == "auto":
        if side.DEVICE.type == "cpu":
            pytest.skip("on a CPU, `auto` and `fa2` are the same padded attention")
        if lacks := flash._lacks_fa4(side.DEVICE, 128):
            pytest.skip(f"`auto` is `fa2` here: {lacks}")

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: list[int],
        scale: float | None = None,
        **given: Any,
    ) -> Tensor:
        kernel = flash.choose(request.param, side.DEVICE, q.dtype, q.size(-1))
        half = q.dtype is not torch.float32 and q.size(-1) % 8 == 0
        want = flash.fa2 if request.param == "fa2" else flash.fa4
        assert kernel is (want if half and side.DEVICE.type == "cuda" else None)
        made = attention.plan(lengths, flash=kernel, **given)
        made = microbatch._each_tensor(made, lambda x: x.to(side.DEVICE))
        return attention.attend(q, k, v, made, scale)

    return call


def heads(total: int, count: int, dim: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(total, count, dim, generator=generator).to(side.DEVICE, dtype)


def inputs(dtype: torch.dtype, total: int, sizes: tuple[int, int, int]) -> list[Tensor]:
    """q, k, v that want gradients."""
    count, groups, dim = sizes
    made = [heads(total, n, dim, dtype, seed) for seed, n in enumerate((count, groups, groups))]
    return [x.requires_grad_() for x in made]


def exact(tensors: list[Tensor]) -> list[Tensor]:
    return [x.detach().float().requires_grad_() for x in tensors]


SIZES = [(4, 4, 64), (8, 2, 64), (8, 1, 128), (4, 2, 16)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_packed_attention_in_half_precision_equals_the_padded_one_in_float32(
    dtype: torch.dtype, sizes: tuple[int, int, int], attend: Attend
) -> None:
    total = sum(LENGTHS)
    tensors = inputs(dtype, total, sizes)
    precise = exact(tensors)
    grad = heads(total, sizes[0], sizes[2], dtype, 7)
    ours = attend(*tensors, LENGTHS)
    want = attend(*precise, LENGTHS)
    assert side.apart(ours, want) < LIMITS[dtype]
    for a, b in zip(ours.split(LENGTHS), want.split(LENGTHS), strict=True):
        assert (a.float() - b).abs().max() < 4 * LIMITS[dtype], len(a)
    grads = torch.autograd.grad(ours, tensors, grad)
    wants = torch.autograd.grad(want, precise, grad.float())
    for name, a, b in zip("qkv", grads, wants, strict=True):
        assert a.dtype is dtype
        assert side.apart(a, b) < 2 * LIMITS[dtype], name
        for x, y in zip(a.split(LENGTHS), b.split(LENGTHS), strict=True):
            assert (x.float() - y).abs().max() < 4 * LIMITS[dtype] * b.abs().max(), (name, len(x))


def test_the_scale_is_heeded(attend: Attend) -> None:
    total = sum(LENGTHS)
    tensors = inputs(torch.bfloat16, total, (4, 2, 64))
    ours = attend(*tensors, LENGTHS, 0.5)
    assert side.apart(ours, attend(*exact(tensors), LENGTHS, 0.5)) < 1e-2
    assert side.apart(ours, attend(*tensors, LENGTHS)) > 0.1


@pytest.mark.parametrize("cp", [2, 4])
def test_the_parts_of_context_parallel_ranks_make_the_whole(cp: int, attend: Attend) -> None:
    lengths = [-(-n // (2 * cp)) * 2 * cp for n in LENGTHS]
    total = sum(lengths)
    q, k, v = tensors = inputs(torch.bfloat16, total, (4, 2, 64))
    precise = exact(tensors)
    grad = heads(total, 4, 64, torch.bfloat16, 7)
    want = attend(*precise, lengths)
    ours = torch.zeros_like(q)
    for rank in range(cp):
        index = attention.local_positions(lengths, cp, rank)[0].to(side.DEVICE)
        part = attend(q[index], k, v, lengths, cp=cp, cp_rank=rank)
        ours = ours.index_copy(0, index, part)
    assert side.apart(ours, want) < 1e-2
    grads = torch.autograd.grad(ours, tensors, grad)
    wants = torch.autograd.grad(want, precise, grad.float())
    for name, a, b in zip("qkv", grads, wants, strict=True):
        assert side.apart(a, b) < 2e-2, name


def test_attention_over_a_prefix_tree(attend: Attend) -> None:
    prompts, responses = (300, 41), (150, 9, 64, 1, 33)
    rows = [[*range(p), 1000 + i, *range(n)] for p in prompts for i, n in enumerate(responses)]
    lengths = [len(row) for row in rows]
    trained = [np.arange(len(row)) >= len(row) - responses[i % 5] for i, row in enumerate(rows)]
    tree = prefix_tree.build(np.concatenate(rows), np.concatenate(trained), lengths)
    sizes = [node.size for node in tree.nodes]
    assert sum(sizes) < 0.5 * sum(lengths)
    tensors = inputs(torch.bfloat16, sum(sizes), (8, 2, 64))
    precise = exact(tensors)
    grad = heads(sum(sizes), 8, 64, torch.bfloat16, 7)
    ours = attend(*tensors, sizes, tree=tree)
    want = attend(*precise, sizes, tree=tree)  # tests/unit/test_mcore_prefix_tree.py
    assert side.apart(ours, want) < 1e-2
    grads = torch.autograd.grad(ours, tensors, grad)
    wants = torch.autograd.grad(want, precise, grad.float())
    for name, a, b in zip("qkv", grads, wants, strict=True):
        assert side.apart(a, b) < 2e-2, name


@pytest.mark.parametrize("sizes", [(8, 8, 64), (8, 2, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_have_the_same_bits_every_time(
    dtype: torch.dtype, sizes: tuple[int, int, int], attend: Attend
) -> None:
    lengths = [2048, 1500, 700, 64, 3]  # many blocks add into one gradient
    total = sum(lengths)
    grad = heads(total, sizes[0], sizes[2], dtype, 7)
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = []
    for _ in range(4):
        tensors = inputs(dtype, total, sizes)
        out = attend(*tensors, lengths)
        found.append([out.detach(), *torch.autograd.grad(out, tensors, grad)])
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(again, found[0], strict=True))


def test_the_reproducible_way_changes_the_values_only_in_the_last_digits(attend: Attend) -> None:
    total = sum(LENGTHS)
    grad = heads(total, 4, 64, torch.bfloat16, 7)
    found = {}
    for mode in (False, True):
        torch.use_deterministic_algorithms(mode, warn_only=True)
        tensors = inputs(torch.bfloat16, total, (4, 2, 64))
        out = attend(*tensors, LENGTHS)
        found[mode] = [out, *torch.autograd.grad(out, tensors, grad)]
    for a, b in zip(found[True], found[False], strict=True):
        assert side.apart(a, b) < 2e-3


def test_without_gradients_the_bits_are_those_with_them(attend: Attend) -> None:
    total = sum(LENGTHS)
    tensors = inputs(torch.bfloat16, total, (4, 2, 64))
    torch.use_deterministic_algorithms(True, warn_only=True)
    with_them = attend(*tensors, LENGTHS)
    with torch.no_grad():
        assert torch.equal(attend(*tensors, LENGTHS), with_them)


def test_head_sizes_that_the_kernel_does_not_take_are_padded_instead(attend: Attend) -> None:
    total = sum(LENGTHS)
    tensors = inputs(torch.bfloat16, total, (4, 2, 12))
    ours = attend(*tensors, LENGTHS)
    assert side.apart(ours, attend(*exact(tensors), LENGTHS)) < 1e-2

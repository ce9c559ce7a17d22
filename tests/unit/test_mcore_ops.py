"""Norm, activation, RoPE and attention against slow references, in float64."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlcore.hf.rope import inverse_frequencies
from rlcore.hf.rope_settings import Rope
from rlcore.mcore import attention, rope
from rlcore.mcore.activation import SwiGLU
from rlcore.mcore.norm import RMSNorm, rms_norm

LENGTHS = [37, 5, 64, 21, 1, 20, 19, 2]


def randn(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_(grad)


def test_rms_norm_is_torchs_and_its_gradient_is_right() -> None:
    x, weight = randn(3, 2, 8), randn(8)
    assert torch.allclose(rms_norm(x, weight, 1e-6), F.rms_norm(x, (8,), weight, 1e-6), atol=1e-12)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-6), (x, weight))


def test_rms_norm_of_a_strided_float32_input_is_within_rounding() -> None:
    x = torch.randn(40, 3, 64, generator=torch.Generator().manual_seed(1)).transpose(0, 1)
    weight = torch.rand(64)
    want = F.rms_norm(x.double(), (64,), weight.double(), 1e-6)
    with torch.no_grad():
        assert (rms_norm(x, weight, 1e-6) - want).abs().max() < 2e-6
    assert (rms_norm(x.requires_grad_(), weight, 1e-6) - want).abs().max() < 2e-6


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_norms_weight_says_whether_sequence_parallel_sums_it(sequence_parallel: bool) -> None:
    config = SimpleNamespace(params_dtype=torch.float32, sequence_parallel=sequence_parallel)
    assert RMSNorm(config, 8).weight.sequence_parallel is sequence_parallel


def test_swiglu_is_silu_of_gate_times_up() -> None:
    x = randn(5, 12)
    assert torch.allclose(SwiGLU()(x), F.silu(x[:, :6]) * x[:, 6:])
    assert torch.autograd.gradcheck(SwiGLU(), (x,))


# ---- RoPE


SCALED = Rope(theta=500.0, kind="llama3", factor=8.0, original_max_position_embeddings=64)


def test_llama3_slows_slow_frequencies_and_leaves_fast_ones() -> None:
    # Whether it is transformers' own is seen in tests/ranks/test_bridge.py, on logits.
    plain = inverse_frequencies(64, Rope(theta=500.0))
    scaled = inverse_frequencies(64, SCALED)
    wavelength = 2 * torch.pi / plain
    fast, slow = wavelength < 64 / 4, wavelength > 64 / 1
    assert torch.equal(scaled[fast], plain[fast])
    assert torch.allclose(scaled[slow], plain[slow] / 8)
    between = ~(fast | slow)
    assert fast.any() and slow.any() and between.any()
    assert (scaled[between] < plain[between]).all() and (scaled[between] > plain[between] / 8).all()


def test_rotation_equals_megatrons_packed_rope() -> None:
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd

    inverse = inverse_frequencies(16, Rope(theta=1e4))
    angles = torch.arange(64.0)[:, None] * inverse
    table = torch.cat([angles, angles], -1)[:, None, None]
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    x = randn(sum(LENGTHS), 4, 16, grad=False).float()
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    want = _apply_rotary_pos_emb_thd(x, cu, table, cp_group=alone)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    ours = rope.rotate(x, *rope.tables(inverse, positions, torch.float32))
    assert (ours - want).abs().max() < 1e-6
    assert (ours - x).abs().max() > 1


def test_rotations_gradient_is_right() -> None:
    tables = rope.tables(
        inverse_frequencies(8, Rope(theta=1e4)).double(), torch.arange(5), torch.float64
    )
    assert torch.autograd.gradcheck(lambda x: rope.rotate(x, *tables), (randn(5, 2, 8),))


# ---- attention


def one_by_one(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    outs = []
    for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        heads = [x.transpose(0, 1).unsqueeze(0) for x in (a, b, c)]
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        outs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outs)


def test_packed_attention_equals_one_by_one_with_its_gradients() -> None:
    total = sum(LENGTHS)
    q, k, v = randn(total, 4, 8), randn(total, 2, 8, seed=1), randn(total, 2, 8, seed=2)
    grad = randn(total, 4, 8, seed=3, grad=False)
    ours = attention.attend(q, k, v, attention.plan(LENGTHS))
    want = one_by_one(q, k, v, LENGTHS)
    assert torch.allclose(ours, want, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(ours, (q, k, v), grad),
        torch.autograd.grad(want, (q, k, v), grad),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-12)


def test_reproducible_attention_is_the_same_and_leaves_torchs_mode_as_it_was() -> None:
    # What it is for can be seen on a GPU only: tests/gpu/test_attention.py.
    total, made = sum(LENGTHS), attention.plan(LENGTHS)
    q, k, v = randn(total, 4, 8), randn(total, 2, 8, seed=1), randn(total, 2, 8, seed=2)
    grad = randn(total, 4, 8, seed=3, grad=False)
    want = attention.attend(q, k, v, made, 0.3)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        ours = attention._Reproducible.apply(q, k, v, made, 0.3)
        grads = torch.autograd.grad(ours, (q, k, v), grad)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(ours, want)
    for a, b in zip(grads, torch.autograd.grad(want, (q, k, v), grad), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("cp", [2, 3])
def test_the_parts_of_context_parallel_ranks_make_the_whole(cp: int) -> None:
    lengths = [-(-n // (2 * cp)) * 2 * cp for n in LENGTHS]
    total = sum(lengths)
    q, k, v = randn(total, 4, 8), randn(total, 2, 8, seed=1), randn(total, 2, 8, seed=2)
    grad = randn(total, 4, 8, seed=3, grad=False)
    want = one_by_one(q, k, v, lengths)
    ours = torch.zeros_like(want)
    seen = []
    for rank in range(cp):
        index, _ = attention.local_positions(lengths, cp, rank)
        part = attention.attend(q[index], k, v, attention.plan(lengths, cp=cp, cp_rank=rank))
        ours = ours.index_copy(0, index, part)
        seen += index.tolist()
    assert sorted(seen) == list(range(total))
    assert torch.allclose(ours, want, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(ours, (q, k, v), grad),
        torch.autograd.grad(want, (q, k, v), grad),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-12)


def test_zigzag_gives_each_rank_a_chunk_from_both_ends() -> None:
    index, positions = attention.local_positions([8, 4], cp=2, cp_rank=0)
    assert index.tolist() == [0, 1, 6, 7, 8, 11]
    assert positions.tolist() == [0, 1, 6, 7, 0, 3]


def test_buckets_waste_little_on_padding() -> None:
    lengths = [20 + (37 * i) % 120 for i in range(128)]
    made = attention.plan(lengths).padded
    assert made is not None
    padded = sum(bucket.count * bucket.query for bucket in made.buckets)
    assert padded < 1.2 * sum(lengths)
    assert len(made.buckets) < 12

"""The loss's kernels on a GPU against the CPU's code in float64, and their bits from run to run."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.ops import native
from tests.gpu import side

pytestmark = [pytest.mark.gpu, side.needs_kernels]

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SHAPES = [(3, 1, 1), (4, 7, 5), (5, 1003, 1000), (3, 9001, 9000), (2, 151936, 151936)]
"""Rows, width, valid."""
# csrc/loss/policy.h: clips, dual clip, weight cut at 1.5, k3 KL, entropy bonus.
SETTINGS = [0.2, 0.28, 3.0, 1.0, 1.5, 0.0, 0.0, 1.0, 3.0, 0.1, 0.01, 20.0, 0.0]


@pytest.fixture(scope="module")
def ops() -> Any:
    found = native.torch_ops("loss kernels", side.DEVICE.type)
    if found is None:
        pytest.fail(f"the native build has no kernels for {side.DEVICE.type}; see native_build")
    return found


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def real(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def limit(dtype: torch.dtype) -> float:
    """Error of log-prob and entropy, relative to the larger of 1 and the value."""
    return 1e-11 if dtype is torch.float64 else 2e-6


class Run:
    """The ops on one case, on the device or, from the same rounded logits, in float64 on the
    CPU."""

    def __init__(self, ops: Any, dtype: torch.dtype, shape: tuple[int, int, int], on: Any) -> None:
        rows, width, self.valid = shape
        logits = (randn(rows, width, seed=width) * 4).to(dtype)
        if self.valid > 2:
            logits[0, 1] = -math.inf
        tokens = torch.randint(0, self.valid, (rows,), generator=torch.Generator().manual_seed(2))
        if self.valid > 2:
            tokens[0] = 2
        kind = torch.float64 if on == "cpu" else dtype
        self.logits, self.tokens = logits.to(on, kind), tokens.to(on)
        self.ops, self.real = ops, real(kind)
        self.stream = native.stream(self.logits.device)
        self.where = (self.tokens, 0, self.valid, 0.8)

    def empty(self, rows: int) -> Tensor:
        count = len(self.tokens)
        return torch.full((rows, count), math.nan, dtype=self.real, device=self.logits.device)

    def row(self, seed: int, scale: float = 1.0) -> Tensor:
        """[T] numbers that both devices have."""
        return (randn(len(self.tokens), seed=seed) * scale).to(self.logits.device, self.real)

    def stats(self) -> Tensor:
        out = self.empty(4)
        self.ops.row_stats(self.logits, *self.where, out, self.stream)
        return out

    def log_prob_and_entropy(self) -> tuple[Tensor, Tensor]:
        _, total, dot, target = self.stats()
        return target - total.log(), total.log() - dot / total

    def grad(self, out: Tensor) -> Tensor:
        top, total, dot, _ = self.stats()
        lse, entropy = torch.stack([top, total.log()]), total.log() - dot / total
        g, h = self.row(3), self.row(4)
        self.ops.row_grad(self.logits, *self.where, lse, entropy, g, h, out, self.stream)
        return out

    def inputs(self) -> list[Tensor]:
        """Old, sampler's and reference log-probs about the true ones, advantage, weight."""
        count = len(self.tokens)
        logits = self.logits.double()[:, : self.valid] / 0.8
        logp = torch.log_softmax(logits, -1).gather(1, self.tokens[:, None])[:, 0].cpu()
        # Rounded on both sides alike: a clip must not fall between them.
        near = [(logp + randn(count, seed=s) * 0.2).float() for s in (5, 6, 7)]
        weight = torch.ones(count)
        weight[-1] = 0
        made = [*near, randn(count, seed=8).float(), weight]
        return [t.to(self.logits.device, self.real) for t in made]

    def policy_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient, log-prob and entropy, what the policy says of the tokens."""
        logits, stats, out = self.logits.clone(), self.empty(2), self.empty(10)
        given = (*self.where, *self.inputs(), SETTINGS)
        self.ops.policy_rows(logits, *given, stats, out, self.stream)
        return logits, stats, out


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=SHAPES, ids=str)
def pair(ops: Any, dtype: torch.dtype, request: pytest.FixtureRequest) -> tuple[Run, Run]:
    """On the device, and in float64 on the CPU."""
    return Run(ops, dtype, request.param, side.DEVICE), Run(ops, dtype, request.param, "cpu")


def assert_near(found: Tensor, expected: Tensor, error: float) -> None:
    apart = (found.cpu().double() - expected.double()).abs()
    apart = apart / expected.double().abs().clamp(min=1)
    assert apart.max() <= error, f"{apart.max():.1e} > {error:.1e}"


def assert_gradients(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within the rounding of the dtype, and of float32's terms, which may cancel."""
    relative = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(dtype, 5e-6)
    absolute = 1e-5 if dtype is not torch.float64 else 1e-11
    torch.testing.assert_close(found.cpu().double(), expected, rtol=relative, atol=absolute)


def test_log_prob_and_entropy_are_those_of_float64(pair, dtype) -> None:
    here, there = pair
    for found, expected in zip(
        here.log_prob_and_entropy(), there.log_prob_and_entropy(), strict=True
    ):
        assert_near(found, expected, limit(dtype))


def test_gradients_are_those_of_float64_in_place_and_not(pair, dtype) -> None:
    here, there = pair
    expected = there.grad(torch.empty_like(there.logits))
    apart = here.grad(torch.empty_like(here.logits))
    assert_gradients(apart, expected, dtype)
    assert (apart[:, here.valid :] == 0).all()
    assert torch.equal(here.grad(here.logits), apart)


def test_the_policy_on_rows_is_that_of_float64(pair, dtype) -> None:
    here, there = pair
    grad, stats, out = here.policy_rows()
    expected_grad, expected_stats, expected_out = there.policy_rows()
    assert_near(stats, expected_stats, limit(dtype))
    assert_near(out, expected_out, 1e-5 if dtype is not torch.float64 else 1e-10)
    assert_gradients(grad, expected_grad, dtype)
    assert (grad[-1] == 0).all()


def test_bits_are_the_same_from_run_to_run(ops, dtype) -> None:
    run = Run(ops, dtype, (64, 20001, 20000), side.DEVICE)
    first = [run.stats(), run.grad(torch.empty_like(run.logits)), *run.policy_rows()]
    for _ in range(3):
        again = [run.stats(), run.grad(torch.empty_like(run.logits)), *run.policy_rows()]
        for a, b in zip(first, again, strict=True):
            assert torch.equal(a, b)


def test_rows_with_strides_and_odd_starts_have_the_same_bits(ops, dtype) -> None:
    run = Run(ops, dtype, (5, 1003, 1000), side.DEVICE)
    stats, grad = run.stats(), run.grad(torch.empty_like(run.logits))
    wide = torch.full((5, 1010), 3.0, dtype=dtype, device=side.DEVICE)
    wide[:, 1:1004] = run.logits
    run.logits = wide[:, 1:1004]
    for found, expected in zip(run.stats(), stats, strict=True):
        assert_near(found, expected.cpu(), limit(dtype))  # vectors start elsewhere
    assert_gradients(run.grad(torch.empty_like(grad)), grad.cpu().double(), dtype)
    assert_gradients(run.grad(run.logits), grad.cpu().double(), dtype)
    assert (wide[:, 0] == 3).all() and (wide[:, 1004:] == 3).all()


def test_nan_and_infinity_spread_over_their_row_alone(ops, dtype) -> None:
    run = Run(ops, dtype, (4, 9001, 9000), side.DEVICE)
    run.logits[1, 70], run.logits[2, 8999] = math.nan, math.inf
    bad = torch.tensor([False, True, True, False])
    logp, entropy = run.log_prob_and_entropy()
    out = run.grad(torch.empty_like(run.logits))
    for values in (logp, entropy, out.float().sum(1)):
        assert torch.equal(values.isnan().cpu(), bad)


@side.needs_gpu
def test_a_side_stream_is_used(ops, dtype) -> None:
    run = Run(ops, dtype, (64, 20001, 20000), side.DEVICE)
    expected, logits = run.stats(), run.logits  # kept, since only the other stream reads them
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(side.DEVICE)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # the logits come late: only this stream knows when
        run.logits = logits.clone()
        run.stream = native.stream(run.logits.device)
        made = run.stats()
    stream.synchronize()
    assert torch.equal(made, expected)


def test_no_rows_and_no_columns_are_legal(ops, dtype) -> None:
    for rows, width in ((0, 5), (3, 0)):
        run = Run(ops, dtype, (3, 5, 5), "cpu")
        run.logits = torch.empty(rows, width, dtype=dtype, device=side.DEVICE)
        run.tokens = torch.zeros(rows, dtype=torch.int64, device=side.DEVICE)
        run.real, run.where = real(dtype), (run.tokens, 0, width, 1.0)
        run.stream = native.stream(run.logits.device)
        assert run.stats()[1].tolist() == [0.0] * rows


LARGE = (20_000, 152_064)
"""3.04e9 elements, 6.1 GB in bfloat16: indices above 2**31 begin in row 14,122."""


@pytest.mark.parametrize("shape", [(40, 1008), pytest.param(LARGE, marks=side.needs_gpu)], ids=str)
def test_rows_beyond_two_to_the_31_elements_have_the_bits_that_they_have_alone(ops, shape) -> None:
    """All three kernels. Rows of zeros show that every row is read."""
    rows, width = shape
    device, valid, limit = side.DEVICE, width - 5, (1 << 31) // width
    if device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory < 3e10:
        pytest.skip("needs a GPU of 30 GB or more")
    chosen = [row for row in (0, rows // 2, limit, limit + 1, rows - 1) if row < rows]
    logits = torch.zeros(rows, width, dtype=torch.bfloat16, device=device)
    logits[chosen] = (randn(len(chosen), width) * 4).to(logits)
    tokens = (torch.arange(rows) * 7919 % valid).to(device)
    # Old, sampler's and reference log-probs, advantage, weight.
    given = [randn(rows, seed=s).to(device, torch.float32) - 9 * (s < 4) for s in (1, 2, 3, 4, 5)]

    def run(logits: Tensor, tokens: Tensor, given: list[Tensor]) -> list[Tensor]:
        """Statistics, log-prob and entropy, what the policy says; `logits` become a gradient."""
        where, stream = (tokens, 0, valid, 0.8), native.stream(device)
        empty = [torch.full((n, len(tokens)), math.nan, device=device) for n in (4, 2, 10)]
        stats, found, out = empty
        ops.row_stats(logits, *where, stats, stream)
        ops.policy_rows(logits, *where, *given, SETTINGS, found, out, stream)
        lse = torch.stack([stats[0], stats[1].log()])
        ops.row_grad(logits, *where, lse, found[1], given[3], given[4], logits, stream)
        return [*stats, *found, *out]

    few = logits[chosen]
    alone = run(few, tokens[chosen], [x[chosen] for x in given])
    together = run(logits, tokens, given)
    for a, b in zip(together, alone, strict=True):
        assert torch.equal(a[chosen], b) and a.isfinite().all()
    assert torch.equal(logits[chosen], few) and few.any()
    others = torch.ones(rows, dtype=torch.bool, device=device)
    others[chosen] = False
    assert (together[1][others] == valid).all()

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlcore.rollout.torch_engine import sampler
from rlcore.rollout.torch_engine.sampler import (
    GOLDEN,
    MOST_KEPT,
    SamplingTensors,
    few_filters,
    filters,
    inverse_cdf,
    sample,
    uniform,
)


def plain(rows):
    return SamplingTensors(scale=torch.ones(rows), greedy=None, filtered=None, plain=True)


def reference_uniform(counter):
    """splitmix64's finaliser in Python integers."""
    z = counter % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    z ^= z >> 31
    return ((z >> 16) + 0.5) / 2**48


def test_random_numbers_are_splitmix64_bit_for_bit():
    counters = [0, 1, -1, 2**63 - 1, -(2**63), 12345678901234567]
    counters += [(7 * k * GOLDEN + 2**63) % 2**64 - 2**63 for k in range(50)]
    got = uniform(torch.tensor(counters)).tolist()
    assert got == [reference_uniform(c) for c in counters]


def test_random_numbers_of_one_request_are_uniform_and_uncorrelated():
    u = uniform(torch.arange(200_000) * GOLDEN + 99).numpy()
    counts = np.histogram(u, 100, (0, 1))[0]
    chi2 = ((counts - 2000) ** 2 / 2000).sum()
    assert 50 < chi2 < 160  # 99 degrees of freedom
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.01


@pytest.mark.parametrize("vocab", [1, 5, 4096, 4097, 10_000, 151_936])
def test_the_block_search_finds_what_one_long_cdf_finds(vocab):
    gen = torch.Generator().manual_seed(vocab)
    weights = torch.randn(64, vocab, generator=gen).mul(3).exp()
    weights[torch.rand(weights.shape, generator=gen) < 0.5] = 0
    weights[:, 0] += 1e-3
    u = torch.rand(64, generator=gen, dtype=torch.float64)
    token, total = inverse_cdf(weights, u)
    cdf = weights.double().cumsum(-1)
    want = (cdf <= (u * cdf[:, -1])[:, None]).sum(-1)
    assert torch.equal(token, want)
    torch.testing.assert_close(total, cdf[:, -1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("vocab", [7, 5000])
def test_extreme_random_numbers_never_take_an_impossible_token(vocab):
    weights = torch.zeros(4, vocab)
    weights[:, 3] = 0.3
    weights[:, 5] = 1.0
    u = torch.tensor([2.0**-49, 0.5, 1 - 2.0**-49, 0.3 / 1.3], dtype=torch.float64)
    token, _ = inverse_cdf(weights, u)
    assert token[:3].tolist() == [3, 5, 5] and token[3] in (3, 5)


def test_an_unfiltered_row_is_not_moved_by_filtered_mates():
    gen = torch.Generator().manual_seed(0)
    logits, counter = torch.randn(6, 50, generator=gen), torch.arange(6) * 31
    alone, alone_logp = sample(logits.clone(), counter, plain(6))
    mixed = replace(
        plain(6),
        filtered=torch.tensor([1, 4]),
        top_k=torch.tensor([2, 0]),
        top_p=torch.tensor([1.0, 0.1], dtype=torch.float64),
        min_p=torch.tensor([0.0, 0.0], dtype=torch.float64),
    )
    tokens, logps = sample(logits.clone(), counter, mixed)
    rest = [0, 2, 3, 5]
    assert torch.equal(tokens[rest], alone[rest])
    assert torch.equal(logps[rest], alone_logp[rest])
    assert tokens[1] in logits[1].topk(2).indices and tokens[4] == logits[4].argmax()


def test_tiny_temperatures_and_huge_logits_stay_finite():
    logits = torch.tensor([[1e30, 0.0, -1e30], [5.0, 4.999, 0.0]])
    settings = replace(plain(2), scale=torch.tensor([1.0, 1e6]), plain=False)
    tokens, logps = sample(logits, torch.tensor([1, 2]), settings)
    assert tokens.tolist() == [0, 0] and torch.isfinite(logps).all()


def test_logits_that_are_not_finite_show_in_the_log_prob():
    for bad in (float("nan"), float("inf")):
        logits = torch.tensor([[0.0, bad, 1.0]])
        _, logps = sample(logits, torch.tensor([1]), plain(1))
        assert not torch.isfinite(logps).any()


@pytest.mark.parametrize("is_filtered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_many_rows_are_sampled_in_parts_with_the_same_tokens(monkeypatch, is_filtered, dtype):
    monkeypatch.setattr(sampler, "_native", lambda logits: None)
    gen = torch.Generator().manual_seed(0)
    logits = torch.randn(23, 5000, generator=gen).mul(3).to(dtype)
    filtered = torch.tensor([1, 4, 5, 6, 22])
    settings = SamplingTensors(
        scale=torch.rand(23, generator=gen) + 0.5,
        greedy=torch.rand(23, generator=gen) < 0.3,
        filtered=filtered if is_filtered else None,
        top_k=torch.tensor([0, 3, 50, 0, 7]),
        top_p=torch.tensor([0.5, 1.0, 0.9, 1.0, 0.3]).double(),
        min_p=torch.tensor([0.0, 0.0, 0.1, 0.2, 0.0]).double(),
    )
    counter = torch.arange(23) * GOLDEN
    want = sample(logits, counter, settings)
    seen = []
    inner = sampler.inverse_cdf
    monkeypatch.setattr(sampler, "MOST_LOGITS", 5 * 5000 + 10)
    monkeypatch.setattr(sampler, "inverse_cdf", lambda w, u: seen.append(len(w)) or inner(w, u))
    found = sample(logits, counter, settings)
    assert seen == [5, 5, 5, 5, 3]
    assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])


@pytest.mark.parametrize("vocab", [1, 5, 16, 34, 4096, 20000])
def test_native_code_samples_what_torch_samples(monkeypatch, vocab):
    gen = torch.Generator().manual_seed(vocab)
    logits = torch.randn(200, vocab, generator=gen) * 3
    logits[5] = 2.0  # all equal: the first is the best
    logits[6] = logits[6].sort().values  # the best is the last
    logits[7, : vocab // 2] = -torch.inf
    is_greedy = torch.rand(200, generator=gen) < 0.2
    settings = SamplingTensors(
        scale=torch.where(is_greedy, 1, torch.rand(200, generator=gen) * 2 + 0.1),
        greedy=is_greedy,
        filtered=torch.tensor([3, 150]),
        top_k=torch.tensor([2, 0]),
        top_p=torch.tensor([1.0, 0.5]).double(),
        min_p=torch.zeros(2).double(),
    )
    settings.greedy[settings.filtered] = False
    counter = torch.randint(-(2**62), 2**62, (200,), generator=gen)
    tokens, logps = sample(logits, counter, settings)
    if sampler._native(logits) is None:
        pytest.skip("no native build")
    monkeypatch.setattr(sampler, "_native", lambda logits: None)
    want, want_logps = sample(logits, counter, settings)
    assert torch.equal(tokens, want)
    assert (logps - want_logps).abs().max() < 2e-7
    assert torch.equal(logps[is_greedy], torch.zeros(int(is_greedy.sum())).double())


# ---- filters


def likelihoods(kind: str, rows: int, vocab: int) -> torch.Tensor:
    """Weights as `sample` makes them: many equal ones from bfloat16 logits, few or none else."""
    gen = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=gen) * 3
    if kind == "bfloat16":
        logits = logits.bfloat16().float()
    if kind == "equal":
        logits = torch.randint(3, (rows, vocab), generator=gen).float()
    if kind == "cold":  # most weights are 0
        logits *= 100
    if kind == "not finite":
        logits[::2, 3] = float("inf")
        logits[1::2, 2] = float("nan")
    return (logits - logits.amax(-1, keepdim=True)).exp()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "equal", "cold", "not finite"])
@pytest.mark.parametrize("vocab", [1, 7, MOST_KEPT, 5000])
def test_few_likely_tokens_are_found_without_a_sort_of_the_row(kind, vocab):
    """Bit by bit what the sort keeps: of equal tokens those with the lowest ids."""
    if kind == "not finite" and vocab < 7:
        pytest.skip("needs four tokens")
    rows = 48
    weights = likelihoods(kind, rows, vocab)
    gen = torch.Generator().manual_seed(1)
    top_k = torch.randint(1, MOST_KEPT + 1, (rows,), generator=gen)
    top_k[:6] = torch.tensor([1, 2, 3, MOST_KEPT - 1, MOST_KEPT, 20])
    top_p, min_p = (torch.rand(rows, generator=gen).double() for _ in range(2))
    for p, m in (
        (top_p, min_p**4),
        (top_p, 0 * min_p),
        (0 * top_p + 1, min_p),
        (1 + 0 * top_p,) * 2,
    ):
        got = few_filters(weights, top_k, p, m)
        assert torch.equal(got, filters(weights, top_k, p, m))
    if kind in ("float32", "bfloat16"):
        none = 0 * top_p
        assert (few_filters(weights, top_k, none + 1, none).sum(-1) == top_k.clamp(max=vocab)).all()


@pytest.mark.parametrize("few", [False, True])
def test_a_row_is_sorted_only_if_it_may_keep_many_tokens(few):
    """And nothing waits for a GPU where none is: no value is read on the host."""
    seen = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    rows = torch.arange(4)
    settings = replace(
        plain(4),
        filtered=rows,
        top_k=rows + 1,
        top_p=rows.double() / 4 + 0.2,
        min_p=rows.double() * 0,
        few=few,
    )
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(0))
    with Names():
        tokens, logps = sample(logits, rows, settings)
    assert ("sort" in seen, "topk" in seen) == (not few, few)
    assert not {"_local_scalar_dense", "nonzero"} & set(seen)
    other = sample(logits, rows, replace(settings, few=not few))
    assert torch.equal(tokens, other[0]) and torch.equal(logps, other[1])

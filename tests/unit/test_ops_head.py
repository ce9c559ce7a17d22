"""The output layer in chunks of tokens against whole logits. tests/ranks/test_fused_layouts.py
splits the vocabulary and trains with it."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlcore.ops import head, logprob, policy
from rlcore.tensors import PolicyInputs, PolicySpec
from tests.builds import build  # noqa: F401

T, H, V = 23, 5, 17


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def leaves(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Hidden states and weight; two rows of the weight are padding."""
    hidden, weight = randn(T, H, dtype=dtype), randn(V + 2, H, seed=1, dtype=dtype)
    return hidden.requires_grad_(), weight.requires_grad_()


TOKENS = torch.arange(T) * 7 % V
WHERE: dict[str, Any] = {"vocab_size": V, "temperature": 0.8}


def terms(dtype: torch.dtype = torch.float64) -> tuple[PolicyInputs, PolicySpec]:
    given = PolicyInputs(
        advantage=randn(T, seed=2),
        weight=(torch.arange(T) % 4 > 0) * 1.5,
        rollout_log_probs=-2.8 + 0.5 * randn(T, seed=3),
        old_log_probs=-2.8 + 0.5 * randn(T, seed=4),
        ref_log_probs=-2.8 + 0.5 * randn(T, seed=5),
    )
    spec = PolicySpec(is_threshold=1.1, kl_type="k3", kl_coef=0.1, entropy_coef=0.02)
    return PolicyInputs(*(x.to(dtype) for x in given)), spec


def any_loss(made: logprob.LogProbs) -> Tensor:
    """Of log-probs and entropies, and of tokens together."""
    return (made.logp.cumsum(0) * made.entropy).sum() / T


def whole(hidden: Tensor, weight: Tensor, fused: bool) -> tuple[Tensor, Tensor]:
    """Loss and log-probs from logits that exist as a whole."""
    logits = hidden @ weight.t()
    if fused:
        given, spec = terms(logprob.statistics_dtype(hidden.dtype))
        made = policy.policy_loss(logits, TOKENS, given, spec, **WHERE)
        return made.loss, made.logp
    made = logprob.log_probs(logits, TOKENS, **WHERE)
    return any_loss(made), made.logp.detach()


def by_chunks(hidden: Tensor, weight: Tensor, fused: bool, **options: Any) -> tuple[Tensor, Tensor]:
    """The same by chunks."""
    if fused:
        given, spec = terms(logprob.statistics_dtype(hidden.dtype))
        made = head.policy_loss(hidden, weight, TOKENS, given, spec, **WHERE, **options)
        return made.loss, made.logp
    made = head.log_probs(hidden, weight, TOKENS, **WHERE, **options)
    return any_loss(made), made.logp.detach()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 5, T, 1000])
def test_loss_and_gradients_are_those_of_whole_logits(fused: bool, chunk_tokens: int) -> None:
    hidden, weight = leaves()
    want, want_logp = whole(hidden, weight, fused)
    ours, logp = by_chunks(hidden, weight, fused, chunk_tokens=chunk_tokens)
    assert torch.allclose(ours, want, rtol=1e-12) and torch.allclose(logp, want_logp, rtol=1e-12)
    theirs = torch.autograd.grad(2 * want, (hidden, weight))
    for a, b in zip(torch.autograd.grad(2 * ours, (hidden, weight)), theirs, strict=True):
        assert b.abs().max() > 1e-2 and torch.allclose(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("chunk_tokens", [1, 5, T, 1000])
def test_further_tokens_are_those_of_whole_logits(chunk_tokens: int) -> None:
    hidden, weight = leaves()
    ids = (torch.arange(T).unsqueeze(-1) + torch.arange(3) * 5) % V

    def total(made: logprob.LogProbs) -> Tensor:
        assert made.of_ids is not None
        return (made.of_ids.square().cumsum(-1) * made.logp.unsqueeze(-1)).sum() + any_loss(made)

    want = total(logprob.log_probs(hidden @ weight.t(), TOKENS, ids=ids, **WHERE))
    made = head.log_probs(hidden, weight, TOKENS, ids=ids, chunk_tokens=chunk_tokens, **WHERE)
    assert torch.allclose(total(made), want, rtol=1e-12)
    theirs = torch.autograd.grad(want, (hidden, weight))
    for a, b in zip(torch.autograd.grad(total(made), (hidden, weight)), theirs, strict=True):
        assert b.abs().max() > 1e-2 and torch.allclose(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_of_a_half_precision_head_stay_in_fp32(fused: bool, dtype: torch.dtype) -> None:
    hidden, weight = leaves(dtype)
    with torch.no_grad():
        scaled = hidden * 8, weight * 4  # large logits, whose rounding matters
        exact = whole(*(x.double() for x in scaled), fused)[1]
        wide = by_chunks(*scaled, fused, chunk_tokens=5, fp32_logits=True)[1]
        rounded = by_chunks(*scaled, fused, chunk_tokens=5)[1]
    assert (wide - exact).abs().max() < 1e-4 < 1e-2 < (rounded - exact).abs().max()
    want = torch.autograd.grad(whole(hidden, weight, fused)[0], (hidden, weight))
    loss = by_chunks(hidden, weight, fused, chunk_tokens=5, fp32_logits=True)[0]
    for a, b in zip(torch.autograd.grad(loss, (hidden, weight)), want, strict=True):
        assert a.dtype is dtype and torch.allclose(
            a, b, rtol=0.05, atol=0.02 * float(b.abs().max())
        )


@pytest.mark.parametrize("fused", [False, True])
def test_the_gradients_are_those_of_finite_differences(fused: bool) -> None:
    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return by_chunks(hidden, weight, fused, chunk_tokens=10)[0]

    hidden, weight = leaves()
    grads = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
    for i, grad in enumerate(grads):
        way = [torch.zeros_like(x) for x in (hidden, weight)]
        way[i] = 1e-6 * randn(*grad.shape, seed=8)
        with torch.no_grad():
            up, down = (loss(hidden + s * way[0], weight + s * way[1]) for s in (1, -1))
        slope = float((grad * way[i]).sum())
        assert slope == pytest.approx(float(up - down) / 2, rel=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_the_weights_gradient_is_added_to_a_buffer_and_autograd_sees_none(fused: bool) -> None:
    hidden, weight = leaves()
    loss, _ = by_chunks(hidden, weight, fused, chunk_tokens=5)
    want = torch.autograd.grad(loss, (hidden, weight))
    buffer = torch.ones_like(weight)
    loss, _ = by_chunks(hidden, weight, fused, chunk_tokens=5, weight_grad=buffer)
    loss.backward()
    assert weight.grad is None and torch.equal(hidden.grad, want[0])
    assert torch.allclose(buffer - 1, want[1], rtol=1e-12, atol=1e-14)


def test_bfloat16_chunks_add_up_in_float32() -> None:
    """600 chunks of a token that adds 1/2: a sum in bfloat16 would stand still at 128."""
    n = 600
    hidden = torch.ones(n, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.zeros(n, dtype=torch.int64)
    given = PolicyInputs(
        advantage=torch.ones(n), weight=torch.ones(n), rollout_log_probs=torch.zeros(n)
    )
    made = head.policy_loss(
        hidden, weight, tokens, given, PolicySpec(), vocab_size=2, chunk_tokens=1
    )
    (grad,) = torch.autograd.grad(made.loss, weight)
    assert grad.flatten().tolist() == [-300.0, 300.0]  # each token -1/2 and 1/2
    buffer = torch.zeros(2, 1)
    logp = head.log_probs(
        hidden, weight, tokens, vocab_size=2, chunk_tokens=1, weight_grad=buffer
    ).logp
    logp.sum().backward()
    assert buffer.flatten().tolist() == [300.0, -300.0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precision_is_within_its_rounding(fused: bool, dtype: torch.dtype) -> None:
    hidden, weight = leaves(dtype)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    ours, _ = by_chunks(hidden, weight, fused, chunk_tokens=5)
    want, _ = whole(*exact, fused)
    limit = 32 * torch.finfo(dtype).eps
    assert ours.dtype is torch.float32 and abs((ours - want).item()) < limit * abs(want.item())
    grads = torch.autograd.grad(ours, (hidden, weight))
    for a, b in zip(grads, torch.autograd.grad(want, exact), strict=True):
        assert a.dtype is dtype and (a.double() - b).abs().max() < limit * b.abs().max()


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation made or filled."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("fused", [False, True])
def test_logits_exist_for_a_chunk_of_tokens_at_a_time(fused: bool) -> None:
    hidden, weight = leaves()
    with Largest() as seen:
        loss, _ = by_chunks(hidden, weight, fused, chunk_tokens=5)
        loss.backward()
    most = max(5 * (V + 2), len(policy.ROWS) * T)
    assert most < T * (V + 2) and seen.elements >= 5 * (V + 2)
    assert seen.elements <= max(most, weight.numel(), hidden.numel())
    with Largest() as seen:
        whole(*leaves(), fused)[0].backward()
    assert seen.elements >= T * (V + 2)


@pytest.mark.parametrize("fused", [False, True])
def test_only_the_gradients_that_are_asked_for_are_made(fused: bool) -> None:
    full = leaves()
    grads = torch.autograd.grad(by_chunks(*full, fused, chunk_tokens=5)[0], full)
    for i in range(2):
        part = leaves()
        part[1 - i].requires_grad_(False)
        (grad,) = torch.autograd.grad(by_chunks(*part, fused, chunk_tokens=5)[0], part[i])
        assert torch.equal(grad, grads[i])
    with torch.no_grad():
        buffer = torch.zeros(V + 2, H, dtype=torch.float64)
        loss, _ = by_chunks(*leaves(), fused, chunk_tokens=5, weight_grad=buffer)
    assert not loss.requires_grad and (buffer == 0).all()


@pytest.mark.parametrize("fused", [False, True])
def test_no_tokens_have_no_gradient(fused: bool) -> None:
    hidden = torch.zeros(0, H, requires_grad=True)
    weight = torch.ones(V, H, requires_grad=True)
    none = torch.zeros(0)
    where: dict[str, Any] = {"vocab_size": V, "chunk_tokens": 4}
    if fused:
        given = PolicyInputs(advantage=none, weight=none, rollout_log_probs=none)
        loss = head.policy_loss(hidden, weight, none.long(), given, PolicySpec(), **where).loss
    else:
        loss = head.log_probs(hidden, weight, none.long(), **where).logp.sum()
    loss.backward()
    assert loss == 0 and (weight.grad == 0).all() and hidden.grad.shape == (0, H)


@pytest.mark.parametrize("fused", [False, True])
def test_the_same_bits_in_every_run(fused: bool) -> None:
    runs = []
    for _ in range(2):
        full = leaves(torch.float32)
        loss, logp = by_chunks(*full, fused, chunk_tokens=7)
        runs.append([loss.detach(), logp, *torch.autograd.grad(loss, full)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_lent_buffer_wants_the_loss_itself_and_one_backward() -> None:
    options = {"chunk_tokens": 5, "weight_grad": torch.zeros(V + 2, H, dtype=torch.float64)}
    loss, _ = by_chunks(*leaves(), True, **options)
    with pytest.raises(RuntimeError, match="unit_upstream"):
        (2 * loss).backward()
    loss, _ = by_chunks(*leaves(), True, **options)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward"):
        loss.backward()


GOOD: dict[str, Any] = {
    "hidden": torch.zeros(3, H),
    "weight": torch.zeros(V, H),
    "tokens": torch.zeros(3, dtype=torch.int64),
    "vocab_size": V,
    "chunk_tokens": 2,
}
BAD: dict[str, dict[str, Any]] = {
    "hidden: shape .3.": {"hidden": torch.zeros(3)},
    "hidden: dtype torch.int32": {"hidden": torch.zeros(3, H, dtype=torch.int32)},
    "weight: shape .17, 4.": {"weight": torch.zeros(V, 4)},
    "weight: torch.float64 on cpu": {"weight": torch.zeros(V, H, dtype=torch.float64)},
    "weight_grad: shape .17, 4.": {"weight_grad": torch.zeros(V, 4)},
    "chunk_tokens 0": {"chunk_tokens": 0},
    "tokens: shape .2. for 3 rows": {"tokens": torch.zeros(2, dtype=torch.int64)},
    "tokens: 17 at index 0": {"tokens": torch.full((3,), V)},
    "vocab_size 18: the group's 1 parts of 17": {"vocab_size": 18},
    "temperature -1": {"temperature": -1.0},
}


@pytest.mark.parametrize("sentence", BAD)
def test_bad_input_is_a_sentence_that_names_the_argument(sentence: str) -> None:
    head.log_probs(**GOOD)
    row = torch.zeros(3)
    given = PolicyInputs(advantage=row, weight=row, rollout_log_probs=row)
    fused = GOOD | {"inputs": given, "spec": PolicySpec()}
    head.policy_loss(**fused)
    with pytest.raises(ValueError, match=sentence):
        head.log_probs(**(GOOD | BAD[sentence]))
    with pytest.raises(ValueError, match=sentence):
        head.policy_loss(**(fused | BAD[sentence]))


@pytest.mark.parametrize("chunk_tokens", [1, 5, T, 1000])
def test_the_squares_of_a_distribution_are_those_of_whole_logits(chunk_tokens: int) -> None:
    hidden, weight = leaves()
    made = head.log_probs_and_squares(hidden, weight, TOKENS, chunk_tokens=chunk_tokens, **WHERE)
    want = logprob.log_probs_and_squares(hidden @ weight.t(), TOKENS, **WHERE)
    for a, b in zip(made, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-12) and not a.requires_grad

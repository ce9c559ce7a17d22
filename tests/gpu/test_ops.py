"""Operations of learner and sampler on a GPU against the CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlcore.hf.rope import inverse_frequencies
from rlcore.mcore import rope
from rlcore.mcore.activation import SwiGLU
from rlcore.mcore.norm import rms_norm
from rlcore.ops import logprob
from rlcore.ops.logprob import log_probs
from rlcore.rollout.torch_engine import sampler
from tests.gpu import side

pytestmark = pytest.mark.gpu


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_gradients(function: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    """The value and the gradients of its sum against fixed numbers."""
    tensors = [t.detach().requires_grad_() for t in tensors]
    out = function(*tensors)
    grad = randn(*out.shape, seed=9).to(out.device, out.dtype)
    return [out, *torch.autograd.grad(out, tensors, grad)]


def compare(function: Callable[..., Tensor], *tensors: Tensor, limit: float = 1e-5) -> None:
    here = with_gradients(function, *[t.to(side.DEVICE) for t in tensors])
    there = with_gradients(function, *tensors)
    for a, b in zip(here, there, strict=True):
        assert side.apart(a, b) < limit


def test_norm_activation_and_rotation() -> None:
    compare(lambda x, w: rms_norm(x, w, 1e-6), randn(40, 3, 64), randn(64, seed=1))
    compare(SwiGLU(), randn(40, 128))
    table = rope.tables(inverse_frequencies(64, 1e4), torch.arange(40), torch.float32)
    compare(lambda x: rope.rotate(x, *[t.to(x.device) for t in table]), randn(40, 3, 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_bytes", [logprob.BLOCK_BYTES, 1 << 16])
def test_log_probs_and_entropies(
    dtype: torch.dtype, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprob, "BLOCK_BYTES", block_bytes)
    logits = (randn(300, 1003) * 3).to(dtype)
    tokens = torch.arange(300) * 3

    def both(x: Tensor) -> Tensor:
        made = log_probs(x, tokens.to(x.device), vocab_size=1000, temperature=0.7)
        return torch.stack([made.logp, made.entropy])

    compare(both, logits, limit=1e-5 if dtype is torch.float32 else 5e-3)


def test_random_numbers_have_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    counter = torch.randint(-(2**62), 2**62, (4096,), generator=generator)
    assert torch.equal(sampler.uniform(counter.to(side.DEVICE)).cpu(), sampler.uniform(counter))


FILTERS = {
    "plain": {},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.05},
    "all": {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8},
}


@pytest.mark.parametrize("vocab", [53, 152_064])
@pytest.mark.parametrize("name", FILTERS)
def test_sampled_tokens_are_those_of_the_cpu_but_for_ties(name: str, vocab: int) -> None:
    rows = 512 if vocab < 1000 else 64
    logits = randn(rows, vocab) * 2
    counter = torch.arange(rows) * sampler.GOLDEN

    def drawn(device: torch.device) -> tuple[Tensor, Tensor]:
        settings = settings_of(rows, device, **FILTERS[name])
        tokens, logps = sampler.sample(logits.to(device), counter.to(device), settings)
        return tokens.cpu(), logps.cpu()

    tokens, logps = drawn(side.DEVICE)
    wanted, wanted_logps = drawn(torch.device("cpu"))
    same = tokens == wanted
    # A random number within rounding of a boundary may fall on either side.
    assert (~same).sum() <= max(1, rows // 100)
    assert (logps - wanted_logps)[same].abs().max() < 1e-5
    assert len(set(tokens.tolist())) > 20


def settings_of(
    rows: int,
    device: torch.device,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> sampler.Settings:
    """The same for all rows but one greedy row."""
    greedy = torch.zeros(rows, dtype=torch.bool)
    greedy[3] = True
    scale = torch.full((rows,), 1 / temperature)
    scale[3] = 1.0
    settings = sampler.Settings(
        scale=scale.to(device),
        greedy=greedy.to(device),
        filtered=None,
        plain=temperature == 1.0,
    )
    if top_k or top_p < 1 or min_p:
        chosen = torch.arange(rows)[~greedy]
        settings.filtered = chosen.to(device)
        settings.top_k = torch.full((len(chosen),), top_k, device=device)
        settings.top_p = torch.full((len(chosen),), top_p, dtype=torch.float64, device=device)
        settings.min_p = torch.full((len(chosen),), min_p, dtype=torch.float64, device=device)
    return settings

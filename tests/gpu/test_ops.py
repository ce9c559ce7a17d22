"""Operations of learner and sampler on a GPU against the CPU."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlcore.hf.rope import inverse_frequencies
from rlcore.hf.rope_settings import Rope
from rlcore.mcore import rope
from rlcore.mcore.activation import SwiGLU
from rlcore.mcore.norm import rms_norm
from rlcore.ops import head, logprob, native, policy
from rlcore.ops.logprob import log_probs
from rlcore.rollout.torch_engine import sampler
from rlcore.tensors import PolicyInputs, PolicySpec
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
        assert torch.equal(a.cpu(), b) or side.apart(a, b) < limit


def test_norm_activation_and_rotation() -> None:
    compare(lambda x, w: rms_norm(x, w, 1e-6), randn(40, 3, 64), randn(64, seed=1))
    compare(SwiGLU(), randn(40, 128))
    table = rope.tables(inverse_frequencies(64, Rope(theta=1e4)), torch.arange(40), torch.float32)
    compare(lambda x: rope.rotate(x, *[t.to(x.device) for t in table]), randn(40, 3, 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [(0, 2, 64), (300, 1, 3000), (70, 1, 5, 128), (9000, 2, 96)], ids=str
)
def test_norms_of_any_shape_and_stride(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = randn(*shape, 2).to(dtype), randn(shape[-1], seed=1).to(dtype)
    limit = 1e-5 if dtype is torch.float32 else 1e-2
    compare(lambda x, w: rms_norm(x[..., 0], w, 1e-6), x, weight, limit=limit)
    compare(lambda x, w: rms_norm(x.transpose(0, 1), w, 1e-6), x[..., 1], weight, limit=limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(0, 2, 8), (300, 5, 96), (70, 32, 128)], ids=str)
def test_rotations_of_any_shape_and_stride(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    table = rope.tables(
        inverse_frequencies(shape[-1], Rope(theta=1e4)), torch.arange(shape[0]), dtype
    )
    x = randn(*shape[:-1], 2 * shape[-1]).to(dtype)
    limit = 1e-5 if dtype is torch.float32 else 1e-2
    compare(
        lambda x: rope.rotate(x[..., : shape[-1]], *[t.to(x.device) for t in table]), x, limit=limit
    )


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


@pytest.fixture(params=[pytest.param("native", marks=side.needs_kernels), "torch"])
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Which build the device runs; the CPU runs the same, so values differ by rounding alone."""
    monkeypatch.setenv("RLCORE_NATIVE", "1" if request.param == "native" else "0")
    native.torch_ops.cache_clear()
    yield request.param
    native.torch_ops.cache_clear()


@side.needs_gpu  # the CPU raises
def test_a_token_out_of_range_gives_nan_and_no_wait(build: str) -> None:
    logits, tokens = randn(4, 9).to(side.DEVICE), torch.tensor([0, 9, -1, 8]).to(side.DEVICE)
    assert log_probs(logits, tokens, vocab_size=9).logp.isnan().tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("vocab", [7, 1000, 32_003])
def test_every_shape_has_the_log_probs_and_gradients_of_the_cpu(
    build: str, rows: int, vocab: int
) -> None:
    tokens = torch.arange(rows) * 13 % vocab
    for in_place in (False, True):

        def both(x: Tensor, in_place: bool = in_place) -> Tensor:
            made = log_probs(
                x * 1, tokens.to(x.device), vocab_size=vocab, temperature=0.7, in_place=in_place
            )
            return torch.stack([made.logp, made.entropy])

        compare(both, randn(rows, vocab + 5) * 3)


def terms(rows: int, device: torch.device) -> tuple[PolicyInputs, PolicySpec]:
    far = -7 + 0.5 * randn(4, rows, seed=1)
    given = PolicyInputs(
        advantage=randn(rows, seed=2),
        weight=(torch.arange(rows) % 5 > 0) * 1.5,
        rollout_log_probs=far[0],
        old_log_probs=far[1],
        ref_log_probs=far[2],
    )
    spec = PolicySpec(
        clip_dual=2.0,
        is_threshold=1.1,
        bounds=(-0.9, 0.9),
        kl_type="k3",
        kl_coef=0.1,
        entropy_coef=0.02,
    )
    return PolicyInputs(*(x.to(device) for x in given)), spec


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [53, 32_003])
def test_the_fused_loss_is_that_of_the_cpu(build: str, dtype: torch.dtype, vocab: int) -> None:
    logits, tokens = (randn(300, vocab)).to(dtype), torch.arange(300) * 13 % vocab

    def loss(x: Tensor) -> Tensor:
        given, spec = terms(300, x.device)
        made = policy.policy_loss(x * 1, tokens.to(x.device), given, spec, vocab_size=vocab)
        return made.loss.view(1)

    compare(loss, logits, limit=1e-5 if dtype is torch.float32 else 1e-2)
    x = logits.to(side.DEVICE).requires_grad_()
    runs = [torch.autograd.grad(loss(x).sum(), x)[0] for _ in range(2)]
    assert torch.equal(*runs)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("lent", [False, True])
@pytest.mark.parametrize("fp32", [False, True], ids=["rounded logits", "fp32 logits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_chunked_head_is_that_of_the_cpu(
    build: str, fused: bool, lent: bool, fp32: bool, dtype: torch.dtype
) -> None:
    """With a lent buffer the weight's gradient adds up in float32 inside the product."""
    hidden, weight = randn(300, 64).to(dtype), (randn(1003, 64) / 8).to(dtype)
    tokens = torch.arange(300) * 3

    def gradients(device: torch.device) -> list[Tensor]:
        h = hidden.detach().to(device).requires_grad_()  # on the CPU `to` returns the tensor itself
        w = weight.detach().to(device).requires_grad_()
        buffer = torch.zeros(1003, 64, device=device) if lent else None
        where = {"vocab_size": 1000, "chunk_tokens": 128, "weight_grad": buffer}
        where["fp32_logits"] = fp32
        if fused:
            loss = head.policy_loss(h, w, tokens.to(device), *terms(300, device), **where).loss
        else:
            made = head.log_probs(h, w, tokens.to(device), **where)
            loss = (made.logp.square() + made.entropy).sum()
        loss.backward()
        return [loss.detach(), h.grad, buffer if lent else w.grad]

    here, there = gradients(side.DEVICE), gradients(torch.device("cpu"))
    for a, b in zip(here, there, strict=True):
        assert side.apart(a, b) < (2e-5 if dtype is torch.float32 else 2e-2)
    assert all(torch.equal(a, b) for a, b in zip(here, gradients(side.DEVICE), strict=True))


@side.needs_gpu
@side.needs_real_gpu
def test_logits_in_fp32_are_not_rounded() -> None:
    assert head.gives_float32(side.DEVICE, torch.bfloat16)
    hidden, weight = (8 * randn(300, 64)).bfloat16(), randn(1003, 64, seed=1).bfloat16()
    tokens = torch.arange(300) * 3
    exact = logprob.log_probs(hidden.double() @ weight.double().t(), tokens, vocab_size=1000).logp
    here = (x.to(side.DEVICE) for x in (hidden, weight, tokens))
    found = head.log_probs(*here, vocab_size=1000, chunk_tokens=128, fp32_logits=True).logp
    assert (found.cpu() - exact).abs().max() < 1e-3


@side.needs_gpu  # CPUs round the product before they add it
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_in_half_precision_add_up_in_a_float32_buffer(dtype: torch.dtype) -> None:
    if not head.adds_products(side.DEVICE, dtype):
        pytest.skip(f"torch {torch.__version__} cannot; the head rounds to {dtype} and says so")
    total, a, b = randn(1003, 64), randn(128, 1003, seed=1).to(dtype), randn(128, 64, seed=2)
    b = b.to(dtype)
    want = total.double() + a.t().double() @ b.double()
    buffer, a, b = (x.to(side.DEVICE) for x in (total, a, b))
    start = buffer.data_ptr()
    torch.addmm(buffer, a.t(), b, out_dtype=torch.float32, out=buffer)
    assert buffer.data_ptr() == start
    assert side.apart(buffer, want) < 1e-6
    rounded = total.to(side.DEVICE) + torch.mm(a.t(), b)
    assert side.apart(rounded, want) > 1e-5  # what the float32 sum avoids


@side.needs_gpu
@side.needs_real_gpu
@pytest.mark.parametrize("sizes", [(264, 136), (2048, 1536)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_experts_add_up_in_float32(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    from rlcore.mcore import kernels

    ends = [0, 3, 3, 70, 71, 500, 500]
    x, grad = (randn(ends[-1], n, seed=n).to(dtype) for n in sizes)
    totals = [randn(sizes[1], sizes[0], seed=i) for i in range(len(ends))]
    found = []
    for _ in range(2):
        buffer = torch.stack(totals).to(side.DEVICE)
        there = torch.tensor(ends, dtype=torch.int32, device=side.DEVICE)
        x, grad = x.to(side.DEVICE), grad.to(side.DEVICE)
        kernels.add_weight_grads(x, grad, there, buffer.unbind())
        found.append(buffer.cpu())
    assert torch.equal(*found)
    for total, made, start, end in zip(totals, found[0], [0, *ends], ends, strict=False):
        want = total.double() + grad[start:end].double().t().cpu() @ x[start:end].double().cpu()
        assert side.apart(made, want) < 1e-6


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
) -> sampler.SamplingTensors:
    """The same for all rows but one greedy row."""
    greedy = torch.zeros(rows, dtype=torch.bool)
    greedy[3] = True
    scale = torch.full((rows,), 1 / temperature)
    scale[3] = 1.0
    settings = sampler.SamplingTensors(
        scale=scale.to(device),
        greedy=greedy.to(device),
        filtered=None,
        plain=temperature == 1.0,
    )
    if top_k or top_p < 1 or min_p:
        chosen = torch.arange(rows)[~greedy]
        settings = replace(
            settings,
            filtered=chosen.to(device),
            top_k=torch.full((len(chosen),), top_k, device=device),
            top_p=torch.full((len(chosen),), top_p, dtype=torch.float64, device=device),
            min_p=torch.full((len(chosen),), min_p, dtype=torch.float64, device=device),
            few=top_k > 0 and device.type != "cpu",  # the CPU sorts whole rows
        )
    return settings

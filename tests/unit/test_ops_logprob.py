"""Log-prob and entropy of tokens, and their gradient: the torch reference and the native build,
against torch.distributions and numbers by hand. tests/ranks/test_fused_layouts.py splits the
vocabulary."""

import math

import pytest
import torch
from torch import Tensor

from rlcore.ops import logprob, native
from rlcore.ops.logprob import log_probs
from tests.builds import build  # noqa: F401


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def slow(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    p = torch.distributions.Categorical(logits=logits / temperature)
    return p.log_prob(tokens), p.entropy()


def test_three_logits_by_hand() -> None:
    # p = 1/2, 1/4, 1/4: H = 1/2 log 2 + 2 * 1/4 log 4 = 3/2 log 2
    logits = torch.tensor([[2.0, 1.0, 1.0]], dtype=torch.float64) * math.log(2)
    logits.requires_grad_()
    made = log_probs(logits, torch.tensor([1]), vocab_size=3)
    assert made.logp.item() == pytest.approx(-2 * math.log(2), abs=1e-15)
    assert made.entropy.item() == pytest.approx(1.5 * math.log(2), abs=1e-15)
    (grad,) = torch.autograd.grad(made.logp.sum(), logits, retain_graph=True)
    assert grad[0].tolist() == pytest.approx([-0.5, 0.75, -0.25], abs=1e-15)
    (grad,) = torch.autograd.grad(made.entropy.sum(), logits)
    # -p (log p + H): log p + H = log 2 (-1 + 3/2) and log 2 (-2 + 3/2)
    want = [-0.25 * math.log(2), 0.125 * math.log(2), 0.125 * math.log(2)]
    assert grad[0].tolist() == pytest.approx(want, abs=1e-15)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("block_bytes", [logprob.BLOCK_BYTES, 200])
def test_log_probs_and_entropies_are_those_of_the_distribution(
    monkeypatch: pytest.MonkeyPatch, temperature: float, block_bytes: int
) -> None:
    monkeypatch.setattr(logprob, "BLOCK_BYTES", block_bytes)
    logits, tokens = randn(7, 11).requires_grad_(), torch.arange(7) % 9
    ours = log_probs(logits, tokens, vocab_size=9, temperature=temperature)
    logp, entropy = slow(logits[:, :9], tokens, temperature)
    assert torch.allclose(ours.logp, logp, atol=1e-12)
    assert torch.allclose(ours.entropy, entropy, atol=1e-12)
    assert torch.autograd.gradcheck(
        lambda x: log_probs(x, tokens, vocab_size=9, temperature=temperature)[:2], (logits,)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1, 31, 4099])
def test_the_error_against_float64_is_rounding(dtype: torch.dtype, vocab: int) -> None:
    logits = (randn(33, vocab) * 4).to(dtype).requires_grad_()
    tokens = torch.arange(33) * 97 % vocab
    ours = log_probs(logits, tokens, vocab_size=vocab, temperature=0.7)
    assert ours.logp.dtype is ours.entropy.dtype is torch.float32
    exact = logits.detach().double().requires_grad_()
    want = slow(exact, tokens, 0.7)
    for a, b in zip(ours[:2], want, strict=True):
        assert ((a - b).abs() / b.abs().clamp(min=1)).max() < 2e-6
    upstream = randn(33, seed=5, dtype=torch.float32), randn(33, seed=6, dtype=torch.float32)
    (found,) = torch.autograd.grad(list(ours[:2]), logits, list(upstream))
    (right,) = torch.autograd.grad(list(want), exact, [g.double() for g in upstream])
    assert found.dtype is dtype
    # Half a unit in the last place, and what float32 leaves of log p (up to 20) times upstream.
    limit = torch.finfo(dtype).eps / 2 * right.abs() + 1e-5
    assert ((found - right).abs() <= limit).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("mean", "temperature"), [(40.0, 0.6), (-1000.0, 0.7), (-1000.0, 1.0)])
@pytest.mark.parametrize("in_place", [False, True])
def test_logits_far_from_zero_lose_nothing(
    dtype: torch.dtype, mean: float, temperature: float, in_place: bool
) -> None:
    """An ulp of 1000 / 0.7 in float32 is 1.2e-4: nothing may be rounded by the size of x."""
    logits = (mean + 4 * randn(64, 1003)).to(dtype).requires_grad_()
    tokens = torch.arange(64) * 97 % 1003
    where = {"vocab_size": 1003, "temperature": temperature, "in_place": in_place}
    ours = log_probs(logits * 1, tokens, **where)
    exact = logits.detach().double().requires_grad_()
    want = slow(exact, tokens, temperature)
    for a, b in zip(ours[:2], want, strict=True):
        assert ((a - b).abs() / b.abs().clamp(min=1)).max() < 1e-6
    upstream = randn(64, seed=5, dtype=torch.float32)
    (found,) = torch.autograd.grad(ours.logp, logits, upstream)
    (right,) = torch.autograd.grad(want[0], exact, upstream.double())
    logp = torch.log_softmax(exact.detach() / temperature, -1)
    terms = upstream.abs().unsqueeze(-1) * logp.exp() * (1 - logp / 8) / temperature
    limit = (torch.finfo(dtype).eps / 2 + 3e-7) * right.abs() + 2e-6 * terms
    assert ((found - right).abs() <= limit + torch.finfo(dtype).smallest_normal).all()


def test_parts_of_a_vocabulary_far_from_zero_lose_nothing() -> None:
    logits = (-1000 + 4 * randn(64, 99)).float()
    tokens = torch.arange(64) * 97 % 99
    parts = [
        logprob.row_stats(logits[:, a : a + 33].contiguous(), tokens, a, 33, 0.7)
        for a in (0, 33, 66)
    ]
    logp, entropy, *_ = logprob.combined(torch.stack(parts))
    for a, b in zip((logp, entropy), slow(logits.double(), tokens, 0.7), strict=True):
        assert ((a - b).abs() / b.abs().clamp(min=1)).max() < 1e-6


def test_a_shard_of_impossible_tokens_has_the_token_and_no_probability() -> None:
    gone = torch.full((1, 3), -math.inf)
    parts = [
        logprob.row_stats(x, torch.tensor([1]), first, 3, 1.0)
        for first, x in ((0, gone), (3, torch.zeros(1, 3)))
    ]
    logp, entropy, *_ = logprob.combined(torch.stack(parts))
    assert logp.item() == -math.inf and entropy.item() == pytest.approx(math.log(3))


def test_the_logits_are_left_alone_unless_the_gradient_may_take_their_place() -> None:
    logits, tokens = randn(6, 13, dtype=torch.bfloat16), torch.arange(6)
    before = logits.clone()
    mine = logits.requires_grad_() * 1
    log_probs(mine, tokens, vocab_size=13).logp.sum().backward()
    assert torch.equal(mine, before)
    want = logits.grad.clone()
    logits.grad = None
    log_probs(mine := logits * 1, tokens, vocab_size=13, in_place=True).logp.sum().backward()
    assert torch.equal(logits.grad, want) and torch.equal(mine, want)


def test_a_second_backward_in_place_is_an_error_and_not_garbage() -> None:
    logits = randn(3, 5).requires_grad_() * 1
    made = log_probs(logits, torch.arange(3), vocab_size=5, in_place=True)
    made.logp.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="in_place: a second backward"):
        made.logp.sum().backward()


def test_two_in_place_on_the_same_logits_are_an_error_and_not_garbage() -> None:
    logits = randn(3, 5).requires_grad_() * 1
    tokens = torch.arange(3)
    made = [log_probs(logits, tokens, vocab_size=5, in_place=True).logp.sum() for _ in range(2)]
    with pytest.raises(RuntimeError, match="in_place: the logits were overwritten"):
        (made[0] + made[1]).backward()


@pytest.mark.parametrize("in_place", [False, True])
def test_logits_that_were_written_over_are_an_error(in_place: bool) -> None:
    shard, where = logprob.VocabShard(0, 5), (1.0, None, in_place)  # as under tensor parallelism
    for write in (True, False):
        logits = randn(3, 5).requires_grad_() * 1
        logp, *_ = logprob._LogProb.apply(logits, torch.arange(3), None, shard, *where)
        if write:
            logits.detach().zero_()
            with pytest.raises(RuntimeError, match="overwritten|modified by an inplace"):
                logp.sum().backward()
        else:
            logp.sum().backward()


def test_entropy_can_be_had_without_a_gradient() -> None:
    logits, tokens = randn(4, 5).requires_grad_(), torch.arange(4)
    ours = log_probs(logits, tokens, vocab_size=5, entropy_grad=False)
    assert not ours.entropy.requires_grad and ours.logp.requires_grad
    assert torch.allclose(ours.entropy, slow(logits, tokens)[1])


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4]])
    ours = log_probs(logits, torch.tensor([1]), vocab_size=3)
    assert ours.logp.item() == -1e4
    assert ours.entropy.item() == 0.0


def test_tokens_that_cannot_be_drawn_count_nothing() -> None:
    free = randn(5, 7)
    tokens, gone = torch.arange(5), torch.full((5, 3), -math.inf, dtype=torch.float64)
    logits = torch.cat([free, gone], 1).requires_grad_()
    ours = log_probs(logits, tokens, vocab_size=10)
    want = slow(free.requires_grad_(), tokens)
    assert torch.allclose(ours.logp, want[0]) and torch.allclose(ours.entropy, want[1])
    (grad,) = torch.autograd.grad((ours.logp + ours.entropy).sum(), logits)
    assert torch.allclose(grad[:, :7], torch.autograd.grad(sum(want).sum(), free)[0])
    assert (grad[:, 7:] == 0).all()
    assert log_probs(logits, torch.full((5,), 8), vocab_size=10).logp.tolist() == [-math.inf] * 5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_a_distribution_gives_nan_and_only_that_row(bad: float) -> None:
    logits = randn(3, 40, dtype=torch.float32)
    logits[1, 17] = bad
    ours = log_probs(logits, torch.arange(3), vocab_size=40)
    for value in ours[:2]:
        assert value.isnan().tolist() == [False, True, False]


def test_padding_has_no_probability_and_no_gradient() -> None:
    logits, tokens = randn(4, 9), torch.arange(4)
    padded = torch.cat([logits, torch.full((4, 2), 50.0, dtype=torch.float64)], 1).requires_grad_()
    ours = log_probs(padded, tokens, vocab_size=9)
    want = log_probs(logits, tokens, vocab_size=9)
    assert torch.equal(ours.logp, want.logp) and torch.equal(ours.entropy, want.entropy)
    (grad,) = torch.autograd.grad(ours.logp.sum(), padded)
    assert (grad[:, 9:] == 0).all() and (grad[:, :9] != 0).all()


def test_rows_may_lie_apart() -> None:
    wide, tokens = randn(6, 40), torch.arange(6)
    part = wide[:, :23]
    found = [log_probs(x, tokens, vocab_size=23) for x in (part, part.contiguous())]
    assert torch.equal(found[0].logp, found[1].logp)
    mine = wide.requires_grad_()[:, :23]
    (grad,) = torch.autograd.grad(log_probs(mine, tokens, vocab_size=23).entropy.sum(), wide)
    assert (grad[:, 23:] == 0).all() and (grad[:, :23] != 0).all()


@pytest.mark.parametrize("in_place", [False, True])
def test_no_tokens_have_no_log_probs(in_place: bool) -> None:
    logits = torch.zeros(0, 8, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    ours = log_probs(logits * 1, none, vocab_size=8, in_place=in_place)
    assert ours.logp.shape == ours.entropy.shape == (0,)
    ours.logp.sum().backward()
    assert logits.grad.shape == (0, 8)


def test_the_same_bits_in_every_run_and_with_any_number_of_threads() -> None:
    logits, tokens = randn(37, 3001, dtype=torch.float32) * 3, torch.arange(37)
    runs = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            x = logits.clone().requires_grad_()
            made = log_probs(x, tokens, vocab_size=3001, temperature=0.9)
            (made.logp - 0.1 * made.entropy).sum().backward()
            runs.append([*made[:2], x.grad])
    finally:
        torch.set_num_threads(before)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_a_row_without_a_gradient_is_not_read() -> None:
    logits = randn(2, 6)
    logits[0] = math.nan
    stats = torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    g = torch.tensor([0.0, 1.0], dtype=torch.float64)
    out = torch.empty_like(logits)
    grad = logprob.row_grad(logits, torch.tensor([0, 1]), 0, 6, 1.0, *stats, g, None, out)
    assert (grad[0] == 0).all() and grad[1].isfinite().all()


# ---- what is refused

GOOD = {"logits": torch.zeros(3, 8), "tokens": torch.zeros(3, dtype=torch.int64), "vocab_size": 8}
BAD = {
    "logits: shape .3.": {"logits": torch.zeros(3)},
    "logits: dtype torch.int64": {"logits": torch.zeros(3, 8, dtype=torch.int64)},
    "logits: the columns have stride 3": {"logits": torch.zeros(8, 3).t()},
    "logits: rows of 8 columns have stride 0 and overlap": {
        "logits": torch.zeros(1, 8).expand(3, 8),
        "in_place": True,
    },
    "logits: rows of 8 columns have stride 7 and overlap": {
        "logits": torch.zeros(99).as_strided((3, 8), (7, 1)),
        "in_place": True,
    },
    "tokens: shape .2. for 3 rows": {"tokens": torch.zeros(2, dtype=torch.int64)},
    "tokens: dtype torch.int32": {"tokens": torch.zeros(3, dtype=torch.int32)},
    "tokens: on meta": {"tokens": torch.zeros(3, dtype=torch.int64, device="meta")},
    "tokens: 8 at index 2": {"tokens": torch.tensor([0, 7, 8])},
    "tokens: -1 at index 0": {"tokens": torch.tensor([-1, 0, 0])},
    "tokens: 7 at index 1; must be 0 to 6": {"tokens": torch.tensor([0, 7, 0]), "vocab_size": 7},
    "vocab_size 9: the group's 1 parts of 8": {"vocab_size": 9},
    "vocab_size 0": {"vocab_size": 0},
    "temperature 0": {"temperature": 0.0},
    "temperature inf": {"temperature": math.inf},
    "temperature nan": {"temperature": math.nan},
}


@pytest.mark.parametrize("sentence", BAD)
def test_bad_input_is_a_sentence_that_names_the_argument(sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        log_probs(**(GOOD | BAD[sentence]))


def test_which_build_runs_is_announced_once(
    monkeypatch: pytest.MonkeyPatch,
    build: str,  # noqa: F811
) -> None:
    said: list[str] = []
    monkeypatch.setattr(native, "announce", lambda what, choice: said.append(f"{what}: {choice}"))
    for _ in range(2):
        log_probs(**GOOD)
    names = {"torch": "torch on cpu (RLCORE_NATIVE=0)", "native": "native on cpu"}
    assert said == [f"token_logprob: {names[build]}"]


# ---- further tokens of each row


def ids_of(rows: int, vocab: int, count: int = 4) -> Tensor:
    """Different tokens of each row; row t has token t % vocab too."""
    return (torch.arange(rows).unsqueeze(-1) + torch.arange(count) * 2) % vocab


@pytest.mark.parametrize("in_place", [False, True])
def test_further_tokens_have_the_log_probs_of_the_distribution(in_place: bool) -> None:
    logits, tokens, ids = randn(7, 11).requires_grad_(), torch.arange(7) % 9, ids_of(7, 9)
    where = {"vocab_size": 9, "temperature": 0.7, "in_place": in_place}
    ours = log_probs(logits * 1, tokens, ids=ids, **where)
    assert ours.of_ids is not None
    want = (logits[:, :9] / 0.7).log_softmax(-1).gather(-1, ids)
    assert torch.allclose(ours.of_ids, want, atol=1e-12)
    assert torch.equal(ours.of_ids[:, 0], ours.logp)  # the row's own token is among them
    upstream, about = randn(7, 4), randn(7, seed=3)
    entropy = slow(logits[:, :9], tokens, 0.7)[1]
    (right,) = torch.autograd.grad(
        (want * upstream).sum() + (want[:, 0] + 2 * entropy) @ about, logits
    )
    total = (ours.of_ids * upstream).sum() + (ours.logp + 2 * ours.entropy) @ about
    (found,) = torch.autograd.grad(total, logits)
    assert torch.allclose(found, right, atol=1e-12) and right.abs().max() > 0.1
    assert not found[:, 9:].any()  # padding


def test_further_tokens_alone_have_a_gradient() -> None:
    logits, tokens, ids = randn(5, 9).requires_grad_(), torch.arange(5), ids_of(5, 9)
    found = log_probs(logits, tokens, vocab_size=9, ids=ids).of_ids
    assert found is not None
    assert torch.autograd.gradcheck(
        lambda x: log_probs(x, tokens, vocab_size=9, ids=ids).of_ids, (logits,)
    )


@pytest.mark.parametrize("width", [3, 5])
def test_parts_of_a_vocabulary_give_the_further_tokens_of_the_whole(width: int) -> None:
    """With 5 columns each, the second of three parts ends in padding and the third has nothing."""
    logits, tokens, ids = randn(6, 15) * 4, torch.arange(6), ids_of(6, 9)
    shards = [(a, max(min(9 - a, width), 0)) for a in range(0, 15, width)]
    parts = [logits[:, a : a + width].contiguous() for a, _ in shards]
    stats = [
        logprob.all_stats(part, tokens, ids, *shard, 0.7)
        for part, shard in zip(parts, shards, strict=True)
    ]
    logp, entropy, lse, of_ids = logprob.combined(torch.stack(stats))
    leaf = logits.clone().requires_grad_()
    want = (leaf[:, :9] / 0.7).log_softmax(-1)
    assert of_ids is not None and torch.allclose(of_ids, want.gather(-1, ids), atol=1e-12)
    upstream, about = randn(6, 4), randn(6, seed=3)
    total = (want.gather(-1, ids) * upstream).sum()
    total = total + want.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) @ about
    (right,) = torch.autograd.grad(total, leaf)
    rest = (0.7, lse, entropy, about, None, upstream)
    for part, shard in zip(parts, shards, strict=True):
        out = torch.empty_like(part)
        logprob.all_grads(part, tokens, ids, *shard, *rest, out)
        a = shard[0]
        assert torch.allclose(out, right[:, a : a + width], atol=1e-12)
    assert torch.allclose(logp, want.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), atol=1e-12)


@pytest.mark.parametrize("width", [9, 4])
def test_the_gradient_of_likely_tokens_survives_bfloat16(width: int) -> None:
    """p is .998, so that g (1 - p) is a small difference of g and g p."""
    logits = torch.full((3, 9), -1.0)
    logits[:, 2] = 8.0
    logits[1, 5], logits[2, 7] = 7.0, -2.0
    logits = logits.bfloat16()
    tokens, ids = torch.tensor([2, 2, 7]), torch.tensor([[2, 5], [5, 2], [3, 2]])
    upstream = torch.tensor([[-0.99, 0.0], [0.3, 4.0], [0.2, -0.7]]).double()
    of_token, of_entropy = torch.tensor([0.0, -3.9, 0.0]), torch.tensor([0.0, 0.5, 0.0])
    wide = logits.double().requires_grad_()
    logp = wide.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    total = (logp.gather(-1, ids) * upstream).sum() + entropy @ of_entropy.double()
    total = total + logp.gather(-1, tokens[:, None])[:, 0] @ of_token.double()
    (want,) = torch.autograd.grad(total, wide)
    top = wide.detach().amax(-1)
    lse = torch.stack([top, wide.detach().logsumexp(-1) - top]).float()
    parts = []
    for first in range(0, 9, width):
        part = logits[:, first : first + width].contiguous()
        shard = first, part.size(1), 1.0
        rest = lse, entropy.detach().float(), of_token, of_entropy, upstream.float()
        parts.append(logprob.all_grads(part, tokens, ids, *shard, *rest, torch.empty_like(part)))
    found = torch.cat(parts, -1)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("ids", "what"),
    [
        (torch.zeros(3, 2, dtype=torch.int64), r"ids: shape \[3, 2\]; must be \[4, ids per row\]"),
        (torch.zeros(4, 2, dtype=torch.int32), "ids: torch.int32 on cpu; must be torch.int64"),
        (torch.full((4, 2), 9), "9 at index 0; must be 0 to 8"),
    ],
)
def test_wrong_further_tokens_are_refused(ids: Tensor, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        log_probs(randn(4, 9), torch.arange(4), vocab_size=9, ids=ids)


# ---- squares of the whole distribution


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_log_probs_and_the_sum_of_squares_are_those_of_the_distribution(dtype: torch.dtype) -> None:
    logits, tokens = randn(7, 11, dtype=dtype) * 5, torch.arange(7) % 9
    logits[0] = 0.0  # uniform over the nine that are not padding
    where = {"vocab_size": 9, "temperature": 0.7}
    logp, squares = logprob.log_probs_and_squares(logits, tokens, **where)
    assert torch.equal(logp, log_probs(logits, tokens, **where).logp)
    p = (logits[:, :9].double() / 0.7).softmax(-1)
    exact = dtype is torch.float64
    assert torch.allclose(squares.double(), p.square().sum(-1).log(), atol=1e-12 if exact else 1e-6)
    assert float(squares[0]) == pytest.approx(-math.log(9), rel=1e-6)


def test_squares_of_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[3e4, 0.0, -3e4], [1e4, 1e4, 0.0]])
    _, squares = logprob.log_probs_and_squares(logits, torch.tensor([0, 1]), vocab_size=3)
    assert squares.tolist() == pytest.approx([0.0, -math.log(2)], abs=1e-6)


@pytest.mark.parametrize("width", [3, 5])
def test_parts_of_a_vocabulary_give_the_squares_of_the_whole(width: int) -> None:
    """With 5 columns each, the third part has only padding."""
    logits, tokens = randn(6, 15) * 4, torch.arange(6)
    logits[1, 3:6] = -torch.inf
    stats = [
        logprob.squares_stats(
            logits[:, a : a + width].contiguous(), tokens, a, max(min(9 - a, width), 0), 0.7
        )
        for a in range(0, 15, width)
    ]
    logp, squares = logprob.with_squares(torch.stack(stats))
    want = (logits[:, :9] / 0.7).log_softmax(-1)
    assert torch.allclose(logp, want.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), atol=1e-12)
    assert torch.allclose(squares, (2 * want).logsumexp(-1), atol=1e-12)

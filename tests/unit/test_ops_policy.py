"""The fused policy loss: numbers by hand, and the objective on log-probs in float64 as the slow
twin. tests/ranks/test_fused_layouts.py splits the vocabulary and trains with it."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore import algos
from rlcore.algos.objective import Objective
from rlcore.ops import native, policy
from rlcore.ops.logprob import log_probs
from rlcore.ops.policy import KL_TYPES, ROWS, policy_loss
from rlcore.tensors import LossInputs, PolicyInputs, PolicySpec
from tests.builds import build  # noqa: F401

T, V = 24, 13


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def by_name(out: Tensor) -> dict[str, Tensor]:
    return dict(zip(ROWS, out, strict=True))


# ---- by hand


def one_token(old_log_probs: float, advantage: float, **settings: Any) -> dict[str, float]:
    """A token of probability 1/2 of two; figures and the gradient of its logit."""
    logits = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    row = {"weight": 1.0, "rollout_log_probs": old_log_probs, "ref_log_probs": None} | settings.pop(
        "row", {}
    )
    row |= {"old_log_probs": old_log_probs, "advantage": advantage}
    given = {
        k: None if v is None else torch.tensor([v], dtype=torch.float64) for k, v in row.items()
    }
    spec = PolicySpec(**settings)
    made = policy_loss(logits, torch.tensor([0]), PolicyInputs(**given), spec, vocab_size=2)
    (grad,) = torch.autograd.grad(made.loss, logits)
    found = {name: value.item() for name, value in by_name(made.tokens).items()}
    return found | {"sum": made.loss.item(), "slope": grad[0, 0].item(), "logp": made.logp.item()}


HALF = math.log(0.5)


def test_a_token_within_the_clip_by_hand() -> None:
    # r = 1/2 / (1/2 / 1.1) = 1.1, loss -r A = -2.2; d/dlogp = -2.2, dlogp/dx0 = 1 - 1/2
    found = one_token(HALF - math.log(1.1), 2.0)
    assert found["ratio"] == pytest.approx(1.1) and found["sum"] == pytest.approx(-2.2)
    assert found["slope"] == pytest.approx(-1.1) and found["clipped"] == 0
    assert found["logp"] == pytest.approx(HALF)


def test_a_clipped_token_by_hand() -> None:
    # r = 1.5 is held at 1.2: loss -2.4 and no gradient
    found = one_token(HALF - math.log(1.5), 2.0)
    assert found["sum"] == pytest.approx(-2.4) and found["slope"] == 0 and found["clipped"] == 1


def test_the_dual_clip_by_hand() -> None:
    # A < 0, r = 4: -r A = 4 is cut at 3
    found = one_token(HALF - math.log(4), -1.0, clip_dual=3.0)
    assert found["sum"] == pytest.approx(3.0) and found["slope"] == 0
    assert found["dual_clipped"] == 1 and found["clipped"] == 0


def test_the_rollout_correction_by_hand() -> None:
    # p_old / p_sampler = 2.5, cut at 2, divided by a mean of 4; r = 1, A = 1
    row = {"rollout_log_probs": HALF - math.log(2.5)}
    found = one_token(HALF, 1.0, is_threshold=2.0, is_mean=4.0, row=row)
    assert found["is_weight"] == 0.5 and found["sum"] == pytest.approx(-0.5)
    assert found["slope"] == pytest.approx(-0.25)
    bounds = (math.log(0.5), math.log(2))  # 1 / 2.5 is below 0.5
    found = one_token(HALF, 1.0, bounds=bounds, entropy_coef=0.1, row=row)
    assert found["kept"] == 0 == found["sum"] == found["slope"]


def test_entropy_and_kl_by_hand() -> None:
    # H = log 2; d = log p_ref - log p = log 2: k3 = 2 - 1 - log 2, slope 1 - 2
    row = {"ref_log_probs": HALF + math.log(2)}
    found = one_token(HALF, 0.0, entropy_coef=0.5, kl_type="k3", kl_coef=0.1, row=row)
    assert found["kl"] == pytest.approx(1 - math.log(2))
    assert found["sum"] == pytest.approx(0.1 * (1 - math.log(2)) - 0.5 * math.log(2))
    assert found["grad_logp"] == pytest.approx(-0.1) and found["grad_entropy"] == -0.5
    assert found["slope"] == pytest.approx(-0.05)  # entropy is flat at its top


# ---- against the objective


def rows() -> LossInputs:
    """Four sequences of six tokens, the first two of each a prompt; policies so far apart that
    clips, caps and bounds are at work on some tokens and not on others."""
    sequence = torch.arange(T) // 6
    logp = -2.5 + 0.4 * randn(T, seed=1)
    return LossInputs(
        log_probs=logp,
        entropy=logp,
        mask=torch.arange(T) % 6 > 1,
        score=randn(4, seed=2)[sequence],
        advantage=randn(4, seed=2)[sequence],
        old_log_probs=logp + 0.3 * randn(T, seed=3),
        rollout_log_probs=logp + 0.8 * randn(T, seed=4),
        correction=randn(T, seed=6).exp(),
        ref_log_probs=logp + 0.5 * randn(T, seed=5),
        sequence=sequence,
        num_sequences=4,
        versions=torch.zeros(T, dtype=torch.int32),
    )


def slow(objective: Objective, x: LossInputs, logits: Tensor, tokens: Tensor, own: bool):
    """Op A, the objective's text, op B."""
    made = log_probs(logits, tokens, vocab_size=V, temperature=0.8)
    old = made.logp.detach() if own else x.old_log_probs
    x = replace(x, log_probs=made.logp, entropy=made.entropy, old_log_probs=old)
    out = objective(x)
    kept = x.mask & out.mask
    total = torch.where(kept, out.per_token, 0.0).sum()
    return total.detach(), torch.autograd.grad(total, logits)[0], out, kept


MASK = {"rollout_rs": ("token_k1",), "rollout_rs_threshold": ("0.6_1.8",)}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"rollout_is": "none"},
    "TIS": {"rollout_is_threshold": 1.1},
    "vanilla IS": {"rollout_is_threshold": math.inf},
    "mask": {"rollout_is": "none", **MASK},
    "IcePop": {"rollout_is_threshold": math.inf, **MASK},
    "both": {"rollout_is_threshold": 1.2, **MASK},
    "bypass": {"bypass_mode": True},
    "no dual clip": {"clip_dual": 0.0},
    "dual clip at infinity": {"clip_dual": math.inf},
    "dual clip": {"clip_dual": 1.1, "clip_low": 0.5},
    "entropy": {"entropy_coef": 0.05},
    "mean of sequences": {"loss_agg_mode": "seq-mean-token-mean"},
    "sum of sequences": {"loss_agg_mode": "seq-mean-token-sum", "entropy_coef": -0.01},
    "sum, normed, all": {
        "loss_agg_mode": "seq-mean-token-sum-norm",
        "rollout_is_threshold": 1.2,
        "kl_coef": 0.1,
        "entropy_coef": 0.01,
        **MASK,
    },
} | {f"KL {kind}": {"kl_coef": 0.2, "kl_type": kind} for kind in KL_TYPES[1:]}


@pytest.mark.parametrize("name", ["ppo", "grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_loss_gradient_and_figures_are_those_of_the_objective(name: str, settings: str) -> None:
    cfg = algos.config_class(name)(**SETTINGS[settings])
    mean = 1.3 if settings == "TIS" else 1.0
    objective = Objective(
        algos.module(name), cfg, max_tokens=10, correction_mean=mean, kl_scale=0.7
    )
    tokens = torch.arange(T) % V
    for own in (False, True):
        x = rows()
        logits = (0.7 * randn(T, V)).requires_grad_()
        total, grad, out, kept = slow(objective, x, logits, tokens, own)
        given, spec = objective.policy(x, old_is_own=own)
        made = policy_loss(logits, tokens, given, spec, vocab_size=V, temperature=0.8)
        assert torch.allclose(made.loss, total, rtol=1e-12, atol=1e-12)
        (ours,) = torch.autograd.grad(made.loss, logits)
        assert grad.abs().max() > 1e-3
        assert torch.allclose(ours, grad, rtol=1e-12, atol=1e-14)
        figures = by_name(made.tokens)
        assert torch.equal(figures["kept"].bool() & x.mask, kept)
        pairs = {
            "actor/pg_clipfrac": "clipped",
            "actor/pg_clipfrac_lower": "dual_clipped",
            "actor/pg_loss": "policy_loss",
            "actor/kl_loss": "kl",
        }
        for theirs, mine in pairs.items():
            if theirs in out.metrics:
                want = out.metrics[theirs].double()
                assert torch.allclose(figures[mine][x.mask], want[x.mask], atol=1e-12), theirs


def test_the_inputs_of_that_test_reach_every_branch() -> None:
    """Each cut holds for some tokens and not for others."""
    x, tokens, logits = rows(), torch.arange(T) % V, 0.7 * randn(T, V)
    for name, figure in (("both", "kept"), ("dual clip", "dual_clipped"), ("plain", "clipped")):
        cfg = algos.config_class("grpo")(**SETTINGS[name])
        given, spec = Objective(algos.module("grpo"), cfg, max_tokens=10).policy(
            x, old_is_own=False
        )
        made = policy_loss(logits, tokens, given, spec, vocab_size=V, temperature=0.8)
        share = by_name(made.tokens)[figure][x.mask].mean()
        assert 0 < share < 1, (name, share)


def test_beyond_the_limit_of_the_log_ratio_there_is_no_gradient() -> None:
    """Of a bad token that became e^21 times more likely: the ratio counts as e^20."""
    found = one_token(HALF - 21.0, -1.0)
    assert found["sum"] == pytest.approx(math.exp(20)) and found["slope"] == 0


def test_the_gradient_is_that_of_finite_differences() -> None:
    given, spec = arguments(torch.float64)
    tokens = torch.arange(T) % V
    assert torch.autograd.gradcheck(
        lambda x: policy_loss(x, tokens, given, spec, vocab_size=V).loss,
        (randn(T, V).requires_grad_(),),
    )


# ---- edges


def arguments(dtype: torch.dtype = torch.float32) -> tuple[PolicyInputs, PolicySpec]:
    x = rows()
    given = PolicyInputs(
        advantage=x.advantage,
        weight=x.mask * (0.5 + torch.arange(T) % 3),
        rollout_log_probs=x.rollout_log_probs,
        old_log_probs=x.old_log_probs,
        ref_log_probs=x.ref_log_probs,
    )
    spec = PolicySpec(
        clip_dual=1.5,
        is_threshold=1.2,
        bounds=(-0.9, 0.9),
        kl_type="k2",
        kl_coef=0.1,
        entropy_coef=0.02,
    )
    return PolicyInputs(*(v.to(dtype) for v in given)), spec


def figures_of(logits: Tensor, **options: Any) -> list[Tensor]:
    given, spec = arguments(torch.float64 if logits.dtype is torch.float64 else torch.float32)
    leaf = logits.detach().clone().requires_grad_()
    made = policy_loss(leaf * 1, torch.arange(T) % V, given, spec, vocab_size=V, **options)
    return [*made, torch.autograd.grad(made.loss, leaf)[0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_error_against_float64_is_rounding(dtype: torch.dtype) -> None:
    logits = (3 * randn(T, V)).to(dtype)
    ours, exact = figures_of(logits), figures_of(logits.double())
    for a, b in zip(ours[:3], exact[:3], strict=True):
        assert a.dtype is torch.float32 and torch.allclose(a.double(), b, rtol=1e-5, atol=1e-5)
    eps = torch.finfo(dtype).eps
    assert ours[4].dtype is dtype
    assert ((ours[4].double() - exact[4]).abs() <= eps * exact[4].abs() + 2e-5).all()


def test_in_place_and_unit_upstream_give_the_same_bits() -> None:
    logits = randn(T, V, dtype=torch.float32)
    want = figures_of(logits)
    for options in ({"in_place": True}, {"in_place": True, "unit_upstream": True}):
        found = figures_of(logits, **options)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True)), options


def test_the_gradient_takes_the_place_of_the_logits_in_the_forward() -> None:
    given, spec = arguments()
    leaf = randn(T, V, dtype=torch.float32).requires_grad_()
    mine = leaf * 1
    made = policy_loss(mine, torch.arange(T) % V, given, spec, vocab_size=V, in_place=True)
    there = mine.detach().clone()
    made.loss.backward()
    assert torch.equal(leaf.grad, there) and not torch.equal(there, leaf.detach())


def test_without_a_gradient_nothing_is_written() -> None:
    given, spec = arguments()
    logits = randn(T, V, dtype=torch.float32).requires_grad_()
    before = logits.detach().clone()
    with torch.no_grad():
        made = policy_loss(logits, torch.arange(T) % V, given, spec, vocab_size=V, in_place=True)
    assert torch.equal(logits.detach(), before) and not made.loss.requires_grad
    assert torch.equal(made.loss, figures_of(before)[0])


def test_a_multiple_of_the_loss_has_a_multiple_of_the_gradient_or_is_an_error() -> None:
    given, spec = arguments()
    logits, tokens = randn(T, V, dtype=torch.float32).requires_grad_(), torch.arange(T) % V
    want = figures_of(logits)[4]
    made = policy_loss(logits, tokens, given, spec, vocab_size=V)
    assert torch.allclose(torch.autograd.grad(3 * made.loss, logits)[0], 3 * want)
    options = {"in_place": True, "unit_upstream": True}
    made = policy_loss(logits * 1, tokens, given, spec, vocab_size=V, **options)
    with pytest.raises(RuntimeError, match="unit_upstream"):
        torch.autograd.grad(3 * made.loss, logits)


def test_a_second_backward_in_place_is_an_error_and_not_garbage() -> None:
    given, spec = arguments()
    logits = randn(T, V, dtype=torch.float32).requires_grad_() * 1
    made = policy_loss(logits, torch.arange(T) % V, given, spec, vocab_size=V, in_place=True)
    made.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="in_place: a second backward"):
        made.loss.backward()


def test_a_token_of_weight_0_is_not_read_and_has_no_gradient() -> None:
    given, spec = arguments()
    logits = randn(T, V, dtype=torch.float32)
    want = figures_of(logits)
    spoilt = logits.clone()
    idle = given.weight == 0
    spoilt[idle] = math.nan
    found = figures_of(spoilt)
    for a, b in zip((*found[:3], found[4]), (*want[:3], want[4]), strict=True):
        assert torch.equal(a, b)
    assert (found[4][idle] == 0).all() and (found[1][idle] == 0).all()
    assert (found[4][~idle] != 0).any(1).sum() > 10


def test_no_tokens_have_a_loss_of_zero() -> None:
    none = torch.zeros(0)
    logits = torch.zeros(0, V, requires_grad=True)
    given = PolicyInputs(advantage=none, weight=none, rollout_log_probs=none)
    made = policy_loss(logits, none.long(), given, PolicySpec(), vocab_size=V)
    made.loss.backward()
    assert made.loss == 0 and logits.grad.shape == (0, V) and made.tokens.shape == (len(ROWS), 0)


def test_rows_may_lie_apart_and_padding_has_no_gradient() -> None:
    given, spec = arguments(torch.float64)
    wide = randn(T, V + 6).requires_grad_()
    want = figures_of(wide[:, :V].contiguous())
    part = wide[:, : V + 2]
    made = policy_loss(part, torch.arange(T) % V, given, spec, vocab_size=V)
    (grad,) = torch.autograd.grad(made.loss, wide)
    assert torch.equal(made.loss, want[0]) and torch.equal(grad[:, :V], want[4])
    assert (grad[:, V:] == 0).all()


def test_the_same_bits_in_every_run_and_with_any_number_of_threads() -> None:
    before = torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            runs.append(figures_of(randn(T, V, dtype=torch.bfloat16)))
    finally:
        torch.set_num_threads(before)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("kind", KL_TYPES)
@pytest.mark.parametrize(("own", "dual"), [(False, 3.0), (False, 0.0), (True, 3.0)])
def test_the_native_scalar_is_the_reference_on_wild_inputs(
    kind: str, own: bool, dual: float
) -> None:
    """Log-ratios beyond the limit, bounds met exactly, advantages of 0, nan."""
    n = 400
    logp, sampler = -3 * randn(n, seed=1).abs(), -3 * randn(n, seed=2).abs()
    old = logp + torch.cat([25 * randn(100), 0.3 * randn(200), torch.zeros(100)]).double()
    advantage = randn(n, seed=3) * (torch.arange(n) % 7 > 0)
    weight = torch.ones(n, dtype=torch.float64) * (torch.arange(n) % 5 > 0)
    old[7], advantage[13], sampler[21] = math.nan, math.nan, math.nan
    ref = logp + 12 * randn(n, seed=4)
    spec = PolicySpec(
        clip_dual=dual,
        is_threshold=2.0,
        bounds=(-1.0, 1.0),
        kl_type=kind,
        kl_coef=0.1 if kind != "none" else 0.0,
        entropy_coef=0.01,
    )
    args = (logp, -logp, old, sampler, ref, advantage, weight, policy.settings(spec, own))
    ours, want = policy.policy_tokens(*args), policy.reference(*args)
    assert torch.equal(ours.isnan(), want.isnan())
    assert torch.allclose(ours, want, rtol=1e-12, atol=1e-12, equal_nan=True)


# ---- what is refused


def good() -> dict[str, Any]:
    given, spec = arguments()
    return {
        "logits": torch.zeros(T, V),
        "tokens": torch.zeros(T, dtype=torch.int64),
        "inputs": given,
        "spec": spec,
        "vocab_size": V,
    }


BAD = {
    "logits: shape": lambda k: k | {"logits": torch.zeros(T)},
    "tokens: 13 at index 0": lambda k: k | {"tokens": torch.full((T,), 13)},
    "advantage: shape .3. for 24 rows": lambda k: (
        k | {"inputs": k["inputs"]._replace(advantage=torch.zeros(3))}
    ),
    "old_log_probs: on meta": lambda k: (
        k | {"inputs": k["inputs"]._replace(old_log_probs=torch.zeros(T, device="meta"))}
    ),
    "kl_coef 0.1: needs ref_log_probs": lambda k: (
        k | {"inputs": k["inputs"]._replace(ref_log_probs=None)}
    ),
    "kl_type k4": lambda k: k | {"spec": replace(k["spec"], kl_type="k4")},
    "advantage None": lambda k: k | {"inputs": k["inputs"]._replace(advantage=None)},
    "advantage: dtype torch.complex64": lambda k: (
        k | {"inputs": k["inputs"]._replace(advantage=torch.zeros(T, dtype=torch.complex64))}
    ),
    "logits: rows of 13 columns have stride 0": lambda k: (
        k | {"logits": torch.zeros(1, V).expand(T, V), "in_place": True}
    ),
    "is_mean 0": lambda k: k | {"spec": replace(k["spec"], is_mean=0.0)},
    "clip_dual 0.5": lambda k: k | {"spec": replace(k["spec"], clip_dual=0.5)},
    "log_limit 0": lambda k: k | {"spec": replace(k["spec"], log_limit=0.0)},
}


NONSENSE = [
    *(("clip_low", v) for v in (-1.0, math.nan)),
    *(("clip_high", v) for v in (-0.1, math.nan)),
    *(("clip_dual", v) for v in (-3.0, math.nan, 1.0)),
    *(("is_threshold", v) for v in (-2.0, 0.0, math.nan)),
    *(("bounds", v) for v in ((1.0, -1.0), (math.nan, 1.0), (0.0, math.nan))),
    *(("is_mean", v) for v in (-1.0, math.inf, math.nan)),
    *(("log_limit", v) for v in (-1.0, math.inf, math.nan)),
    *(("kl_coef", v) for v in (math.inf, math.nan)),
    *(("entropy_coef", v) for v in (-math.inf, math.nan)),
]


@pytest.mark.parametrize(("name", "value"), NONSENSE, ids=str)
def test_a_setting_that_makes_no_sense_is_refused_by_name(name: str, value: Any) -> None:
    given = good()
    with pytest.raises(ValueError, match=f"{name} .*: must be"):
        policy_loss(**given | {"spec": replace(given["spec"], **{name: value})})


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_factor_of_the_loss_is_not_rounded_before_it_multiplies(
    dtype: torch.dtype, in_place: bool
) -> None:
    given, spec = arguments()
    leaf = randn(T, V, dtype=dtype).requires_grad_()
    tokens = torch.arange(T) % V
    where = {"vocab_size": V, "in_place": in_place}
    plain = figures_of(leaf)[4]
    made = policy_loss(leaf * 1, tokens, given, spec, **where)
    factor = 1.0 + 2**-9  # nothing but 1 in bfloat16
    (grad,) = torch.autograd.grad(made.loss * factor * 1023, leaf)
    assert torch.equal(grad, (plain.float() * (factor * 1023)).to(dtype))


def test_a_gradient_in_place_that_was_written_over_is_an_error() -> None:
    given, spec = arguments()
    logits = randn(T, V, dtype=torch.float32).requires_grad_() * 1
    args, where = (torch.arange(T) % V, given, spec), {"vocab_size": V, "in_place": True}
    made = policy_loss(logits, *args, **where)
    policy_loss(logits, *args, **where)
    with pytest.raises(RuntimeError, match="in_place: .* was overwritten"):
        made.loss.backward()


@pytest.mark.parametrize("sentence", BAD)
def test_bad_input_is_a_sentence_that_names_the_argument(sentence: str) -> None:
    policy_loss(**good())
    with pytest.raises(ValueError, match=sentence):
        policy_loss(**BAD[sentence](good()))


REFUSED = {
    "gspo cannot be fused": ("gspo", {}),
    "rollout_is sequence": ("grpo", {"rollout_is": "sequence"}),
    "rollout_rs seq_mean_k3 cannot": ("ppo", {"rollout_rs": ("seq_mean_k3",)}),
    "rollout_rs token_k1 with bypass_mode": (
        "grpo",
        {"rollout_rs": ("token_k1",), "bypass_mode": True},
    ),
    "loss_agg_mode seq-mean-token-mean with rollout_rs": (
        "dapo",
        {"rollout_rs": ("token_k1",), "loss_agg_mode": "seq-mean-token-mean"},
    ),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_an_objective_that_cannot_be_fused_says_which_setting(sentence: str) -> None:
    name, settings = REFUSED[sentence]
    objective = Objective(algos.module(name), algos.config_class(name)(**settings), max_tokens=10)
    with pytest.raises(ValueError, match=f"--train.fused_loss: .*{sentence}.*turn"):
        objective.policy(rows(), old_is_own=False)


def test_which_build_runs_is_announced_once(
    monkeypatch: pytest.MonkeyPatch,
    build: str,  # noqa: F811
) -> None:
    said: list[str] = []
    monkeypatch.setattr(native, "announce", lambda what, choice: said.append(f"{what}: {choice}"))
    for _ in range(2):
        figures_of(torch.zeros(T, V))
    names = {"torch": "torch on cpu (RLCORE_NATIVE=0)", "native": "native on cpu"}
    assert f"policy_loss: {names[build]}" in said and len(said) == len(set(said))

"""The losses of distillation: `--algo gkd` against TRL's and verl's own functions, whose numbers
tools/studies/record_distillation.py has recorded, and `--algo opd` against PPO."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.algos import gkd, opd, ppo
from rlcore.algos.objective import Objective
from rlcore.tensors import LossInputs

PEERS = json.loads(Path(__file__).with_name("gkd_peers.json").read_text())


def exact(name: str) -> Tensor:
    return torch.tensor(PEERS[name], dtype=torch.float64)


def inputs(count: int, **more: Any) -> LossInputs:
    """Return loss inputs of one response of `count` tokens, before the first update: the policy's
    log-probs are the old policy's and the sampler's."""
    g = torch.Generator().manual_seed(0)
    logp = -torch.rand(count, generator=g, dtype=torch.float64)
    return LossInputs(
        log_probs=logp.clone().requires_grad_(),
        entropy=torch.zeros(count, dtype=torch.float64),
        mask=torch.ones(count, dtype=torch.bool),
        score=torch.zeros(count, dtype=torch.float64),
        advantage=torch.zeros(count, dtype=torch.float64),
        old_log_probs=logp,
        rollout_log_probs=logp,
        correction=torch.ones(count, dtype=torch.float64),
        ref_log_probs=None,
        sequence=torch.zeros(count, dtype=torch.int64),
        num_sequences=1,
        versions=torch.zeros(count, dtype=torch.int32),
        **more,
    )


def ours(count: int, **settings: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return gkd's loss [tokens], its gradient by the policy's logits and its metrics, computed as
    in a training step. `count`: number of the teacher's likeliest tokens."""
    policy, temperature = exact("policy").requires_grad_(), PEERS["temperature"]
    top = (exact("teacher") / temperature).log_softmax(-1).topk(count)
    of_policy = (policy / temperature).log_softmax(-1).gather(-1, top.indices)
    x = inputs(len(policy), teacher_top_log_probs=top.values, top_log_probs=of_policy)
    cfg = gkd.GKDConfig(**settings)
    assert not cfg.problems()
    out = Objective(gkd, cfg, max_tokens=8)(x)
    (grad,) = torch.autograd.grad(out.per_token.sum(), policy)
    return out.per_token.detach(), grad, out.metrics


@pytest.mark.parametrize("beta", PEERS["trl"])
@pytest.mark.parametrize("tail", [True, False])
def test_the_divergence_on_the_whole_vocabulary_is_that_of_trl(beta: str, tail: bool) -> None:
    loss, grad, _ = ours(len(PEERS["policy"][0]), beta=float(beta), tail=tail)
    theirs = {k: torch.tensor(v, dtype=torch.float64) for k, v in PEERS["trl"][beta].items()}
    assert theirs["loss"].min() > 0.1 and theirs["gradient"].abs().max() > 0.01
    assert torch.allclose(loss, theirs["loss"], rtol=0, atol=1e-9)
    assert torch.allclose(grad, theirs["gradient"], rtol=0, atol=1e-9)


def test_forward_kl_on_the_likeliest_tokens_is_that_of_verl() -> None:
    """verl's is in float32."""
    loss, grad, metrics = ours(6, beta=0.0, tail=False)
    theirs = {k: torch.tensor(v, dtype=torch.float64) for k, v in PEERS["verl"].items()}
    assert torch.allclose(loss, theirs["loss"], rtol=1e-6, atol=0)
    assert torch.allclose(grad, theirs["gradient"], rtol=1e-6, atol=1e-7)
    for name, key in (("actor/teacher_top_mass", "teacher"), ("actor/top_mass", "policy")):
        assert torch.allclose(metrics[name], theirs[f"{key}_mass"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_with_the_tail_it_is_a_divergence_of_distributions(beta: float) -> None:
    """Not negative, at most that of all tokens (data processing), 0 for equal models."""
    whole = ours(len(PEERS["policy"][0]), beta=beta)[0]
    for count in (1, 3, 9):
        loss, grad, _ = ours(count, beta=beta)
        assert (loss > 0).all() and (loss <= whole + 1e-12).all()
        # the gradient of a function of probabilities sums to 0 over the logits of a token
        assert torch.allclose(grad.sum(-1), torch.zeros(len(grad), dtype=torch.float64))
    q = exact("teacher").log_softmax(-1).topk(4).values
    assert gkd.divergence(gkd.with_tail(q), gkd.with_tail(q), beta).abs().max() < 1e-12


def test_a_tail_of_nothing_gives_no_gradient_and_no_nan() -> None:
    logits = torch.tensor([[40.0, 0.0, 0.0]], requires_grad=True)
    p = logits.log_softmax(-1)[:, :1]
    loss = gkd.divergence(gkd.with_tail(torch.tensor([[-1e-9]])), gkd.with_tail(p), 0.5)
    loss.sum().backward()
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert logits.grad is not None and logits.grad.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"rollout_is": "token"}, "rollout_is token"),
        ({"adv_estimator": "grpo"}, "adv_estimator grpo"),
        ({"teacher_kl_coef": 0.5}, "teacher_kl_coef 0.5"),
        ({"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold 0.5"),
    ],
)
def test_keys_without_an_effect_are_refused(settings: dict[str, Any], key: str) -> None:
    (said,) = gkd.GKDConfig(**settings).problems()
    assert said.startswith(f"--algo.{key}: has no effect with --algo gkd")


# ---- reverse KL as advantage


@pytest.mark.parametrize("algo", ["opd", "ppo"])
def test_the_teachers_log_ratio_is_the_advantage(algo: str) -> None:
    """The gradient is that of verl's policy loss with -KL as reward: (log p - log q) / N for each
    token, as long as nothing is clipped."""
    x = inputs(6, teacher_log_probs=-torch.rand(6, dtype=torch.float64))
    module, cfg = (
        (opd, opd.OPDConfig(teacher_kl_coef=0.5))
        if algo == "opd"
        else (ppo, ppo.PPOConfig(teacher_kl_coef=0.5))
    )
    reward = torch.arange(6, dtype=torch.float64) if algo == "ppo" else torch.zeros(6)
    out = Objective(module, cfg, max_tokens=8)(replace(x, advantage=reward))
    assert x.teacher_log_probs is not None
    gap = x.old_log_probs - x.teacher_log_probs
    (grad,) = torch.autograd.grad(out.per_token.sum(), x.log_probs)
    assert torch.allclose(grad, 0.5 * gap - reward)
    assert torch.equal(out.metrics["actor/teacher_kl"], gap)


def test_a_teachers_log_probs_outside_the_mask_do_not_matter() -> None:
    mask = torch.tensor([False, True, True])
    given = torch.tensor([float("nan"), -1.0, -2.0], dtype=torch.float64)
    x = replace(inputs(3, teacher_log_probs=given), mask=mask)
    out = Objective(opd, opd.OPDConfig(), max_tokens=8)(x)
    (grad,) = torch.autograd.grad(torch.where(mask, out.per_token, 0.0).sum(), x.log_probs)
    assert grad[0] == 0 and grad.isfinite().all() and grad[1:].abs().min() > 0
    assert out.metrics["actor/teacher_kl"].isfinite().all()

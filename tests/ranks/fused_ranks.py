"""What the ranks of test_fused_layouts.py run: ops on a split vocabulary, and the learner's four
ways to a gradient under a layout."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore import algos
from rlcore.algos.objective import Objective
from rlcore.mcore import learner as mcore
from rlcore.ops import head, logprob, policy
from rlcore.tensors import Batch, PolicyInputs, PolicySpec
from tests import kit
from tests.ranks import learner_ranks, objective_ranks

# ---- ops: T tokens, vocabulary V

T, H, V = 12, 5, 9
WIDTH = {1: 10, 2: 5, 4: 3}
"""Columns of a rank by ranks: 4 times 3 leave the last rank nothing but padding."""


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def weight_rows() -> Tensor:
    """[12, H] of the whole vocabulary and padding."""
    return randn(12, H, seed=1)


def impossible() -> Tensor:
    """[T, 12] added to the logits: in row 1 the first six tokens cannot be drawn, so that whole
    shards of it are -inf."""
    added = torch.zeros(T, 12, dtype=torch.float64)
    added[1, :6] = float("-inf")
    return added


TOKENS = torch.arange(T) * 5 % V  # row 1 has token 5 ...
TOKENS[1] = 7  # ... which it cannot draw


def terms() -> tuple[PolicyInputs, PolicySpec]:
    given = PolicyInputs(
        advantage=randn(T, seed=2),
        weight=(torch.arange(T) % 5 > 0) * 1.5,
        rollout_log_probs=-2.2 + 0.5 * randn(T, seed=3),
        old_log_probs=-2.2 + 0.5 * randn(T, seed=4),
        ref_log_probs=-2.2 + 0.5 * randn(T, seed=5),
    )
    spec = PolicySpec(
        is_threshold=1.1, bounds=(-0.9, 0.9), kl_type="k3", kl_coef=0.1, entropy_coef=0.02
    )
    return given, spec


def ops_on(size: int) -> dict[str, Tensor]:
    """Values and this rank's part of every gradient, on the group of the first `size` ranks."""
    group = dist.new_group(list(range(size))) if size > 1 else None
    rank, width = dist.get_rank() if size > 1 else 0, WIDTH[size]
    if rank >= size:
        return {}
    mine = slice(rank * width, (rank + 1) * width)
    where: dict[str, Any] = {"vocab_size": V, "temperature": 0.8, "group": group}
    given, spec = terms()
    found: dict[str, Tensor] = {}
    for in_place in (False, True):
        logits = randn(T, H) @ weight_rows().t() + impossible()
        leaf = logits[:, mine].contiguous().requires_grad_()
        made = logprob.log_probs(leaf * 1, TOKENS, in_place=in_place, **where)
        (made.logp.square() + made.entropy).sum().backward()
        name = f"log_probs in_place {in_place}"
        found |= {f"{name} logp": made.logp.detach(), f"{name} entropy": made.entropy.detach()}
        found[f"{name} columns"] = leaf.grad
        leaf.grad = None
        fused = policy.policy_loss(leaf * 1, TOKENS, given, spec, in_place=in_place, **where)
        fused.loss.backward()
        name = f"policy_loss in_place {in_place}"
        found |= {f"{name} loss": fused.loss.detach(), f"{name} logp": fused.logp}
        found |= {f"{name} tokens": fused.tokens, f"{name} columns": leaf.grad}
    for chunk in (5, T):
        hidden, weight = randn(T, H).requires_grad_(), weight_rows()[mine].requires_grad_()
        where["chunk_tokens"] = chunk
        made = head.log_probs(hidden, weight, TOKENS, **where)
        loss = (made.logp.square() + made.entropy).sum()
        fused = head.policy_loss(hidden, weight, TOKENS, given, spec, **where)
        for name, value in (("log_probs", loss), ("policy_loss", fused.loss)):
            dx, dw = torch.autograd.grad(value, (hidden, weight))
            if size > 1:
                dist.all_reduce(dx, group=group)
            found |= {f"head.{name} {chunk}": value.detach(), f"head.{name} {chunk} hidden": dx}
            found[f"head.{name} {chunk} rows"] = dw
    return found


def refused() -> str:
    """What a group that does not fit the logits is told."""
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return ""
    try:
        logprob.log_probs(torch.zeros(T, 4), TOKENS, vocab_size=V, group=group)
    except ValueError as e:
        return str(e)
    return "nothing"


# ---- the learner


CHUNK = 7
OBJECTIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo, mean of sequences": (
        "grpo",
        {"rollout_is_threshold": 1.1, "loss_agg_mode": "seq-mean-token-mean"},
    ),
    "dapo, all terms": (
        "dapo",
        {
            "kl_coef": 0.1,
            "entropy_coef": 0.01,
            "rollout_rs": ("token_k1",),
            "rollout_rs_threshold": ("0.8_1.3",),
            "clip_dual": 1.1,
        },
    ),
}


def batch_of(logp: Tensor) -> Batch:
    """Near policies, a weight for every token."""
    g = torch.Generator().manual_seed(9)
    batch = objective_ranks.with_log_probs(objective_ranks.rows(), logp)
    return batch.with_(weight=0.5 + torch.rand(batch.num_tokens, generator=g))


def four_ways(case: Mapping[str, Any], logp: Tensor | None) -> dict[str, Any]:
    """Gradients and figures of this layout: plain, fused, plain by chunks, fused by chunks."""
    found: dict[str, Any] = {}
    for chunk in (0, CHUNK):
        layout = dict(case["layout"]) | {"head_chunk_tokens": chunk}
        learner = learner_ranks.make(**(dict(case) | {"layout": layout}))
        if logp is None:
            logp = learner.logprobs(objective_ranks.rows())
        batch = learner_ranks.mine(learner, batch_of(logp))
        found["logp"] = logp
        found[f"logprobs, chunk {chunk}"] = learner.logprobs(batch)
        found[f"squares, chunk {chunk}"] = learner.logprobs_and_squares(batch)
        start = [p.detach().clone() for p in learner._parameters()]
        for name, (algo, settings) in OBJECTIVES.items():
            for fused in (False, True):
                if not (fused or chunk or learner.layout.world_size == 1):
                    continue  # whole logits and the objective's text: test_objective.py
                learner._train = replace(learner._train, fused_loss=fused)
                cfg = algos.config_class(algo)(**settings)
                objective = Objective(algos.module(algo), cfg, max_tokens=20)
                own = algo == "grpo"  # the first update of a rollout
                learner.accumulate(batch.with_(old_log_probs=None) if own else batch, objective)
                kept = learner.kept()
                mcore.finalize_model_grads(learner._models)
                for p in learner._parameters():  # export knows how to put parameters together
                    p.data.copy_(p.main_grad)
                gradient = kit.state(learner.export())
                for p, value in zip(learner._parameters(), start, strict=True):
                    p.data.copy_(value)
                figures = learner.apply(10.0)
                del figures["actor/grad_norm"]  # of gradients that are reduced twice
                for p, value in zip(learner._parameters(), start, strict=True):
                    p.data.copy_(value)
                found[f"{name}, chunk {chunk}, fused {fused}"] = {
                    "gradient": gradient,
                    "figures": figures,
                    "kept": list(kept),
                }
        learner.close()
    return found


def gang(rank: int, logp_file: str, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """All that four ranks run, in one start."""
    logp = torch.load(logp_file, weights_only=True)
    found: dict[str, Any] = {"ops 2": ops_on(2), "ops 4": ops_on(4), "refused": refused()}
    found["ways"] = {
        name: four_ways(case, logp[case.get("arch", "qwen3")]) for name, case in cases.items()
    }
    return found

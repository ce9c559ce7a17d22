"""What the ranks of test_objective.py run: the gradient of whole objectives."""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads

from rlcore import algos
from rlcore.algos import reduce
from rlcore.algos.objective import Objective
from rlcore.tensors import Batch
from tests import kit
from tests.ranks import learner_ranks
from tests.ranks.sizes import LENGTHS

# name: algorithm and its settings; between them every sequence-level term and every denominator
OBJECTIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo, token TIS": ("grpo", {}),
    "ppo, tokens rejected": ("ppo", {"rollout_rs": ("token_k1",), "clip_low": 0.1}),
    "gspo, sequence TIS": ("gspo", {"rollout_is": "sequence", "clip_high": 0.05}),
    "gmpo": ("gmpo", {}),
    "topr of sequences, sequences rejected": (
        "topr",
        {
            "level": "sequence",
            "rollout_rs": ("seq_mean_k3",),
            "rollout_rs_threshold": ("0.1",),
            "loss_agg_mode": "seq-mean-token-sum",
        },
    ),
    "kimi15, KL and entropy, mean of sequences, tokens rejected": (
        "kimi15",
        {
            "kl_coef": 0.1,
            "entropy_coef": 0.01,
            "rollout_rs": ("token_k2",),
            "rollout_rs_threshold": ("0.1",),
            "loss_agg_mode": "seq-mean-token-mean",
        },
    ),
    "grpo, responses masked, unbiased KL": (
        "grpo",
        {"off_policy_mask_threshold": 0.01, "kl_coef": 0.1, "kl_unbiased": True},
    ),
    "reinforce past the old policy": ("reinforce", {"bypass_mode": True}),
    "opd": ("opd", {"teacher_kl_coef": 0.5}),
    "gkd": ("gkd", {"beta": 0.3}),
    "gkd of one direction, entropy": ("gkd", {"beta": 1.0, "tail": False, "entropy_coef": 0.01}),
}


def rows() -> Batch:
    """Samples whose sampler, old policy and reference are all near the model in training, so that
    ratios lie on both sides of the clips; the same on every rank."""
    g = torch.Generator().manual_seed(5)
    like = learner_ranks.rows(0)
    adv = torch.randn(len(LENGTHS), generator=g).repeat_interleave(torch.tensor(LENGTHS))
    return Batch(
        tokens=like.tokens,
        cu_seqlens=like.cu_seqlens,
        mask=like.mask,
        advantage=adv,
        score=(adv > 0).float(),
        versions=torch.zeros(like.num_tokens, dtype=torch.int32),
        ids=tuple(f"t{i}" for i in range(len(LENGTHS))),
    )


def with_log_probs(batch: Batch, logp: torch.Tensor) -> Batch:
    """`logp` of the model on all rows, and policies some way off."""
    g = torch.Generator().manual_seed(6)
    near = [logp + 0.3 * torch.randn(len(logp), generator=g) for _ in range(4)]
    far = torch.randn(len(logp), 53, generator=g).log_softmax(-1)
    top = far.topk(6)
    return batch.with_(
        old_log_probs=near[0],
        rollout_log_probs=near[1],
        ref_log_probs=near[2],
        teacher_log_probs=near[3],
        teacher_top_ids=top.indices,
        teacher_top_log_probs=top.values,
    )


def gradient(layout: Mapping[str, Any], logp: torch.Tensor | None = None) -> dict[str, Any]:
    """{objective: {tensor: gradient, "kept": N}} on this rank's rows under the layout; gradients
    are under Hugging Face names, whole, divided by the global count."""
    learner = learner_ranks.make(dict(layout))
    if logp is None:
        logp = learner.logprobs(rows())
    batch = learner_ranks.mine(learner, with_log_probs(rows(), logp))
    weights = [p.detach().clone() for p in learner._parameters()]
    found: dict[str, Any] = {"logp": logp}
    for name, (algo, settings) in OBJECTIVES.items():
        cfg = algos.config_class(algo)(**settings)
        objective = Objective(algos.module(algo), cfg, max_tokens=20)
        learner.accumulate(batch, objective)
        kept = learner.kept()
        n = reduce.normaliser(cfg.loss_agg_mode, *kept)
        finalize_model_grads(learner._models)
        for p in learner._parameters():  # export knows how to put parameters together
            p.data.copy_(p.main_grad / n)
        found[name] = kit.state(learner.export()) | {"kept": torch.tensor(kept)}
        for p, value in zip(learner._parameters(), weights, strict=True):
            p.data.copy_(value)
        learner.apply(1.0)
        for p, value in zip(learner._parameters(), weights, strict=True):
            p.data.copy_(value)
    learner.close()
    return found


def alone(rank: int, logp_file: str, budgets: list[int]) -> dict[str, Any]:
    """One rank, under several cuts into micro-batches."""
    found: dict[str, Any] = {}
    for budget in budgets:
        first = next(iter(found.values()))["logp"] if found else None
        found[str(budget)] = gradient({"tokens_per_micro_batch": budget}, first)
    torch.save(next(iter(found.values()))["logp"], logp_file)
    return found


def gang(rank: int, logp_file: str, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Several ranks, under several layouts."""
    logp = torch.load(logp_file, weights_only=True)
    return {name: gradient(layout, logp) for name, layout in cases.items()}

"""The peer of compare_algos.py that answers with ROLL's own actor loss, see algo_peer.py.

The fourth word on the command line is a folder with ROLL's source. `ActorPGWorker.loss_func` runs
on a worker that was never set up: its strategy returns the case's log-probs and entropies.
"""

import hashlib
import inspect
import logging
import os
import sys
from types import SimpleNamespace
from typing import Any

import algo_peer
import torch
from algo_peer import Answer, Case

# What the actor's module imports beside the functions that it calls for a loss.
algo_peer.stub(
    "codetiming",
    "imageio",
    "ray",
    "tensordict",
    "transformers",
    "roll.configs",
    "roll.distributed",
    "roll.pipeline.agentic.agentic_config",
    "roll.pipeline.base_worker",
    "roll.pipeline.rlvr.rlvr_config",
    "roll.pipeline.rlvr.utils",
    "roll.platforms",
)
sys.path.insert(0, sys.argv[4])
os.chdir(os.path.dirname(sys.argv[3]))  # it writes a log into the working folder on import

from roll.pipeline.rlvr.actor_pg_worker import ActorPGWorker  # noqa: E402
from roll.utils.train_infer_corrections import compute_train_infer_correction  # noqa: E402


def loss(
    c: Case,
    variant: str,
    agg: str,
    actor: dict[str, Any] | None = None,
    ppo: dict[str, Any] | None = None,
    upper_bound: float | None = None,
    keep_ratio: tuple[float, float] | None = None,
    kl_loss_coef: float = 0.0,
    entropy_loss_coef: float = 0.0,
) -> Answer:
    """The total loss. `upper_bound` turns the weights of train against inference on, by token, and
    `keep_ratio` the filter of tokens by that ratio."""
    mask = c["mask"]
    # Its strategies give 0 as the log-prob, entropy and advantage of what is no response.
    logp, entropy = algo_peer.leaf(c["logp"] * mask), algo_peer.leaf(c["entropy"] * mask)
    correction = SimpleNamespace(
        is_weight=SimpleNamespace(
            enabled=upper_bound is not None,
            weight_type="token",
            upper_bound=upper_bound,
            detach=True,
        ),
        filters=[],
    )
    if keep_ratio is not None:
        low, high = keep_ratio
        correction.filters.append(
            SimpleNamespace(
                enabled=True,
                agg_type="token",
                ratio_enabled=True,
                ratio_low=low,
                ratio_high=high,
                diff_enabled=False,
            )
        )
    worker = object.__new__(ActorPGWorker)
    worker._pg_config_cache = {}
    worker._pg_variant_logged = worker._topr_sample_logged = True
    worker._cispo_config_logged = worker._kimi15_config_logged = True
    worker.logger = logging.getLogger("roll")
    worker.strategy = SimpleNamespace(
        op_compute_log_probs=lambda **_: logp * mask,
        op_compute_entropy=lambda **_: entropy * mask,
    )
    worker.get_old_log_probs_with_cache = lambda data, _: data.batch["old_log_probs"]
    worker.pipeline_config = SimpleNamespace(
        actor_train=SimpleNamespace(pg_variant=variant, **(actor or {})),
        difficulty_loss_weight=False,
        enable_old_logprobs_recompute=False,
        entropy_loss_coef=entropy_loss_coef,
        kl_loss_coef=kl_loss_coef,
        length_loss_weight=False,
        loss_agg_mode=agg,
        rl_loss_coef=1.0,
        train_infer_correction=correction,
        use_kl_loss=kl_loss_coef > 0,
        **{
            "dual_clip_loss": False,
            "pg_clip": 0.2,
            "pg_clip_high": 0.2,
            "pg_clip_low": 0.2,
            "use_pg_clip_range": False,
            **(ppo or {}),
        },
    )
    counts = {"response_mask": mask.sum()}
    responses = {"response_mask": (mask.sum(-1) > 0).sum()}
    before = torch.zeros(len(mask), 1, dtype=torch.int64)
    data = SimpleNamespace(
        batch={
            "response_mask": torch.cat([before, mask], dim=1),
            "ref_log_probs": c["ref"] * mask,
            "advantages": c["advantage"] * mask,
            "old_log_probs": c["old"] * mask,
            "infer_logprobs": c["sampler"] * mask,
            "input_ids": torch.cat([before, mask], dim=1),
            "scores": c["score"],
        },
        meta_info={"batch_num_tokens": counts, "global_valid_samples": responses},
        non_tensor_batch={},
    )
    total, _ = worker.loss_func(data, torch.zeros(0))
    return algo_peer.with_gradients(total, logp=logp, entropy=entropy)


def correction(c: Case, upper_bound: float, weight_type: str) -> Answer:
    """Weights of train against inference within the mask."""
    settings = SimpleNamespace(
        is_weight=SimpleNamespace(
            enabled=True, weight_type=weight_type, upper_bound=upper_bound, detach=True
        ),
        filters=[],
    )
    weights, _, _ = compute_train_infer_correction(settings, c["mask"], c["old"], c["sampler"])
    return {"weights": weights * c["mask"]}


if __name__ == "__main__":
    logging.disable(logging.INFO)
    source = inspect.getsource(sys.modules[ActorPGWorker.__module__]).encode()
    versions = {"actor_pg_worker.py sha256": hashlib.sha256(source).hexdigest()[:16]}
    algo_peer.serve({"loss": loss, "correction": correction}, versions)

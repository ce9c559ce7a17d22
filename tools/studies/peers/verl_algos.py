"""The peer of compare_algos.py that answers with verl's own functions, see algo_peer.py."""

from typing import Any

import algo_peer
import torch
from algo_peer import Answer, Case

algo_peer.stub("codetiming", "ray", "transformers")

import verl  # noqa: E402
from verl.trainer.config import AlgoConfig  # noqa: E402
from verl.trainer.ppo import core_algos, rollout_corr_helper  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402
from verl.workers.config.actor import PolicyLossConfig  # noqa: E402


def policy_loss(
    c: Case,
    mode: str,
    agg: str,
    max_tokens: int,
    actor: dict[str, Any],
    correction: dict[str, Any] | None = None,
    bypass: dict[str, Any] | None = None,
    kl: dict[str, Any] | None = None,
    entropy_coeff: float = 0.0,
    loss_keys: dict[str, Any] | None = None,
    counts: dict[str, int] | None = None,
) -> Answer:
    """A registered policy loss with the correction before it and KL and entropy behind it, put
    together as verl's actor does. The whole batch is one micro-batch, and its denominators are
    those of the masks, or `counts` as verl's trainer hands them in."""
    logp, entropy, mask = algo_peer.leaf(c["logp"]), algo_peer.leaf(c["entropy"]), c["mask"]
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(
            loss_mode=mode, rollout_correction=bypass or {}, **(loss_keys or {})
        ),
        **actor,
    )
    norm = {"loss_scale_factor": max_tokens, **(counts or {})}
    config.global_batch_info.update(norm)
    weights, old = None, c["sampler"] if bypass is not None else c["old"]
    if correction is not None:
        weights, mask, _ = _correction(c, correction)
    loss, metrics = core_algos.get_policy_loss_fn(mode)(
        old_log_prob=old,
        log_prob=logp,
        advantages=c["advantage"],
        response_mask=mask,
        loss_agg_mode=agg,
        config=config,
        rollout_is_weights=weights,
    )
    if entropy_coeff:
        bonus = core_algos.agg_loss(loss_mat=entropy, loss_mask=mask, loss_agg_mode=agg, **norm)
        loss = loss - entropy_coeff * bonus
    if kl is not None:
        divergence = core_algos.kl_penalty(logp, c["ref"], kl["type"])
        loss = loss + kl["coef"] * core_algos.agg_loss(
            loss_mat=divergence, loss_mask=mask, loss_agg_mode=agg, **norm
        )
    names = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl")
    found = {f"metric {n}": float(metrics[n]) for n in names if n in metrics}
    return algo_peer.with_gradients(loss, logp=logp, entropy=entropy) | found


def _correction(c: Case, settings: dict[str, Any]):
    found = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
        old_log_prob=c["old"],
        rollout_log_prob=c["sampler"],
        response_mask=c["mask"],
        **settings,
    )
    proto, mask, metrics = found
    return None if proto is None else proto.batch["rollout_is_weights"], mask, metrics


def correction(c: Case, **settings) -> Answer:
    """Weights, the mask that is left, and every rollout_corr/* figure."""
    weights, mask, metrics = _correction(c, settings)
    out: Answer = {"mask": mask.to(c["old"].dtype)}
    if weights is not None:
        out["weights"] = weights * c["mask"]
    return out | {f"metric {name}": float(value) for name, value in metrics.items()}


def weights(c: Case, **settings) -> Answer:
    """Weights within the mask alone."""
    found, _, _ = _correction(c, settings)
    return {"weights": found * c["mask"]}


def advantage(
    c: Case, estimator: str, groups: str, gamma: float, lam: float, by_std: bool
) -> Answer:
    """Advantages and returns within the mask; `groups` is the array with the group of a row."""
    rewards, mask, group = c["token_reward"], c["mask"], c[groups].numpy()
    config = AlgoConfig(gamma=gamma, lam=lam, norm_adv_by_std_in_grpo=by_std)
    call = core_algos.get_adv_estimator_fn(estimator)
    if estimator == "gae":
        found = call(rewards, c["value_old"], mask, gamma, lam)
    elif estimator == "remax":
        found = call(rewards, c["baseline"], mask, config=config)
    elif estimator == "reinforce_plus_plus":
        found = call(rewards, mask, config=config)
    elif estimator in ("grpo", "grpo_vectorized"):
        found = call(rewards, mask, group, norm_adv_by_std_in_grpo=by_std, config=config)
    else:
        found = call(rewards, mask, index=group, config=config)
    out: Answer = {"advantages": found[0] * mask}
    if estimator in ("gae", "remax", "reinforce_plus_plus"):
        out["returns"] = found[1] * mask
    return out


def token_baseline(
    c: Case, estimator: str, tools: bool, zero_tail: bool, correction: dict[str, object]
) -> Answer:
    """Advantages and returns of every token; without `tools` all tokens of a response are
    trained."""
    mask = c["mask"]
    if not tools:
        mask = (torch.arange(mask.shape[1]) < c["length"][:, None]).to(mask.dtype)
    weights = _correction(c | {"mask": mask}, correction)[0] if correction else None
    found = core_algos.get_adv_estimator_fn(estimator)(
        c["token_reward"],
        mask,
        c["group"].numpy(),
        c["old"],
        c["sum_pi_squared"],
        rollout_is_weights=weights,
        handle_zero_tail=zero_tail,
    )
    return {"advantages": found[0], "returns": found[1] * mask}


def kl_penalty(c: Case, kind: str) -> Answer:
    """The estimate of every token and the gradient of its sum over the mask."""
    logp = algo_peer.leaf(c["logp"])
    values = core_algos.kl_penalty(logp, c["ref"], kind) * c["mask"]
    return {"values": values.detach()} | {
        "d_logp": algo_peer.with_gradients(values.sum(), logp=logp)["d_logp"]
    }


def controller(c: Case, start: float, target: float, horizon: int, samples: int) -> Answer:
    """The coefficient after every KL of the case."""
    control = core_algos.AdaptiveKLController(start, target, horizon)
    out = []
    for kl in c["kls"].tolist():
        control.update(kl, samples)
        out.append(float(control.value))
    return {"values": torch.tensor(out, dtype=torch.float64)}


def value_loss(c: Case, clip: float) -> Answer:
    """The critic's loss over the mean of all tokens."""
    value = algo_peer.leaf(c["value"])
    loss, clipped = core_algos.compute_value_loss(
        value, c["returns"], c["value_old"], c["mask"], clip, "token-mean"
    )
    out = algo_peer.with_gradients(loss, value=value)
    return out | {"metric critic/vf_clipfrac": float(clipped)}


if __name__ == "__main__":
    functions = (policy_loss, correction, weights, advantage, token_baseline)
    functions += (kl_penalty, controller, value_loss)
    algo_peer.serve({f.__name__: f for f in functions}, {"verl": verl.__version__})

"""Compute the advantages of all tokens from rewards: KL penalty, estimator, whitening.

Estimators with one advantage per response need the rewards of whole groups, from the `StepPlan`.
Estimators with one advantage per token use this rank's batches. Whitening and token baselines
span all ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlcore import algos
from rlcore.algos import advantage, kl, returns, sequence, value
from rlcore.algos.base import TOKEN_BASELINES
from rlcore.data.packing import by_id
from rlcore.records import Group, group_of, is_baseline, without_baseline
from rlcore.rewards import registry
from rlcore.tensors import Batch
from rlcore.trainer.phases import made
from rlcore.trainer.plan import StepPlan, overlong
from rlcore.trainer.run import Run
from rlcore.utils import collective
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import log


def assign(
    run: Run, plan: StepPlan, batches: list[Batch], baselines: dict[str, float]
) -> list[Batch]:
    """Add advantages to this rank's batches; estimators per token also add returns, the critic's
    targets. `baselines`: rewards of the greedy responses by group id (remax). Collective."""
    cfg = run.cfg.algo
    penalties = kl_penalties(run, plan, batches) if cfg.kl_reward_coef else None
    estimator = algos.estimator(run.algo, cfg)
    if estimator in returns.TOKEN:
        out = _by_token(run, plan, batches, penalties, baselines)
    elif estimator in TOKEN_BASELINES:
        out = _by_baseline(run, plan, batches, penalties)
    else:
        out = by_response(run, plan, batches, penalties)
    run.progress.add(spread("critic/advantages", [(made(b.advantage), b.mask) for b in out]))
    if out and out[0].returns is not None:
        run.progress.add(spread("critic/returns", [(made(b.returns), b.mask) for b in out]))
    return out


def split_baselines(
    run: Run, groups: Sequence[Group]
) -> tuple[tuple[Group, ...], dict[str, float]]:
    """Separate the groups to train on from the groups of greedy responses (remax). Return the
    groups to train on, and each greedy response's length-shaped reward by group id."""
    cfg, greedy = run.cfg, {}
    for g in (g for g in groups if is_baseline(g.id)):
        lost = overlong(g.lengths[0], cfg.rollout.max_tokens, cfg.algo)
        greedy[without_baseline(g.id)] = g.scores[0] - lost
        if g.errors[0] and run.ranks.rank == 0:
            log.warning("the greedy answer of %s scores %g: %s", g.id, g.scores[0], g.errors[0])
    return tuple(g for g in groups if not is_baseline(g.id)), greedy


def by_response(
    run: Run, plan: StepPlan, batches: list[Batch], penalties: list[Tensor] | None = None
) -> list[Batch]:
    """Compute one advantage per response; the summed KL penalty of its tokens reduces its reward.
    If the algorithm's module defines `advantages(groups, cfg)`, this function is the estimator."""
    lost = {} if penalties is None else _sums_by_row(run, plan, batches, penalties)
    trained = plan.owners().keys()
    cfg, found = run.cfg.algo, []
    weights: tuple[float, ...] = ()
    if cfg.adv_estimator == "gdpo":
        weights = tuple(part.weight for part in registry.parts_of(run.cfg.select.reward))
    groups = [
        advantage.GroupRewards(
            rewards=tuple(r.reward - lost.get(r.id, 0.0) for r in members),
            lengths=tuple(r.num_trained for r in members),
            trained=tuple(r.num_trained if r.id in trained else 0 for r in members),
            terms=tuple(r.terms for r in members) if weights else (),
            weights=weights,
        )
        for members in plan.groups
    ]
    if groups and algos.estimator(run.algo, cfg) == "own":
        found = run.algo.advantages(groups, cfg)
        found = advantage.whitened(found, groups) if cfg.whiten_advantages else found
    elif groups:
        found = advantage.outcome(groups, cfg)
    found_of = {
        r.id: a
        for members, values in zip(plan.groups, found, strict=True)
        for r, a in zip(members, values, strict=True)
    }
    run.progress.add_advantages(found_of)
    return [b.with_(advantage=by_id(found_of, b)) for b in batches]


def _by_token(
    run: Run,
    plan: StepPlan,
    batches: list[Batch],
    penalties: list[Tensor] | None,
    baselines: dict[str, float],
) -> list[Batch]:
    """Compute advantages and returns of every token. Whitening, if on, is over the whole step."""
    cfg, out = run.cfg.algo, []
    rewards = _token_rewards(run, plan, batches, penalties)
    for batch, reward in zip(batches, rewards, strict=True):
        base = None
        if cfg.adv_estimator == "remax":
            base = [baselines[group_of(id)] for id in batch.ids]
        found, gains = returns.advantages(batch, reward, cfg, base)
        out.append(batch.with_(advantage=found, returns=gains))
    if cfg.adv_estimator == "gae":
        run.progress.add({"critic/vf_explained_var": explained(run, out)})
    if cfg.adv_estimator == "remax" and not cfg.whiten_advantages:
        return out
    return _whitened(run, out)


def _by_baseline(
    run: Run, plan: StepPlan, batches: list[Batch], penalties: list[Tensor] | None
) -> list[Batch]:
    """Compute advantages and returns of every token with a baseline for each place of a group,
    whose responses may be on several ranks and in several updates.

    Raises:
        ConfigError: a callback has excluded responses, which have no log-probs.
    """
    excluded = {r.id for members in plan.groups for r in members} - plan.owners().keys()
    if excluded:
        raise ConfigError(
            f"--run.callbacks: keep_sample has excluded {len(excluded)} responses, and "
            f"--algo.adv_estimator {run.cfg.algo.adv_estimator} needs the log-probs of all "
            "responses of a group; train on them, or use another estimator"
        )
    index = {row.id: i for i, members in enumerate(plan.groups) for row in members}
    rewards = _token_rewards(run, plan, batches, penalties)
    terms = [
        returns.baseline_terms(b, reward, run.cfg.algo, [index[id] for id in b.ids])
        for b, reward in zip(batches, rewards, strict=True)
    ]
    longest = max((int(x.place.max()) + 1 for x in terms if len(x.place)), default=0)
    shape = len(plan.groups), int(collective.reduce_floats([longest], "max")[0])
    sums = torch.zeros(*shape, 3, dtype=torch.float64)
    for x in terms if run.ranks.leads_model_parallel_group else ():
        sums += returns.baseline_sums(x, *shape).cpu()
    collective.reduce_tensor(sums)
    out = []
    for batch, reward, x in zip(batches, rewards, terms, strict=True):
        found, gains = returns.above_baseline(x, reward, sums)
        out.append(batch.with_(advantage=found, returns=gains, log_sum_pi_squared=None))
    return _whitened(run, out) if run.cfg.algo.whiten_advantages else out


def _token_rewards(
    run: Run, plan: StepPlan, batches: list[Batch], penalties: list[Tensor] | None
) -> list[Tensor]:
    """Return the reward of each token of every batch, [T] each."""
    out = []
    for u, batch in enumerate(batches):
        rewards = {r.id: r.reward for r in plan.updates[u][run.ranks.dp_rank]}
        penalty = None if penalties is None else penalties[u]
        out.append(returns.token_rewards(batch, [rewards[id] for id in batch.ids], penalty))
    return out


def _whitened(run: Run, out: list[Batch]) -> list[Batch]:
    """Whiten the advantages over the trained tokens of the whole step. Collective."""
    sums = torch.zeros(3, dtype=torch.float64)
    if run.ranks.leads_model_parallel_group:
        for b in out:
            sums += returns.whitening_sums(made(b.advantage), b.mask)
    sums = torch.tensor(collective.reduce_floats(sums.tolist()), dtype=torch.float64)
    return [b.with_(advantage=returns.whitened(made(b.advantage), b.mask, sums)) for b in out]


def explained(run: Run, batches: list[Batch]) -> float:
    """Return the share of the returns' variance that the critic's old values explain.
    Collective."""
    sums = torch.zeros(5, dtype=torch.float64)
    if run.ranks.leads_model_parallel_group:
        for b in batches:
            sums += value.variance_sums(made(b.value_old), made(b.returns), b.mask)
    return value.explained_variance(collective.reduce_floats(sums.tolist()))


def kl_penalties(run: Run, plan: StepPlan, batches: list[Batch]) -> list[Tensor]:
    """Return the KL penalty [T] of every batch. Add the metrics of the penalty, and update the
    adaptive KL controller. Collective."""
    cfg = run.cfg.algo
    coefficient = cfg.kl_reward_coef * run.kl.scale  # Read the KL scale before its update below.
    kind = cfg.kl_reward_type
    found = [kl.estimate(kind, made(b.old_log_probs), made(b.ref_log_probs)) for b in batches]
    means = torch.zeros(2, dtype=torch.float64)
    if run.ranks.leads_model_parallel_group:
        for b, values in zip(batches, found, strict=True):
            where = (b.mask, b.sequence_index, b.num_sequences)
            means[0] += sequence.mean(values.double(), *where).sum()
            means[1] += b.num_sequences
    total, count = collective.reduce_floats(means.tolist())
    mean = total / max(count, 1.0)
    run.progress.add(
        {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": coefficient}
    )
    if run.trains_actor:  # Before the actor is trained, it equals the reference: the KL is 0.
        run.kl.update(mean, int(count))
    return [coefficient * values for values in found]


def _sums_by_row(
    run: Run, plan: StepPlan, batches: list[Batch], values: list[Tensor]
) -> dict[str, float]:
    """Sum `values` over each row's trained tokens, by row id, for all ranks' rows. Collective."""
    ids = [r.id for update in plan.updates for part in update for r in part]
    place = {id: i for i, id in enumerate(ids)}
    sums = [0.0] * len(ids)
    if run.ranks.leads_model_parallel_group:
        for b, v in zip(batches, values, strict=True):
            rows = sequence.total(v.double(), b.mask, b.sequence_index, b.num_sequences)
            for id, lost in zip(b.ids, rows.tolist(), strict=True):
                sums[place[id]] += lost
    return dict(zip(ids, collective.reduce_floats(sums), strict=True))


def spread(name: str, parts: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return mean, maximum and minimum over the trained tokens of all ranks. Collective. Equally
    many ranks hold each token, so the mean is not biased."""
    values = torch.cat([v[m].double() for v, m in parts]) if parts else torch.zeros(0)
    some = values.numel() > 0
    total, count = collective.reduce_floats([float(values.sum()), float(values.numel())])
    high, low = collective.reduce_floats(
        [float(values.max()), -float(values.min())] if some else [-torch.inf, -torch.inf], "max"
    )
    if not count:
        return {}
    return {f"{name}/mean": total / count, f"{name}/max": high, f"{name}/min": -low}

"""Run the phases of a step around the update: batches, log-probs, values, engine sizes.
"Collective" without ranks means: over the train ranks."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rlcore.algos import correction
from rlcore.algos.base import TOKEN_BASELINES
from rlcore.config import rules
from rlcore.data.packing import by_id, pack_samples, per_token
from rlcore.records import Sample
from rlcore.sched.roles import Kind
from rlcore.tensors import Batch
from rlcore.trainer.demonstrations import DemonstrationBatch
from rlcore.trainer.plan import StepPlan
from rlcore.trainer.run import Run
from rlcore.utils import collective


def batches(run: Run, plan: StepPlan, samples: Mapping[str, Sample]) -> list[Batch]:
    """Pack one batch per update from the samples of this data-parallel rank.

    Raises:
        ValueError: a sample has a wrong shape or a value that is not finite.
    """
    out = []
    for update in plan.updates:
        rows = update[run.ranks.dp_rank]
        batch = pack_samples([samples[r.id] for r in rows])
        batch = batch.with_(score=by_id({r.id: r.score for r in rows}, batch))
        if run.cfg.algo.loss_agg_mode == "seq-mean-token-mean":
            batch = batch.with_(weight=share_of_sample(batch))
        batch.check()
        out.append(batch)
    return out


def share_of_sample(batch: Batch) -> Tensor | None:
    """Return the factors [T] with which a mean over each row becomes one over each sample: the
    row's share of the sample's trained tokens. None if every sample has one row."""
    if len(set(batch.ids)) == len(batch.ids):
        return None
    counts = [int(mask.sum()) for mask in batch.mask.split(batch.lengths)]
    totals: Counter[str] = Counter()
    for id, count in zip(batch.ids, counts, strict=True):
        totals[id] += count
    shares = [n / max(totals[id], 1) for id, n in zip(batch.ids, counts, strict=True)]
    return per_token(shares, batch)


def made(value: Tensor | None) -> Tensor:
    """Return the tensor `value`; raise AssertionError if no earlier phase has computed it."""
    assert value is not None, "set by an earlier phase"
    return value


def old_logprobs(run: Run, batches: list[Batch]) -> list[Batch]:
    """Compute the old log-probs: the learner's log-probs under the weights before the first update.

    The first update trains with exactly these weights, so its training pass itself yields its old
    log-probs, and its batch is skipped here. With several epochs, or if an earlier phase needs
    log-probs, the first batch is not skipped. Estimators with a baseline for each token also need
    the sum of squared probabilities, which this pass gives.
    """
    cfg = run.cfg.algo
    if cfg.bypass_mode:
        return [b.with_(old_log_probs=b.rollout_log_probs) for b in batches]
    squares = cfg.adv_estimator in TOKEN_BASELINES
    early = cfg.kl_reward_coef > 0 or cfg.rollout_is_batch_normalize or squares
    skip_first = run.cfg.train.epochs == 1 and not early
    out = []
    for u, batch in enumerate(batches):
        if u == 0 and skip_first:
            out.append(batch)
        elif cfg.routing_replay == "old":
            logp, routes = run.learner.logprobs_and_routes(batch)
            out.append(batch.with_(old_log_probs=logp, routes=routes))
            run.spans.alive()
        elif squares:
            logp, found = run.learner.logprobs_and_squares(batch)
            out.append(batch.with_(old_log_probs=logp, log_sum_pi_squared=found))
            run.spans.alive()
        else:
            out.append(batch.with_(old_log_probs=run.learner.logprobs(batch, "actor")))
            run.spans.alive()
    return out


def reference_logprobs(run: Run, batches: list[Batch]) -> list[Batch]:
    """Compute the log-probs of the start weights (the KL reference)."""
    with run.learner.reference():
        return [b.with_(ref_log_probs=run.learner.logprobs(b, "reference")) for b in batches]


def teacher_logprobs(
    run: Run, plan: StepPlan, batches: list[Batch], further: list[DemonstrationBatch]
) -> tuple[list[Batch], list[DemonstrationBatch]]:
    """Compute the teachers' log-probs of the samples and of the demonstrations `further`.
    Collective over the model-parallel group."""
    assert run.teachers is not None
    datasets = {row.id: row.dataset for group in plan.groups for row in group}
    for part in further:
        datasets |= part.datasets
    every = [*batches, *(part.batch for part in further)]
    made = run.teachers.add(every, datasets, run.spans.alive)
    run.progress.add(run.teachers.metrics())
    rest = zip(further, made[len(batches) :], strict=True)
    return made[: len(batches)], [replace(part, batch=batch) for part, batch in rest]


def old_values(run: Run, batches: list[Batch]) -> list[Batch]:
    """Compute the critic's values before its first update."""
    assert run.critic is not None
    return [b.with_(value_old=run.critic.values(b)) for b in batches]


def correction_mean(run: Run, batches: list[Batch]) -> float:
    """Return the mean correction weight of this step, by which the rollout-correction weights are
    divided. Collective."""
    cfg = run.cfg.algo
    if not cfg.rollout_is_batch_normalize or cfg.rollout_is == "none":
        return 1.0
    sums = torch.zeros(2, dtype=torch.float64)
    if run.ranks.leads_model_parallel_group:
        for b in batches:
            where = (b.mask, b.sequence_index, b.num_sequences)
            log_w = made(b.old_log_probs) - made(b.rollout_log_probs)
            sums += correction.normalisation_sums(cfg, log_w, *where)
    return correction.mean(*collective.reduce_floats(sums.tolist()))


def observe_round(run: Run, kind: Kind, stats: Mapping[str, float]) -> None:
    """Report a training rollout to the policy that chooses the engine size. Add metrics of cache
    use and engine size. Collective over all ranks. Only rank 0 reads `kind` and `stats`."""
    used = [run.rollout.worker.cache_used]
    (used_most,) = collective.reduce_floats(used, "max", run.ranks.everyone)
    sizes = run.device.parts.sizes
    if run.ranks.rank == 0:
        run.progress.add({"sched/cache_used": used_most})
    if sizes.policy is not None:
        run.progress.add({"sched/rollout_tp": float(sizes.now.tp)})
        sizes.observe(kind, round(stats.get("sched/preemptions", 0.0)), used_most)


def resize_engines(run: Run) -> None:
    """If the policy chooses another engine size for the next rollout, restart the engines without
    weights. Collective.

    Raises:
        TimeoutError: an engine did not start in time; the error names its rank.
    """
    if not rules.changes_size(run.cfg) or run.step >= run.cfg.run.steps:
        return
    sizes, wanted = run.device.parts.sizes, 0.0
    if sizes.policy is not None:
        assert run.data.source is not None
        wanted = float(sizes.policy.size(run.data.source.next_kind()))
    tp = int(collective.reduce_floats([wanted], "max")[0])
    if tp != sizes.now.tp:
        with run.spans.phase("resize_engines"):
            run.device.resize_engines(tp)

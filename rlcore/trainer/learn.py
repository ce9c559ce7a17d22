"""Train on the samples of a step: log-probs, values, advantages, critic and actor updates."""

from collections.abc import Sequence
from functools import partial

from rlcore.algos import reduce, value
from rlcore.algos.objective import Objective
from rlcore.tensors import Batch
from rlcore.trainer import advantages, demonstrations, phases, report
from rlcore.trainer.demonstrations import DemonstrationBatch
from rlcore.trainer.plan import StepPlan
from rlcore.trainer.run import Run
from rlcore.utils import collective


def all_models(run: Run, todo: StepPlan, batches: list[Batch], baselines: dict[str, float]) -> None:
    """Compute log-probs, values and advantages, then update critic and actor. `baselines`: rewards
    of the greedy responses by group id (remax)."""
    cfg, spans = run.cfg, run.spans
    with spans.phase("old_log_prob"):
        batches = phases.old_logprobs(run, batches)  # collective over the train ranks
    if cfg.algo.needs_reference:
        with spans.phase("ref"):
            batches = phases.reference_logprobs(run, batches)  # collective over the train ranks
    further = demonstrations.of_step(run)  # collective over the train ranks
    if run.teachers is not None:
        with spans.phase("teacher"):
            batches, further = phases.teacher_logprobs(run, todo, batches, further)
    if run.critic is not None:
        with spans.phase("values"):
            batches = phases.old_values(run, batches)  # collective over the train ranks
    kl_scale = run.kl.scale
    with spans.phase("adv"):
        batches = advantages.assign(run, todo, batches, baselines)  # Collective on the train ranks.
        mean = phases.correction_mean(run, batches)  # collective over the train ranks
    if run.critic is not None:
        with spans.phase("update_critic"):
            update_critic(run, todo, batches)
    if run.trains_actor:
        with spans.phase("update_actor"):
            update_actor(run, todo, batches, further, mean, kl_scale)


def update_actor(
    run: Run,
    todo: StepPlan,
    batches: list[Batch],
    further: list[DemonstrationBatch],
    correction_mean: float,
    kl_scale: float,
) -> None:
    """Run the actor's optimizer steps on the samples of this step, and on the demonstrations
    `further` of each update, if there are any."""
    objective = make_objective(run, correction_mean, kl_scale)
    for epoch in range(run.cfg.train.epochs):
        if epoch == 1:
            objective.stop_watching()
        for u, batch in enumerate(batches):
            if lengths := todo.lengths(u):
                parts = further[u : u + 1]
                begin_update(run, lengths, batch, parts)  # collective over the train ranks
                run.learner.accumulate(batch, objective)
                for part in parts:
                    lengths += accumulate_demonstrations(run, part)
                step_actor(run, lengths, objective)  # collective over the train ranks
                run.spans.alive()
    conclude(run, todo, objective, kl_scale)  # collective over the train ranks


def begin_update(
    run: Run, lengths: Sequence[int], batch: Batch, parts: Sequence[DemonstrationBatch]
) -> None:
    """Announce an update to the learner: its tokens on this rank, and its normaliser if the loss
    rejects no tokens. `lengths`: as in `step_actor`, without the demonstrations `parts`."""
    every = [*lengths, *(n for part in parts for n in part.lengths)]
    n = reduce.normaliser(run.cfg.algo.loss_agg_mode, sum(every), len(every))
    num_tokens = batch.num_tokens + sum(part.batch.num_tokens for part in parts)
    run.learner.begin_update(num_tokens, n)


def make_objective(run: Run, correction_mean: float, kl_scale: float) -> Objective:
    """Return the loss function of this step."""
    return Objective(
        run.algo,
        run.cfg.algo,
        max_tokens=run.cfg.rollout.max_tokens,
        version=run.step - 1,
        correction_mean=correction_mean,
        kl_scale=kl_scale,
    )


def accumulate_demonstrations(run: Run, part: DemonstrationBatch) -> list[int]:
    """Accumulate the gradients of the demonstrations of an update. Return the number of learned
    tokens of each row, over all ranks."""
    objective = make_objective(run, 1.0, 1.0)
    objective.stop_watching()  # the policy has not sampled them
    run.learner.accumulate(part.batch, objective)
    return part.lengths


def step_actor(run: Run, lengths: Sequence[int], objective: Objective) -> None:
    """Run one optimizer step of the actor on the accumulated gradients. `lengths`: number of
    trained tokens of each row of the update, over all ranks. Collective."""
    n = reduce.normaliser(run.cfg.algo.loss_agg_mode, sum(lengths), len(lengths))
    if objective.rejects:
        n = reduce.normaliser(run.cfg.algo.loss_agg_mode, *run.learner.kept())
    if n:
        report.add_update(run, run.learner.apply(n), "actor")
    else:  # If all tokens are rejected, an optimizer step would only follow Adam's momentum.
        run.learner.discard()
        report.skip_update(run, "actor")


def conclude(run: Run, todo: StepPlan, objective: Objective, kl_scale: float) -> None:
    """Add the step's mismatch and KL metrics; update the adaptive KL controller. Collective."""
    cfg = run.cfg
    run.progress.add(objective.mismatch(collective.reduce_floats))
    if cfg.algo.kl_coef and "actor/kl_loss" in run.progress.metrics:
        run.progress.add({"actor/kl_loss_coeff": cfg.algo.kl_coef * kl_scale})
        if not cfg.algo.kl_reward_coef:  # With a KL reward penalty, advantages.py updates `run.kl`.
            run.kl.update(run.progress.metrics["actor/kl_loss"], sum(len(p) for p in todo.groups))


def update_critic(run: Run, todo: StepPlan, batches: list[Batch]) -> None:
    """Run the critic's optimizer steps on the samples of this step. The critic's loss is always a
    mean over tokens: shares of samples (`loss_agg_mode`) are the actor's. Collective over the train
    ranks."""
    assert run.critic is not None
    cfg = run.cfg
    loss = partial(value.loss, clip=cfg.critic.clip_value)
    for _ in range(cfg.train.epochs):
        for u, batch in enumerate(batches):
            if lengths := todo.lengths(u):
                run.critic.accumulate(batch.with_(weight=None), loss)
                report.add_update(run, run.critic.apply(float(sum(lengths))), "critic")
                run.spans.alive()

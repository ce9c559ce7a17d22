"""The synchronous loop: rollout, reward, log-probs, update, sync. Strictly on-policy.

Every rank runs this program; lines marked C are collective over the train ranks. The phases have
the papers' names, and the metrics `timing_s/<phase>` are their seconds.
"""

import os
import signal
from collections.abc import Sequence
from functools import partial

from rlcore.algos import reduce, value
from rlcore.records import BASELINE, Group, is_baseline
from rlcore.tensors import Batch
from rlcore.trainer import credit, evaluate, phases, plan, report, resume
from rlcore.trainer.objective import Objective
from rlcore.trainer.run import Run
from rlcore.utils import collective
from rlcore.utils import seed as seeds
from rlcore.utils.log import log


def train(run: Run) -> None:
    """From the step that was restored to `--run.steps`, then the last evaluation and checkpoint."""
    cfg = run.cfg
    push_weights(run)
    if run.step == 0 and cfg.eval.at_start:
        with run.spans.phase("eval"):
            evaluate.run(run)
        report.evaluation(run)
    while run.step < cfg.run.steps:
        run.step += 1
        with run.spans.phase("step"):
            one_step(run)
        last = run.step == cfg.run.steps
        if (cfg.eval.at_end and last) or (cfg.eval.every and run.step % cfg.eval.every == 0):
            with run.spans.phase("eval"):
                evaluate.run(run)
        report.step(run)
        every = cfg.checkpoint.every
        if (cfg.checkpoint.at_end and last) or (every and run.step % every == 0):
            with run.spans.phase("save"), phases.learner_here(run):
                resume.save(run)  # C
        if cfg.debug.die_at_step == run.step and run.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    report.end(run)
    if cfg.checkpoint.export_hf:
        with phases.learner_here(run):
            resume.export_hf(run)  # C


def one_step(run: Run) -> None:
    """One rollout and everything that is learned from it."""
    cfg, spans = run.cfg, run.spans
    with spans.phase("gen"):
        work = []
        if run.source is not None:
            work = run.source.next_round(cfg.data.prompts_per_step, run.sampling)
        end = run.rollout.run(work)
        groups, baselines = split_baselines(run, end.groups)
    with spans.phase("route"):
        todo = plan.make(
            groups,
            cfg.algo,
            num_updates=run.num_updates,
            num_ranks=len(run.replicas),
            seed=seeds.derive(cfg.run.seed, "step", run.step),
            max_tokens=cfg.rollout.max_tokens,
            shuffle_rewards=cfg.debug.shuffle_rewards,
        )
        samples = run.rollout.route(todo.destination(run.replicas), todo.owners())
        batches = phases.batches(run, todo, samples)
    phases.engine_sleeps(run)
    learn(run, todo, batches, baselines)
    with spans.phase("sync"):
        push_weights(run)
    rollout_metrics(run, groups, end.stats, todo)


def learn(run: Run, todo: plan.Plan, batches: list[Batch], baselines: dict[str, float]) -> None:
    """Everything before the updates, then the updates of critic and actor."""
    cfg, spans = run.cfg, run.spans
    with spans.phase("old_log_prob"):
        batches = phases.old_logprobs(run, batches)  # C
    if cfg.algo.needs_reference:
        with spans.phase("ref"):
            batches = phases.reference_logprobs(run, batches)  # C
    if run.critic is not None:
        with spans.phase("values"):
            batches = phases.old_values(run, batches)  # C
    kl_scale = run.kl.scale
    with spans.phase("adv"):
        batches = credit.assign(run, todo, batches, baselines)  # C
        mean = phases.correction_mean(run, batches)  # C
    if run.critic is not None:
        with spans.phase("update_critic"):
            update_critic(run, todo, batches)
    if run.trains_actor:
        with spans.phase("update_actor"):
            update_actor(run, todo, batches, mean, kl_scale)


def update_actor(
    run: Run, todo: plan.Plan, batches: list[Batch], correction_mean: float, kl_scale: float
) -> None:
    """The optimizer steps of this rollout."""
    cfg = run.cfg
    objective = Objective(
        run.algo,
        cfg.algo,
        max_tokens=cfg.rollout.max_tokens,
        version=run.step - 1,
        correction_mean=correction_mean,
        kl_scale=kl_scale,
    )
    for epoch in range(cfg.train.epochs):
        objective.watch_mismatch = epoch == 0
        for u, batch in enumerate(batches):
            if not todo.lengths(u):
                continue
            run.learner.accumulate(batch, objective)
            n = phases.normaliser(run, todo, u)
            if objective.rejects:
                n = reduce.normaliser(cfg.algo.loss_agg_mode, *run.learner.kept())  # C
            if n:
                report.add_update(run, run.learner.apply(n), "actor")  # C
            else:  # all is rejected: Adam would go on along its momentum
                run.learner.discard()
                report.add_update(run, {"actor/skipped": 1.0}, "actor")
            run.spans.alive()
    run.pending |= objective.mismatch(collective.reduce_floats)  # C
    if cfg.algo.kl_coef and "actor/kl_loss" in run.pending:
        run.pending["actor/kl_loss_coeff"] = cfg.algo.kl_coef * kl_scale
        if not cfg.algo.kl_reward_coef:  # whose KL has had its answer already
            run.kl.update(run.pending["actor/kl_loss"], sum(len(p) for p in todo.groups))


def update_critic(run: Run, todo: plan.Plan, batches: list[Batch]) -> None:
    """The same for the value model; its loss is always a mean over tokens."""
    assert run.critic is not None
    cfg = run.cfg
    loss = partial(value.loss, clip=cfg.critic.clip_value)
    for _ in range(cfg.train.epochs):
        for u, batch in enumerate(batches):
            if lengths := todo.lengths(u):
                run.critic.accumulate(batch, loss)
                report.add_update(run, run.critic.apply(float(sum(lengths))), "critic")  # C
                run.spans.alive()


def split_baselines(
    run: Run, groups: Sequence[Group]
) -> tuple[tuple[Group, ...], dict[str, float]]:
    """The groups to train, and the rewards of the greedy answers to their prompts by group id,
    shaped as theirs are."""
    cfg, greedy = run.cfg, {}
    for g in (g for g in groups if is_baseline(g.id)):
        lost = plan.overlong(g.lengths[0], cfg.rollout.max_tokens, cfg.algo)
        greedy[g.id.removeprefix(BASELINE)] = g.scores[0] - lost
        if g.errors[0] and run.rank == 0:
            log.warning("the greedy answer of %s scores %g: %s", g.id, g.scores[0], g.errors[0])
    return tuple(g for g in groups if not is_baseline(g.id)), greedy


def push_weights(run: Run) -> None:
    """The learner's weights to every engine. Their version is the number of steps behind them."""
    phases.engine_revives(run)
    if run.cfg.train.offload and run.critic is not None:
        run.critic.offload()  # it has no part in the push, and the engine's weights need room
    if run.cfg.train.offload and run.engine is not None:
        run.engine.wake(["weights"])
    moved = run.channel.push(run.learner, run.engine, run.step)  # C
    run.pending |= {f"sync/{name}": value for name, value in moved.items()}
    phases.engine_wakes(run)


def rollout_metrics(
    run: Run, groups: tuple[Group, ...], stats: dict[str, float], todo: plan.Plan
) -> None:
    """Everything that rank 0 knows of the samples of this step."""
    if run.rank == 0:
        run.pending |= report.of_groups(run, groups, todo) | stats
        report.write_rollouts(run, groups)

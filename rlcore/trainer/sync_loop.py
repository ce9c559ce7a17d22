"""Run the synchronous, strictly on-policy loop: rollout, reward, log-probs, update, weight update.

Every rank runs this program. With --cluster.rollout_ranks a rank has either an engine or a learner
and skips phases that need the missing part. `device.py` moves engine and learner on and off the
accelerator; with --mux.url it also waits for a permit before each phase.
"""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from rlcore.config import rules
from rlcore.protocols import Part
from rlcore.records import EndRound, Group, RequestId, Sample
from rlcore.rollout.worker import COUNTS, RoundCallbacks, Streamer
from rlcore.trainer import advantages, evaluate, learn, phases, plan, report, resume
from rlcore.trainer.run import Run, Training
from rlcore.utils import collective
from rlcore.utils import seed as seeds

WRITTEN: tuple[Part, ...] = ("weights", "optimizer")
"""Parts of the learner's state that a checkpoint stores."""


def train(run: Run, one_step: Callable[[Run], None]) -> None:
    """Run the steps after the restored step up to `--run.steps`, with evaluations and checkpoints.

    `one_step` runs one rollout and the training on it.
    """
    cfg = run.cfg
    with run.spans.phase("start"):
        run.device.wait_for_engines()  # collective over all ranks
    phases.resize_engines(run)  # collective over the train ranks
    with run.device.train(), run.spans.phase("update_weights"):
        run.device.update_weights(run.step)  # collective over all ranks
    if run.step == 0 and cfg.eval.at_start:
        with run.device.generate("testing"), run.spans.phase("testing"):
            evaluate.run(run)
        report.evaluation(run)
    report.started(run)
    early = cfg.select.mode == "async"  # In async mode, the last step must release all requests.
    while run.step < cfg.run.steps and not run.progress.stops:
        run.progress.begin(run.step + 1)
        with run.spans.phase("step"):
            sync_stop_request(run, early)  # collective over all ranks
            one_step(run)
            sync_stop_request(run, not early)  # collective over all ranks
        accuracy = None
        if evaluates(run):
            with run.device.generate("testing"), run.spans.phase("testing"):
                accuracy = evaluate.accuracy(evaluate.run(run))
        report.step(run)
        finalize_save(run, wait=saves(run))
        if saves(run):
            with run.device.save(WRITTEN), run.spans.phase("save_checkpoint"):
                # Collective over all ranks.
                saved = run.checkpoints.save(run.progress, run.observers.writer, accuracy)
            tell_saved(run, saved)
        if cfg.debug.kill_at_step == run.step and run.ranks.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    finalize_save(run, wait=True)
    if run.step < cfg.run.steps and not run.progress.is_complete:
        report.interrupted(run)
    else:
        report.end(run)
        if cfg.checkpoint.export_hf:
            with run.device.save(["weights"]):
                run.checkpoints.export_hf(run.hf)  # collective over the train ranks
        if run.observers.callbacks is not None:
            run.observers.callbacks.on_end(run.step)
    run.on_done()


def finalize_save(run: Training, *, wait: bool) -> None:
    """Complete the pending checkpoint if its files are written; with `wait`, wait for them.
    Collective over all ranks."""
    if not run.checkpoints.is_pending:
        return
    with run.spans.phase("save_checkpoint"):
        saved = run.checkpoints.finalize(run.progress, wait=wait)
    tell_saved(run, saved)


def tell_saved(run: Training, checkpoint: Path | None) -> None:
    """If a checkpoint has become complete, call `on_save` of the user's callbacks."""
    if checkpoint is not None and run.observers.callbacks is not None:
        run.observers.callbacks.on_save(resume.step_of(checkpoint), checkpoint)


def sync_stop_request(run: Training, asks: bool) -> None:
    """If `asks` is true, agree on the end of this step: end the run if any rank has received
    SIGTERM or a callback on rank 0 asks for it, and save if rank 0's last checkpoint is too old.
    Collective over all ranks."""
    if not asks or run.progress.stops:
        return
    late = run.ranks.rank == 0 and run.progress.save_is_late(run.cfg.checkpoint.every_minutes)
    ends = run.observers.callbacks is not None and run.observers.callbacks.stops
    flags = [float(run.stop_requested()), float(ends), float(late)]
    stop, end, save = collective.reduce_floats(flags, "max", run.ranks.everyone)
    if stop or end:
        run.progress.stop(is_complete=bool(end))
    if save:
        run.progress.request_save()


def evaluates(run: Training) -> bool:
    """Return whether an evaluation follows this step."""
    cfg = run.cfg.eval
    return _is_due(run, cfg.every, cfg.at_end)


def saves(run: Training) -> bool:
    """Return whether a checkpoint follows this step."""
    cfg, progress = run.cfg.checkpoint, run.progress
    return progress.stops or progress.save_is_due or _is_due(run, cfg.every, cfg.at_end)


def _is_due(run: Training, every: int, at_end: bool) -> bool:
    last = run.step == run.cfg.run.steps
    return bool((at_end and last) or (every and run.step % every == 0))


def one_step(run: Run) -> None:
    """Run one rollout, train on it, and update the engines' weights."""
    spans, device = run.spans, run.device
    with device.step():
        with device.generate(), spans.phase("gen"):
            end = next_groups(run, NodeRelease(run) if run.cfg.mux.tail_nodes else None)
            groups, baselines = advantages.split_baselines(run, end.groups)
        with spans.phase("exchange"):
            todo = plan_of(run, groups, len(run.ranks.model_parallel_groups))
            samples = run.rollout.route(
                todo.destination(run.ranks.model_parallel_groups), todo.owners()
            )
            batches = phases.batches(run, todo, samples) if run.ranks.trains else []
            show_samples(run, groups, samples)
            learn_histories(run)
        with device.train():
            if run.ranks.trains:
                learn.all_models(run, todo, batches, baselines)
            barrier_before_sync(run)
            phases.resize_engines(run)  # collective over the train ranks
            with spans.phase("update_weights"):
                device.update_weights(run.step)  # collective over all ranks
    rollout_metrics(run, groups, end.stats, todo)


def learn_histories(run: Run) -> None:
    """Store the responses of this step as draft source for the next epoch."""
    if run.cfg.rollout.draft in rules.FROM_HISTORY:
        run.rollout.learn_histories()


def plan_of(run: Run, groups: Sequence[Group], num_ranks: int) -> plan.StepPlan:
    """Assign the samples of this step to updates and to `num_ranks` data-parallel ranks."""
    cfg = run.cfg
    return plan.make(
        groups,
        cfg.algo,
        num_updates=run.num_updates,
        num_ranks=num_ranks,
        seed=seeds.derive(cfg.run.seed, "step", run.step),
        max_tokens=cfg.rollout.max_tokens,
        shuffle_rewards=cfg.debug.shuffle_rewards,
        shares_prefix=rules.shares_prefix(
            cfg.train, cfg.model.dtype, run.hf.head_dim, cuda=torch.cuda.is_available()
        ),
    )


class NodeRelease:
    """`Streamer` that releases this rank's node to another job during the tail of a rollout
    (`--mux.tail_nodes`, mux/tail.py). The engine sleeps and nothing is trained."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def engine_leaves(self) -> None:
        """Send this node's engine to sleep: the rollout ends on other nodes, and another job gets
        this node until then."""
        self._run.device.release_engine()

    def train(
        self, groups: Sequence[Group], dp_ranks: Sequence[int], samples: Mapping[RequestId, Sample]
    ) -> None:
        """Raise AssertionError, since a released rank must not train."""
        raise AssertionError("NodeRelease.train() called: a released rank must not train")

    def forget(self) -> None:
        """Do nothing, because a released rank has no gradients."""


def callbacks(run: Run, streamer: Streamer | None = None) -> RoundCallbacks:
    """Return the callbacks that all ranks run together during a rollout."""
    return RoundCallbacks(repair=run.device.repair, streamer=streamer)


def next_groups(run: Run, streamer: Streamer | None = None) -> EndRound:
    """Run the next rollout of training prompts. Only rank 0 has the prompt source."""
    source, here = run.data.source, callbacks(run, streamer)
    if source is None:
        end = run.rollout.run([], callbacks=here)
        phases.observe_round(run, "all", end.stats)  # collective over all ranks
        return end
    todo = source.next_round(run.sampling)
    elastic = run.device.parts.sizes.now.elastic
    end = run.rollout.run(todo.work, todo.stop, elastic, here)
    source.settle([g.id for g in end.groups], end.dropped)
    phases.observe_round(run, todo.kind, end.stats)  # collective over all ranks
    run.progress.add(source.metrics())
    return end


def show_samples(run: Run, groups: Sequence[Group], samples: Mapping[RequestId, Sample]) -> None:
    """If rank 0 has no engine, detokenize the samples that it trains on, for the rollout log."""
    if run.ranks.rank == 0 and run.engine is None:
        run.rollout.read([g.id for g in groups], samples.values())


def barrier_before_sync(run: Run) -> None:
    """Make ranks that only sample wait for the end of the training. The wait has no time-out while
    rank 0 sends heartbeats."""
    if run.ranks.everyone is None:
        return
    if run.ranks.trains:
        run.rollout.call()
        return
    with run.spans.phase("wait_learner"):
        run.rollout.worker.wait_for_sync()


def rollout_metrics(
    run: Run, groups: tuple[Group, ...], stats: Mapping[str, float], todo: plan.StepPlan
) -> None:
    """Add the metrics of this step's samples and of the engines. Collective over all ranks."""
    report.check_rewards(run, groups)
    counts = engine_counts(run)
    if run.ranks.rank == 0:
        run.progress.add(report.of_groups(run, groups, todo) | dict(stats) | counts)
    report.write_rollouts(run, groups)


def engine_counts(run: Run) -> dict[str, float]:
    """Return metrics of the engines' counters and of node memory. Collective over all ranks."""
    counts = run.rollout.worker.counts
    sums = collective.reduce_floats(list(counts.values()), group=run.ranks.everyone)
    totals = dict(zip(counts, sums, strict=True))
    found = {f"sched/{name}": totals[name] for name in COUNTS}
    found |= report.of_drafts(run, totals) | report.of_envs(run, totals)
    return found | report.of_nodes(run)

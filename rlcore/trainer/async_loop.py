"""Run the asynchronous loop: train ranks train on a batch while rollout ranks keep sampling.

ROLL Flash, arXiv:2510.11345. A step trains policy version n on samples whose tokens come from
version n - alpha or newer. The engines then pause for the weight update. Unfinished requests keep
their tokens and log-probs and continue under the new weights. With alpha 0 no request is unfinished
at the weight update, so the step equals a step of the synchronous loop.
"""

from rlcore.records import Group, HoldMode, TrainOrder
from rlcore.trainer import learn, phases, sync_loop
from rlcore.trainer.plan import StepPlan
from rlcore.trainer.run import Run


def one_step(run: Run) -> None:
    """On train ranks, train on one batch; on rollout ranks, sample until the next weight update."""
    groups: tuple[Group, ...] = ()
    stats: dict[str, float] = {}
    todo: StepPlan | None = None
    if run.ranks.trains:
        with run.device.train():
            groups, stats, todo = update(run)
    else:
        with run.device.generate(), run.spans.phase("gen"):
            run.rollout.worker.go_on(sync_loop.callbacks(run))
    with run.spans.phase("update_weights"):
        run.device.update_weights(run.step)  # collective over all ranks
    phases.observe_round(run, "all", stats)  # collective over all ranks
    if todo is not None:
        sync_loop.rollout_metrics(run, groups, stats, todo)  # collective over all ranks
    else:
        sync_loop.engine_counts(run)  # collective over all ranks


def update(run: Run) -> tuple[tuple[Group, ...], dict[str, float], StepPlan]:
    """Take one batch from the buffer, train on it, and pause the engines.

    Returns:
        The groups of the batch, its counters by metric name, and the plan of the step.
    """
    spans, async_rollout = run.spans, run.async_rollout
    assert async_rollout is not None
    with spans.phase("gen"):
        batch: TrainOrder = async_rollout.take(run.step - 1, sync_loop.callbacks(run))
    with spans.phase("exchange"):
        todo = sync_loop.plan_of(run, batch.groups, len(run.ranks.model_parallel_groups))
        samples = async_rollout.fetch(
            todo.destination(run.ranks.model_parallel_groups), todo.owners()
        )
        batches = phases.batches(run, todo, samples)
        if run.ranks.rank == 0:
            async_rollout.read(samples.values())
    learn.all_models(run, todo, batches, {})  # collective over the train ranks
    stats = dict(batch.stats)
    if run.ranks.rank == 0:
        with spans.phase("pause_engines"):
            stats |= async_rollout.hold(hold_mode(run))
    return batch.groups, stats, todo


def hold_mode(run: Run) -> HoldMode:
    """Return how engines hold requests during the next weight update. The mode is `release` before
    an evaluation, which needs idle engines, and before a checkpoint, which needs all tokens."""
    if sync_loop.evaluates(run) or sync_loop.saves(run):
        return "release"
    return run.cfg.async_.weight_update

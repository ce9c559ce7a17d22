"""The synchronous loop: rollout, reward, log-probs, update, sync. Strictly on-policy.

Every rank runs this program; lines marked C are collective over the train ranks, W over all. The
phases have the papers' names, and the metrics `timing_s/<phase>` are their seconds. With
--cluster.rollout_ranks some ranks have an engine and no learner and the others a learner and no
engine: each leaves out what it has nothing for, the steps are the same. With --mux.url each `turn`
waits until other jobs have left the nodes that it needs; where every rank does both, that is a
`whole_step`.
"""

import os
import signal
from collections.abc import Callable, Mapping, Sequence

from rlcore.config import rules
from rlcore.records import EndRound, Group, RequestId, Sample
from rlcore.rollout.replica import COUNTS
from rlcore.trainer import credit, evaluate, learn, phases, plan, relayout, report, resume
from rlcore.trainer.run import Run
from rlcore.trainer.turns import EngineState, turn, whole_step
from rlcore.utils import collective
from rlcore.utils import seed as seeds

WRITTEN = ("weights", "optimizer")
"""Parts of a learner that a checkpoint holds."""


def train(run: Run, one_step: Callable[[Run], None]) -> None:
    """From the step that was restored to `--run.steps`, then the last evaluation and checkpoint.
    `one_step` is one rollout and what is learned from it."""
    cfg = run.cfg
    with run.spans.phase("start"):
        relayout.first_start(run)  # W
    relayout.before_push(run)  # C
    with turn(run, "train"), run.spans.phase("sync"):  # W
        push_weights(run, run.step)
    if run.step == 0 and cfg.eval.at_start:
        with turn(run, "eval"), run.spans.phase("eval"):
            evaluate.run(run)
        report.evaluation(run)
    report.started(run)
    early = cfg.select.mode == "async"  # its engines let go of all requests before they save
    while run.step < cfg.run.steps and not run.ends:
        run.step += 1
        with run.spans.phase("step"):
            hear_end(run, early)  # W
            one_step(run)
            hear_end(run, not early)  # W
        if evaluates(run):
            with turn(run, "eval"), run.spans.phase("eval"):
                evaluate.run(run)
        report.step(run)
        if saves(run):
            with turn(run, "save"), run.spans.phase("save"), phases.learner_here(run, WRITTEN):
                resume.save(run)  # W
        if cfg.debug.die_at_step == run.step and run.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    if run.step < cfg.run.steps:
        report.interrupted(run)
    else:
        report.end(run)
        if cfg.checkpoint.export_hf:
            with turn(run, "save"), phases.learner_here(run, ["weights"]):
                resume.export_hf(run)  # C
    run.on_done()


def hear_end(run: Run, asks: bool) -> None:
    """Where it `asks`: whether some rank has been told to end. Collective then."""
    if asks and not run.ends:
        run.ends = collective.any_rank(run.told_to_end(), run.everyone)


def evaluates(run: Run) -> bool:
    """An evaluation follows this step."""
    cfg = run.cfg.eval
    return _is_due(run, cfg.every, cfg.at_end)


def saves(run: Run) -> bool:
    """A checkpoint follows this step."""
    cfg = run.cfg.checkpoint
    return run.ends or _is_due(run, cfg.every, cfg.at_end)


def _is_due(run: Run, every: int, at_end: bool) -> bool:
    last = run.step == run.cfg.run.steps
    return bool((at_end and last) or (every and run.step % every == 0))


def one_step(run: Run) -> None:
    """One rollout and everything that is learned from it."""
    spans = run.spans
    with whole_step(run):
        with turn(run, "rollout"), spans.phase("gen"):
            end = next_groups(run)
            groups, baselines = credit.split_baselines(run, end.groups)
        with turn(run, "train"):
            with spans.phase("route"):
                todo = plan_of(run, groups, len(run.replicas))
                samples = run.rollout.route(todo.destination(run.replicas), todo.owners())
                batches = phases.batches(run, todo, samples) if run.trains else []
                show_samples(run, groups, samples)
                learn_histories(run)
            if run.trains:
                phases.engine_sleeps(run)
                learn.all_models(run, todo, batches, baselines)
            meet(run)
            relayout.before_push(run)  # C
            with spans.phase("sync"):
                push_weights(run, run.step)
    rollout_metrics(run, groups, end.stats, todo)


def learn_histories(run: Run) -> None:
    """What was sampled in this step is what the next epoch is drafted from."""
    if run.cfg.rollout.draft in rules.FROM_HISTORY:
        run.rollout.learn_histories()


def plan_of(run: Run, groups: Sequence[Group], num_ranks: int) -> plan.Plan:
    """Which sample of this step is trained where, over `num_ranks` data-parallel ranks."""
    cfg = run.cfg
    return plan.make(
        groups,
        cfg.algo,
        num_updates=run.num_updates,
        num_ranks=num_ranks,
        seed=seeds.derive(cfg.run.seed, "step", run.step),
        max_tokens=cfg.rollout.max_tokens,
        shuffle_rewards=cfg.debug.shuffle_rewards,
    )


def next_groups(run: Run) -> EndRound:
    """What the source has the engines do, until it is enough. The work is rank 0's to know."""
    if run.source is None:
        end = run.rollout.run([])
        relayout.note(run, "all", end.stats)  # C
        return end
    todo = run.source.next_round(run.sampling)
    end = run.rollout.run(todo.work, todo.stop, run.elastic)
    run.source.settle([g.id for g in end.groups], end.dropped)
    relayout.note(run, todo.kind, end.stats)  # C
    run.pending |= run.source.metrics()
    return end


def show_samples(run: Run, groups: Sequence[Group], samples: Mapping[RequestId, Sample]) -> None:
    """Rank 0 shows people what it sampled; where it does not sample, what it trains."""
    if run.rank == 0 and run.engine is None:
        run.rollout.read([g.id for g in groups], samples.values())


def meet(run: Run) -> None:
    """Before a push: ranks that only sample wait until the others have trained, however long that
    takes, as long as rank 0 is heard of."""
    if run.everyone is None:
        return
    if run.trains:
        run.rollout.call()
        return
    with run.spans.phase("wait"):
        run.rollout.agent.wait_for_call()


def push_weights(run: Run, version: int) -> None:
    """The learner's weights to every engine, or to its shelf where it is away. Their version is the
    number of steps behind them."""
    run.version = version
    if run.gate is None:
        phases.engine_revives(run)
        phases.engine_takes_weights(run)
    moved = run.channel.push(run.learner, run.shelf or run.engine, version)  # W
    run.pending |= {f"sync/{name}": value for name, value in moved.items()}
    if run.gate is None:
        phases.engine_wakes(run)


def repair_engines(run: Run) -> None:
    """In the middle of a round no engine is left: all start again with the weights of the round."""
    if run.gate is None:
        push_weights(run, run.version)
    else:  # the learner is away, and its weights are on the shelf
        EngineState(run).load()


def rollout_metrics(
    run: Run, groups: tuple[Group, ...], stats: dict[str, float], todo: plan.Plan
) -> None:
    """Everything that is known of the samples of this step and of the engines. Collective."""
    counts = engine_counts(run)  # W
    if run.rank == 0:
        run.pending |= report.of_groups(run, groups, todo) | stats | counts
        report.write_rollouts(run, groups)


def engine_counts(run: Run) -> dict[str, float]:
    """What all engines did in this step, and the memory of nodes. Collective over all ranks."""
    counts = run.rollout.agent.counts
    sums = collective.reduce_floats(list(counts.values()), group=run.everyone)  # W
    totals = dict(zip(counts, sums, strict=True))
    found = {f"sched/{name}": totals[name] for name in COUNTS}
    found |= report.of_drafts(run, totals) | report.of_envs(run, totals)
    return found | report.of_nodes(run)

"""Rollout engines change their tensor-parallel size between two steps.

    1 engine over 2 ranks          2 engines over 1 rank each
    [ rank 0   rank 1 ]    <->     [ rank 0 ] [ rank 1 ]

Rank 0's policy (`sched/planner.py`) says which size the next round has; it is told to all. Before
the push of the new weights every rank ends its engine and starts its share of one of the other
size, so weights come by the push that follows anyway. Samples do not depend on the layout, but for
rounding.

An engine that dies while it starts is as one that was dead before: it is started again before the
push. One that does not start in time ends the run, on every rank with the same sentence.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlcore.sched.roles import Sizes
from rlcore.trainer import phases
from rlcore.trainer.run import Run
from rlcore.utils import collective
from rlcore.utils.log import log

LOOK_S = 1.0
"""Between two rounds of asking who is still starting."""


@dataclass(kw_only=True)
class Relayout:
    """One rank's part."""

    tp: int
    """Of the engines as they are."""
    policy: Sizes | None
    """Rank 0's; the others hear of its decisions."""
    rebuild: Callable[[Run, int], None]
    """Makes what hangs on the size fit another one: the ranks of an engine, the weight channel, the
    controllers, the memory plan. Not collective."""


def note(run: Run, kind: str, stats: Mapping[str, float]) -> None:
    """A round of training is over: what the policy learns from it. Collective; kind and stats are
    rank 0's to know."""
    (used,) = collective.reduce_floats([run.rollout.agent.cache_used], "max", run.everyone)
    if run.rank == 0:
        run.pending["sched/cache_used"] = used
    if run.relayout is None or run.relayout.policy is None:
        return
    run.pending["sched/rollout_tp"] = float(run.relayout.tp)
    run.relayout.policy.after(kind, round(stats.get("sched/preemptions", 0.0)), used)


def before_push(run: Run) -> None:
    """Give the engines the size of the next round, without weights, where it is another one.
    Collective.

    Raises:
        TimeoutError: an engine has not started within --cluster.timeout_s; says which ranks.
    """
    if run.relayout is None or run.step >= run.cfg.run.steps:
        return
    wanted = 0.0
    if run.relayout.policy is not None:
        assert run.source is not None
        wanted = float(run.relayout.policy.size(run.source.next_kind()))
    tp = int(collective.reduce_floats([wanted], "max")[0])
    if tp != run.relayout.tp:
        with run.spans.phase("relayout"):
            change(run, tp)


def change(run: Run, tp: int) -> None:
    """End all engines and start those of size `tp`. Collective."""
    assert run.relayout is not None
    if run.rank == 0:
        log.info("rollout engines: tp %d -> %d", run.relayout.tp, tp)
    if run.cfg.train.offload:  # an engine that starts takes all that it may have
        for learner in run.learners:
            learner.offload()
    if run.engine is not None:
        run.engine.relayout(tp)
    run.relayout.rebuild(run, tp)
    run.relayout.tp = tp
    wait_for_starts(run, "the engines of the new size")
    if run.cfg.train.offload:
        phases.engine_turns(run, "sleep", ["weights", "kv_cache"])


def first_start(run: Run) -> None:
    """Wait for the engines that were started with the run. Collective over all ranks.

    Raises:
        ValueError: this rank's engine refuses its settings, so another start would not help.
        TimeoutError: an engine has not started within --cluster.timeout_s; says which ranks.
    """
    wait_for_starts(run, "the engines")
    if run.engine is not None and run.engine.failure:
        with contextlib.suppress(RuntimeError):  # a crash: the push starts the engine again
            run.engine.abort(())


def wait_for_starts(run: Run, engines: str) -> None:
    """Wait until every engine has started or one has failed. Collective over all ranks, so that a
    rank that only trains waits too.

    Raises:
        TimeoutError: `engines` have not started within --cluster.timeout_s; says which ranks.
    """
    limit_s = run.cfg.cluster.timeout_s
    end = time.monotonic() + limit_s
    while True:
        engine = run.engine
        starting = engine is not None and engine.is_starting(LOOK_S)
        dead = engine is not None and not starting and bool(engine.failure)
        over = time.monotonic() > end
        late = [float(rank == run.rank and starting) for rank in range(run.world_size)]
        flags = [*late, float(dead), float(over)]
        *late, any_dead, any_over = collective.reduce_floats(flags, group=run.everyone)
        if not any(late) or any_dead:
            return
        if any_over:
            ranks = ", ".join(str(rank) for rank, flag in enumerate(late) if flag)
            raise TimeoutError(
                f"--cluster.timeout_s {limit_s:g} is over: {engines} have not started on rank "
                f"{ranks}; raise it, or look into the logs of these ranks"
            )
        run.spans.alive()

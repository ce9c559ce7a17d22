"""The phases of a step between rollout and update: batches, old and reference log-probs, the turns
of engine and learner on shared memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from rlcore.algos import reduce
from rlcore.data.packing import pack_samples, per_token
from rlcore.protocols import Engine
from rlcore.records import Sample
from rlcore.tensors import Batch
from rlcore.trainer.plan import Plan
from rlcore.trainer.run import Run
from rlcore.utils.log import log


def batches(run: Run, plan: Plan, samples: dict[str, Sample]) -> list[Batch]:
    """This data-parallel rank's batch of every update, with advantages and aggregation weights."""
    out = []
    for update in plan.updates:
        rows = update[run.dp_rank]
        batch = pack_samples([samples[r.id] for r in rows])
        out.append(
            batch.with_(
                advantage=per_token([r.advantage for r in rows], batch),
                weight=reduce.weights(
                    run.cfg.algo.loss_agg_mode, batch, run.cfg.rollout.max_tokens
                ),
            )
        )
    return out


def normaliser(run: Run, plan: Plan, update: int) -> float:
    """N of the update over all ranks; every rank knows it from the plan."""
    return reduce.count(run.cfg.algo.loss_agg_mode, plan.lengths(update))


def old_logprobs(run: Run, batches: list[Batch]) -> list[Batch]:
    """Log-probs of the learner before the first update. The first update trains with the weights
    that are being asked about, so unless it comes round again its own log-probs are the old ones
    and nothing is computed for it."""
    skip_first = run.cfg.train.epochs == 1
    out = []
    for u, batch in enumerate(batches):
        if u == 0 and skip_first:
            out.append(batch)
        else:
            out.append(batch.with_(logp_old=run.learner.logprobs(batch, "actor")))
            run.spans.alive()
    return out


def reference_logprobs(run: Run, batches: list[Batch]) -> list[Batch]:
    """Log-probs of the start weights."""
    return [b.with_(logp_ref=run.learner.logprobs(b, "reference")) for b in batches]


@runtime_checkable
class Mortal(Protocol):
    """An engine that can die by itself, such as one in a child process."""

    @property
    def down(self) -> str:
        """Why it is dead; empty while it lives."""

    def restart(self) -> None:
        """Start it again, without requests and weights."""


def engine_revives(run: Run) -> None:
    """A dead engine is started again, for the push that follows. What it held was given to others
    or is no longer waited for, so its last words are dropped."""
    if isinstance(run.engine, Mortal) and run.engine.down:
        log.warning("rank %d: %s; it is started again", run.rank, run.engine.down)
        run.engine.restart()
        run.engine.poll(0.0)


def living_engine(run: Run) -> Engine | None:
    """The engine, if this rank has one that lives."""
    dead = isinstance(run.engine, Mortal) and run.engine.down
    return None if dead else run.engine


def engine_sleeps(run: Run) -> None:
    """With --train.offload the engine gives its memory to the learner."""
    if run.cfg.train.offload:
        if engine := living_engine(run):
            engine.sleep(["weights", "kv_cache"])
        run.learner.onload()


def engine_wakes(run: Run) -> None:
    """The learner gives it back. The cache wakes last: weights and cache together are the peak."""
    if run.cfg.train.offload:
        run.learner.offload()
        if engine := living_engine(run):
            engine.wake(["kv_cache"])


@contextmanager
def learner_here(run: Run) -> Iterator[None]:
    """With --train.offload: outside of an update the learner comes back for as long as something of
    it is written. The engine keeps its weights and lends the room of its cache."""
    if not run.cfg.train.offload:
        yield
        return
    if engine := living_engine(run):
        engine.sleep(["kv_cache"])
    run.learner.onload()
    yield
    engine_wakes(run)

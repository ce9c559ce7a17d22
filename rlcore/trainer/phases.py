"""The phases of a step between rollout and update: batches, log-probs and values before the update,
the turns of engine and learner on shared memory."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from rlcore.algos import correction, reduce
from rlcore.data.packing import pack_samples, per_token
from rlcore.protocols import Engine, Part, Tag
from rlcore.records import Sample
from rlcore.tensors import Batch
from rlcore.trainer.plan import Plan
from rlcore.trainer.run import Run
from rlcore.utils import collective
from rlcore.utils.log import log


def batches(run: Run, plan: Plan, samples: dict[str, Sample]) -> list[Batch]:
    """This data-parallel rank's batch of every update. ValueError where a sample holds what no
    loss can work with."""
    out = []
    for update in plan.updates:
        rows = update[run.dp_rank]
        batch = pack_samples([samples[r.id] for r in rows])
        batch = batch.with_(score=per_token([r.score for r in rows], batch))
        batch.check()
        out.append(batch)
    return out


def normaliser(run: Run, plan: Plan, update: int) -> float:
    """N of the update over all ranks; every rank knows it from the plan."""
    lengths = plan.lengths(update)
    return reduce.normaliser(run.cfg.algo.loss_agg_mode, sum(lengths), len(lengths))


def old_logprobs(run: Run, batches: list[Batch]) -> list[Batch]:
    """Log-probs of the learner before the first update. The first update trains with the weights
    that are being asked about, so unless it comes round again, or somebody needs to know before,
    its own log-probs are the old ones and nothing is computed for it."""
    cfg = run.cfg.algo
    if cfg.bypass_mode:
        return [b.with_(logp_old=b.logp_sampler) for b in batches]
    early = cfg.kl_reward_coef > 0 or cfg.rollout_is_batch_normalize
    skip_first = run.cfg.train.epochs == 1 and not early
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
    with run.learner.reference():
        return [b.with_(logp_ref=run.learner.logprobs(b, "reference")) for b in batches]


def old_values(run: Run, batches: list[Batch]) -> list[Batch]:
    """What the critic expects before its first update."""
    assert run.critic is not None
    return [b.with_(value_old=run.critic.values(b)) for b in batches]


def correction_mean(run: Run, batches: list[Batch]) -> float:
    """What the rollout-correction weights of this step are divided by. Collective."""
    cfg = run.cfg.algo
    if not cfg.rollout_is_batch_normalize or cfg.rollout_is == "none":
        return 1.0
    sums = torch.zeros(2, dtype=torch.float64)
    if run.leads_replica:
        for b in batches:
            where = (b.mask, b.sequence_index, b.num_sequences)
            weights = correction.weights(cfg, b.logp_old - b.logp_sampler, *where)
            sums += correction.normalisation_sums(cfg, weights, *where)
    total, count = collective.reduce_floats(sums.tolist())
    return total / count if total > 1e-8 * count else 1.0


def engine_leaves(run: Run) -> None:
    """In the middle of a round: this rank's engine has nothing left to do and gives its memory
    away. One that dies of it is found by the next push."""
    engine_does(run, "sleep", lambda engine: engine.sleep(["weights", "kv_cache"]))


def engine_revives(run: Run, *, here: bool = True) -> None:
    """A dead engine is started again, for the push that follows. What it held was given to others
    or is no longer waited for, so its last words are dropped. An engine that starts takes all that
    it may have, so with --train.offload the learner makes room until it sleeps, as it does where
    phases have turns (--mux.url). An engine over several ranks is started again on all of them
    (C). `here`: this rank's is meant."""
    why = run.engine.failure if here and run.engine is not None else ""
    offload, anywhere = run.cfg.train.offload or run.gate is not None, bool(why)
    if len(run.engine_ranks) > 1:
        down = collective.reduce_floats(
            [float(r == run.rank and bool(why)) for r in range(run.world_size)]
        )
        anywhere = any(down)
        gone = [r for r in run.engine_ranks if down[r]]
        why = why or (f"the engine's part on rank {gone[0]} is gone" if gone else "")
    if run.engine is not None and why:
        log.warning("rank %d: %s; it is started again", run.rank, why)
        for learner in run.learners if offload else ():
            learner.offload()
        run.rollout.agent.revive()
    if offload and anywhere:
        engine_turns(run, "sleep", ["weights", "kv_cache"], here=bool(why))


def engine_turns(
    run: Run, way: Literal["sleep", "wake"], tags: Collection[Tag], *, here: bool = True
) -> None:
    """Send this rank's engine to sleep or wake it, if it lives and is meant (`here`).

    Of an engine over several ranks the first alone speaks with it, for the memory of all: every
    rank is through with its own memory before, and none goes on until it is done (C).
    """
    spread = len(run.engine_ranks) > 1
    if spread:
        collective.barrier()
    if here:
        engine_does(run, way, lambda e: (e.sleep if way == "sleep" else e.wake)(tags))
    if spread:
        collective.barrier()


def engine_does(run: Run, what: str, call: Callable[[Engine], None]) -> None:
    """Ask this rank's engine, if it lives. One that dies of it is as one that was dead before: the
    round that follows hears of it."""
    engine = run.engine
    if engine is None or engine.failure:
        return
    try:
        call(engine)
    except RuntimeError as error:
        if not engine.failure:
            raise
        log.warning("rank %d: the engine died at its %s: %s", run.rank, what, error)


def hands_over(run: Run) -> bool:
    """Engine and learner have the device one after the other, as --train.offload has it. Where
    jobs take turns (--mux.url) that is part of the turns."""
    return run.cfg.train.offload and run.gate is None


def engine_sleeps(run: Run, *, has_left: bool = False) -> None:
    """With --train.offload the engine gives its memory to the learner, unless it has before."""
    if hands_over(run):
        engine_turns(run, "sleep", ["weights", "kv_cache"], here=not has_left)
        must_be_free(run, "hand_over")
        for learner in run.learners:
            learner.onload()
        measure(run, "hand_over")


def engine_takes_weights(run: Run) -> None:
    """Before a push: of the learner only the weights that are pushed stay beside the engine's."""
    if hands_over(run):
        run.learner.offload(["optimizer", "gradients"])
        for learner in run.learners[1:]:
            learner.offload()
        run.learner.onload(["weights"])
        must_be_free(run, "push")
        engine_turns(run, "wake", ["weights"])
        measure(run, "push")


def engine_wakes(run: Run) -> None:
    """The learner has gone when the cache wakes, which takes what is left."""
    if hands_over(run):
        for learner in run.learners:
            learner.offload()
        engine_turns(run, "wake", ["kv_cache"])
        measure(run, "generate")


@contextmanager
def learner_here(run: Run, parts: Collection[Part]) -> Iterator[None]:
    """With --train.offload: outside of an update these parts of the learner come back for as long
    as they are written. The engine keeps its weights and lends the room of its cache."""
    if not hands_over(run):
        yield
        return
    engine_turns(run, "sleep", ["kv_cache"])
    for learner in run.learners:
        learner.onload(parts)
    measure(run, "save")
    yield
    engine_wakes(run)


def must_be_free(run: Run, phase: Literal["hand_over", "push"]) -> None:
    """RuntimeError where what `phase` brings has no room."""
    if run.memory is not None:
        run.memory.before(phase, run.learners)


def measure(run: Run, phase: str) -> None:
    """RuntimeError where more is on the device than the plan has at the start of `phase`."""
    if run.memory is not None:
        run.memory.check(phase, run.learners)
        run.pending |= run.memory.take()

"""Run the stream loop: some ranks train on complete groups while other ranks still decode.

RollPacker, arXiv 2509.21009; `sched/stream.py` chooses ranks and times. All samples come from the
weights of the step, so training is strictly on-policy, as in the synchronous loop. Ranks accumulate
gradients as sums. At the end, one reduction and one optimizer step divide the sums by the
denominator of the whole step. `config/rules.py` refuses options that need all samples before the
first gradient.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlcore.protocols import Part
from rlcore.records import Group, RequestId, Sample
from rlcore.tensors import Batch
from rlcore.trainer import advantages, demonstrations, learn, phases, report
from rlcore.trainer import plan as plans
from rlcore.trainer.demonstrations import DemonstrationBatch
from rlcore.trainer.run import Run
from rlcore.trainer.sync_loop import (
    learn_histories,
    next_groups,
    plan_of,
    rollout_metrics,
)

if TYPE_CHECKING:
    from rlcore.algos.objective import Objective

NEEDED: tuple[Part, ...] = ("weights", "gradients")
"""Parts of the learner that accumulation needs; the optimizer's states are loaded later."""


class StreamTrainer:
    """`Streamer` that accumulates gradients on one rank before a rollout ends."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.objective: Objective | None = None
        self.batches: list[Batch] = []

    def engine_leaves(self) -> None:
        """Release this rank's engine; with --train.offload the engine goes to sleep."""
        self._run.device.release_engine()

    def train(
        self, groups: Sequence[Group], dp_ranks: Sequence[int], samples: Mapping[RequestId, Sample]
    ) -> None:
        """Accumulate gradients on this rank's share of the groups, which are spread over the
        data-parallel ranks `dp_ranks`. Only ranks in `dp_ranks` call this method."""
        run = self._run
        with run.spans.phase("stream"):
            run.device.load_learner(NEEDED)
            todo = plan_of(run, groups, len(dp_ranks)).placed(
                dp_ranks, len(run.ranks.model_parallel_groups)
            )
            (batch,), _ = _with_all(run, todo, phases.batches(run, todo, samples), [])
            run.learner.accumulate(batch, self.loss())
            self.batches.append(batch)

    def loss(self) -> "Objective":
        """Return the loss function of the step. One object serves the whole step, since it also
        collects the metrics."""
        if self.objective is None:
            self.objective = learn.make_objective(self._run, 1.0, self._run.kl.scale)
        return self.objective

    def forget(self) -> None:
        """Discard the accumulated gradients, because all engines restart: the weight update that
        follows a restart may free the gradients."""
        if self.batches:
            self._run.learner.discard()
        self.objective, self.batches = None, []
        self._run.device.engine_is_back()


def one_step(run: Run) -> None:
    """Run one rollout and train on it, partly before the rollout ends. Collective over the train
    ranks."""
    spans, device, stream = run.spans, run.device, StreamTrainer(run)
    with device.generate(), spans.phase("gen"):
        end = next_groups(run, stream)
    with spans.phase("exchange"):
        by_id, num_ranks = {g.id: g for g in end.groups}, len(run.ranks.model_parallel_groups)
        early = [
            plan_of(run, [by_id[g] for g in s.groups], len(s.dp_ranks)).placed(
                s.dp_ranks, num_ranks
            )
            for s in end.streamed
        ]
        was_early = {g for s in end.streamed for g in s.groups}
        rest = plan_of(run, [g for g in end.groups if g.id not in was_early], num_ranks)
        todo = plans.joined([*early, rest])
        samples = run.rollout.route(
            rest.destination(run.ranks.model_parallel_groups), rest.owners()
        )
        batches = phases.batches(run, rest, samples)
        learn_histories(run)
    with device.train():
        further = demonstrations.of_step(run)  # collective over the train ranks
        (batch,), further = _with_all(run, rest, batches, further)
        objective = stream.loss()
        with spans.phase("update_actor"):
            run.learner.accumulate(batch, objective)
            if lengths := todo.lengths(0):
                for part in further:
                    lengths += learn.accumulate_demonstrations(run, part)
                learn.step_actor(run, lengths, objective)  # collective over the train ranks
            else:
                run.learner.discard()
        parts = [(phases.made(b.advantage), b.mask) for b in (*stream.batches, batch)]
        run.progress.add(advantages.spread("critic/advantages", parts))  # collective, train ranks
        learn.conclude(run, todo, objective, run.kl.scale)  # collective over the train ranks
        phases.resize_engines(run)  # collective over the train ranks
        with spans.phase("update_weights"):
            device.update_weights(run.step)
    rollout_metrics(run, end.groups, end.stats, todo)
    if run.ranks.rank == 0:  # The time of update_actor excludes tokens trained during the rollout.
        run.progress.add(report.trained(rest, epochs=1))


def _with_all(
    run: Run, todo: plans.StepPlan, batches: list[Batch], further: list[DemonstrationBatch]
) -> tuple[list[Batch], list[DemonstrationBatch]]:
    """Add log-probs of reference and teachers, if needed, and advantages to the batches, and the
    teachers' log-probs to the demonstrations `further`. A step has one update, so the training pass
    itself yields the old log-probs."""
    if run.cfg.algo.needs_reference:
        with run.spans.phase("ref"):
            batches = phases.reference_logprobs(run, batches)
    if run.teachers is not None:
        with run.spans.phase("teacher"):
            batches, further = phases.teacher_logprobs(run, todo, batches, further)
    batches = phases.old_logprobs(run, batches)
    return advantages.by_response(run, todo, batches), further

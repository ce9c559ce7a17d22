"""Train on demonstrations: supervised fine-tuning with the RL learner, its layouts and checkpoints.

Each step takes the next rows of the shuffled data, divides them among the data-parallel ranks by
length, and makes one optimizer step on the mean negative log-likelihood of all learned tokens.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rlcore.data.conversations import Demonstration
from rlcore.data.data_order import ShuffledEpochs, WeightedEpochs
from rlcore.protocols import Learner
from rlcore.tensors import LossInputs, LossOutput
from rlcore.trainer import report, sync_loop
from rlcore.trainer.demonstrations import batch_of, distribute
from rlcore.trainer.run import Training
from rlcore.utils import collective

_EVAL_TOKENS = 1 << 18
"""Number of tokens of validation data that are computed, and broadcast, at a time."""


@dataclass(frozen=True, kw_only=True)
class Tuning(Training):
    """All parts of one rank of a supervised fine-tuning."""

    learner: Learner
    rows: Sequence[Demonstration] = ()
    """Demonstrations to train on, on rank 0; empty on the other ranks."""
    order: ShuffledEpochs | WeightedEpochs | None = None
    """Order of `rows`, on rank 0."""
    held_out: Sequence[tuple[str, Sequence[Demonstration]]] = ()
    """Validation sets by name; their rows only on rank 0."""


def nll(x: LossInputs) -> LossOutput:
    """Compute the negative log-likelihood of the demonstration."""
    return LossOutput(per_token=-x.log_probs, metrics={"actor/sft_nll": -x.log_probs.detach()})


def train(run: Tuning) -> None:
    """Run the steps after the restored step up to --run.steps, with evaluations and checkpoints."""
    cfg = run.cfg
    if run.step == 0 and cfg.eval.at_start and run.held_out:
        evaluate(run)
        _report(run)
    while run.step < cfg.run.steps and not run.progress.stops:
        run.progress.begin(run.step + 1)
        with run.spans.phase("step"):
            _one_step(run)
            sync_loop.sync_stop_request(run, True)  # collective over all ranks
        if run.held_out and sync_loop.evaluates(run):
            evaluate(run)
        _report(run)
        sync_loop.finalize_save(run, wait=sync_loop.saves(run))
        if sync_loop.saves(run):
            with run.spans.phase("save_checkpoint"):
                saved = run.checkpoints.save(run.progress, run.observers.writer)
            sync_loop.tell_saved(run, saved)
    sync_loop.finalize_save(run, wait=True)
    if run.step < cfg.run.steps and not run.progress.is_complete:
        report.interrupted(run)
    else:
        report.end(run)
        if cfg.checkpoint.export_hf:
            run.checkpoints.export_hf(run.hf)
        if run.observers.callbacks is not None:
            run.observers.callbacks.on_end(run.step)
    run.on_done()


def evaluate(run: Tuning) -> None:
    """Add the mean negative log-likelihood of the learned tokens of each validation set to the
    metrics of the step. Collective over all ranks."""
    with run.spans.phase("testing"):
        for name, rows in run.held_out:
            parts = _parts(rows)
            total = num_tokens = 0.0
            for i in range(int(collective.reduce_floats([float(len(parts))], "max")[0])):
                mine, _ = distribute(run, parts[i] if parts else [])
                batch = batch_of(mine)
                learned = run.learner.logprobs(batch)[batch.mask].double()
                sums = [-float(learned.sum()), float(len(learned))]
                if not run.ranks.leads_model_parallel_group:
                    sums = [0.0, 0.0]
                sums = collective.reduce_floats(sums)
                total, num_tokens = total + sums[0], num_tokens + sums[1]
                run.spans.alive()
            run.progress.add({f"val-core/{name}/nll/mean": total / num_tokens})
            run.progress.add({f"val-aux/{name}/nll/num_tokens": num_tokens})


def _parts(rows: Sequence[Demonstration]) -> list[list[Demonstration]]:
    """Divide rows into parts of about `_EVAL_TOKENS` tokens."""
    parts: list[list[Demonstration]] = []
    size = 0
    for row in rows:
        if not parts or size + len(row) > _EVAL_TOKENS:
            parts.append([])
            size = 0
        parts[-1].append(row)
        size += len(row)
    return parts


def _one_step(run: Tuning) -> None:
    """Make one optimizer step. Collective over all ranks."""
    rows: list[Demonstration] = []
    if run.order is not None:
        rows = [run.rows[row] for _, row in run.order.next(run.cfg.data.prompts_per_step)]
    with run.spans.phase("exchange"):
        mine, whole = distribute(run, rows)
    num_tokens, squares = sum(map(len, whole)), sum(len(row) ** 2 for row in whole)
    num_learned = sum(int(row.learn.sum()) for row in whole)
    with run.spans.phase("update_actor"):
        started = time.perf_counter()
        batch = batch_of(mine)
        run.learner.begin_update(batch.num_tokens, float(num_learned))
        run.learner.accumulate(batch, nll)
        report.add_update(run, run.learner.apply(float(num_learned)), "actor")
        seconds = time.perf_counter() - started
    run.progress.add(
        {
            "perf/total_num_tokens": float(num_tokens),
            "perf/train_tokens_per_s": num_tokens / seconds,
            "training/trained_rows": float(run.cfg.data.prompts_per_step),
        }
        | report.utilisation(run, num_tokens, squares, seconds)
    )


def _report(run: Tuning) -> None:
    """Write the metrics of the step and print its line."""
    metrics, timings = run.progress.take(), run.spans.take()
    writer, screen = run.observers.writer, run.observers.screen
    if writer is None or screen is None or run.order is None:
        return
    metrics |= {f"timing_s/{name}": s for name, s in timings.items()}
    metrics |= report.memory()
    if run.step:
        metrics["training/global_step"] = float(run.step)
        metrics["training/epoch"] = run.order.position / len(run.rows)
        metrics["perf/time_per_step"] = metrics["timing_s/step"]
    writer.write(run.step, metrics)
    if run.step:
        screen.step(run.step, metrics)
    screen.evaluation(run.step, metrics)
    if run.observers.callbacks is not None:
        if run.step:
            run.observers.callbacks.on_step(run.step, metrics)
        run.observers.callbacks.on_eval(run.step, metrics)

"""Warm-start the tiny model by supervised training on generated demonstrations, with the RL
learner.

The learning rate decays linearly. Every few steps the sampled accuracy is measured on a probe set,
disjoint from training and held-out set. The loop ends when this accuracy reaches the target. The
decayed rate and frequent probes keep the final accuracy near the target.
"""

from collections.abc import Callable

from rlcore.data.conversations import Demonstration
from rlcore.trainer import evaluate
from rlcore.trainer.demonstrations import batch_of
from rlcore.trainer.run import Run
from rlcore.trainer.sft import nll
from rlcore.utils import collective

SHOWN_EVERY = 25
"""Number of steps between two lines on the screen; the run's metrics have all probes."""
Demonstrations = Callable[[int], Demonstration]
"""Function that returns the demonstration with a given index."""


def train(
    run: Run,
    demonstrations: Demonstrations,
    *,
    rows_per_step: int,
    probe_every: int,
    probe_from: int,
    target: float,
) -> float:
    """Train until the probe accuracy reaches `target` or all steps are done. Return the last
    measured accuracy."""
    accuracy = 0.0
    for step in range(1, run.cfg.run.steps + 1):
        run.progress.begin(step)
        with run.spans.phase("step"), run.spans.phase("update_actor"):
            rows = [demonstrations((step - 1) * rows_per_step + i) for i in range(rows_per_step)]
            num_tokens = sum(int(row.learn.sum()) for row in rows)
            batch = batch_of(rows[run.ranks.dp_rank :: len(run.ranks.model_parallel_groups)])
            run.learner.begin_update(batch.num_tokens, float(num_tokens))
            run.learner.accumulate(batch, nll)
            run.progress.add(run.learner.apply(float(num_tokens)))
        done = step == run.cfg.run.steps
        if step >= probe_from and (step % probe_every == 0 or done):
            with run.spans.phase("testing"):
                with run.device.train():
                    run.device.update_weights(run.step)
                accuracy = probe(run)
            done = done or accuracy >= target
        if run.observers.writer is not None and run.observers.screen is not None:
            metrics = run.progress.take()
            metrics |= {f"timing_s/{k}": s for k, s in run.spans.take().items()}
            run.observers.writer.write(step, metrics)
            if done or step % SHOWN_EVERY == 0:
                run.observers.screen.evaluation(step, metrics)
        else:
            run.progress.take()
            run.spans.take()
        if done:
            break
    return accuracy


def probe(run: Run) -> float:
    """Return the sampled accuracy on the probe set, the same on every rank."""
    found = evaluate.evaluate(run, f"p{run.step}", 1.0, 1)
    run.progress.add(found)
    name = run.data.eval_sets[0][0] if run.data.eval_sets else ""
    mine = found.get(f"val-core/{name}/acc/mean@1", 0.0)
    return collective.reduce_floats([mine], "max")[0]

"""Simulate the throughput of splits of a cluster into training and rollout GPUs, and show the split
that the planner (`sched/balance.py`) proposes: `python -m rlcore sim splits`."""

import math
from dataclasses import replace

from rlcore.sched.balance import Rates, best
from rlcore.sched.router import LeastLoaded
from rlcore.sim.async_rollout import EndlessPrompts, PromptLengths, SimAsyncRollout
from rlcore.sim.cluster import ClusterPlan
from rlcore.sim.phases import TrainingCost
from rlcore.sim.table import Row, TableResult, row
from rlcore.utils.errors import ConfigError


def rates(plan: ClusterPlan) -> Rates:
    """Return the speed of sampling and training for the planner, from one random draw of response
    lengths and the costs of one engine."""
    w, n = plan.workload, plan.num_prompts
    lengths = [x for row in range(n) for x in w.lengths(row, plan.num_samples, plan.seed)]
    cost, alone, mean = plan.costs(plan.tp), over(plan, 1), sum(lengths) / len(lengths)
    used = [w.prompt_tokens + x for x in lengths]
    request_s = cost.sequence_s + cost.context_s * (w.prompt_tokens + mean / 2)
    return Rates(
        samples=len(lengths),
        tokens=sum(lengths),
        longest=max(lengths),
        step_s=cost.step_s + request_s,
        running=1,
        train_s=alone.update_s(used) + alone.logprobs_s(used),
        sync_s=alone.sync_s,
        load=request_s / cost.step_s,
        places=max(1, min(plan.max_running, cost.cache_tokens / (w.prompt_tokens + mean))),
        tp=plan.tp,
    )


def over(plan: ClusterPlan, gpus: int) -> TrainingCost:
    """Return the training cost of the plan, converted from the plan's GPUs to `gpus` GPUs."""
    t, factor = plan.training, plan.gpus / gpus
    return replace(
        t,
        sample_s=t.sample_s * factor,
        token_s=t.token_s * factor,
        square_s=t.square_s * factor,
    )


def table(plan: ClusterPlan, alpha: float, steps: int) -> TableResult:
    """Return the throughput of up to 29 splits of the GPUs into training GPUs and whole engines.
    `steps`: number of training steps simulated per split after the sample buffer is full."""
    sizes = range(plan.tp, plan.gpus, plan.tp)
    sizes = sizes[:: max(1, len(sizes) // 15)]
    if not sizes:
        raise ConfigError(
            f"--gpus {plan.gpus} --tp {plan.tp}: one engine needs all GPUs; use more GPUs"
        )
    found = rates(plan)
    proposed = best(found, plan.gpus, alpha, sizes)
    rows: list[Row] = []
    for rollout in sizes:
        train = plan.gpus - rollout
        seconds = _step_s(plan, rollout, alpha, steps)
        rows.append(
            row(
                f"{train} train, {rollout} sample: samples/s",
                None,
                plan.num_prompts * plan.num_samples / seconds,
                step_s=round(seconds, 2),
                planner_s=round(found.seconds(train, rollout, alpha), 2),
                note="proposed" if rollout == proposed else "",
            )
        )
    share = found.train_share(proposed, alpha) * plan.gpus
    note = f"beta*: {share:.3g} of {plan.gpus} GPUs train; planner_s: by its formula"
    return TableResult(f"Every split of {plan.gpus} GPUs, alpha {alpha:g}", rows, [note])


def _step_s(plan: ClusterPlan, rollout: int, alpha: float, steps: int) -> float:
    training = over(plan, plan.gpus - rollout)
    made = SimAsyncRollout(
        [plan.costs(plan.tp)] * (rollout // plan.tp),
        PromptLengths(plan.workload, plan.num_samples, plan.seed),
        issue=EndlessPrompts(plan.num_samples, plan.workload.prompt_tokens),
        batch=plan.num_prompts,
        alpha=alpha,
        train_s=lambda n: training.update_s(n) + training.logprobs_s(n),
        sync_s=training.sync_s,
        max_running=plan.max_running,
        place=LeastLoaded(plan.max_running, spread=True),
    )
    made.run(math.ceil(alpha) + 1)
    return sum(u.seconds for u in made.run(steps)) / steps

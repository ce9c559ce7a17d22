"""Simulate the throughput of splits of a cluster into training and rollout GPUs, and show the split
that the planner (`sched/balance.py`) proposes: `python -m rlcore sim splits`."""

from collections.abc import Iterable

from rlcore.sched.balance import Rates, best
from rlcore.sim.cluster import simulate
from rlcore.sim.job import SimJob
from rlcore.sim.table import Row, TableResult, row
from rlcore.utils.errors import ConfigError

MOST = 15
"""Maximum number of splits in a table, roughly."""


def rates(job: SimJob) -> Rates:
    """Return the speed of sampling and training for the planner, from one random draw of response
    lengths and the costs of one engine."""
    w, r, drawn = job.workload, job.cfg.rollout, job.drawn()
    lengths = [row.num_tokens for row in drawn]
    cost, mean = job.engine(r.tp), sum(lengths) / len(lengths)
    alone = cost.decode_s(1, w.prompt_tokens + mean / 2, 1)
    places = max(1, int(min(r.max_running_requests, cost.cache_tokens / (w.prompt_tokens + mean))))
    full = cost.decode_s(places, places * (w.prompt_tokens + mean / 2), 1)
    load = (full - alone) / max(places - 1, 1)  # seconds that one more request adds to a step
    return Rates(
        samples=len(lengths),
        tokens=sum(lengths),
        longest=max(lengths),
        step_s=alone,
        running=1,
        train_s=job.train_gpus * job.train_s(drawn),
        sync_s=job.training.sync_s,
        load=load / (alone - load),
        places=places,
        tp=r.tp,
    )


def with_split(job: SimJob, rollout: int, alpha: float) -> SimJob:
    """Return the job with --mode async, in which `rollout` GPUs sample. Raise ConfigError if the
    other GPUs do not fit the learner's layout."""
    keys = ("--cluster.rollout_ranks", str(rollout), "--async.alpha", str(alpha))
    return job.with_(f"{job.gpus - rollout} train, {rollout} sample", "--mode", "async", *keys)


def possible(job: SimJob, alpha: float) -> list[SimJob]:
    """Return the job for every number of sampling GPUs, at most about `MOST` of them."""
    found = []
    for rollout in range(job.cfg.rollout.tp, job.gpus, job.cfg.rollout.tp):
        try:
            found.append(with_split(job, rollout, alpha))
        except ConfigError:  # no whole engines, or no whole model-parallel groups
            continue
    return found[:: max(1, len(found) // MOST)]


def proposed(job: SimJob, sizes: Iterable[int], alpha: float) -> int:
    """Return the number of sampling GPUs that the planner proposes, one of `sizes`."""
    return best(rates(job), job.gpus, alpha, sizes)


def by_planner(job: SimJob, alpha: float) -> SimJob:
    """Return the job with --mode async and the split that the planner proposes. If the GPUs cannot
    be split, raise ConfigError."""
    sizes = [split.rollout_gpus for split in possible(job, alpha)]
    if not sizes:
        raise ConfigError(
            f"--gpus {job.gpus}: an engine of {job.cfg.rollout.tp} GPUs and a model-parallel group "
            "need more; use more GPUs, or smaller --rollout.tp, --train.tp, --train.pp, --train.cp"
        )
    return with_split(job, proposed(job, sizes, alpha), alpha)


def table(job: SimJob, alpha: float, steps: int) -> TableResult:
    """Return the throughput of splits of the GPUs into training GPUs and whole engines. `steps`:
    number of training steps simulated per split after the sample buffer is full."""
    found, chosen = rates(job), by_planner(job, alpha).rollout_gpus
    splits = possible(job, alpha)
    rows: list[Row] = []
    samples = job.cfg.data.prompts_per_step * job.cfg.rollout.samples_per_prompt
    for split in splits:
        seconds = simulate(split, steps).seconds
        rows.append(
            row(
                f"{split.name}: samples/s",
                None,
                samples / seconds,
                step_s=round(seconds, 2),
                planner_s=round(found.seconds(split.train_gpus, split.rollout_gpus, alpha), 2),
                note="proposed" if split.rollout_gpus == chosen else "",
            )
        )
    share = found.train_share(chosen, alpha) * job.gpus
    note = f"beta*: {share:.3g} of {job.gpus} GPUs train; planner_s: by its formula"
    return TableResult(f"Every split of {job.gpus} GPUs, alpha {alpha:g}", rows, [note])

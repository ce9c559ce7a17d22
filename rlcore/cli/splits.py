"""List the possible splits into sampling and training ranks for `--mode async`, and advise on them
before the run has its own measurements. `sched/balance.py` has the planner."""

from dataclasses import replace
from functools import cache
from pathlib import Path

from rlcore.config import rules
from rlcore.config.schema import Config
from rlcore.hf.config import HFConfig
from rlcore.metrics.sinks import num_ranks, read_metrics
from rlcore.sched.balance import WINDOW, Balance
from rlcore.utils.errors import ConfigError
from rlcore.utils.files import read_json


def possible(cfg: Config, world: int, per_node: int) -> list[int]:
    """Return the possible numbers of sampling ranks: sampling ranks form whole engines, and train
    ranks form whole model-parallel groups."""
    from rlcore.mcore.layout import layout_of

    found = []
    for ranks in range(cfg.rollout.tp, world, cfg.rollout.tp):
        split = replace(cfg, cluster=replace(cfg.cluster, rollout_ranks=ranks))
        try:
            layout_of(cfg.train, world - ranks, 0)
        except ConfigError:
            continue
        if not rules.of_world(split, world, per_node):
            found.append(ranks)
    return found


def planner(cfg: Config, world: int, per_node: int) -> Balance:
    """Return the planner that proposes how to split a run's ranks."""
    return Balance(
        ranks=world,
        rollout=cfg.cluster.rollout_ranks,
        tp=cfg.rollout.tp,
        alpha=cfg.async_.alpha,
        samples=cfg.data.prompts_per_step * cfg.rollout.samples_per_prompt,
        places=cfg.rollout.max_running_requests,
        possible=possible(cfg, world, per_node),
    )


def by_last_steps(plan: Balance, cfg: Config, folder: Path, world: int) -> str:
    """Return advice on splits from the most recent steps of the run in `folder`; "" if the run has
    no steps or used another split."""
    try:
        cluster = read_json(folder / "config.json").get("cluster")
    except ConfigError:  # there is none, or it is damaged
        return ""
    if not isinstance(cluster, dict) or (cluster.get("rollout_ranks") != cfg.cluster.rollout_ranks):
        return ""
    rows = [row for row in read_metrics(folder)[-WINDOW:] if num_ranks(row) == world]
    return plan.sentence(rows, "the last steps")


def by_data_sheet(plan: Balance, cfg: Config, hf: HFConfig, world: int, earlier: Path) -> str:
    """Return advice on splits from simulations with the known response lengths. Also set in
    `plan` how much time one request adds to a decode step.

    Raises:
        ValueError: the simulator does not support this run.
    """
    import torch

    from rlcore.sim import expect
    from rlcore.sim import splits as simulated
    from rlcore.sim.cluster import simulate
    from rlcore.utils.gpus import gpu_named

    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "H100"
    gpu = gpu_named(name)
    if gpu is None:
        raise ValueError(f"the data sheet of {name} is not known")
    job, said = expect.job(cfg, hf, world, gpu, earlier)
    rates = simulated.rates(job)
    plan.learn_load(rates.load)

    @cache
    def seconds(rollout: int) -> float:
        split = simulated.with_split(job, rollout, cfg.async_.alpha)
        return simulate(split, expect.STEPS).seconds

    source = f"simulation on {world} x {gpu.name}"
    return plan.say(rates, source, seconds) + f"; lengths {said}"

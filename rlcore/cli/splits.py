"""How many ranks sample in `--mode async`: what the splits can be, and what to say of them before
the run has figures of its own. The planner is `sched/balance.py`."""

import json
from dataclasses import replace
from pathlib import Path

from rlcore.config import rules
from rlcore.config.schema import Config
from rlcore.hf.config import HFConfig
from rlcore.metrics.sinks import read_metrics
from rlcore.sched.balance import WINDOW, Balance
from rlcore.utils.errors import ConfigError


def possible(cfg: Config, world: int, per_node: int) -> list[int]:
    """Numbers of ranks that could sample: whole engines, and whole model replicas for the rest."""
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
    """Of a run."""
    return Balance(
        ranks=world,
        rollout=cfg.cluster.rollout_ranks,
        tp=cfg.rollout.tp,
        alpha=cfg.async_.alpha,
        samples=cfg.data.prompts_per_step * cfg.rollout.samples_per_prompt,
        places=cfg.rollout.max_running,
        possible=possible(cfg, world, per_node),
    )


def by_last_steps(plan: Balance, cfg: Config, folder: Path, world: int) -> str:
    """A sentence from the steps that the run in `folder` has behind it, if they were of this split;
    "" where there are none."""
    file = folder / "config.json"
    if not file.is_file():
        return ""
    cluster = json.loads(file.read_text()).get("cluster", {})
    if cluster.get("rollout_ranks") != cfg.cluster.rollout_ranks:
        return ""
    rows = [row for row in read_metrics(folder)[-WINDOW:] if _ranks(row) == world]
    return plan.sentence(rows, "the last steps")


def _ranks(row: dict[str, float]) -> int:
    """Of the world that made it."""
    rate = row.get("perf/throughput", 0.0) * row.get("timing_s/step", 0.0)
    return round(row.get("perf/total_num_tokens", 0.0) / rate) if rate else 0


def by_data_sheet(plan: Balance, cfg: Config, hf: HFConfig, world: int, earlier: Path) -> str:
    """A sentence from the data sheet of the GPU and what lengths are known; the plan then knows
    what a request adds to a decode step. ValueError where the simulator knows no such run."""
    import torch

    from rlcore.sim import expect

    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "H100"
    gpu = expect.gpu_named(name)
    if gpu is None:
        raise ValueError(f"there is no data sheet of {name}")
    rates, said = expect.rates(cfg, hf, world, gpu, earlier)
    plan.learn_load(rates.load)
    return plan.say(rates, f"the data sheet of {world} x {gpu.name}") + f"; lengths {said}"

"""Estimate the time of a training step by simulation, before the run starts, for `--dry-run`."""

from dataclasses import replace
from pathlib import Path

from rlcore.config.schema import Config
from rlcore.hf.config import HFConfig
from rlcore.hf.names import num_parameters
from rlcore.sim.cluster import Summary, simulate
from rlcore.sim.job import SimJob
from rlcore.sim.lengths import read_lengths
from rlcore.sim.workload import GENERATORS, Workload
from rlcore.utils.gpus import Gpu

STEPS = 5
LEAST_PARAMETERS = 1e8
"""Minimum number of model parameters: a data sheet predicts wrong times for smaller models."""
LEAST_RESPONSES = 64
"""Minimum number of recorded responses. If there are fewer, a generator draws the lengths."""


def step(
    cfg: Config, hf: HFConfig, gpus: int, gpu: Gpu, earlier: Path
) -> tuple[Summary, float, str]:
    """Return the mean of `STEPS` simulated steps, the learner's model FLOPs utilisation in their
    updates, and a note on the source of the response lengths. Lengths are those in `earlier`, the
    rollouts.jsonl of a run, or drawn from a generator capped at rollout.max_tokens. Rewards take no
    time.

    Raises:
        ValueError: no estimate is possible for such a run; the error gives the reason.
    """
    made, said = job(cfg, hf, gpus, gpu, earlier)
    found = simulate(made, STEPS)
    return found, utilisation(made, found), said


def utilisation(job: SimJob, found: Summary) -> float:
    """Return what `perf/mfu/actor` would be."""
    work = job.cfg.train.epochs * job.model.train_flops(found.computed, found.squares)
    return work / found.phases["update_actor"] / job.train_gpus / (job.gpu.tflops * 1e12)


def job(cfg: Config, hf: HFConfig, gpus: int, gpu: Gpu, earlier: Path) -> tuple[SimJob, str]:
    """Return the simulated job for `cfg`, and a note on the source of the response lengths. If the
    model is too small for the cost model, raise ValueError."""
    parameters = num_parameters(hf)
    if parameters < LEAST_PARAMETERS:
        raise ValueError(
            f"{parameters / 1e6:.1f} M weights are too few for a GPU's data sheet to predict speed"
        )
    workload, said = lengths(cfg, earlier)
    made = SimJob(name="run", cfg=cfg, hf=hf, gpu=gpu, gpus=gpus, workload=workload)
    return made, said


def lengths(cfg: Config, earlier: Path) -> tuple[Workload, str]:
    """Return the response lengths, and a note on their source."""
    if earlier.is_file():
        found, said = read_lengths(earlier, {})
        if sum(map(len, getattr(found, "by_prompt", ()))) >= LEAST_RESPONSES:
            return found, said
    cap = cfg.rollout.max_tokens
    base = GENERATORS["32k" if cap > GENERATORS["16k"].cap else "16k"]
    prompt = min(base.prompt_tokens, cfg.data.max_prompt_tokens)
    said = f"drawn as in figure 11 of RollPacker, cut at {cap}"
    return replace(base, cap=cap, prompt_tokens=prompt, seed=cfg.run.seed), said

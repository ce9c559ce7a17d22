"""Estimate the time of a training step by simulation, before the run starts, for `--dry-run`."""

from dataclasses import replace
from pathlib import Path

from rlcore.config.schema import Config
from rlcore.hf.config import HFConfig
from rlcore.hf.names import num_parameters
from rlcore.sched.balance import Rates
from rlcore.sim import splits
from rlcore.sim.cluster import ClusterPlan, SimRun, StreamRule, Summary, summarize
from rlcore.sim.cost import GPUS, EngineCost, Gpu, ModelSize, from_data_sheet
from rlcore.sim.lengths import read_lengths
from rlcore.sim.phases import training_from_data_sheet, weights_s
from rlcore.sim.workload import GENERATORS, Workload

STEPS = 5
LEAST_PARAMETERS = 1e8
"""Minimum number of model parameters: a data sheet predicts wrong times for smaller models."""
LEAST_RESPONSES = 64
"""Minimum number of recorded responses. If there are fewer, a generator draws the lengths."""


def step(cfg: Config, hf: HFConfig, gpus: int, gpu: Gpu, earlier: Path) -> tuple[Summary, str]:
    """Return the mean of `STEPS` simulated steps, and a note on the source of the response lengths.
    Lengths are those in `earlier`, the rollouts.jsonl of a run, or drawn from a generator capped at
    rollout.max_tokens. Rewards take no time.

    Raises:
        ValueError: no estimate is possible for such a run; the error gives the reason.
    """
    made, said = plan(cfg, hf, gpus, gpu, earlier)
    return summarize(list(SimRun(made).steps(STEPS))), said


def rates(cfg: Config, hf: HFConfig, gpus: int, gpu: Gpu, earlier: Path) -> tuple[Rates, str]:
    """Return the speed of sampling and training for the planner of `sched/balance.py`, and a note
    on the source of the response lengths."""
    made, said = plan(cfg, hf, gpus, gpu, earlier)
    return splits.rates(made), said


def plan(cfg: Config, hf: HFConfig, gpus: int, gpu: Gpu, earlier: Path) -> tuple[ClusterPlan, str]:
    """Return the simulation plan for `cfg`, and a note on the source of the response lengths."""
    model = model_of(hf)
    workload, said = lengths(cfg, earlier)
    rollout = cfg.rollout

    def costs(tp: int) -> EngineCost:
        return from_data_sheet(model, gpu, tp, utilization=rollout.gpu_memory_utilization)

    longest = workload.prompt_tokens + workload.cap
    if (room := costs(rollout.tp).cache_tokens) < longest:
        raise ValueError(
            f"an engine over {rollout.tp} x {gpu.name} has room for {room:.0f} tokens, but the "
            f"longest prompt and response have {longest}"
        )
    made = ClusterPlan(
        name=cfg.select.schedule,
        gpus=gpus,
        tp=rollout.tp,
        costs=costs,
        training=training_from_data_sheet(model, gpu, gpus, reference=cfg.algo.needs_reference),
        workload=workload,
        num_prompts=cfg.data.prompts_per_step,
        num_samples=rollout.samples_per_prompt,
        schedule=cfg.select.schedule,
        eta_prompts=cfg.tail.eta_prompts,
        eta_samples=cfg.tail.eta_samples,
        reshard_s=lambda tp: weights_s(model, gpu, tp),
        stream=StreamRule() if cfg.select.mode == "stream" else None,
        max_running=rollout.max_running_requests,
        seed=cfg.run.seed,
    )
    return made, said


def model_of(hf: HFConfig) -> ModelSize:
    """Return the model's properties. If the simulator cannot model it, raise ValueError."""
    parameters = num_parameters(hf)
    if hf.num_experts:
        raise ValueError("the simulator does not model a mixture of experts")
    if parameters < LEAST_PARAMETERS:
        raise ValueError(
            f"{parameters / 1e6:.1f} M weights are too few for a GPU's data sheet to predict speed"
        )
    return ModelSize(
        name=hf.arch,
        parameters=float(parameters),
        layers=hf.num_layers,
        kv_bytes=4.0 * hf.num_layers * hf.num_kv_heads * hf.head_dim,
        hidden=hf.hidden_size,
    )


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


def gpu_named(name: str) -> Gpu | None:
    """Return the data sheet for the driver's name of a GPU, such as `NVIDIA H100 80GB HBM3`."""
    words = name.upper().replace("-", " ").split()
    return next((gpu for key, gpu in GPUS.items() if key in words), None)

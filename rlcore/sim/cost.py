"""Cost model of an engine, from a data sheet or from measurements."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from rlcore.utils.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCost:
    """Cost of one engine. A decode step of b sequences with c context tokens in total takes

        step_s + sequence_s * b + context_s * c

    seconds.
    """

    step_s: float
    """Seconds of an empty decode step, which reads all weights but decodes no sequence."""
    sequence_s: float = 0.0
    context_s: float = 0.0
    prefill_s: float = 0.0
    """Seconds to prefill one token, of a prompt or of a resumed response."""
    cache_tokens: float = math.inf

    def decode_s(self, sequences: int, context: float, steps: int) -> float:
        """Return the seconds of `steps` decode steps, each of which adds one token to every
        sequence. `context`: total context tokens at the first step."""
        grown = sequences * steps * (steps - 1) / 2
        return steps * (self.step_s + self.sequence_s * sequences) + self.context_s * (
            steps * context + grown
        )

    def steps_within(self, sequences: int, context: float, seconds: float) -> int:
        """Return the number of whole decode steps within `seconds`: the inverse of `decode_s`."""
        if seconds <= 0:
            return 0
        a = self.context_s * sequences / 2
        b = self.step_s + self.sequence_s * sequences + self.context_s * (context - sequences / 2)
        guess = seconds / b if a <= 0 else (math.sqrt(b * b + 4 * a * seconds) - b) / (2 * a)
        steps = int(guess + 1e-9)
        while steps and self.decode_s(sequences, context, steps) > seconds * (1 + 1e-12):
            steps -= 1
        return steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """Data sheet of a GPU."""

    name: str
    memory_gb: float
    bandwidth_gbs: float
    """Bandwidth of the GPU memory in GB/s."""
    tflops: float
    """Dense bf16 throughput in TFLOP/s."""
    link_gbs: float
    """One-way bandwidth in GB/s to another GPU of the node."""
    host_gbs: float = 64
    """One-way bandwidth in GB/s to host memory; default: PCIe 5, 16 lanes."""
    per_node: int = 8


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="H800", memory_gb=80, bandwidth_gbs=3350, tflops=989, link_gbs=200),
        Gpu(name="H100", memory_gb=80, bandwidth_gbs=3350, tflops=989, link_gbs=450),
        Gpu(name="H200", memory_gb=141, bandwidth_gbs=4800, tflops=989, link_gbs=450),
        Gpu(name="H20", memory_gb=96, bandwidth_gbs=4000, tflops=148, link_gbs=450),
        Gpu(name="A100", memory_gb=80, bandwidth_gbs=2039, tflops=312, link_gbs=300, host_gbs=32),
    )
}
"""GPUs by name, from NVIDIA's data sheets; H800 is an H100 with slower links."""

EFFICIENCY = 0.6
"""Share of peak bandwidth and peak FLOP/s that engines reach; assumed, not measured."""
LAYER_OVERHEAD_S = 25e-6
"""Seconds of kernel overhead per layer in a decode step with CUDA graphs. With tp > 1, collectives
about double this overhead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Model properties that determine the cost of a transformer."""

    name: str
    parameters: float
    layers: int
    kv_bytes: float
    """Bytes of KV cache per token, over all layers."""
    hidden: int


MODELS = {
    model.name: model
    for model in (
        ModelSize(name="7B", parameters=7.6e9, layers=28, kv_bytes=57_344, hidden=3584),
        ModelSize(name="8B", parameters=8.2e9, layers=36, kv_bytes=147_456, hidden=4096),
        ModelSize(name="14B", parameters=14.8e9, layers=48, kv_bytes=196_608, hidden=5120),
        ModelSize(name="32B", parameters=32.8e9, layers=64, kv_bytes=262_144, hidden=5120),
    )
}
"""Models by size: Qwen2.5 (7B, 14B, 32B) and Qwen3 (8B). Sizes are from config.json. Weights and KV
cache are bf16."""


def from_data_sheet(
    model: ModelSize, gpu: Gpu, tp: int, *, utilization: float = 0.8, other_bytes: float = 0.0
) -> EngineCost:
    """Return the roofline costs of an engine over `tp` GPUs, in bf16.

    Args:
        utilization: share of a GPU's memory that the engine may use.
        other_bytes: part of that memory on each GPU for other uses, such as a judge's weights.

    Raises:
        ConfigError: the weights leave no room for a KV cache.
    """
    weights = 2 * model.parameters / tp
    room = utilization * gpu.memory_gb * 1e9 - weights - other_bytes
    if room <= 0:
        raise ConfigError(
            f"{model.name} over {tp} x {gpu.name}: the weights take "
            f"{(weights + other_bytes) / 1e9:.0f} GB of {utilization * gpu.memory_gb:.0f} GB; "
            "raise tp"
        )
    bandwidth = EFFICIENCY * gpu.bandwidth_gbs * 1e9
    arithmetic = EFFICIENCY * gpu.tflops * 1e12
    meet = 2 * model.layers * (12e-6 if tp > 1 else 0.0)
    return EngineCost(
        step_s=weights / bandwidth + model.layers * LAYER_OVERHEAD_S + meet,
        sequence_s=2 * model.parameters / tp / arithmetic,
        context_s=model.kv_bytes / tp / bandwidth,
        prefill_s=2 * model.parameters / tp / arithmetic,
        cache_tokens=room * tp / model.kv_bytes,
    )


def least_tp(costs: Callable[[int], EngineCost], tokens: int, tp: int) -> int:
    """Return the smallest of tp, tp / 2, ... at which the KV cache holds `tokens` tokens."""
    while tp > 1:
        try:
            if costs(tp // 2).cache_tokens < tokens:
                break
        except ValueError:  # the weights do not fit into memory at tp / 2
            break
        tp //= 2
    return tp


def with_step(cost: EngineCost, measured: EngineCost, step_s: float) -> EngineCost:
    """Return `cost` with its empty-step time multiplied by `step_s` / `measured.step_s`: the ratio
    of the true to the modelled empty-step time of a reference engine."""
    return replace(cost, step_s=cost.step_s * step_s / measured.step_s)

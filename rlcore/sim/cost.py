"""Seconds of what an engine does, from a data sheet or as measured."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from rlcore.utils.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Of one replica. A decode step of b sequences with c tokens of context in all takes

    step_s + sequence_s b + context_s c
    """

    step_s: float
    """Of an empty step: all weights are read."""
    sequence_s: float = 0.0
    context_s: float = 0.0
    prefill_s: float = 0.0
    """Of one token of a prompt, or of a response that is taken up again."""
    cache_tokens: float = math.inf

    def decode_s(self, sequences: int, context: float, steps: int) -> float:
        """Of `steps` steps, in each of which every sequence grows by a token; `context` is that of
        the first."""
        grown = sequences * steps * (steps - 1) / 2
        return steps * (self.step_s + self.sequence_s * sequences) + self.context_s * (
            steps * context + grown
        )

    def steps_within(self, sequences: int, context: float, seconds: float) -> int:
        """Whole steps that fit into a time: the inverse of `decode_s`."""
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
    """A data sheet."""

    name: str
    memory_gb: float
    bandwidth_gbs: float
    """Of its memory."""
    tflops: float
    """bf16, dense."""
    link_gbs: float
    """To another GPU of the node, one way."""
    host_gbs: float = 64
    """To the memory of the host, one way: PCIe 5, 16 lanes."""
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
"""From NVIDIA's data sheets; H800 is an H100 with slower links."""

EFFICIENCY = 0.6
"""Of bandwidth and arithmetic that engines reach; a round number."""
LAYER_OVERHEAD_S = 25e-6
"""Of one layer's kernels in a decode step, with CUDA graphs; doubled where ranks must meet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What the cost of a transformer depends on."""

    name: str
    parameters: float
    layers: int
    kv_bytes: float
    """Of one token, all layers."""
    hidden: int


MODELS = {
    model.name: model
    for model in (
        Model(name="7B", parameters=7.6e9, layers=28, kv_bytes=57_344, hidden=3584),
        Model(name="8B", parameters=8.2e9, layers=36, kv_bytes=147_456, hidden=4096),
        Model(name="14B", parameters=14.8e9, layers=48, kv_bytes=196_608, hidden=5120),
        Model(name="32B", parameters=32.8e9, layers=64, kv_bytes=262_144, hidden=5120),
    )
}
"""Qwen2.5 7B, 14B, 32B and Qwen3 8B from their config.json; bf16, keys and values included."""


def from_data_sheet(
    model: Model, gpu: Gpu, tp: int, *, utilization: float = 0.8, other_bytes: float = 0.0
) -> Cost:
    """The roofline of a replica over `tp` GPUs, in bf16.

    Args:
        utilization: share of a GPU's memory that the engine may use.
        other_bytes: of each GPU's share that something else takes, such as a judge's weights.

    Raises:
        ConfigError: the weights leave no room for a cache.
    """
    weights = 2 * model.parameters / tp
    room = utilization * gpu.memory_gb * 1e9 - weights - other_bytes
    if room <= 0:
        raise ConfigError(
            f"{model.name} over {tp} x {gpu.name}: the weights take "
            f"{(weights + other_bytes) / 1e9:.0f} GB of {utilization * gpu.memory_gb:.0f} GB; take "
            "a larger tp"
        )
    bandwidth = EFFICIENCY * gpu.bandwidth_gbs * 1e9
    arithmetic = EFFICIENCY * gpu.tflops * 1e12
    meet = 2 * model.layers * (12e-6 if tp > 1 else 0.0)
    return Cost(
        step_s=weights / bandwidth + model.layers * LAYER_OVERHEAD_S + meet,
        sequence_s=2 * model.parameters / tp / arithmetic,
        context_s=model.kv_bytes / tp / bandwidth,
        prefill_s=2 * model.parameters / tp / arithmetic,
        cache_tokens=room * tp / model.kv_bytes,
    )


def least_tp(costs: Callable[[int], Cost], tokens: int, tp: int) -> int:
    """The smallest size up to `tp` whose cache holds a request of so many tokens."""
    while tp > 1:
        try:
            if costs(tp // 2).cache_tokens < tokens:
                break
        except ValueError:  # not even the weights
            break
        tp //= 2
    return tp


def with_step(cost: Cost, measured: Cost, step_s: float) -> Cost:
    """`cost` as of an engine whose empty step takes `step_s` where the data sheet says
    `measured.step_s`: both are slower by the same factor."""
    return replace(cost, step_s=cost.step_s * step_s / measured.step_s)

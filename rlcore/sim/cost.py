"""Cost model of the hardware: what a GPU, a model and an engine of some GPUs take for a decode step
or a prefill. `phases.py` has training and all else.

Every command of the simulator, `--dry-run` and the planner ask these functions. Their few constants
(`Constants`) hold for all models and clusters; `calibrate.py` fits them on published seconds.
"""

import math
from dataclasses import dataclass
from functools import cache

from rlcore.hf.config import HFConfig
from rlcore.hf.size import ModelSize, size_of
from rlcore.utils.errors import ConfigError
from rlcore.utils.files import read_json, recipes_folder
from rlcore.utils.gpus import Gpu


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """Constants of the cost model. They hold for all models, clusters and systems."""

    bandwidth: float
    """Share of the peak memory bandwidth at which a decode step reads weights and KV cache."""
    layer_s: float
    """Seconds of launches and host work per layer of a decode step."""
    collective_s: float
    """Seconds of an all-reduce of few bytes over the GPUs of an engine; a layer has two."""
    padding: float
    """Share of the longest allowed response to which ROLL pads a sample in training, the framework
    of RollPacker and ROLL Flash; rlcore and veRL pack."""
    overhead_s: float
    """Seconds of a step that ROLL spends besides its phases, such as to move data between
    processes; not counted for rlcore and veRL."""
    arithmetic: float = 0.6
    """Share of the peak FLOP/s that large matrix products and attention reach. The operations of
    dense models' updates, counted in `tests/pretend/costs.py`, give .57 to .60."""
    link: float = 0.6
    """Share of the peak bandwidth of links between GPUs, nodes and host memory; assumed."""
    request_s: float = 10e-6
    """Seconds of host work and sampling per request of a decode step; assumed."""
    expert_launches: float = 1.5
    """Launches of a layer with experts over those of a dense layer; assumed."""
    expert_arithmetic: float = 0.5
    """Share of `arithmetic` that the products of one expert after another reach; assumed."""
    imbalance: float = 1.2
    """Ratio of the tokens of the busiest expert-parallel rank to the mean over all; assumed."""
    sleep_s: float = 0.8
    """Seconds besides copies in which an engine falls asleep and wakes up: the middle of RollMux'
    warm starts of a rollout, .9 to 1.9 s, without the copy of the weights."""
    offload_s: float = 4.4
    """Seconds besides copies in which a learner leaves the GPU and returns: the middle of RollMux'
    warm starts of training, 4.1 to 5.9 s, without the copy of the states."""
    capture_s: float = 10.0
    """Seconds to capture an engine's CUDA graphs again after a change of its size; assumed."""


CONSTANTS = Constants(
    bandwidth=0.701, layer_s=81.6e-6, collective_s=14.6e-6, padding=0.320, overhead_s=31.9
)
"""Fitted by `python -m rlcore sim calibrate` on published seconds."""
ERROR = 1.3
"""Error bar of simulated seconds, a factor in both directions: the root mean square of the
logarithmic errors with which each paper is predicted from the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCost:
    """Cost of one engine. A decode step of b sequences with c context tokens in total takes

        step_s + max(weights_s + experts_s * touched(b), product_s * b) + sequence_s * b
            + request_s * b + context_s * c

    seconds. touched(b) = 1 - (1 - expert_share)^b is the share of a layer's experts that b tokens
    need, if every expert is equally likely. If a step verifies drafts in w positions of every
    sequence, b is multiplied by w, except in request_s * b.
    """

    step_s: float
    """Seconds of a decode step that no sequence or weight adds to: launches, collectives."""
    weights_s: float = 0.0
    """Seconds to read all weights that every token needs."""
    experts_s: float = 0.0
    """Seconds to read all experts of a mixture of experts."""
    expert_share: float = 1.0
    product_s: float = 0.0
    """Seconds of one sequence's matrix products, which count where they exceed the reading."""
    sequence_s: float = 0.0
    request_s: float = 0.0
    context_s: float = 0.0
    prefill_s: float = 0.0
    """Seconds to prefill one token, of a prompt or of a resumed response."""
    prefill_square_s: float = 0.0
    """Seconds of attention that a prefill of n tokens adds, divided by n^2."""
    cache_tokens: float = math.inf

    def sequences_s(self, sequences: float, width: float = 1) -> float:
        """Return the seconds of a decode step without context, with `width` positions of every
        sequence."""
        read, tokens = self.weights_s, sequences * width
        if self.experts_s:
            read += self.experts_s * (1 - (1 - self.expert_share) ** tokens)
        products = max(read, self.product_s * tokens)
        return self.step_s + products + self.sequence_s * tokens + self.request_s * sequences

    def decode_s(
        self, sequences: int, context: float, steps: int, width: float = 1, grows: float = 0.0
    ) -> float:
        """Return the seconds of `steps` decode steps, each of which adds one token to every
        sequence, or `grows` tokens in total. `context`: total context tokens at the first step."""
        grown = (grows or sequences) * steps * (steps - 1) / 2
        each = self.sequences_s(sequences, width)
        return steps * each + self.context_s * (steps * context + grown)

    def steps_within(
        self, sequences: int, context: float, seconds: float, width: float = 1, grows: float = 0.0
    ) -> int:
        """Return the number of whole decode steps within `seconds`: the inverse of `decode_s`."""
        if seconds <= 0:
            return 0
        a = self.context_s * (grows or sequences) / 2
        b = self.sequences_s(sequences, width) + self.context_s * context - a
        guess = seconds / b if a <= 0 else (math.sqrt(b * b + 4 * a * seconds) - b) / (2 * a)
        steps = int(guess + 1e-9)
        most = seconds * (1 + 1e-12)
        while steps and self.decode_s(sequences, context, steps, width, grows) > most:
            steps -= 1
        return steps

    def prompt_s(self, tokens: int, cached: int = 0) -> float:
        """Return the seconds to prefill `tokens` tokens of one request, of which the KV cache
        already has the first `cached`."""
        squares = tokens * tokens - cached * cached
        return self.prefill_s * (tokens - cached) + self.prefill_square_s * squares


MODEL_FILES = {
    "7B": "qwen2_5_7b",
    "8B": "qwen3_8b",
    "14B": "qwen2_5_14b",
    "32B": "qwen2_5_32b",
    "30B-A3B": "qwen3_30b_a3b",
}
"""Models with a name, and their config.json in recipes/models: Qwen2.5 and Qwen3."""


@cache
def hf_named(name: str) -> HFConfig:
    """Return the architecture of a model of `MODEL_FILES`."""
    return HFConfig.from_dict(read_json(recipes_folder() / "models" / f"{MODEL_FILES[name]}.json"))


@cache
def model_named(name: str) -> ModelSize:
    """Return the size of a model of `MODEL_FILES`."""
    return size_of(hf_named(name), name)


def engine_cost(
    model: ModelSize,
    gpu: Gpu,
    tp: int,
    *,
    utilization: float = 0.8,
    other_bytes: float = 0.0,
    constants: Constants = CONSTANTS,
) -> EngineCost:
    """Return the costs of an engine over `tp` GPUs, in bf16: a roofline. If they are on several
    nodes, all-reduces have the speed of the network.

    Args:
        utilization: share of a GPU's memory that the engine may use.
        other_bytes: part of that memory on each GPU for other uses, such as a judge's weights.

    Raises:
        ConfigError: the weights leave no room for a KV cache.
    """
    c = constants
    weights = 2 * model.parameters / tp
    room = utilization * gpu.memory_gb * 1e9 - weights - other_bytes
    if room <= 0:
        raise ConfigError(
            f"{model.name} over {tp} x {gpu.name}: the weights take "
            f"{(weights + other_bytes) / 1e9:.0f} GB of {utilization * gpu.memory_gb:.0f} GB; "
            "raise tp"
        )
    bandwidth = c.bandwidth * gpu.bandwidth_gbs * 1e9
    arithmetic = c.arithmetic * gpu.tflops * 1e12
    launches = c.layer_s * (c.expert_launches if model.experts else 1.0)
    kv_share = 1 / min(tp, model.cache_heads)  # of more GPUs, several hold the same heads
    # bytes that an all-reduce of one token sends in all layers, to and from each GPU
    reduced = 2 * 2 * model.layers * 2 * model.hidden * (tp - 1) / tp
    reduced_s = reduced / (c.link * (gpu.network_gbs if tp > gpu.per_node else gpu.link_gbs) * 1e9)
    product_s = 2 * model.products / tp / arithmetic
    return EngineCost(
        step_s=model.layers * (launches + (2 * c.collective_s if tp > 1 else 0.0)),
        weights_s=2 * model.dense / tp / bandwidth,
        experts_s=2 * model.experts / tp / bandwidth,
        expert_share=model.expert_share,
        product_s=product_s,
        sequence_s=reduced_s,
        request_s=c.request_s,
        context_s=model.kv_bytes * kv_share / bandwidth,
        prefill_s=product_s + reduced_s,
        prefill_square_s=2 * model.layers * model.attention / tp / arithmetic,
        cache_tokens=room / (model.kv_bytes * kv_share),
    )

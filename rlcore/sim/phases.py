"""Costs of all phases except decoding: training, weight updates, changes of `tp`, a judge model."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlcore.sim.cost import EFFICIENCY, Gpu, ModelSize

MFU = 0.35
"""Share of a GPU's peak FLOP/s that training reaches; assumed, `--mfu` overrides it."""
ADAM_BYTES = 16
"""Bytes per parameter that move between GPU and host before and after a rollout: fp32 weights,
gradient and two Adam moments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCost:
    """Cost of the learner on all its GPUs. A sample of n tokens, prompt included, takes

        sample_s + token_s * n + square_s * n^2

    seconds forward and backward. Log-probs before the update add `forward_share` of these seconds.
    """

    sample_s: float = 0.0
    token_s: float = 0.0
    square_s: float = 0.0
    forward_share: float = 1 / 3
    """Time of the log-probs relative to forward and backward; 2/3 with a reference model."""
    step_s: float = 0.0
    """Seconds per step to move learner states from and to the host, and to run the optimizer."""
    sync_s: float = 0.0
    """Seconds to update the weights of the engines."""

    def update_s(self, lengths: Sequence[int]) -> float:
        """Return the seconds of forward and backward for samples of these lengths."""
        squares = sum(n * n for n in lengths) if self.square_s else 0
        return len(lengths) * self.sample_s + self.token_s * sum(lengths) + self.square_s * squares

    def logprobs_s(self, lengths: Sequence[int]) -> float:
        """Return the seconds of log-probs before the first update, for samples of these lengths."""
        return self.forward_share * self.update_s(lengths)


def training_from_data_sheet(
    model: ModelSize, gpu: Gpu, gpus: int, *, mfu: float = MFU, reference: bool = False
) -> TrainingCost:
    """Return the training cost from operation counts: 6 per parameter and token, and for causal
    attention 6 x layers x hidden per pair of tokens. Samples are packed, so there is no padding."""
    arithmetic = mfu * gpu.tflops * 1e12 * gpus
    return TrainingCost(
        token_s=6 * model.parameters / arithmetic,
        square_s=6 * model.layers * model.hidden / arithmetic,
        forward_share=(2 if reference else 1) / 3,
        step_s=2 * ADAM_BYTES * model.parameters / gpus / (EFFICIENCY * gpu.host_gbs * 1e9),
        sync_s=weights_s(model, gpu, 1),
    )


def weights_s(model: ModelSize, gpu: Gpu, tp: int) -> float:
    """Return the seconds to load weights into engines of `tp` ranks over the links of a node, for a
    weight update or a change of `tp`. Recapture of CUDA graphs is not counted. RollPacker's paper
    calls the time of a change of `tp` negligible."""
    return 2 * model.parameters / tp / (EFFICIENCY * gpu.link_gbs * 1e9)


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeCost:
    """Cost of a judge model that answers with one word, so that only prefill takes time. Requests
    run one at a time."""

    token_s: float
    least_s: float = 0.0
    """Minimum seconds to judge one response, if layers are streamed from the host."""
    is_overlapped: bool = True
    """Whether the next layer is loaded while the current layer computes, not afterwards."""

    def seconds(self, tokens: int) -> float:
        """Return the seconds to judge a prompt and response of `tokens` tokens."""
        compute = self.token_s * tokens
        return max(compute, self.least_s) if self.is_overlapped else compute + self.least_s


JUDGE_SHARE = 0.5
"""Share of a judge's layers that stay on the GPU while the others are streamed from the host
(`LAYER_BY_LAYER_CACHE_RATIO` in RollPacker's code)."""


def judge_from_data_sheet(
    model: ModelSize,
    gpu: Gpu,
    gpus: int,
    *,
    utilization: float = EFFICIENCY,
    streamed: bool = False,
) -> JudgeCost:
    """Return the cost of a judge on `gpus` GPUs at the share `utilization` of peak FLOP/s."""
    read = 2 * model.parameters * (1 - JUDGE_SHARE) / gpus if streamed else 0.0
    return JudgeCost(
        token_s=2 * model.parameters / (utilization * gpu.tflops * 1e12 * gpus),
        least_s=read / (EFFICIENCY * gpu.host_gbs * 1e9),
    )


def judge_bytes(model: ModelSize, *, streamed: bool) -> float:
    """Return the bytes of GPU memory that a judge's weights take."""
    return 2 * model.parameters * (JUDGE_SHARE if streamed else 1.0)

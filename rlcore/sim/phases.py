"""Costs of all phases except decoding: training in a parallel layout, weight updates, engines that
sleep and wake, changes of `tp`, a judge model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rlcore.hf.size import ModelSize
from rlcore.mcore.prefix_tree import Node, PrefixTree, groups, of_groups
from rlcore.records import GroupId
from rlcore.sim.cost import CONSTANTS, Constants
from rlcore.trainer.plan import TrainRow, distribute
from rlcore.utils.gpus import Gpu

STATE_BYTES = 16
"""Bytes per parameter of a learner: fp32 weights, gradients and two Adam moments."""
PASSES = {"none": 3.0, "selective": 3.1, "full": 4.0}
"""Passes over the model in forward and backward, where the backward pass counts as two: with
`full`, the forward pass is done again; with `selective`, the attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Parallel layout of the learner, and how it works off a step; fields as in section `train` of
    the configuration."""

    gpus: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    pp_layers: tuple[int, ...] = ()
    cp: int = 1
    ep: int = 1
    etp: int = 1
    recompute: str = "none"
    micro_batch: int = 16_384
    """Maximum number of tokens in a micro-batch."""
    updates: int = 1
    """Number of optimizer steps in a step."""
    epochs: int = 1
    offload: bool = True
    """Whether learner and engine take turns on the GPU."""

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.pp * self.cp)


def train_row(group: GroupId, prompt: int, response: int) -> TrainRow:
    """Return a sample to train on, with all that its cost depends on."""
    return TrainRow(group, group, 0, 0.0, 0.0, response, prompt)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingWork:
    """Numbers on which the seconds of training on some samples depend."""

    samples: int
    tokens: int
    """Number of prompt and response tokens that are computed."""
    squares: int
    """Sum of the squared lengths of the samples, as far as they are computed: a computed token
    attends to all tokens before it."""
    longest: int
    """Number of prompt and response tokens of the longest sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCost:
    """Cost of the learner on all its GPUs. A sample of n tokens, prompt included, takes

        sample_s + token_s * n + square_s * n^2

    seconds forward and backward, less those of its first tokens that another sample computes for
    it. Log-probs before the update add `forward_share` of these seconds. No sample is faster than
    one model-parallel group, `dp` of which train at a time.
    """

    sample_s: float = 0.0
    token_s: float = 0.0
    square_s: float = 0.0
    dp: int = 1
    forward_share: float = 1 / 3
    """Time of the log-probs relative to forward and backward; twice that with a reference model."""
    step_s: float = 0.0
    """Seconds per step that do not depend on the samples: pipeline bubbles, reduction of gradients,
    optimizer."""
    offload_s: float = 0.0
    """Seconds in which the learner returns to the GPU for a step, and leaves it after."""
    sync_s: float = 0.0
    """Seconds to update the weights of the engines."""
    shares_prefix: bool = False
    """Whether the prompt of a group's samples is computed once in a micro-batch."""
    micro_batch: int = 16_384
    """Maximum number of tokens in a micro-batch."""
    updates: int = 1
    """Number of optimizer steps in a step."""

    def update_s(self, work: TrainingWork) -> float:
        """Return the seconds of forward and backward."""
        n = work.longest
        longest = self.sample_s + self.token_s * n + self.square_s * n * n
        mean = work.samples * self.sample_s + self.token_s * work.tokens
        return max(mean + self.square_s * work.squares, self.dp * longest)

    def logprobs_s(self, work: TrainingWork) -> float:
        """Return the seconds of log-probs before the first update."""
        return self.forward_share * self.update_s(work)

    def work(self, rows: Sequence[TrainRow]) -> TrainingWork:
        """Return what the samples of a step are to compute."""
        nodes = self.computed(rows)
        return TrainingWork(
            samples=len(rows),
            tokens=sum(node.size for node in nodes),
            squares=sum((node.start + node.size) ** 2 - node.start**2 for node in nodes),
            longest=max((r.prompt_length + r.num_tokens for r in rows), default=0),
        )

    def computed(self, rows: Sequence[TrainRow]) -> list[Node]:
        """Return the tokens that are computed of these samples, as nodes of the micro-batches'
        prefix trees. Updates, ranks and micro-batches get their samples as in training."""
        if not self.shares_prefix:
            return [Node(-1, 0, r.prompt_length + r.num_tokens) for r in rows]
        ends = [len(rows) * u // self.updates for u in range(self.updates + 1)]
        updates = (rows[start:end] for start, end in pairwise(ends))
        parts = (part for update in updates for part in distribute(update, self.dp, True))
        return [node for part in parts for node in self._nodes(part)]

    def _nodes(self, part: Sequence[TrainRow]) -> Iterator[Node]:
        """Yield the nodes that a rank computes in an update."""
        lengths = [r.prompt_length + r.num_tokens for r in part]
        for rows in groups(lengths, self.micro_batch, _tree(part)):
            yield from _tree([part[i] for i in rows]).nodes

    def padded(self, tokens: float) -> "TrainingCost":
        """Return the cost if every sample is padded, or cut, to `tokens` tokens."""
        sample_s = self.sample_s + self.token_s * tokens + self.square_s * tokens * tokens
        return replace(self, sample_s=sample_s, token_s=0.0, square_s=0.0)


def _tree(rows: Sequence[TrainRow]) -> PrefixTree:
    prompts = [r.prompt_length for r in rows]
    lengths = [r.prompt_length + r.num_tokens for r in rows]
    return of_groups([r.group for r in rows], prompts, lengths)


def training_cost(
    model: ModelSize,
    gpu: Gpu,
    layout: Layout,
    *,
    shares_prefix: bool = False,
    reference: bool = False,
    rollout_tp: int = 1,
    apart: bool = False,
    constants: Constants = CONSTANTS,
) -> TrainingCost:
    """Return the cost of training in a layout: operations at the share of the peak that kernels
    reach, and beside them, not overlapped, the traffic of tensor, context and expert parallelism.

    Args:
        shares_prefix: whether a group's prompt is computed once.
        reference: whether log-probs of a reference model are computed, too.
        rollout_tp: GPUs of an engine, to which the weights go.
        apart: whether engines have GPUs of their own, so that weights cross the network.
    """
    c, attention_passes = constants, PASSES[layout.recompute]
    # With adapters, backward has no products for gradients of the weights.
    passes = attention_passes - bool(model.adapters)
    arithmetic = c.arithmetic * gpu.tflops * 1e12
    # one model-parallel group of tp x cp x pp GPUs: seconds of a forward pass of one token
    group = layout.tp * layout.cp * layout.pp
    dense_s = 2 * model.dense / arithmetic / group
    experts_s = 2 * model.experts * model.expert_share / arithmetic / group
    if experts_s:
        experts_s *= (c.imbalance if layout.ep > 1 else 1.0) / c.expert_arithmetic
    traffic_s = _traffic_s(model, gpu, layout, c)
    pace = _pace(model, layout)
    forward_s = pace * (dense_s + experts_s + traffic_s)
    squares = 2 * model.layers * model.attention  # causal: half of all pairs
    square_s = pace * squares / arithmetic / group
    rounds = passes * layout.epochs
    bubble_s = (layout.pp - 1) / layout.vpp * layout.micro_batch * forward_s * passes
    return TrainingCost(
        token_s=rounds * forward_s / layout.dp,
        square_s=attention_passes * layout.epochs * square_s / layout.dp,
        dp=layout.dp,
        forward_share=(2 if reference else 1) / rounds,
        step_s=layout.updates
        * layout.epochs
        * (bubble_s + _reduce_s(model, gpu, layout, c) + _optimizer_s(model, gpu, layout, c)),
        offload_s=offload_s(model, gpu, layout.gpus, c) if layout.offload else 0.0,
        sync_s=update_weights_s(model, gpu, layout, rollout_tp, apart=apart, constants=c),
        shares_prefix=shares_prefix,
        micro_batch=layout.micro_batch,
        updates=layout.updates,
    )


def _pace(model: ModelSize, layout: Layout) -> float:
    """Return the time of the slowest pipeline stage relative to that with equal numbers of layers,
    for which the constants are fitted. The last stage has the output layer, too. Attention, which
    grows with the length, is left out."""
    if not layout.pp_layers:
        return 1.0
    head = model.head / ((model.products - model.head) / model.layers)  # in layers
    stages = [sum(layout.pp_layers[i :: layout.pp]) for i in range(layout.pp)]
    return max(*stages, stages[-1] + head) / (model.layers / layout.pp + head)


def _traffic_s(model: ModelSize, gpu: Gpu, layout: Layout, c: Constants) -> float:
    """Return the seconds of traffic between the GPUs of a group, per token of a forward pass.

    Tensor parallelism reduces a layer's activations twice, context parallelism gathers its keys and
    values, expert parallelism sends each token to its experts and back. Ranks that divide experts
    gather their tokens, and sum the outputs. A pass backward has twice the traffic, as it has twice
    the operations.
    """
    layers, own = model.layers / layout.pp, 1 / layout.cp
    spans = layout.tp * layout.cp > gpu.per_node
    near, far = (c.link * gbs * 1e9 for gbs in (gpu.link_gbs, gpu.network_gbs))
    seconds = 2 * layers * own * 2 * (layout.tp - 1) / layout.tp * 2 * model.hidden / near
    if layout.tp > model.kv_heads:  # these ranks gather the heads of their query group
        dim = model.layer_kv_bytes / 4 / model.kv_heads
        shared = model.attention / model.kv_heads + 2 * dim
        seconds += layers * own * 2 * shared * (1 - model.kv_heads / layout.tp) / near
    gathered = model.layer_kv_bytes / min(layout.tp, model.kv_heads)
    seconds += layers * gathered * (layout.cp - 1) / layout.cp / (far if spans else near)
    if model.experts:
        sent = layers * own / layout.tp * 2 * model.experts_per_token * 2 * model.hidden
        share = (layout.ep - 1) / layout.ep
        seconds += share * sent / (far if layout.ep * layout.etp > gpu.per_node else near)
        seconds += (layout.etp - 1) * sent / (far if layout.etp > gpu.per_node else near)
    return seconds


def _reduce_s(model: ModelSize, gpu: Gpu, layout: Layout, c: Constants) -> float:
    """Return the seconds to reduce fp32 gradients over the data-parallel ranks and to gather bf16
    weights."""
    if layout.dp * layout.cp == 1:
        return 0.0
    held = (model.dense + model.embeddings) / layout.tp + model.experts / (layout.ep * layout.etp)
    if model.adapters:
        held = model.adapters / layout.tp
    gbs = gpu.network_gbs if layout.gpus > gpu.per_node else gpu.link_gbs
    return (4 + 2) * held / layout.pp / (c.link * gbs * 1e9)


def _optimizer_s(model: ModelSize, gpu: Gpu, layout: Layout, c: Constants) -> float:
    """Return the seconds in which Adam reads and writes its states."""
    moved = 2 * STATE_BYTES * model.trained / layout.gpus
    return moved / (c.bandwidth * gpu.bandwidth_gbs * 1e9)


def offload_s(model: ModelSize, gpu: Gpu, gpus: int, constants: Constants = CONSTANTS) -> float:
    """Return the seconds in which a learner on `gpus` GPUs returns from the host and leaves again,
    while the engines sleep and wake."""
    c = constants
    frozen = 2 * (model.parameters - model.trained) if model.adapters else 0.0
    held = STATE_BYTES * model.trained + frozen
    copied = 2 * held / gpus / (c.link * gpu.host_gbs * 1e9)
    return copied + c.offload_s + c.sleep_s


def update_weights_s(
    model: ModelSize,
    gpu: Gpu,
    layout: Layout,
    tp: int,
    *,
    apart: bool = False,
    constants: Constants = CONSTANTS,
) -> float:
    """Return the seconds to send new weights to engines of `tp` GPUs. Where a model-parallel group
    or its experts span nodes, the part of other nodes crosses the network; all of it does if the
    engines have GPUs of their own (`apart`)."""
    near, far = (constants.link * gbs * 1e9 for gbs in (gpu.link_gbs, gpu.network_gbs))
    sent = 2 * model.parameters / tp
    spread = max(layout.tp * layout.pp * layout.cp, layout.ep * layout.etp)
    other = 1.0 if apart else max(0.0, 1 - gpu.per_node / spread)
    return sent * other / far + sent * (1 - other) / near


def resize_s(model: ModelSize, gpu: Gpu, tp: int, constants: Constants = CONSTANTS) -> float:
    """Return the seconds to change engines to `tp` GPUs: weights over the links of a node, graphs
    captured again."""
    return 2 * model.parameters / tp / (constants.link * gpu.link_gbs * 1e9) + constants.capture_s


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


def judge_cost(
    model: ModelSize,
    gpu: Gpu,
    gpus: int,
    *,
    utilization: float = CONSTANTS.arithmetic,
    streamed: bool = False,
) -> JudgeCost:
    """Return the cost of a judge on `gpus` GPUs at the share `utilization` of peak FLOP/s."""
    read = 2 * model.parameters * (1 - JUDGE_SHARE) / gpus if streamed else 0.0
    return JudgeCost(
        token_s=2 * model.products / (utilization * gpu.tflops * 1e12 * gpus),
        least_s=read / (CONSTANTS.link * gpu.host_gbs * 1e9),
    )


def judge_bytes(model: ModelSize, *, streamed: bool) -> float:
    """Return the bytes of GPU memory that a judge's weights take."""
    return 2 * model.parameters * (JUDGE_SHARE if streamed else 1.0)

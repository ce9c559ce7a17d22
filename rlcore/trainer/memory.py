"""Plan the memory of one rank, and check measured memory against the plan.

`make` computes the bytes of every part in every phase from configuration, model and layout. Parts
that are allocated once (weights, gradients, optimizer states, a cache of given size) are exact up
to padding. Temporary memory is an estimate and marked as such. `Residency` measures the memory at
every switch between engine and learner.

With --train.offload the phases hold (+: in addition to load_learner):

    build            learner: weights (twice), gradients; the engine sleeps
    gen              engine: weights, cache
    load_learner     learner: weights, gradients, optimizer; the engine sleeps
    old_log_prob     + reference weights, one layer's activations, logits
    teacher          + teacher: outer weights, two layers, its work; with --teacher.models
    update_actor     + activations, logits
    optimizer_step   as load_learner: Adam works in place; --train.offload_optimizer + chunks
    update_weights   learner: weights alone; engine: weights; buckets. Then the learner is offloaded
                     and the cache is allocated
    save_checkpoint  learner: weights, optimizer; engine: weights

Without --train.offload all persistent parts stay on the device; phases add temporary memory.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal

import torch

from rlcore import algos
from rlcore.config import rules
from rlcore.config.schema import NO_ADAPTERS, Config, LoraConfig, ModelConfig, TrainConfig
from rlcore.hf import lora as peft
from rlcore.hf.config import HFConfig
from rlcore.hf.names import layer_prefix, layer_shapes, num_parameters
from rlcore.mcore.adam import CHUNK_BYTES, UNDER_WAY
from rlcore.mcore.layer_inputs import ON_DEVICE, PAGE_BYTES
from rlcore.mcore.layout import ParallelLayout, layout_of
from rlcore.ops.suffix_device import stream_bytes
from rlcore.protocols import PARTS, Learner, Part
from rlcore.rollout.torch_engine.sampler import MOST_LOGITS
from rlcore.sync.colocated import IN_FLIGHT
from rlcore.utils.host_room import room_bytes
from rlcore.utils.log import log

GB = 1e9
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float64": 8}
PROCESS_CONTEXT = 1_500_000_000
"""Bytes of any process on a GPU (estimate): CUDA context, loaded kernels, workspaces."""
TRAINER_CONTEXT = 3_000_000_000
"""Bytes of a training process (estimate): as `PROCESS_CONTEXT`, and NCCL buffers of all groups."""
ENGINE_CONTEXT = {"torch": PROCESS_CONTEXT, "sglang": 4_000_000_000}
"""Bytes of an engine process, even asleep (estimate): SGLang also keeps CUDA graphs and buffers."""
PREFILL_TOKENS = {"torch": 16384, "sglang": 8192}
CHECKPOINT_BYTES = 2 * 2**30
"""Bytes of checkpoint files that a rank holds in host memory at a time (mcore/checkpoint.py)."""
CHECKPOINT_FILES = "checkpoint files"
STAGED = 1.4
"""Host memory of an asynchronous save, over the checkpoint's size (estimate): torch allocates
pinned memory in powers of two, and files are not full (`tests/unit/test_memory_plan.py`)."""
HISTORY_BYTES = 42
"""Bytes of a token of history in a suffix forest (csrc/README.md)."""
STREAMS = "streams for drafts"
BUNDLE_BYTES = 256 * 2**20
"""Bytes that `Learner.export` gathers at a time, unless one tensor is larger."""
SLACK_BYTES = 16 * 2**20
"""Tolerance in bytes for padding and counters; another 2 % of the plan is tolerated as well."""


@dataclass(frozen=True, slots=True)
class Item:
    """Memory of one part, such as the KV cache, during a phase."""

    part: str
    num_bytes: int
    is_estimate: bool = False
    comes_later: bool = False
    """Whether the part is allocated during the phase, not before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Memory of one rank in every phase."""

    rank: int
    phases: dict[str, tuple[Item, ...]]
    learner: dict[str, int]
    """Bytes of learner and critic state on the device, by phase."""
    host: tuple[Item, ...]
    """Parts that are kept in host memory."""
    problems: tuple[str, ...] = ()

    def total(self, phase: str) -> int:
        return sum(item.num_bytes for item in self.phases[phase])

    @property
    def worst(self) -> str:
        """Name of the phase that takes most memory."""
        return max(self.phases, key=self.total)

    def with_measured(self, num_bytes: int) -> "MemoryPlan":
        """Return this plan with measured contexts. `num_bytes`: bytes in use on the device while it
        holds neither learner nor engine. Beside a judge, which may still be loading, contexts are
        at least the estimate."""

        def measured(items: tuple[Item, ...]) -> tuple[Item, ...]:
            judge = sum(i.num_bytes for i in items if i.part == "judge")
            least = sum(i.num_bytes for i in items if i.part == "contexts") if judge else 0
            contexts = Item("contexts", max(num_bytes - judge, least))
            return (*(i for i in items if i.part not in ("contexts", STREAMS)), contexts)

        return replace(self, phases={name: measured(items) for name, items in self.phases.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherMemory:
    """Memory of models other than engine and learner, such as a judge or a teacher."""

    always: tuple[Item, ...] = ()
    """Memory in use in every phase, allocated before the learner is loaded."""
    generate: tuple[Item, ...] = ()
    """Memory in use only while the engine samples."""
    teacher: tuple[Item, ...] = ()
    """Memory in use only while a teacher scores, beside the learner."""
    host: tuple[Item, ...] = ()
    """Host memory of processes other than engine and learner."""


NOBODY = OtherMemory()


# ---- memory of a model


def parameters(hf: HFConfig, layout: ParallelLayout, head: str = "lm") -> tuple[int, int]:
    """Return this rank's number of dense parameters (sharded by tensor parallelism or replicated)
    and its number of expert parameters."""
    dense, experts = 0, 0.0
    for form, count in Counter(map(hf.has_experts, stage_layers(hf, layout))).items():
        own, routed = layer_parameters(hf, layout, hf.forms[form])
        dense, experts = dense + count * own, experts + count * routed
    vocabulary = -(-hf.vocab_size // layout.tp) * hf.hidden_size
    if layout.is_first_stage:
        dense += vocabulary
    if layout.is_last_stage:
        dense += hf.hidden_size  # weights of the final norm
        if head == "value":
            dense += hf.hidden_size
        elif not (hf.tie_word_embeddings and layout.is_first_stage):
            dense += vocabulary  # With tied embeddings, the last stage keeps a copy of them.
    return dense, round(experts)


def stage_layers(hf: HFConfig, layout: ParallelLayout) -> list[int]:
    """Return the layers of this rank, over all its model chunks."""
    return [i for v in range(layout.vpp) for i in layout.layers(hf.num_layers, v)]


def layer_parameters(hf: HFConfig, layout: ParallelLayout, layer: int) -> tuple[int, float]:
    """Return this rank's number of dense and of expert parameters of a layer."""
    dense, experts = 0, 0.0
    for name, shape in layer_shapes(hf, layer).items():
        count = math.prod(shape)
        if ".experts." in name:
            experts += count / layout.expert_ranks
        elif "norm." in name or "_a_proj" in name or name.startswith("mlp.gate."):
            dense += count  # Each tensor-parallel rank holds norms, projections to latents, router.
        else:
            dense += count // layout.tp
    return dense, experts


def adapter_parameters(
    hf: HFConfig, lora: LoraConfig, layout: ParallelLayout
) -> tuple[int, int, int]:
    """Return this rank's number of parameters of dense layers' adapters and of experts' adapters,
    and the number of its weights that have adapters."""
    dense, experts, adapted = 0.0, 0.0, 0.0
    here = tuple(map(layer_prefix, stage_layers(hf, layout)))
    for name, (rows, columns) in peft.adapted(hf, lora).items():
        if not name.startswith(here):
            continue
        if ".experts." in name:
            experts += lora.rank * (rows + columns) / layout.ep
            adapted += rows * columns / layout.ep
            continue
        # The side that tensor parallelism divides: inputs of o_proj and down_proj, else outputs.
        divided, whole = rows, columns
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            divided, whole = whole, divided
        dense += lora.rank * (divided / layout.tp + whole)
        adapted += rows * columns / layout.tp
    return round(dense), round(experts), round(adapted)


def trained(hf: HFConfig, layout: ParallelLayout, head: str, lora: LoraConfig) -> tuple[int, int]:
    """Return this rank's number of dense and of expert parameters that are trained: all, or those
    of the actor's adapters."""
    if lora.rank and head == "lm":
        return adapter_parameters(hf, lora, layout)[:2]
    return parameters(hf, layout, head)


def state_bytes(
    hf: HFConfig,
    model: ModelConfig,
    train: TrainConfig,
    layout: ParallelLayout,
    head: str = "lm",
    lora: LoraConfig = NO_ADAPTERS,
) -> dict[Part, int]:
    """Return the bytes of the training state on this rank after its first step."""
    count, learned = sum(parameters(hf, layout, head)), sum(trained(hf, layout, head, lora))
    size = ITEMSIZE[model.dtype]
    kept = sum(optimizer_bytes(hf, model, train, layout, head, lora))
    return {
        "weights": size * (count + (learned if lora.rank and head == "lm" else 0)),
        "optimizer": 0 if train.offload_optimizer else kept,
        "gradients": max(size, 4) * learned,
    }


def optimizer_bytes(
    hf: HFConfig,
    model: ModelConfig,
    train: TrainConfig,
    layout: ParallelLayout,
    head: str = "lm",
    lora: LoraConfig = NO_ADAPTERS,
) -> tuple[int, int]:
    """Return the bytes of the main parameters that are not the weights, and of both moments, that
    the optimizer of this rank keeps on the device or in host memory."""
    dense, experts = trained(hf, layout, head, lora)
    owners = layout.dp * layout.cp if train.distributed_optimizer else 1
    expert_owners = layout.edp if train.distributed_optimizer else 1
    owned = dense // owners + experts // expert_owners
    size = ITEMSIZE[model.dtype]
    moment = 2 if train.moments_dtype == "bfloat16" else max(size, 4)
    # A bfloat16 model keeps float32 main parameters.
    return (4 if size == 2 else 0) * owned, 2 * moment * owned


def chunk_bytes(train: TrainConfig, kept: tuple[int, int]) -> int:
    """Return the bytes on the device of a step through chunks of the states (mcore/adam.py).
    `kept`: bytes of main parameters and of both moments."""
    main, moments = kept
    rounded = train.moments_dtype == "bfloat16"
    held = 0
    if train.offload_optimizer:
        size = CHUNK_BYTES * bool(main) + CHUNK_BYTES * (1 if rounded else 2)
        held = min(UNDER_WAY * size, main + moments)
    # Moments in bfloat16 have float32 copies of one chunk.
    return held + rounded * min(2 * CHUNK_BYTES, 2 * moments)


def copied_bytes(
    hf: HFConfig, model: ModelConfig, layout: ParallelLayout, head: str, lora: LoraConfig
) -> int:
    """Return the bytes of weights that Megatron's build holds twice beside all gradients. Experts
    with groups of their own have buffers of their own, which it fills last."""
    dense, experts = trained(hf, layout, head, lora)
    size = ITEMSIZE[model.dtype]
    if not layout.has_own_expert_groups:
        return size * (dense + experts)
    return max(size * experts, size * dense - max(size, 4) * experts)


def layer_activations(hf: HFConfig, train: TrainConfig, tokens: int) -> tuple[int, int, int]:
    """Estimate activations of the largest layer for `tokens` per rank: the number of values that it
    keeps for backward, that it holds while it runs backward, and that it holds while it runs
    forward only."""
    found = [_activations(hf, train, tokens, form) for form in hf.forms]
    kept, backward, forward = map(max, zip(*found, strict=True))
    return kept, backward, forward


def _activations(
    hf: HFConfig, train: TrainConfig, tokens: int, has_experts: bool
) -> tuple[int, int, int]:
    tp = train.tp
    whole = 1 / tp if train.sp and tp > 1 else 1.0
    queries, keys = hf.num_heads * hf.head_dim / tp, max(1, hf.num_kv_heads / tp) * hf.head_dim
    # A layer keeps inputs and outputs of 2 norms, q, k, v before and after RoPE, attention output.
    heads = 2 * (queries + 2 * keys) + queries
    if hf.mla:  # Inputs and outputs of the latents' norms; values are as large as keys.
        latents = (hf.mla.q_rank or 0) + hf.mla.kv_rank + hf.mla.rope_dim
        heads = 2 * latents * whole + 5 * queries
    kept = 4 * hf.hidden_size * whole + heads
    if has_experts:
        # Tokens are held as sent, received, sorted by expert, and twice when sorted back. Experts
        # keep input, gate and up, product, weighted product. Ranks that divide experts get the
        # tokens of all of them, unsorted and sorted, and their outputs, which are then summed in
        # float32. Each rank is assumed to get as many tokens as the others.
        sent, etp = hf.experts_per_token * whole, train.etp
        rows = 5 if etp == 1 else 4 + 5 * etp
        forward = kept + rows * sent * hf.hidden_size
        kept += sent * (etp * hf.hidden_size + 4 * hf.moe_intermediate_size)
        kept += 3 * hf.shared_intermediate_size / tp
        backward = kept + rows * sent * hf.hidden_size
    else:
        kept += 3 * hf.intermediate_size / tp
        forward, backward = kept, 2 * kept  # backward also holds the gradients
    if tp > hf.num_kv_heads:  # A group's heads, as gathered and as joined (mcore/shared_heads.py).
        group = (hf.num_heads // hf.num_kv_heads + 2) * hf.head_dim
        forward, backward = forward + 2 * group, backward + 2 * group
    return int(tokens * kept), int(tokens * backward), int(tokens * forward)


def stacked_experts(hf: HFConfig, train: TrainConfig) -> int:
    """Return the number of values in the copy of a layer's expert weights that `grouped_mm` needs
    on a GPU (mcore/experts.py): of gate and up, which are larger than down."""
    if not hf.num_experts or train.transformer_impl != "local":
        return 0
    width = hf.moe_intermediate_size // train.etp
    return hf.num_experts // train.ep * 2 * width * hf.hidden_size


def kept_bytes(
    hf: HFConfig, model: ModelConfig, train: TrainConfig, layout: ParallelLayout, tokens: int
) -> tuple[int, int]:
    """Estimate the bytes that layers keep of all micro-batches in flight on this rank, on the
    device and, with `train.offload_activations`, in host memory."""
    whole = 1 / train.tp if train.sp and train.tp > 1 else 1.0
    kept = layer_activations(hf, train, tokens)[0]
    if train.recompute == "full":
        kept = int(tokens * hf.hidden_size * whole)
    under_way: float = layout.pp - layout.pp_rank
    if train.vpp > 1:
        under_way = layout.pp * (1 + (layout.pp - 1) / (layout.pp * train.vpp))
    layers = len(layout.stage_layers(hf.num_layers)) * under_way
    size = ITEMSIZE[model.dtype] * kept
    if not train.offload_activations:
        return int(size * layers), 0
    # The schedule keeps the inputs of chunks that other stages have sent. Of the others, backward
    # has two on the device, and with stages forward of another micro-batch has two as well.
    received = under_way * (train.vpp - layout.is_first_stage)
    here = received + min(layers - received, ON_DEVICE * min(layout.pp, 2))
    pages = -(-size // PAGE_BYTES) * PAGE_BYTES
    return int(size * here), room_bytes(int(pages * (layers - received)))


def logits_bytes(
    hf: HFConfig, model: ModelConfig, train: TrainConfig, layout: ParallelLayout, tokens: int
) -> int:
    """Estimate the bytes of the logits, and of the head's input, its norm and its gradient. The
    logits' gradient overwrites them and needs no memory, except for a copy of fp32 ones in the
    model's dtype."""
    if not layout.is_last_stage:
        return 0
    rows, size = min(train.head_chunk_tokens or tokens, tokens), ITEMSIZE[model.dtype]
    is_wide = size == 2 and train.head_chunk_tokens and train.fp32_lm_head is not False
    logits = rows * -(-hf.vocab_size // train.tp) * (4 + size if is_wide else size)
    return logits + 3 * tokens * hf.hidden_size * size


# ---- memory of an engine


def engine_weight_bytes(cfg: Config, hf: HFConfig, cuda: bool = True) -> int:
    """Return the bytes of the weights on one rank of an engine."""
    size = ITEMSIZE[rules.engine_dtype(cfg)]
    total = size * num_parameters(hf)
    # SGLang computes float32 logits from bfloat16 weights, without a copy of the weights.
    if cfg.rollout.engine == "torch" and rules.has_fp32_lm_head(cfg, cuda=cuda):
        total += (4 - size) * hf.vocab_size * hf.hidden_size
    return total // cfg.rollout.tp


def longest(cfg: Config, hf: HFConfig) -> int:
    """Return the number of tokens of the longest possible sequence."""
    return min(hf.max_positions, cfg.data.max_prompt_tokens + cfg.rollout.max_tokens)


def token_bytes(cfg: Config, hf: HFConfig) -> int:
    """Return the bytes of one token in one rank's part of the KV cache."""
    vectors, heads, dim = hf.cache_shape
    heads = -(-heads // cfg.rollout.tp)
    return vectors * hf.num_layers * heads * dim * ITEMSIZE[rules.engine_dtype(cfg)]


def cache_bytes(cfg: Config, hf: HFConfig, gpu_bytes: float) -> int:
    """Return the bytes of the KV cache of an engine that starts on an otherwise empty GPU."""
    r, weights = cfg.rollout, engine_weight_bytes(cfg, hf)
    if r.kv_cache_tokens:
        return r.kv_cache_tokens * token_bytes(cfg, hf)
    if r.engine == "sglang":
        return max(0, int(r.gpu_memory_utilization * gpu_bytes) - weights)
    full = r.max_running_requests * longest(cfg, hf) * token_bytes(cfg, hf)
    return max(0, min(full, int(0.8 * (gpu_bytes - weights - 2 * PROCESS_CONTEXT))))


def engine_work_bytes(cfg: Config, hf: HFConfig) -> int:
    """Estimate an engine's temporary bytes: a prefill, and a decode step's logits and sampling."""
    r, size = cfg.rollout, ITEMSIZE[rules.engine_dtype(cfg)]
    inner = hf.experts_per_token * hf.moe_intermediate_size or hf.intermediate_size
    inner += hf.shared_intermediate_size
    per_token = 4 * hf.hidden_size + 3 * inner // r.tp + 2 * hf.num_heads * hf.head_dim // r.tp
    if r.engine == "sglang":  # each chosen expert's output, before they are added
        per_token += hf.experts_per_token * hf.hidden_size
    rows = min(PREFILL_TOKENS[r.engine], r.max_running_requests * longest(cfg, hf))
    logits = r.max_running_requests * hf.vocab_size
    others = logits
    if r.draft != "none" and r.engine == "sglang":  # each request has several rows of logits
        logits *= cfg.draft.verify_tokens
        others = 3 * min(logits, MOST_LOGITS)
    return size * rows * per_token + 4 * (logits + others)


def draft_items(cfg: Config, hf: HFConfig, layout: ParallelLayout, cuda: bool) -> list[Item]:
    """Return the memory of drafts on the device: the streams of all requests, and an estimate of
    the histories, twice while new ones replace them. An engine has them on its first rank."""
    r, d = cfg.rollout, cfg.draft
    if not cuda or not rules.matches_on_device(cfg, cuda):
        return []
    stream = stream_bytes(longest(cfg, hf) + 2 * d.verify_tokens)
    items = [Item(STREAMS, r.max_running_requests * stream)]
    if r.draft in rules.FROM_HISTORY:
        samples = cfg.data.prompts_per_step * r.samples_per_prompt * d.history_epochs
        tokens = min(d.max_history_tokens, samples * r.max_tokens)
        engines = max(1, (cfg.cluster.rollout_ranks or layout.world_size) // r.tp)
        items.append(Item("histories", 2 * HISTORY_BYTES * tokens // engines, True, True))
    return items


def route_items(cfg: Config, hf: HFConfig, dp: int, cache: int) -> list[Item]:
    """Return the host memory that routes take (mcore/ROUTING.md). A rank holds those of its samples
    three times: as received, packed, and in the order of the micro-batches; samples are counted at
    their maximum length and divided by `dp`. SGLang pins routes for every token of its KV cache of
    `cache` bytes."""
    if cfg.algo.routing_replay != "rollout":
        return []
    width = hf.num_layers * hf.experts_per_token
    samples = -(-cfg.data.prompts_per_step * cfg.rollout.samples_per_prompt // dp)
    size = 1 if hf.num_experts <= 128 else 2
    items = [Item("routes of samples", 3 * size * width * samples * longest(cfg, hf))]
    if cfg.rollout.engine == "sglang":
        items.append(Item("routes of the cache", 4 * width * (cache // token_bytes(cfg, hf))))
    return items


def bucket_bytes(cfg: Config, hf: HFConfig) -> int:
    """Return the bytes of the largest bucket of a weight update. A tensor is never split, and the
    embedding is the largest tensor."""
    embedding = hf.vocab_size * hf.hidden_size * ITEMSIZE[cfg.model.dtype]
    return max(cfg.sync.bucket_mb * 2**20, embedding)


def handover_bytes(cfg: Config, hf: HFConfig) -> int:
    """Return the bytes of the buckets under way from a rank to its engine: one that is being packed
    and `IN_FLIGHT` that the engine may still be reading, of at most sync.bucket_mb each."""
    return bucket_bytes(cfg, hf) + IN_FLIGHT * cfg.sync.bucket_mb * 2**20


def update_weights_bytes(cfg: Config, hf: HFConfig) -> int:
    """Estimate the temporary bytes of a weight update, without the weights themselves."""
    bucket = bucket_bytes(cfg, hf)
    # SGLang reads buckets on the GPU; for other engines they are in host memory.
    out = handover_bytes(cfg, hf) if cfg.rollout.engine == "sglang" else bucket
    if rules.route(cfg) == "gather":  # An update by gathering holds shards, full tensors, a bucket.
        return 2 * max(bucket, BUNDLE_BYTES) + out
    return bucket + out


def merged_bytes(cfg: Config, hf: HFConfig, layout: ParallelLayout) -> int:
    """Return the bytes of the sums of weights and adapters that a rank holds in a weight update. By
    gathering, one bundle at a time has them, which `update_weights_bytes` counts."""
    alone = cfg.lora.weight_update == "adapters"  # added one by one
    if not cfg.lora.rank or alone or rules.route(cfg) == "gather":
        return 0
    return ITEMSIZE[cfg.model.dtype] * adapter_parameters(hf, cfg.lora, layout)[2]


def has_reference_weights(cfg: Config) -> bool:
    """Return whether the learner keeps weights of a reference. That of adapters is their base."""
    return cfg.algo.needs_reference and not cfg.lora.rank


# ---- the plan


def make(
    cfg: Config,
    hf: HFConfig,
    layout: ParallelLayout,
    *,
    gpu_bytes: float,
    cuda: bool = True,
    beside: OtherMemory = NOBODY,
    has_engine: bool = True,
) -> MemoryPlan:
    """Make the memory plan of rank `layout.rank`; `too_large` checks whether the plan fits the GPU.

    Args:
        gpu_bytes: memory of one GPU in bytes; 0: unknown.
        cuda: False for a run on the CPU, where an offload moves only the gradients.
        has_engine: False for a rank that only trains.
    """
    train = cfg.train
    tokens = -(-max(train.tokens_per_micro_batch, longest(cfg, hf)) // train.cp)
    heads = {"learner": "lm"}
    if algos.estimator(algos.module(cfg.select.algo), cfg.algo) == "gae":
        heads["critic"] = "value"
    lora = cfg.lora
    states = {n: state_bytes(hf, cfg.model, train, layout, head, lora) for n, head in heads.items()}
    optimizers = {
        n: optimizer_bytes(hf, cfg.model, train, layout, head, lora) for n, head in heads.items()
    }

    # Parts that an offload leaves on the device: on the CPU, all parts but the gradients.
    stay: set[Part] = set() if cuda else {"weights", "optimizer"}
    stay = stay if train.offload else set(PARTS)

    def learners(parts: Collection[Part], names: Collection[str] = tuple(states)) -> list[Item]:
        present = {name: set(parts if name in names else ()) for name in states}
        for held in present.values():
            held |= stay
        return [
            Item(f"{name} {part}", state[part])
            for name, state in states.items()
            for part in ("weights", "gradients", "optimizer")
            if part in present[name] and state[part]
        ]

    grows = cfg.rollout.engine == "torch"  # SGLang allocates the whole KV cache when it wakes.
    cache = Item("KV cache", cache_bytes(cfg, hf, gpu_bytes), comes_later=grows)
    weights = Item("engine weights", engine_weight_bytes(cfg, hf, cuda))
    contexts = TRAINER_CONTEXT + (ENGINE_CONTEXT[cfg.rollout.engine] if has_engine else 0)
    context = [Item("contexts", contexts, True)] if cuda else []
    drafts = draft_items(cfg, hf, layout, cuda) if has_engine else []
    context = [*beside.always, *drafts, *context]

    def engine(*items: Item) -> list[Item]:
        if not has_engine:
            return []
        return [weights, cache] if not train.offload else list(items)

    def later(part: str, num_bytes: int) -> list[Item]:
        return [Item(part, num_bytes, True, True)] if num_bytes else []

    # Layers and head run one after another, so only the larger one counts.
    head = Item("logits", logits_bytes(hf, cfg.model, train, layout, tokens), True, True)
    _, *runs = layer_activations(hf, train, tokens)
    stack = stacked_experts(hf, train) if cuda else 0
    size = attrgetter("num_bytes")
    back, forward = (
        max(
            Item("running layer", ITEMSIZE[cfg.model.dtype] * (n + stack), True, True),
            head,
            key=size,
        )
        for n in runs
    )
    on_device, on_host = kept_bytes(hf, cfg.model, train, layout, tokens)
    kept = later("activations", on_device)
    ahead = [forward]
    if has_reference_weights(cfg) and cuda:
        ahead.append(Item("reference weights", states["learner"]["weights"], comes_later=True))
    last = [*heads.values()][-1]  # the head of the model that is built last
    copy = copied_bytes(hf, cfg.model, layout, last, lora) if train.distributed_optimizer else 0
    mains = {name: main for name, (main, _) in optimizers.items()}
    chunks = max(chunk_bytes(train, kept) for kept in optimizers.values())
    phases = {
        "build": [*_build(states, copy, mains, train.offload_optimizer), *engine()],
        "gen": [
            *learners(()),
            *engine(weights, cache),
            *later("engine's work", engine_work_bytes(cfg, hf) if has_engine else 0),
            *beside.generate,
        ],
        "load_learner": [*learners(PARTS), *engine()],
        "old_log_prob": [*learners(PARTS), *engine(), *ahead],
        "update_actor": [*learners(PARTS), *engine(), *kept, back],
        "optimizer_step": [*learners(PARTS), *engine(), *later("optimizer chunks", chunks)],
        "update_weights": [
            *learners(["weights"], ["learner"]),
            *engine(weights),
            *later("buckets", update_weights_bytes(cfg, hf)),
            *later("merged weights", merged_bytes(cfg, hf, layout)),
        ],
        "save_checkpoint": [*learners(["weights", "optimizer"]), *engine(weights)],
    }
    if beside.teacher:
        phases["teacher"] = [*learners(PARTS), *engine(), *beside.teacher]
    return MemoryPlan(
        rank=layout.rank,
        phases={name: (*items, *context) for name, items in phases.items()},
        learner={
            name: sum(i.num_bytes for i in items if i.part.split()[0] in states)
            for name, items in phases.items()
        },
        host=(
            *(Item("activations", on_host, True) for _ in states if on_host),
            *_host(cfg, hf, states, optimizers, cuda),
            *route_items(cfg, hf, layout.dp, cache.num_bytes if has_engine else 0),
            *beside.host,
        ),
        problems=tuple(_problems(cfg, hf, cache.num_bytes, gpu_bytes)) if has_engine else (),
    )


def _build(
    states: dict[str, dict[Part, int]], copy: int, mains: dict[str, int], offloaded: bool
) -> list[Item]:
    """Return the items at the peak of building learner and critic, one after the other. `mains`:
    bytes of main parameters that are not the weights; `offloaded`: whether they leave the device.

    Megatron copies weights into flat buffers for its distributed optimizer, `copy` bytes beside all
    gradients. The optimizer begins with the main parameters.
    """
    items = []
    for name, state in states.items():
        items += [Item(f"{name} {part}", state[part]) for part in ("weights", "gradients")]
        items.append(Item(f"{name} optimizer", 0 if offloaded else mains[name]))
    last = [*mains.values()][-1]
    if copy > last:  # the last model's main parameters are made after its copy is freed
        items[-1] = Item("copy of weights", copy, comes_later=True)
    elif offloaded:
        items[-1] = Item("main parameters", last, comes_later=True)
    return [item for item in items if item.num_bytes]


def _host(
    cfg: Config,
    hf: HFConfig,
    states: dict[str, dict[Part, int]],
    optimizers: dict[str, tuple[int, int]],
    cuda: bool,
) -> list[Item]:
    items = []
    if cfg.train.offload_optimizer:
        items += [Item(f"{name} optimizer", sum(kept)) for name, kept in optimizers.items()]
    if cfg.train.offload and cuda:
        for name, state in states.items():
            items.append(Item(f"{name} parked", state["weights"] + state["optimizer"]))
    if has_reference_weights(cfg):
        items.append(Item("reference weights", states["learner"]["weights"]))
    saved = [sum(kept) for kept in optimizers.values()]
    if cfg.model.dtype != "bfloat16":  # the weights are saved as the main parameters
        saved = [size + size // 2 for size in saved]
    files = min(CHECKPOINT_BYTES, 2 * max(saved))
    if rules.saves_async(cfg, cuda=cuda):
        files = round(STAGED * sum(saved))
    items.append(Item(CHECKPOINT_FILES, files))
    if cfg.rollout.engine == "sglang" and cuda:  # SGLang's buckets stay on the GPU.
        return items
    return [*items, Item("buckets", handover_bytes(cfg, hf))]


def _problems(cfg: Config, hf: HFConfig, cache: int, gpu_bytes: float) -> list[str]:
    r, out = cfg.rollout, []
    if hf.num_heads % r.tp:
        out.append(
            f"--rollout.tp {r.tp}: must divide the model's {hf.num_heads} attention heads; choose "
            f"a divisor of {hf.num_heads}"
        )
    if gpu_bytes and cache < longest(cfg, hf) * token_bytes(cfg, hf):
        key = f"kv_cache_tokens {r.kv_cache_tokens}" if r.kv_cache_tokens else ""
        key = key or f"gpu_memory_utilization {r.gpu_memory_utilization}"
        out.append(
            f"--rollout.{key}: beside {engine_weight_bytes(cfg, hf) / GB:.1f} GB of weights leaves "
            f"room for {cache // token_bytes(cfg, hf)} tokens of KV cache, but one sequence may "
            f"need {longest(cfg, hf)}; raise it or --rollout.tp, or lower --rollout.max_tokens"
        )
    return out


def make_sampler(
    cfg: Config, hf: HFConfig, rank: int, *, gpu_bytes: float, beside: OtherMemory = NOBODY
) -> MemoryPlan:
    """Make the memory plan of a rank that only samples."""
    cache = cache_bytes(cfg, hf, gpu_bytes)
    work = Item("engine's work", engine_work_bytes(cfg, hf), True, True)
    weights, held = Item("engine weights", engine_weight_bytes(cfg, hf)), Item("KV cache", cache)
    contexts = Item("contexts", ENGINE_CONTEXT[cfg.rollout.engine], True)
    always = (weights, held, *beside.always, contexts)
    buckets = Item("buckets", update_weights_bytes(cfg, hf), True, True)
    phases = {"gen": (*always, work, *beside.generate), "update_weights": (*always, buckets)}
    return MemoryPlan(
        rank=rank,
        phases=phases,
        learner=dict.fromkeys(phases, 0),
        host=(
            Item("buckets", handover_bytes(cfg, hf)),
            *route_items(cfg, hf, max(1, cfg.cluster.rollout_ranks // cfg.rollout.tp), cache),
            *beside.host,
        ),
        problems=tuple(_problems(cfg, hf, cache, gpu_bytes)),
    )


def worst_of(
    cfg: Config,
    hf: HFConfig,
    world_size: int,
    *,
    gpu_bytes: float,
    beside: OtherMemory = NOBODY,
    has_engine: bool = True,
) -> MemoryPlan:
    """Make the memory plan of the train rank that needs most memory. The plans of train ranks
    differ only by pipeline stage."""
    first = layout_of(cfg.train, world_size, 0)
    stage = world_size // first.pp
    ranks = [layout_of(cfg.train, world_size, p * stage) for p in range(first.pp)]
    plans = [
        make(cfg, hf, layout, gpu_bytes=gpu_bytes, beside=beside, has_engine=has_engine)
        for layout in ranks
    ]
    return max(plans, key=lambda plan: plan.total(plan.worst))


def plans(
    cfg: Config,
    hf: HFConfig,
    world_size: int,
    *,
    gpu_bytes: float,
    beside: OtherMemory = NOBODY,
) -> list[MemoryPlan]:
    """Return the memory plan of the rank that needs most, or with separate rollout ranks one plan
    for either kind of rank. `beside`: memory of judges on the same GPUs."""
    if not cfg.cluster.rollout_ranks:
        return [worst_of(cfg, hf, world_size, gpu_bytes=gpu_bytes, beside=beside)]
    cfg = replace(cfg, train=replace(cfg.train, offload=False))
    train_ranks = max(world_size - cfg.cluster.rollout_ranks, 1)
    return [
        worst_of(cfg, hf, train_ranks, gpu_bytes=gpu_bytes, has_engine=False),
        make_sampler(cfg, hf, train_ranks, gpu_bytes=gpu_bytes, beside=beside),
    ]


# ---- text


def table(plan: MemoryPlan, world_size: int, ranks_per_node: int) -> list[str]:
    """Return the plan as a text table: GB of every part in every phase."""
    order = [i.part for name in ("load_learner", *plan.phases) for i in plan.phases.get(name, ())]
    parts = list(dict.fromkeys([p for p in order if p != "contexts"] + order))
    guessed = {i.part for items in plan.phases.values() for i in items if i.is_estimate}

    def row(name: str, cells: Sequence[str]) -> str:
        wide = [max(10, len(phase) + 2) for phase in plan.phases]
        return f"  {name:<21}" + "".join(f"{c:>{w}}" for c, w in zip(cells, wide, strict=True))

    def cell(phase: str, part: str) -> str:
        found = [i.num_bytes for i in plan.phases[phase] if i.part == part]
        return _gb(sum(found)) if found else "-"

    lines = [
        f"memory       GB (10^9 bytes) per GPU on rank {plan.rank} of {world_size}, which needs "
        "most; * is an estimate",
        row("", list(plan.phases)),
    ]
    for part in parts:
        name = part + " *" if part in guessed else part
        lines.append(row(name, [cell(phase, part) for phase in plan.phases]))
    lines.append(row("sum", [_gb(plan.total(phase)) for phase in plan.phases]))
    if not plan.host:
        return [*lines, "  host memory of a node: negligible"]
    held = " + ".join(f"{item.part} {_gb(item.num_bytes)}" for item in plan.host)
    total = sum(item.num_bytes for item in plan.host) * ranks_per_node
    lines.append(f"  host memory of a node: {ranks_per_node} x ({held}) = {_gb(total)} GB")
    return lines


def too_large(plan: MemoryPlan, gpu_bytes: float) -> str:
    """If a phase does not fit, return an error that names the phase, its largest parts and the keys
    to change; "" otherwise."""
    phase = plan.worst
    if not gpu_bytes or plan.total(phase) <= gpu_bytes:
        return ""
    largest = sorted(plan.phases[phase], key=lambda item: -item.num_bytes)[:3]
    named = ", ".join(f"{item.part} {_gb(item.num_bytes)}" for item in largest)
    hints = dict.fromkeys(_remedy(item.part) for item in largest)
    shared = any(item.part == "engine weights" for item in plan.phases["gen"])
    if shared and plan.learner["gen"]:  # The learner stays on the GPU while the engine samples.
        hints = {"set train.offload": None} | hints
    return (
        f"--cluster.gpu_memory_gb {gpu_bytes / GB:g}: phase {phase} needs {_gb(plan.total(phase))} "
        f"GB on rank {plan.rank}, mostly {named}; {', '.join(h for h in hints if h)}"
    )


def _remedy(part: str) -> str:
    return {
        "activations": "lower train.tokens_per_micro_batch or set train.recompute full, then "
        "train.offload_activations",
        "logits": "set train.head_chunk_tokens",
        "engine weights": "raise rollout.tp",
        "KV cache": "lower rollout.kv_cache_tokens or rollout.gpu_memory_utilization",
        "reference weights": "raise train.tp or train.pp",
        "buckets": "lower sync.bucket_mb or choose another sync.route",
        "engine's work": "lower rollout.max_running_requests",
        "judge": "lower reward.resident_ratio",
        "judge's work": "lower reward.batch_tokens",
        "learner optimizer": "set train.offload_optimizer",
        "critic optimizer": "set train.offload_optimizer",
        "contexts": "",
    }.get(part, "raise train.tp, train.pp or train.ep, or use more ranks")


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / GB:.1f}" if num_bytes >= 0.05 * GB else f"{num_bytes / GB:.2g}"


# ---- the check


_THERE = ("contexts", "judge")
"""Names of the parts that are on the device in every phase."""
_TRAINING = ("load_learner", "old_log_prob", "update_actor", "optimizer_step")
"""Phases between loading and offloading the learner."""


class Residency:
    """Check of one rank's measured memory against its plan."""

    def __init__(self, plan: MemoryPlan, device: torch.device) -> None:
        self.plan, self._device = plan, device
        self._found: dict[str, float] = {}
        self._engine_sleeps = False
        self._in_use: int | None = None
        """Measured bytes in use while the device holds neither learner nor engine."""

    def follow(self, plan: MemoryPlan) -> None:
        """Use another plan for all later checks, with the measured contexts."""
        self.plan = plan if self._in_use is None else plan.with_measured(self._in_use)

    def before(
        self,
        phase: Literal["build", "load_learner", "update_weights"],
        learners: Sequence[Learner] = (),
    ) -> None:
        """Check that the device has room for the learner (build, load_learner) or for the engine's
        weights (update_weights). On the CPU nothing is checked. If the engine sleeps, first measure
        the contexts; the plan then has the measured bytes instead of the estimate.

        Raises:
            RuntimeError: too little memory is free.
        """
        if self._device.type != "cuda":
            return
        if phase == "update_weights" and not self._engine_sleeps:  # Engines start awake.
            return
        self._measure_contexts(learners)
        self._engine_sleeps = phase != "update_weights"
        filled = {"build": ("build", *_TRAINING), "load_learner": _TRAINING}.get(phase, (phase,))
        most = max(filled, key=self.plan.total)
        coming = sum(i.num_bytes for i in self.plan.phases[most] if i.part not in _THERE)
        self._must_fit(most, coming - _resident(learners))

    def check(self, phase: str, learners: Sequence[Learner]) -> None:
        """Measure the memory at the start of `phase`, after the parts that it needs are loaded.

        Raises:
            RuntimeError: the learner holds more than planned, or parts that come later do not fit.
        """
        own = _resident(learners)
        planned = self.plan.learner[phase]
        self._found[f"memory/learner_gb/{phase}"] = own / GB
        if own > 1.02 * planned + SLACK_BYTES:
            raise RuntimeError(
                f"memory: phase {phase} on rank {self.plan.rank}: the learner holds {own / GB:.3f} "
                f"GB but the plan has {planned / GB:.3f} GB; a part was not offloaded, or is "
                "missing in the plan (trainer/memory.py)"
            )
        if self._device.type == "cuda":
            self._found[f"memory/device_gb/{phase}"] = self._taken(phase) / GB
            self._found[f"memory/planned_gb/{phase}"] = self.plan.total(phase) / GB
            later = sum(i.num_bytes for i in self.plan.phases[phase] if i.comes_later)
            self._must_fit(phase, later)

    def take(self) -> dict[str, float]:
        """Return the measurements since the last call, by metric name."""
        found, self._found = self._found, {}
        return found

    def _measure_contexts(self, learners: Sequence[Learner]) -> None:
        """Measure the memory in use outside of the learners' parts, while the engine sleeps. This
        includes the workspaces of cuBLAS, which torch allocates as it does tensors."""
        free, total = torch.cuda.mem_get_info(self._device)
        idle = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        self._in_use = total - free - idle - _resident(learners)
        fits = not too_large(self.plan, total)
        self.plan = self.plan.with_measured(self._in_use)
        items = next(iter(self.plan.phases.values()))  # the contexts of all phases are the same
        contexts = sum(i.num_bytes for i in items if i.part == "contexts")
        self._found["memory/contexts_gb"] = contexts / GB
        if fits and (said := too_large(self.plan, total)):
            log.warning("%s (contexts are measured)", said)

    def _taken(self, phase: str) -> int:
        """Return the bytes of the device that are not free for `phase`. Memory that torch keeps
        reserved but unused in this process is free only in phases that the learner fills."""
        free, total = torch.cuda.mem_get_info(self._device)
        if phase in ("update_weights", "gen"):  # The engine's process fills these.
            return total - free
        idle = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return total - free - idle

    def _must_fit(self, phase: str, coming: int) -> None:
        taken, total = self._taken(phase), torch.cuda.mem_get_info(self._device)[1]
        if taken + coming <= total:
            return
        planned = self.plan.total(phase)
        raise RuntimeError(
            f"memory: phase {phase} on rank {self.plan.rank} needs {planned / GB:.1f} GB by plan; "
            f"{taken / GB:.1f} GB of the device's {total / GB:.1f} GB are in use and "
            f"{coming / GB:.1f} GB more are needed; stop other processes on the GPU (nvidia-smi), "
            "or lower the largest parts that --dry-run lists"
        )


def _resident(learners: Sequence[Learner]) -> int:
    return sum(sum(learner.resident_bytes().values()) for learner in learners)

"""Convert Megatron's parameters to Hugging Face tensors and back, streamed.

Megatron fuses query, key and value (by query group), and also gate and up. It splits parameters
over tensor-, pipeline- and expert-parallel ranks; experts not over tensor- but over expert
tensor-parallel (ETP) ranks. A `ParamPiece` maps one parameter of the unsplit model to the Hugging
Face tensors that it contains.

`load_hf`: each rank reads only its slice of each tensor. `shards`: each rank splits its own fused
parameters into views, without communication. `export_hf` works in bundles of parameters: the ranks
that own a bundle gather it over TP or ETP and split fused parameters, then broadcast over EP and
PP. Every rank yields every tensor, in the order of `hf.names.expected`.

LoRA adapters have pieces of their own, with PEFT's names. The weights that are exported contain
them: `shards` then yields sums, not views.

The vocabulary may be padded to a multiple of the tensor-parallel size. Padding rows are zero and
are never exported.

Own code instead of Megatron-Bridge or mbridge, to need no extra dependency and to run on CPUs.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from rlcore.config.schema import LoraConfig
from rlcore.hf import lora as peft
from rlcore.hf.config import HFConfig, LatentSizes
from rlcore.hf.names import EMBED, EXPERT_BIAS, HEAD, NORM, Shape, expected, layer_prefix
from rlcore.hf.weights import Index, WeightReader
from rlcore.mcore import compat
from rlcore.mcore.layout import ParallelLayout
from rlcore.mcore.lora import SUFFIX, Adapter, fuse
from rlcore.records import Shard
from rlcore.utils.log import announce
from rlcore.utils.seed import derive

BUNDLE_BYTES = 256 << 20
"""Maximum bytes of a bundle (weights exported at once); a larger parameter is its own bundle."""

BIAS_BUFFER = "mlp.router.expert_bias"
"""Megatron's name of a router's bias, without the layer."""

Kind = Literal["copy", "vocab", "columns", "rows", "qkv", "gate_up"]


@dataclass(frozen=True, slots=True)
class ParamPiece:
    """One Megatron parameter and the Hugging Face tensors that it contains."""

    name: str
    """Megatron's name of the parameter in an unsplit model with separate norm modules."""
    tensors: tuple[str, ...]
    kind: Kind
    layer: int
    """Index of the parameter's layer; -1: before the first layer; `num_layers`: after the last."""
    expert: int = -1

    @property
    def is_buffer(self) -> bool:
        """Whether it is no parameter but a float32 buffer: a router's bias."""
        return self.name.endswith(BIAS_BUFFER)


class TensorSource(Protocol):
    """Source of Hugging Face tensors by name: a folder of weights, or random initial weights."""

    def get(self, name: str, index: Index = ()) -> Tensor:
        """Return a tensor, or the part that `index` selects, on the CPU."""


def load_hf(
    models: Sequence[Module],
    hf: HFConfig,
    folder: str | Path,
    layout: ParallelLayout,
    *,
    head: bool = True,
) -> None:
    """Load this rank's model chunks from a Hugging Face folder. Not collective. Without `head`, the
    output layer stays unchanged and the folder needs no lm_head.

    If a file or tensor is missing, or a tensor's shape differs from config.json, raises the same
    ValueError on every rank.
    """
    reader = WeightReader(folder)
    reader.check({n: shape for n, shape in expected(hf).items() if head or n != HEAD})
    if hf.num_mtp_layers:
        announce("multi-token prediction", f"{hf.num_mtp_layers} layers are neither read nor saved")
    _fill_weights(models, hf, layout, reader, head)


def init_random(
    models: Sequence[Module], hf: HFConfig, layout: ParallelLayout, seed: int, *, head: bool = True
) -> None:
    """Initialise random weights that depend only on seed and tensor name, so that all layouts get
    the same model. Matrices are normal with standard deviation `initializer_range`, norms are 1,
    biases 0. Without `head`, the output layer stays unchanged."""
    _fill_weights(models, hf, layout, RandomWeights(hf, seed), head)


def fill_adapters(
    models: Sequence[Module],
    hf: HFConfig,
    layout: ParallelLayout,
    lora: LoraConfig,
    source: TensorSource,
) -> None:
    """Set the values of this rank's adapters from `source`, which has PEFT's names. Not
    collective."""
    params = _parameters(models, hf, layout, adapters=True)
    _fill(params, adapter_pieces(hf, lora), hf, layout, source)


def export_adapters(
    models: Sequence[Module], hf: HFConfig, layout: ParallelLayout, lora: LoraConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield every A and B in full on every rank, in the order of `hf.lora.shapes`. Otherwise as
    `export_hf`."""
    params = _parameters(models, hf, layout, adapters=True)
    local = {name: param.detach() for name, param in params.items()}
    yield from _stream(adapter_pieces(hf, lora), local, peft.shapes(hf, lora), hf, layout)


def export_hf(
    models: Sequence[Module], hf: HFConfig, layout: ParallelLayout
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in full on every rank, with the model's device and dtype, in the order of
    `hf.names.expected`. Collective: all ranks must exhaust the iterator together.

    A tensor may be a view of the model's parameter or of a temporary bundle of `BUNDLE_BYTES`, so
    callers must copy a tensor to keep it.
    """
    yield from _stream(pieces(hf), _MergedWeights(models, hf, layout), expected(hf), hf, layout)


def shards(
    models: Sequence[Module], hf: HFConfig, layout: ParallelLayout
) -> Iterator[tuple[Shard, Tensor]]:
    """Yield this rank's shards of the Hugging Face tensors, in the model's dtype. Not collective.

    A shard is a view of a parameter, or of the sum of a weight and its adapters; its elements keep
    their order in the Hugging Face tensor. Shards of query, key and value have an extra dimension
    of query groups. A tied embedding is yielded only once, without the last stage's copy."""
    yield from _shards(pieces(hf), _MergedWeights(models, hf, layout), expected(hf), hf, layout)


def adapter_shards(
    models: Sequence[Module], hf: HFConfig, layout: ParallelLayout, lora: LoraConfig
) -> Iterator[tuple[Shard, Tensor]]:
    """Yield this rank's shards of every A and B, as views. Otherwise as `shards`."""
    params = _parameters(models, hf, layout, adapters=True)
    local = {name: param.detach() for name, param in params.items()}
    yield from _shards(adapter_pieces(hf, lora), local, peft.shapes(hf, lora), hf, layout)


def _shards(
    todo: Sequence[ParamPiece],
    params: Mapping[str, Tensor],
    shapes: Mapping[str, Shape],
    hf: HFConfig,
    layout: ParallelLayout,
) -> Iterator[tuple[Shard, Tensor]]:
    """Yield this rank's shards of the pieces `todo`. `params` are this rank's parts of parameters,
    by the name in `ParamPiece`; `shapes` are those of the tensors."""
    for piece in todo:
        if piece.name not in params:
            continue
        local = params[piece.name]
        parts = _own_parts(piece, local, hf, layout)
        for name, (dim, start, size, tensor) in zip(piece.tensors, parts, strict=True):
            if size:  # size 0: only padding of the vocabulary, or no row of q, k or v
                yield (
                    Shard(
                        name=name,
                        dtype=str(local.dtype).removeprefix("torch."),
                        shape=shapes[name],
                        dim=dim,
                        start=start,
                        stop=start + size,
                    ),
                    tensor,
                )


# ---- parameters and their tensors


def pieces(hf: HFConfig) -> list[ParamPiece]:
    """Return one `ParamPiece` per parameter of the model, in the order of `hf.names.expected`."""
    found = [ParamPiece("embedding.word_embeddings.weight", (EMBED,), "vocab", -1)]
    for layer in range(hf.num_layers):
        found += _layer_pieces(hf, layer)
    found.append(ParamPiece("decoder.final_layernorm.weight", (NORM,), "copy", hf.num_layers))
    if not hf.tie_word_embeddings:
        found.append(ParamPiece("output_layer.weight", (HEAD,), "vocab", hf.num_layers))
    return found


def _layer_pieces(hf: HFConfig, layer: int) -> list[ParamPiece]:
    ours, theirs = f"layers.{layer}.", layer_prefix(layer)

    def piece(name: str, tensors: Sequence[str], kind: Kind, expert: int = -1) -> ParamPiece:
        return ParamPiece(ours + name, tuple(theirs + t for t in tensors), kind, layer, expert)

    def qkv(what: str) -> ParamPiece:
        names = [f"self_attn.{x}_proj.{what}" for x in "qkv"]
        return piece(f"self_attention.linear_qkv.{what}", names, "qkv")

    found = [piece("input_layernorm.weight", ["input_layernorm.weight"], "copy")]
    if hf.mla:
        for name, tensor, kind in _latent(hf.mla):
            own = f"self_attention.{name}.weight"
            found.append(piece(own, [f"self_attn.{tensor}.weight"], kind))
    else:
        found.append(qkv("weight"))
        if hf.qkv_bias:
            found.append(qkv("bias"))
        if hf.qk_norm:
            for x in "qk":
                name = f"self_attention.{x}_layernorm.weight"
                found.append(piece(name, [f"self_attn.{x}_norm.weight"], "copy"))
    found.append(piece("self_attention.linear_proj.weight", ["self_attn.o_proj.weight"], "columns"))
    found.append(piece("pre_mlp_layernorm.weight", ["post_attention_layernorm.weight"], "copy"))
    if not hf.has_experts(layer):
        gate_up = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
        found.append(piece("mlp.linear_fc1.weight", gate_up, "gate_up"))
        found.append(piece("mlp.linear_fc2.weight", ["mlp.down_proj.weight"], "columns"))
        return found
    found.append(piece("mlp.router.weight", ["mlp.gate.weight"], "copy"))
    if hf.has_expert_bias:
        found.append(piece(BIAS_BUFFER, [EXPERT_BIAS], "copy"))
    for e in range(hf.num_experts):
        name = f"mlp.experts.{e}."
        gate_up = [f"{name}gate_proj.weight", f"{name}up_proj.weight"]
        down = [f"{name}down_proj.weight"]
        found.append(piece(f"{name}linear_fc1.weight", gate_up, "gate_up", e))
        found.append(piece(f"{name}linear_fc2.weight", down, "columns", e))
    if hf.shared_intermediate_size:
        name = "mlp.shared_experts."
        gate_up = [f"{name}gate_proj.weight", f"{name}up_proj.weight"]
        found.append(piece(f"{name}linear_fc1.weight", gate_up, "gate_up"))
        found.append(piece(f"{name}linear_fc2.weight", [f"{name}down_proj.weight"], "columns"))
    return found


def _latent(mla: LatentSizes) -> list[tuple[str, str, Kind]]:
    """Return the modules of latent attention but the output, here and on disk."""
    query: list[tuple[str, str, Kind]] = [("linear_q_proj", "q_proj", "rows")]
    if mla.q_rank:
        query = [
            ("linear_q_down_proj", "q_a_proj", "copy"),
            ("q_layernorm", "q_a_layernorm", "copy"),
            ("linear_q_up_proj", "q_b_proj", "rows"),
        ]
    return [
        *query,
        ("linear_kv_down_proj", "kv_a_proj_with_mqa", "copy"),
        ("kv_layernorm", "kv_a_layernorm", "copy"),
        ("linear_kv_up_proj", "kv_b_proj", "rows"),
    ]


def adapter_pieces(hf: HFConfig, lora: LoraConfig) -> list[ParamPiece]:
    """Return one `ParamPiece` per A and B, in the order of `hf.lora.shapes`."""
    adapted, found = peft.adapted(hf, lora), []
    for piece in pieces(hf):
        adapter = piece.name.removesuffix(".weight") + SUFFIX
        is_column_parallel = piece.kind in ("qkv", "gate_up")
        kinds: tuple[Kind, Kind] = ("copy", "rows" if is_column_parallel else "copy")
        if piece.kind == "columns":
            kinds = "columns", "copy"
        for weight in (name for name in piece.tensors if name in adapted):
            projection = weight.split(".")[-2]
            for letter, name, kind in zip("AB", peft.matrices(weight), kinds, strict=True):
                own = f"{adapter}.{letter}.{projection}"
                found.append(ParamPiece(own, (name,), kind, piece.layer, piece.expert))
    return found


def _parameters(
    models: Sequence[Module], hf: HFConfig, layout: ParallelLayout, *, adapters: bool = False
) -> dict[str, Tensor]:
    """Return this rank's parameters by the name in `ParamPiece`: those of adapters, or all others
    and the biases of routers."""
    found: dict[str, Tensor] = {}
    for model, whole_name in _chunks(models, hf, layout):
        for name, param in model.named_parameters():
            if (f"{SUFFIX}." in name) == adapters:
                found[whole_name(name)] = param
        for name, buffer in model.named_buffers():
            if name.endswith(BIAS_BUFFER) and not adapters:
                found[whole_name(name)] = buffer
    return found


class _MergedWeights(Mapping[str, Tensor]):
    """This rank's weights by the name in `ParamPiece`, in the model's dtype. A weight with adapters
    is added to them at each access."""

    def __init__(self, models: Sequence[Module], hf: HFConfig, layout: ParallelLayout) -> None:
        self._params = _parameters(models, hf, layout)
        self._dtype = next(iter(self._params.values())).dtype
        self._adapters = {
            whole_name(name.removesuffix(SUFFIX) + ".weight"): module
            for model, whole_name in _chunks(models, hf, layout)
            for name, module in model.named_modules()
            if isinstance(module, Adapter)
        }

    def __getitem__(self, name: str) -> Tensor:
        weight = self._params[name].detach()
        if name.endswith(BIAS_BUFFER):
            return weight
        weight = weight.to(self._dtype)
        adapter = self._adapters.get(name)
        return weight if adapter is None else adapter.merged(weight)

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)


def _chunks(
    models: Sequence[Module], hf: HFConfig, layout: ParallelLayout
) -> Iterator[tuple[Any, Callable[[str], str]]]:
    """Yield each model chunk without wrappers, and a function that converts names in it to names in
    the unsplit model."""
    first_expert = layout.experts(hf.num_experts).start if hf.num_experts else 0
    for whole in models:
        model: Any = whole
        while hasattr(model, "module"):  # remove the wrappers for DDP and mixed precision
            model = model.module
        numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
        yield model, partial(_whole_name, numbers=numbers, first_expert=first_expert)


def _whole_name(name: str, numbers: Sequence[int], first_expert: int) -> str:
    """Convert a parameter's name on this rank to its name in the unsplit model. Transformer Engine
    keeps a norm's weight in the next projection, and an expert's number at the name's end."""
    name = re.sub(r"^decoder\.layers\.(\d+)", lambda m: f"layers.{numbers[int(m[1])]}", name)
    name = name.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
    name = name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
    name = re.sub(r"experts\.(linear_fc\d)\.weight(\d+)$", r"local_experts.\2.\1.weight", name)
    name = name.replace("experts.local_experts", "local_experts")
    return re.sub(r"local_experts\.(\d+)", lambda m: f"experts.{first_expert + int(m[1])}", name)


# ---- loading


def _fill_weights(
    models: Sequence[Module], hf: HFConfig, layout: ParallelLayout, source: TensorSource, head: bool
) -> None:
    params, todo = _parameters(models, hf, layout), pieces(hf)
    output = "output_layer.weight"
    if not head:
        params.pop(output, None)
    if hf.tie_word_embeddings and output in params:  # the last stage has a copy of the embedding
        todo.append(ParamPiece(output, (EMBED,), "vocab", hf.num_layers))
    _fill(params, todo, hf, layout, source)


def _fill(
    params: Mapping[str, Tensor],
    todo: Sequence[ParamPiece],
    hf: HFConfig,
    layout: ParallelLayout,
    source: TensorSource,
) -> None:
    """Set all of this rank's `params`, which are among the pieces of `todo`."""
    unknown = sorted(params.keys() - {piece.name for piece in todo})
    assert not unknown, f"the bridge does not map the parameters {unknown[:3]}"
    with torch.no_grad():
        for piece in todo:
            if piece.name in params:
                param = params[piece.name]
                local = _read(piece, source, hf, layout, param.shape)
                assert local.shape == param.shape, (piece.name, local.shape, param.shape)
                param.copy_(local)


def _read(
    piece: ParamPiece, source: TensorSource, hf: HFConfig, layout: ParallelLayout, shape: Shape
) -> Tensor:
    """Read this rank's part of a parameter; the part has the shape `shape`."""
    names, rank = piece.tensors, _rank(piece, layout)
    match piece.kind:
        case "copy":
            return source.get(names[0])
        case "columns":
            return source.get(names[0], (slice(None), _nth(rank, shape[1])))
        case "rows":
            return source.get(names[0], (_nth(rank, shape[0]),))
        case "vocab":
            start, stop = (min(i * shape[0], hf.vocab_size) for i in (rank, rank + 1))
            part = source.get(names[0], (slice(start, stop),))
            missing = shape[0] - (stop - start)
            return torch.nn.functional.pad(part, (0, 0, 0, missing)) if missing else part
        case "gate_up":
            return torch.cat([source.get(name, (_nth(rank, shape[0] // 2),)) for name in names])
        case "qkv":
            return _read_qkv(names, source, hf, layout)


def _rank(piece: ParamPiece, layout: ParallelLayout) -> int:
    """Return the index of this rank among the ranks that divide the parameter."""
    return layout.tp_rank if piece.expert < 0 else layout.etp_rank


def _nth(rank: int, size: int) -> slice:
    return slice(rank * size, (rank + 1) * size)


def _read_qkv(
    names: Sequence[str], source: TensorSource, hf: HFConfig, layout: ParallelLayout
) -> Tensor:
    groups, held = _held_rows(hf, layout)
    parts = [
        source.get(name, (slice(start, start + groups * rows),))
        for name, (start, rows) in zip(names, held, strict=True)
    ]
    return fuse(parts, groups)


def _held_rows(hf: HFConfig, layout: ParallelLayout) -> tuple[int, list[tuple[int, int]]]:
    """Return the number of query groups of which this rank holds rows and, for each of q, k and v,
    the index of the first held row and the number of held rows per group. With more tensor-parallel
    ranks than groups, the rows of one group are cut into equal parts, as Megatron cuts them."""
    groups = max(1, hf.num_kv_heads // layout.tp)
    ranks = max(1, layout.tp // hf.num_kv_heads)  # that share one group
    group = layout.tp_rank // ranks * groups
    size = sum(_group_rows(hf)) // ranks
    start = layout.tp_rank % ranks * size  # of this rank's part of each group
    held, before = [], 0
    for rows in _group_rows(hf):
        first, last = (min(max(i - before, 0), rows) for i in (start, start + size))
        held.append((group * rows + first, last - first))
        before += rows
    return groups, held


class RandomWeights:
    """Random initial weights by tensor name; each tensor has a generator seeded with its name."""

    def __init__(self, hf: HFConfig, seed: int) -> None:
        self._std, self._seed, self._shapes = hf.initializer_range, seed, expected(hf)

    def get(self, name: str, index: Index = ()) -> Tensor:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape)[index]
        if name.endswith("bias"):
            return torch.zeros(shape)[index]
        generator = torch.Generator().manual_seed(derive(self._seed, name))
        return torch.empty(shape).normal_(0.0, self._std, generator=generator)[index]


# ---- splitting this rank's parameters


def _own_parts(
    piece: ParamPiece, local: Tensor, hf: HFConfig, layout: ParallelLayout
) -> list[tuple[int, int, int, Tensor]]:
    """Return (split dimension, first index, number of indices, view) for each Hugging Face tensor
    in this rank's part `local` of a parameter."""
    rank = _rank(piece, layout)
    match piece.kind:
        case "copy":
            return [(0, 0, len(local), local)]
        case "columns":
            width = local.shape[1]
            return [(1, rank * width, width, local)]
        case "rows":
            return [(0, rank * len(local), len(local), local)]
        case "vocab":
            start, stop = (min(i * len(local), hf.vocab_size) for i in (rank, rank + 1))
            return [(0, start, stop - start, local[: stop - start])]
        case "gate_up":
            return [(0, rank * len(half), len(half), half) for half in local.chunk(2)]
        case "qkv":
            groups, held = _held_rows(hf, layout)
            grouped = local.unflatten(0, (groups, -1)).split([rows for _, rows in held], 1)
            return [
                (0, start, groups * rows, part)
                for (start, rows), part in zip(held, grouped, strict=True)
            ]


# ---- exporting


def _stream(
    todo: Sequence[ParamPiece],
    local: Mapping[str, Tensor],
    shapes: Mapping[str, Shape],
    hf: HFConfig,
    layout: ParallelLayout,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the pieces `todo` in full on every rank. Collective.

    Args:
        local: this rank's parts of parameters, by the name in `ParamPiece`.
        shapes: shapes of the tensors.
    """
    like = local[next(iter(local))]
    for bundle in _bundles(todo, shapes, hf, layout, like.element_size()):
        names = [name for piece in bundle for name in piece.tensors]
        with torch.no_grad():
            full = _export(bundle, local, hf, layout, [shapes[name] for name in names], like)
        yield from zip(names, full, strict=True)
        del full  # free this bundle's memory before the next bundle is gathered


def _bundles(
    todo: Sequence[ParamPiece],
    shapes: Mapping[str, Shape],
    hf: HFConfig,
    layout: ParallelLayout,
    element_size: int,
) -> Iterator[list[ParamPiece]]:
    """Yield bundles for export: consecutive parameters that the same ranks own, at most
    `BUNDLE_BYTES` unless a single parameter is larger."""
    bundle: list[ParamPiece] = []
    size = 0
    for piece in todo:
        more = sum(math.prod(shapes[name]) for name in piece.tensors) * element_size
        same = bundle and (
            _owner(bundle[0], hf, layout) == _owner(piece, hf, layout)
            and bundle[0].is_buffer == piece.is_buffer  # of one dtype
        )
        if bundle and not (same and size + more <= BUNDLE_BYTES):
            yield bundle
            bundle, size = [], 0
        bundle.append(piece)
        size += more
    yield bundle


def _owner(piece: ParamPiece, hf: HFConfig, layout: ParallelLayout) -> tuple[int, int]:
    """Return the pipeline stage and expert-parallel rank (-1: all ranks) that own a parameter."""
    if piece.layer < 0:
        return 0, -1
    if piece.layer == hf.num_layers:
        return layout.pp - 1, -1
    stage = layout.stage_of(piece.layer, hf.num_layers)
    if piece.expert < 0:
        return stage, -1
    return stage, piece.expert // (hf.num_experts // layout.ep)


def _export(
    bundle: Sequence[ParamPiece],
    params: Mapping[str, Tensor],
    hf: HFConfig,
    layout: ParallelLayout,
    shapes: Sequence[Shape],
    like: Tensor,
) -> list[Tensor]:
    """Return a bundle's tensors in full on every rank, with dtype and device of `like`; biases of
    routers are float32."""
    stage, expert_rank = _owner(bundle[0], hf, layout)
    here = layout.pp_rank == stage
    owner = here and expert_rank in (-1, layout.ep_rank)
    over_ep = expert_rank >= 0 and layout.ep > 1
    full = _gather(bundle, params, hf, layout) if owner else []
    if layout.pp == 1 and not over_ep:
        return full
    sizes = [math.prod(shape) for shape in shapes]
    dtype = torch.float32 if bundle[0].is_buffer else like.dtype
    flat = _flat(full) if owner else like.new_empty(sum(sizes), dtype=dtype)
    if over_ep and here:
        dist.broadcast(flat, group=_group("expert_model"), group_src=expert_rank)
    if layout.pp > 1:
        dist.broadcast(flat, group=_group("pipeline_model"), group_src=stage)
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def _gather(
    bundle: Sequence[ParamPiece],
    params: Mapping[str, Tensor],
    hf: HFConfig,
    layout: ParallelLayout,
) -> list[Tensor]:
    """Return a bundle's Hugging Face tensors. Gather the bundle over TP, experts over ETP."""
    local = [params[piece.name] for piece in bundle]
    over, size = "tensor_model", layout.tp
    if bundle[0].expert >= 0:
        over, size = "expert_tensor", layout.etp
    if size == 1:
        parts = [[tensor] for tensor in local]
    else:
        flat = _flat(local)
        every = flat.new_empty(size * flat.numel())
        compat.all_gather(every, flat, group=_group(over))
        del flat  # freed, so that at most two bundles are in memory
        rows = [row.split([tensor.numel() for tensor in local]) for row in every.chunk(size)]
        parts = [[row[i].view(tensor.shape) for row in rows] for i, tensor in enumerate(local)]
    return [
        tensor
        for piece, part in zip(bundle, parts, strict=True)
        for tensor in split(piece, part, hf)
    ]


def _group(kind: str) -> dist.ProcessGroup:
    """Return this rank's parallel group: that of `tensor_model`, `pipeline_model`, `expert_model`
    or `expert_tensor`."""
    # Import late: the shim must be installed first, and a single rank needs no groups.
    from megatron.core import parallel_state

    return getattr(parallel_state, f"get_{kind}_parallel_group")()


def split(piece: ParamPiece, parts: Sequence[Tensor], hf: HFConfig) -> list[Tensor]:
    """Split a parameter into its Hugging Face tensors; `parts` has one part per TP or ETP rank."""
    match piece.kind:
        case "copy":
            return [parts[0]]
        case "columns":
            return [_cat(parts, 1)]
        case "rows":
            return [_cat(parts)]
        case "vocab":
            return [_cat(parts)[: hf.vocab_size]]
        case "gate_up":
            gates, ups = zip(*[part.chunk(2) for part in parts], strict=True)
            return [_cat(gates), _cat(ups)]
        case "qkv":
            grouped = _cat(parts).unflatten(0, (hf.num_kv_heads, -1)).split(_group_rows(hf), 1)
            return [tensor.flatten(0, 1) for tensor in grouped]


def _group_rows(hf: HFConfig) -> list[int]:
    """Return the numbers of query, key and value rows in one query group."""
    width = hf.head_dim
    return [hf.num_heads // hf.num_kv_heads * width, width, width]


def _cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return _cat([tensor.reshape(-1) for tensor in tensors])

"""Compute the architectures in `hf.architectures` in plain torch, with a KV cache.

Weights are stored in fused buffers (query-key-value, gate-up, experts), transposed to [in, out],
which makes matrix products of small batches faster. `views` maps every Hugging Face name to its
part of a buffer, so that loading copies each tensor once, to its final place.

With `batch_invariant`, every pass runs the learner's operations (`rlcore/ops`) in float32 on the
CPU, on tokens without padding. The result of a token then has the learner's bits, whatever the
batch, the cache and the division into passes.

The head dimension of queries and keys is stored interleaved: RoPE rotates dimensions i and i + R/2
of the first R together (R = D unless rotation is partial), so they are adjacent and form one
complex number. Their D/R - 1 neighbours of the other dimensions are multiplied by 1. Dot products
of queries and keys do not depend on this order, except in rounding: with `batch_invariant` the
order is that on disk, as in the learner.

All tensors of a layer may share one buffer (`make_layer` with `Flat`), and the caller may supply
the layers (`CausalLM.allocate(layers)`). The judge uses both options to load its layers one by one
from a larger memory; the results equal those of a fully loaded model.

With multi-head latent attention, the cache has one entry for all heads: the latent, and the part of
the keys that RoPE rotates. Decoding projects queries to the latent space, in which they attend to
the entries; whole sequences expand the entries to keys and values of all heads, which needs fewer
FLOPs (arXiv:2405.04434).

With `quantize`, projection weights are rounded to a coarse grid on loading, always from unrounded
values. With `fp32_head`, final norm and lm_head are stored and computed in float32; an embedding
tied to the head is rounded to the model's dtype on look-up.

Dimensions: B rows, S new tokens per row, T new tokens of all rows without padding, H query heads, K
key-value heads, D head dimension.

Own code instead of transformers' models, so that batch rows start and end independently. Sampling a
step takes .12 s with the engine, 1.13 s with TRL on transformers (`tools/results/README.md`).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcore.hf.cache import Cache
from rlcore.hf.config import LATENT_EPS, HFConfig, LatentSizes
from rlcore.hf.names import EMBED, EXPERT_BIAS, HEAD, NORM, expected, layer_prefix
from rlcore.hf.quantize import (
    Quantize,
    format_of,
    is_quantized,
    quantize_tokens,
    quantize_weight,
)
from rlcore.hf.rope import inverse_frequencies
from rlcore.ops import attention, native, rows

Span = tuple[int, int, int]
"""Range of batch rows: first, last (exclusive), and number of cache columns to attend to."""


@dataclass(slots=True)
class ForwardInputs:
    """Inputs of one forward pass: new tokens, their places in the KV cache, attended columns."""

    tokens: Tensor  # [B, S] int64
    positions: Tensor  # [B, S] int64
    slot: int
    """Cache slot of the first row; the following rows use the following slots."""
    spans: list[Span]
    """Row ranges with their number of attended columns; one range unless lengths differ a lot."""
    causal: bool
    """Whether the new tokens are whole sequences, so that attention is causal without a mask."""
    index: Tensor | None = None
    """Result of `cache_index` for the new tokens, computed at the first use."""
    place: Tensor | None = None
    """Indices [T] of the real tokens among the B * S positions, in order. The other positions are
    padding, and only attention is computed for them. None: no padding."""
    own_slots: Tensor | None = None
    """Result of `slots`, computed at the first use."""

    def units(self, cache: Cache) -> "_Units":
        """Return the attention's units: the new tokens of each row and the cached ones that the
        last of them attends to."""
        positions = self.positions.flatten()
        positions = positions if self.place is None else positions[self.place]
        slots, queries = self.slots().unique_consecutive(return_counts=True)
        keys = positions[queries.cumsum(0) - 1] + 1
        ends, heads = keys.cumsum(0), cache.kv_heads * cache.capacity
        firsts = slots * heads - (ends - keys)  # of each row in the slab, less its keys before
        column = torch.arange(int(ends[-1])) + firsts.repeat_interleave(keys)
        index = (column[:, None] + torch.arange(0, heads, cache.capacity)).flatten()
        return _Units(_boundaries(queries), _boundaries(keys), index, index + cache.slots * heads)

    def find(self, cache: Cache) -> Tensor:
        """Return the indices of the new tokens' cache entries (`cache_index`), without padding."""
        if self.index is None:
            index = cache_index(self.positions, self.slot, cache)
            self.index = index if self.place is None else index[:, self.place]
        return self.index

    def forget_cache(self) -> None:
        """Discard the cache indices, which become invalid when the cache gets new slabs."""
        self.index = None

    def advance(self, tokens: Tensor) -> None:
        """Prepare the next decode step: the same rows, one position further, with new tokens."""
        self.tokens = tokens
        self.positions += 1
        self.spans = [(a, b, length + 1) for a, b, length in self.spans]
        if self.index is not None:
            self.index += 1

    def slots(self) -> Tensor:
        """Return the cache slot of each new token, [T] int64, without padding."""
        if self.own_slots is None:
            rows, new = self.positions.shape
            slots = torch.arange(self.slot, self.slot + rows).repeat_interleave(new)
            self.own_slots = slots if self.place is None else slots[self.place]
        return self.own_slots


@dataclass(frozen=True, slots=True)
class _Units:
    """Rows of a pass for the attention of packed sequences (`ops.attention`)."""

    queries: Tensor  # [rows + 1] int32, cumulative number of new tokens
    keys: Tensor  # [rows + 1] int32, cumulative number of attended columns
    key_index: Tensor  # [all columns * K] indices of the keys in a cache slab viewed as [-1, D]
    value_index: Tensor  # the same of the values


def _boundaries(counts: Tensor) -> Tensor:
    return F.pad(counts.cumsum(0), (1, 0)).int()


@dataclass(slots=True)
class LatentWeights:
    """Weights of multi-head latent attention besides `Layer.qkv`, which computes the latents."""

    q_norm: Tensor | None  # [q_rank]; None: `Layer.qkv` computes the queries of all heads
    q_up: Tensor | None  # [q_rank, H D]
    kv_norm: Tensor  # [kv_rank]
    kv_up: Tensor  # [H, nope_dim + value_dim, kv_rank]


@dataclass(slots=True)
class Layer:
    """Weights of one transformer layer."""

    norm1: Tensor
    qkv: Tensor  # [hidden, (H + 2K) D], or [hidden, (q_rank or H D) + kv_rank + rope_dim]
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [H + K, D]
    out: Tensor  # [H D, hidden]
    norm2: Tensor
    gate_up: Tensor  # [hidden, 2 inner], or [E, 2 inner, hidden]
    down: Tensor  # [inner, hidden], or [E, hidden, inner]
    router: Tensor | None = None  # [hidden, E]
    expert_bias: Tensor | None = None  # [E]
    shared: tuple[Tensor, Tensor] | None = None  # gate and up, and down, of the shared experts
    latent: LatentWeights | None = None


@dataclass(slots=True)
class _Weights:
    embed: Tensor  # [vocab, hidden]
    head: Tensor  # [vocab, hidden]
    norm: Tensor
    layers: Iterable[Layer]
    are_contiguous: bool = True
    """Whether the matrices of the layers are [in, out] in memory."""


class _New(Protocol):
    """Function that returns a new tensor of a given shape."""

    def __call__(self, *shape: int) -> Tensor: ...


_Matrix = Callable[[int, int], Tensor]
"""Function that returns a new matrix with the given numbers of rows and columns."""


class Flat:
    """Factory that places tensors one after the other in one buffer, each aligned to 256 bytes."""

    def __init__(self, buffer: Tensor) -> None:
        """Start at the beginning of `buffer`, which has one dimension and the tensors' dtype."""
        self._buffer, self._end = buffer, 0

    def __call__(self, *shape: int) -> Tensor:
        count, start = math.prod(shape), self._end
        self._end = start + padded(count, self._buffer.dtype)
        return self._buffer[start : start + count].view(shape)


def padded(count: int, dtype: torch.dtype) -> int:
    """Return the number of elements that `count` elements occupy in a `Flat` buffer, aligned."""
    step = 256 // dtype.itemsize
    return -(-count // step) * step


def layer_numel(hf: HFConfig, dtype: torch.dtype) -> int:
    """Return the number of elements in a `Flat` buffer that holds any one layer."""
    totals: list[int] = []

    def count(*shape: int) -> Tensor:
        totals[-1] += padded(math.prod(shape), dtype)
        return torch.empty(shape, device="meta")

    for layer in hf.forms.values():
        totals.append(0)
        make_layer(hf, layer, count)
    return max(totals)


def make_layer(
    hf: HFConfig, number: int, new: _New, *, rows_first: bool = False, interleaved: bool = True
) -> tuple[Layer, dict[str, Tensor]]:
    """Make layer `number` with tensors from `new`. Return the layer and its views: parts of its
    tensors by Hugging Face name, without the layer's prefix. With `rows_first`, matrices are [out,
    in] in memory, as on disk: loading is a plain copy, but products of small batches are slower.
    `interleaved`: whether RoPE's pairs of query and key dimensions are adjacent."""
    views: dict[str, Tensor] = {}

    def matrix(rows: int, columns: int) -> Tensor:
        return new(columns, rows).T if rows_first else new(rows, columns)

    hidden = hf.hidden_size
    bias = qk_norm = latent = None
    if hf.mla is not None:
        qkv, latent = _make_latent(hf, hf.mla, new, matrix, views)
    else:
        qkv, bias, qk_norm = _make_heads(hf, new, matrix, views, interleaved)
    norm1, out, norm2 = new(hidden), matrix(hf.num_heads * hf.value_dim, hidden), new(hidden)
    views["input_layernorm.weight"] = norm1
    views["post_attention_layernorm.weight"] = norm2
    views["self_attn.o_proj.weight"] = out.T
    router, expert_bias, shared = None, None, None
    if hf.has_experts(number):
        inner = hf.moe_intermediate_size
        router = matrix(hidden, hf.num_experts)
        gate_up = new(hf.num_experts, 2 * inner, hidden)
        down = new(hf.num_experts, hidden, inner)
        views["mlp.gate.weight"] = router.T
        for expert in range(hf.num_experts):
            name = f"mlp.experts.{expert}."
            views[f"{name}gate_proj.weight"] = gate_up[expert, :inner]
            views[f"{name}up_proj.weight"] = gate_up[expert, inner:]
            views[f"{name}down_proj.weight"] = down[expert]
        if hf.has_expert_bias:
            views[EXPERT_BIAS] = expert_bias = float32(new, hf.num_experts)
        if inner := hf.shared_intermediate_size:
            shared = matrix(hidden, 2 * inner), matrix(inner, hidden)
            views["mlp.shared_experts.gate_proj.weight"] = shared[0].T[:inner]
            views["mlp.shared_experts.up_proj.weight"] = shared[0].T[inner:]
            views["mlp.shared_experts.down_proj.weight"] = shared[1].T
    else:
        inner = hf.intermediate_size
        gate_up, down = matrix(hidden, 2 * inner), matrix(inner, hidden)
        views["mlp.gate_proj.weight"] = gate_up.T[:inner]
        views["mlp.up_proj.weight"] = gate_up.T[inner:]
        views["mlp.down_proj.weight"] = down.T
    mlp = gate_up, down, router, expert_bias, shared
    return Layer(norm1, qkv, bias, qk_norm, out, norm2, *mlp, latent), views


def _make_heads(
    hf: HFConfig, new: _New, matrix: _Matrix, views: dict[str, Tensor], interleaved: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Make the projections of query, key and value, their bias and the norms of heads."""
    queries, keys = hf.num_heads * hf.head_dim, hf.num_kv_heads * hf.head_dim
    hidden, pairs = hf.hidden_size, hf.rope.dims(hf.head_dim) // 2 if interleaved else 1
    width = hf.head_dim // pairs  # a pair and its neighbours that do not rotate
    qkv = matrix(hidden, queries + 2 * keys)
    bias = new(queries + 2 * keys) if hf.qkv_bias else None
    start = 0
    for name, size in (("q", queries), ("k", keys), ("v", keys)):
        part = slice(start, start + size)
        start += size
        weight = qkv.T[part]
        if name != "v":
            weight = weight.view(-1, pairs, width, hidden).transpose(1, 2)
        views[f"self_attn.{name}_proj.weight"] = weight
        if bias is not None:
            view = bias[part]
            if name != "v":
                view = view.view(-1, pairs, width).transpose(1, 2)
            views[f"self_attn.{name}_proj.bias"] = view
    qk_norm = None
    if hf.qk_norm:
        # Norm weights are repeated per head, so that one multiplication scales queries and keys.
        qk_norm = new(hf.num_heads + hf.num_kv_heads, hf.head_dim)
        view = qk_norm.view(-1, pairs, width).transpose(1, 2)
        views["self_attn.q_norm.weight"] = view[: hf.num_heads]
        views["self_attn.k_norm.weight"] = view[hf.num_heads :]
    return qkv, bias, qk_norm


def _make_latent(
    hf: HFConfig, mla: LatentSizes, new: _New, matrix: _Matrix, views: dict[str, Tensor]
) -> tuple[Tensor, LatentWeights]:
    """Make the projections and norms of multi-head latent attention."""
    queries, entry = hf.num_heads * hf.head_dim, mla.kv_rank + mla.rope_dim
    down = matrix(hf.hidden_size, (mla.q_rank or queries) + entry)
    q_norm = q_up = None
    if mla.q_rank:
        q_norm, q_up = new(mla.q_rank), matrix(mla.q_rank, queries)
        views["self_attn.q_a_layernorm.weight"] = q_norm
        views["self_attn.q_b_proj.weight"] = q_up.T
    views[f"self_attn.{'q_a_proj' if mla.q_rank else 'q_proj'}.weight"] = down.T[:-entry]
    views["self_attn.kv_a_proj_with_mqa.weight"] = down.T[-entry:]
    kv_norm = new(mla.kv_rank)
    kv_up = new(hf.num_heads, mla.nope_dim + mla.value_dim, mla.kv_rank)
    views["self_attn.kv_a_layernorm.weight"] = kv_norm
    views["self_attn.kv_b_proj.weight"] = kv_up.flatten(0, 1)
    return down, LatentWeights(q_norm, q_up, kv_norm, kv_up)


def float32(new: _New, count: int) -> Tensor:
    """Make a float32 tensor [count] in memory from `new`, whose dtype has at least 16 bits."""
    return new(2 * count).view(torch.float32)[:count]


class CausalLM:
    """Weights and forward pass of a model. Loading is complete once every view is loaded."""

    def __init__(
        self,
        hf: HFConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_tokens: int,
        quantize: Quantize = "none",
        fp32_head: bool = False,
        records_routes: bool = False,
        batch_invariant: bool = False,
    ):
        self.hf = hf
        self._batch_invariant = batch_invariant
        self._records_routes = records_routes
        self._routes = torch.zeros(0, 0, 0, dtype=torch.int64)  # [T, layers, K] of the latest pass
        self.dtype = dtype
        self.device = device
        self._format = format_of(quantize)
        self._head_dtype = torch.promote_types(dtype, torch.float32) if fp32_head else dtype
        self.shapes = expected(hf)
        self.views: dict[str, Tensor] = {}
        self._weights: _Weights | None = None
        # RoPE angles are float32 for every dtype, as in transformers and Megatron.
        inverse = inverse_frequencies(hf.rope_dim, hf.rope)
        angles = torch.outer(torch.arange(max_tokens).float(), inverse)
        cos_sin = torch.stack((angles.cos(), angles.sin()), -1) * hf.rope.attention_factor
        self._cos, self._sin = cos_sin.unsqueeze(1).unbind(-1)  # [tokens, 1, D/2]
        turned = torch.view_as_complex(cos_sin).unsqueeze(-1)
        same = turned.new_ones(*angles.shape, hf.rope_dim // (2 * len(inverse)) - 1)
        wide = torch.complex128 if dtype == torch.float64 else torch.complex64
        self._rope = torch.cat((turned, same), -1).flatten(1).to(device, wide)  # [tokens, D/2]

    @property
    def allocated(self) -> bool:
        return self._weights is not None

    def allocate(self, layers: Iterable[Layer] | None = None) -> None:
        """Allocate the weights with undefined contents. If `layers` is given, allocate only
        embedding, final norm and head. Every forward pass then iterates over `layers` once, and
        takes the next layer after it has queued the work of the previous layer."""
        if self._weights is not None:
            return
        hf, new, wide = self.hf, self._empty, self._head_dtype
        views = {NORM: new(hf.hidden_size, dtype=wide)}
        if hf.tie_word_embeddings:
            views[EMBED] = new(hf.vocab_size, hf.hidden_size, dtype=wide)
        else:
            views[EMBED] = new(hf.vocab_size, hf.hidden_size)
            views[HEAD] = new(hf.vocab_size, hf.hidden_size, dtype=wide)
        embed, head, norm = views[EMBED], views.get(HEAD, views[EMBED]), views[NORM]
        is_own = layers is None
        if layers is None:
            layers = []
            for number in range(hf.num_layers):
                layer, found = make_layer(hf, number, new, interleaved=not self._batch_invariant)
                layers.append(layer)
                views |= {layer_prefix(number) + name: view for name, view in found.items()}
            assert views.keys() == self.shapes.keys()
        self.views, self._weights = views, _Weights(embed, head, norm, layers, is_own)

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def load(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor to its view, converting to the view's dtype, and quantising if configured.
        Raise ValueError for an unknown name or a wrong shape."""
        if name not in self.shapes:
            raise ValueError(f"tensor {name}: the model has no tensor of this name")
        if tuple(tensor.shape) != self.shapes[name]:
            want = list(self.shapes[name])
            raise ValueError(f"tensor {name}: shape {list(tensor.shape)}, the model has {want}")
        if self._format is not None and is_quantized(name):
            tensor = quantize_weight(tensor.to(self.device), self._format)
        place(self.views[name], tensor)

    def free(self) -> None:
        """Free the memory of all weights."""
        self.views, self._weights = {}, None

    @property
    def head(self) -> Tensor:
        """Weight of the output layer, [vocab, hidden]; in a tied model, the embedding."""
        return self._here.head

    @property
    def _here(self) -> _Weights:
        assert self._weights is not None, "the weights are freed"
        return self._weights

    def forward(self, step: ForwardInputs, cache: Cache) -> Tensor:
        """Run the model on new tokens and cache their keys and values. Return the final hidden
        states in the head's dtype: [B, S, hidden], or [T, hidden] if the step has padding."""
        hidden = self._run(step, cache, fill=False)
        assert hidden is not None
        if self._batch_invariant:
            return _norm(hidden, self._here.norm, self.hf.rms_norm_eps)
        return rms_norm(hidden.to(self._head_dtype), self._here.norm, self.hf.rms_norm_eps)

    def prefill(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Run whole sequences [B, S] as `forward` does: [B, S, hidden]. Rows are padded on the
        right, where causal attention hides the padding from real tokens."""
        rows, longest = tokens.shape
        positions = torch.arange(longest, device=self.device).expand(rows, -1)
        step = ForwardInputs(tokens, positions, 0, [(0, rows, longest)], causal=True)
        return self.forward(step, cache)

    def batch_cache(self, rows: int, length: int, *, shared: bool) -> Cache:
        """Allocate the KV cache of one batch. `shared`: all layers use the same space in turn."""
        hf = self.hf
        cache = Cache(
            hf.num_layers,
            hf.cache_shape,
            dtype=self.dtype,
            device=self.device,
            max_slots=rows,
            max_columns=length,
            budget=rows * (length + 16),
            shared=shared,
        )
        cache.reserve(rows, length, 0)
        return cache

    def fill(self, step: ForwardInputs, cache: Cache) -> None:
        """Write keys and values of new tokens to the cache, without computing outputs."""
        self._run(step, cache, fill=True)

    def take_routes(self) -> Tensor:
        """Return the experts of all tokens in the latest pass: [T, layers * K] int64. -1 stands for
        the last layer after `fill`, which skips it. Needs `records_routes`."""
        assert self._records_routes, "built without records_routes"
        return self._routes.flatten(1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocab] of hidden states: float32, or float64 if the head is."""
        logits = F.linear(hidden, self._here.head)
        return logits if logits.dtype == torch.float64 else logits.float()

    def _run(self, step: ForwardInputs, cache: Cache, fill: bool) -> Tensor | None:
        hf, weights = self.hf, self._here
        rows, new = step.tokens.shape
        heads, kv, dim = hf.num_heads, hf.num_kv_heads, hf.head_dim
        tokens, positions, place = step.tokens.flatten(), step.positions.flatten(), step.place
        if place is not None:
            tokens, positions = tokens[place], positions[place]
        x = weights.embed[tokens].to(self.dtype)
        if self._batch_invariant:
            return self._run_as_learner(x, positions, step, cache, fill)
        if not fill and not step.causal and (ops := self._native()):
            return self._run_native(ops, x, positions, step, cache)
        if self._records_routes:
            shape = len(x), hf.num_layers, hf.experts_per_token
            self._routes = positions.new_full(shape, -1)
        rope = self._rope[positions].unsqueeze(1)  # [T, 1, D/2]
        key_index, value_index = step.find(cache)
        masks = self._masks(step)
        for number, layer in enumerate(weights.layers):
            h = self._input(rms_norm(x, layer.norm1, hf.rms_norm_eps))
            if layer.qkv_bias is None:
                qkv = h @ layer.qkv
            else:
                qkv = torch.addmm(layer.qkv_bias, h, layer.qkv)
            slab = cache.layers[number]
            flat = slab.view(-1, cache.head_dim)
            if layer.latent is not None:
                query, entry = self._latent_heads(qkv, layer.latent, rope)
                flat[key_index] = entry
            else:
                qkv = qkv.view(len(x), heads + 2 * kv, dim)
                qk, value = qkv[:, : heads + kv], qkv[:, heads + kv :]
                if layer.qk_norm is not None:
                    qk = rms_norm(qk, layer.qk_norm, hf.rms_norm_eps)
                qk = self._rotate(qk, rope)
                query = qk[:, :heads]
                flat[key_index] = qk[:, heads:]
                flat[value_index] = value
            if fill and number + 1 == hf.num_layers:
                return None
            if place is not None:
                query = query.new_zeros(rows * new, heads, dim).index_copy_(0, place, query)
            query = query.view(rows, new, heads, dim)
            cached = slab[:, step.slot : step.slot + rows]
            if layer.latent is not None:
                mixed = self._attend_latent(query, cached[0], layer.latent.kv_up, step, masks)
            else:
                mixed = self._attend(query, cached[0], cached[1], step, masks)
            if place is not None:
                mixed = mixed[place]
            x = torch.addmm(x, self._input(mixed), layer.out)
            h = rms_norm(x, layer.norm2, hf.rms_norm_eps)
            if layer.router is not None:
                x = x + self._experts(h, layer, number)
                if layer.shared is not None:
                    x = self._mlp(x, h, *layer.shared)
                continue
            x = self._mlp(x, h, layer.gate_up, layer.down)
        return x if place is not None else x.view(rows, new, hf.hidden_size)

    @property
    def decodes_natively(self) -> bool:
        """Whether decode steps run in native code, in which each row reads its own columns only."""
        return self._batch_invariant or self._native() is not None

    def _native(self) -> Any | None:
        """Return the native ops if they can run a decode step; they are for float32 on the CPU."""
        rounds = self._format is not None and self._format.activations
        if rounds or self.hf.num_experts or self.hf.mla:
            return None
        if self.dtype != torch.float32 or self.device.type != "cpu":
            return None
        return native.torch_ops("decode_layer") if self._here.are_contiguous else None

    def _run_native(
        self, ops: Any, x: Tensor, positions: Tensor, step: ForwardInputs, cache: Cache
    ) -> Tensor:
        """Run all layers on the embeddings x [T, hidden], with one op for each layer."""
        positions, slots = positions.contiguous(), step.slots()
        rope = torch.view_as_real(self._rope)
        for layer, slab in zip(self._here.layers, cache.layers, strict=True):
            ops.decode_layer(
                x, slots, positions, rope, slab, layer.norm1, layer.qkv, layer.qkv_bias,
                layer.qk_norm, layer.out, layer.norm2, layer.gate_up, layer.down,
                self.hf.rms_norm_eps,
            )  # fmt: skip
        return x if step.place is not None else x.view(*step.tokens.shape, -1)

    def _run_as_learner(
        self, x: Tensor, positions: Tensor, step: ForwardInputs, cache: Cache, fill: bool
    ) -> Tensor | None:
        """Run all layers on the embeddings x [T, hidden] with the learner's operations, in its
        order."""
        hf, eps = self.hf, self.hf.rms_norm_eps
        heads, kv, dim = hf.num_heads, hf.num_kv_heads, hf.head_dim
        cos, sin = self._cos[positions], self._sin[positions]
        key_index, value_index = step.find(cache)
        units = step.units(cache)
        for number, (layer, slab) in enumerate(zip(self._here.layers, cache.layers, strict=True)):
            qkv = _norm(x, layer.norm1, eps) @ layer.qkv
            if layer.qkv_bias is not None:
                qkv = qkv + layer.qkv_bias
            query, key, value = qkv.view(len(x), -1, dim).split((heads, kv, kv), 1)
            if layer.qk_norm is not None:
                query = _norm(query, layer.qk_norm[0], eps)
                key = _norm(key, layer.qk_norm[heads], eps)
            flat = slab.view(-1, dim)
            flat[key_index] = rows.turn(key, cos, sin, back=False)
            flat[value_index] = value
            if fill and number + 1 == hf.num_layers:
                return None
            query = rows.turn(query, cos, sin, back=False)
            # `index_select` is several times as fast as `flat[index]` here.
            keys = flat.index_select(0, units.key_index).view(-1, kv, dim)
            values = flat.index_select(0, units.value_index).view(-1, kv, dim)
            most = 0  # the native kernel needs no lengths of the longest rows
            mixed = attention.attend(
                query, keys, values, units.queries, units.keys, most, most, hf.softmax_scale
            )
            x = x + mixed.flatten(1) @ layer.out
            gate_up = _norm(x, layer.norm2, eps) @ layer.gate_up
            x = x + rows.swiglu(gate_up) @ layer.down
        return x if step.place is not None else x.view(*step.tokens.shape, -1)

    def _input(self, h: Tensor) -> Tensor:
        """Return the input of a projection: `h`, quantised if the format includes activations."""
        if self._format is None or not self._format.activations:
            return h
        return quantize_tokens(h, self._format)

    def _rotate(self, qk: Tensor, rope: Tensor) -> Tensor:
        """Apply RoPE to interleaved pairs, in at least float32."""
        if qk.dtype in (torch.float32, torch.float64):
            pairs = torch.view_as_complex(qk.unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * rope).flatten(-2)
        pairs = torch.view_as_complex(qk.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * rope).flatten(-2).to(qk.dtype)

    def _masks(self, step: ForwardInputs) -> list[Tensor]:
        """Return a mask per row range: [rows, 1, H/K * S, columns], 0 if attended, else -inf."""
        if step.causal:
            return []
        repeats = self.hf.num_heads // self.hf.cache_shape[1]
        longest = max(length for _, _, length in step.spans)
        column = torch.arange(longest, device=self.device)
        hidden = column > step.positions.unsqueeze(-1)  # [B, S, columns]
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        mask.masked_fill_(hidden, -math.inf)
        if step.tokens.shape[1] == 1:
            mask = mask.unsqueeze(1).expand(-1, -1, repeats, -1)
        else:
            mask = mask.repeat(1, repeats, 1).unsqueeze(1)
        return [mask[a:b, :, :, :length] for a, b, length in step.spans]

    def _latent_heads(
        self, down: Tensor, latent: LatentWeights, rope: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the queries [T, H, D] and cache entries [T, 1, kv_rank + rope_dim] of new tokens,
        whose latents are `down`."""
        mla = self.hf.mla
        assert mla is not None
        query, kv, shared = down.tensor_split((-mla.kv_rank - mla.rope_dim, -mla.rope_dim), -1)
        if latent.q_norm is not None and latent.q_up is not None:
            query = self._input(rms_norm(query, latent.q_norm, LATENT_EPS)) @ latent.q_up
        query = query.view(len(down), self.hf.num_heads, self.hf.head_dim)
        nope, turned = query.tensor_split((mla.nope_dim,), -1)
        turned = torch.cat((turned, shared.unsqueeze(1)), 1)  # [T, H + 1, rope_dim]
        if not mla.is_interleaved:
            turned = turned.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        turned = self._rotate(turned, rope)
        kv = self._input(rms_norm(kv, latent.kv_norm, LATENT_EPS)).unsqueeze(1)
        return torch.cat((nope, turned[:, :-1]), -1), torch.cat((kv, turned[:, -1:]), -1)

    def _attend_latent(
        self,
        query: Tensor,
        entries: Tensor,
        kv_up: Tensor,
        step: ForwardInputs,
        masks: list[Tensor],
    ) -> Tensor:
        """Return the attention over the cached entries [B, 1, columns, kv_rank + rope_dim], [B * S,
        H value_dim]."""
        mla = self.hf.mla
        assert mla is not None
        rows, new, heads, dim = query.shape
        rank, nope = mla.kv_rank, mla.nope_dim
        if step.causal:
            latents, shared = entries[:, :, :new].tensor_split((rank,), -1)
            expanded = latents @ kv_up.transpose(1, 2)  # [B, H, S, nope_dim + value_dim]
            keys = torch.cat((expanded[..., :nope], shared.expand(-1, heads, -1, -1)), -1)
            # Fused kernels need values as large as keys.
            values = F.pad(expanded[..., nope:], (0, dim - mla.value_dim))
            mixed = self._attend(query, keys, values, step, masks)
            return mixed.view(-1, heads, dim)[..., : mla.value_dim].flatten(1)
        # q (K_up k) = (q K_up) k, and the sum of V_up v is V_up times the sum of v.
        absorbed = torch.einsum("bshn,hnr->bshr", query[..., :nope], kv_up[:, :nope])
        query = torch.cat((absorbed, query[..., nope:]), -1)
        mixed = self._attend(query, entries, entries[..., :rank], step, masks)
        mixed = mixed.view(-1, heads, rank).transpose(0, 1) @ kv_up[:, nope:].transpose(1, 2)
        return mixed.transpose(0, 1).flatten(1)

    def _attend(
        self, query: Tensor, keys: Tensor, values: Tensor, step: ForwardInputs, masks: list[Tensor]
    ) -> Tensor:
        """Return the attention over the cached columns of keys and values [B, K, columns, D], [B *
        S, H D]. Queries that share a key-value head are concatenated along the query axis, so that
        keys are never repeated."""
        rows, new, heads, dim = query.shape
        kv, scale = keys.shape[1], self.hf.softmax_scale
        if step.causal:
            mixed = F.scaled_dot_product_attention(
                query.transpose(1, 2),
                keys[:, :, :new],
                values[:, :, :new],
                is_causal=True,
                scale=scale,
                enable_gqa=heads != kv,
            )
            return mixed.transpose(1, 2).reshape(rows * new, -1)
        # [B, S, K, r, D] -> [B, K, r, S, D]
        query = query.view(rows, new, kv, heads // kv, dim).permute(0, 2, 3, 1, 4)
        query = query.reshape(rows, kv, heads // kv * new, dim)
        parts = [
            F.scaled_dot_product_attention(
                query[a:b],
                keys[a:b, :, :length],
                values[a:b, :, :length],
                attn_mask=mask,
                scale=scale,
            )
            for (a, b, length), mask in zip(step.spans, masks, strict=True)
        ]
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        mixed = (
            mixed.view(rows, kv, heads // kv, new, -1)
            if new == 1
            else mixed.unflatten(2, (heads // kv, new))
        )
        return mixed.permute(0, 3, 1, 2, 4).reshape(rows * new, -1)

    def _route(self, h: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        """Return scores and indices of the chosen experts, [N, k] each."""
        hf = self.hf
        assert layer.router is not None
        wide = torch.promote_types(h.dtype, torch.float32)  # as the learner
        logits = h.to(wide) @ layer.router.to(wide)
        if layer.expert_bias is None:
            return logits.softmax(-1).topk(hf.experts_per_token, -1)
        scores = logits.sigmoid()
        choice = scores + layer.expert_bias
        if hf.expert_groups > 1:
            choice = best_groups(choice, hf.expert_groups, hf.groups_per_token)
        chosen = choice.topk(hf.experts_per_token, -1).indices
        return scores.gather(-1, chosen), chosen

    def _mlp(self, x: Tensor, h: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Return x [T, hidden] plus the MLP of h."""
        gate, up = (self._input(h) @ gate_up).chunk(2, -1)
        return torch.addmm(x, self._input(F.silu(gate).mul_(up)), down)

    def _experts(self, h: Tensor, layer: Layer, number: int) -> Tensor:
        """Sort the tokens by expert and compute the mixture with one matrix product per expert."""
        hf = self.hf
        weight, chosen = self._route(h, layer)
        if self._records_routes:
            self._routes[:, number] = chosen
        if hf.norm_topk_prob:
            weight = weight / weight.sum(-1, keepdim=True)
        weight = weight * hf.routing_scale
        order = chosen.flatten().argsort(stable=True)
        token = order // hf.experts_per_token
        ends = torch.bincount(chosen.flatten(), minlength=hf.num_experts).cumsum(0)
        gate, up = grouped(self._input(h)[token], layer.gate_up, ends).chunk(2, -1)
        out = grouped(self._input(F.silu(gate) * up), layer.down, ends)
        out = out * weight.flatten()[order, None].to(out.dtype)
        # Restore the token order before the sum: adding by index has no fixed order on a GPU.
        mixed = torch.empty_like(out).index_copy_(0, order, out)
        return mixed.view(len(h), hf.experts_per_token, -1).sum(1)


def best_groups(scores: Tensor, groups: int, wanted: int) -> Tensor:
    """Return scores [N, E] with -inf for experts outside of each token's `wanted` best groups, by
    the sum of their two best experts (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)."""
    grouped = scores.unflatten(-1, (groups, -1))
    best = grouped.topk(2, -1).values.sum(-1).topk(wanted, -1).indices
    out = torch.full_like(grouped, -math.inf)
    index = best.unsqueeze(-1).expand(-1, -1, grouped.shape[-1])
    return out.scatter_(1, index, grouped.gather(1, index)).flatten(1)


def place(view: Tensor, tensor: Tensor) -> None:
    """Copy a tensor, laid out as on disk, to its view from `make_layer`."""
    if view.dim() == 3 and tensor.dim() == 1 and tensor.numel() == view.shape[1] * view.shape[2]:
        view.copy_(tensor.view(view.shape[1:]).expand(view.shape))  # a norm, repeated per head
    else:
        view.copy_(tensor.reshape(view.shape))


def cache_index(positions: Tensor, slot: int, cache: Cache) -> Tensor:
    """Return the indices [2, B * S, K] of new keys and values in a cache slab viewed as [-1, D]."""
    heads, device = cache.kv_heads, positions.device
    row = torch.arange(slot, slot + len(positions), device=device) * heads
    head = row[:, None] + torch.arange(heads, device=device)  # [B, K]
    keys = (head * cache.capacity)[:, None] + positions.unsqueeze(-1)  # [B, S, K]
    keys = keys.flatten(0, 1)
    return torch.stack((keys, keys + cache.slots * heads * cache.capacity))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, with the mean over the last axis of x."""
    size = x.shape[-1]
    if x.is_cuda or x.dtype not in (torch.float32, torch.float64):
        return F.rms_norm(x, (size,), None, eps) * weight
    # On the CPU, torch has no fused kernel, and F.rms_norm takes twice as many operations.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (x * norm.mul_(norm).mul_(1 / size).add_(eps).rsqrt_()).mul_(weight)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm as the learner computes it on the CPU."""
    return rows.rms_norm(x, weight, eps)[0].view(x.shape)


def grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of each expert by its matrix. x [N, in] is sorted by expert; weights: [E,
    out, in]; ends [E]: index after the last row of each expert."""
    if x.dtype == torch.bfloat16:  # torch's grouped GPU kernels support only bfloat16
        return F.grouped_mm(x, weights.transpose(1, 2), offs=ends.to(torch.int32))
    out = x.new_empty(x.shape[0], weights.shape[1])
    start = 0
    for index, end in enumerate(ends.tolist()):
        if end > start:
            out[start:end] = x[start:end] @ weights[index].T
        start = end
    return out

"""LoRA on Megatron's column- and row-parallel linear layers.

An `Adapter` adds s B (A x) to the output of a linear layer, whose weight is frozen. It has one A
and one B for each projection that Megatron fuses (q, k and v; gate and up), as on disk. The A are
concatenated to one product, and the B are one block matrix whose rows are ordered as the weight's.

    column-parallel   A is replicated; B is divided as the weight's rows
    row-parallel      A is divided as the weight's columns; B is replicated

Between A and B there are only rank values per token, so all communication is there. Backward of it
gives the replicated matrices the same gradient on every tensor-parallel rank. With sequence
parallelism each rank computes the replicated product of its own tokens; an attribute of the
parameter then makes Megatron sum its gradient over the ranks.

Own code instead of Megatron-Bridge's, which needs Transformer Engine and fuses q, k and v into one
adapter that PEFT cannot express.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import Module, Parameter, ParameterDict

from rlcore.config.schema import LoraConfig
from rlcore.hf import lora as peft
from rlcore.hf.config import HFConfig

SUFFIX = "_lora"
"""An adapter is beside its linear layer and has its name with this suffix."""
FUSED: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Projections of each of Megatron's linear layers."""
ROW_PARALLEL = "linear_proj", "linear_fc2"


class Adapter(Module):
    """Adapters of one linear layer, by projection."""

    def __init__(
        self,
        linear: Any,
        rows: Mapping[str, int],
        lora: LoraConfig,
        *,
        groups: int,
        is_row_parallel: bool,
    ) -> None:
        """Make the parameters, without values.

        Args:
            linear: a column- or row-parallel linear layer of Megatron.
            rows: this rank's number of output rows of each projection of the layer.
            groups: number of query groups by which the rows of the layer are ordered; else 1.
            is_row_parallel: whether the layer's input is divided, and not its output.
        """
        super().__init__()
        self._rows, self._groups, self._is_row_parallel = dict(rows), groups, is_row_parallel
        self._scale, self._tp = peft.scale(lora), linear.tp_group
        self._sequence_parallel = bool(linear.sequence_parallel) and self._tp.size() > 1
        self._is_on = True
        weight = linear.weight

        def matrix(size: tuple[int, int], is_divided: bool, dim: int) -> Parameter:
            parameter = Parameter(weight.new_empty(size))
            if is_divided or linear.is_expert:  # other ranks have other values
                set_tensor_model_parallel_attributes(parameter, True, dim, 1)
            mark = self._sequence_parallel and not is_divided
            parameter.sequence_parallel = mark  # type: ignore[attr-defined]  # Megatron reads it
            parameter.allreduce = weight.allreduce  # type: ignore[attr-defined]  # the same
            return parameter

        names = [name for name in rows if name in lora.targets]
        rank, width = lora.rank, weight.size(1)
        self.A = ParameterDict({n: matrix((rank, width), is_row_parallel, 1) for n in names})
        self.B = ParameterDict({n: matrix((rows[n], rank), not is_row_parallel, 0) for n in names})

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the layer's output `y` [..., out] plus that of the adapters for the input x."""
        if not self._is_on:
            return y
        h = self._exchanged(F.linear(x, self._stacked())).flatten(0, -2)
        return torch.addmm(y.flatten(0, -2), h, self._block().t(), alpha=self._scale).view_as(y)

    def merged(self, weight: Tensor) -> Tensor:
        """Return this rank's part of the layer's weight plus s B A."""
        with torch.no_grad():
            return peft.merged(weight, self._stacked(), self._block(), self._scale)

    def turn(self, on: bool) -> None:
        """Turn the adapters on or off."""
        self._is_on = on

    def _exchanged(self, h: Tensor) -> Tensor:
        """Return A x of all tokens that this rank's rows of B need."""
        if self._is_row_parallel and self._sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(h, group=self._tp)
        if self._is_row_parallel:
            return reduce_from_tensor_model_parallel_region(h, group=self._tp)
        if self._sequence_parallel:
            return gather_from_sequence_parallel_region(h, group=self._tp)
        return copy_to_tensor_model_parallel_region(h, group=self._tp)

    def _stacked(self) -> Tensor:
        """Return all A, one below the other: [adapters x rank, in]."""
        return torch.cat([*self.A.values()])

    def _block(self) -> Tensor:
        """Return the matrix [out, adapters x rank] that maps all A x to the layer's output. A row
        has the values of its own projection's B, and zeros."""
        some = next(iter(self.B.values()))
        rank, width = some.size(1), len(self.B) * some.size(1)
        place = {name: i * rank for i, name in enumerate(self.B)}
        return fuse(
            [
                F.pad(self.B[name], (place[name], width - place[name] - rank))
                if name in place
                else some.new_zeros(rows, width)
                for name, rows in self._rows.items()
            ],
            self._groups,
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Describe the parameters for checkpoints, with Megatron's signature."""
        assert metadata is not None
        letter, dim = ("A", 1) if self._is_row_parallel else ("B", 0)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {f"{letter}.{name}": dim for name in self.A},
            sharded_offsets,
            tp_group=self._tp,
            dp_cp_group=metadata["dp_cp_group"],
        )


def fuse(parts: Sequence[Tensor], groups: int) -> Tensor:
    """Concatenate the rows of projections by query group: of each group the queries, the key, then
    the value. With one group, the projections follow one another."""
    return torch.cat([p.unflatten(0, (groups, -1)) for p in parts], 1).flatten(0, 1)


def attach(chunk: Any, hf: HFConfig, lora: LoraConfig, *, recompute: bool) -> None:
    """Freeze the parameters of a model chunk, and add adapters without values to its linear layers.
    `recompute`: whether layers are recomputed in backward."""
    chunk.requires_grad_(False)
    if recompute and chunk.pre_process:
        # Megatron's recomputation gives no gradients if its input needs none.
        chunk.embedding.register_forward_hook(_needs_grad)
    for layer in chunk.decoder.layers:
        mlps = [layer.mlp]
        if isinstance(layer.mlp, MoELayer):
            mlps = [*layer.mlp.experts.local_experts] if lora.experts else []
            if hf.shared_intermediate_size:
                mlps.append(layer.mlp.shared_experts)
        for parent in (layer.self_attention, *mlps):
            for name, projections in FUSED.items():
                if hasattr(parent, name) and not set(projections).isdisjoint(lora.targets):
                    _add(parent, name, hf, lora)


def adapters_of(models: Iterable[Module]) -> list[Adapter]:
    """Return all adapters of the model chunks."""
    return [m for model in models for m in model.modules() if isinstance(m, Adapter)]


def _add(parent: Any, name: str, hf: HFConfig, lora: LoraConfig) -> None:
    linear = getattr(parent, name)
    # Transformer Engine's layers have a norm before the product.
    assert isinstance(linear, ColumnParallelLinear | RowParallelLinear), type(linear)
    num_rows = linear.weight.size(0)
    shares, groups = [1] * len(FUSED[name]), 1
    if name == "linear_qkv":
        shares = [hf.num_heads // hf.num_kv_heads, 1, 1]
        groups = num_rows // (sum(shares) * hf.head_dim)
    adapter = Adapter(
        linear,
        {n: num_rows * share // sum(shares) for n, share in zip(FUSED[name], shares, strict=True)},
        lora,
        groups=groups,
        is_row_parallel=name in ROW_PARALLEL,
    )
    parent.add_module(name + SUFFIX, adapter)

    def add(_: Module, args: tuple[Tensor, ...], made: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        return adapter(args[0], made[0]), made[1]

    linear.register_forward_hook(add)


def _needs_grad(_: Module, __: Any, embedded: Tensor) -> Tensor:
    # A view, since layer_inputs.py takes a leaf for what another stage has sent. With sequence
    # parallelism the embedding's output is one.
    return embedded.requires_grad_().view_as(embedded)


class BaseModel:
    """Reference model without weights of its own: the learner's, without the adapters."""

    def __init__(self, models: Iterable[Module]) -> None:
        self._adapters = adapters_of(models)
        self.is_in_place = False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Turn the adapters off in the block."""
        self._turn(False)
        try:
            yield
        finally:
            self._turn(True)

    def _turn(self, on: bool) -> None:
        self.is_in_place = not on
        for adapter in self._adapters:
            adapter.turn(on)

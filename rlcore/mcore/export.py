"""Read the weights of a checkpoint as Hugging Face tensors, one parameter at a time. This needs no
model, no GPU and no other ranks."""

import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from rlcore.config.schema import NO_ADAPTERS, LoraConfig
from rlcore.hf import lora as peft
from rlcore.hf.config import HFConfig
from rlcore.hf.names import dtype_of, expected
from rlcore.mcore.boxes import Box
from rlcore.mcore.bridge import BIAS_BUFFER, TensorSource, adapter_pieces, pieces, split
from rlcore.mcore.checkpoint import Piece, Shards, read_index
from rlcore.utils.errors import ConfigError

NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Names of norms in a checkpoint, which has them with the projection that follows."""


def read(
    folder: Path,
    hf: HFConfig,
    dtype: torch.dtype,
    wanted: AbstractSet[str],
    lora: LoraConfig = NO_ADAPTERS,
    base: TensorSource | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of the model in the order of `hf.names.expected`, on the CPU. Parameters
    without a wanted tensor are not read; their tensors are on the device `meta`.

    Args:
        folder: checkpoint of a learner, such as `runs/NAME/checkpoints/step_000040/learner`.
        dtype: data type of the tensors. The checkpoint has the float32 main parameters; rounded to
            the data type of the training, they are the model's weights.
        lora: settings of the adapters. If they have a rank, the checkpoint has only adapters, which
            are added to the weights of `base`.

    Raises:
        ConfigError: the folder has no intact checkpoint of this model.
    """
    shapes = expected(hf)
    with _opened(folder, hf, lora) as shards:
        if lora.rank:
            assert base is not None
            yield from _merged(shards, hf, dtype, wanted, lora, base)
            return
        for piece in pieces(hf):
            some = [shapes[name] for name in piece.tensors]
            if wanted.isdisjoint(piece.tensors):
                yield from zip(
                    piece.tensors,
                    (torch.empty(shape, dtype=dtype, device="meta") for shape in some),
                    strict=True,
                )
                continue
            whole = _read(shards, piece.name, (sum(s[0] for s in some), *some[0][1:]))
            if not piece.is_buffer:
                whole = whole.to(dtype)
            yield from zip(piece.tensors, split(piece, [whole], hf), strict=True)


def read_adapters(
    folder: Path, hf: HFConfig, dtype: torch.dtype, lora: LoraConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield all A and B under PEFT's names. Arguments and errors are those of `read`."""
    shapes = peft.shapes(hf, lora)
    with _opened(folder, hf, lora) as shards:
        for piece in adapter_pieces(hf, lora):
            [name] = piece.tensors
            yield name, _read(shards, piece.name, shapes[name]).to(dtype)


def _merged(
    shards: Shards,
    hf: HFConfig,
    dtype: torch.dtype,
    wanted: AbstractSet[str],
    lora: LoraConfig,
    base: TensorSource,
) -> Iterator[tuple[str, Tensor]]:
    adapted, shapes = peft.adapted(hf, lora), peft.shapes(hf, lora)
    places = {piece.tensors[0]: piece.name for piece in adapter_pieces(hf, lora)}
    for name, shape in expected(hf).items():
        if name not in wanted:
            yield name, torch.empty(shape, dtype=dtype, device="meta")
            continue
        weight = base.get(name).to(dtype_of(name, dtype))
        if name in adapted:
            a, b = (_read(shards, places[n], shapes[n]).to(dtype) for n in peft.matrices(name))
            weight = peft.merged(weight, a, b, peft.scale(lora))
        yield name, weight


@contextmanager
def _opened(folder: Path, hf: HFConfig, lora: LoraConfig) -> Iterator[Shards]:
    """Open the files of a checkpoint; the block reads them."""
    read_index(folder, hf.vocab_size, adapters=peft.summary(lora))
    shards = Shards(folder)
    try:
        shards.open()
        yield shards
    except SafetensorError as error:
        raise ConfigError(f"{folder}: a file is damaged ({error}); choose another") from error


def _read(shards: Shards, name: str, shape: tuple[int, ...]) -> Tensor:
    """Read a whole parameter, named as in `ParamPiece`, in float32."""
    key, index = place_of(name)
    box = Box(index + (0,) * len(shape), (1,) * len(index) + shape)
    values = torch.empty(box.numel)
    kind = "buffer" if name.endswith(BIAS_BUFFER) else "param"
    shards.read(Piece(name=f"{kind}/{key}", box=box, values=values, is_saved=False, may_lack=False))
    return values.view(shape)


def place_of(name: str) -> tuple[str, tuple[int, ...]]:
    """Return a parameter's name in a checkpoint and its index there: layers and experts are stacked
    along the first dimensions.

    >>> place_of("layers.3.mlp.experts.5.linear_fc1.weight")
    ('decoder.layers.mlp.experts.experts.linear_fc1.weight', (3, 5))
    """
    found = re.fullmatch(r"layers\.(\d+)\.(.*)", name)
    if found is None:
        return name, ()
    layer, rest = int(found[1]), NORMS.get(found[2], found[2])
    expert = re.fullmatch(r"mlp\.experts\.(\d+)\.(.*)", rest)
    if expert is None:
        return f"decoder.layers.{rest}", (layer,)
    return f"decoder.layers.mlp.experts.experts.{expert[2]}", (layer, int(expert[1]))

"""Read the weights of a checkpoint as Hugging Face tensors, one parameter at a time. This needs no
model, no GPU and no other ranks."""

import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from rlcore.hf.config import HFConfig
from rlcore.hf.names import expected
from rlcore.mcore.boxes import Box
from rlcore.mcore.bridge import pieces, split
from rlcore.mcore.checkpoint import Piece, Shards, read_index
from rlcore.utils.errors import ConfigError

NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Names of norms in a checkpoint, which has them with the projection that follows."""


def read(
    folder: Path, hf: HFConfig, dtype: torch.dtype, wanted: AbstractSet[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of the model in the order of `hf.names.expected`, on the CPU. Parameters
    without a wanted tensor are not read; their tensors are on the device `meta`.

    Args:
        folder: checkpoint of a learner, such as `runs/NAME/checkpoints/step_000040/learner`.
        dtype: data type of the tensors. The checkpoint has the float32 main parameters; rounded to
            the data type of the training, they are the model's weights.

    Raises:
        ConfigError: the folder has no intact checkpoint of this model.
    """
    read_index(folder)
    shards, shapes = Shards(folder), expected(hf)
    try:
        shards.open()
        for piece in pieces(hf):
            some = [shapes[name] for name in piece.tensors]
            if wanted.isdisjoint(piece.tensors):
                yield from zip(
                    piece.tensors,
                    (torch.empty(shape, dtype=dtype, device="meta") for shape in some),
                    strict=True,
                )
                continue
            whole = _read(shards, piece.name, (sum(s[0] for s in some), *some[0][1:])).to(dtype)
            yield from zip(piece.tensors, split(piece, [whole], hf), strict=True)
    except SafetensorError as error:
        raise ConfigError(f"{folder}: a file is damaged ({error}); choose another") from error


def _read(shards: Shards, name: str, shape: tuple[int, ...]) -> Tensor:
    """Read a whole parameter, named as in `ParamPiece`, in float32."""
    key, index = place_of(name)
    box = Box(index + (0,) * len(shape), (1,) * len(index) + shape)
    values = torch.empty(box.numel)
    shards.read(Piece(name=f"param/{key}", box=box, values=values, is_saved=False, may_lack=False))
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

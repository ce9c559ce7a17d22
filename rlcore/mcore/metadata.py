"""The index of a torch checkpoint is a pickle, and torch unpickles it as it stands. Before that it
is read here by an unpickler that knows the classes of such an index and nothing else: a checkpoint
from elsewhere is data, and runs no program.

What is no tensor is a pickle too, in the files that the index names. Only the extra states of
modules are that, and only those of training in FP8, which we do not have, would not be empty.
"""

import io
import pickle
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from rlcore.utils.errors import ConfigError

FILE = ".metadata"
KNOWN = {
    "collections": {"OrderedDict"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "torch.distributed.checkpoint.planner": {
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
}
"""What torch 2.13 and Megatron-Core 0.16 write."""
EXTRA_STATE = "._extra_state/shard_"


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def check(folder: Path) -> None:
    """ValueError where the index of the checkpoint in `folder` holds more than an index does."""
    path = folder / FILE
    try:
        with path.open("rb") as file:
            _check(_Index(file).load())
    except OSError:
        raise
    except Exception as error:  # what is no pickle raises whatever it likes
        raise ConfigError(
            f"{path}: is not the index of a checkpoint ({error}); it is not read, since it may run "
            "a program"
        ) from error


def _check(index: Any) -> None:
    for key, entry in index.state_dict_metadata.items():
        if type(entry) is not TensorStorageMetadata and not (
            type(entry) is BytesStorageMetadata and EXTRA_STATE in key
        ):
            raise ValueError(f"{key} is no tensor")
    for place in index.storage_data.values():
        path = PurePath(place.relative_path)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"it names {path}, which is not in its folder")


def load_bytes(planner: DefaultLoadPlanner, item: Any, value: io.BytesIO) -> None:
    """Upstream's, of an extra state that is empty. Upstream unpickles it as it stands, and
    Transformer Engine unpickles the bytes in one that is not."""
    found = torch.load(value, weights_only=True)
    if not isinstance(found, list) or not all(
        state is None or (isinstance(state, Tensor) and state.numel() == 0) for state in found
    ):
        raise ConfigError(
            f"{item.dest_index.fqn}: an extra state that is not empty; it is not read, since it "
            "may run a program"
        )
    safe = io.BytesIO()
    torch.save(found, safe)
    safe.seek(0)
    DefaultLoadPlanner.load_bytes(planner, item, safe)

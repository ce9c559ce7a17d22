"""Check the pickles in a torch checkpoint before loading, so that a checkpoint cannot run code.

The index of a checkpoint is a pickle that torch loads unchecked. This module loads the index first,
with an unpickler that accepts only the classes of an index. The data files hold a pickle for each
entry that is not a tensor. The only such entries allowed are extra states of modules, which must be
empty. Extra states have contents only in FP8 training, which is not supported.
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
"""Classes that a checkpoint's index may contain (torch 2.13, Megatron-Core 0.16), by module."""
EXTRA_STATE = "._extra_state/shard_"


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def check(folder: Path) -> None:
    """Raise ValueError if the index of the checkpoint in `folder` holds unexpected classes or
    entries."""
    path = folder / FILE
    try:
        with path.open("rb") as file:
            _check(_Index(file).load())
    except OSError:
        raise
    except Exception as error:  # a file that is no pickle may raise any exception
        raise ConfigError(
            f"{path}: is not the index of a checkpoint ({error}); it was not loaded, since a "
            "pickle can run code"
        ) from error


def _check(index: Any) -> None:
    for key, entry in index.state_dict_metadata.items():
        if type(entry) is not TensorStorageMetadata and not (
            type(entry) is BytesStorageMetadata and EXTRA_STATE in key
        ):
            raise ValueError(f"{key} is not a tensor")
    for place in index.storage_data.values():
        path = PurePath(place.relative_path)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"the file names {path}, which is not in its folder")


def load_bytes(planner: DefaultLoadPlanner, item: Any, value: io.BytesIO) -> None:
    """Load a module's extra state with torch's `load_bytes`. If the state is not empty, raise
    ConfigError, because torch and Transformer Engine would unpickle the contents unchecked."""
    found = torch.load(value, weights_only=True)
    if not isinstance(found, list) or not all(
        state is None or (isinstance(state, Tensor) and state.numel() == 0) for state in found
    ):
        raise ConfigError(
            f"{item.dest_index.fqn}: the extra state is not empty; it was not loaded, since a "
            "pickle can run code"
        )
    safe = io.BytesIO()
    torch.save(found, safe)
    safe.seek(0)
    DefaultLoadPlanner.load_bytes(planner, item, safe)

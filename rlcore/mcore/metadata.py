"""The index of a torch checkpoint is a pickle, and torch unpickles it as it stands. Before that it
is read here by an unpickler that knows the classes of such an index and nothing else: a checkpoint
from elsewhere is data, and runs no program."""

import pickle
from pathlib import Path
from typing import Any

import torch

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
            _Index(file).load()
    except OSError:
        raise
    except Exception as error:  # what is no pickle raises whatever it likes
        raise ValueError(
            f"{path}: is not the index of a checkpoint ({error}); it is not read, since it may run "
            "a program"
        ) from error

"""Read tensors of safetensors folders one at a time, in full or in slices, and write such folders.

A folder has `model.safetensors`, or shards with `model.safetensors.index.json`. Files are mapped
into memory, so a rank that needs a tenth of a tensor reads only this tenth from disk.
"""

import ctypes
import json
import math
import mmap
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlcore.hf.config import HFConfig
from rlcore.hf.names import Shape, expected
from rlcore.utils import collective, disk
from rlcore.utils.errors import ConfigError
from rlcore.utils.files import fault, read_json

Index = tuple[slice, ...]
"""Part of a tensor: one slice per leading dimension, and all of the other dimensions."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 4 << 30

# Patterns of the tokenizer files that an engine needs in addition to weights and config.json.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tiktoken.model",
    "tokenization_*.py",
    "chat_template.jinja",
    "chat_template.json",
)
MODEL_FILES = (
    SINGLE,
    INDEX,
    "model-*-of-*.safetensors",
    "config.json",
    "generation_config.json",
    *_TOKENIZER_FILES,
)
"""Patterns of the files that `save_folder` writes."""
# transformers 5 may save all experts of a layer stacked in two tensors.
_STACKED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
_MOST_EXPERTS = 1 << 14
_FLOATS = ("F64", "F32", "F16", "BF16")


class ShardIndex(msgspec.Struct):
    """Contents of the file `model.safetensors.index.json`."""

    weight_map: dict[str, str]
    """Name of the shard, a file of the same folder, of each tensor."""


class WeightReader:
    """Reader of a folder's tensors by name. Files are opened when first needed and stay mapped."""

    def __init__(self, folder: str | Path, file: str = "") -> None:
        """Find the tensors of a model's folder, or of one `file` in it. Raise ValueError if the
        folder has no safetensors file, or lacks a shard that the index names."""
        self.folder = Path(folder)
        self._open: dict[str, Any] = {}
        self._file_of = self._of(file) if file else self._find()
        self._stacked = self._unstack()

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted; stacked experts are named one by one."""
        return sorted({*self._file_of, *self._stacked} - self._stacks())

    def __contains__(self, name: str) -> bool:
        return name in self._file_of or name in self._stacked

    def shape(self, name: str) -> Shape:
        """Return a tensor's shape without reading data. Raise ValueError if it does not exist."""
        if name in self._stacked:
            stored, index = self._stacked[name]
            _, *shape = self._slice(stored).get_shape()
            rows = index[1].indices(shape[0])
            return (rows[1] - rows[0], *shape[1:])
        return tuple(self._slice(name).get_shape())

    def get(self, name: str, index: Index = ()) -> Tensor:
        """Return a tensor, or the part that `index` selects, on the CPU in the file's dtype. Raise
        ValueError if the tensor is missing, or if a returned value is NaN or infinite."""
        tensor = self._get(name, index)
        # A sum is finite if all values are, and needs no memory for a mask.
        dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        if not torch.isfinite(tensor.sum(dtype=dtype)):
            raise ConfigError(
                f"{self.folder}: tensor {name} has values that are NaN or infinite; fetch the "
                "model again, or use an earlier export"
            )
        return tensor

    def stored(self, name: str) -> Tensor:
        """Return a tensor as `get` does, without a check of its values."""
        return self._get(name, ())

    def _get(self, name: str, index: Index) -> Tensor:
        if name in self._stacked:
            stored, (expert, rows) = self._stacked[name]
            tensor = self._slice(stored)[expert, rows][0]
            return tensor[index].contiguous() if index else tensor
        if not index:
            self._slice(name)  # raises ConfigError if the shard lacks the tensor
            return self._file(name).get_tensor(name)
        return self._slice(name)[index]

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raise ValueError for the first tensor that is missing, has another shape, or does not
        hold floating-point numbers."""
        for name, shape in shapes.items():
            found = self.shape(name)
            if found != tuple(shape):
                raise ConfigError(
                    f"{self.folder}: tensor {name} has shape {list(found)}, config.json needs "
                    f"{list(shape)}; use config.json and weights of one model"
                )
            stored = self._stacked[name][0] if name in self._stacked else name
            if (dtype := self._slice(stored).get_dtype()) not in _FLOATS:
                raise ConfigError(
                    f"{self.folder}: tensor {name} has dtype {dtype}; use a model with weights of "
                    f"dtype {', '.join(_FLOATS)}"
                )

    def _find(self) -> dict[str, str]:
        index, single = self.folder / INDEX, self.folder / SINGLE
        if (why := fault(index)) != "no such file":
            if why:
                raise ConfigError(f"{index}: {why}; fetch the model again")
            return self._index(index)
        if not (why := fault(single)):
            return self._of(SINGLE)
        if why != "no such file":
            raise ConfigError(f"{single}: {why}; fetch the model again")
        raise ConfigError(
            f"{self.folder}: has neither {SINGLE} nor {INDEX}; give a folder with safetensors "
            "weights, or use random weights with --model.random_init"
        )

    def _of(self, file: str) -> dict[str, str]:
        if why := fault(self.folder / file):
            raise ConfigError(f"{self.folder / file}: {why}; fetch the model again")
        return dict.fromkeys(self._shard(file).keys(), file)

    def _index(self, index: Path) -> dict[str, str]:
        """Return the shard of each tensor. Raise ConfigError if a shard is missing, or is not a
        file of the folder."""
        try:
            file_of = msgspec.convert(read_json(index), ShardIndex).weight_map
        except msgspec.ValidationError as error:
            raise ConfigError(f"{index}: {error}; fetch the file again") from error
        for file in sorted(set(file_of.values())):
            if not file or Path(file).name != file or file == "..":
                raise ConfigError(
                    f"{index}: names the shard {file!r}, which is not a file of this folder; fetch "
                    "the file again"
                )
            if why := fault(self.folder / file):
                what = "is missing" if why == "no such file" else why
                raise ConfigError(
                    f"{self.folder}: shard {file} of {INDEX} {what}; fetch the model again"
                )
        return file_of

    def _stacks(self) -> set[str]:
        return {name for name in self._file_of if _STACKED.fullmatch(name)}

    def _unstack(self) -> dict[str, tuple[str, Index]]:
        """Map each expert matrix's name to its stacked tensor's name and its index in the stack."""
        where: dict[str, tuple[str, Index]] = {}
        for stored in self._stacks():
            match = _STACKED.fullmatch(stored)
            assert match is not None
            prefix, kind = match.groups()
            shape = self._slice(stored).get_shape()
            if len(shape) != 3 or shape[0] > _MOST_EXPERTS:
                raise ConfigError(
                    f"{self.folder}: tensor {stored} has shape {shape}; it must have three "
                    f"dimensions, the first at most {_MOST_EXPERTS}; fetch the model again"
                )
            experts, rows, _ = shape
            half = rows // 2
            parts = (
                {"down_proj": slice(0, rows)}
                if kind == "down_proj"
                else {"gate_proj": slice(0, half), "up_proj": slice(half, rows)}
            )
            for expert in range(experts):
                for part, take in parts.items():
                    index = (slice(expert, expert + 1), take)
                    where[f"{prefix}.{expert}.{part}.weight"] = (stored, index)
        return where

    def _shard(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ConfigError(
                    f"{self.folder / file}: not a whole safetensors file ({error});"
                    " fetch the model again"
                ) from error
        return self._open[file]

    def _file(self, name: str) -> Any:
        if name not in self._file_of:
            raise ConfigError(
                f"{self.folder}: tensor {name} is missing; use config.json and weights of one "
                "model, or fetch the model again"
            )
        return self._shard(self._file_of[name])

    def _slice(self, name: str) -> Any:
        file = self._file(name)
        try:
            return file.get_slice(name)
        except SafetensorError as error:
            raise ConfigError(
                f"{self.folder}: {self._file_of[name]} lacks tensor {name}, which {INDEX} lists; "
                "fetch the model again"
            ) from error


def read_folder(folder: str | Path, hf: HFConfig) -> Iterator[tuple[str, Tensor]]:
    """Check that the folder has all tensors, then yield them in the order of `names.expected`."""
    reader, shapes = WeightReader(folder), expected(hf)
    reader.check(shapes)
    for name in shapes:
        yield name, reader.get(name)


def save_folder(
    tensors: Iterable[tuple[str, Tensor]],
    hf: HFConfig,
    tokenizer_folder: str | Path | None,
    path: str | Path | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    together: bool = False,
) -> None:
    """Write a Hugging Face folder: weights in shards, config.json, tokenizer files.

    `tensors` is always exhausted, even after an error, because the iterator may be collective. With
    `together`, all ranks of the default process group give all tensors and the same `path` on a
    disk that they share, and each rank writes a part of the shards. Otherwise one rank passes a
    `path`; ranks with `path=None` write nothing. The folder appears, or replaces an older folder,
    only when it is complete and on disk. A rank has at most one shard in memory if the tensors come
    in the order of `names.expected`.

    Raises:
        ValueError: a tensor is missing or has another shape, or the older folder is refused by
            `check_target`.
        OSError: the disk is full or not writable. With `together`, every rank raises an error.
    """
    tensors = iter(tensors)
    try:
        if path is not None:
            _write(tensors, hf, tokenizer_folder, Path(path), max_shard_bytes, together)
    finally:
        _exhaust(tensors)


def _exhaust(tensors: Iterator[tuple[str, Tensor]]) -> None:
    for _ in tensors:
        continue


def _write(
    tensors: Iterator[tuple[str, Tensor]],
    hf: HFConfig,
    tokenizer_folder: str | Path | None,
    path: Path,
    max_shard_bytes: int,
    together: bool,
) -> None:
    part = path.with_name(path.name + ".part")
    rank, size = collective.place() if together else (0, 1)
    try:
        with agreed(path, together):
            check_target(path, MODEL_FILES)
            if rank == 0:
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir(parents=True)
        with agreed(path, together):
            dtype, plan = _write_shards(tensors, expected(hf), part, max_shard_bytes, rank, size)
        with agreed(path, together):
            if rank == 0:
                if len(plan.names) > 1:
                    disk.write_text(part / INDEX, plan.index())
                _write_rest(hf.with_(dtype=dtype), tokenizer_folder, part)
                disk.sync_tree(part)
                replace_folder(part, path)
    finally:
        if rank == 0:
            shutil.rmtree(part, ignore_errors=True)


@contextmanager
def agreed(path: Path, together: bool) -> Iterator[None]:
    """Raise an OSError that names `path` if the block cannot write. With `together`, raise on every
    rank if the block fails on any; collective."""
    problem: Exception | None = None
    cause: Exception | None = None
    try:
        yield
    except (OSError, SafetensorError) as error:
        problem, cause = (
            OSError(
                f"{path}: could not be written ({error}); free some space or give another folder"
            ),
            error,
        )
    except ValueError as error:
        problem = error
    failed = problem is not None
    if collective.any_rank(failed) if together else failed:
        other = OSError(f"{path}: another rank could not write its shards; see its log")
        raise problem or other from cause


def share_of(
    hf: HFConfig, dtype: torch.dtype, rank: int, size: int, max_shard_bytes: int = MAX_SHARD_BYTES
) -> set[str]:
    """Return the names of the tensors that a rank of `save_folder(together=True)` writes. It may
    pass other tensors without data, on the device `meta`."""
    plan = _ShardPlan.make(expected(hf), dtype.itemsize, max_shard_bytes)
    return {name for file in plan.share(rank, size) for name in plan.names[file]}


@dataclass(frozen=True, slots=True)
class _ShardPlan:
    """Division of a model's tensors into files."""

    names: dict[str, list[str]]
    """Names of the tensors in each file."""
    total_bytes: int

    @classmethod
    def make(cls, shapes: Mapping[str, Shape], element_size: int, limit: int) -> "_ShardPlan":
        """Fill each file up to `limit` bytes, in the order of the tensors."""
        shards: list[list[str]] = []
        size = total = 0
        for name, shape in shapes.items():
            nbytes = math.prod(shape) * element_size
            if not shards or size + nbytes > limit:
                shards.append([])
                size = 0
            shards[-1].append(name)
            size += nbytes
            total += nbytes
        if len(shards) == 1:
            return cls({SINGLE: shards[0]}, total)
        files = (f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards)))
        return cls(dict(zip(files, shards, strict=True)), total)

    def share(self, rank: int, size: int) -> list[str]:
        """Return the files that one of `size` ranks writes."""
        return list(self.names)[rank::size]

    def file_of(self) -> dict[str, str]:
        """Return the file of each tensor."""
        return {name: file for file, names in self.names.items() for name in names}

    def index(self) -> str:
        """Return the text of the index file."""
        found = {"metadata": {"total_size": self.total_bytes}, "weight_map": self.file_of()}
        return json.dumps(found, indent=1)


def _write_shards(
    tensors: Iterator[tuple[str, Tensor]],
    shapes: Mapping[str, Shape],
    part: Path,
    limit: int,
    rank: int,
    size: int,
) -> tuple[str, _ShardPlan]:
    """Write this rank's share of the shards. Exhaust the tensors, and return their dtype and the
    plan of all shards."""
    missing, dtype = dict(shapes), ""
    plan, file_of = _ShardPlan({}, 0), dict[str, str]()
    waiting: dict[str, dict[str, Tensor]] = {}  # tensors of incomplete shards that this rank writes
    try:
        for name, tensor in tensors:
            if missing.pop(name, None) != tuple(tensor.shape):
                raise ValueError(
                    f"tensor {name} {list(tensor.shape)}: config.json needs "
                    f"{list(shapes[name]) if name in shapes else 'no tensor of this name'}"
                )
            if not dtype:
                dtype = str(tensor.dtype).removeprefix("torch.")
                plan = _ShardPlan.make(shapes, tensor.element_size(), limit)
                file_of = plan.file_of()
                waiting = {file: {} for file in plan.share(rank, size)}
            file = file_of[name]
            if file not in waiting:
                continue
            waiting[file][name] = _own(tensor)
            if len(waiting[file]) == len(plan.names[file]):
                save_file(waiting.pop(file), part / file, metadata={"format": "pt"})
                disk.sync_file(part / file)
    finally:
        _exhaust(tensors)
    if missing:
        raise ValueError(f"tensor {next(iter(missing))} is missing; give all tensors of the model")
    return dtype, plan


def _own(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU with a storage of its own, because safetensors refuses to write
    several views of one storage to a file."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


def _write_rest(hf: HFConfig, tokenizer_folder: str | Path | None, part: Path) -> None:
    # `auto_map` names Python files, which are not copied.
    config = {key: value for key, value in hf.to_dict().items() if key != "auto_map"}
    (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    copies = [(tokenizer_folder, pattern) for pattern in _TOKENIZER_FILES]
    for folder, pattern in [*copies, (hf.path, "generation_config.json")]:
        for file in Path(folder).glob(pattern) if folder is not None else ():
            shutil.copyfile(file, part / file.name)


def check_target(path: Path, patterns: Sequence[str]) -> None:
    """Check that an export may replace the folder `path`: it has only files of these patterns.

    Raises:
        ConfigError: it has others, or is a file.
    """
    if path.is_dir():
        found = sorted(path.iterdir())
        names = [f.name for f in found if f.is_dir() or not _matches(f.name, patterns)]
        what = f"has {names[0]}, which is not of an earlier export of this kind" if names else ""
    else:
        what = "is a file" if path.exists() else ""
    if what:
        raise ConfigError(f"{path}: {what} and would be deleted; move it or give another folder")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def replace_folder(part: Path, path: Path) -> None:
    """Move the complete folder `part` to `path`, then delete an older folder at `path`, which
    `check_target` has accepted."""
    old = path.with_name(f".{path.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.replace(path, old)
    disk.rename(part, path)
    shutil.rmtree(old, ignore_errors=True)


def drop_pages(tensor: Tensor) -> None:
    """Release the memory pages of a tensor from `WeightReader.get`; the page cache may keep them.
    Do not use the tensor afterwards, because any access reads the file again."""
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    size = (tensor.data_ptr() + tensor.nbytes) // page * page - start
    if size > 0 and ctypes.CDLL(None, use_errno=True).madvise(
        ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED
    ):
        raise OSError(ctypes.get_errno(), "madvise: the pages of a mapped tensor stay in memory")

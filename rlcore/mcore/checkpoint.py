"""Save and load the learner's state as safetensors, under any layout.

    learner/checkpoint.json        format, state of the learner, steps of the optimizer
    learner/rank00003_0.safetensors

Each rank writes the part of the optimizer that it owns, so nothing is gathered and no tensor is
written twice. A file entry is a rectangle of a whole tensor. Its name has the kind of value
(`param`, `exp_avg` or `exp_avg_sq`), the parameter and the rectangle's offset, as in
`exp_avg/decoder.layers.mlp.linear_fc2.weight@3,0,512`. Buffers, such as a router's expert bias,
have the kind `buffer`. Under any layout, a rank loads the entries that overlap its rectangles.
Weights are not stored, because they are the rounded main parameters; neither are weights that are
not trained, as beside adapters.

Own code instead of Megatron's `dist_checkpointing`: the one format of 0.16 that loads correctly
gathers a whole tensor-parallel partition in float32 on the GPU, and its index is a pickle.

The loading run keeps its own parameter groups, so learning rate and decay may differ from the run
that saved.
"""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlcore.mcore.adam import MOMENTS, ChunkedAdamW, main_parameters
from rlcore.mcore.boxes import Box, boxes
from rlcore.protocols import WrittenFiles
from rlcore.utils import disk
from rlcore.utils.errors import ConfigError
from rlcore.utils.files import fault, read_text
from rlcore.utils.host_room import release_cached

FORMAT = 2
INDEX = "checkpoint.json"
WRITERS = 2
"""Number of files that a rank writes concurrently."""
READERS = 4
"""Number of tensors that a rank reads concurrently."""
FILE_BYTES = 512 * 2**20
"""Maximum size of a file of several tensors. Host memory holds a file twice while writing."""
_ALIGN = 16


class _Index(msgspec.Struct):
    """Contents of the file `checkpoint.json`."""

    format: int
    state: dict[str, Any]
    optimizer_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Rectangle of a main parameter, a moment or a buffer: consecutive values on this rank."""

    name: str
    """Kind of value (`param`, `exp_avg`, `exp_avg_sq` or `buffer`), a slash, and the tensor's
    name."""
    box: Box
    values: Tensor
    """The rectangle's values, as a 1-D view of the rank's own tensor."""
    is_saved: bool
    """Whether this rank saves the rectangle; false if another rank saves a copy of it."""
    may_lack: bool
    """Whether a checkpoint may lack rows of the rectangle, such as padding of the vocabulary."""

    @property
    def entry(self) -> str:
        """Name of the rectangle in a file."""
        return f"{self.name}@{','.join(map(str, self.box.offset))}"


# ---- save and load


def save(path: Path, models: Sequence[Any], optimizer: Any, state: dict[str, Any]) -> None:
    """Write a checkpoint and then replace the folder `path`, once all files are on disk.
    Collective.

    Raises:
        OSError: a rank could not write; all ranks raise it. If only the last renaming fails, an
            older folder `path` is lost; otherwise it stays.
    """
    aside = path.with_name(path.name + ".writing")
    leader = dist.get_rank() == 0

    def make_folder() -> None:
        if leader:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)

    def write() -> None:
        _write(files, aside)
        if leader:
            disk.write_text(aside / INDEX, index)

    def publish() -> None:
        if leader:
            shutil.rmtree(path, ignore_errors=True)
            disk.rename(aside, path)

    _attempt(make_folder, aside)
    index, files = _contents(models, optimizer, state)
    try:
        _check_space(aside, files)
        _attempt(write, aside)
        _attempt(publish, path)
    except OSError:
        if leader:
            shutil.rmtree(aside, ignore_errors=True)
        raise


class AsyncWriter:
    """Writer of one learner's checkpoints that copies the state to host memory and writes it on a
    thread, while the rank continues training.

    A thread suffices, because safetensors, checksums and `fsync` release Python's lock. The host
    memory is kept for the next checkpoint, and pinned if the state is on a GPU. Each file has one
    buffer, since safetensors needs contiguous tensors; a `HostRoom` would cut them into blocks.
    """

    def __init__(self) -> None:
        self._room: list[Tensor] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: Future[WrittenFiles] | None = None
        self._cancelled = Event()

    def write(
        self,
        path: Path,
        models: Sequence[Any],
        optimizer: Any,
        state: dict[str, Any],
        then: Callable[[WrittenFiles], None],
    ) -> Future[WrittenFiles]:
        """Copy the state to host memory, then write it to the new folder `path` on the thread. The
        call returns after the copy and is collective. If an earlier checkpoint is still being
        written, wait for it first, since both use the same memory.

        Args:
            then: called on the thread with the files that this rank has written.

        Returns:
            Future of these files, done after `then`. It raises OSError if this rank could not write
            a file or `then` raised OSError; the futures of other ranks do not fail.

        Raises:
            MemoryError: a rank lacks memory for the copy; raised on all ranks before any file is
                written.
            OSError: the disk lacks space, or `path` cannot be made; raised on all ranks.
        """
        leader = dist.get_rank() == 0
        staged: list[list[Piece]] = []

        def make_folder() -> None:
            if leader:
                path.mkdir(parents=True)

        def stage() -> None:
            staged.extend(self._stage(files))

        def write() -> WrittenFiles:
            written = write_files()
            then(written)
            return written

        def write_files() -> WrittenFiles:
            start = time.monotonic()
            try:
                written = _write(staged, path, self._cancelled)
                if leader:
                    disk.write_text(path / INDEX, index)
                    written.append(path / INDEX)
                sums = {file.name: disk.checksum(file) for file in written}
            except (OSError, SafetensorError, RuntimeError, MemoryError) as error:
                raise _os_error(error, path) from error
            return WrittenFiles(sums, time.monotonic() - start)

        if self._written is not None:
            wait([self._written])
        index, files = _contents(models, optimizer, state)
        failed, problem = _any_fails(stage)
        if failed:
            staged.clear()
            self._room.clear()
            release_cached()  # the synchronous save that follows needs it
            size = sum(piece.values.nbytes for pieces in files for piece in pieces)
            raise MemoryError(
                f"no host memory for a copy of {size / 1e9:.1f} GB "
                f"({problem or 'on another rank, see its log'})"
            ) from problem
        _attempt(make_folder, path)
        _check_space(path, files)
        self._written = self._thread.submit(write)
        return self._written

    def close(self) -> None:
        """Stop writing after the current file, and end the thread."""
        self._cancelled.set()
        self._thread.shutdown()

    def _stage(self, files: Sequence[Sequence[Piece]]) -> Iterator[list[Piece]]:
        """Copy the pieces of each file to the file's buffer. Yield the copies."""
        on_gpu = any(piece.values.is_cuda for pieces in files for piece in pieces)
        for number, pieces in enumerate(files):
            sizes = [-(-piece.values.nbytes // _ALIGN) * _ALIGN for piece in pieces]
            if number == len(self._room):
                self._room.append(torch.empty(0, dtype=torch.uint8))
            if self._room[number].numel() < sum(sizes):
                self._room[number] = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=on_gpu)
            there, at = [], 0
            for piece, size in zip(pieces, sizes, strict=True):
                flat = self._room[number][at : at + piece.values.nbytes].view(piece.values.dtype)
                there.append(replace(piece, values=flat.copy_(piece.values, non_blocking=True)))
                at += size
            yield there
        if on_gpu:
            torch.cuda.synchronize()


def load(
    path: Path,
    models: Sequence[Any],
    optimizer: Any,
    *,
    vocab_size: int,
    head: str = "lm",
    adapters: str = "",
) -> dict[str, Any]:
    """Load a checkpoint that `save` wrote into model and optimizer; return its `state`. Collective.

    Raises:
        ConfigError: `path` holds no checkpoint, or the checkpoint is of another model. The kind
            of head is compared first: a value head has the width of one row of an lm head.
    """
    state, step = read_index(path, vocab_size, head, adapters)
    _read(_pieces(models, optimizer), path)
    _set_step(optimizer, step)
    for part in optimizer.chained_optimizers:
        inner = getattr(part, "optimizer", None)
        if isinstance(inner, ChunkedAdamW):
            inner.copy_to_weights()
        if hasattr(part, "_copy_main_params_to_model_params"):
            part._copy_main_params_to_model_params()
    if any(isinstance(part, DistributedOptimizer) for part in optimizer.chained_optimizers):
        for model in models:
            model.start_param_sync(force_sync=True)
    return state


def read_index(
    path: Path, vocab_size: int, head: str = "lm", adapters: str = ""
) -> tuple[dict[str, Any], int]:
    """Return the state of the learner in a checkpoint, and the number of steps of the optimizer.

    Args:
        adapters: settings of the model's adapters, as `hf.lora.summary` gives them.

    Raises:
        ConfigError: `path` holds no checkpoint, one of another format, or of a model with another
            vocabulary size, another head or other adapters.
    """
    try:
        found = msgspec.json.decode(read_text(path / INDEX), type=_Index)
    except (ConfigError, msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(
            f"{path}: has no complete checkpoint; choose another folder or start a new run"
        ) from error
    state = found.state
    if found.format != FORMAT:
        raise ConfigError(
            f"{path}: has format {found.format}, but this version of rlcore reads format {FORMAT}; "
            "resume with the version that wrote it"
        )
    if (saved := state.get("head", "lm")) != head:
        raise ConfigError(
            f"{path}: was saved by a model with head {saved}, but this model has head {head}; "
            "load an actor from an actor's checkpoint and a critic from a critic's"
        )
    if (saved := state.get("vocab_size", vocab_size)) != vocab_size:  # older ones do not have it
        raise ConfigError(
            f"{path}: was saved by a model with vocab_size {saved}, but this model has "
            f"{vocab_size}; set model.path to the model that it was saved with"
        )
    if (saved := state.get("lora", "")) != adapters:
        raise ConfigError(
            f"{path}: was saved with {saved or 'no adapters'}, but this model has "
            f"{adapters or 'none'}; set the keys of --lora as in the run that saved it"
        )
    return state, found.optimizer_step


# ---- what a rank holds


def _pieces(models: Sequence[Any], optimizer: Any) -> list[Piece]:
    """Return this rank's main parameters, moments and buffers as rectangles of whole tensors."""
    fill_empty_states(optimizer)
    sharded = _sharded(models)
    found = []
    for param, first, tensors, is_shared in _states(optimizer):
        for leaf in sharded[param]:
            # A leaf is a part of the parameter; `start` is the index of the leaf's first value.
            start = leaf.data.storage_offset() - param.data.storage_offset()
            low, high = max(start, first), min(start + leaf.data.numel(), first + _size(tensors))
            replica = _replica(leaf)
            is_saved = not any(replica[:-1] if is_shared else replica)
            around = _shape(leaf)
            for box, at in boxes(around, low - start, high - start):
                offset = tuple(map(sum, zip(leaf.global_offset, box.offset, strict=True)))
                place = slice(start + at - first, start + at - first + box.numel)
                found += [
                    Piece(
                        name=f"{kind}/{leaf.key}",
                        box=Box(offset, box.shape),
                        values=tensor.detach().view(-1)[place],
                        is_saved=is_saved,
                        may_lack=leaf.allow_shape_mismatch,
                    )
                    for kind, tensor in tensors.items()
                ]
    for key, leaves in sharded.items():
        if not isinstance(key, torch.nn.Parameter):
            found += [_buffer(leaf) for leaf in leaves]
    return found


def _buffer(leaf: ShardedTensor) -> Piece:
    return Piece(
        name=f"buffer/{leaf.key}",
        box=Box(tuple(leaf.global_offset), _shape(leaf)),
        values=leaf.data.detach().view(-1),
        is_saved=not any(_replica(leaf)),
        may_lack=False,
    )


def _shape(leaf: ShardedTensor) -> tuple[int, ...]:
    """Return the shape of a leaf in the whole tensor, with leading axes such as the layer's."""
    return (1,) * leaf.prepend_axis_num + tuple(leaf.local_shape)


def _replica(leaf: ShardedTensor) -> tuple[int, ...]:
    """Return the numbers of this rank's copy of a leaf; the first copy has zeros."""
    return leaf.replica_id if isinstance(leaf.replica_id, tuple) else (leaf.replica_id,)


def _sharded(models: Sequence[Any]) -> dict[Tensor, list[ShardedTensor]]:
    """Return the parts of each parameter and buffer with their positions in the whole model."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    found: dict[Tensor, list[ShardedTensor]] = {}
    for model in models:
        entries = model.module.sharded_state_dict(metadata={"dp_cp_group": group})
        for entry in nested_values(entries):
            if isinstance(entry, ShardedTensorFactory):
                found[entry.data] = list(nested_values(entry.build()))
            elif isinstance(entry, ShardedTensor):  # others: extra states, empty without FP8
                found[entry.data] = [entry]
    return found


def _states(optimizer: Any) -> Iterator[tuple[Tensor, int, dict[str, Tensor], bool]]:
    """Yield each parameter of this rank's optimizers with the index of the first value that the
    optimizer holds, with main parameter and moments by kind, and with a flag: whether the parameter
    is divided among data-parallel ranks."""
    for part in optimizer.chained_optimizers:
        if getattr(part, "optimizer", None) is None:
            continue
        if isinstance(part, DistributedOptimizer):
            for param, (group, order) in part.model_param_group_index_map.items():
                main = part.optimizer.param_groups[group]["params"][order]
                first = part._get_model_param_range_map(param)["param"].start
                for start, tensors in _kinds(part.optimizer, main):
                    yield param, first + start, tensors, True
            continue
        model_params = {id(main): param for main, param in main_parameters(part)}
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                for start, tensors in _kinds(part.optimizer, main):
                    yield model_params.get(id(main), main), start, tensors, False


def _kinds(
    inner: torch.optim.Optimizer | ChunkedAdamW, main: Tensor
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield the parts of a main parameter: index of the first value, and tensors by kind."""
    if isinstance(inner, ChunkedAdamW):
        yield from inner.slices_of(main)
    else:
        yield 0, {"param": main, **{kind: inner.state[main][kind] for kind in MOMENTS}}


def _size(tensors: dict[str, Tensor]) -> int:
    return tensors["param"].numel()


# ---- files


def _contents(
    models: Sequence[Any], optimizer: Any, state: dict[str, Any]
) -> tuple[str, list[list[Piece]]]:
    """Return the text of `checkpoint.json`, and what this rank saves, by file. Collective."""
    index = {"format": FORMAT, "state": state, "optimizer_step": _step(optimizer)}
    saved = [piece for piece in _pieces(models, optimizer) if piece.is_saved]
    files = in_files([piece.values.nbytes for piece in saved])
    return json.dumps(index, indent=1), [[saved[i] for i in part] for part in files]


def in_files(sizes: Sequence[int]) -> list[list[int]]:
    """Divide pieces of these sizes in bytes, in their order, into files of up to `FILE_BYTES`;
    a larger piece has a file of its own. Return the numbers of the pieces by file."""
    files: list[list[int]] = []
    total = 0
    for i, size in enumerate(sizes):
        if not files or total + size > FILE_BYTES:
            files.append([])
            total = 0
        files[-1].append(i)
        total += size
    return files


def _write(
    files: Sequence[Sequence[Piece]], folder: Path, cancelled: Event | None = None
) -> list[Path]:
    """Write this rank's files to disk, and return their paths. Raise OSError once `cancelled` is
    set."""
    rank = dist.get_rank()
    paths = [folder / f"rank{rank:05d}_{i}.safetensors" for i in range(len(files))]
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(partial(_write_file, cancelled), paths, files))
    return paths


def _write_file(cancelled: Event | None, path: Path, pieces: Sequence[Piece]) -> None:
    if cancelled is not None and cancelled.is_set():
        raise OSError(errno.ECANCELED, "the run has ended")
    entries = {piece.entry: piece.values.to("cpu").view(piece.box.shape) for piece in pieces}
    save_file(entries, path)
    disk.sync_file(path)


@dataclass(slots=True)
class Shards:
    """Reader of the files of a checkpoint. Each file is opened once."""

    folder: Path
    entries: dict[str, list[tuple[Box, Any, str]]] = field(default_factory=dict)
    """Rectangle, open file and entry name of each file entry, by `Piece.name`."""

    def open(self) -> None:
        """Open the files and list their entries."""
        seen: set[str] = set()
        for path in sorted(self.folder.glob("*.safetensors")):
            if why := fault(path):
                raise ConfigError(f"{path}: {why}; choose another checkpoint")
            file = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                if name in seen:
                    raise ValueError(f"{path.name} repeats the entry {name}")
                seen.add(name)
                key, _, offset = name.rpartition("@")
                shape = tuple(file.get_slice(name).get_shape())
                box = Box(tuple(map(int, offset.split(","))), shape)
                self.entries.setdefault(key, []).append((box, file, name))

    def read(self, piece: Piece) -> None:
        """Read a rectangle's values from the files. Raise ConfigError if values are missing."""
        values = piece.values.to("cpu", copy=True).view(piece.box.shape)
        count = 0
        for box, file, name in self.entries.get(piece.name, ()):
            common = box.overlap(piece.box) if len(box.shape) == len(piece.box.shape) else None
            if common is not None:
                part = file.get_slice(name)[box.slices(common)]
                values[piece.box.slices(common)] = part.to(values.dtype)
                count += common.numel
        if count != piece.box.numel and not (piece.may_lack and piece.name in self.entries):
            raise ConfigError(
                f"{self.folder}: {piece.name} has {count} of {piece.box.numel} values at "
                f"{list(piece.box.offset)}; the checkpoint is of another model: set model.path to "
                "the model that it was saved with"
            )
        piece.values.copy_(values.view(-1))


def _read(pieces: Sequence[Piece], folder: Path) -> None:
    files = Shards(folder)
    try:
        files.open()
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(files.read, pieces))
    except (SafetensorError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{folder}: a file is damaged ({error}); choose another") from error


def _attempt(work: Callable[[], None], folder: Path) -> None:
    """Do `work`, which writes files; collective. If it fails on any rank, also for lack of memory,
    raise OSError on all ranks, so that no rank waits for the failed rank."""
    failed, problem = _any_fails(work)
    if failed:
        raise _os_error(problem, folder) from problem


def _any_fails(work: Callable[[], None]) -> tuple[bool, Exception | None]:
    """Do `work`. Return whether it failed on any rank, and this rank's error. Collective."""
    problem: Exception | None = None
    try:
        work()
    except (OSError, SafetensorError, RuntimeError, MemoryError) as error:
        problem = error
    failed = torch.tensor([problem is not None], dtype=torch.int32)
    dist.all_reduce(failed := _there(failed), op=dist.ReduceOp.MAX)
    return bool(failed), problem


def _os_error(problem: Exception | None, folder: Path) -> OSError:
    """Return the error of a checkpoint that could not be written; `problem`: this rank's."""
    number = getattr(problem, "errno", None) or errno.EIO
    if "os error 28" in str(problem):  # safetensors' message for a full disk
        number = errno.ENOSPC
    if number == errno.ENOSPC:
        reason = "the disk is full; free some space or choose another --run.dir"
    else:
        reason = (
            str(problem) if problem is not None else "another rank could not write; see its log"
        )
    return OSError(number, f"checkpoint not written to {folder}: {reason}")


def _check_space(folder: Path, files: Sequence[Sequence[Piece]]) -> None:
    """Raise OSError before writing if the disk of `folder` cannot hold the checkpoint."""
    mine = sum(piece.values.nbytes for pieces in files for piece in pieces)
    total = torch.tensor([mine], dtype=torch.int64)
    dist.all_reduce(total := _there(total))

    def look() -> None:
        if dist.get_rank() == 0:
            free = os.statvfs(folder)
            have = free.f_bavail * free.f_frsize
            if have < int(total):
                raise OSError(errno.ENOSPC, f"needs {int(total)} bytes, {have} are free")

    _attempt(look, folder)


def _there(number: Tensor) -> Tensor:
    """Return `number` on the device that collectives of the default process group need."""
    return number.to("cuda") if dist.get_backend() == "nccl" else number


# ---- the optimizer


def _inner(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """Yield the torch optimizers inside Megatron's optimizer."""
    for part in optimizer.chained_optimizers:
        if getattr(part, "optimizer", None) is not None:
            yield part.optimizer


def _is_torchs(inner: torch.optim.Optimizer) -> bool:
    """Return whether this is torch's Adam, which counts steps per parameter, not per group."""
    return isinstance(inner, torch.optim.AdamW | torch.optim.Adam)


def fill_empty_states(optimizer: Any) -> None:
    """Add moments to the parameters of an optimizer that has not stepped."""
    for inner in _inner(optimizer):
        for group in inner.param_groups:
            for p in group["params"]:
                if not inner.state[p]:
                    inner.state[p] = {kind: torch.zeros_like(p) for kind in MOMENTS}
                    if _is_torchs(inner):
                        inner.state[p]["step"] = _step_of(p, group, 0)


def _step(optimizer: Any) -> int:
    """Return the optimizer's step count: the maximum, since a rank may have no parameters."""
    steps = [0.0]
    for inner in _inner(optimizer):
        steps += [float(s["step"]) for s in inner.state.values() if "step" in s]
        steps += [float(g["step"]) for g in inner.param_groups if g.get("step") is not None]
    most = _there(torch.tensor(max(steps), dtype=torch.float64))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def _set_step(optimizer: Any, step: int) -> None:
    for inner in _inner(optimizer):
        for group in inner.param_groups:
            if _is_torchs(inner):
                for p in group["params"]:
                    if p in inner.state:
                        inner.state[p]["step"] = _step_of(p, group, step)
            elif step or "step" in group:
                group["step"] = step


def _step_of(p: Tensor, group: Mapping[str, Any], step: int) -> Tensor:
    """Return the step count of a parameter where torch's Adam keeps it."""
    return torch.tensor(float(step), device=p.device if group.get("fused") else None)

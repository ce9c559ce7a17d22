"""Save and load model and optimizer in Megatron's `torch_dist` format, under any layout.

The optimizer format is always `fully_reshardable`: saving in Megatron's default format fails, and
`dp_reshardable` loads wrong moments without an error. This module works around four bugs of the
distributed optimizer (0.16.1); three occur only without TE or Apex. Each rank writes its files
itself, without helper processes, to a temporary folder that is renamed when complete.

Only the optimizer's tensors and one step count are saved. The loading run keeps its own parameter
groups, so learning rate, decay and expert layout may differ from the run that saved.
"""

import errno
import os
import queue
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    TorchDistSaveShardedStrategy,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from rlcore.mcore import metadata as index
from rlcore.utils.errors import ConfigError

WRITERS = 2
"""Number of files that a rank writes concurrently."""


def save(path: Path, models: Sequence[Any], optimizer: Any, state: dict[str, Any]) -> None:
    """Write a checkpoint to a temporary folder, which then replaces `path`. Collective.

    Raises:
        OSError: a rank could not write; all ranks raise it, and `path` stays unchanged.
    """
    aside = path.with_name(path.name + ".writing")
    leader = dist.get_rank() == 0
    problem: BaseException | None = None
    if leader:
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        except OSError as error:
            problem = error
    _agree(problem, aside)
    try:
        _check_space(aside, models, optimizer)
        sharded = _sharded(models, optimizer, loading=False)
        sharded["rlcore"] = dict(state) | {"optimizer_step": _step(optimizer)}
        _write(sharded, aside)
    except OSError:
        if leader:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    if leader:
        shutil.rmtree(path, ignore_errors=True)
        aside.rename(path)
    dist.barrier()


def load(path: Path, models: Sequence[Any], optimizer: Any, *, head: str = "lm") -> dict[str, Any]:
    """Load model and optimizer from a checkpoint of `save`; return its `state`. Collective.

    Raises:
        ConfigError: `path` holds no checkpoint or an unsafe pickle, or `state["head"]` in the
            checkpoint is not `head`. Without this check, Megatron would silently cut an lm head
            down to a value head, as if the other rows were padding.
    """
    if not (path / "metadata.json").is_file():
        raise ConfigError(f"{path}: has no complete checkpoint; choose another or start a new run")
    index.check(path)
    saved = dist_checkpointing.load_common_state_dict(str(path))["rlcore"].get("head", "lm")
    if saved != head:
        raise ConfigError(
            f"{path}: was saved by a model with head {saved}, but this model has head {head}; "
            "load an actor from an actor's checkpoint and a critic from a critic's"
        )
    _patch_loading()
    found = dist_checkpointing.load(_sharded(models, optimizer, loading=True), str(path))
    for key, model in zip(_keys(models), models, strict=True):
        model.module.load_state_dict(found[key])
    for number, part in enumerate(optimizer.chained_optimizers):
        _load_part(part, found["optimizer"][number], found["rlcore"]["optimizer_step"])
    return found["rlcore"]


def _keys(models: Sequence[Any]) -> list[str]:
    return [f"model{i}" for i in range(len(models))]


def _sharded(models: Sequence[Any], optimizer: Any, *, loading: bool) -> dict[str, Any]:
    """Return the sharded state dict that Megatron saves or loads. Its entry `optimizer` maps the
    number of each chained optimizer to the optimizer's tensors."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state: dict[str, Any] = {
        key: model.module.sharded_state_dict(metadata=metadata)
        for key, model in zip(_keys(models), models, strict=True)
    }
    fill_empty_states(optimizer)
    parts = {}
    with _unpadded_indices(optimizer):
        for number, part in enumerate(optimizer.chained_optimizers):
            parts[number] = part.sharded_state_dict(state, is_loading=loading, metadata=metadata)
            _drop_groups(part, parts[number])
    return state | {"optimizer": parts}


def _drop_groups(part: Any, sharded: dict[str, Any]) -> None:
    """Remove everything except tensors from an optimizer's sharded state. `_load_part` takes the
    rest from the loading run."""
    if isinstance(part, DistributedOptimizer):
        del sharded["optimizer"], sharded["param_state_sharding_type"]
        return
    inner = sharded.get("optimizer", sharded)
    del inner["param_groups"]
    inner["state"].pop("common_step", None)


def _load_part(part: Any, found: dict[str, Any], step: int) -> None:
    """Load one chained optimizer: tensors and step from `found`, parameter groups from `part`."""
    if isinstance(part, DistributedOptimizer):
        found["param_state_sharding_type"] = "fully_reshardable"
        found["optimizer"] = part.state_dict()["optimizer"]
        groups = found["optimizer"]["param_groups"]
    else:
        inner = found.get("optimizer", found)
        inner["param_groups"] = groups = part.optimizer.state_dict()["param_groups"]
        inner["state"]["common_step"] = torch.tensor(float(step))
    for group in groups:
        if "step" in group:
            group["step"] = step
    part.load_state_dict(found)
    # Megatron gives all parameters one `step` tensor, which AdamW would advance repeatedly.
    for state in part.optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].clone()


def _step(optimizer: Any) -> int:
    """Return the optimizer's step count, as maximum over ranks; a rank may have no parameters."""
    steps = [0.0]
    for inner in _inner(optimizer):
        steps += [float(s["step"]) for s in inner.state.values() if "step" in s]
        steps += [float(g["step"]) for g in inner.param_groups if g.get("step") is not None]
    most = torch.tensor(max(steps), dtype=torch.float64)
    most = most.to("cuda") if _needs_cuda() else most
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


@contextmanager
def _unpadded_indices(optimizer: Any) -> Iterator[None]:
    """Correct Megatron's parameter offsets while the sharded optimizer state is built.

    Megatron joins a buffer's buckets without padding, then slices parameters at offsets that
    include padding. A tied embedding has a separate bucket. Without the correction, the parameters
    of the last pipeline stage would be saved shifted, without an error."""
    kept = []
    try:
        for part in optimizer.chained_optimizers:
            for buffer in getattr(part, "buffers", []):
                starts, total = [], 0
                for bucket in buffer.buckets:
                    starts.append(total - bucket.offset)
                    total += bucket.numel_unpadded
                kept.append((buffer, buffer.param_index_map))
                buffer.param_index_map = {
                    param: (first + starts[bucket], last + starts[bucket], bucket)
                    for param, (first, last, bucket) in buffer.param_index_map.items()
                }
        yield
    finally:
        for buffer, index in kept:
            buffer.param_index_map = index


# ---- writing


def _write(sharded: dict[str, Any], folder: Path) -> None:
    # Replace Megatron's result queue, which would start a manager process.
    results: queue.Queue = queue.Queue()
    filesystem_async._results_queue = results
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=WRITERS)
    request = dist_checkpointing.save(sharded, str(folder), strategy, async_sharded_save=True)
    problem = None
    if request.async_fn is not None:
        buckets = request.preload_fn()
        transforms = request.async_fn.args[0]
        with ThreadPoolExecutor(WRITERS) as pool:
            jobs = [pool.submit(_write_file, transforms, i, b) for i, b in enumerate(buckets)]
            written = [job.result() for job in jobs]
        problem = next((w for w in written if isinstance(w, BaseException)), None)
        results.put(dict(enumerate(written)))
    _agree(problem, folder)
    for finish in request.finalize_fns:
        finish()


def _write_file(transforms: list, number: int, bucket: Any) -> list | BaseException:
    """Write one of this rank's files; return the list of write results, or the exception."""
    done: queue.Queue = queue.Queue()
    count: queue.Queue = queue.Queue()
    count.put(number)
    filesystem_async.FileSystemWriterAsync.write_preloaded_data(
        transforms, number, bucket, done, count, use_fsync=True
    )
    return done.get_nowait()[1]


def _agree(problem: BaseException | None, folder: Path) -> None:
    """Raise OSError on every rank if one rank failed, so that no rank waits for the failed rank."""
    failed = torch.tensor([problem is not None], dtype=torch.int32)
    failed = failed.to("cuda") if _needs_cuda() else failed
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if problem is None and not int(failed):
        return
    number = getattr(problem, "errno", None) or errno.EIO
    if number == errno.ENOSPC:
        reason = "the disk is full; free some space or choose another --run.dir"
    else:
        reason = (
            str(problem) if problem is not None else "another rank could not write; see its log"
        )
    raise OSError(number, f"checkpoint not written to {folder}: {reason}") from problem


def _needs_cuda() -> bool:
    return dist.get_backend() == "nccl"


def _check_space(folder: Path, models: Sequence[Any], optimizer: Any) -> None:
    """Raise OSError before writing if the disk of `folder` cannot hold the checkpoint. Each rank
    counts the bytes that it will write; data-parallel copies of the model count once."""
    mine = sum(t.numel() * t.element_size() for t in _optimizer_tensors(optimizer))
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
        mine += sum(p.numel() * p.element_size() for m in models for p in m.parameters())
    elif not _is_distributed(optimizer):
        mine = 0
    total = torch.tensor([mine], dtype=torch.int64)
    total = total.to("cuda") if _needs_cuda() else total
    dist.all_reduce(total)
    problem = None
    if dist.get_rank() == 0:
        free = os.statvfs(folder)
        have = free.f_bavail * free.f_frsize
        if have < int(total):
            problem = OSError(errno.ENOSPC, f"needs {int(total)} bytes, {have} are free")
    _agree(problem, folder)


def _is_distributed(optimizer: Any) -> bool:
    return any(isinstance(part, DistributedOptimizer) for part in optimizer.chained_optimizers)


def _inner(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """Yield the torch optimizers inside Megatron's optimizer."""
    for part in optimizer.chained_optimizers:
        if getattr(part, "optimizer", None) is not None:
            yield part.optimizer


def _optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    for inner in _inner(optimizer):
        for parameter, state in inner.state.items():
            yield parameter
            yield from (v for v in state.values() if isinstance(v, Tensor))


# ---- the distributed optimizer without TE or Apex


def fill_empty_states(optimizer: Any) -> None:
    """Add AdamW's state to parameters that no step has updated; Megatron's checkpoints need it."""
    for inner in _inner(optimizer):
        if not isinstance(inner, torch.optim.AdamW | torch.optim.Adam):
            continue  # the optimizers of TE and Apex create their own state
        for group in inner.param_groups:
            for p in group["params"]:
                if not inner.state[p]:
                    inner.state[p] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }


def _patch_loading() -> None:
    """Patch Megatron's loading, which would unpickle all entries except tensors. Without TE and
    Apex, loading also expects a `step` per parameter and writes to leaf tensors outside no_grad."""
    MCoreLoadPlanner.load_bytes = index.load_bytes

    def set_states(self: Any, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        ours = {"param": main, **self.optimizer.state[main]}
        with torch.no_grad():
            for key, value in tensors.items():
                if key in ours:
                    ours[key].copy_(value)

    original = DistributedOptimizer._set_main_param_and_optimizer_states
    if original.__name__ == "set_states" or not _plain_torch():
        return
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states


def _plain_torch() -> bool:
    from megatron.core.optimizer import distrib_optimizer

    return not distrib_optimizer.HAVE_APEX_OR_TE

"""Transfer of weight buckets into SGLang's model.

`encode` runs in the engine's process, `take` in every scheduler. The scheduler itself opens and
checks the payload, so it reads a bucket in shared memory in place. Either all ranks load a bucket
or no rank does.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import torch
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import MultiprocessingSerializer
from torch import Tensor

from rlcore.records import Bucket
from rlcore.rollout.sglang_engine import hooks
from rlcore.rollout.validation import damage
from rlcore.utils.buckets import as_tensor, open_payload, unpack

LOAD_FORMAT = "rlcore"
_PROJECTION = re.compile(r"\.(q_a_proj|kv_a_proj_with_mqa)\.weight$")


def encode(bucket: Bucket, payloads: Sequence[bytes | memoryview]) -> list[bytes]:
    """Encode a bucket as one message per tensor-parallel rank."""
    head = msgspec.msgpack.encode(bucket)
    return [MultiprocessingSerializer.serialize((head, bytes(payload))) for payload in payloads]


def take(
    original: Callable[..., tuple[bool, str]],
    updater: Any,
    named_tensors: Any,
    load_format: str | None = None,
) -> tuple[bool, str]:
    """Load a bucket; this wraps SGLang's `WeightUpdater.update_weights_from_tensor`. Return (True,
    "loaded"), or (False, reason) on failure."""
    if load_format != LOAD_FORMAT:
        return original(updater, named_tensors, load_format=load_format)
    head, payload = named_tensors
    bucket = msgspec.msgpack.decode(head, type=Bucket)
    flat, problem = None, ""
    if absent := hooks.missing():
        return False, f"SGLang lacks our {', '.join(absent)}; install the pinned version"
    if problem := _fixed(updater):
        return False, problem
    try:
        flat = as_tensor(bucket, open_payload(bucket, payload))
        problem = damage(bucket, flat)
    except (OSError, ValueError) as error:
        problem = str(error)
    if not (problem := _agreed(problem)):
        try:
            assert flat is not None
            if torch.cuda.is_initialized():  # a running step may still read the old weights
                torch.cuda.synchronize()
            _load(updater.get_model(), unpack(bucket, flat))
            if flat.is_cuda:  # the sender may reuse the memory after this function returns
                torch.cuda.synchronize(flat.device)
        except Exception as error:  # SGLang's loaders raise errors of any class
            problem = f"{type(error).__name__}: {error}"
        problem = _agreed(problem)
    return not problem, problem or "loaded"


def _load(model: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Load tensors. SGLang joins both projections to latents (DeepSeek-V3) if one call has them,
    and else drops them; here, each is copied to its rows, because buckets may divide them."""
    params, others = dict(model.named_parameters()), []
    for name, tensor in tensors:
        joined = params.get(_PROJECTION.sub(".fused_qkv_a_proj_with_mqa.weight", name))
        if joined is None or name in params:
            others.append((name, tensor))
            continue
        is_query = name.endswith(".q_a_proj.weight")
        rows = joined.data[: len(tensor)] if is_query else joined.data[-len(tensor) :]
        rows.copy_(tensor)
    model.load_weights(others)


def _fixed(updater: Any) -> str:
    """Return why SGLang cannot load weights with this model and these settings; "" if it can. The
    checks are those of SGLang's own loaders. The result is the same on all ranks."""
    from sglang.srt.model_executor.model_runner_components import weight_updater

    try:
        updater._assert_weight_cache_inactive("update_weights_from_tensor")
    except RuntimeError as error:
        return str(error)
    return weight_updater._unsupported_derived_weight_cache_error(updater.get_model()) or ""


def _agreed(problem: str) -> str:
    """Return the first non-empty `problem` of all ranks; "" if no rank has a problem. All ranks get
    the same result, because only rank 0 replies for the engine."""
    group = get_parallel().tp_group
    if group.world_size == 1:
        return problem
    problems: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(problems, problem, group=group.cpu_group)
    return next((f"rank {i} of the engine: {p}" for i, p in enumerate(problems) if p), "")

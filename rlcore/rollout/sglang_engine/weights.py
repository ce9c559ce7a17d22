"""A bucket of weights on its way into SGLang's model: `encode` in the engine's process, `take` in
every scheduler.

The scheduler opens the payload itself, so a bucket in shared memory is read where it lies, and
checks it where it arrives. Ranks take a bucket together or not at all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import MultiprocessingSerializer

from rlcore.records import Bucket
from rlcore.rollout.refusals import damage
from rlcore.rollout.sglang_engine import hooks
from rlcore.utils.buckets import as_tensor, open_payload, unpack

LOAD_FORMAT = "rlcore"


def encode(bucket: Bucket, payloads: Sequence[bytes | memoryview]) -> list[bytes]:
    """One message per tensor-parallel rank."""
    head = msgspec.msgpack.encode(bucket)
    return [MultiprocessingSerializer.serialize((head, bytes(payload))) for payload in payloads]


def take(
    original: Callable[..., tuple[bool, str]],
    updater: Any,
    named_tensors: Any,
    load_format: str | None = None,
) -> tuple[bool, str]:
    """Around SGLang's `WeightUpdater.update_weights_from_tensor`; (False, sentence) on failure."""
    if load_format != LOAD_FORMAT:
        return original(updater, named_tensors, load_format=load_format)
    head, payload = named_tensors
    bucket = msgspec.msgpack.decode(head, type=Bucket)
    flat, problem = None, ""
    if absent := hooks.missing():
        return False, f"SGLang did not take our {', '.join(absent)}; is it another version?"
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
            if torch.cuda.is_initialized():  # no step may still read what is overwritten
                torch.cuda.synchronize()
            updater.get_model().load_weights(unpack(bucket, flat))
            if flat.is_cuda:  # it is the sender's again when this returns
                torch.cuda.synchronize(flat.device)
        except Exception as error:  # SGLang's loaders raise anything
            problem = f"{type(error).__name__}: {error}"
        problem = _agreed(problem)
    return not problem, problem or "loaded"


def _fixed(updater: Any) -> str:
    """Why this SGLang cannot take weights at all, as its own ways of loading ask first; the same on
    all ranks."""
    from sglang.srt.model_executor.model_runner_components import weight_updater

    try:
        updater._assert_weight_cache_inactive("update_weights_from_tensor")
    except RuntimeError as error:
        return str(error)
    return weight_updater._unsupported_derived_weight_cache_error(updater.get_model()) or ""


def _agreed(problem: str) -> str:
    """The first rank's problem, the same on all; only rank 0 answers for the engine."""
    group = get_parallel().tp_group
    if group.world_size == 1:
        return problem
    problems: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(problems, problem, group=group.cpu_group)
    return next((f"rank {i} of the engine: {p}" for i, p in enumerate(problems) if p), "")

"""Checks of requests and weight buckets, with the same error messages in every engine."""

from collections.abc import Collection

from torch import Tensor

from rlcore.ops.reshard import checksum
from rlcore.protocols import Tag
from rlcore.records import Bucket, Request, Sampling
from rlcore.utils.errors import ConfigError


def check_request(request: Request, *, vocab: int, max_tokens: int, cache_tokens: int) -> None:
    """Raise ValueError or ConfigError if the engine cannot run the request. `max_tokens`: the
    engine's longest sequence. `cache_tokens`: the engine's cache size in tokens; 0: unchecked."""
    where, length = f"request {request.id}", len(request.prompt)
    check_sampling(where, request.sampling)
    if length < 1:
        raise ValueError(f"{where}: the prompt is empty")
    wanted = f"{where}: {length} prompt tokens and {request.sampling.max_tokens} to generate"
    if length + request.sampling.max_tokens > max_tokens:
        raise ValueError(f"{wanted} exceed the engine's {max_tokens} tokens; shorten one of them")
    if cache_tokens and length + request.sampling.max_tokens > cache_tokens:
        raise ConfigError(f"{wanted} exceed --rollout.kv_cache_tokens {cache_tokens}; raise it")
    if request.prompt.min() < 0 or request.prompt.max() >= vocab:
        raise ValueError(f"{where}: has a token outside the vocabulary of {vocab}")
    part = request.resume
    if part is None:
        return
    if not len(part.tokens) == len(part.logps) == len(part.versions):
        raise ValueError(f"{where}: tokens, logps and versions to resume differ in length")
    if part.drafted is not None and len(part.drafted) != len(part.tokens):
        raise ValueError(f"{where}: tokens and their drafted flags to resume differ in length")
    if part.routes is not None and len(part.routes) > length + len(part.tokens):
        raise ValueError(f"{where}: has routes of more tokens than it resumes with")
    if len(part.tokens) >= request.sampling.max_tokens:
        raise ValueError(
            f"{where}: resumes with {len(part.tokens)} of at most {request.sampling.max_tokens} "
            "tokens, so nothing is left to generate"
        )
    if len(part.tokens) and int(part.tokens[-1]) in request.sampling.stop_ids:
        raise ValueError(f"{where}: its tokens to resume end with a stop token, so it is complete")


def check_sampling(where: str, sampling: Sampling) -> None:
    """Raise ValueError if a sampling setting is out of range; `where` begins the message."""
    if not 0 <= sampling.temperature < float("inf"):
        raise ValueError(f"{where}: temperature {sampling.temperature}: must be 0 (greedy) or more")
    if sampling.top_k < 0:
        raise ValueError(f"{where}: top_k {sampling.top_k}: must be 0 (all tokens) or more")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"{where}: top_p {sampling.top_p}: must be above 0, at most 1")
    if not 0 <= sampling.min_p <= 1:
        raise ValueError(f"{where}: min_p {sampling.min_p}: must be from 0 to 1")
    if sampling.max_tokens < 1:
        raise ValueError(f"{where}: max_tokens {sampling.max_tokens}: must be at least 1")


def check_tags(tags: Collection[Tag]) -> None:
    """Raise ValueError if a memory tag is unknown."""
    for tag in tags:
        if tag not in ("weights", "kv_cache"):
            raise ValueError(f"tag {tag}: must be weights or kv_cache")


def damage(bucket: Bucket, flat: Tensor) -> str:
    """Compare a bucket's bytes with its checksum. Return an error message; "" if they match."""
    found = checksum(flat)
    if found == bucket.checksum:
        return ""
    first = bucket.tensors[0].name if bucket.tensors else "no tensor"
    return (
        f"bucket of {bucket.num_bytes} bytes from {first} on changed on its way: "
        f"checksum {found:#x} instead of {bucket.checksum:#x}; send all weights again"
    )


def gap(missing: Collection[str]) -> str:
    """Return the error message for a weight update that lacks the tensors in `missing`."""
    names = sorted(missing)
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"{len(names)} tensors are missing: {shown}; send all weights"

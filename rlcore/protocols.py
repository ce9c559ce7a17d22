"""Protocols between the trainer and engines, learners, weight channels, rewards and phase gates.

The protocol of environments is in `envs/kind.py`, which must not import torch. Each protocol has
one production implementation and at least one small one; `tests/contracts/` runs the same suite
over all of them. Nothing here imports a backend.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from rlcore.records import (
    AnyEvent,
    Bucket,
    History,
    Prompt,
    Request,
    RequestId,
    RewardResult,
    Sample,
    Shard,
)
from rlcore.tensors import Batch, Loss, ValueLoss

PauseMode = Literal["in_place", "recompute", "abort"]
Tag = Literal["weights", "kv_cache"]
Part = Literal["weights", "optimizer", "gradients"]
PARTS: tuple[Part, ...] = ("weights", "optimizer", "gradients")


@runtime_checkable
class Engine(Protocol):
    """One rollout engine: token ids in, samples out. All calls come from one thread."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raise ValueError if a prompt is longer than the engine supports."""

    def abort(self, ids: Collection[RequestId]) -> None:
        """Stop requests; each comes back as an `Aborted` event with its partial sample. Unknown or
        finished ids are ignored."""

    def poll(self, timeout_s: float) -> list[AnyEvent]:
        """Return the events since the last call; wait up to `timeout_s` for the first one."""

    def pause(self, mode: PauseMode) -> None:
        """Stop decoding. `in_place` keeps the cache, `recompute` drops it and prefills again on
        resume, `abort` ends every request with an `Aborted` event."""

    def resume(self) -> None:
        """Continue decoding after `pause`."""

    def begin_load(self, version: int) -> None:
        """Begin a weight update. Until `end_load` succeeds, the engine refuses to decode."""

    def load_bucket(self, bucket: Bucket, payloads: Sequence[bytes | memoryview]) -> None:
        """Load one bucket of weights, given one payload per tensor-parallel rank of the engine."""

    def end_load(self) -> None:
        """Finish the weight update: tokens from now on carry the new version. If tensors are
        missing, raise RuntimeError with their names."""

    def sleep(self, tags: Collection[Tag]) -> None:
        """Release the memory of these parts. The engine must be idle or paused."""

    def wake(self, tags: Collection[Tag]) -> None:
        """Allocate the memory again; its contents are undefined until the next weight update."""

    def resize(self, tp: int) -> None:
        """Change the tensor-parallel size; called on every rank at a step boundary. Afterwards the
        engine has no weights and may still be starting. Raise ValueError if `tp` is unsupported."""

    def remember(self, histories: Sequence[History]) -> None:
        """Store earlier responses as draft source; engines that do not draft ignore them."""

    @property
    def failure(self) -> str:
        """Reason of the engine's failure; empty while the engine works. `poll` reports a failure as
        `Down`."""

    def fail(self, reason: str) -> None:
        """Mark the engine as failed and end it, because something that it depends on has failed."""

    def restart(self) -> None:
        """Start the engine again. It has no requests and no weights then."""

    def is_starting(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the start; return whether the engine is still starting."""

    def close(self) -> None:
        """End the engine and every process that it started. Idempotent."""


class WeightReceiver(Protocol):
    """The part of `Engine` that a weight update calls."""

    def begin_load(self, version: int) -> None: ...

    def load_bucket(self, bucket: Bucket, payloads: Sequence[bytes | memoryview]) -> None: ...

    def end_load(self) -> None: ...

    @property
    def failure(self) -> str: ...


class InProcess:
    """Health methods of an engine in its caller's process: it fails only with that process."""

    failure = ""

    def fail(self, reason: str) -> None:
        """Raise RuntimeError: the engine cannot end without its process."""
        raise RuntimeError(f"an engine in this process cannot be stopped separately: {reason}")

    def restart(self) -> None:
        """Raise RuntimeError: the engine cannot restart without its process."""
        raise RuntimeError("an engine in this process cannot be restarted separately")

    def is_starting(self, timeout_s: float) -> bool:
        """Return False: a constructed engine has started."""
        return False


class Learner(Protocol):
    """The model in training.

    Unless stated otherwise, a call is collective over the train ranks; `accumulate` is collective
    over one model-parallel group only. A `Batch` is the shard of the caller's data-parallel rank.
    A critic is a learner with a value head: it has `values` instead of `logprobs`, `reference` and
    `export`. Calling a method that a learner lacks raises RuntimeError."""

    model_parallel_groups: Sequence[Sequence[int]]
    """Global ranks of each model-parallel group, by data-parallel rank; a group gets one batch."""

    def logprobs(self, batch: Batch, model: Literal["actor", "reference"] = "actor") -> Tensor:
        """Return the log-prob of every token: [T] float32 on the CPU, valid on every rank."""

    def reference(self) -> AbstractContextManager[None]:
        """Keep the reference weights loaded over many calls of `logprobs(batch, "reference")`. No
        other method may be called inside."""

    def values(self, batch: Batch) -> Tensor:
        """Return the critic's value before each token is sampled: [T] float32 on the CPU, valid on
        every rank."""

    def accumulate(self, batch: Batch, loss: Loss | ValueLoss) -> None:
        """Add the gradient of sum(per_token * mask * weight) over this batch. Local to one
        model-parallel group: no data-parallel communication. A critic takes a `ValueLoss`."""

    def kept(self) -> tuple[int, int]:
        """Return the numbers of tokens and of sequences that the loss has kept in its mask since
        the last `apply`, over all ranks."""

    def apply(self, normaliser: float) -> dict[str, float]:
        """Reduce the accumulated gradients once over the data-parallel ranks, divide by
        `normaliser` (the global count), clip, step, zero. Returns `grad_norm`, `lr` and the global
        means of the loss's metrics since the last call."""

    def discard(self) -> None:
        """Discard the accumulated gradients and metrics without an optimizer step."""

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights under Hugging Face names, one full tensor at a time on every rank.
        Collective: every rank must exhaust the iterator."""

    def shards(self) -> Iterator[tuple[Shard, Tensor]]:
        """Yield this rank's shards of the weights; not collective. A tensor has the elements of its
        shard in order, in any shape; where possible it is a view of the live weights. Shards of two
        ranks are equal or disjoint, and all shards together cover all weights."""

    def offload(self, parts: Collection[Part] = PARTS) -> None:
        """Move these parts off the accelerator. Idempotent. `export` needs only the weights on it,
        `save` needs weights and optimizer."""

    def onload(self, parts: Collection[Part] = PARTS) -> None:
        """Move these parts back to the accelerator; gradients come back as zeros."""

    def resident_bytes(self) -> dict[Part, int]:
        """Return the bytes that each part occupies on the learner's device."""

    def save(self, path: Path) -> None:
        """Write a checkpoint of model and optimizer. Collective."""

    def load(self, path: Path) -> None:
        """Read a checkpoint of `save`, which may come from another layout. Collective."""


class WeightChannel(Protocol):
    """Carries the learner's weights to the engines.

    A push (weight update) succeeds on all ranks or fails on all of them. The old weights cannot be
    restored: if a push fails, every engine that had begun to load refuses to decode until a later
    push succeeds. If an engine fails during a push, its rank continues the push without it."""

    def update_weights(
        self, learner: Learner | None, engine: WeightReceiver | None, version: int
    ) -> dict[str, float]:
        """Update the engines' weights. Collective: every rank calls it with its own learner and
        engine, or None for either.

        Returns figures by name: `bytes` sent to one engine; `time_s`; `transient_gb`, the peak
        memory of this rank for the push, besides weights and engine. With several sites there is
        also `slow_bytes`, the bytes that crossed between sites, summed over all links.

        Raises:
            RuntimeError, TimeoutError: the push failed on some rank. All ranks raise the same
                message, which names the cause and, if known, bucket, rank and peer.
        """

    def resize(self, tp: int) -> None:
        """Set the engines' tensor-parallel size from the next push on. Every rank calls it."""


class Reward(Protocol):
    """Reward function of one sample. It runs in a child process, so it may block, crash or loop."""

    def score(self, sample: Sample, prompt: Prompt, text: str) -> RewardResult:
        """Return the reward; `text` is the decoded response without special tokens."""


class Scorer(Protocol):
    """Interface of a rank's reward service to its rollout worker. No call blocks."""

    @property
    def num_pending(self) -> int: ...

    @property
    def room(self) -> int:
        """Number of samples that `submit` accepts now."""

    def submit(self, id: RequestId, sample: Sample, prompt: Prompt, text: str) -> None: ...

    def poll(self, timeout_s: float) -> list[tuple[RequestId, RewardResult]]: ...

    def cancel(self, ids: Collection[RequestId]) -> None: ...

    def learn(self, reference_latency: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class PhaseGate(Protocol):
    """Permission to run a phase on hardware that several jobs share."""

    def phase(self, name: str, resident: object | None = None) -> AbstractContextManager[None]:
        """Wait for the permit on entry; release the hardware on exit."""

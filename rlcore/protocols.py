"""Protocols between the trainer and engines, learners, weight channels, rewards and phase gates.

The protocol of environments is in `envs/kind.py`, because environments must not import torch. Each
protocol has a production implementation and at least one small implementation. `tests/contracts/`
tests engines, environments and rewards with one suite each. This module imports no backend.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
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
    """Rollout engine that turns requests (token ids) into samples. Calls come from one thread."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raise ValueError if a prompt is longer than the engine supports."""

    def abort(self, ids: Collection[RequestId]) -> None:
        """Stop requests; for each, `poll` returns an `Aborted` event with the partial sample.
        Ignore unknown ids and finished requests."""

    def poll(self, timeout_s: float) -> list[AnyEvent]:
        """Return the events since the previous call; wait up to `timeout_s` for the first event."""

    def pause(self, mode: PauseMode) -> None:
        """Stop decoding. Mode `in_place` keeps the KV cache. `recompute` drops the KV cache, and
        `resume` prefills again. `abort` ends every request with an `Aborted` event."""

    def resume(self) -> None:
        """Continue decoding after `pause`."""

    def begin_load(self, version: int) -> None:
        """Begin a weight update. Until `end_load` succeeds, the engine refuses to decode."""

    def load_bucket(self, bucket: Bucket, payloads: Sequence[bytes | memoryview]) -> None:
        """Load one bucket of weights, given one payload per tensor-parallel rank of the engine."""

    def send_bucket(
        self, bucket: Bucket, payloads: Sequence[bytes | memoryview]
    ) -> Callable[[], None] | None:
        """Begin `load_bucket` and return a function that waits for its end and raises its error, or
        None if the bucket is loaded. Buckets are loaded in order; payloads stay readable meanwhile.
        """

    def end_load(self) -> None:
        """Finish the weight update: tokens generated from now on have the new version. If tensors
        are missing, raise RuntimeError with the names of the tensors."""

    def sleep(self, tags: Collection[Tag]) -> None:
        """Free the memory of the parts in `tags`. The engine must be idle or paused."""

    def wake(self, tags: Collection[Tag]) -> None:
        """Allocate the memory of `tags` again; weights are undefined until a weight update."""

    def resize(self, tp: int) -> None:
        """Change the tensor-parallel size; call on every rank between steps. Afterwards the engine
        has no weights and may still be starting. Raise ValueError if `tp` is unsupported."""

    def remember(self, histories: Sequence[History]) -> None:
        """Store earlier responses as draft source; do nothing if the engine does not draft."""

    @property
    def failure(self) -> str:
        """Reason why the engine failed; empty while the engine works. `poll` reports a failure as a
        `Down` event."""

    def fail(self, reason: str) -> None:
        """Mark the engine as failed and terminate it, because another part of it has failed."""

    def restart(self) -> None:
        """Start the engine again, without requests and weights."""

    def is_starting(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the engine's start; return whether it is still starting."""

    def close(self) -> None:
        """Terminate the engine and all processes that it started. Idempotent."""


class WeightReceiver(Protocol):
    """Methods of `Engine` that a weight update uses."""

    def begin_load(self, version: int) -> None: ...

    def send_bucket(
        self, bucket: Bucket, payloads: Sequence[bytes | memoryview]
    ) -> Callable[[], None] | None: ...

    def end_load(self) -> None: ...

    @property
    def failure(self) -> str: ...


class _Loader(Protocol):
    """Engine that loads a bucket at once."""

    def load_bucket(self, bucket: Bucket, payloads: Sequence[bytes | memoryview]) -> None: ...


class InProcess:
    """Methods of an engine in the caller's process: health, as it fails only with that process, and
    `send_bucket`, which loads at once."""

    failure = ""

    def send_bucket(
        self: _Loader, bucket: Bucket, payloads: Sequence[bytes | memoryview]
    ) -> Callable[[], None] | None:
        """Load the bucket before the call returns."""
        self.load_bucket(bucket, payloads)
        return None

    def fail(self, reason: str) -> None:
        """Raise RuntimeError: the engine cannot end without its process."""
        raise RuntimeError(f"an engine in this process cannot be stopped separately: {reason}")

    def restart(self) -> None:
        """Raise RuntimeError: the engine cannot restart without its process."""
        raise RuntimeError("an engine in this process cannot be restarted separately")

    def is_starting(self, timeout_s: float) -> bool:
        """Return False: the engine has started once it is constructed."""
        return False


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """Files that one rank has written to a folder."""

    checksums: Mapping[str, int]
    """CRC-32 of each file's contents, by name."""
    seconds: float


class Learner(Protocol):
    """The model that is trained: an actor, or a critic with a value head.

    Unless stated otherwise, a call is collective over the train ranks; `accumulate` is collective
    over one model-parallel group only. A `Batch` is the data of the caller's data-parallel rank. A
    critic has `values` instead of `logprobs`, `reference` and `export`. If a learner lacks a
    method, calling the method raises RuntimeError."""

    model_parallel_groups: Sequence[Sequence[int]]
    """Global ranks of each model-parallel group, by data-parallel rank; one batch per group."""

    def logprobs(self, batch: Batch, model: Literal["actor", "reference"] = "actor") -> Tensor:
        """Return the log-prob of every token: [T] float32 on the CPU, valid on every rank."""

    def logprobs_and_routes(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the log-probs of `logprobs`, and the experts that every layer has chosen for every
        token: [T, layers * K] int16 on the CPU, valid on every rank."""

    def logprobs_and_squares(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the log-probs of `logprobs`, and the log of the sum of squared probabilities of
        all tokens of the vocabulary (`Batch.log_sum_pi_squared`): [T] each, valid on every rank."""

    def reference(self) -> AbstractContextManager[None]:
        """During the block, keep the reference weights loaded for repeated `logprobs(batch,
        "reference")`. No other method may be called in the block."""

    def values(self, batch: Batch) -> Tensor:
        """Return the critic's value before each token is sampled: [T] float32 on the CPU, valid on
        every rank."""

    def begin_update(self, num_tokens: int, normaliser: float) -> None:
        """Announce the number of tokens that this data-parallel rank will accumulate, and the
        `normaliser` of `apply`. Only losses of MoE routers need the call."""

    def accumulate(self, batch: Batch, loss: Loss | ValueLoss) -> None:
        """Add the gradient of sum(loss per token * mask * weight) over this batch, within one
        model-parallel group: no data-parallel communication. A critic needs a `ValueLoss`."""

    def kept(self) -> tuple[int, int]:
        """Return the number of tokens that the loss has kept since the previous `apply`, and the
        number of sequences with a kept token, over all ranks. The rows of one sample are one
        sequence."""

    def apply(self, normaliser: float) -> dict[str, float]:
        """Reduce the accumulated gradients over the data-parallel ranks, divide by `normaliser`
        (the global count), clip, and make an optimizer step. Return `grad_norm`, `lr` and the
        global means of the loss's metrics since the previous `apply`."""

    def discard(self) -> None:
        """Discard the accumulated gradients and metrics without an optimizer step."""

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights under Hugging Face names, one full tensor at a time on every rank.
        Collective: every rank must exhaust the iterator."""

    def export_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the LoRA adapters under PEFT's names, in full on every rank. Collective: every rank
        must exhaust the iterator."""

    def shards(self) -> Iterator[tuple[Shard, Tensor]]:
        """Yield this rank's shards of the weights; not collective. A tensor has its shard's
        elements in order, in any shape, and is a view of the live weights where possible. Shards of
        two ranks are equal or disjoint, and all shards together cover all weights."""

    def adapter_shards(self) -> Iterator[tuple[Shard, Tensor]]:
        """Yield this rank's shards of the LoRA adapters under PEFT's names, as `shards` does."""

    def offload(self, parts: Collection[Part] = PARTS) -> None:
        """Move `parts` off the accelerator. Idempotent. `export` needs only the weights on the
        accelerator; `save` needs weights and optimizer there."""

    def onload(self, parts: Collection[Part] = PARTS) -> None:
        """Move `parts` back to the accelerator; gradients become zeros."""

    def resident_bytes(self) -> dict[Part, int]:
        """Return the bytes that each part occupies on the learner's device."""

    def save(self, path: Path) -> None:
        """Write a checkpoint of model and optimizer. Collective."""

    def save_async(self, path: Path, then: Callable[[WrittenFiles], None]) -> Future[WrittenFiles]:
        """Copy model and optimizer to host memory, and return while they are written to the new
        folder `path`. `then` is called on a thread with this rank's written files. If an earlier
        call is still writing, wait for it first. Raise MemoryError on all ranks if one has no
        memory for the copy. Collective."""

    def load(self, path: Path) -> None:
        """Read a checkpoint of `save`, possibly under another parallel layout. Collective."""


class WeightChannel(Protocol):
    """Channel that carries the learner's weights to the engines.

    A weight update succeeds on all ranks or fails on all ranks. If it fails, engines that had begun
    to load cannot restore the old weights, so they refuse to decode until a later update succeeds.
    If an engine fails during the update, its rank continues without the engine."""

    def update_weights(
        self, learner: Learner | None, engine: WeightReceiver | None, version: int
    ) -> dict[str, float]:
        """Update the engines' weights. Collective: every rank passes its own learner and engine, or
        None if it has no learner or no engine.

        Returns metrics by name: `bytes` (sent to one engine), `time_s`, `transient_gb` (this rank's
        peak memory for the update, besides weights and engine). With several sites (node groups)
        also `slow_bytes` (bytes sent between sites, summed over all links).

        Raises:
            RuntimeError, TimeoutError: the weight update failed on some rank. All ranks raise the
                same message, which names the cause and, if known, bucket, rank and peer.
        """

    def resize(self, tp: int) -> None:
        """Set the engines' tensor-parallel size for later weight updates; call on every rank."""


class Reward(Protocol):
    """Reward function. It runs in a child process, so it may block, crash or loop forever."""

    def score(self, sample: Sample, prompt: Prompt, text: str) -> RewardResult:
        """Return the reward; `text` is the decoded response without special tokens."""


class Scorer(Protocol):
    """Reward service of a rank, as seen by the rollout worker. Only `poll` may wait."""

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
    """Gate that gives a job permission to run a phase on hardware that several jobs share."""

    def phase(self, name: str, resident: object | None = None) -> AbstractContextManager[None]:
        """Wait for the permit when the block starts, and release the hardware when it ends."""

"""The seams: what the trainer knows of engines, learners, weight channels, rewards, phases. That
of environments is `envs/kind.py`, which knows no torch.

Each has one production implementation and at least one small one; `tests/contracts/` runs the same
suite over all of them. Nothing here imports a backend.
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
    """One replica of a sampler: token ids in, samples out. Calls come from one thread."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. A prompt longer than the engine takes raises ValueError."""

    def abort(self, ids: Collection[RequestId]) -> None:
        """Stop requests; each comes back as an `Aborted` event with its partial sample. Unknown or
        finished ids are ignored."""

    def poll(self, timeout_s: float) -> list[AnyEvent]:
        """Events since the last call; waits up to `timeout_s` for the first one."""

    def pause(self, mode: PauseMode) -> None:
        """Stop decoding. `in_place` keeps the cache, `recompute` drops it and prefills again on
        resume, `abort` ends every request with an `Aborted` event."""

    def resume(self) -> None:
        """Go on after `pause`."""

    def begin_load(self, version: int) -> None:
        """New weights are coming. Until `end_load` succeeds the engine refuses to decode."""

    def load_bucket(self, bucket: Bucket, payloads: Sequence[bytes | memoryview]) -> None:
        """One piece of the weights, one payload per tensor-parallel rank of the engine."""

    def end_load(self) -> None:
        """All weights are in: tokens from now on carry the new version. Raises RuntimeError naming
        the tensors that did not come."""

    def sleep(self, tags: Collection[Tag]) -> None:
        """Give the memory of these parts back. Needs an idle or paused engine."""

    def wake(self, tags: Collection[Tag]) -> None:
        """Take memory again; contents are undefined until weights are pushed."""

    def relayout(self, tp: int) -> None:
        """Change the tensor-parallel size at a step boundary, on every rank; ValueError where it
        cannot. The engine has no weights then, and may still be starting."""

    def remember(self, histories: Sequence[History]) -> None:
        """Earlier responses, for drafting; engines that do not draft ignore them."""

    @property
    def failure(self) -> str:
        """Why the engine has failed; empty while it works. `poll` reports a failure as `Down`."""

    def fail(self, reason: str) -> None:
        """End the engine, since something that it needs has failed."""

    def restart(self) -> None:
        """Start the engine again, without requests and weights."""

    def is_starting(self, timeout_s: float) -> bool:
        """Whether the engine has neither started nor failed after a wait of up to `timeout_s`."""

    def close(self) -> None:
        """End the engine and what it started. Safe to call twice."""


class Loads(Protocol):
    """The part of `Engine` that a push speaks to."""

    def begin_load(self, version: int) -> None: ...

    def load_bucket(self, bucket: Bucket, payloads: Sequence[bytes | memoryview]) -> None: ...

    def end_load(self) -> None: ...

    @property
    def failure(self) -> str: ...


class InProcess:
    """Health of an engine that runs in its caller's process and fails only together with it."""

    failure = ""

    def fail(self, reason: str) -> None:
        """Raise RuntimeError: the process would have to end."""
        raise RuntimeError(f"an engine in this process cannot be ended alone: {reason}")

    def restart(self) -> None:
        """Raise RuntimeError: the process would have to start again."""
        raise RuntimeError("an engine in this process cannot be started again alone")

    def is_starting(self, timeout_s: float) -> bool:
        """Return False: the engine has started when it is constructed."""
        return False


class Learner(Protocol):
    """The model in training. Every call is collective over the train ranks (`accumulate` over one
    model replica only); a `Batch` is the shard of the caller's data-parallel rank. A learner with a
    value head, a critic, has `values` where the others have `logprobs`, `reference` and `export`;
    what it lacks raises RuntimeError."""

    replicas: Sequence[Sequence[int]]
    """Global ranks that get the same batch, for every data-parallel rank."""

    def logprobs(self, batch: Batch, model: Literal["actor", "reference"] = "actor") -> Tensor:
        """[T] float32 on the CPU, valid on every rank."""

    def reference(self) -> AbstractContextManager[None]:
        """Keeps the reference's weights in place for many `logprobs(batch, "reference")`; nothing
        else works inside."""

    def values(self, batch: Batch) -> Tensor:
        """[T] float32 on the CPU, valid on every rank: the critic's, before each token is drawn."""

    def accumulate(self, batch: Batch, loss: Loss | ValueLoss) -> None:
        """Add the gradient of sum(per_token * mask * weight) of this batch. Local to one model
        replica: no data-parallel communication. A critic's loss is a `ValueLoss`."""

    def kept(self) -> tuple[int, int]:
        """Tokens and sequences that the loss left in its mask since the last `apply`, over all
        ranks."""

    def apply(self, normaliser: float) -> dict[str, float]:
        """Reduce the accumulated gradients once over the data-parallel ranks, divide by
        `normaliser` (the global count), clip, step, zero. Returns `grad_norm`, `lr` and the global
        means of the loss's metrics since the last call."""

    def discard(self) -> None:
        """Forget what was accumulated: no step, no metrics."""

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Weights under Hugging Face names, one tensor at a time, full on every rank. Collective:
        every rank must exhaust it."""

    def shards(self) -> Iterator[tuple[Shard, Tensor]]:
        """This rank's own parts of the weights; not collective. The elements of a tensor, in order,
        are those of the part; it is a view of the live weights, of any shape, where it can be.
        Parts of two ranks are equal or do not overlap, and together they are all of the weights."""

    def offload(self, parts: Collection[Part] = PARTS) -> None:
        """Move these parts off the accelerator; twice is once. `export` needs the weights alone,
        `save` all but the gradients."""

    def onload(self, parts: Collection[Part] = PARTS) -> None:
        """Bring them back; gradients come back as zeros."""

    def resident_bytes(self) -> dict[Part, int]:
        """What each part takes on the learner's device."""

    def save(self, path: Path) -> None:
        """Write model and optimizer; collective."""

    def load(self, path: Path) -> None:
        """Read what `save` wrote, under any layout; collective."""


class WeightChannel(Protocol):
    """Carries the learner's weights to the engines.

    A push succeeds on all ranks or fails on all of them. There is no way back to the weights
    before: where it fails, every engine that had begun to load refuses to decode until a push
    succeeds. An engine that dies in a push ends nothing: its rank goes on without it."""

    def push(self, learner: Learner | None, engine: Loads | None, version: int) -> dict[str, float]:
        """Collective: every rank enters, with its own learner and engine or None.

        Returns figures by name: `bytes` that went to one engine, `time_s`, `transient_gb` (memory
        that this rank took for it at most, beside weights and engine), and `slow_bytes` that
        crossed from one site to another, all links together, where there are sites.

        Raises:
            RuntimeError, TimeoutError: it failed on some rank; the same sentence on all of them
                names the cause, with bucket, rank and peer where they are known.
        """

    def relayout(self, tp: int) -> None:
        """From the next push on the engines have this tensor-parallel size; every rank says so."""


class Reward(Protocol):
    """Scores one sample; runs in a child process, so it may block, crash or loop."""

    def score(self, sample: Sample, prompt: Prompt, text: str) -> RewardResult:
        """`text` is the decoded response without special tokens."""


class Scorer(Protocol):
    """What an agent needs of the reward service of its rank; no call blocks."""

    @property
    def num_pending(self) -> int: ...

    @property
    def room(self) -> int:
        """Samples that `submit` takes now."""

    def submit(self, id: RequestId, sample: Sample, prompt: Prompt, text: str) -> None: ...

    def poll(self, timeout_s: float) -> list[tuple[RequestId, RewardResult]]: ...

    def cancel(self, ids: Collection[RequestId]) -> None: ...

    def learn(self, anchors: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class PhaseGate(Protocol):
    """Lets a phase run when its turn on the shared hardware has come."""

    def phase(self, name: str, resident: object | None = None) -> AbstractContextManager[None]:
        """Enter when permitted, leave the hardware afterwards."""

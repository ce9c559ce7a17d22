"""Move engine and learner of one rank on and off its accelerator.

The training loops announce each phase to a `Device`, which moves the memory. Strategies:

    Device          keeps engine and learner on the accelerator (a rank may have only one)
    OffloadDevice   --train.offload: engine and learner use the accelerator in turn
    SharedDevice    --mux.url: other jobs use the accelerator between phases (shared_device.py)

    state             on the accelerator with OffloadDevice
    build             learner; the engine sleeps
    update_weights    learner's weights, engine's weights
    gen               engine: weights, cache
    train             learner: weights, gradients, optimizer
    save_checkpoint   learner: weights, optimizer; engine: weights
    away              nothing (SharedDevice between two permits)

If an engine fails, its requests move to other engines; the next weight update restarts the engine.
"Collective" without ranks means: over the default group, the ranks of one role (train or rollout).
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from rlcore.protocols import Engine, Learner, Part, Tag, WeightChannel
from rlcore.sync.host_cache import HostWeightCache
from rlcore.trainer.memory import Residency
from rlcore.trainer.progress import Progress, Ranks
from rlcore.trainer.sizes import EngineSizes
from rlcore.utils import collective
from rlcore.utils.log import log
from rlcore.utils.spans import Spans
from rlcore.utils.waits import waiting

State = Literal["build", "update_weights", "gen", "train", "save_checkpoint", "away"]
NEXT: dict[State, tuple[State, ...]] = {
    "build": ("train", "away"),
    "train": ("update_weights", "away"),
    "update_weights": ("gen",),
    "gen": ("gen", "train", "update_weights", "save_checkpoint"),
    "save_checkpoint": ("gen", "away"),
    "away": ("gen", "train", "update_weights", "save_checkpoint", "away"),
}
"""States that may follow each state. An engine repair leads from `gen` to `update_weights`."""
ALL: tuple[Tag, ...] = ("weights", "kv_cache")
LOOK_S = 1.0
"""Seconds between two polls of the engines that are still starting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Engine, learner and critic of one rank, and the objects with which a `Device` moves them."""

    ranks: Ranks
    engine: Engine | None
    """Engine of this rank; None on a rank that only trains."""
    learner: Learner | None
    """Actor of this rank; None on a rank that only samples."""
    critic: Learner | None = None
    channel: WeightChannel
    restart_engine: Callable[[], None]
    """Function that restarts this rank's failed engine and discards the engine's pending events."""
    sizes: EngineSizes
    memory: Residency | None = None
    """Memory check at every switch between engine and learner; None: no check."""
    progress: Progress
    spans: Spans
    timeout_s: float
    """Maximum seconds for the start of an engine (--cluster.timeout_s)."""

    @property
    def learners(self) -> list[Learner]:
        """Models in training on this rank: actor and critic."""
        return [model for model in (self.learner, self.critic) if model is not None]


class Device:
    """Strategy that keeps engine and learner on the accelerator in all phases."""

    is_shared = False
    """Whether other jobs use the accelerator too."""
    makes_room = False
    """Whether the learner is offloaded before an engine starts, to make room. The engine then
    sleeps until the next weight update."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.state: State = "build"
        self._has_left = False
        """Whether the engine has released its memory before the end of the current rollout."""

    # ---- called by the loops

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run the `with` block as a rollout plus the training on its samples."""
        yield

    @contextmanager
    def generate(self, phase: Literal["rollout", "testing"] = "rollout") -> Iterator[None]:
        """Run the `with` block as a phase in which the engine decodes."""
        self._enter("gen")
        yield

    @contextmanager
    def train(self) -> Iterator[None]:
        """Run the `with` block as a phase in which the learner computes. The caller updates the
        engines' weights before the block ends."""
        self._enter("train")
        yield

    @contextmanager
    def save(self, parts: Collection[Part]) -> Iterator[None]:
        """Run the `with` block as a phase that reads the given parts of the learner. After the
        block, the engine can decode again."""
        self._enter("save_checkpoint")
        yield
        self._enter("gen")

    def update_weights(self, version: int) -> None:
        """Restart failed engines, then update all engines' weights. Collective over all ranks."""
        self._enter("update_weights")
        self._restart_failed()
        self._send_weights(self.parts.engine, version)
        self._enter("gen")

    def repair(self) -> None:
        """If no engine is left during a rollout, restart the failed engines and send the rollout's
        weights to all engines. Collective over all ranks."""
        self.update_weights(self.parts.progress.version)

    def release_engine(self) -> None:
        """Free the memory of this rank's engine during a rollout, when the engine has no requests
        left. If the engine fails during the call, the next weight update restarts it."""
        self._has_left = True

    def load_learner(self, parts: Collection[Part]) -> None:
        """Load the given parts of the actor during a rollout, after `release_engine`."""

    def engine_is_back(self) -> None:
        """Undo `release_engine`, because the engine decodes again or the rollout is over."""
        self._has_left = False

    # ---- start of engines

    def wait_for_engines(self) -> None:
        """Wait until the first engines of the run have started. Collective over all ranks.

        Raises:
            ValueError: this rank's engine refuses its settings, so a restart would not help.
            TimeoutError: an engine has not started in time; the error names its rank.
        """
        self._wait_for_starts("the engines")
        engine = self.parts.engine
        if engine is not None and engine.failure:
            with contextlib.suppress(RuntimeError):  # the weight update restarts the engine
                engine.abort(())

    def resize_engines(self, tp: int) -> None:
        """Restart all engines with tensor-parallel size `tp`, without weights. Collective.

        Raises:
            TimeoutError: an engine has not started in time; the error names its rank.
        """
        p = self.parts
        if p.ranks.rank == 0:
            log.info("rollout engines: tp %d -> %d", p.sizes.now.tp, tp)
        if self.makes_room:
            for learner in p.learners:
                learner.offload()
        if p.engine is not None:
            p.engine.resize(tp)
        p.sizes.change(tp)
        p.channel.resize(tp)
        if p.memory is not None and p.sizes.now.plan is not None:
            p.memory.follow(p.sizes.now.plan)
        self._wait_for_starts("the engines of the new size")
        if self.makes_room:
            self._switch_engine("sleep", ALL)

    def _wait_for_starts(self, engines: str) -> None:
        """Wait until every engine has started or one has failed. Collective over all ranks,
        including ranks without an engine."""
        with waiting(f"waiting for {engines} to start"):
            self._until_started(engines)

    def _until_started(self, engines: str) -> None:
        p = self.parts
        end = time.monotonic() + p.timeout_s
        while True:
            starting = p.engine is not None and p.engine.is_starting(LOOK_S)
            failed = p.engine is not None and not starting and bool(p.engine.failure)
            over = time.monotonic() > end
            late = [float(rank == p.ranks.rank and starting) for rank in range(p.ranks.size)]
            flags = [*late, float(failed), float(over)]
            *late, any_failed, any_over = collective.reduce_floats(flags, group=p.ranks.everyone)
            if not any(late) or any_failed:
                return
            if any_over:
                ranks = ", ".join(str(rank) for rank, flag in enumerate(late) if flag)
                raise TimeoutError(
                    f"--cluster.timeout_s {p.timeout_s:g} exceeded: {engines} not started on rank "
                    f"{ranks}; raise it, or read the logs of these ranks"
                )
            p.spans.alive()

    # ---- used by the strategies

    def _enter(self, state: State) -> None:
        assert state in NEXT[self.state], f"device: {self.state} -> {state}"
        self.state = state

    def _send_weights(self, engine: Engine | HostWeightCache | None, version: int) -> None:
        p = self.parts
        p.progress.sent_weights(version)
        moved = p.channel.update_weights(p.learner, engine, version)
        p.progress.add({f"sync/{name}": value for name, value in moved.items()})
        self._has_left = False

    def _restart_failed(self, *, here: bool = True) -> None:
        """Restart this rank's engine if it has failed; `here=False` ignores a failure on this rank.

        An engine over several ranks is restarted on all its ranks (collective). A starting engine
        reserves all memory that it may use. With `makes_room`, the learner is therefore offloaded
        first, and the engine sleeps until the next weight update.
        """
        p, ranks = self.parts, self.parts.sizes.now.engine_ranks
        why = p.engine.failure if here and p.engine is not None else ""
        anywhere = bool(why)
        if len(ranks) > 1:
            failed = collective.reduce_floats(
                [float(r == p.ranks.rank and bool(why)) for r in range(p.ranks.size)]
            )
            anywhere = any(failed)
            first = [r for r in ranks if failed[r]]
            why = why or (f"the part of the engine on rank {first[0]} has failed" if first else "")
        if p.engine is not None and why:
            log.warning("rank %d: %s; restarting the engine", p.ranks.rank, why)
            for learner in p.learners if self.makes_room else ():
                learner.offload()
            p.restart_engine()
        if self.makes_room and anywhere:
            self._switch_engine("sleep", ALL, here=bool(why))

    def _switch_engine(
        self, way: Literal["sleep", "wake"], tags: Collection[Tag], *, here: bool = True
    ) -> None:
        """Send this rank's engine to sleep or wake it, unless it has failed.

        If an engine spans several ranks, its first rank makes the call for all these ranks
        (collective). Barriers make these ranks wait for each other. `here=False` skips the call.
        """
        spread = len(self.parts.sizes.now.engine_ranks) > 1
        if spread:
            collective.barrier()
        if here:
            self._ask_engine(way, lambda e: (e.sleep if way == "sleep" else e.wake)(tags))
        if spread:
            collective.barrier()

    def _ask_engine(self, what: str, call: Callable[[Engine], None]) -> None:
        """Apply `call` to this rank's engine, unless the engine has failed. If the engine fails
        during the call, log a warning; later calls skip the failed engine."""
        engine = self.parts.engine
        if engine is None or engine.failure:
            return
        try:
            call(engine)
        except RuntimeError as error:
            if not engine.failure:
                raise
            log.warning("rank %d: engine failed at %s: %s", self.parts.ranks.rank, what, error)


class OffloadDevice(Device):
    """Strategy in which engine and learner use the accelerator in turn. Every switch checks the
    memory plan, and raises an error if too little memory was freed."""

    makes_room = True

    @contextmanager
    def train(self) -> Iterator[None]:
        """Send the engine to sleep, then load the learner."""
        if self.state == "build":  # At start-up the learner is loaded and the engine sleeps.
            self._enter("train")
            yield
            return
        self._enter("train")
        with self.parts.spans.phase("sleep_engine"):
            self._switch_engine("sleep", ALL, here=not self._has_left)
        with self.parts.spans.phase("load_learner"):
            self._must_be_free("load_learner")
            for learner in self.parts.learners:
                learner.onload()
            self._measure("load_learner")
        yield

    def update_weights(self, version: int) -> None:
        """Offload the learner except the actor's weights, and send these weights to the engines.
        Then offload the weights too, and allocate the engine's KV cache."""
        p = self.parts
        self._enter("update_weights")
        self._restart_failed()
        if p.learner is not None:
            p.learner.offload(["optimizer", "gradients"])
        if p.critic is not None:
            p.critic.offload()
        if p.learner is not None:
            p.learner.onload(["weights"])
        self._must_be_free("update_weights")
        self._switch_engine("wake", ["weights"])
        self._measure("update_weights")
        self._send_weights(p.engine, version)
        with p.spans.phase("offload_learner"):
            self._offload_learners()
        with p.spans.phase("wake_engine"):
            self._wake_engine()

    @contextmanager
    def save(self, parts: Collection[Part]) -> Iterator[None]:
        """Load `parts` of the learner; the engine keeps its weights and releases its KV cache."""
        self._enter("save_checkpoint")
        with self.parts.spans.phase("save_checkpoint"):
            self._switch_engine("sleep", ["kv_cache"])
            for learner in self.parts.learners:
                learner.onload(parts)
            self._measure("save_checkpoint")
        yield
        with self.parts.spans.phase("save_checkpoint"):
            self._offload_learners()
            self._wake_engine()

    def release_engine(self) -> None:
        super().release_engine()
        self._ask_engine("sleep", lambda engine: engine.sleep(ALL))

    def load_learner(self, parts: Collection[Part]) -> None:
        assert self.parts.learner is not None
        self.parts.learner.onload(parts)

    def _offload_learners(self) -> None:
        for learner in self.parts.learners:
            learner.offload()

    def _wake_engine(self) -> None:
        self._switch_engine("wake", ["kv_cache"])
        self._measure("gen")
        self._enter("gen")

    def _must_be_free(self, phase: Literal["load_learner", "update_weights"]) -> None:
        """Raise RuntimeError if the memory that `phase` loads does not fit."""
        if self.parts.memory is not None:
            self.parts.memory.before(phase, self.parts.learners)

    def _measure(self, phase: str) -> None:
        """Measure the memory at the start of `phase`. Raise RuntimeError if it exceeds the plan."""
        if self.parts.memory is not None:
            self.parts.memory.check(phase, self.parts.learners)
            self.parts.progress.add(self.parts.memory.take())

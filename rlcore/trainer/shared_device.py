"""Move engine and learner on an accelerator that jobs share (--mux.url), with a permit per phase.

See `device.py` for the states and for the methods that the training loops call.
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Literal

from rlcore.protocols import Part, PhaseGate
from rlcore.sync.host_cache import HostWeightCache
from rlcore.trainer.device import ALL, Device, Parts, State
from rlcore.utils import phases


class SharedDevice(Device):
    """Strategy for jobs that share their nodes (--mux.url). Each phase waits for its permit, loads
    its state from host memory, and leaves the accelerator empty. Processes and communicators stay
    alive.

        rollout, eval   engine: cache and weights; the weights come from the host cache
        train, save     learner: weights, optimizer, gradients

    A weight update is part of the training and writes to the host cache, so no phase needs rollout
    nodes and train nodes at once. If every rank samples and trains, a whole step has one permit,
    during which engine and learner are loaded and stored in turn.
    """

    is_shared = True
    makes_room = True

    def __init__(
        self, parts: Parts, gate: PhaseGate, host_cache: HostWeightCache | None, *, colocated: bool
    ):
        """
        Args:
            host_cache: host copy of the engine's weights; None on a rank that only trains.
            colocated: whether every rank samples and trains.
        """
        super().__init__(parts)
        self._gate, self._host_cache, self._colocated = gate, host_cache, colocated

    def leave(self) -> None:
        """Move everything off the accelerator at the end of the start-up."""
        for resident in (EngineState(self), LearnerState(self)):
            resident.store()
        self._enter("away")

    @contextmanager
    def step(self) -> Iterator[None]:
        """If every rank samples and trains, hold one permit for a rollout and its training."""
        if not self._colocated:
            yield
            return
        with self._permit("step", None):
            yield

    @contextmanager
    def generate(self, phase: Literal["rollout", "testing"] = "rollout") -> Iterator[None]:
        """Load the engine, run a rollout or an evaluation, and send the engine to sleep."""
        with self._permit(phase, EngineState(self)), self._on_device("gen"):
            yield

    @contextmanager
    def train(self) -> Iterator[None]:
        """Load the learner, run the training, and move the learner to host memory."""
        with self._permit("train", LearnerState(self)), self._on_device("train"):
            yield

    @contextmanager
    def save(self, parts: Collection[Part]) -> Iterator[None]:
        """Load the learner, save a checkpoint, and move the learner to host memory."""
        with (
            self._permit("save_checkpoint", LearnerState(self)),
            self._on_device("save_checkpoint"),
        ):
            yield

    def update_weights(self, version: int) -> None:
        """Send the weights to the host cache; the engine loads them in its next phase."""
        self._send_weights(self._host_cache, version)

    def repair(self) -> None:
        """Restart the engines with the weights in the host cache, since the learner is
        offloaded."""
        EngineState(self).load()

    def release_engine(self) -> None:
        """Release this node to another job during the tail of a rollout (mux/tail.py)."""
        super().release_engine()
        self._ask_engine("sleep", lambda engine: engine.sleep(ALL))

    @contextmanager
    def _on_device(self, state: State) -> Iterator[None]:
        self._enter(state)
        yield
        self.state = "away"

    @contextmanager
    def _permit(self, name: str, resident: "EngineState | LearnerState | None") -> Iterator[None]:
        """Hold the gate's permit for one phase. Collective over all ranks. Waiting for the permit
        and returning it are timed as one span. Errors of the gate are the same on all ranks."""
        span = partial(self.parts.spans.phase, name if name in phases.BETWEEN else "wait_permit")
        with ExitStack() as stack:
            with span():
                stack.enter_context(self._gate.phase(name, resident))
            yield
            with span():
                stack.close()


class EngineState:
    """Engine as a `Resident` for rollouts; empty on a rank that only trains."""

    def __init__(self, device: SharedDevice) -> None:
        self._device = device

    def load(self) -> None:
        """Restart the engine if it has failed, and wake it with the weights of the last update. If
        the rollout has released this node, do nothing."""
        device = self._device
        host_cache, here = device._host_cache, not device._has_left
        device._restart_failed(here=here)
        device._switch_engine("wake", ["weights"], here=here)
        p = device.parts
        if host_cache is not None and p.sizes.now.engine_ranks[0] == p.ranks.rank and here:
            device._ask_engine("load", host_cache.fill)
        device._switch_engine("wake", ["kv_cache"], here=here)

    def store(self) -> None:
        """Send the engine to sleep; its weights stay in the host cache."""
        device = self._device
        device._switch_engine("sleep", ALL, here=not device._has_left)
        device.engine_is_back()

    @property
    def num_bytes(self) -> int:
        """Bytes of the engine's weights in the host cache."""
        return self._device._host_cache.num_bytes if self._device._host_cache is not None else 0


class LearnerState:
    """Actor and critic as a `Resident` for training; empty on a rank that only samples."""

    def __init__(self, device: SharedDevice) -> None:
        self._learners = device.parts.learners

    def load(self) -> None:
        """Load actor and critic."""
        for learner in self._learners:
            learner.onload()

    def store(self) -> None:
        """Move actor and critic to host memory."""
        for learner in self._learners:
            learner.offload()

    @property
    def num_bytes(self) -> int:
        """Bytes of actor and critic on the accelerator: weights, optimizer, gradients."""
        return sum(sum(learner.resident_bytes().values()) for learner in self._learners)

"""The owner of an accelerator that jobs share (--mux.url): it waits for a permit before each phase.

See `device.py` for the states and for what the loops say.
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Literal

from rlcore.protocols import Part, PhaseGate
from rlcore.sync.shelf import Shelf
from rlcore.trainer.device import ALL, Device, Parts, State


class SharedDevice(Device):
    """Jobs share their nodes (--mux.url): each phase waits for its permit, loads what it needs from
    host memory, and leaves the accelerator empty. Processes and communicators stay alive.

        rollout, eval   engine: weights, from the shelf where the last push left them, and cache
        train, save     learner: weights, optimizer, gradients

    A push is part of the training and ends on the shelf, so no phase needs the nodes of both. If
    every rank samples and trains, a whole step has one permit, and engine and learner are loaded
    and stored within it.
    """

    is_shared = True
    makes_room = True

    def __init__(self, parts: Parts, gate: PhaseGate, shelf: Shelf | None, *, colocated: bool):
        """`shelf`: the weights while the engine is away, on a rank that samples; `colocated`: every
        rank samples and trains."""
        super().__init__(parts)
        self._gate, self._shelf, self._colocated = gate, shelf, colocated

    def leave(self) -> None:
        """Take everything off the accelerator at the end of the start-up."""
        for resident in (EngineState(self), LearnerState(self)):
            resident.store()
        self._enter("away")

    @contextmanager
    def step(self) -> Iterator[None]:
        """One permit for a rollout and its training, if every rank does both."""
        if not self._colocated:
            yield
            return
        with self._permit("step", None):
            yield

    @contextmanager
    def generate(self, phase: Literal["rollout", "eval"] = "rollout") -> Iterator[None]:
        """Between load and store of the engine."""
        with self._permit(phase, EngineState(self)), self._on_device("generate"):
            yield

    @contextmanager
    def train(self) -> Iterator[None]:
        """Between load and store of the learner."""
        with self._permit("train", LearnerState(self)), self._on_device("train"):
            yield

    @contextmanager
    def save(self, parts: Collection[Part]) -> Iterator[None]:
        """Between load and store of the learner."""
        with self._permit("save", LearnerState(self)), self._on_device("save"):
            yield

    def update_weights(self, version: int) -> None:
        """Push to the shelf; the engine takes the weights when it comes back."""
        self._push(self._shelf, version)

    def repair(self) -> None:
        """The learner is away, and its weights are on the shelf."""
        EngineState(self).load()

    def release_engine(self) -> None:
        """The tail of a rollout leaves this node to another job (mux/tail.py)."""
        super().release_engine()
        self._ask_engine("sleep", lambda engine: engine.sleep(ALL))

    @contextmanager
    def _on_device(self, state: State) -> Iterator[None]:
        self._enter(state)
        yield
        self.state = "away"

    @contextmanager
    def _permit(self, name: str, resident: "EngineState | LearnerState | None") -> Iterator[None]:
        """A phase of the gate (W); waiting for it and leaving it are the span of the permit. An
        error of the gate is the same sentence on every rank."""
        span = partial(self.parts.spans.phase, name if name in ("eval", "save") else "turn")
        with ExitStack() as stack:
            with span():
                stack.enter_context(self._gate.phase(name, resident))
            yield
            with span():
                stack.close()


class EngineState:
    """What a rollout needs on the accelerator; nothing on a rank that only trains."""

    def __init__(self, device: SharedDevice) -> None:
        self._device = device

    def load(self) -> None:
        """Wake the engine, started again if it has failed, with the weights of the last push. In
        the middle of a rollout that has left this node there is nothing to wake."""
        device = self._device
        shelf, here = device._shelf, not device._has_left
        device._restart_failed(here=here)
        device._switch_engine("wake", ["weights"], here=here)
        p = device.parts
        if shelf is not None and p.sizes.now.engine_ranks[0] == p.ranks.rank and here:
            device._ask_engine("load", shelf.fill)
        device._switch_engine("wake", ["kv_cache"], here=here)

    def store(self) -> None:
        """The engine sleeps; its weights stay on the shelf."""
        device = self._device
        device._switch_engine("sleep", ALL, here=not device._has_left)
        device.engine_is_back()

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return self._device._shelf.num_bytes if self._device._shelf is not None else 0


class LearnerState:
    """What a training needs on the accelerator; nothing on a rank that only samples."""

    def __init__(self, device: SharedDevice) -> None:
        self._learners = device.parts.learners

    def load(self) -> None:
        """Bring actor and critic back."""
        for learner in self._learners:
            learner.onload()

    def store(self) -> None:
        """Move both to host memory."""
        for learner in self._learners:
            learner.offload()

    @property
    def num_bytes(self) -> int:
        """Bytes of weights, optimizer and gradients."""
        return sum(sum(learner.resident_bytes().values()) for learner in self._learners)

"""Phases of a job that shares its nodes with others (`--mux.url`): each waits for its turn, loads
what it needs from host memory, and leaves the device empty. Processes and communicators stay alive.
A run that has its nodes alone passes here at no cost.

    rollout, eval   the engine: its weights, from the shelf where the last push left them, its cache
    train, save     the learner: weights, optimizer, gradients

A push is part of the training: it ends on the shelf, so that no phase needs the nodes of both.
Where every rank samples and trains, all phases need them: a whole step is one turn, and what engine
and learner need comes and goes within it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from rlcore.records import Group, RequestId, Sample
from rlcore.trainer import phases
from rlcore.trainer.run import Run


@contextmanager
def turn(run: Run, name: str) -> Iterator[None]:
    """One phase, on all ranks. Collective over them. What `run.gate` raises where there is no turn
    is the same sentence on every rank."""
    if run.gate is None:
        yield
        return
    resident = EngineState(run) if name in ("rollout", "eval") else LearnerState(run)
    with _phase(run, name, resident):
        yield


@contextmanager
def whole_step(run: Run) -> Iterator[None]:
    """One turn for a rollout and what is learned from it, where every rank does both."""
    if run.gate is None or run.cfg.cluster.rollout_ranks:
        yield
        return
    with _phase(run, "step", None):
        yield


@contextmanager
def _phase(run: Run, name: str, resident: object | None) -> Iterator[None]:
    """A phase of the gate, whose entrance and exit are the span of the turn."""
    assert run.gate is not None
    span = partial(run.spans.phase, name if name in ("eval", "save") else "turn")
    with ExitStack() as stack:
        with span():
            stack.enter_context(run.gate.phase(name, resident))
        yield
        with span():
            stack.close()


class EngineState:
    """What a rollout needs on the device; nothing on a rank that only trains."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def load(self) -> None:
        """Wake the engine, started again if it has died, with the weights of the last push. In the
        middle of a rollout that has left this node there is nothing to wake."""
        run, here = self._run, not self._has_left
        phases.engine_revives(run, here=here)
        phases.engine_turns(run, "wake", ["weights"], here=here)
        if run.shelf is not None and run.engine_ranks[0] == run.rank and here:
            phases.engine_does(run, "load", run.shelf.fill)
        phases.engine_turns(run, "wake", ["kv_cache"], here=here)

    def store(self) -> None:
        """The engine sleeps; its weights are on the shelf still."""
        here = not self._has_left
        phases.engine_turns(self._run, "sleep", ["weights", "kv_cache"], here=here)
        if self._run.leaver is not None:
            self._run.leaver.has_left = False

    @property
    def _has_left(self) -> bool:
        return self._run.leaver is not None and self._run.leaver.has_left

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        return self._run.shelf.num_bytes if self._run.shelf is not None else 0


class Leaver:
    """Of a rank whose node the tail of a rollout may leave (`--mux.tail_nodes`, mux/tail.py): the
    agent's `Streamer`, which trains nothing."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.has_left = False
        """The node is another job's until the rollout is over."""

    def engine_leaves(self) -> None:
        """The engine goes to sleep."""
        self.has_left = True
        phases.engine_leaves(self._run)

    def train(
        self, groups: Sequence[Group], dp_ranks: Sequence[int], samples: Mapping[RequestId, Sample]
    ) -> None:
        raise AssertionError("who leaves trains nothing")

    def forget(self) -> None:
        """Nothing was trained."""


class LearnerState:
    """What a training needs on the device; nothing on a rank that only samples."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def load(self) -> None:
        """Bring actor and critic back."""
        for learner in self._run.learners:
            learner.onload()

    def store(self) -> None:
        """Both wait in host memory."""
        for learner in self._run.learners:
            learner.offload()

    @property
    def num_bytes(self) -> int:
        """Weights, optimizer, gradients."""
        return sum(sum(learner.resident_bytes().values()) for learner in self._run.learners)

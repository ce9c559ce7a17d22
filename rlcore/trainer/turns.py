"""Phases of a job that shares its nodes with others (`--mux.url`): each waits for its turn, loads
what it needs from host memory, and leaves the device empty. Processes and communicators stay alive.
A run that has its nodes alone passes here at no cost.

    rollout, eval   the engine: its weights, from the shelf where the last push left them, its cache
    train, save     the learner: weights, optimizer, gradients

A push is part of the training: it ends on the shelf, so that no phase needs the nodes of both.
Where every rank samples and trains, all phases need them: a whole step is one turn, and what engine
and learner need comes and goes within it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

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
        """Wake the engine, started again if it has died, with the weights of the last push."""
        run = self._run
        phases.engine_revives(run)
        phases.engine_turns(run, "wake", ["weights"])
        if run.shelf is not None and run.engine_ranks[0] == run.rank:
            phases.engine_does(run, "load", run.shelf.fill)
        phases.engine_turns(run, "wake", ["kv_cache"])

    def store(self) -> None:
        """The engine sleeps; its weights are on the shelf still."""
        phases.engine_turns(self._run, "sleep", ["weights", "kv_cache"])

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        return self._run.shelf.num_bytes if self._run.shelf is not None else 0


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

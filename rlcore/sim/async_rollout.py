"""Simulate asynchronous training on virtual engines, with the shipped controller and sample buffer
and a simulated learner.

Messages take no time. When the learner has trained a batch, all engines pause for `sync_s` seconds,
get the new weights, and continue. Unless `mode` is `in_place`, requests are prefilled again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlcore.records import (
    Abort,
    Aborted,
    AnyCommand,
    AnyEvent,
    Fail,
    Finished,
    Held,
    Hold,
    Holding,
    HoldMode,
    Move,
    Moved,
    Prompt,
    Ready,
    Request,
    Sampling,
    Submit,
    TrainOrder,
    Wanted,
    Work,
    group_of,
    issue_of,
    response_of,
    training_group,
)
from rlcore.rollout.async_controller import AsyncController
from rlcore.sched.roles import Router
from rlcore.sched.router import LeastLoaded
from rlcore.sched.staleness import SampleBuffer
from rlcore.sim.cost import EngineCost
from rlcore.sim.rewards import UNLIMITED, Rewards
from rlcore.sim.round import Engines, SimSettings, partial_of
from rlcore.sim.workload import Workload
from rlcore.trainer.plan import TrainRow


@dataclass(frozen=True, slots=True)
class Update:
    """Timing of one training batch, with the lengths and ages of its responses."""

    seconds: float
    """Seconds between the start of training on the previous batch and on this batch."""
    waited: float
    """Part of `seconds` in which the learner waited for samples."""
    trained: float
    """Part of `seconds` in which the learner trained the previous batch."""
    rows: tuple[TrainRow, ...]
    """Its responses."""
    ages: tuple[int, ...]
    """Age of each response: number of policy versions from its first token to this batch."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the responses."""
        return tuple(row.num_tokens for row in self.rows)


class PromptLengths:
    """Response length by request. The lengths of all responses to a prompt are drawn together."""

    def __init__(self, generator: Workload, samples: int, seed: int) -> None:
        self.generator, self.samples, self.seed = generator, samples, seed
        self._known: dict[str, list[int]] = {}

    def __call__(self, request: Request) -> int:
        group = request.group
        if group not in self._known:
            index = issue_of(group)
            self._known[group] = self.generator.lengths(index, self.samples, self.seed)
        return self._known[group][response_of(request.id)]


class EndlessPrompts:
    """Endless source of prompts, each with `samples` responses."""

    def __init__(self, samples: int, prompt_tokens: int = 300, first: int = 0) -> None:
        self._samples, self._issued = samples, first
        self._tokens = np.zeros(prompt_tokens, np.int32)

    def __call__(self, count: int) -> list[Work]:
        first, self._issued = self._issued, self._issued + count
        return [
            Work(
                id=training_group(i),
                prompt=Prompt(index=i, dataset="s", tokens=self._tokens),
                num_samples=self._samples,
                sampling=Sampling(max_tokens=1 << 20),
            )
            for i in range(first, self._issued)
        ]


class SimAsyncRollout(Engines):
    """Simulation of asynchronous rollout and training steps as in `trainer/async_loop.py`."""

    def __init__(
        self,
        world: SimSettings,
        controller: AsyncController,
        *,
        train_s: Callable[[Sequence[TrainRow]], float],
        sync_s: float = 0.0,
        mode: HoldMode = "recompute",
    ) -> None:
        """
        Args:
            train_s: returns the learner's seconds to train samples.
            sync_s: seconds of a weight update.
        """
        super().__init__(world, controller)
        self._flow, self._train_s, self._sync_s, self._mode = controller, train_s, sync_s, mode
        self._born: dict[str, int] = {}
        self._finished: dict[str, int] = {}
        """Lengths of the finished responses that are not trained."""
        self._aborted_tokens = 0
        self._late: list[AnyEvent] = []
        """Events that occurred while all engines were paused, to be delivered after the pause."""
        self._version = 0
        self._asked = self._last = self._training = 0.0
        self._steps = 0
        self.updates: list[Update] = []

    def run(self, steps: int) -> list[Update]:
        """Simulate `steps` more training batches, and return an `Update` for each of them."""
        self._steps += steps
        self.is_over = False
        if not self.updates and self._version == 0:
            self._go(0)
            self._begin_reports()
        while len(self.updates) < self._steps:
            self._next()
        return self.updates[-steps:]

    @property
    def busy(self) -> float:
        """Share of the time in which an engine was busy, averaged over the engines."""
        for engine in self._engines.values():
            engine.advance(self._now)
        return sum(r.busy_s for r in self._engines.values()) / (self._now * len(self._engines))

    @property
    def prefilled(self) -> int:
        """Number of tokens that the engines prefilled."""
        return sum(r.prefilled for r in self._engines.values())

    @property
    def cached(self) -> int:
        """Number of prompt tokens that another request had in the KV cache."""
        return sum(r.cached for r in self._engines.values())

    @property
    def preemptions(self) -> int:
        """Number of requests that a full cache preempted."""
        return sum(r.preemptions for r in self._engines.values())

    @property
    def discarded(self) -> int:
        """Number of tokens that were decoded for groups that the controller dropped."""
        buffer = self._flow.buffer
        dropped = (n for id, n in self._finished.items() if group_of(id) not in buffer)
        return self._aborted_tokens + sum(dropped)

    # ---- events

    def _happens(self, what: str, who: int, it: Any) -> None:
        if what == "go":
            self._go(it)
        elif what == "moved":
            self._tell(Moved(rank=who, partials=it))
        else:
            self._tell(Holding(rank=0, mode=self._mode))

    def _move(self, command: Move) -> None:
        partials = {}
        for job in self._engines[command.rank].abort(list(command.ids), self._now):
            partials[job.id] = partial_of(job)
        self._push(self._now, ("moved", command.rank, partials))
        self._plan(command.rank)

    def _go(self, version: int) -> None:
        self._version = version
        for rank, engine in self._engines.items():
            engine.stand_still(self._now)
            if self._mode != "in_place":
                engine.submit([job.again() for job in engine.release(self._now)], self._now)
            self._plan(rank)
        self._obey(self._flow.go(version, self._now))
        for rank in self._engines:
            self._tell(Ready(rank=rank))
        late, self._late = self._late, []
        for event in late:
            self._tell(event)
        self._asked = self._now
        self._tell(Wanted(rank=0))

    def _tell(self, event: Any) -> None:
        if self._flow.done:  # all engines are paused: deliver the event later
            self._late.append(event)
            return
        if isinstance(event, Aborted):
            self._aborted_tokens += event.num_tokens
        elif isinstance(event, Finished):
            self._finished[event.id] = event.num_tokens
            version = self._born.setdefault(event.id, self._version)
            event = Finished(
                rank=event.rank,
                id=event.id,
                num_tokens=event.num_tokens,
                finish=event.finish,
                version=version,
            )
        super()._tell(event)

    def _obey(self, commands: Sequence[AnyCommand]) -> None:
        for command in commands:
            if isinstance(command, Submit):
                self._submit(command)
            elif isinstance(command, Abort):
                self._abort(command)
            elif isinstance(command, TrainOrder) and command.rank == 0:
                self._train(command)
            elif isinstance(command, Hold):
                self._hold(command.rank)
            elif isinstance(command, Move):
                self._move(command)
            elif isinstance(command, Fail):
                raise RuntimeError(command.reason)

    def _hold(self, rank: int) -> None:
        if rank in self._engines:  # else one of the engine's other ranks
            engine = self._engines[rank]
            engine.advance(self._now)
            for id in engine.begun:
                self._born.setdefault(id, self._version)
            self._planned[rank] += 1  # cancel the engine's next event during the pause
        self._tell(Held(rank=rank))
        if self._flow.done:
            self._push(self._now + self._sync_s, ("go", 0, self._version + 1))

    def _train(self, batch: TrainOrder) -> None:
        refs = [ref.id for group in batch.groups for ref in group.refs]
        rows = self._rows(refs)
        self.updates.append(
            Update(
                seconds=self._now - self._last,
                waited=self._now - self._asked,
                trained=self._training,
                rows=tuple(rows),
                ages=tuple(self._version - self._born[i] for i in refs),
            )
        )
        self._last, self._training = self._now, self._train_s(rows)
        for i in refs:
            del self._requests[i], self._length[i], self._born[i], self._finished[i]
        self._push(self._now + self._training, ("trained", 0, None))


def async_rollout(
    costs: Sequence[EngineCost],
    lengths: Callable[[Request], int],
    *,
    issue: Callable[[int], list[Work]],
    batch: int,
    alpha: float,
    train_s: Callable[[Sequence[TrainRow]], float],
    sync_s: float = 0.0,
    extra: int = 0,
    mode: HoldMode = "recompute",
    rewards: Rewards | None = None,
    place: Router | None = None,
    max_running: int = UNLIMITED,
) -> SimAsyncRollout:
    """Make a simulation with rank 0 as the learner and an engine on each further rank.

    Args:
        issue: returns the requests for the next n prompts.
        batch, alpha, extra: batch size, maximum staleness and extra groups in the buffer.
    """
    ranks = range(1, 1 + len(costs))
    world = SimSettings(costs, lengths, ranks=ranks, rewards=rewards, max_running=max_running)
    controller = AsyncController(
        buffer=SampleBuffer(batch, alpha, extra),
        issue=issue,
        trainers=[0],
        rollout_ranks=ranks,
        ranks=ranks,
        place=place or LeastLoaded(UNLIMITED),
        deadline_s=1e12,
    )
    return SimAsyncRollout(world, controller, train_s=train_s, sync_s=sync_s, mode=mode)

"""Simulate rounds of the shipped controller over virtual engines.

Every event has a virtual time. Simultaneous events keep their order of creation, so a simulation is
exactly repeatable. Messages take no time. Reward workers score first come, first served. A heap of
events calls the shipped controller as a real run does, so SimPy is not needed.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np

from rlcore.records import (
    Abort,
    Aborted,
    AnyCommand,
    AnyEvent,
    EndRound,
    Fail,
    Finished,
    LengthReport,
    Partial,
    Preempted,
    Ready,
    Release,
    Released,
    Request,
    RequestId,
    Rewarded,
    RewardResult,
    Submit,
    Train,
    Trained,
)
from rlcore.rollout.controller import Controller
from rlcore.sched.roles import Elastic, Round, Router, Stop
from rlcore.sched.router import LeastLoaded
from rlcore.sim.cost import EngineCost
from rlcore.sim.drafts import DraftGain
from rlcore.sim.engine import DecodeSpan, SimRequest, VirtualEngine
from rlcore.sim.phases import train_row
from rlcore.sim.rewards import UNLIMITED, Rewards
from rlcore.trainer.plan import TrainRow
from rlcore.utils.seed import derive


@dataclass(slots=True)
class RoundResult:
    """Result of a round. Times are virtual seconds since the round began."""

    kind: str
    seconds: float
    kept: list[str]
    dropped: dict[str, str]
    lengths: list[int]
    """Response lengths of the kept responses."""
    prompts: list[int]
    """Prompt lengths of the kept responses."""
    decoded: int
    """Number of decoded tokens of all responses, kept or not."""
    steps: int
    """Number of decode steps of the engine with the most steps."""
    preemptions: int
    last_finish: float
    """Time at which decoding of the last response ended; its score comes later."""
    reward_s: float
    """Seconds of scoring after the round; 0 if responses are scored during the round."""
    idle: float
    """Share of the round in which an engine was idle, averaged over the engines."""
    cache_used: float
    """Largest share of a KV cache in use at any time, over all engines."""
    spans: list[list[DecodeSpan]] = field(default_factory=list)
    """Decoding intervals of each engine."""
    streamed: set[str] = field(default_factory=set)
    """Kept groups that were trained during the round."""
    stream_spans: list[list[DecodeSpan]] = field(default_factory=list)
    """Training intervals of each engine; `running` is the number of groups that are trained."""
    stream_left_s: float = 0.0
    """Training seconds in `stream_spans` after the end of the round, averaged over all engines."""
    groups: list[str] = field(default_factory=list)
    """Group of each kept response."""
    events: int = 0
    stats: dict[str, float] = field(default_factory=dict)

    def rows(self) -> list[TrainRow]:
        """Return the kept responses that were not trained during the round."""
        rows = zip(self.groups, self.prompts, self.lengths, strict=True)
        return [train_row(*row) for row in rows if row[0] not in self.streamed]


def _controller(
    ranks: Sequence[int], place: Callable[[], Router], stop: Stop, elastic: Elastic | None
) -> Controller:
    return Controller(ranks=ranks, place=place(), stop=stop, deadline_s=1e12, elastic=elastic)


@cache
def _some_tokens(count: int) -> np.ndarray:
    return np.zeros(count, np.int32)


def _tokens(count: int) -> np.ndarray:
    """Return int32 [count] placeholder tokens; the arrays share memory."""
    return _some_tokens(1 << max(count, 1).bit_length())[:count]


def partial_of(job: SimRequest) -> Partial:
    """Return the tokens that a request has so far, as another engine gets them."""
    none = _tokens(int(job.have))
    return Partial(tokens=none, logps=none, versions=none)


class SimSettings:
    """Virtual engines with their costs, and the settings of a round."""

    def __init__(
        self,
        costs: Sequence[EngineCost],
        lengths: Callable[[Request], int],
        *,
        ranks: Sequence[int] = (),
        rewards: Rewards | None = None,
        max_running: int = UNLIMITED,
        elastic: Elastic | None = None,
        train_s: Callable[[Sequence[TrainRow], int], float] = lambda rows, groups: 0.0,
        drafts: DraftGain | None = None,
        row_of: Callable[[Request], int] = lambda request: 0,
        load_s: float = 0.0,
        report_s: float = 0.0,
        controller: Callable[[Stop, Elastic | None], Controller] | None = None,
        place: Callable[[], Router] = lambda: LeastLoaded(UNLIMITED),
    ) -> None:
        """
        Args:
            lengths: returns the response length of a request.
            ranks: rank that leads each engine; default: 0, 1, ...
            elastic: policy for which engines train while the others decode.
            train_s: returns the seconds in which a number of model-parallel groups train samples.
            drafts: what drafts gain; None: engines do not draft.
            row_of: returns the data set row of a request's prompt, where gains differ by prompt.
            load_s: seconds to load the learner onto the GPUs of released engines.
            report_s: seconds between reports of an engine's unfinished lengths; 0: none.
            controller: makes the controller of a round; default: one with the router of `place`.
        """
        self._costs, self._lengths = list(costs), lengths
        self._ranks = tuple(ranks) or tuple(range(len(self._costs)))
        self._elastic, self._train_s, self._load_s = elastic, train_s, load_s
        self._rewards = rewards or Rewards()
        self._max_running, self._report_s = max_running, report_s
        self._drafts, self._row_of = drafts, row_of
        self._controller = controller or partial(_controller, self._ranks, place)

    def pace(self, request: Request, length: int) -> float:
        """Return the forwards of a response with drafts, over those of the mean gain."""
        drafts = self._drafts
        if drafts is None or not drafts.paces:
            return 1.0
        return drafts.pace(self._row_of(request), length, derive(0, "pace", request.id))

    def run(self, round_: Round) -> RoundResult:
        """Run one round. If the controller reports a failure, raise RuntimeError."""
        return _RoundRun(self, round_).outcome()


class Engines(ABC):
    """Virtual engines under a controller, with a queue of events. Subclasses carry out the
    controller's commands and handle the other events."""

    def __init__(self, world: SimSettings, controller: Controller) -> None:
        """Make the virtual engines."""
        self._world, self._controller = world, controller
        self._engines = {
            rank: VirtualEngine(cost, world._max_running, drafts=world._drafts)
            for rank, cost in zip(world._ranks, world._costs, strict=True)
        }
        self._requests: dict[str, Request] = {}
        self._length: dict[str, int] = {}
        self._queue: list[tuple[float, int, Any]] = []
        self._number = self._events = 0
        # sequence number of the newest event of each engine
        self._planned = dict.fromkeys(self._engines, 0)
        self._now = self._last_finish = 0.0
        self.is_over = False

    @abstractmethod
    def _obey(self, commands: Sequence[AnyCommand]) -> None:
        """Carry out the commands of the controller."""

    @abstractmethod
    def _happens(self, what: str, who: int, it: Any) -> None:
        """Handle an event that does not concern the engines."""

    def _next(self) -> None:
        """Process the next event, and the commands with which the controller responds."""
        while True:
            if not self._queue:
                raise RuntimeError(
                    "the round is stuck: no request is running and the round is not complete"
                )
            time, _, (what, who, it) = heapq.heappop(self._queue)
            if what != "engine" or it == self._planned[who]:
                break  # otherwise skip the event, because a newer event has replaced it
        self._now = time
        if what == "engine":
            self._step(who)
        elif what == "aborted":
            self._tell(Aborted(rank=who, id=it.id, num_tokens=it.have))
        elif what == "reward":
            id, took = it
            self._tell(Rewarded(rank=who, id=id, result=self._result(id, took)))
        elif what == "report":
            self._report(who)
        else:
            self._happens(what, who, it)

    def _begin_reports(self) -> None:
        if self._world._report_s:
            for rank in self._engines:
                self._push(self._now + self._world._report_s, ("report", rank, None))

    def _report(self, rank: int) -> None:
        """Report the lengths of an engine's unfinished requests, now and later again."""
        lengths = self._engines[rank].lengths(self._now)
        if lengths:
            ids, values = tuple(lengths), tuple(lengths.values())
            self._tell(LengthReport(rank=rank, ids=ids, lengths=values))
        self._push(self._now + self._world._report_s, ("report", rank, None))

    def _result(self, id: str, seconds: float) -> RewardResult:
        score = self._world._rewards.score(self._requests[id], self._length[id], seconds)
        return RewardResult(score=score, latency_s=seconds)

    def _tell(self, event: AnyEvent) -> None:
        self._events += 1
        self._obey(self._controller.handle(event, self._now))

    def _submit(self, command: Submit) -> None:
        jobs = []
        for request in command.requests:
            self._requests[request.id] = request
            length = self._length.get(request.id)
            if length is None:
                length = self._length[request.id] = self._world._lengths(request)
            have = len(request.resume.tokens) if request.resume else 0  # tokens already decoded
            prompt = len(request.prompt)
            jobs.append(
                SimRequest(
                    id=request.id,
                    prompt=prompt,
                    length=length,
                    group=request.group,
                    have=have,
                    pace=self._world.pace(request, length),
                )
            )
        self._engines[command.rank].submit(jobs, self._now)
        self._plan(command.rank)

    def _abort(self, command: Abort) -> None:
        for job in self._engines[command.rank].abort(list(command.ids), self._now):
            self._push(self._now, ("aborted", command.rank, job))
        self._plan(command.rank)

    def _rows(self, ids: Iterable[RequestId]) -> list[TrainRow]:
        """Return the responses to train on."""
        requests = [self._requests[i] for i in ids]
        return [train_row(r.group, len(r.prompt), self._length[r.id]) for r in requests]

    def _step(self, rank: int) -> None:
        engine = self._engines[rank]
        preempted = engine.preemptions
        ended = engine.step_to_event()
        self._plan(rank)
        if engine.preemptions > preempted:
            self._tell(Preempted(rank=rank, id=""))
        for job in ended:
            self._last_finish = self._now
            self._tell(Finished(rank=rank, id=job.id, num_tokens=job.length, finish="stop"))
            if self.is_over:
                return
            request = self._requests[job.id]
            at, took = self._world._rewards.done_at(self._now, request, job.length)
            self._push(at, ("reward", rank, (job.id, took)))

    def _plan(self, rank: int) -> None:
        """Schedule the next event of engine `rank`."""
        self._planned[rank] += 1
        time = self._engines[rank].next_event()
        if time is not None:
            self._push(max(time, self._now), ("engine", rank, self._planned[rank]))

    def _push(self, time: float, what: Any) -> None:
        self._number += 1
        heapq.heappush(self._queue, (time, self._number, what))


class _RoundRun(Engines):
    def __init__(self, world: SimSettings, round_: Round) -> None:
        controller = world._controller(round_.stop, world._elastic)
        super().__init__(world, controller)
        self._kind = round_.kind
        world._rewards.clear()
        self._end: EndRound | None = None
        self._trains: dict[int, list[DecodeSpan]] = {rank: [] for rank in world._ranks}
        self._released: set[int] = set()
        self._streamed: set[str] = set()
        self._obey(controller.start(round_.work, 0.0))
        for rank in world._ranks:
            self._tell(Ready(rank=rank))
        self._begin_reports()

    def outcome(self) -> RoundResult:
        while self._end is None:
            self._next()
        engines = list(self._engines.values())
        for engine in engines:
            engine.advance(self._now)
        end = self._end
        available = self._now * len(self._engines)
        training = [(s.start, s.end) for spans in self._trains.values() for s in spans]
        worked = sum(max(min(b, self._now) - a, 0.0) for a, b in training)
        worked += sum(r.busy_s for r in engines)
        kept = [ref.id for group in end.groups for ref in group.refs]
        return RoundResult(
            kind=self._kind,
            seconds=self._now,
            kept=[group.id for group in end.groups],
            dropped=end.dropped,
            lengths=[self._length[i] for i in kept],
            prompts=[len(self._requests[i].prompt) for i in kept],
            decoded=sum(r.decoded for r in engines),
            steps=max(r.steps for r in engines),
            preemptions=sum(r.preemptions for r in engines),
            last_finish=self._last_finish,
            reward_s=self._reward_s(kept),
            idle=1 - worked / available if available else 0.0,
            cache_used=max(r.peak_context / r.cost.cache_tokens for r in engines),
            spans=[r.spans for r in engines],
            streamed=self._streamed,
            stream_spans=list(self._trains.values()),
            stream_left_s=sum(max(b - self._now, 0) for _, b in training) / len(self._engines),
            groups=[group.id for group in end.groups for _ in group.refs],
            events=self._events,
            stats=end.stats
            | {
                "sched/prefill_tokens": float(sum(r.prefilled for r in engines)),
                "sched/cached_tokens": float(sum(r.cached for r in engines)),
            },
        )

    def _happens(self, what: str, who: int, it: Any) -> None:
        if what == "released":
            self._tell(Released(rank=who, partials=it))
        else:
            self._tell(Trained(rank=who, seconds=it))

    def _reward_s(self, kept: Sequence[str]) -> float:
        rewards = self._world._rewards
        if not rewards.after:
            return 0.0
        return rewards.all_at_once([(self._requests[i], self._length[i]) for i in kept])

    def _obey(self, commands: Sequence[AnyCommand]) -> None:
        for command in commands:
            if isinstance(command, Submit):
                self._submit(command)
            elif isinstance(command, Abort):
                self._abort(command)
            elif isinstance(command, Release):
                self._release(command.rank)
            elif isinstance(command, Train):
                self._train(command)
            elif isinstance(command, EndRound):
                self._end, self.is_over = command, True
            elif isinstance(command, Fail):
                raise RuntimeError(command.reason)

    def _release(self, rank: int) -> None:
        """Release the engine's requests with their tokens, for prefill on another engine."""
        partials = {}
        for job in self._engines[rank].release(self._now):
            partials[job.id] = partial_of(job)
        self._push(self._now, ("released", rank, partials))
        self._plan(rank)

    def _train(self, command: Train) -> None:
        rows = self._rows(ref.id for group in command.groups for ref in group.refs)
        seconds = self._world._train_s(rows, len(command.dp_ranks))
        begin = self._now
        if command.rank not in self._released:  # the first groups wait until the roles have changed
            self._released.add(command.rank)
            begin += self._world._load_s
        if command.rank in self._trains:
            self._trains[command.rank].append(
                DecodeSpan(begin, begin + seconds, len(command.groups))
            )
        self._streamed.update(group.id for group in command.groups)
        self._push(begin + seconds, ("trained", command.rank, seconds))

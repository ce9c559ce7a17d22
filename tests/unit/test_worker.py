"""The worker of a replica: an engine that has died, requests that are let go, responses that wait
for their scores."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rlcore.metrics.trace import RunTrace
from rlcore.records import (
    Abort,
    Aborted,
    AnyEvent,
    Branch,
    Down,
    EndRound,
    Finished,
    Hold,
    Move,
    Moved,
    Prompt,
    Ready,
    Release,
    Released,
    Repair,
    Request,
    Rewarded,
    RewardResult,
    Sample,
    Sampling,
    Submit,
    TrainOrder,
)
from rlcore.rollout.child import ChildEngine
from rlcore.rollout.transport import LocalHub
from rlcore.rollout.worker import RolloutWorker, RoundCallbacks
from rlcore.utils.flight_recorder import FlightRecorder


class Idle:
    """A reward service that nobody asks for anything."""

    num_pending = 0
    room = 0

    def submit(self, id, sample, prompt, text) -> None:
        raise AssertionError(f"{id} was scored")

    def poll(self, timeout_s: float) -> list:
        return []

    def cancel(self, ids) -> None:
        assert not ids

    def learn(self, reference_latency) -> None:
        self.learned = reference_latency


def submit(id: str) -> Submit:
    tokens = np.array([3, 4], np.int32)
    prompt = Prompt(index=0, dataset="s", tokens=tokens)
    request = Request(id=id, prompt=tokens, sampling=Sampling())
    return Submit(rank=0, requests=(request,), prompts={request.group: prompt})


def until_down(hub: LocalHub) -> list[AnyEvent]:
    events: list[AnyEvent] = []
    while not any(isinstance(e, Down) for e in events):
        more = hub.receive("controller", list[AnyEvent], 20.0)
        assert more is not None, events
        events += more
    return events


def test_a_dead_engine_is_down_in_this_round_and_the_next_and_ends_no_rank() -> None:
    """It dies in an evaluation, and no push of weights brings it back before the next step. What
    the controller submits before it has heard of the death is not an error either."""
    hub, end = LocalHub(), EndRound(rank=0, groups=())
    engine = ChildEngine("tests.contracts.odd_engines:stuck", {})
    worker = RolloutWorker(hub, engine, Idle(), str, 20.0)
    with ThreadPoolExecutor(1) as pool:
        try:
            for id in ("e0.0", "t0.0"):
                future = pool.submit(worker.run_round)
                hub.send(0, "worker", submit(id))
                ready = hub.receive("controller", list[AnyEvent], 20.0)
                assert ready and isinstance(ready[0], Ready)
                if engine.pid:
                    os.kill(engine.pid, signal.SIGKILL)
                events = ready[1:] or until_down(hub)
                (down,) = [e for e in events if isinstance(e, Down)]
                assert "was killed by signal 9" in down.reason
                hub.send(0, "worker", submit(f"late.{id}"))
                hub.send(0, "worker", end)
                assert future.result(20) is end
        finally:
            engine.close()


def test_the_end_of_a_round_tells_the_reward_service_what_right_answers_took() -> None:
    hub, scorer = LocalHub(), Idle()
    worker = RolloutWorker(hub, None, scorer, str, 20.0)
    hub.send(0, "worker", EndRound(rank=0, groups=(), reference_latency={"s/0": 3.0}))
    worker.run_round()
    assert scorer.learned == {"s/0": 3.0}


class Slow:
    """An engine that decodes nothing and lets go of its requests at the second poll."""

    failure = ""

    def __init__(self) -> None:
        self._live: list[str] = []
        self._polls = 0

    def submit(self, requests) -> None:
        self._live += [r.id for r in requests]

    def abort(self, ids) -> None:
        self._polls = 2

    def poll(self, timeout_s: float) -> list[AnyEvent]:
        self._polls -= 1
        if self._polls:
            return []
        gone, self._live = self._live, []
        none = np.zeros(0, np.int32)
        arrays = {"prompt": none, "tokens": none, "logps": none, "versions": none}
        samples = [Sample(id=i, finish="abort", **arrays) for i in gone]
        return [Aborted(id=s.id, num_tokens=0, sample=s) for s in samples]


class Streamer:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.left = self.forgot = 0

    def engine_leaves(self) -> None:
        self.left += 1

    def forget(self) -> None:
        self.forgot += 1


def releasing() -> tuple[LocalHub, RolloutWorker, Streamer]:
    hub, streamer = LocalHub(), Streamer()
    worker = RolloutWorker(hub, Slow(), Idle(), str, 20.0)
    return hub, worker, streamer


def sent(hub: LocalHub) -> list[AnyEvent]:
    events: list[AnyEvent] = []
    while (more := hub.receive("controller", list[AnyEvent], 0.01)) is not None:
        events += more
    return events


def test_what_was_let_go_after_a_round_is_not_told_in_the_next() -> None:
    """The controller of the next round does not know these requests."""
    hub, worker, streamer = releasing()
    hub.send(0, "worker", submit("t0.0"))
    hub.send(0, "worker", Release(rank=0))
    hub.send(0, "worker", EndRound(rank=0, groups=()))
    worker.run_round(RoundCallbacks(streamer=streamer))
    assert not [e for e in sent(hub) if isinstance(e, Released)] and not streamer.left
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(worker.run_round, RoundCallbacks(streamer=streamer))
        hub.send(0, "worker", submit("t1.0"))
        hub.send(0, "worker", Release(rank=0))
        events: list[AnyEvent] = []
        while not any(isinstance(e, Released) for e in events):
            more = hub.receive("controller", list[AnyEvent], 20.0)
            assert more is not None, events
            events += more
        hub.send(0, "worker", EndRound(rank=0, groups=()))
        future.result(20)
    (released,) = [e for e in events if isinstance(e, Released)]
    assert set(released.partials) == {"t1.0"}


def test_a_repair_is_told_to_whoever_has_left_without_training_yet() -> None:
    hub, worker, streamer = releasing()
    for command in (Release(rank=0), Repair(rank=0), EndRound(rank=0, groups=())):
        hub.send(0, "worker", command)
    worker.run_round(RoundCallbacks(streamer=streamer))
    assert (streamer.left, streamer.forgot) == (1, 1)


def test_an_engine_that_was_dead_has_left_as_well_so_that_no_repair_starts_it() -> None:
    hub, worker, streamer = releasing()
    worker._engine.failure = "it died before"
    for command in (Release(rank=0), EndRound(rank=0, groups=())):
        hub.send(0, "worker", command)
    worker.run_round(RoundCallbacks(streamer=streamer))
    assert streamer.left == 1
    assert not [e for e in sent(hub) if isinstance(e, Released)]


def test_an_engine_that_dies_while_it_leaves_has_left() -> None:
    hub, worker, streamer = releasing()
    hub.send(0, "worker", submit("t0.0"))
    hub.send(0, "worker", Release(rank=0))
    worker._engine.poll = lambda timeout_s: [Down(reason="it died of it")]
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(worker.run_round, RoundCallbacks(streamer=streamer))
        events: list[AnyEvent] = []
        while not any(isinstance(e, Down) for e in events):
            events += hub.receive("controller", list[AnyEvent], 20.0) or pytest.fail("no event")
        hub.send(0, "worker", EndRound(rank=0, groups=()))
        future.result(20)
    assert streamer.left == 1


class OneByOne:
    """An engine that ends a response at every poll."""

    failure = ""

    def __init__(self) -> None:
        self._live: list[str] = []

    def submit(self, requests) -> None:
        self._live += [r.id for r in requests]

    def poll(self, timeout_s: float) -> list[AnyEvent]:
        if not self._live:
            return []
        id = self._live.pop(0)
        none = np.zeros(0, np.int32)
        arrays = {"prompt": none, "tokens": none, "logps": none, "versions": none}
        sample = Sample(id=id, finish="stop", **arrays)
        return [Finished(id=id, num_tokens=0, finish="stop", sample=sample)]


class Narrow(Idle):
    """A reward service with room for `room` samples; remembers what the engine still had to do
    when each came."""

    def __init__(self, engine: OneByOne, room: int) -> None:
        self._engine, self._room = engine, room
        self._waiting: list[str] = []
        self.live: list[int] = []
        self.most = 0

    @property
    def num_pending(self) -> int:
        return len(self._waiting)

    @property
    def room(self) -> int:
        return self._room - len(self._waiting)

    def submit(self, id, sample, prompt, text) -> None:
        self._waiting.append(id)
        self.live.append(len(self._engine._live))
        self.most = max(self.most, len(self._waiting))

    def poll(self, timeout_s: float) -> list:
        if self._engine._live:  # slower than the engine
            return []
        return [(self._waiting.pop(0), RewardResult(score=1.0))] if self._waiting else []


@pytest.mark.parametrize(
    ("room", "barrier", "live"),
    [(9, False, [2, 1, 0]), (9, True, [0, 0, 0]), (1, False, [2, 0, 0])],
)
def test_responses_are_scored_as_they_end_as_far_as_there_is_room(room, barrier, live) -> None:
    hub, engine = LocalHub(), OneByOne()
    scorer = Narrow(engine, room)
    worker = RolloutWorker(hub, engine, scorer, str, 20.0, reward_barrier=barrier)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(worker.run_round)
        requests = tuple(submit(id).requests[0] for id in ("t0.0", "t1.0", "t2.0"))
        prompts = {r.group: submit(r.id).prompts[r.group] for r in requests}
        hub.send(0, "worker", Submit(rank=0, requests=requests, prompts=prompts))
        scored: list[str] = []
        while len(scored) < 3:
            more = hub.receive("controller", list[AnyEvent], 20.0)
            assert more is not None, scored
            scored += [e.id for e in more if isinstance(e, Rewarded)]
        hub.send(0, "worker", EndRound(rank=0, groups=()))
        future.result(20)
    assert scored == ["t0.0", "t1.0", "t2.0"]
    assert scorer.live == live and scorer.most <= room


def test_what_was_read_for_an_update_is_gone_with_the_next_batch() -> None:
    """A run of a thousand steps does not keep all that it has trained."""
    hub = LocalHub()
    worker = RolloutWorker(hub, None, Idle(), str, 20.0)
    for step in range(3):
        hub.send(0, "worker", TrainOrder(rank=0, groups=(), stats={}))
        worker.next_batch()
        assert not worker.samples
        none = np.zeros(0, np.int32)
        arrays = {"prompt": none, "tokens": none, "logps": none, "versions": none}
        worker.read({}, [Sample(id=f"t{step}.0", finish="stop", **arrays)])
        assert len(worker.samples) == 1


class Pausable(OneByOne):
    """An engine that ends nothing while it is paused, and lets go of requests when it is told."""

    def __init__(self) -> None:
        super().__init__()
        self._is_paused, self._gone = False, []
        self.waits: list[float] = []

    def pause(self, mode: str) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def abort(self, ids) -> None:
        self._live = [i for i in self._live if i not in ids]
        self._gone += ids

    def poll(self, timeout_s: float) -> list[AnyEvent]:
        if self._is_paused:
            self.waits.append(timeout_s)
        gone, self._gone = self._gone, []
        if gone:
            return [Aborted(id=i, num_tokens=0) for i in gone]
        return [] if self._is_paused else super().poll(timeout_s)


class Unasked(Narrow):
    """A reward service that scores nothing and may be told to cancel."""

    def __init__(self) -> None:
        super().__init__(OneByOne(), 9)
        self.cancelled: list[str] = []

    def poll(self, timeout_s: float) -> list:
        return []

    def cancel(self, ids) -> None:
        self.cancelled += ids


def watched(tmp_path: Path, engine: OneByOne) -> tuple[LocalHub, RolloutWorker, list[dict]]:
    """A worker, and what its observers believe to be under way."""
    hub, flight = LocalHub(), FlightRecorder(0, 1, None)
    trace = RunTrace(tmp_path, 0, "host", 0.0, -1)
    see = [flight.see, trace.see]
    worker = RolloutWorker(hub, engine, Unasked(), str, 20.0, is_endless=True, observers=see)
    return hub, worker, [vars(flight), vars(trace)]


def believed(parts: list[dict]) -> list[str]:
    names = ("_open", "_submitted", "_finished")
    return sorted({i for part in parts for name in names for i in part.get(name, ())})


def test_no_request_of_a_round_stays_open_in_records_after_its_end(tmp_path: Path) -> None:
    """Neither one that was aborted at the end, nor one whose score came too late."""
    hub, worker, parts = watched(tmp_path, Pausable())
    for n in range(3):
        hub.send(0, "worker", submit(f"t{n}.0"))
        if n != 1:
            hub.send(0, "worker", Abort(rank=0, ids=(f"t{n}.0",)))
        hub.send(0, "worker", EndRound(rank=0, groups=()))
        worker.run_round()
        assert believed(parts) == []


def test_nothing_of_a_group_that_a_hold_has_removed_is_kept(tmp_path: Path) -> None:
    """Not even of a response that ends after it."""
    engine = Pausable()
    hub, worker, parts = watched(tmp_path, engine)
    for id in ("t0.0", "t1.0"):
        hub.send(0, "worker", submit(id))
    hub.send(0, "worker", Hold(rank=0, mode="recompute", forget=("t0",)))
    worker.go_on()
    assert engine.waits == [0.0], "a paused engine has no further events"
    assert believed(parts) == ["t1.0"] and list(worker.prompts) == ["t1"]
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(worker.go_on)
        ended: list[str] = []
        while len(ended) < 2:
            more = hub.receive("controller", list[AnyEvent], 20.0)
            assert more is not None, ended
            ended += [e.id for e in more if isinstance(e, Finished)]
        hub.send(0, "worker", Hold(rank=0, mode="recompute", forget=()))
        future.result(20)
    assert ended == ["t0.0", "t1.0"], "the controller frees the place of both"
    assert list(worker.samples) == list(worker.texts) == ["t1.0"]
    assert believed(parts) == ["t1.0"] and worker._scorer.cancelled == ["t0.0"]


def test_a_request_that_moves_to_another_rank_is_no_longer_open_here(tmp_path: Path) -> None:
    hub, worker, parts = watched(tmp_path, Slow())
    hub.send(0, "worker", submit("t0.0"))
    hub.send(0, "worker", Move(rank=0, ids=("t0.0",)))
    hub.send(0, "worker", submit("t1.0"))
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(worker.go_on)
        events: list[AnyEvent] = []
        while not any(isinstance(e, Moved) for e in events):
            events += hub.receive("controller", list[AnyEvent], 20.0) or pytest.fail("no event")
        assert "t0.0" not in believed(parts)
        hub.send(0, "worker", Abort(rank=0, ids=("t1.0",)))
        hub.send(0, "worker", Hold(rank=0, mode="release"))
        future.result(20)


class Unhurried(Idle):
    """A reward service that has scored nothing when the round ends."""

    def cancel(self, ids) -> None: ...


class Branching:
    """An engine whose episode has an older token in its second row than in its first."""

    failure = ""

    def __init__(self) -> None:
        self._todo: list[Request] = []

    def submit(self, requests) -> None:
        self._todo += requests

    def poll(self, timeout_s: float) -> list[AnyEvent]:
        todo, self._todo = self._todo, []
        out: list[AnyEvent] = []
        for request in todo:
            rows = [
                {
                    "prompt": request.prompt,
                    "tokens": np.array([5, 6, 7], np.int32),
                    "logps": np.zeros(3, np.float32),
                    "versions": np.array(versions, np.int32),
                }
                for versions in ([4, -1, 5], [3, 4, -1])
            ]
            sample = Sample(id=request.id, finish="stop", **rows[0], branches=(Branch(**rows[1]),))
            out.append(
                Finished(id=request.id, num_tokens=sample.num_tokens, finish="stop", sample=sample)
            )
        return out


def test_the_version_of_an_episode_is_that_of_its_oldest_token_in_any_row() -> None:
    hub = LocalHub()
    worker = RolloutWorker(hub, Branching(), Unhurried(), str, 20.0)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(worker.run_round)
        hub.send(0, "worker", submit("t0.0"))
        events: list[AnyEvent] = []
        while not any(isinstance(e, Finished) for e in events):
            more = hub.receive("controller", list[AnyEvent], 20.0)
            assert more is not None
            events += more
        hub.send(0, "worker", EndRound(rank=0, groups=()))
        future.result(20)
    (finished,) = [e for e in events if isinstance(e, Finished)]
    assert finished.version == 3 and finished.sample is None

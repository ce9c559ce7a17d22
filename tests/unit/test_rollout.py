"""Rounds of sampling with real parts: controller, agents, ZeroMQ, the torch engine, the reward
service. Replicas are threads of this process."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from rlcore.config.schema import RewardConfig
from rlcore.data import label_task
from rlcore.hf.config import HFConfig
from rlcore.hf.names import expected
from rlcore.hf.tokenizer import load_tokenizer
from rlcore.protocols import Engine, InProcess
from rlcore.records import (
    AnyEvent,
    Down,
    EndRound,
    Finished,
    LengthReport,
    Partial,
    Request,
    Sample,
    Sampling,
    Stats,
    Work,
)
from rlcore.rewards.service import RewardService
from rlcore.rollout.child import ChildEngine, joined
from rlcore.rollout.controller import Controller
from rlcore.rollout.round import Rollout
from rlcore.rollout.torch_engine.engine import TorchEngine
from rlcore.rollout.transport import ZmqHub
from rlcore.rollout.worker import RolloutWorker, RoundCallbacks
from rlcore.sched.router import LeastLoaded
from rlcore.sched.stop import StopAtAll, StopAtFirst
from rlcore.sched.stream import StreamWindow, cells
from rlcore.sync.colocated import ColocatedChannel
from rlcore.sync.pack import load_weights
from tests import runs

NUM_GROUPS, NUM_SAMPLES = 6, 3


class Store:
    """What torch's stores do: `get` waits."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, 10), key
            return self._values[key]


class Frail(InProcess):
    """An engine that dies of its first request."""

    def __init__(self, rank: int):
        self._rank, self._lost = rank, ()

    def submit(self, requests: list[Request]) -> None:
        self._lost = tuple(r.id for r in requests)

    def poll(self, timeout_s: float) -> list[Down]:
        return [Down(rank=self._rank, reason="out of memory", lost=self._lost)]


class Mute(InProcess):
    """An engine that takes everything and says nothing."""

    def submit(self, requests: list[Request]) -> None: ...

    def poll(self, timeout_s: float) -> list:
        time.sleep(timeout_s)
        return []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.tiny_model(tmp_path_factory.mktemp("rollout") / "model")


def weights(model: Path, seed: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for name, shape in expected(HFConfig.from_folder(model)).items():
        value = torch.randn(shape, generator=generator) * 0.2
        yield name, value + 1 if name.endswith("norm.weight") else value


def torch_engine(model: Path, rank: int, **more: float) -> TorchEngine:
    hf = HFConfig.from_folder(model)
    settings = {"dtype": "float64", "max_model_tokens": 96, "max_running": 4} | more
    engine = TorchEngine(hf, device="cpu", rank=rank, **settings)
    load_weights(engine, ((n, t.double()) for n, t in weights(model)), 5)
    return engine


class World:
    """`engines[rank]` and everything around it, a thread for each rank."""

    def __init__(self, model: Path, engines: list[Any], deadline_s: float = 60.0):
        n = len(engines)
        self.tokenizer = load_tokenizer(model)
        store = Store()
        self.threads = ThreadPoolExecutor(n)
        make = lambda rank: ZmqHub(rank, n, store, "127.0.0.1", bytes(32))  # noqa: E731
        self.hubs = list(self.threads.map(make, range(n)))
        self.scorers = [
            RewardService("tests.scores.variety", config=RewardConfig()) for _ in engines
        ]
        self.rollouts = [
            Rollout(
                hub,
                RolloutWorker(hub, engine, scorer, self.tokenizer.decode, deadline_s, 10.0),
                lambda stop, elastic: Controller(
                    ranks=range(n),
                    place=LeastLoaded(10**6),
                    stop=stop,
                    deadline_s=deadline_s,
                    elastic=elastic,
                ),
            )
            for hub, engine, scorer in zip(self.hubs, engines, self.scorers, strict=True)
        ]

    def work(self, tag: str = "t") -> list[Work]:
        out = []
        for g in range(NUM_GROUPS):
            row = label_task.make("train", 0, g)
            out.append(
                Work(
                    id=f"{tag}{g}",
                    prompt=label_task.to_prompt(row, g, self.tokenizer.encode),
                    num_samples=NUM_SAMPLES,
                    sampling=Sampling(max_tokens=12, stop_ids=(label_task.EOS,)),
                )
            )
        return out

    def everywhere(self, do: Callable[[int], Any]) -> list[Any]:
        """What `do(rank)` returned or raised on every rank."""
        futures = [self.threads.submit(do, rank) for rank in range(len(self.rollouts))]
        return [f.exception(60) or f.result() for f in futures]

    def round(self, tag: str = "t") -> list[Any]:
        return self.everywhere(lambda r: self.rollouts[r].run(self.work(tag) if r == 0 else []))

    def close(self) -> None:
        for part in (*self.hubs, *self.scorers):
            part.close()
        self.threads.shutdown()


@contextmanager
def world(model: Path, engines: list[Any], **settings: Any) -> Iterator[World]:
    made = World(model, engines, **settings)
    try:
        yield made
    finally:
        made.close()


def samples_of(world: World) -> dict[str, Sample]:
    return {i: s for rollout in world.rollouts for i, s in rollout.worker.samples.items()}


def checked(ends: list[Any]) -> EndRound:
    """The end of the round, which is the same for all."""
    assert all(isinstance(e, EndRound) for e in ends), ends
    for end in ends[1:]:
        assert [g.id for g in end.groups] == [g.id for g in ends[0].groups]
        assert [g.scores for g in end.groups] == [g.scores for g in ends[0].groups]
    return ends[0]


def test_three_replicas_give_the_samples_of_one(model: Path) -> None:
    with world(model, [torch_engine(model, 0)]) as one:
        alone = checked(one.round())
        wanted = samples_of(one)
    with world(model, [torch_engine(model, rank) for rank in range(3)]) as three:
        end = checked(three.round())
        found = samples_of(three)
        assert {ref.owner for g in end.groups for ref in g.refs} == {0, 1, 2}
        for rank, rollout in enumerate(three.rollouts):
            owned = {ref.id for g in end.groups for ref in g.refs if ref.owner == rank}
            assert set(rollout.worker.samples) == owned
    assert len(found) == NUM_GROUPS * NUM_SAMPLES
    for i, sample in wanted.items():
        np.testing.assert_array_equal(found[i].tokens, sample.tokens)
        np.testing.assert_allclose(found[i].logps, sample.logps, atol=1e-6)
        assert set(found[i].versions.tolist()) == {5}
    assert [g.scores for g in end.groups] == [g.scores for g in alone.groups]
    assert [g.lengths for g in end.groups] == [g.lengths for g in alone.groups]


def test_samples_travel_from_their_owner_to_the_ranks_that_train_them(model: Path) -> None:
    with world(model, [torch_engine(model, rank) for rank in range(2)]) as two:
        for tag in ("t", "u"):  # a second round starts clean
            end = checked(two.round(tag))
            owners = {ref.id: ref.owner for g in end.groups for ref in g.refs}
            destination = {i: (k % 2,) if k % 3 else (0, 1) for k, i in enumerate(owners)}
            kept = samples_of(two)
            got = two.everywhere(
                lambda r, d=destination, o=owners: two.rollouts[r].route(d, o)  # noqa: B023
            )
            for rank in (0, 1):
                assert set(got[rank]) == {i for i, to in destination.items() if rank in to}
                for i, sample in got[rank].items():
                    np.testing.assert_array_equal(sample.tokens, kept[i].tokens)
                    np.testing.assert_array_equal(sample.logps, kept[i].logps)


def test_samples_that_came_before_the_round_was_over_here_are_not_waited_for(model: Path) -> None:
    """A rank that still trains the last groups of its round hears of faster ranks' samples."""
    with world(model, [torch_engine(model, rank) for rank in range(2)]) as two:
        end = checked(two.round())
        owners = {ref.id: ref.owner for g in end.groups for ref in g.refs}
        destination = dict.fromkeys(owners, (1,))
        fast, slow = two.rollouts
        fast.worker.exchange.send([i for i in owners if owners[i] == 0], [1])
        deadline = time.monotonic() + 30
        while set(slow.worker.exchange.here()) != set(owners) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert set(slow.route(destination, owners)) == set(owners)


def test_what_a_dead_engine_held_is_sampled_by_the_others(model: Path) -> None:
    with world(model, [torch_engine(model, 0)]) as one:
        alone = checked(one.round())
    with world(model, [torch_engine(model, 0), Frail(1)]) as two:
        end = checked(two.round())
    assert end.stats["sched/engines_down"] == 1
    assert {ref.owner for g in end.groups for ref in g.refs} == {0}
    assert [g.scores for g in end.groups] == [g.scores for g in alone.groups]


def test_without_an_engine_left_every_rank_says_why(model: Path) -> None:
    with world(model, [Frail(0), Frail(1)]) as two:
        said = [str(e) for e in two.round()]
    assert said[0] == said[1]
    assert "no engine is left" in said[0]
    assert "rank 0: out of memory; rank 1: out of memory" in said[0]


class Ledger:
    """A streamer that writes down what it is to train."""

    def __init__(self) -> None:
        self.left, self.groups, self.samples = 0, [], {}

    def engine_leaves(self) -> None:
        self.left += 1

    def train(self, groups: Any, dp_ranks: Any, samples: Any) -> None:
        self.groups += [g.id for g in groups]
        self.samples |= {ref.id: samples[ref.id] for g in groups for ref in g.refs}

    def forget(self) -> None:
        raise AssertionError("nothing was repaired")


def test_a_replica_that_trains_has_its_requests_go_on_elsewhere(model: Path) -> None:
    with world(model, [torch_engine(model, 0)]) as one:
        alone, wanted = checked(one.round()), samples_of(one)
    parts = cells([[0], [1], [2]], [[0], [1], [2]])
    sizes = {"cache_tokens": 10**6, "max_running": 99, "batch_tokens": 1}
    elastic = StreamWindow(parts, **sizes, earliest=0.01, latest=0.5, check_every=0.05)
    slow = {"decode_floor_ms": 30}  # or a round would be over before the first command
    engines = [torch_engine(model, rank, **slow) for rank in range(3)]
    with world(model, engines) as three:
        checked(three.round("warm"))  # rewards take long at first
        ledgers = [Ledger() for _ in engines]
        end = checked(
            three.everywhere(
                lambda r: three.rollouts[r].run(
                    three.work() if r == 0 else [],
                    StopAtAll() if r == 0 else None,
                    elastic,
                    RoundCallbacks(streamer=ledgers[r]),
                )
            )
        )
        found = samples_of(three)
    assert [ledger.left for ledger in ledgers] == [0, 0, 1]
    assert ledgers[2].groups == [g for s in end.streamed for g in s.groups] != []
    assert {s.dp_ranks for s in end.streamed} == {(2,)}
    assert end.stats["sched/migrated"] > 0
    for i, sample in wanted.items():
        np.testing.assert_array_equal(found[i].tokens, sample.tokens)
        np.testing.assert_allclose(found[i].logps, sample.logps, atol=1e-6)
    for i, sample in ledgers[2].samples.items():
        np.testing.assert_array_equal(sample.tokens, wanted[i].tokens)
    assert [g.scores for g in end.groups] == [g.scores for g in alone.groups]


class Phoenix:
    """A torch engine that dies after its first answers, like one in a child process."""

    def __init__(self, engine: TorchEngine, times: int = 1):
        self._engine, self._times = engine, times
        self._live: dict[str, list[Partial]] = {}
        self.failure = ""

    def submit(self, requests: list[Request]) -> None:
        self._live |= {r.id: [] for r in requests}
        self._engine.submit(requests)

    def poll(self, timeout_s: float) -> list[AnyEvent]:
        events = self._engine.poll(timeout_s)
        for event in events:
            if isinstance(event, Finished):
                del self._live[event.id]
            elif isinstance(event, LengthReport):
                for i, tail in zip(event.ids, event.tails, strict=True):
                    if i in self._live:
                        self._live[i].append(tail)
        if self._times and any(isinstance(e, Finished) for e in events):
            self._times -= 1
            self.failure = "killed"
            self._engine.pause("abort")
            self._engine.poll(0.0)
            live, self._live = self._live, {}
            partials = {i: joined(p) for i, p in live.items() if p}
            events += [Down(reason="killed", lost=tuple(live), partials=partials)]
        return events

    def fail(self, reason: str) -> None: ...

    def is_starting(self, timeout_s: float) -> bool:
        return False

    def restart(self) -> None:
        self.failure = ""
        self._engine.resume()


def test_a_round_without_an_engine_left_goes_on_when_they_are_repaired(model: Path) -> None:
    with world(model, [torch_engine(model, 0)]) as one:
        alone = checked(one.round())
        wanted = samples_of(one)
    made = [torch_engine(model, r, tell_tokens=True, progress_s=0.0) for r in range(2)]
    engines = [Phoenix(engine) for engine in made]
    with world(model, engines) as two:
        repairs = [RoundCallbacks(repair=engine.restart) for engine in engines]
        end = checked(
            two.everywhere(
                lambda r: two.rollouts[r].run(two.work() if r == 0 else [], callbacks=repairs[r])
            )
        )
        found = samples_of(two)
    assert end.stats["sched/repairs"] == 1 and end.stats["sched/kept_tokens"] > 0
    assert [g.scores for g in end.groups] == [g.scores for g in alone.groups]
    for i, sample in wanted.items():
        np.testing.assert_array_equal(found[i].tokens, sample.tokens)
        np.testing.assert_allclose(found[i].logps, sample.logps, atol=1e-6)


def test_a_silent_replica_is_named_with_what_it_owes(model: Path) -> None:
    with world(model, [torch_engine(model, 0), Mute()], deadline_s=2.0) as two:
        said = [str(e) for e in two.round()]
    assert said[0] == said[1]
    assert "--rollout.stall_timeout_s 2 exceeded. rank 1: no message" in said[0]
    assert "open requests such as t1." in said[0]


class Stuck(Mute):
    """Takes everything, makes no token and reports by the clock."""

    def __init__(self) -> None:
        self._ids: tuple[str, ...] = ()

    def submit(self, requests: list[Request]) -> None:
        self._ids += tuple(r.id for r in requests)

    def poll(self, timeout_s: float) -> list[AnyEvent]:
        super().poll(timeout_s)
        n = len(self._ids)
        return [LengthReport(ids=self._ids, lengths=(0,) * n), Stats(running=n)] if n else []


def test_a_replica_that_only_reports_is_named_as_well(model: Path) -> None:
    with world(model, [torch_engine(model, 0), Stuck()], deadline_s=2.0) as two:
        said = [str(e) for e in two.round()]
    assert "--rollout.stall_timeout_s 2 exceeded. rank 1: no new token for 2 s" in said[0]
    assert "open requests such as t1." in said[0]


def test_a_long_round_outlives_a_short_deadline(model: Path) -> None:
    """Nothing but progress is heard for longer than the deadline."""
    engines = [torch_engine(model, rank, decode_floor_ms=150, progress_s=0.1) for rank in (0, 1)]
    with world(model, engines, deadline_s=2.0) as two:
        start = time.monotonic()
        checked(two.round())
        assert time.monotonic() - start > 3


def test_a_rank_that_does_not_enter_is_named(model: Path) -> None:
    said = "rank 1: no message for 1 s, it never entered phase gen"
    with (
        world(model, [torch_engine(model, 0), Mute()], deadline_s=1.0) as two,
        pytest.raises(RuntimeError, match=said),
    ):
        two.rollouts[0].run(two.work())


def test_a_rank_whose_controller_is_silent_does_not_wait_for_ever(model: Path) -> None:
    said = "rank 1 got no message from the controller"
    with (
        world(model, [Mute(), Mute()], deadline_s=1.0) as two,
        pytest.raises(TimeoutError, match=said),
    ):
        two.rollouts[1].run([])


def test_when_rank_0_fails_in_a_round_the_others_end_too(model: Path) -> None:
    engines: list[Engine | None] = [torch_engine(model, rank) for rank in range(2)]
    with world(model, engines) as two:
        two.scorers[0].close()  # its next sample raises
        first, second = two.round()
    assert isinstance(first, RuntimeError) and "closed" in str(first)
    assert isinstance(second, RuntimeError) and "rank 0 has failed" in str(second)
    assert not [t for t in threading.enumerate() if "_control" in t.name]


# ---- weights


class Exporter:
    """Of the learner only `export`; counts what was taken."""

    def __init__(self, model: Path):
        self._model, self.taken = model, 0

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        for item in weights(self._model):
            self.taken += 1
            yield item


class Dying(InProcess):
    """Is gone at its first bucket; `failure` as a child engine has it."""

    def begin_load(self, version: int) -> None: ...

    def load_bucket(self, bucket: Any, payloads: Any) -> None:
        self.failure = "engine process 1 was killed by signal 9"
        raise RuntimeError(f"load_bucket: {self.failure}")

    def close(self) -> None: ...


class Confused(Dying):
    """Refuses a bucket and lives."""

    def load_bucket(self, bucket: Any, payloads: Any) -> None:
        raise RuntimeError("no memory for this bucket")


def breaking() -> ChildEngine:
    """A part of it dies in a call, which raises before the process has ended."""
    return ChildEngine("tests.contracts.odd_engines:breaking", {})


@pytest.mark.parametrize("make", [Dying, breaking])
def test_an_engine_that_dies_in_a_push_does_not_stop_the_export(
    model: Path, make: Callable[[], Dying | ChildEngine]
) -> None:
    """The export is collective: the other ranks wait for every tensor."""
    learner, engine = Exporter(model), make()
    try:
        moved = ColocatedChannel(max_bucket_bytes=4096).update_weights(learner, engine, 1)
        assert "signal 9" in engine.failure
    finally:
        engine.close()
    assert learner.taken == len(list(weights(model)))
    assert moved["bytes"] >= sum(t.nbytes for _, t in weights(model))


def test_a_live_engine_that_refuses_weights_ends_the_run(model: Path) -> None:
    learner = Exporter(model)
    with pytest.raises(RuntimeError, match="no memory for this bucket"):
        ColocatedChannel(max_bucket_bytes=4096).update_weights(learner, Confused(), 1)
    assert learner.taken == len(list(weights(model)))


class Counting:
    """An engine and the sum of what it has reported."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine, self.steps = engine, 0

    def poll(self, timeout_s: float) -> list[AnyEvent]:
        events = self._engine.poll(timeout_s)
        self.steps += sum(e.decode_steps for e in events if isinstance(e, Stats))
        return events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def test_what_engines_counted_after_the_end_of_a_round_is_of_that_round(model: Path) -> None:
    """Without it a round that aborts would seem to take fewer decode steps than it did."""
    slow = {"progress_s": 1e9, "decode_floor_ms": 100, "max_running": 16}
    engines = [Counting(torch_engine(model, rank, **slow)) for rank in range(2)]
    with world(model, engines) as w:
        lengths = [2, 60, 60, 60]  # the first is over while the others are decoded
        work = [
            structs.replace(each, sampling=Sampling(max_tokens=n))
            for each, n in zip(w.work(), lengths, strict=False)
        ]
        stop = StopAtFirst({"": 1}, {each.id: "" for each in work})
        ends = w.everywhere(lambda r: w.rollouts[r].run(work if r == 0 else [], stop))
        counted = [rollout.worker.counts["decode_steps"] for rollout in w.rollouts]
        assert counted == [e.steps for e in engines] and all(counted)
        assert ends[0].stats.get("sched/decode_steps", 0.0) < sum(counted), "it aborted something"
        w.round("u")
        more = [rollout.worker.counts["decode_steps"] for rollout in w.rollouts]
        assert [a + b for a, b in zip(counted, more, strict=True)] == [e.steps for e in engines]

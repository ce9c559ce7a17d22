"""Sampling that does not stop at the end of a step, with real parts: the controller and its buffer,
workers, ZeroMQ, the torch engine, the reward service. Rank 0 trains, the others sample; ranks are
threads of this process.

All versions have the same weights here, so every response has to be the one that an engine gives
that is never interrupted (invariant I6).
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from rlcore.config.schema import RewardConfig
from rlcore.data import label_task
from rlcore.hf.tokenizer import load_tokenizer
from rlcore.records import AnyEvent, Down, Finished, HoldMode, Sample, Sampling, TrainOrder, Work
from rlcore.rewards.service import RewardService
from rlcore.rollout.async_rollout import AsyncRollout
from rlcore.rollout.controller import Controller
from rlcore.rollout.errors import EngineFailedError
from rlcore.rollout.histospec import HistoryStore, history_of, prompt_key
from rlcore.rollout.replay import EventLog, Recorder, controller_of
from rlcore.rollout.round import Rollout
from rlcore.rollout.torch_engine.engine import TorchEngine
from rlcore.rollout.transport import ZmqHub
from rlcore.rollout.worker import NoScorer, RolloutWorker
from rlcore.sched.completion_order import ReplayMismatch
from rlcore.sched.histopipe import HistoPipe
from rlcore.sched.router import LeastLoaded
from rlcore.sched.staleness import SampleBuffer
from rlcore.sync.pack import load_weights
from rlcore.utils.net import encode
from tests import runs
from tests.unit.test_rollout import Store, checked, torch_engine, weights

BATCH, GROUP, ALPHA = 2, 2, 2
SAMPLING = Sampling(max_tokens=24, stop_ids=(label_task.EOS,))


class Doomed:
    """A torch engine that dies when it is told to, and can be started again."""

    def __init__(self, model: Path, rank: int) -> None:
        self._make = lambda: torch_engine(model, rank)
        self._engine = self._make()
        self._rank, self._said = rank, True
        self.failure = ""

    def die(self) -> None:
        self.failure, self._said = "was killed", False

    def fail(self, reason: str) -> None:
        self.failure = reason

    def is_starting(self, timeout_s: float) -> bool:
        return False

    def restart(self) -> None:
        self._engine, self.failure = self._make(), ""

    def poll(self, timeout_s: float) -> list[Any]:
        if not self._said:
            self._said = True
            return [Down(rank=self._rank, reason="was killed")]
        return [] if self.failure else self._engine.poll(timeout_s)

    def __getattr__(self, name: str) -> Any:
        if self.failure:
            raise EngineFailedError(self.failure)
        return getattr(self._engine, name)


class Paced:
    """An engine that decodes only while the controller wants a batch and has counted all that was
    finished: what is under way when a batch is complete outlives the push, whatever the clock
    does."""

    finished = 0

    def __init__(self, engine: TorchEngine) -> None:
        self._engine, self._is_held = engine, False
        self.may_decode: Callable[[], bool] = lambda: True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def pause(self, mode: str) -> None:
        self._is_held = True
        self._engine.pause(mode)

    def abort(self, ids: Collection[str]) -> None:
        self._is_held = True  # a push with release; what was aborted is told by `poll`
        self._engine.abort(ids)

    def begin_load(self, version: int) -> None:
        self._is_held = False
        self._engine.begin_load(version)

    def poll(self, timeout_s: float) -> list[AnyEvent]:
        if not (self._is_held or self.may_decode()):
            time.sleep(min(timeout_s, 0.002))
            return []
        events = self._engine.poll(timeout_s)
        self.finished += sum(isinstance(event, Finished) for event in events)
        return events


class World:
    """`engines` are those of ranks 1, 2, ..."""

    def __init__(
        self,
        model: Path,
        engines: list[Any],
        record: Recorder | None = None,
        replay: EventLog | None = None,
        pipe: HistoPipe | None = None,
        is_endless: bool = True,
        library: HistoryStore | None = None,
    ) -> None:
        self.model, self.engines, n = model, [None, *engines], 1 + len(engines)
        self.tokenizer, store = load_tokenizer(model), Store()
        self.threads, self.barrier = ThreadPoolExecutor(n), threading.Barrier(n)
        self.hubs = list(
            self.threads.map(lambda r: ZmqHub(r, n, store, "127.0.0.1", bytes(32)), range(n))
        )
        self.scorers = [RewardService("tests.scores.variety", config=RewardConfig())]
        self.scorers += [
            RewardService("tests.scores.variety", config=RewardConfig()) for _ in engines[1:]
        ]
        rollout_ranks, self.issued = range(1, n), 0
        self.controller = controller_of(replay)(
            buffer=SampleBuffer(BATCH, ALPHA),
            issue=self.issue,
            trainers=[0],
            rollout_ranks=rollout_ranks,
            ranks=rollout_ranks,
            place=pipe or LeastLoaded(10**6),
            deadline_s=60.0,
        )
        paced = [engine for engine in engines if isinstance(engine, Paced)]
        for engine in paced:
            engine.may_decode = lambda: (
                self.controller._wants
                and self.controller.num_done == sum(each.finished for each in paced)
            )
        self.workers = [
            RolloutWorker(
                hub, engine, scorer, self.tokenizer.decode, 60.0, 30.0, is_endless=is_endless
            )
            for hub, engine, scorer in zip(
                self.hubs, self.engines, [NoScorer(), *self.scorers], strict=True
            )
        ]
        self.flows = [
            AsyncRollout(
                hub,
                worker,
                None if r else self.controller,
                rollout_ranks=rollout_ranks,
                deadline_s=60,
                record=None if r else record,
                replay=None if r else replay,
                library=None if r else library,
            )
            for r, (hub, worker) in enumerate(zip(self.hubs, self.workers, strict=True))
        ]
        self.rollouts = [
            Rollout(
                hub,
                worker,
                lambda stop, elastic: Controller(
                    ranks=rollout_ranks,
                    all_ranks=range(n),
                    place=LeastLoaded(10**6),
                    stop=stop,
                    deadline_s=60.0,
                ),
            )
            for hub, worker in zip(self.hubs, self.workers, strict=True)
        ]
        self.version = 5  # that of `torch_engine`
        self.batches: list[tuple[int, TrainOrder, dict[str, Sample]]] = []
        self.stats: list[dict[str, float]] = []

    def work(self, i: int, tag: str = "t") -> Work:
        row = label_task.make("train", 0, i)
        prompt = label_task.to_prompt(row, i, self.tokenizer.encode)
        return Work(id=f"{tag}{i}", prompt=prompt, num_samples=GROUP, sampling=SAMPLING)

    def issue(self, count: int) -> list[Work]:
        self.issued += count
        return [self.work(i) for i in range(self.issued - count, self.issued)]

    def everywhere(self, do: Callable[[int], Any]) -> list[Any]:
        futures = [self.threads.submit(do, rank) for rank in range(len(self.hubs))]
        errors = [error for f in futures if (error := f.exception(90))]
        assert not errors, errors
        return [f.result() for f in futures]

    def step(self, mode: HoldMode, while_held: Callable[[int], None] = lambda rank: None) -> None:
        """An update, as `trainer/async_loop.py` has it; the push goes to the engine at once."""
        version = self.version

        def one(rank: int) -> None:
            if rank == 0:
                batch = self.flows[0].take(version)
                owners = {ref.id: ref.owner for g in batch.groups for ref in g.refs}
                samples = self.flows[0].fetch(dict.fromkeys(owners, (0,)), owners)
                self.batches.append((version, batch, samples))
                self.stats.append(self.flows[0].hold(mode))
            else:
                self.workers[rank].go_on()
            self.barrier.wait(60)
            while_held(rank)
            if rank:
                if self.engines[rank].failure:
                    self.workers[rank].restart_engine()
                new = ((n, t.double()) for n, t in weights(self.model))
                load_weights(self.engines[rank], new, version + 1)
            self.barrier.wait(60)

        self.everywhere(one)
        self.version += 1

    def check(self, wanted: dict[str, np.ndarray]) -> None:
        """Every trained sample is that of an engine which is never interrupted, none is too old,
        none is trained twice."""
        seen: set[str] = set()
        for version, batch, samples in self.batches:
            assert len(batch.groups) == BATCH
            for i, sample in samples.items():
                assert i not in seen
                seen.add(i)
                np.testing.assert_array_equal(sample.tokens, wanted[i])
                assert len(sample.logps) == len(sample.versions) == len(sample.tokens)
                assert (np.diff(sample.versions) >= 0).all()
                assert version - ALPHA <= sample.versions[0] <= sample.versions[-1] <= version

    def close(self) -> None:
        self.flows[0].close()
        for part in (*self.hubs, *self.scorers):
            part.close()
        self.threads.shutdown()


@contextmanager
def world(model: Path, engines: list[Any], **logs: Any) -> Iterator[World]:
    made = World(model, engines, **logs)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.tiny_model(tmp_path_factory.mktemp("flow") / "model")


@pytest.fixture(scope="module")
def wanted(model: Path) -> dict[str, np.ndarray]:
    """Responses without any interruption."""
    # rounds that end, or the samples would go with theirs
    with world(model, [torch_engine(model, 1)], is_endless=False) as one:
        work = [one.work(i) for i in range(40)]
        checked(one.everywhere(lambda r: one.rollouts[r].run(work if r == 0 else [])))
        return {i: s.tokens for i, s in one.workers[1].samples.items()}


def spans(world: World) -> int:
    return max(len(set(s.versions.tolist())) for _, _, ss in world.batches for s in ss.values())


@pytest.mark.parametrize("mode", ["in_place", "recompute", "release"])
def test_responses_outlive_pushes_and_are_those_of_an_uninterrupted_engine(
    model: Path, wanted: dict[str, np.ndarray], mode: HoldMode
) -> None:
    engines = [Paced(torch_engine(model, rank, progress_s=0.02)) for rank in (1, 2)]
    with world(model, engines) as three:
        for _ in range(6):
            three.step(mode)
        three.check(wanted)
        assert spans(three) > 1
        held = {ref.split(".")[0] for worker in three.workers for ref in worker.samples}
        assert held <= three.controller.groups.keys() | set(three.controller._forget)
        for worker in three.workers[1:]:
            assert worker.prompts.keys() <= three.controller.groups.keys() | held


def test_responses_that_move_to_another_replica_are_those_of_an_uninterrupted_engine(
    model: Path, wanted: dict[str, np.ndarray]
) -> None:
    """HistoPipe, with a history of answers that are shorter than those that come."""
    floor = {"decode_floor_ms": 4.0, "progress_s": 0.02}
    engines = [torch_engine(model, rank, **floor) for rank in (1, 2)]
    pipe = HistoPipe(engines=[1, 2], batch=BATCH, longest=SAMPLING.max_tokens, rows=8)
    with world(model, engines, pipe=pipe) as three:
        for i in range(40):
            pipe.learn(three.work(i).prompt, [2 + i % 2])
        for _ in range(4):
            three.step("recompute")
        three.check(wanted)
        moved = sum(stats.get("sched/migrated", 0) for stats in three.stats)
        tokens = sum(stats.get("sched/migrated_tokens", 0) for stats in three.stats)
        assert moved > 0 and tokens > 2 * moved


def test_drafts_from_history_change_no_response_that_moves_or_outlives_a_push(
    model: Path, wanted: dict[str, np.ndarray]
) -> None:
    """RhymeRL whole. The history of each prompt is the response that comes, cut before its end."""
    drafts = {
        "draft": "history",
        "draft_settings": {"adaptive": False, "wait": True, "min_match": 6},
        "decode_floor_ms": 4.0,
        "progress_s": 0.02,
    }
    engines = [torch_engine(model, rank, **drafts) for rank in (1, 2)]
    pipe = HistoPipe(engines=[1, 2], batch=BATCH, longest=SAMPLING.max_tokens, rows=8)
    library = HistoryStore(max_tokens=10**6)
    accepted = 0.0
    with world(model, engines, pipe=pipe, library=library) as three:
        prompts = [three.work(i).prompt for i in range(40)]
        for i, prompt in enumerate(prompts):
            pipe.learn(prompt, [2 + i % 2])
            library.add([history_of(f"t{i}.9", prompt.tokens, wanted[f"t{i}.0"][:-1], 1.0)])
        for mode in ("recompute", "in_place", "release", "recompute"):
            three.step(mode)
            accepted += sum(w.counts["accepted_tokens"] for w in three.workers)
        three.check(wanted)
        assert accepted > 50
        assert sum(stats.get("sched/migrated", 0) for stats in three.stats) > 0
        trained = {i: s for _, _, found in three.batches for i, s in found.items()}
        groups = [group for _, batch, _ in three.batches for group in batch.groups]
        scores = {ref.id: x for g in groups for ref, x in zip(g.refs, g.scores, strict=True)}
        for i, prompt in enumerate(prompts[: three.issued]):
            known = {h.id: h for h in library.of([prompt_key(prompt.tokens)])}
            own = {f"t{i}.{k}" for k in range(GROUP)} & trained.keys()
            assert known.keys() == (own or {f"t{i}.9"})  # one epoch is kept
            for name in own:
                tokens = trained[name].tokens
                np.testing.assert_array_equal(known[name].tokens[-len(tokens) :], tokens)
                assert known[name].score == scores[name]


def test_an_evaluation_in_between_changes_nothing(
    model: Path, wanted: dict[str, np.ndarray]
) -> None:
    with world(model, [torch_engine(model, 1)]) as two:
        two.step("recompute")
        two.step("release")
        before = dict(two.workers[1].samples)
        work = [two.work(i, "e") for i in range(3)]
        end = checked(two.everywhere(lambda r: two.rollouts[r].run(work if r == 0 else [])))
        assert [g.id for g in end.groups] == ["e0", "e1", "e2"]
        assert two.workers[1].samples.keys() == before.keys()
        two.step("recompute")
        two.check(wanted)


def test_a_checkpoint_keeps_prefixes_and_finished_samples(
    model: Path, wanted: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """Two engines before, one after."""
    floor = {"decode_floor_ms": 4.0, "progress_s": 0.02}
    engines = [torch_engine(model, rank, **floor) for rank in (1, 2)]
    with world(model, engines) as before:
        before.step("recompute")
        before.step("release")
        before.everywhere(lambda rank: before.flows[rank].save(tmp_path))
        held = set(before.controller.groups)
        assert len(held) == ALPHA * BATCH
        issued, version, done = before.issued, before.version, before.batches
    engine = torch_engine(model, 1)
    load_weights(engine, ((n, t.double()) for n, t in weights(model)), version)
    with world(model, [engine]) as after:
        after.issued, after.version = issued, version
        after.everywhere(lambda rank: after.flows[rank].load(tmp_path))
        for _ in range(3):
            after.step("recompute")
        trained = {g.id for _, batch, _ in after.batches for g in batch.groups}
        assert held <= trained
        after.batches = [*done, *after.batches]
        after.check(wanted)


@pytest.mark.parametrize("when", ["decoding", "held"])
def test_an_engine_that_dies_costs_no_sample(
    model: Path, wanted: dict[str, np.ndarray], when: str
) -> None:
    engines = [Doomed(model, 1), Doomed(model, 2)]
    with world(model, engines) as three:
        three.step("in_place")
        if when == "decoding":
            engines[0].die()
            three.step("in_place")
        else:
            three.step("in_place", lambda rank: engines[0].die() if rank == 1 else None)
        for _ in range(3):
            three.step("in_place")
        three.check(wanted)
        assert isinstance(engines[0]._engine, TorchEngine) and not engines[0].failure


def test_a_replay_trains_the_batches_of_the_record_and_decodes_nothing(
    model: Path, tmp_path: Path
) -> None:
    """Two engines before, one after; the modes of the pushes are the recorded ones."""
    modes: list[HoldMode] = ["in_place", "recompute", "release", "recompute"]
    engines = [Paced(torch_engine(model, rank, progress_s=0.02)) for rank in (1, 2)]
    with world(model, engines, record=Recorder(tmp_path, 0)) as one:
        for mode in modes:
            one.step(mode)
        assert spans(one) > 1
    with world(model, [torch_engine(model, 1)], replay=EventLog(tmp_path, 0)) as two:
        for mode in modes:
            two.step(mode)
        assert two.workers[1].samples == {} and two.workers[1].counts["decode_tokens"] == 0
        with pytest.raises(AssertionError, match="has no step 10, only 6 to 9"):
            two.step("recompute")

    def facts(world: World) -> list[bytes]:
        """All but which rank had a sample."""
        return [
            encode([v, [structs.replace(g, refs=()) for g in b.groups], sorted(found.items())])
            for v, b, found in world.batches
        ]

    assert facts(two) == facts(one)


def test_a_log_of_another_run_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no events of a run with --mode async"):
        EventLog(tmp_path, 0)
    with world(model, [torch_engine(model, 1)], record=Recorder(tmp_path, 0)) as one:
        one.step("recompute")
        one.step("recompute")
    with pytest.raises(ReplayMismatch, match="was recorded with --run.seed 0, not 1"):
        EventLog(tmp_path, 1).step(5)
    with pytest.raises(ReplayMismatch, match="has no tokens of t99.0 for step 6"):
        EventLog(tmp_path, 0).samples(5, ["t99.0"])
    with world(model, [torch_engine(model, 1)], replay=EventLog(tmp_path, 0)) as two:
        two.issued = 50
        with pytest.raises(AssertionError, match="this run"):
            two.step("recompute")
    with world(model, [torch_engine(model, 1)], replay=EventLog(tmp_path, 0)) as two:
        two.version = 6
        with pytest.raises(AssertionError, match="replay from the first step"):
            two.step("recompute")

"""Engines that change their size between two steps, without engines."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlcore.cli import assemble
from rlcore.cli.world import World
from rlcore.config.schema import Config, DebugConfig, RolloutConfig, TrainConfig
from rlcore.hf.config import HFConfig
from rlcore.rollout.child import ChildEngine
from rlcore.rollout.gone import EngineGoneError
from rlcore.rollout.replica import Agent, NoScorer
from rlcore.rollout.transport import LocalHub
from rlcore.sched.planner import Listed, TPPlanner
from rlcore.trainer import phases, relayout, report, sync_loop
from rlcore.trainer.relayout import Relayout
from rlcore.utils.spans import Spans
from tests import kit

HF = HFConfig.from_dict(kit.tiny_config("qwen3") | {"model_type": "qwen3"})


class Engine:
    """Starts when it was asked `slow` times whether it does."""

    def __init__(self, said: list[str], slow: int = 0, dies: bool = False) -> None:
        self.said, self.slow, self.dies, self.failure = said, slow, dies, ""

    def relayout(self, tp: int) -> None:
        self.said.append(f"engine tp {tp}")

    def is_starting(self, timeout_s: float) -> bool:
        self.slow -= 1
        if self.dies and self.slow < 0:
            self.failure = "out of memory"
        return self.slow >= 0

    def sleep(self, tags: list[str]) -> None:
        self.said.append(f"engine sleep {' '.join(tags)}")

    def fail(self, reason: str) -> None: ...

    def restart(self) -> None: ...


class Learner:
    def __init__(self, said: list[str]) -> None:
        self.said = said

    def offload(self) -> None:
        self.said.append("learner offload")


def run_of(sizes: Relayout | None, *, offload: bool = False, engine: Any = None) -> Any:
    said: list[str] = []
    engine = engine or Engine(said)
    engine.said = said
    return SimpleNamespace(
        cfg=SimpleNamespace(
            run=SimpleNamespace(steps=9),
            train=SimpleNamespace(offload=offload),
            cluster=SimpleNamespace(timeout_s=0.05),
        ),
        said=said,
        engine=engine,
        learners=[Learner(said)],
        gate=None,
        relayout=sizes,
        source=SimpleNamespace(next_kind=lambda: "short"),
        rollout=SimpleNamespace(agent=SimpleNamespace(cache_used=0.0)),
        rank=0,
        world_size=1,
        everyone=None,
        step=1,
        engine_ranks=(0,),
        pending={},
        spans=SimpleNamespace(
            alive=lambda: said.append("alive"), phase=lambda name: _Phase(said, name)
        ),
    )


class _Phase:
    def __init__(self, said: list[str], name: str) -> None:
        self.said, self.name = said, name

    def __enter__(self) -> None:
        self.said.append(f"phase {self.name}")

    def __exit__(self, *_: object) -> None:
        self.said.append(f"end of {self.name}")


def sizes_of(policy: Any, tp: int = 1) -> Relayout:
    return Relayout(tp=tp, policy=policy, rebuild=lambda run, tp: run.said.append(f"rebuild {tp}"))


def test_a_rise_of_preemptions_gives_the_next_round_of_that_kind_larger_engines() -> None:
    run = run_of(sizes_of(TPPlanner(1, 2)))
    for kind, preempted in (("short", 4), ("long", 9), ("short", 8)):
        relayout.before_push(run)
        assert not run.said  # nothing to be done
        relayout.note(run, kind, {"sched/preemptions": float(preempted)})
        assert run.pending["sched/rollout_tp"] == 1
    relayout.before_push(run)
    assert run.said == ["phase relayout", "engine tp 2", "rebuild 2", "end of relayout"]
    assert run.relayout.tp == 2
    run.source.next_kind = lambda: "long"  # of these there was no rise
    relayout.before_push(run)
    assert run.relayout.tp == 1
    relayout.note(run, "long", {})
    assert run.pending["sched/rollout_tp"] == 1


def test_full_caches_keep_engines_large() -> None:
    run = run_of(sizes_of(TPPlanner(2, 2), tp=2))
    run.rollout.agent.cache_used = 0.95
    for _ in range(6):
        relayout.note(run, "short", {})
        relayout.before_push(run)
    assert run.relayout.tp == 2 and run.pending["sched/cache_used"] == 0.95
    run.rollout.agent.cache_used = 0.5
    relayout.note(run, "short", {})
    relayout.before_push(run)
    assert run.relayout.tp == 1


def test_the_learner_makes_room_for_engines_that_start_and_they_sleep_until_the_push() -> None:
    run = run_of(sizes_of(Listed([2])), offload=True, engine=Engine([], slow=2))
    run.cfg.cluster.timeout_s = 60
    relayout.before_push(run)
    assert run.said == [
        "phase relayout",
        "learner offload",
        "engine tp 2",
        "rebuild 2",
        *("alive", "alive"),
        "engine sleep weights kv_cache",
        "end of relayout",
    ]


def test_an_engine_that_does_not_start_in_time_ends_the_run_in_a_sentence() -> None:
    run = run_of(sizes_of(Listed([2])), engine=Engine([], slow=10**9))
    with pytest.raises(TimeoutError, match=r"timeout_s 0.05 is over: .* not started on rank 0; "):
        relayout.before_push(run)


def test_an_engine_that_dies_as_it_starts_is_left_to_the_push() -> None:
    run = run_of(sizes_of(Listed([2])), engine=Engine([], slow=1, dies=True))
    run.cfg.cluster.timeout_s = 60
    relayout.before_push(run)
    assert run.engine.failure and run.relayout.tp == 2


def test_a_child_that_dies_as_it_starts_is_started_again_before_the_push(tmp_path: Path) -> None:
    size = {"file": str(tmp_path / "died"), "tp": 1}
    engine = ChildEngine(
        "tests.contracts.odd_engines:dies_once",
        lambda: size,
        start_s=60.0,
        resize=lambda tp: size.update(tp=tp),
    )
    try:
        run = run_of(sizes_of(Listed([2])), engine=engine)
        run.cfg.cluster.timeout_s = 60
        relayout.before_push(run)
        assert "ended with code 7" in engine.failure
        run.rollout.agent = Agent(LocalHub(), engine, NoScorer(), str, deadline_s=1.0)
        phases.engine_revives(run)
        engine.begin_load(1)  # as the push does
        assert not engine.failure
    finally:
        engine.close()


def test_after_the_last_step_and_without_the_switch_nothing_changes() -> None:
    run = run_of(sizes_of(Listed([2])))
    run.step = 9
    relayout.before_push(run)
    none = run_of(None)
    relayout.before_push(none)
    relayout.note(none, "all", {})
    assert not run.said and not none.said and none.pending == {"sched/cache_used": 0.0}


# ---- what it is made of


def config(**rollout: Any) -> Config:
    listed = rollout.pop("listed", ())
    return Config(
        rollout=RolloutConfig(engine="sglang", **rollout),
        train=TrainConfig(tp=1),
        debug=DebugConfig(rollout_tp=listed),
    )


def world(size: int, rank: int = 0) -> World:
    return World(rank, size, rank, torch.device("cpu"), None)


def test_larger_engines_hold_and_decode_more() -> None:
    cfg = assemble.with_tp(config(tp=2, max_running=64, cache_tokens=1000), 4)
    r = cfg.rollout
    assert (r.tp, r.max_running, r.cache_tokens) == (4, 128, 2000)
    r = assemble.with_tp(cfg, 1).rollout
    assert (r.tp, r.max_running, r.cache_tokens) == (1, 32, 500)


def test_sizes_go_as_far_as_ranks_heads_and_caches_allow(monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert HF.num_heads == 4

    def bounds(**rollout: Any) -> tuple[int, int]:
        found = assemble.make_relayout(config(adaptive_tp=True, **rollout), HF, world(8))
        return found.policy._min, found.policy._max

    assert bounds(tp=1) == (1, 4)  # 4 heads
    assert bounds(tp=2, max_tp=2) == (1, 2)
    longest = 128
    assert HF.max_positions >= longest
    monkeypatch.setattr(assemble.memory, "longest", lambda cfg, hf: longest)
    assert bounds(tp=2, cache_tokens=2 * longest - 1) == (2, 4)  # half of it holds no sequence


def test_only_rank_0_decides() -> None:
    cfg = config(adaptive_tp=True)
    assert assemble.make_relayout(cfg, HF, world(2)).policy is not None
    assert assemble.make_relayout(cfg, HF, world(2, rank=1)).policy is None
    assert assemble.make_relayout(config(), HF, world(2)) is None


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        ({"listed": (1, 8)}, "--debug.rollout_tp 8: must divide the model's 4 attention heads"),
        ({"adaptive_tp": True, "max_tp": 8}, "--rollout.max_tp 8: must divide the model's 4"),
    ],
)
def test_sizes_that_the_heads_do_not_divide_by_are_refused(
    rollout: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(ValueError, match=words):
        assemble.make_relayout(config(**rollout), HF, world(8))


# ---- the engines that start with the run


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What a run without steps does before its end, and the phase that it does it in."""
    done: list[tuple[str, str]] = []
    run = run_of(None)
    run.cfg = SimpleNamespace(
        run=SimpleNamespace(steps=0),
        select=SimpleNamespace(mode="sync"),
        eval=SimpleNamespace(at_start=False),
        checkpoint=SimpleNamespace(export_hf=False),
    )
    run.step, run.ends, run.spans = 0, False, Spans()
    run.on_done = lambda: None
    for module, name in ((relayout, "first_start"), (sync_loop, "push_weights")):
        monkeypatch.setattr(
            module, name, lambda run, *_, name=name: done.append((name, run.spans.current))
        )
    monkeypatch.setattr(report, "end", lambda run: None)
    sync_loop.train(run, lambda run: None)
    return done


def test_engines_are_awaited_before_the_push_and_in_a_phase_of_their_own(first) -> None:
    assert first == [("first_start", "start"), ("push_weights", "sync")]


def test_the_first_start_waits_for_a_slow_engine_and_ends_with_one_that_refuses() -> None:
    run = run_of(None, engine=Engine([], slow=2))
    run.cfg.cluster.timeout_s = 60
    relayout.first_start(run)
    assert run.said == ["alive", "alive"]
    run = run_of(None, engine=ChildEngine("tests.contracts.odd_engines:refuses", {}))
    run.cfg.cluster.timeout_s = 60
    try:
        with pytest.raises(ValueError, match="this engine has other sizes"):
            relayout.first_start(run)
    finally:
        run.engine.close()


def test_the_first_start_leaves_a_crash_to_the_push_which_starts_again() -> None:
    run = run_of(None, engine=Engine([], dies=True))
    run.engine.abort = lambda ids: (_ for _ in ()).throw(EngineGoneError("gone"))
    relayout.first_start(run)

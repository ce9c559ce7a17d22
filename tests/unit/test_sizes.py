"""Engines that change their size between two steps, without engines."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlcore.cli.builders import sizes
from rlcore.cli.world import World
from rlcore.config.schema import Config, DebugConfig, RolloutConfig, TrainConfig
from rlcore.hf.config import HFConfig
from rlcore.rollout.child import ChildEngine
from rlcore.rollout.errors import EngineFailedError
from rlcore.rollout.transport import LocalHub
from rlcore.rollout.worker import NoScorer, RolloutWorker
from rlcore.sched.planner import FixedSizes, TPPlanner
from rlcore.trainer import phases, report, sync_loop
from rlcore.trainer.device import Device, OffloadDevice
from rlcore.trainer.progress import Observers
from rlcore.utils.spans import Spans
from tests import kit
from tests.parts import Part, parts_of, sizes_of

HF = HFConfig.from_dict(kit.tiny_config("qwen3") | {"model_type": "qwen3"})


class Engine(Part):
    """Starts after it was asked `slow` times whether it does."""

    def __init__(self, said: list[str], slow: int = 0, dies: bool = False) -> None:
        super().__init__("engine", said)
        self.slow, self.dies = slow, dies

    def resize(self, tp: int) -> None:
        self.said.append(f"engine tp {tp}")

    def is_starting(self, timeout_s: float) -> bool:
        self.slow -= 1
        if self.dies and self.slow < 0:
            self.failure = "out of memory"
        return self.slow >= 0


class Heard(Spans):
    """Spans that write down their phases."""

    def __init__(self, said: list[str]) -> None:
        super().__init__(listener=lambda phase: said.append(f"phase {phase}"))


def run_of(
    policy: Any = None,
    tp: int = 1,
    *,
    offload: bool = False,
    engine: Any = None,
    timeout_s: float = 60.0,
) -> Any:
    said: list[str] = []
    engine = engine or Engine(said)
    engine.said = said
    parts = parts_of(
        said,
        engine=engine,
        sizes=sizes_of(said, tp, policy),
        spans=Heard(said),
        timeout_s=timeout_s,
    )
    parts.progress.begin(1)
    return SimpleNamespace(
        cfg=config(adaptive_tp=policy is not None),
        said=said,
        engine=engine,
        device=(OffloadDevice if offload else Device)(parts),
        ranks=parts.ranks,
        data=SimpleNamespace(source=SimpleNamespace(next_kind=lambda: "short")),
        rollout=SimpleNamespace(worker=SimpleNamespace(cache_used=0.0)),
        step=1,
        progress=parts.progress,
        spans=parts.spans,
        observers=Observers(),
        checkpoints=SimpleNamespace(is_pending=False),
    )


def tp_of(run: Any) -> int:
    return run.device.parts.sizes.now.tp


CHANGE = ["phase resize_engines", "engine tp 2", "sized 2", "channel tp 2", "phase "]


def test_a_rise_of_preemptions_gives_the_next_round_of_that_kind_larger_engines() -> None:
    run = run_of(TPPlanner(1, 2))
    for kind, preempted in (("short", 4), ("long", 9), ("short", 8)):
        phases.resize_engines(run)
        assert not run.said  # nothing to be done
        phases.observe_round(run, kind, {"sched/preemptions": float(preempted)})
        assert run.progress.metrics["sched/rollout_tp"] == 1
    phases.resize_engines(run)
    assert run.said == CHANGE
    assert tp_of(run) == 2
    run.data.source.next_kind = lambda: "long"  # there was no rise in these
    phases.resize_engines(run)
    assert tp_of(run) == 1
    phases.observe_round(run, "long", {})
    assert run.progress.metrics["sched/rollout_tp"] == 1


def test_full_caches_keep_engines_large() -> None:
    run = run_of(TPPlanner(2, 2), tp=2)
    run.rollout.worker.cache_used = 0.95
    for _ in range(6):
        phases.observe_round(run, "short", {})
        phases.resize_engines(run)
    assert tp_of(run) == 2 and run.progress.metrics["sched/cache_used"] == 0.95
    run.rollout.worker.cache_used = 0.5
    phases.observe_round(run, "short", {})
    phases.resize_engines(run)
    assert tp_of(run) == 1


def test_the_learner_makes_room_for_engines_that_start_and_they_sleep_until_the_push() -> None:
    run = run_of(FixedSizes([2]), offload=True, engine=Engine([], slow=2))
    phases.resize_engines(run)
    assert run.said == [
        "phase resize_engines",
        "learner offload",
        *CHANGE[1:4],
        *("phase resize_engines", "phase resize_engines"),  # signs of life
        "engine sleep weights kv_cache",
        "phase ",
    ]


def test_an_engine_that_does_not_start_in_time_ends_the_run_in_a_sentence() -> None:
    run = run_of(FixedSizes([2]), engine=Engine([], slow=10**9), timeout_s=0.05)
    with pytest.raises(TimeoutError, match=r"timeout_s 0.05 exceeded: .* not started on rank 0; "):
        phases.resize_engines(run)


def test_an_engine_that_fails_as_it_starts_is_left_to_the_push() -> None:
    run = run_of(FixedSizes([2]), engine=Engine([], slow=1, dies=True))
    phases.resize_engines(run)
    assert run.engine.failure and tp_of(run) == 2


def test_a_child_that_fails_as_it_starts_is_started_again_before_the_push(tmp_path: Path) -> None:
    size = {"file": str(tmp_path / "died"), "tp": 1}
    engine = ChildEngine(
        "tests.contracts.odd_engines:dies_once",
        lambda: size,
        start_s=60.0,
        resize=lambda tp: size.update(tp=tp),
    )
    try:
        worker = RolloutWorker(LocalHub(), engine, NoScorer(), str, deadline_s=1.0)
        said: list[str] = []
        parts = parts_of(
            said,
            engine=engine,
            sizes=sizes_of(said),
            restart_engine=worker.restart_engine,
        )
        device = Device(parts)
        device.resize_engines(2)
        assert "exited with code 7" in engine.failure
        with device.train():
            device.update_weights(1)
        engine.begin_load(1)  # as the push does
        assert not engine.failure
    finally:
        engine.close()


def test_after_the_last_step_and_without_the_switch_nothing_changes() -> None:
    run = run_of(FixedSizes([2]))
    run.step = run.cfg.run.steps
    phases.resize_engines(run)
    none = run_of(None)
    phases.resize_engines(none)
    phases.observe_round(none, "all", {})
    assert not run.said and not none.said
    assert none.progress.metrics == {"sched/cache_used": 0.0}


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
    cfg = sizes.with_tp(config(tp=2, max_running_requests=64, kv_cache_tokens=1000), 4)
    r = cfg.rollout
    assert (r.tp, r.max_running_requests, r.kv_cache_tokens) == (4, 128, 2000)
    r = sizes.with_tp(cfg, 1).rollout
    assert (r.tp, r.max_running_requests, r.kv_cache_tokens) == (1, 32, 500)


def test_sizes_go_as_far_as_ranks_heads_and_caches_allow(monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert HF.num_heads == 4

    def bounds(**rollout: Any) -> tuple[int, int]:
        found = sizes.size_policy(config(adaptive_tp=True, **rollout), HF, world(8))
        return found._min, found._max

    assert bounds(tp=1) == (1, 4)  # 4 heads
    assert bounds(tp=2, max_tp=2) == (1, 2)
    longest = 128
    assert HF.max_positions >= longest
    monkeypatch.setattr(sizes.memory, "longest", lambda cfg, hf: longest)
    assert bounds(tp=2, kv_cache_tokens=2 * longest - 1) == (2, 4)  # half of it holds no sequence


def test_only_rank_0_decides() -> None:
    cfg = config(adaptive_tp=True)
    assert sizes.make_sizes(cfg, HF, world(2), None).policy is not None
    assert sizes.make_sizes(cfg, HF, world(2, rank=1), None).policy is None
    assert sizes.make_sizes(config(), HF, world(2), None).policy is None


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
        sizes.size_policy(config(**rollout), HF, world(8))


# ---- the engines that start with the run


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What a run without steps does before its end, and the phase that it does it in."""
    done: list[tuple[str, str]] = []
    run = run_of()
    run.cfg = SimpleNamespace(
        run=SimpleNamespace(steps=0),
        select=SimpleNamespace(mode="sync"),
        eval=SimpleNamespace(at_start=False),
        checkpoint=SimpleNamespace(export_hf=False),
        rollout=SimpleNamespace(adaptive_tp=False),
        debug=SimpleNamespace(rollout_tp=()),
    )
    run.step, run.on_done = 0, lambda: None
    for name in ("wait_for_engines", "update_weights"):
        monkeypatch.setattr(
            run.device, name, lambda *_, name=name: done.append((name, run.spans.current))
        )
    monkeypatch.setattr(report, "started", lambda run: None)
    monkeypatch.setattr(report, "end", lambda run: None)
    sync_loop.train(run, lambda run: None)
    return done


def test_engines_are_awaited_before_the_push_and_in_a_phase_of_their_own(first) -> None:
    assert first == [("wait_for_engines", "start"), ("update_weights", "update_weights")]


def test_the_first_start_waits_for_a_slow_engine_and_ends_with_one_that_refuses() -> None:
    run = run_of(engine=Engine([], slow=2))
    run.device.wait_for_engines()
    assert run.said == ["phase ", "phase "]  # signs of life
    run = run_of(engine=ChildEngine("tests.contracts.odd_engines:refuses", {}))
    try:
        with pytest.raises(ValueError, match="this engine has other sizes"):
            run.device.wait_for_engines()
    finally:
        run.engine.close()


def test_the_first_start_leaves_a_crash_to_the_push_which_starts_again() -> None:
    run = run_of(engine=Engine([], dies=True))
    run.engine.abort = lambda ids: (_ for _ in ()).throw(EngineFailedError("gone"))
    run.device.wait_for_engines()

"""The stream trainer on ranks: what is trained while others decode adds up to the same step."""

import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import kit, runs

pytestmark = pytest.mark.ranks(2)

# Floors on the decode step keep a round going while commands travel.
TIMES = "--debug.decode_floor_ms", 30, "--rollout.progress_interval_s", 0.05
SETTINGS = (
    *("--run.steps", 2, "--data.prompts_per_step", 8, "--rollout.max_running_requests", 64),
    *("--eval.no_at_start", "--eval.no_at_end", "--checkpoint.no_export_hf", *TIMES),
)
STREAM = "--mode", "stream"
KL = "--algo.kl_coef", 0.1, "--algo.loss_agg_mode", "seq-mean-token-mean"
SCORES = (
    "critic/score/mean",
    "critic/score/std_err",
    "response_length/mean",
    "response_length/max",
)
UPDATE = (
    "actor/loss",
    "actor/grad_norm",
    "actor/entropy",
    "actor/pg_loss",
    "critic/advantages/max",
)
LAYOUTS = {
    "tp2": ("--train.tp", 2),
    "pp2": ("--train.pp", 2, "--rollout.progress_interval_s", 0.05),
    "rejecting": ("--algo.rollout_rs", "token_k1", "--algo.rollout_rs_threshold", "0.9_1.1"),
}


def job(folder: Path, name: str, *more: object) -> runs.Job:
    argv = runs.arguments(folder / "model", folder / "runs", name, *SETTINGS, *more)
    return {"name": name, "argv": argv}


class Found:
    def __init__(self, folder: Path):
        self.runs = folder / "runs"
        runs.tiny_model(folder / "model")
        self.gang = runs.run(
            2,
            [
                job(folder, "sync", *KL),
                job(folder, "stream", *KL, *STREAM),
                job(folder, "offload", *KL, *STREAM, "--train.offload"),
                job(folder, "one replica", *STREAM, "--train.tp", 2),
                job(folder, "whitened", *STREAM, "--algo.whiten_advantages"),
                job(folder, "updates", *STREAM, "--train.samples_per_update", 4),
            ],
            folder / "gang",
        )

    def rows(self, name: str) -> dict[int, dict[str, Any]]:
        self.gang.check(name, 2)
        return runs.rows(self.runs / name)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("stream"))


def same_step(ours: dict[str, Any], theirs: dict[str, Any], rtol: float = 2e-5) -> None:
    for name in SCORES:
        assert ours[name] == pytest.approx(theirs[name], rel=1e-9), name
    for name in UPDATE:
        assert ours[name] == pytest.approx(theirs[name], rel=rtol, abs=1e-7), name


@pytest.mark.parametrize("name", ["stream", "offload"])
def test_training_early_changes_no_step(found: Found, name: str) -> None:
    ours, sync = found.rows(name), found.rows("sync")
    for step in (1, 2):
        same_step(ours[step], sync[step])
        assert ours[step]["actor/kl_loss"] == pytest.approx(sync[step]["actor/kl_loss"], abs=1e-6)
        assert ours[step]["training/trained_rows"] == 32
        assert 0.2 <= ours[step]["sched/stream_at"] <= 0.5
        assert ours[step]["sched/migrated"] >= 0  # as the next: how many, the clock decides
        assert 0 <= ours[step]["sched/streamed_tokens"] <= 1
        assert "sched/stream_at" not in sync[step]
        rate, seconds = "perf/train_tokens_per_s", "timing_s/update_actor"
        late = ours[step].get(rate, 0.0) * ours[step][seconds]  # what was early took no such time
        early = ours[step]["sched/streamed_tokens"]
        assert late < (1 - early / 2) * sync[step][rate] * sync[step][seconds] or not early
    a, b = (runs.checkpoint(found.runs / n, 2) for n in (name, "sync"))
    for part in (a, b):
        part.pop("common")
        part.pop("state")
    weights = {k for k in a if "optimizer" not in k}
    kit.assert_close_named({k: a[k] for k in weights}, {k: b[k] for k in weights}, rtol=1e-5)


def test_something_is_trained_early_and_goes_on_elsewhere(found: Found) -> None:
    rows = [row for name in ("stream", "offload") for row in found.rows(name).values()]
    assert sum(row["sched/streamed_tokens"] for row in rows) > 0
    assert sum(row["sched/migrated"] for row in rows) > 0


def test_what_needs_all_samples_first_is_refused(found: Found) -> None:
    wanted = {
        "one replica": "all ranks are one engine or one model-parallel group; use more ranks",
        "whitened": "--algo.whiten_advantages: needs all samples of a step before the first",
        "updates": "--train.samples_per_update 4: --mode stream accumulates one update",
    }
    for name, sentence in wanted.items():
        assert found.gang.code(name) == 2, name
        said = found.gang.text(name) + found.gang.text(name, 1)  # one of them says it
        assert sentence in said
        assert "Traceback" not in said


def test_sums_added_up_early_are_the_gradient() -> None:
    """2e-6, in fp32: dense and packed, means over tokens. Prefixes are shared among other rows."""
    for rank in kit.run_ranks(2, "tests.ranks.stream_ranks:gradients"):
        for name, apart in rank.items():
            assert apart < 2e-6, (name, apart)


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_model_replicas_over_several_ranks_train_early_together(tmp_path: Path) -> None:
    runs.tiny_model(tmp_path / "model")
    jobs = [
        job(tmp_path, f"{mode} {name}", "--mode", mode, *keys)
        for name, keys in LAYOUTS.items()
        for mode in ("sync", "stream")
    ]
    gang = runs.run(4, jobs, tmp_path / "gang", timeout_s=500)
    for name in LAYOUTS:
        gang.check(f"stream {name}", 4)
        ours, sync = (
            runs.rows(tmp_path / "runs" / f"{mode} {name}") for mode in ("stream", "sync")
        )
        for step in (1, 2):
            same_step(ours[step], sync[step], 1e-4)
            assert ours[step]["sched/streamed_tokens"] >= 0  # the clock decides how many


@pytest.mark.slow
def test_a_gradient_that_was_begun_is_begun_again_when_no_engine_is_left(tmp_path: Path) -> None:
    """Rank 1 trains when the engine of rank 0, the last one, is killed: all start again."""
    runs.tiny_model(tmp_path / "model")
    slow = "--debug.decode_floor_ms", 150, "--checkpoint.every", 1
    killed = job(tmp_path, "killed", *STREAM, *slow) | {"programs": True}
    jobs = [job(tmp_path, "sync"), killed]
    gang = runs.Running(2, jobs, tmp_path / "gang")
    try:
        end, saved = time.monotonic() + 200, tmp_path / "runs" / "killed" / "checkpoints"
        while not (saved / "step_000001").is_dir():
            assert time.monotonic() < end
            time.sleep(0.02)
        time.sleep(2.5)
        children = psutil.Process(gang.processes[0].pid).children()
        (engine,) = [c for c in children if "rlcore.rollout.process" in c.cmdline()]
        engine.send_signal(signal.SIGKILL)
    finally:
        done = gang.wait(280)
    done.check("killed", 2)
    ours, sync = (runs.rows(tmp_path / "runs" / name) for name in ("killed", "sync"))
    assert ours[2]["sched/engines_down"] == 1
    assert ours[2]["sched/repairs"] == 1
    same_step(ours[2], sync[2], 1e-4)

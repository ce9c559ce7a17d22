"""Nothing hangs in silence: real runs on two ranks in which rank 1 stops, dies, sleeps, raises or
never comes. Each ends by itself and names rank 1."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlcore.cli import doctor
from rlcore.rollout.transport import free_port
from rlcore.utils import verdict
from tests import kit, runs

pytestmark = pytest.mark.ranks(2)

LIMIT_S = 15


def stuck(folder: Path, how: str, *more: object) -> tuple[runs.Gang, str, Path]:
    """A run whose rank 1 gets stuck in its first update: what became of it, what rank 0 said, and
    its folder."""
    model = runs.tiny_model(folder / "model")
    argv = ["--algo", "tests.stuck_algo", "--algo.how", how, "--eval.no_at_start"]
    argv += ["--cluster.timeout_s", str(LIMIT_S), "--rollout.stall_timeout_s", str(LIMIT_S)]
    argv = runs.arguments(model, folder / "runs", "x", *argv, *more)
    gang = runs.Running(2, [{"name": "x", "argv": argv}], folder / "gang")
    try:
        end = time.monotonic() + 150
        while gang.processes[0].poll() is None:
            assert time.monotonic() < end, "rank 0 still waits"
            time.sleep(0.05)
    finally:
        for process in gang.processes:
            process.kill()
            process.wait()
    ended = runs.Gang(gang.folder, [p.returncode for p in gang.processes])
    return ended, ended.text("x"), folder / "runs" / "x"


def test_a_stopped_rank_is_named_with_its_phase_and_doctor_reads_it_back(tmp_path: Path) -> None:
    gang, said, run = stuck(tmp_path, "stop")
    assert gang.codes[0] == 1
    assert "stuck ranks" in said and "Traceback" not in said
    assert "rank 1: process" in said and "is stopped by a signal; last heartbeat" in said
    assert "phase update_actor has made no progress" in said
    lines = "\n".join(doctor.examine(run, stacks=True))
    assert "is stopped by a signal; last heartbeat" in lines
    assert "rank 0 (process" in lines and "MainThread" in lines
    record = verdict.read(run)[0]
    assert record["waits"] == "a collective" and record["phase"] == "update_actor"
    assert any("all_reduce" in last for last in record["collectives"]["last"])


@pytest.mark.slow
def test_a_rank_that_died_is_named(tmp_path: Path) -> None:
    gang, said, _ = stuck(tmp_path, "die")
    assert gang.codes[1] == -signal.SIGKILL and gang.code("x") == 1
    assert "rank 1: process" in said and "has exited; last heartbeat" in said


@pytest.mark.slow
def test_a_rank_that_sleeps_is_told_from_one_that_waits_for_it(tmp_path: Path) -> None:
    _, said, run = stuck(tmp_path, "sleep")
    (named,) = [line for line in said.splitlines() if line.startswith("  rank 1: ")]
    assert "stuck_algo.py" in named and "in phase update_actor of step 1" in named
    assert sorted(verdict.read(run)) == [0, 1]


@pytest.mark.slow
def test_a_rank_that_raises_is_named_with_its_reason(tmp_path: Path) -> None:
    gang, said, run = stuck(tmp_path, "raise")
    everything = said + gang.text("x", 1)
    assert "the loss of rank 1 is broken" in everything and "Traceback" not in everything
    assert "failed: rank 1: the loss of rank 1 is broken" in verdict.read(run)[1]["reason"]


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    model = runs.tiny_model(tmp_path / "model")
    argv = runs.arguments(model, tmp_path / "runs", "x", "--cluster.timeout_s", 2)
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-m", "rlcore", "train", *argv],
        env=os.environ
        | world
        | {"MASTER_PORT": str(free_port()), "PYTHONPATH": kit.python_path()}
        | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "start-up: rank 1 of 2 has not joined within --cluster.timeout_s 2" in done.stderr
    assert "Traceback" not in done.stderr
    told = json.loads((tmp_path / "runs" / "x" / "flight" / "verdict.json").read_text())
    assert told["suspects"] == [1]

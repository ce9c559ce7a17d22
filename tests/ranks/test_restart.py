"""Runs under torchrun that are killed in part, told to end, and started again."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from rlcore.rollout.transport import free_port
from tests import kit, runs
from tests.sockets import of_page

pytestmark = pytest.mark.ranks(2)

LAUNCHER = [sys.executable, str(runs.ROOT / "recipes" / "torch_run.py")]


@contextmanager
def launched(
    folder: Path, name: str, where: list[str], *more: object
) -> Iterator[subprocess.Popen]:
    """torchrun as recipes start it; what it and its ranks say is in `<name>.txt`."""
    model = runs.tiny_model(folder / "model")
    argv = runs.arguments(model, folder / "runs", "x", "--eval.no_at_start", "--eval.no_at_end")
    argv += ["--checkpoint.no_export_hf", *map(str, more)]
    launcher = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "TORCHELASTIC_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(launcher)}
    env |= {"PYTHONPATH": kit.python_path(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with open(folder / f"{name}.txt", "wb") as output:
        process = subprocess.Popen(
            [*LAUNCHER, *where, "-m", "rlcore", "train", *argv],
            env=env,
            cwd=runs.ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen) -> None:
    """Kill a launcher and its ranks, as when a node disappears."""
    try:
        found = psutil.Process(process.pid)
        all_of_it = [found, *found.children(recursive=True)]
    except psutil.NoSuchProcess:
        all_of_it = []
    for each in all_of_it:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue  # ended meanwhile
    process.wait()


def until(condition: Callable[[], bool], process: subprocess.Popen, text: Path) -> None:
    limit = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < limit, text.read_text()[-3000:]
        assert process.poll() is None, text.read_text()[-3000:]
        time.sleep(0.05)


def steps(folder: Path) -> list[int]:
    """Of the run so far."""
    file = folder / "runs" / "x" / "metrics.jsonl"
    return list(runs.rows(file.parent)) if file.exists() else []


def attack(launcher: int) -> int:
    """What any program on the machine can do: send garbage to every port of a run, and replace its
    alarm in torchrun's store. Returns the number of alarms."""
    forged = 0
    for port, is_store in kit.ports(launcher).items():
        with socket.create_connection(("127.0.0.1", port)) as garbage:
            garbage.sendall(bytes(range(256)) * 8)
        if not is_store:
            continue
        limit = timedelta(seconds=20)
        store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=limit)
        for key in store.list_keys():
            if key.endswith("/health/beat/0"):
                store.set(key.replace("beat/0", "alarm"), "[1]")
                forged += 1
    return forged


def test_a_rank_that_dies_costs_a_start_and_a_sigterm_saves_and_leaves_with_zero(
    tmp_path: Path,
) -> None:
    """Rank 0 is killed when step 3 is saved; torchrun starts both again. Then another program on
    the machine attacks the run, and Slurm wants the nodes."""
    where = ["--standalone", "--local-addr", "localhost", "--nproc-per-node", "2"]
    keys = "--checkpoint.every", 3, "--debug.kill_at_step", 3, "--run.steps", 500
    text = tmp_path / "one.txt"
    with launched(tmp_path, "one", [*where, "--max-restarts", "1"], *keys) as process:
        until(lambda: steps(tmp_path)[-1:] >= [5], process, text)
        assert kit.listening(process.pid) == {"127.0.0.1"}  # torchrun's two stores as well
        expected = [int(n) for n in of_page("torchrun", "one node").values()]
        assert sum(kit.ports(process.pid).values()) == sum(expected)
        assert list((tmp_path / "runs").glob(".*.secret")) == []
        assert attack(process.pid) == 2  # of both starts
        before = steps(tmp_path)[-1]
        until(lambda: steps(tmp_path)[-1] >= before + 5, process, text)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, text.read_text()[-3000:]
    said = text.read_text()
    for rank in (0, 1):
        log = (tmp_path / "runs" / "x" / "logs" / f"rank{rank}.log").read_text()
        assert log.count("ignored an invalid alarm in the run's store") == 1
    last = steps(tmp_path)[-1]
    assert steps(tmp_path) == list(range(1, last + 1))
    assert "3 of 500 steps done" in said
    assert f"ended by SIGTERM after step {last} of 500, which is saved" in said
    saved = tmp_path / "runs" / "x" / "checkpoints" / f"step_{last:06d}"
    assert (saved / "manifest.json").is_file()


def test_a_sigterm_ends_an_asynchronous_run_which_goes_on_with_the_samples_that_it_had(
    tmp_path: Path,
) -> None:
    where = ["--standalone", "--local-addr", "localhost", "--nproc-per-node", "2"]
    keys = "--mode", "async", "--async.alpha", 2, "--cluster.rollout_ranks", 1
    keys += "--debug.decode_floor_ms", 20, "--run.steps"
    with launched(tmp_path, "one", where, *keys, 500) as process:
        until(lambda: steps(tmp_path)[-1:] >= [4], process, tmp_path / "one.txt")
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0, (tmp_path / "one.txt").read_text()[-3000:]
    last = steps(tmp_path)[-1]
    said = (tmp_path / "one.txt").read_text()
    assert f"ended by SIGTERM after step {last} of 500, which is saved" in said
    with launched(tmp_path, "two", where, *keys, last + 2) as process:
        assert process.wait(120) == 0, (tmp_path / "two.txt").read_text()[-3000:]
    assert steps(tmp_path) == list(range(1, last + 3))
    rows = runs.rows(tmp_path / "runs" / "x")
    ages = [rows[last + n]["training/off_policy/trajectory_staleness_worst/max"] for n in (1, 2)]
    assert 1 <= max(ages) <= 2


@pytest.mark.slow
def test_a_node_that_disappears_and_comes_back_is_waited_for(tmp_path: Path) -> None:
    """The launcher of node 1 and its rank are killed; node 0 starts its rank again, which waits for
    the other and goes on with it from the checkpoint."""
    port, keys = free_port(), ("--checkpoint.every", 1, "--run.steps", 40)

    def node(rank: int) -> list[str]:
        where = f"--nnodes 2 --nproc-per-node 1 --node-rank {rank} --max-restarts 1"
        return [*where.split(), "--master-addr", "127.0.0.1", "--master-port", str(port)]

    text = tmp_path / "zero.txt"
    with launched(tmp_path, "zero", node(0), *keys) as first:
        with launched(tmp_path, "one", node(1), *keys):
            until(lambda: steps(tmp_path)[-1:] >= [3], first, text)
        time.sleep(8)  # rank 0 waits meanwhile
        with launched(tmp_path, "two", node(1), *keys) as second:
            assert first.wait(240) == 0, text.read_text()[-3000:]
            assert second.wait(60) == 0, (tmp_path / "two.txt").read_text()[-3000:]
    assert steps(tmp_path) == list(range(1, 41))
    assert text.read_text().count("resumed from") == 1


def rank_of(launcher: int, rank: int) -> psutil.Process:
    """The process of a rank."""
    for process in psutil.Process(launcher).children():
        if process.environ().get("RANK") == str(rank):
            return process
    raise AssertionError(f"rank {rank} does not run")


SILENT = ["--cluster.timeout_s", "15", "--run.steps", "100000"]


@pytest.mark.slow
def test_ranks_whose_torchrun_is_stopped_name_it_and_end(tmp_path: Path) -> None:
    """It hosts the store, which then accepts everything and answers nothing."""
    where = ["--standalone", "--local-addr", "localhost", "--nproc-per-node", "2"]
    text = tmp_path / "one.txt"
    with launched(tmp_path, "one", where, *SILENT) as process:
        until(lambda: steps(tmp_path)[-1:] >= [2], process, text)
        ranks = [rank_of(process.pid, rank) for rank in (0, 1)]
        process.send_signal(signal.SIGSTOP)
        limit = time.monotonic() + 120  # they stay zombies, as their parent is stopped
        while not all(rank.status() == psutil.STATUS_ZOMBIE for rank in ranks):
            assert time.monotonic() < limit, text.read_text()[-3000:]
            time.sleep(0.1)
        said = text.read_text()
        assert f"torchrun's agent, process {process.pid} on" in said
        assert "which hosts the run's store, is stopped by a signal" in said
        assert "Traceback" not in said


@pytest.mark.slow
def test_a_rank_that_is_stopped_while_it_samples_is_named_long_before_the_round_stalls(
    tmp_path: Path,
) -> None:
    """--rollout.stall_timeout_s is half an hour here."""
    where = ["--standalone", "--local-addr", "localhost", "--nproc-per-node", "2"]
    text = tmp_path / "one.txt"
    slow = "--reward", "tests.scores.slow"  # most of the time is phase gen
    with launched(tmp_path, "one", where, *SILENT, *slow) as process:
        until(lambda: steps(tmp_path)[-1:] >= [1], process, text)
        stopped = rank_of(process.pid, 1)
        stopped.suspend()
        assert process.wait(120) == 1, text.read_text()[-3000:]
        said = text.read_text()
        assert f"rank 1: process {stopped.pid} on" in said and "is stopped by a signal" in said
        assert "rank 0: rank 1 has sent no heartbeat for 15 s" in said

"""Whether job.sbatch queues a run again, with stand-ins for Slurm's commands, and what torch_run.py
tells it. tests/ranks/test_slurm.py has a real Slurm."""

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.recipes.conftest import RECIPES


def job(folder: Path, srun: str, answers: str = "exit 0") -> tuple[int, bool]:
    """Exit status of a job whose nodes do `srun`, and whether it is queued again. `answers`: what
    becomes of a step that only asks whether all nodes are there."""
    srun = f'case "$*" in *" true") {answers} ;; esac\n{srun}'
    commands = {"srun": srun, "squeue": "echo RUNNING", "scontrol": "touch requeued"}
    for name, text in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "recipe.sh").touch()
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    command = ["bash", RECIPES / "slurm" / "job.sbatch", "recipe.sh"]
    done = subprocess.run(command, cwd=folder, env=env, timeout=60)
    assert not list(folder.glob("*.unfinished*"))
    return done.returncode, (folder / "requeued").exists()


@pytest.mark.parametrize(
    "srun, status, again",
    [
        ("exit 0", 0, False),
        ("exit 2", 2, False),
        ("exit 143", 143, True),
        ('touch "$RLCORE_UNFINISHED"', 0, True),
        ('touch "$RLCORE_UNFINISHED.failed"; exit 143', 1, False),
        ('touch "$RLCORE_UNFINISHED.failed"; exit 2', 2, False),
    ],
    ids=[
        "done",
        "failed on one node",
        "told to end",
        "told to end and saved",
        "failed, and the other nodes were told to end",
        "failed on all nodes",
    ],
)
def test_a_job_is_queued_again_where_it_was_told_to_end_and_not_where_it_failed(
    tmp_path: Path, srun: str, status: int, again: bool
) -> None:
    assert job(tmp_path, srun) == (status, again)


def test_a_job_that_lost_a_node_is_queued_again(tmp_path: Path) -> None:
    """Its peers fail before Slurm has noticed."""
    lost = 'touch "$RLCORE_UNFINISHED.failed"; exit 1'
    assert job(tmp_path, lost, answers="exit 1") == (143, True)


def test_what_the_start_before_has_left_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "slurm-7.unfinished.failed").touch()
    assert job(tmp_path, "exit 143") == (143, True)


@pytest.mark.parametrize(
    "code, status, told",
    [(1, 1, True), (2, 2, True), (-9, 137, True), (143, 143, False), (-15, 143, False)],
)
def test_ranks_that_end_by_themselves_are_told_from_those_that_were_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, status: int, told: bool
) -> None:
    torch_run = _torch_run(monkeypatch, ChildFailedError("x", {0: _failure(code)}))
    monkeypatch.setenv("RLCORE_UNFINISHED", str(tmp_path / "x"))
    assert torch_run.main() == status
    assert (tmp_path / "x.failed").exists() == told


def test_a_node_that_does_not_come_is_a_failure_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_run = _torch_run(monkeypatch, TimeoutError("no node 1"))
    monkeypatch.setenv("RLCORE_UNFINISHED", str(tmp_path / "x"))
    with pytest.raises(TimeoutError):
        torch_run.main()
    assert (tmp_path / "x.failed").exists()


def _failure(code: int) -> ProcessFailure:
    return ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file="")


def _torch_run(monkeypatch: pytest.MonkeyPatch, error: Exception):
    """recipes/torch_run.py, whose torchrun ends with `error`."""
    spec = importlib.util.spec_from_file_location("torch_run", RECIPES / "torch_run.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def main(*_: object) -> None:
        raise error

    monkeypatch.setattr(module.run, "main", main)
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    return module

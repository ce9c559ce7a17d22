"""CUDA MPS by way of a stand-in for NVIDIA's control program: started, joined, ended, and all that
may be in the way.

Not covered: the real daemon.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore.config.schema import RewardConfig
from rlcore.rewards.judge import mps
from rlcore.rewards.judge.config import JudgeRewardConfig
from rlcore.rewards.registry import config_class

CONTROL = f"""#!{sys.executable} -S
# `-f`: a daemon with a pipe that knows its pid; else: asks the daemon of the pipe folder.
import os, signal, sys, time
pipes = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
control, quit = os.path.join(pipes, "control"), os.path.join(pipes, "quit")
if sys.argv[1:] == ["-f"]:
    open(os.path.join(pipes, "..", "mask"), "w").write(str(os.environ.get("CUDA_VISIBLE_DEVICES")))
    if os.environ.get("STUB_FAILS"):
        sys.exit(os.environ["STUB_FAILS"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if os.environ.get("STUB_DEAF"):
        time.sleep(60)
    open(control + ".new", "w").write(str(os.getpid()))
    os.rename(control + ".new", control)
    while not os.path.exists(quit) or os.environ.get("STUB_STUBBORN"):
        time.sleep(0.01)
    sys.exit(0)
command = sys.stdin.read().strip()
try:
    stat = open("/proc/" + open(control).read() + "/stat").read()
except OSError:
    sys.exit("cannot find MPS control daemon process")
if stat.rpartition(") ")[2][0] == "Z":
    sys.exit("cannot find MPS control daemon process")
if command == "quit":
    open(quit, "w").close()
print("ok")
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the stand-in on PATH; the place for the daemon's folder."""
    program = tmp_path / "bin" / mps.CONTROL
    program.parent.mkdir()
    program.write_text(CONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.delenv(mps.PIPES, raising=False)
    yield tmp_path / "mps"


def pid_of(daemon: mps.Daemon) -> int:
    return int(Path(daemon.environment[mps.PIPES], "control").read_text())


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends while it is read
        return False


def wait_for(condition) -> bool:
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def end(daemon: mps.Daemon) -> None:
    """Release the daemon as its last process, and wait for its end."""
    pid = pid_of(daemon)
    daemon.close()
    assert wait_for(lambda: not is_alive(pid) and not Path(daemon.environment[mps.PIPES]).exists())


def test_the_daemon_stops_after_the_last_process_has_released_it(stub):
    """Whichever process started it: a process is a client of the daemon until its exit."""
    first, second = mps.join(stub), mps.join(stub)
    pid = pid_of(first)
    assert (
        first.environment
        == second.environment
        == {
            mps.PIPES: str(stub / "pipe"),
            mps.LOGS: str(stub / "log"),
        }
    )
    first.close()
    first.close()
    time.sleep(0.5)  # the keeper looks every 0.1 s
    assert is_alive(pid)
    third = mps.join(stub)
    assert pid_of(third) == pid
    second.close()
    third.close()
    assert wait_for(lambda: not is_alive(pid) and not (stub / "pipe").exists())


def test_a_daemon_of_somebody_else_is_used_and_left_alone(stub, monkeypatch):
    theirs = mps.join(stub)
    monkeypatch.setenv(mps.PIPES, theirs.environment[mps.PIPES])
    ours = mps.join(stub.with_name("other"))
    ours.close()
    assert ours.environment == {mps.PIPES: str(stub / "pipe")}
    assert is_alive(pid_of(theirs)) and not stub.with_name("other").exists()
    end(theirs)


def test_the_daemon_outlives_the_process_that_started_it_if_others_use_it(stub):
    code = (
        "import sys, time, pathlib; from rlcore.rewards.judge import mps;"
        "mps.join(pathlib.Path(sys.argv[1])); print('up', flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(stub)], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    while b"up" not in owner.stdout.readline():
        assert owner.poll() is None
    other = mps.join(stub)
    pid = pid_of(other)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    time.sleep(0.5)  # the keeper looks every 0.1 s
    assert is_alive(pid)
    end(other)
    again = mps.join(stub)  # and what it left is no obstacle
    assert pid_of(again) != pid
    end(again)


@pytest.mark.parametrize("mask", ["4,5,6,7", "3", "GPU-8d2b"])
def test_the_daemon_has_every_gpu_and_a_client_keeps_its_mask(stub, monkeypatch, mask):
    """A daemon with a mask renumbers its GPUs: a client with the same mask then finds none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    daemon = mps.join(stub)
    assert (stub / "mask").read_text() == "None"
    assert "CUDA_VISIBLE_DEVICES" not in daemon.environment
    assert os.environ["CUDA_VISIBLE_DEVICES"] == mask
    end(daemon)


def test_pipes_that_a_dead_daemon_left_are_cleared_away(stub, caplog):
    daemon = mps.join(stub)
    os.kill(pid_of(daemon), signal.SIGKILL)
    again = mps.join(stub)  # after the exit of the keeper
    assert "left behind by a daemon that has failed" in caplog.text
    assert is_alive(pid_of(again))
    daemon.close()
    end(again)


def test_a_daemon_that_does_not_obey_is_killed(stub, monkeypatch):
    monkeypatch.setenv("STUB_STUBBORN", "1")
    end(mps.join(stub, stop_s=0.6))


def test_the_signal_that_slurm_sends_to_a_job_stops_no_daemon_whose_ranks_still_run(stub):
    daemon = mps.join(stub)
    pid = pid_of(daemon)
    os.kill(int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1]), 15)
    time.sleep(0.5)
    assert is_alive(pid)
    end(daemon)


@pytest.mark.parametrize(
    "variable, value, said",
    [
        ("STUB_FAILS", "no permission for the GPU", "exited with status 1: no permission for"),
        ("STUB_DEAF", "1", "does not answer in time"),
    ],
)
def test_a_daemon_that_does_not_come_up_is_one_sentence(stub, monkeypatch, variable, value, said):
    monkeypatch.setenv(variable, value)
    with pytest.raises(mps.MPSError, match=said):
        mps.join(stub, timeout_s=1.0, stop_s=0.6)
    monkeypatch.delenv(variable)
    end(mps.join(stub))  # nothing is left that would hinder the next one


def test_a_missing_program_and_a_folder_without_permission_are_one_sentence(stub, monkeypatch):
    stub.write_text("a file where the folder should be")
    with pytest.raises(mps.MPSError, match="its folder .* cannot be used"):
        mps.join(stub)
    program = stub.parent / "bin" / mps.CONTROL
    program.chmod(0o644)
    with pytest.raises(mps.MPSError, match="nvidia-cuda-mps-control is not on PATH"):
        mps.join(stub.with_name("other"))


def run_config(**keys) -> JudgeRewardConfig:
    return JudgeRewardConfig(model="m", **keys)


def test_a_run_with_a_judge_on_its_gpus_has_a_daemon_and_others_have_none(stub, monkeypatch):
    monkeypatch.setattr(mps, "has_gpu", lambda: True)
    monkeypatch.setattr(mps, "folder_of", lambda run: stub)
    for name in (mps.PIPES, mps.LOGS):
        monkeypatch.delenv(name, raising=False)
    assert mps.of_run(RewardConfig()) is None
    assert mps.of_run(run_config(url="http://judge:1/v1")) is None
    assert mps.of_run(run_config(mps="off")) is None
    sums = config_class("exact:1,judge:0.5")
    daemon = mps.of_run(sums(judge=run_config()))
    assert daemon is not None
    assert os.environ[mps.PIPES] == str(stub / "pipe")
    end(daemon)
    for name in daemon.environment:
        monkeypatch.delenv(name)


def test_ranks_that_may_open_other_gpus_have_a_daemon_of_their_own(monkeypatch):
    """As Slurm's device cgroups do it; the masks of ranks in one cgroup change nothing."""
    found = []

    def join(folder: Path) -> mps.Daemon:
        found.append(folder)
        raise mps.MPSError("stop here")

    monkeypatch.setattr(mps, "join", join)
    monkeypatch.setattr(mps, "has_gpu", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "8")
    for rank, visible in enumerate((["nvidia0", "nvidia1"], ["nvidia0", "nvidia1"], ["nvidia1"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(rank))
        monkeypatch.setattr(mps, "gpu_files", lambda visible=visible: visible)
        assert mps.of_run(run_config()) is None
    assert found[0] == found[1] != found[2]


def test_a_run_says_why_there_is_no_mps_and_ends_only_if_it_was_asked_for(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(mps, "has_gpu", lambda: False)
    assert mps.of_run(run_config()) is None and not caplog.records
    with pytest.raises(ValueError, match="--reward.mps on: this machine has no NVIDIA GPU"):
        mps.of_run(run_config(mps="on"))
    monkeypatch.setattr(mps, "has_gpu", lambda: True)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv(mps.PIPES, raising=False)
    assert mps.of_run(run_config()) is None
    assert "share the GPU by time slices" in caplog.text and "on PATH" in caplog.text
    with pytest.raises(ValueError, match="--reward.mps on: nvidia-cuda-mps-control"):
        mps.of_run(run_config(mps="on"))


def test_limits_of_a_client_are_what_mps_reads():
    assert mps.limits(0, 0) == {}
    assert mps.limits(25, 4.0, device=1) == {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "1=3814M",
    }

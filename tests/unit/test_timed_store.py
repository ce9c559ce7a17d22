"""A store whose host does not answer: every call ends, the run ends, and the host is named."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlcore.cli import world
from rlcore.sync.peers import Peers
from rlcore.utils import health as healths
from rlcore.utils import verdict
from rlcore.utils.flight_recorder import FlightRecorder
from rlcore.utils.health import Health
from rlcore.utils.timed_store import TimedStore
from tests.forks import Fork

CALLS = {
    "add": ("n", 1),
    "check": (["k"],),
    "get": ("k",),
    "multi_get": (["k"],),
    "wait": (["k"], timedelta(seconds=0.2)),
    "compare_set": ("k", "v", "w"),
    "delete_key": ("k",),
}


def serve(file: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    Path(file).with_suffix(".part").write_text(str(store.port))
    os.replace(Path(file).with_suffix(".part"), file)
    time.sleep(600)


@dataclass
class Host:
    """A process with a store."""

    process: Fork
    port: int

    def client(self, wait_s: float = 0.2) -> dist.TCPStore:
        limit = timedelta(seconds=wait_s)
        return dist.TCPStore("127.0.0.1", self.port, wait_for_workers=False, timeout=limit)

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        while not all(") T " in (task / "stat").read_text() for task in tasks.iterdir()):
            time.sleep(0.01)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    file = tmp_path / "port"
    process = Fork(serve, (str(file),), dict(os.environ), tmp_path / "out")
    end = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < end, (tmp_path / "out").read_text()
        time.sleep(0.02)
    yield Host(process, int(file.read_text()))
    process.kill()
    process.wait()


def test_every_call_ends_while_the_host_is_stopped_and_works_again_afterwards(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlcore.utils.timed_store._MORE_S", 0.3)
    monkeypatch.setenv("MASTER_ADDR", "node7")
    stores = {name: TimedStore(host.client(), 0.2) for name in CALLS}
    stores["add"].set("k", "v")
    another = host.client()
    host.stop()
    for name, store in stores.items():
        with pytest.raises(TimeoutError, match="the run's store has not .* MASTER_ADDR node7"):
            getattr(store, name)(*CALLS[name])
        with pytest.raises(TimeoutError):  # at once, as the connection is still in use
            store.add("n", 1)
    with pytest.raises(TimeoutError):
        Peers(0, 2, another, timeout_s=0.2)
    host.go_on()
    end = time.monotonic() + 30
    while True:
        try:
            assert stores["check"].check(["k"]) in (True, False)
            return
        except TimeoutError:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_a_start_whose_store_accepts_and_never_answers_ends_in_words(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "ANSWER_S", 0.2)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(host.port))
    host.stop()
    with pytest.raises(TimeoutError, match="rank 1 got no answer from MASTER_ADDR 127.0.0.1"):
        world.connect(1, 0.2)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Short deadlines; the exit codes of ranks that end, which they do not."""
    for name, seconds in {"SILENT_S": 1.0, "GRACE_S": 0.3, "STORE_S": 0.2}.items():
        monkeypatch.setattr(healths, name, seconds)
    codes: list[int] = []
    monkeypatch.setattr("rlcore.utils.health.os._exit", codes.append)
    return codes


def report(folder: Path, codes: list[int]) -> str:
    """What the last rank said before it ended."""
    end = time.monotonic() + 30
    while not codes:
        assert time.monotonic() < end
        time.sleep(0.02)
    return (folder / "flight" / "verdict.json").read_text()


@pytest.mark.parametrize("is_agent", [True, False], ids=["torchrun's agent", "rank 0"])
def test_a_store_that_does_not_answer_ends_the_rank_and_its_host_is_named(
    host: Host, tmp_path: Path, quick: list[int], is_agent: bool
) -> None:
    flight = FlightRecorder(0, 2, tmp_path)
    rank = Health(FlightRecorder(1, 2, tmp_path), host.client(), 0.05, silence_s=0.1)
    pids = {"agent": host.process.pid} if is_agent else {"agent": 0, "pid": host.process.pid}
    rank.met({0: flight.at | pids, 1: rank.flight.at})
    rank.start(signals=False)
    try:
        other = host.client()
        for _ in range(40):
            other.set("beat/0", healths.json.dumps(flight.at))
            time.sleep(0.05)
        assert not quick
        host.stop()
        said = report(tmp_path, quick)
        what = "torchrun's agent" if is_agent else "rank 0"
        assert f"{what}, process {host.process.pid} on {flight.host}, which hosts the " in said
        assert "is stopped by a signal; last answer of the store" in said
        assert "rank 1: the run's store has not answered for 1 s" in said
        assert quick[0] == 1
    finally:
        rank.close()


def test_a_killed_torchrun_ends_the_rank_at_once_and_is_named(
    host: Host, tmp_path: Path, quick: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "node7")
    rank = Health(FlightRecorder(0, 1, tmp_path), host.client(), 0.05, silence_s=600.0)
    rank.met({0: rank.flight.at | {"agent": host.process.pid}})
    another = host.client()
    host.process.kill()
    host.process.wait()
    rank.start(signals=False)
    try:
        said = report(tmp_path, quick)
        assert f"torchrun's agent, process {host.process.pid} on" in said
        assert "which hosts the run's store, has exited" in said
        assert "rank 0: the run's store on MASTER_ADDR node7" in said
        assert "has closed the connection: its process has exited" in said
    finally:
        rank.close()
    for is_agent in (True, False):  # rank 0, where it hosts the store, has said why it ended
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(is_agent))
        assert world.World(0, 2, 0, torch.device("cpu"), another).fails_first() == is_agent


@pytest.mark.parametrize("watcher", [0, 1])
def test_a_rank_without_heartbeats_is_named_and_ends_the_run_in_any_phase(
    tmp_path: Path, quick: list[int], watcher: int
) -> None:
    store = dist.HashStore()
    stopped = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    silent = 1 - watcher
    places = {r: FlightRecorder(r, 2, None).at for r in (0, 1)}
    places[silent]["pid"] = stopped.pid
    flight = FlightRecorder(watcher, 2, tmp_path)
    flight.phase("gen")
    rank = Health(flight, store, 0.05, silence_s=0.1)
    rank.met(places)
    rank.start(signals=False)
    try:
        for k in range(40):  # a rank with heartbeats is left alone
            store.set(f"beat/{silent}", healths.json.dumps(places[silent] | {"time": float(k)}))
            time.sleep(0.05)
        assert not quick
        os.kill(stopped.pid, signal.SIGSTOP)
        said = report(tmp_path, quick)
        assert f"rank {watcher}: rank {silent} has sent no heartbeat for 1 s" in said
        assert f"rank {silent}: process {stopped.pid} on" in said and "is stopped by a sig" in said
        assert verdict.read(tmp_path)[watcher]["phase"] == "gen"
    finally:
        rank.close()
        stopped.kill()
        stopped.wait()


def test_a_rank_that_was_stopped_itself_starts_to_count_anew(tmp_path: Path) -> None:
    now = time.monotonic()
    rank = Health(FlightRecorder(0, 2, tmp_path), dist.HashStore(), silence_s=20.0)
    rank.met({r: FlightRecorder(r, 2, None).at for r in (0, 1)})
    assert rank._silence() == ""
    rank._looked_at = rank._answered_at = now - 100
    rank._seen = {1: (rank.known[1], now - 100)}
    assert rank._silence() == ""
    rank._answered_at = now - 100
    assert "the run's store has not answered for 20 s" in rank._silence()
    rank.done()  # the others may leave now
    assert rank._silence() == ""


def test_a_rank_exits_even_if_its_record_cannot_be_written(
    tmp_path: Path, quick: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(healths, "END_S", 0.1)
    flight = FlightRecorder(0, 1, tmp_path)
    monkeypatch.setattr(flight, "write", lambda *_: time.sleep(2))  # as on a stuck disk
    rank = Health(flight, None)
    begin = time.monotonic()
    healths._exit_later(7)
    rank.alarm("failed")
    assert quick == [7] and time.monotonic() > begin + 2

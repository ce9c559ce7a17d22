"""Flight records, the alarm that all ranks hear, and who is named."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from rlcore.cli import doctor
from rlcore.records import Aborted, Finished, Request, Rewarded, RewardResult, Sampling, Submit
from rlcore.trainer import seal
from rlcore.utils import verdict
from rlcore.utils.flight_recorder import KEPT_EVENTS, FlightRecorder
from rlcore.utils.health import Health, _state, meet
from tests import kit


def _record(rank: int, **more: Any) -> dict[str, Any]:
    found = {
        "rank": rank,
        "host": "a",
        "pid": 100 + rank,
        "time": 1000.0,
        "phase": "update_actor",
        "since": 940.0,
        "step": 3,
        "reason": "alarm from rank 0",
        "where": "rlcore/utils/collective.py:25 in reduce_floats",
        "waits": "a collective",
        "open": [],
        "num_open": 0,
        "collectives": {"groups": {"0:default_pg": {"entered": 9}}},
        "events": [],
        "stacks": {},
        "memory_gb": 1.0,
    }
    return found | more


def _named(records: list[dict[str, Any]], size: int = 2, **more: Any) -> list[tuple[int, str]]:
    given = {"beats": {}, "states": {}} | more
    found = verdict.suspects({r["rank"]: r for r in records}, size=size, **given)
    return [(s.rank, s.why) for s in found]


def test_a_stopped_process_is_named_before_everything_else():
    beat = {"host": "a", "pid": 101, "time": 970.0, "phase": "gen", "since": 960.0, "step": 3}
    [(rank, why)] = _named([_record(0)], beats={1: beat}, states={1: "stopped"})
    assert rank == 1
    assert why.startswith("process 101 on a is stopped by a signal; last heartbeat")
    assert why.endswith("ago, in phase gen of step 3 for 10 s")


def test_a_rank_without_a_sign_of_life_is_told_from_a_silent_one():
    beat = {"host": "b", "pid": 7, "time": 970.0, "phase": "gen", "since": 960.0, "step": 3}
    assert _named([_record(0)]) == [(1, "has sent no heartbeat since the start")]
    [(rank, why)] = _named([_record(0)], beats={1: beat})
    assert rank == 1 and why.startswith("no heartbeat for ") and "in phase gen of step 3" in why


def test_the_rank_that_has_entered_fewer_collectives_is_named_with_its_line():
    late = {"groups": {"0:default_pg": {"entered": 8}, "1:tp": {"entered": 2}}}
    here = "my_pkg/loss.py:12 in loss"
    records = [_record(0), _record(1, collectives=late, waits="", where=here)]
    [(rank, why)] = _named(records)
    assert rank == 1
    assert why.startswith(
        "has entered 8 collectives of group 0:default_pg, other ranks 9; it is at"
    )
    assert here in why


def test_with_equal_counts_the_rank_that_does_not_wait_is_named():
    records = [_record(0), _record(1, waits="", where="x.py:1 in f"), _record(2)]
    assert _named(records, 3)[0] == (
        1,
        "is not waiting for another rank; it is at x.py:1 in f, in phase update_actor of step 3 "
        "for 60 s",
    )
    assert _named([_record(0), _record(1)]) == []
    assert _named([_record(0, waits=""), _record(1, waits="")]) == []


def test_where_all_ranks_wait_for_each_other_the_network_is_named():
    words = "no rank is suspected: all ranks wait at one line; check the network between nodes"
    both = {r: _record(r) for r in (0, 1)}
    assert verdict.table(both, {}, 2, [], "x")[1] == f"  {words}"
    apart = both | {1: _record(1, where="x.py:1 in f")}
    assert verdict.table(apart, {}, 2, [], "x")[1] == "  no rank is suspected"
    assert verdict.table({0: _record(0)}, {}, 1, [], "x")[1] == "  no rank is suspected"


def test_the_rank_that_failed_first_is_named_with_its_reason():
    records = [
        _record(0, reason="failed: connection closed", time=1002.0),
        _record(1, reason="failed: the loss is broken"),
    ]
    assert _named(records) == [(1, "failed: the loss is broken")]


def test_the_table_is_one_screen_and_has_the_oldest_request():
    opened = [["t1.0", "decoding", 900.0], ["t1.1", "reward", 990.0]]
    records = {r: _record(r) for r in range(100)} | {5: _record(5, open=opened, num_open=2)}
    found = [verdict.Suspect(7, "x")]
    lines = verdict.table(records, {}, 100, found, "phase gen has made no progress")
    assert len(lines) < 24 and max(map(len, lines)) < 140
    assert lines[1] == "  rank 7: x" and lines[4].startswith("  7 ")
    assert "2 open requests, the oldest t1.0 (decoding on rank 5, 100 s)" in lines[-1]


def test_a_flight_knows_what_is_open_and_keeps_its_last_events(tmp_path: Path):
    flight = FlightRecorder(0, 1, tmp_path)
    flight.phase("gen")
    requests = tuple(
        Request(id=f"t0.{k}", prompt=np.zeros(1, np.int32), sampling=Sampling()) for k in range(3)
    )
    flight.see(Submit(rank=0, requests=requests, prompts={}))
    flight.see(Finished(id="t0.0", num_tokens=3, finish="stop"))
    flight.see(Finished(id="t0.1", num_tokens=3, finish="stop"))
    flight.see(Rewarded(id="t0.1", result=RewardResult(score=1.0)))
    flight.see(Aborted(id="t0.2", num_tokens=1))
    record = flight.record("asked")
    assert [(i, what) for i, what, _ in record["open"]] == [("t0.0", "reward")]
    assert record["phase"] == "gen" and "test_flight_recorder.py" in record["where"]
    assert "test_flight_recorder.py" in record["stacks"]["MainThread"]
    for i in range(2 * KEPT_EVENTS):
        flight.note(str(i))
    assert len(flight.record("")["events"]) == KEPT_EVENTS


def test_a_process_of_another_pid_namespace_is_not_looked_for_in_this_one():
    """Containers may share a host name; a process id of one is nobody, or somebody else, in the
    other."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    flight = FlightRecorder(0, 2, None)
    mine = flight.at | {"pid": ended.pid}
    elsewhere = mine | {"machine": flight.machine.replace("pid:[", "pid:[1")}
    assert elsewhere["host"] == flight.host and elsewhere["machine"] != flight.machine
    assert _state(mine, flight.machine) == "dead"
    assert _state(elsewhere, flight.machine) == _state(None, flight.machine) == ""
    assert (
        _state(flight.at, FlightRecorder(1, 2, None).machine) == ""
    )  # lives, and is on this machine


class _Two:
    """Two ranks in one process, which share a store."""

    def __init__(self, folder: Path):
        store = dist.HashStore()
        self.gangs = [
            Health(
                FlightRecorder(r, 2, folder), dist.PrefixStore("gang", store), beat_s=0.05
            ).start(signals=False)
            for r in range(2)
        ]


def test_an_alarm_of_one_rank_is_answered_by_all_and_told_once(tmp_path: Path):
    two = _Two(tmp_path)
    two.gangs[1].flight.phase("update_actor")
    two.gangs[1].alarm("phase update_actor has made no progress for 6 s")
    two.gangs[0].wait_for_alarm()
    for gang in two.gangs:
        gang.close()
        gang.close()
    records = verdict.read(tmp_path)
    assert records[0]["reason"] == "alarm from rank 1"
    assert records[1]["reason"] == "phase update_actor has made no progress for 6 s"
    told = json.loads((tmp_path / "flight" / "verdict.json").read_text())
    assert "rank 1: phase update_actor has made no progress for 6 s" in "\n".join(told["lines"])
    lines = "\n".join(doctor.examine(tmp_path))
    assert "no step is complete" in lines and "rank 1 (process" in lines
    assert "phase update_actor" in lines


def test_a_second_alarm_waits_for_the_first(tmp_path: Path):
    two = _Two(tmp_path)
    threads = [threading.Thread(target=two.gangs[0].alarm, args=(f"alarm {k}",)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for gang in two.gangs:
        gang.close()
    assert verdict.read(tmp_path)[0]["reason"].startswith("alarm ")


END = """
import os, signal, sys, time
from pathlib import Path
from rlcore.utils.flight_recorder import FlightRecorder
from rlcore.utils.health import Health
flight = FlightRecorder(0, 1, Path(sys.argv[1]))
flight.phase("save")
Health(flight, None).start()
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
time.sleep(0.5)  # the child's signal has not ended this process
print("lives", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


def test_a_sigterm_writes_the_record_and_one_to_a_forked_child_is_the_childs_alone(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", END, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": kit.python_path()},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 143 and "lives" in done.stdout, done
    assert "ended by SIGTERM, in phase save of step 0" in done.stderr
    assert verdict.read(tmp_path)[0]["reason"] == "ended by SIGTERM"


def test_doctor_of_a_run_without_records_says_how_far_it_is(tmp_path: Path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank1.log").write_text("2026 INFO x\n2026 ERROR the disk is full\n")
    assert doctor.main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "last step 7," in said and "not finished" in said
    assert "no flight record" in said and "rank1: 2026 ERROR the disk is full" in said
    assert "it has no checkpoint, and the same command starts anew" in said
    for step in (4, 6):
        folder = tmp_path / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
        if step == 4:
            assert not seal.write(folder, None)
    assert doctor.main([str(tmp_path)]) == 0
    assert "with --run.resume auto, the default, it goes on after step 4" in capsys.readouterr().out
    assert doctor.main([str(tmp_path / "nothing")]) == 2


def test_ranks_that_do_not_come_are_named():
    store, now = dist.HashStore(), iter(range(100))
    places = [FlightRecorder(r, 4, None).at for r in range(4)]
    store.set("here/2", json.dumps(places[2]))
    with pytest.raises(TimeoutError, match="start-up: rank 1, 3 of 4 has not joined within"):
        meet(store, places[0], 4, 3.0, lambda: float(next(now)))


def _meeting(store: dist.Store, ranks: list[int]) -> dict[int, tuple[dict[int, Any], str]]:
    """All `ranks` of three at once, in threads."""
    found = {}

    def come(rank: int) -> None:
        found[rank] = meet(store, FlightRecorder(rank, 3, None).at, 3, 30.0, time.monotonic)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_ranks_meet_under_a_name_of_their_own_each_time():
    store = dist.HashStore()
    first, second = _meeting(store, [0, 1, 2]), _meeting(store, [2, 1, 0])
    for found in (first, second):
        assert [sorted(known) for known, _ in found.values()] == [[0, 1, 2]] * 3
        assert len({name for _, name in found.values()}) == 1
    assert first[0][1] != second[0][1]


def test_a_rank_that_comes_again_meets_those_who_wait_and_not_those_of_before():
    """The node of rank 1 is gone: the others are started again, and wait until it is back. What it
    wrote before it died is in the store."""
    store = dist.HashStore()
    old = _meeting(store, [0, 1, 2])
    found: dict[int, Any] = {}
    waiting = threading.Thread(target=lambda: found.update(_meeting(store, [0, 2])))
    waiting.start()
    time.sleep(0.3)
    assert not found
    found |= _meeting(store, [1])
    waiting.join(60)
    assert {name for _, name in found.values()} == {found[1][1]} != {old[1][1]}
    known, _ = found[0]
    assert known[1] == found[1][0][1] != old[0][0][1]

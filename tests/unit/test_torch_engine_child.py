import os
import signal
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest

from rlcore.records import Bucket, Down, Finished, LengthReport, Request, Sampling
from rlcore.rollout.child import ChildEngine
from rlcore.rollout.errors import EngineFailedError
from rlcore.rollout.torch_engine.engine import TorchEngine
from rlcore.sync.pack import load_weights, pack
from rlcore.utils import process_tree
from rlcore.utils.buckets import shared
from tests.contracts.engine_contract import (
    CONFIG,
    HF,
    collect,
    requests,
    run,
    samples,
    weights,
)

OPTIONS = {"max_model_tokens": 300, "dtype": "float64", "seed": 7, "device": "cpu"}
BUILD = "rlcore.rollout.torch_engine.engine:build"
PROGRAMS = True
"""The child is what is tested here."""
ODD = "tests.contracts.odd_engines:"


def endless(count, tag):
    """Requests without stop ids, long enough to be alive for a while."""
    sampling = Sampling(max_tokens=250)
    return [
        Request(id=f"{tag}.{k}", prompt=np.array([3, 4], np.int32), sampling=sampling)
        for k in range(count)
    ]


def gone(pid):
    """Waits for a process to vanish; a zombie is gone."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_a_killed_child_is_a_down_event_with_its_requests_and_a_restart_goes_on():
    settings = {"config": CONFIG, "decode_floor_ms": 20.0} | OPTIONS
    engine = ChildEngine(BUILD, settings, rank=3)
    try:
        load_weights(engine, weights(HF, 0).items(), 0)
        short = Request(id="s.0", prompt=np.array([3], np.int32), sampling=Sampling(max_tokens=1))
        todo = endless(3, "k")
        engine.submit([short, *todo])
        collect(engine, lambda es: any(isinstance(e, Finished) for e in es))
        os.kill(engine.pid, signal.SIGKILL)
        (down,) = [
            e
            for e in collect(engine, lambda es: any(isinstance(e, Down) for e in es))
            if isinstance(e, Down)
        ]
        assert sorted(down.lost) == ["k.0", "k.1", "k.2"]
        assert "signal 9" in down.reason and "rank 3" in down.reason and down.rank == 3
        assert engine.poll(0.0) == []  # said once
        with pytest.raises(RuntimeError, match=r"signal 9; restart\(\)"):
            engine.submit(todo)
        with pytest.raises(RuntimeError, match="signal 9"):
            engine.begin_load(1)

        engine.restart()
        load_weights(engine, weights(HF, 0).items(), 0)
        small = requests(2, group=2, max_tokens=4)
        inline = TorchEngine(HF, **OPTIONS)
        load_weights(inline, weights(HF, 0).items(), 0)
        want = run(inline, small)
        for i, sample in run(engine, small).items():
            assert sample.tokens.tobytes() == want[i].tokens.tobytes()
            assert sample.logps.tobytes() == want[i].logps.tobytes()

        # Requests that meet a child that has just died are lost, not an error.
        os.kill(engine.pid, signal.SIGKILL)
        engine.submit(todo)
        engine.abort(["k.0"])
        (down,) = [e for e in engine.poll(5.0) if isinstance(e, Down)]
        assert sorted(down.lost) == ["k.0", "k.1", "k.2"]
    finally:
        engine.close()
        engine.close()


def test_the_tokens_of_a_killed_child_go_on_in_the_next_one():
    settings = {"config": CONFIG, "decode_floor_ms": 5.0, "progress_s": 0.01} | OPTIONS
    todo = requests(3, group=2, max_tokens=70, tag="kt")
    inline = TorchEngine(HF, **OPTIONS)
    load_weights(inline, weights(HF, 0).items(), 0)
    want = run(inline, todo)
    engine = ChildEngine(BUILD, settings)
    try:
        load_weights(engine, weights(HF, 0).items(), 0)
        engine.submit(todo)
        early = collect(engine, lambda es: any(isinstance(e, Finished) for e in es))
        assert not any(e.tails for e in early if isinstance(e, LengthReport))
        engine.fail("the other part of it is gone")
        early += engine.poll(0.0)
        (down,) = [e for e in early if isinstance(e, Down)]
        assert "the other part" in down.reason
        done = samples(early)
        assert set(down.lost) == set(want) - set(done) and down.lost
        assert set(down.partials) <= set(down.lost) and down.partials
        back = [
            msgspec.structs.replace(r, resume=down.partials.get(r.id))
            for r in todo
            if r.id in down.lost
        ]
        assert all(len(p.tokens) > 2 for p in down.partials.values())
        engine.restart()
        load_weights(engine, weights(HF, 0).items(), 0)
        done |= run(engine, back)
    finally:
        engine.close()
    for i, sample in done.items():
        assert sample.tokens.tobytes() == want[i].tokens.tobytes()
        np.testing.assert_allclose(sample.logps, want[i].logps, atol=1e-6)


def test_a_child_decodes_without_being_polled_and_takes_weights_from_shared_memory():
    engine = ChildEngine(BUILD, {"config": CONFIG} | OPTIONS)
    try:
        paths = []
        engine.begin_load(2)
        for bucket, buffer in pack(weights(HF, 0).items(), 4096):
            shm = msgspec.structs.replace(bucket, transport="shm")
            with shared(buffer) as path:
                engine.load_bucket(shm, [path.encode()])
            paths.append(path)
        engine.end_load()
        assert len(paths) > 3
        for attempt in range(6):  # a busy machine decodes slowly
            todo = endless(2, f"u{attempt}.")
            engine.submit(todo)
            time.sleep(2**attempt)
            got = samples(engine.poll(0.0))
            if got.keys() == {request.id for request in todo}:  # it was all there
                break
            engine.abort([request.id for request in todo])
            engine.poll(1.0)
        else:
            raise AssertionError("nothing was decoded without a poll")
        assert {int(v) for s in got.values() for v in s.versions} == {2}
    finally:
        engine.close()


def test_a_child_does_not_outlive_a_parent_that_is_killed():
    code = (
        "import time; from rlcore.rollout.child import ChildEngine\n"
        f"e = ChildEngine('{ODD}stuck', {{}}); print(e.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait(20)
    assert gone(pid)


def test_a_silent_child_is_named_when_the_deadline_passes():
    engine = ChildEngine(f"{ODD}stuck", {}, deadline_s=60)
    try:
        engine.submit(endless(1, "q"))
        engine._deadline_s = 0.3  # the start above needed more
        with pytest.raises(TimeoutError, match=r"resume: engine process \d+ of rank 0 has not"):
            engine.resume()
        engine.restart()
        (down,) = [e for e in engine.poll(0.0) if isinstance(e, Down)]
        assert down.lost == ("q.0",) and "restarted" in down.reason
    finally:
        engine.close()


def test_a_child_that_stays_stopped_is_named_killed_and_down(monkeypatch):
    """Its requests go on elsewhere; one that is stopped for a moment is left alone."""
    monkeypatch.setattr(process_tree, "STOPPED_S", 5)
    monkeypatch.setattr(process_tree, "_LOOK_S", 0.2)
    engine = ChildEngine(f"{ODD}patient", {"deadline_s": 60.0}, rank=2)
    try:
        engine.submit(endless(2, "s"))
        os.kill(engine.pid, signal.SIGSTOP)
        assert engine.poll(0.5) == []
        os.kill(engine.pid, signal.SIGCONT)
        engine.resume()  # it answers, and is counted anew
        pid = engine.pid
        os.kill(pid, signal.SIGSTOP)
        (down,) = collect(engine, lambda es: bool(es))
        assert f"engine process {pid} of rank 2 was stopped by a signal" in down.reason
        assert down.lost == ("s.0", "s.1") and gone(pid)
        engine.restart()
        os.kill(engine.pid, signal.SIGSTOP)
        with pytest.raises(EngineFailedError, match="was stopped by a signal"):
            engine.resume()  # in a call as well
        engine.restart()
        engine.submit(endless(1, "t"))
        engine._deadline_s = 0.3  # shorter than the monitor's
        os.kill(engine.pid, signal.SIGSTOP)
        with pytest.raises(EngineFailedError, match=r"was stopped by a signal for 0\.3 s"):
            engine.resume()
        engine.restart()
        engine.poll(0.0)
        engine._deadline_s = 60.0
        engine.resume()
        engine._deadline_s = 0.3
        os.kill(engine.pid, signal.SIGSTOP)
        long = Request(id="long.0", prompt=np.zeros(1 << 20, np.int32), sampling=Sampling())
        engine.submit([long])  # more than the channel holds
        (down,) = engine.poll(0.0)
        assert "was stopped by a signal for 0.3 s" in down.reason and down.lost == ("long.0",)
    finally:
        engine.close()


def test_what_the_engine_raises_arrives_and_a_crash_between_calls_is_a_down():
    engine = ChildEngine(f"{ODD}broken", {})
    with pytest.raises(ValueError, match="no such weights"):
        engine.resume()
    engine.close()
    engine = ChildEngine(f"{ODD}crashing", {})
    try:
        engine.submit(endless(2, "c"))
        engine.resume()
        (down,) = collect(engine, lambda es: bool(es))
        assert down.lost == ("c.0", "c.1")
        assert "failed: KeyError: 'lost a block'" in down.reason
    finally:
        engine.close()


def test_an_engine_that_is_gone_in_a_call_is_down_when_the_call_raises():
    """As an answer its error would be that of a living engine, which ends the run."""
    engine = ChildEngine(f"{ODD}breaking", {}, rank=2)
    try:
        engine.submit(endless(2, "g"))
        engine.begin_load(1)
        with pytest.raises(EngineFailedError, match=r"end_load: .*signal 9; restart\(\)"):
            engine.end_load()
        assert "rank 2 failed: EngineFailedError: process 7 of SGLang" in engine.failure
        (down,) = engine.poll(0.0)
        assert down.lost == ("g.0", "g.1")
        engine.restart()
        engine.abort(["g.0"])  # nor does this one end the round
        assert engine.failure and len(engine.poll(0.0)) == 1
    finally:
        engine.close()


def test_a_failed_start_is_down_with_its_reason_also_where_nobody_calls():
    """The ranks beside an engine's first do not call it."""
    engine = ChildEngine(f"{ODD}short_of_memory", {})
    try:
        (down,) = collect(engine, lambda es: bool(es))
        assert "failed: RuntimeError: CUDA out of memory" in down.reason
        with pytest.raises(EngineFailedError, match="start: .*CUDA out of memory"):
            engine.resume()
    finally:
        engine.close()
    engine = ChildEngine(f"{ODD}broken", {})
    try:
        collect(engine, lambda es: bool(es))
        assert "failed: ConfigError: no such weights" in engine.failure
        for _ in range(2):  # it stays a setting that cannot work, which a push does not forgive
            with pytest.raises(ValueError, match="^no such weights$"):
                engine.begin_load(1)
            assert not engine.failure
    finally:
        engine.close()


def test_no_call_waits_for_events_of_an_engine_without_requests():
    """SGLang waits as long as it is told, and a large model comes in hundreds of calls."""
    engine = ChildEngine(f"{ODD}counting", {})
    try:
        engine.begin_load(1)
        for number in range(50):
            engine.load_bucket(Bucket(tensors=(), num_bytes=0, checksum=number), [b""])
        with pytest.raises(RuntimeError, match=r"waited 0 s"):
            engine.end_load()
    finally:
        engine.close()


def test_buckets_are_sent_before_earlier_ones_are_loaded_and_each_says_its_own_error():
    engine = ChildEngine(f"{ODD}picky", {})
    try:
        engine.begin_load(1)
        waits = [engine.send_bucket(numbered(number), [b""]) for number in (0, 1, 2, 3)]
        waits[1]()
        with pytest.raises(ValueError, match="^bucket 2 is odd$"):
            waits[2]()
        waits[3]()
        waits[0]()  # its reply has waited
        assert not engine._replies
        with pytest.raises(RuntimeError, match=r"came: \[0, 1, 2, 3\]"):
            engine.end_load()
        waits = [engine.send_bucket(numbered(number), [b""]) for number in (9, 4)]
        for wait in waits:
            with pytest.raises(RuntimeError, match="load_bucket: engine process .* exited"):
                wait()
        with pytest.raises(RuntimeError, match="load_bucket: engine process .* exited"):
            engine.send_bucket(numbered(5), [b""])
    finally:
        engine.close()


def test_a_bucket_that_was_sent_has_the_deadline_of_a_call():
    engine = ChildEngine(f"{ODD}stuck", {}, deadline_s=0.5, start_s=60.0)
    try:
        engine.submit([])
        engine._begin_call("resume")
        wait = engine.send_bucket(numbered(0), [b""])
        with pytest.raises(TimeoutError, match="load_bucket: .* has not answered for 0.5 s"):
            wait()
    finally:
        engine.close()


def numbered(number):
    """An empty bucket."""
    return Bucket(tensors=(), num_bytes=0, checksum=number)


def test_a_child_closes_its_engine_before_it_ends(tmp_path):
    file = tmp_path / "left"
    engine = ChildEngine(f"{ODD}tidy", {"file": str(file)})
    engine.resume()
    engine.close()
    assert file.read_text() == "closed"


def test_the_deadline_of_the_settings_is_the_one_of_the_calls_too():
    engine = ChildEngine(f"{ODD}patient", {"deadline_s": 7.0}, deadline_s=1.0)
    try:
        assert engine._deadline_s == 17.0  # the engine speaks first
    finally:
        engine.close()


def test_a_child_is_no_rank_and_does_not_import_what_started_it(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    engine = ChildEngine(f"{ODD}telling", {}, threads=3)
    try:
        with pytest.raises(ValueError, match=r"^\[\] \[\] 3$"):
            engine.resume()
    finally:
        engine.close()


def test_a_child_that_writes_no_frame_is_down_and_a_call_says_so():
    """The run continues with the next one."""
    engine = ChildEngine(f"{ODD}babbling", {})
    try:
        engine.submit(endless(1, "b"))
        with pytest.raises(EngineFailedError, match=r"resume: .* sent invalid data \(frame of"):
            engine.resume()
        (down,) = engine.poll(0.0)
        assert down.lost == ("b.0",)
        engine.restart()
        engine.submit(endless(1, "b"))
    finally:
        engine.close()


def test_another_size_is_another_child_without_requests():
    """Settings are asked for anew; what the old child held must have ended."""
    size = {"tp": 1}
    engine = ChildEngine(f"{ODD}sized", lambda: size, resize=lambda tp: size.update(tp=tp))
    try:
        first = engine.pid
        engine.submit(endless(1, "s"))
        with pytest.raises(RuntimeError, match="1 requests are running; abort them first"):
            engine.resize(2)
        engine._live.clear()
        engine.resize(2)
        assert not engine.is_starting(60.0)
        assert engine.pid != first and gone(first) and not engine.poll(0.0)
        with pytest.raises(RuntimeError, match="size 2"):
            engine.resume()
        engine.resize(4)
        assert not engine.is_starting(60.0)
        assert "4 ranks are too many" in engine.failure
    finally:
        engine.close()
    with pytest.raises(RuntimeError, match="resize: the engine is closed"):
        engine.resize(1)


def test_a_child_that_is_on_its_way_up_is_told_from_one_that_works():
    engine = ChildEngine(f"{ODD}slow_to_start", {})
    try:
        assert engine.is_starting(0.1)
        engine.fail("it takes too long")
        assert not engine.is_starting(0.1) and "takes too long" in engine.failure
    finally:
        engine.close()

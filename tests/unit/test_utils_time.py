"""Clocks, phase timers, deadlines and the watchdog."""

import threading
import time

import pytest

from rlcore.utils.clock import RealClock, VirtualClock
from rlcore.utils.deadline import Deadline, Watchdog
from rlcore.utils.spans import Spans


def test_a_virtual_clock_moves_only_when_told():
    clock = VirtualClock(5.0)
    clock.sleep(2.0)
    clock.advance(1.0)
    clock.advance_to(10.0)
    assert clock.now() == 10.0


def test_a_clock_does_not_run_backwards():
    clock = VirtualClock(5.0)
    with pytest.raises(ValueError, match="must be 0 or more"):
        clock.advance(-1.0)
    with pytest.raises(ValueError, match="must be at least 5, the time now"):
        clock.advance_to(4.0)


def test_the_real_clock_sleeps():
    clock = RealClock()
    start = clock.now()
    clock.sleep(0.01)
    clock.sleep(-1.0)
    assert clock.now() - start >= 0.01


def test_phases_add_up_and_inner_ones_count_in_outer_ones():
    clock = VirtualClock()
    spans = Spans(clock)
    for _ in range(2):
        with spans.phase("step"):
            clock.advance(1.0)
            with spans.phase("gen"):
                clock.advance(2.0)
    spans.add("reward", 0.5)
    assert spans.take() == {"gen": 4.0, "step": 6.0, "reward": 0.5}
    assert spans.take() == {}


def test_a_phase_that_raises_is_timed_and_closed():
    clock = VirtualClock()
    spans = Spans(clock)
    with pytest.raises(KeyError), spans.phase("gen"):
        clock.advance(3.0)
        raise KeyError("x")
    assert spans.take() == {"gen": 3.0} and spans.current == ""


def test_the_listener_hears_the_innermost_phase():
    heard = []
    spans = Spans(VirtualClock(), listener=heard.append)
    with spans.phase("step"):
        with spans.phase("gen"):
            assert spans.current == "gen"
        with spans.phase("update_weights"):
            pass
    assert heard == ["step", "gen", "step", "update_weights", "step", ""]


def test_a_deadline_names_who_is_missing_once_the_time_is_over():
    clock = VirtualClock()
    deadline = Deadline(10.0, "rank 0, rollout of step 3", clock)
    clock.advance(9.0)
    deadline.check(lambda: pytest.fail("asked for a name before the time was over"))
    assert deadline.remaining() == 1.0 and deadline.remaining(at_most=0.5) == 0.5
    clock.advance(2.0)
    assert deadline.expired and deadline.remaining() == 0.0
    sentence = "rank 0, rollout of step 3: waited 10 s for t7.2 from rank 1"
    with pytest.raises(TimeoutError, match=sentence):
        deadline.check("t7.2 from rank 1")
    with pytest.raises(TimeoutError, match=sentence):
        deadline.check(lambda: "t7.2 from rank 1")


def test_a_deadline_starts_again_when_something_happens():
    clock = VirtualClock()
    deadline = Deadline(10.0, "x", clock)
    clock.advance(9.0)
    deadline.restart()
    clock.advance(9.0)
    deadline.check("nobody")


def test_a_deadline_without_time_is_refused():
    with pytest.raises(ValueError, match="deadline of 0 s"):
        Deadline(0.0, "x")


def _wait_for(condition):
    deadline = Deadline(10.0, "test")
    while not condition():
        deadline.check("the watchdog")
        time.sleep(0.005)


def test_the_watchdog_writes_a_verdict_and_all_stacks_once_for_a_phase_that_stands_still(tmp_path):
    verdicts = []
    file = tmp_path / "logs" / "stacks0.txt"
    dog = Watchdog(0.05, file, lambda: "t7.2 from rank 1", on_overrun=verdicts.append)
    held = threading.Event()
    threading.Thread(target=held.wait, name="stuck", daemon=True).start()
    dog.beat("gen")
    _wait_for(lambda: verdicts)
    time.sleep(0.12)
    assert len(verdicts) == 1
    assert "phase gen has made no progress for 0.05 s, waiting for t7.2 from rank 1" in verdicts[0]
    dog.beat("update_weights")
    _wait_for(lambda: len(verdicts) == 2)
    dog.close()
    dog.close()
    held.set()
    text = file.read_text()
    assert verdicts[0] in text and "test_utils_time.py" in text
    assert text.count("Thread 0x") >= 4  # two dumps of at least the test's and the stuck thread


def test_the_watchdog_is_silent_while_the_run_moves_or_rests(tmp_path):
    verdicts = []
    dog = Watchdog(0.2, tmp_path / "s.txt", lambda: "", on_overrun=verdicts.append)
    for i in range(8):
        dog.beat(f"phase{i}")
        time.sleep(0.04)
    dog.beat("")
    time.sleep(0.25)
    dog.close()
    assert verdicts == []


def test_a_describe_that_fails_does_not_silence_the_watchdog(tmp_path):
    verdicts = []
    dog = Watchdog(0.02, tmp_path / "s.txt", lambda: 1 // 0, on_overrun=verdicts.append)
    dog.beat("gen")
    _wait_for(lambda: verdicts)
    dog.close()
    assert "waiting for unknown (ZeroDivisionError" in verdicts[0]


def test_the_stacks_of_a_phase_that_holds_the_interpreter_are_written_too(tmp_path):
    file = tmp_path / "s.txt"
    dog = Watchdog(0.05, file, lambda: "", grace_s=0.05)
    held = threading.Lock()
    held.acquire()
    dog.beat("native")
    import ctypes

    ctypes.PyDLL(None).usleep(300_000)  # PyDLL keeps the interpreter lock during the call
    during = file.read_text()
    dog.close()
    assert "Timeout" in during and "test_utils_time.py" in during

"""A clock that is set, by hand or by NTP, moves no deadline: whatever waits asks the monotonic
clock. The wall clock is for what people read, and each use of it has its reason here."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "rlcore"
WALL = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}
REASONS = {
    "envs/chat_api.py": "OpenAI's answers say when they were made",
    "metrics/sinks.py": "Prometheus wants the time of day of the last step",
    "metrics/trace.py": "what ranks did when is put on one axis, which is the time of day",
    "hf/template.py": "chat templates may print today's date",
    "sandbox/cgroup.py": "how old a folder is that an earlier run left",
    "utils/collective.py": "clock_offset: how far machines' clocks are apart, for traces",
    "utils/flight_recorder.py": "when events were, for people, who compare machines",
    "utils/verdict.py": "how long ago that was",
    "utils/health.py": "records of an alarm are told from older ones by their files' times; "
    "the waits in it are monotonic",
    "cli/doctor.py": "how old a file is",
    "mux/ranks.py": "when each job had which turn: jobs are laid over each other",
    "mux/tail.py": "the same, of nodes that are left early",
    "mux/arbiter.py": "its history outlives the machine it runs on; leases are Redis' own",
}


def wall_clock(source: str) -> bool:
    """A file asks for the time of day."""
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return any(
        isinstance(f, ast.Attribute)
        and (getattr(f.value, "id", getattr(f.value, "attr", "")), f.attr) in WALL
        for f in calls
    )


def test_nothing_waits_by_the_time_of_day() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if wall_clock(path.read_text())
    }
    assert found == set(REASONS), found ^ set(REASONS)


@pytest.mark.parametrize("source", ["time.time()", "datetime.now()", "datetime.datetime.now(utc)"])
def test_the_rule_itself(source: str) -> None:
    assert wall_clock(source)
    assert not wall_clock("time.monotonic(); clock.now(); time.process_time()")

"""Find out which rank is stuck, from the flight records of all ranks: pure functions, which do not
wait or print."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.utils.files import read_json
from rlcore.utils.flight_recorder import FOLDER, Record

LONG_S = 5.0


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that the other ranks wait for, and the evidence."""

    rank: int
    why: str


def read(run_dir: Path) -> dict[int, Record]:
    """Return the records in a run's folder, by rank; unreadable records are left out."""
    found: dict[int, Record] = {}
    for path in sorted((run_dir / FOLDER).glob("rank*.json")):
        try:
            record = read_json(path)
            found[int(record["rank"])] = record
        except (ValueError, KeyError, TypeError):
            continue
    return found


def suspects(
    records: Mapping[int, Record],
    beats: Mapping[int, Mapping[str, Any]],
    size: int,
    states: Mapping[int, str],
) -> list[Suspect]:
    """Return the ranks that the other ranks wait for, by the strongest available kind of evidence.

    Args:
        records: flight records by rank; not every rank has one.
        beats: most recent heartbeat of each rank, as `FlightRecorder.at`.
        states: `dead` or `stopped`, for ranks whose process is known to be dead or stopped.
    """
    gone = [Suspect(r, _of_state(r, why, beats)) for r, why in sorted(states.items())]
    if gone:
        return gone
    never = [r for r in range(size) if r not in records and r not in beats]
    if never:
        return [Suspect(r, "has sent no heartbeat since the start") for r in never]
    silent = [
        Suspect(r, f"no heartbeat for {_ago(beats.get(r))}{_in_phase(beats.get(r))}")
        for r in range(size)
        if r not in records
    ]
    if silent:
        return silent
    failed = sorted((x["time"], r) for r, x in records.items() if x["reason"].startswith("failed"))
    if failed:
        return [Suspect(failed[0][1], records[failed[0][1]]["reason"])]
    if behind := _behind(records):
        return behind
    return _busy(records)


def _of_state(rank: int, state: str, beats: Mapping[int, Mapping[str, Any]]) -> str:
    at = beats.get(rank)
    pid = f"process {at['pid']} on {at['host']} " if at else ""
    how = "is stopped by a signal" if state == "stopped" else "has exited"
    return f"{pid}{how}; last heartbeat {_ago(at)} ago{_in_phase(at)}"


def _behind(records: Mapping[int, Record]) -> list[Suspect]:
    """Return ranks that have entered fewer collectives of a group than other, waiting ranks."""
    counts: dict[str, dict[int, int]] = {}
    for rank, record in records.items():
        for group, found in record["collectives"].get("groups", {}).items():
            counts.setdefault(group, {})[rank] = found["entered"]
    for group, entered in counts.items():
        most = max(entered.values())
        late = {r: n for r, n in entered.items() if n < most}
        if not late or not any(records[r]["waits"] for r in entered if r not in late):
            continue
        return [
            Suspect(
                r,
                f"has entered {n} collectives of group {group}, other ranks {most}; it is at "
                f"{records[r]['where']}{_in_phase(records[r])}",
            )
            for r, n in sorted(late.items())
        ]
    return []


def _busy(records: Mapping[int, Record]) -> list[Suspect]:
    """If some ranks wait and others do not, return the ranks that do not wait; else none."""
    busy = [r for r, x in records.items() if not x["waits"]]
    if not busy or len(busy) == len(records) > 1:
        return []
    return [
        Suspect(
            r,
            (
                "is not waiting for another rank; it is at "
                f"{records[r]['where']}{_in_phase(records[r])}"
            ),
        )
        for r in sorted(busy)
    ]


def _in_phase(at: Mapping[str, Any] | None) -> str:
    if at is None:
        return ""
    phase = f", in phase {at['phase']}" if at["phase"] else ", between two phases"
    return f"{phase} of step {at['step']} for {at['time'] - at['since']:.0f} s"


def _ago(at: Mapping[str, Any] | None) -> str:
    return f"{time.time() - at['time']:.0f} s" if at else "the whole run"


def table(
    records: Mapping[int, Record],
    beats: Mapping[int, Mapping[str, Any]],
    size: int,
    found: Sequence[Suspect],
    reason: str,
    store: str = "",
) -> list[str]:
    """Format the report: the stuck ranks with code line and duration, then a line per rank.
    `store`: why the run's store does not answer; empty: it does."""
    who = [store] if store else []
    who += [f"rank {s.rank}: {s.why}" for s in found[:4]]
    if len(found) > 4:
        who.append(f"and {len(found) - 4} more ranks")
    if not who:
        who = ["no rank is suspected"]
        if size > 1 and len({(r["phase"], _now(r)) for r in records.values()}) == 1:
            who = [
                "no rank is suspected: all ranks wait at one line; check the network between nodes"
            ]
    lines = ["stuck ranks", *(f"  {line}" for line in who)]
    lines.append(f"  alarm raised by {reason}")
    lines.append(f"  {'rank':<6}{'phase':<18}{'for':>7}  waiting for / at")
    suspected = {s.rank for s in found}
    ranks = sorted(range(size), key=lambda r: (r not in suspected, r))[:16]
    for r in ranks:
        at = records.get(r) or beats.get(r)
        if at is None:
            lines.append(f"  {r:<6}no heartbeat")
            continue
        seconds = f"{at['time'] - at['since']:.0f} s"
        now = _now(records.get(r)) or f"no answer for {_ago(at)}"
        lines.append(f"  {r:<6}{at['phase'] or '-':<18}{seconds:>7}  {now}")
    if size > len(ranks):
        lines.append(f"  and {size - len(ranks)} more ranks")
    return [*lines, *_requests(records)]


def _now(record: Record | None) -> str:
    if record is None:
        return ""
    waits = f"{record['waits']}, " if record["waits"] else ""
    return f"{waits}{record['where']}"


def _requests(records: Mapping[int, Record]) -> list[str]:
    """Describe the oldest open requests of all ranks."""
    now = max((x["time"] for x in records.values()), default=0.0)
    opened = sorted((since, i, what, r) for r, x in records.items() for i, what, since in x["open"])
    total = sum(x["num_open"] for x in records.values())
    if not opened or now - opened[0][0] < LONG_S:
        return []
    oldest = [f"{i} ({what} on rank {r}, {now - s:.0f} s)" for s, i, what, r in opened[:3]]
    return [f"  {total} open requests, the oldest {', '.join(oldest)}"]

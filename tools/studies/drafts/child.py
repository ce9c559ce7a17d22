"""One peer in a process of its own: build, then the replays. Settings come as JSON on stdin, the
result goes to stdout as one JSON line: {"absent": why} or {build figures, "runs": [...]}."""

import contextlib
import ctypes
import gc
import importlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from drafts import workload
from drafts.drafter import Absent, Drafter
from drafts.peers import PEERS
from drafts.replay import as_dict, choose, replay

REBUILD_S = 3.0


def main() -> int:
    """0 also where the peer is absent: that is a result."""
    settings = json.load(sys.stdin)
    try:
        result = measure(settings)
    except Absent as why:
        result = {"absent": str(why)}
    print(json.dumps(result))
    return 0


def measure(s: dict[str, Any]) -> dict[str, Any]:
    """Build once; one replay for each of the windows and, of `equal`, each of the knobs."""
    peer = PEERS[s["peer"]]
    for module in peer.modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise Absent(f"{module} does not import: {error}") from error
    w = workload.read(Path(s["workload"]))
    requests = choose(w, s["batch"], s["replay_len"])
    warm_up(peer, s["settings"], w)
    before = resident_bytes()
    drafter, build_s = built(peer, s["settings"], w)
    grown, tokens = resident_bytes() - before, w.history.num_tokens
    times = [build_s]
    while sum(times) < REBUILD_S and len(times) < 5:  # a short build is measured more than once
        drafter = None  # two would not be what one process holds
        drafter, build_s = built(peer, s["settings"], w)
        times.append(build_s)
    build_s, said = statistics.median(times), drafter.nbytes()
    runs = []
    for setting in distinct(peer, s["settings"]) if s["equal"] else [{}]:
        if setting:
            drafter.tune(**setting)
        for spec in s["windows"][:1] if drafter.own_window else s["windows"]:
            run = as_dict(replay(drafter, requests, spec))
            named = {"window": "own"} if drafter.own_window else {}
            runs.append({"knobs": setting, **run, **named})
    return {
        "history_tokens": tokens,
        "copied": round(w.copied, 4),
        "build_s": build_s,
        "build_mtok_s": tokens / max(build_s, 1e-9) / 1e6,
        "bytes_per_token": grown / tokens,
        "own_bytes_per_token": None if said is None else said / tokens,
        "runs": runs,
    }


def built(
    peer: type[Drafter], settings: dict[str, Any], w: workload.Workload
) -> tuple[Drafter, float]:
    """A drafter with the history in it, and the CPU seconds of its build."""
    drafter = peer(**settings)
    began = time.process_time()
    drafter.build(w.history)
    return drafter, time.process_time() - began


def distinct(peer: type[Drafter], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The peer's knobs that differ once they stand beside `settings`."""
    base = {**peer.defaults(), **settings}
    seen: list[dict[str, Any]] = []
    for knob in peer.knobs:
        if all({**base, **knob} != {**base, **other} for other in seen):
            seen.append(knob)
    return seen


def warm_up(peer: type[Drafter], settings: dict[str, Any], w: workload.Workload) -> None:
    """Imports and compilation, on a small index, so that they count in no figure."""
    first = [response[:256] for response in w.history.responses(0)[:2]]
    few = workload.Texts(
        np.concatenate(first),
        np.cumsum([0, *map(len, first)], dtype=np.int64),
        np.array([0, len(first)]),
        w.history.rewards[: len(first)],
    )
    small = workload.Workload(w.prompts[:1], few, few, 1.0)
    drafter = peer(**settings)
    drafter.build(small.history)
    replay(drafter, choose(small, len(first), 64), "fixed:8")


def resident_bytes() -> int:
    """Resident memory after everything free was given back."""
    gc.collect()
    with contextlib.suppress(OSError):  # another libc: the figure may hold freed memory
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    sys.exit(main())

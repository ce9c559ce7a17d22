"""The sockets that a run listens on, by their names in rlcore/utils/NETWORK.md."""

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from rlcore.metrics import sinks
from rlcore.rollout.transport import ZmqHub
from tests import kit, runs

PAGE = runs.ROOT / "rlcore" / "utils" / "NETWORK.md"
_LOOK_S = 0.1
_STORES: list[int] = []
"""Ports of stores of this process, also of jobs before."""


def of_page(process: str, *when: str) -> dict[str, str]:
    """How many of each socket a process listens on; `when`: what the run uses."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    assert rows[0] == ["socket", "process", "when", "number", "authentication"]
    end = next(i for i, row in enumerate(rows[1:], 1) if row[0] == "socket")  # of the next table
    return {
        row[0]: row[3]
        for row in rows[2:end]
        if process in row[1].split(", ") and row[2] in ("always", *when)
    }


def _is_copy(pid: int) -> bool:
    """A fork of this process before its exec, which has this process's sockets for a moment."""
    try:
        return psutil.Process(pid).cmdline() == psutil.Process().cmdline()
    except psutil.NoSuchProcess:
        return True


@contextmanager
def watched(folder: str) -> Iterator[None]:
    """Of the run inside: what this rank and its children listen on goes to `<rank>.json`, as
    "socket, process" and the most at a time. Those whose name is not known are gloo's."""
    names: dict[int, str] = {}
    most: dict[tuple[str, str], int] = {}
    addresses: set[str] = set()
    over, me, rank = threading.Event(), os.getpid(), os.environ.get("RANK", "0")
    before = set(_STORES)
    if rank == "0" and "MASTER_PORT" in os.environ:
        _STORES.append(int(os.environ["MASTER_PORT"]))
        names[_STORES[-1]] = "store"
    hub, prometheus = ZmqHub.__init__, sinks.Prometheus.__init__

    def of_hub(self: Any, *args: Any, **more: Any) -> None:
        hub(self, *args, **more)
        for channel, pull in self._pull.items():
            names[int(pull.last_endpoint.rpartition(b":")[2])] = f"inbox {channel}"

    def of_prometheus(self: Any, *args: Any, **more: Any) -> None:
        prometheus(self, *args, **more)
        names[self.port] = "Prometheus"

    def look() -> None:
        while not over.wait(_LOOK_S):
            seen: Counter[tuple[str, str]] = Counter()
            found = list(kit.listeners(me))
            own = {port for _, port, pid in found if pid == me}
            for address, port, pid in found:
                if port not in before and (pid == me or port not in own or not _is_copy(pid)):
                    where = f"rank {min(int(rank), 1)}" if pid == me else process_name(pid)
                    seen[names.get(port, "gloo"), where] += 1
                    addresses.add(address)
            for key, number in seen.items():
                most[key] = max(most.get(key, 0), number)

    ZmqHub.__init__ = of_hub  # type: ignore[method-assign]
    sinks.Prometheus.__init__ = of_prometheus  # type: ignore[method-assign]
    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        ZmqHub.__init__ = hub  # type: ignore[method-assign]
        sinks.Prometheus.__init__ = prometheus  # type: ignore[method-assign]
        found = {f"{socket}, {where}": number for (socket, where), number in most.items()}
        Path(folder).mkdir(exist_ok=True)
        text = json.dumps({"sockets": found, "addresses": sorted(addresses)})
        (Path(folder) / f"{rank}.json").write_text(text)


def process_name(pid: int) -> str:
    """What the page calls a child process of a rank."""
    try:
        command = " ".join(psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return "ended"
    return "scheduler" if "sglang::scheduler" in command else "engine"

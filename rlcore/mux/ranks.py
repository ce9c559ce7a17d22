"""Gate of a job with several ranks: rank 0 asks the arbiter, and all ranks enter and leave phases
together.

    rank 0   ask ... permit | load | run | store | done
    others   ......... wait | load | run | store |

A permit may take hours, but collectives have a deadline. So while rank 0 waits, all ranks run a
collective every second, which also detects a failed rank at once. Rank 0 writes the times of each
phase to permits.jsonl, by its machine's clock."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import ProcessGroup

from rlcore.mux.gate import NoGate, PermitGate, Resident
from rlcore.mux.tail import TailMoves
from rlcore.sched.roles import Cell
from rlcore.utils import collective, phases
from rlcore.utils.errors import ConfigError
from rlcore.utils.writes import LogWrites

MEET_S = 1.0
FILE = "permits.jsonl"

T = TypeVar("T")


def patiently(
    call: Callable[[], T] | None,
    group: ProcessGroup | None = None,
    alive: Callable[[], None] = lambda: None,
) -> T | None:
    """Run `call`, which may take hours, on the one rank where it is not None. Return its result on
    that rank, None on the other ranks. Collective over `group`.

    Raises:
        Any exception of `call` on its own rank. The other ranks raise an error with the same
            message: ConfigError if `call` raised a ConfigError, else RuntimeError.
    """
    box: list[T] = []
    failed: list[Exception] = []
    over = threading.Event()

    def work(call: Callable[[], T]) -> None:
        try:
            box.append(call())
        except Exception as error:
            failed.append(error)
        finally:
            over.set()

    if call is not None:
        threading.Thread(target=work, args=(call,), name="mux wait", daemon=True).start()
    while True:
        if call is not None:
            over.wait(MEET_S)
        refuses = bool(failed) and isinstance(failed[0], ConfigError)
        flags = over.is_set(), bool(failed), refuses
        done, wrong, refused = collective.reduce_floats([float(f) for f in flags], "max", group)
        if done:
            break
        alive()
    if wrong:
        reason = collective.broadcast_text(str(failed[0]) if failed else "", group)
        if failed:
            raise failed[0]
        raise ConfigError(reason) if refused else RuntimeError(reason)
    return box[0] if box else None


class RanksGate:
    """Gate of one rank, a `protocols.PhaseGate`; all ranks enter and leave phases together."""

    def __init__(
        self,
        gate: PermitGate | None,
        folder: Path | None,
        group: ProcessGroup | None = None,
        *,
        alive: Callable[[], None] = lambda: None,
        tell: Callable[[dict[str, float]], None] = lambda found: None,
        writes: LogWrites | None = None,
    ) -> None:
        """Make the gate of this rank.

        Args:
            gate: gate of the job on rank 0, None on the other ranks.
            folder: folder of the run on rank 0, None on the other ranks.
            group: process group of all ranks.
            alive: called about every second while all ranks wait.
            tell: called on rank 0 with the overhead of a phase, by metric name.
            writes: what to do if a write to the log of permits fails; None: raise.
        """
        self._writes = writes or LogWrites()
        self._gate, self._group = gate, group
        self._path = folder / FILE if folder is not None else None
        self._is_inside = False
        """Whether a phase runs. A phase inside another phase is a part of the outer phase."""
        self._switch_s = 0.0
        """Seconds of loading and storing states in the running phase and in phases inside it."""
        self.tail: TailMoves | None = None
        """Policy on rank 0 for leaving nodes in the tail of a rollout; None if tails keep all
        nodes."""
        self._alive, self._tell = alive, tell

    @contextmanager
    def phase(self, name: str, resident: object | None = None) -> Iterator[None]:
        """Run a phase as `PermitGate.phase` does, on all ranks. A phase inside another phase loads
        and stores its state, but needs no permit. If the phase fails, no state is stored. The job
        then keeps the permit until its lease expires, since other ranks may still use the nodes."""
        assert resident is None or isinstance(resident, Resident), resident
        gate, asked = self._gate, time.time()
        is_part, self._is_inside = self._is_inside, True
        if not is_part:
            patiently((lambda: gate.enter(name)) if gate else None, self._group, self._alive)
            self._switch_s = 0.0
        granted = time.time()
        if resident is not None:
            resident.load()
        size = float(getattr(resident, "num_bytes", 0))
        (size,) = collective.reduce_floats([size], "max", self._group)  # also a barrier after loads
        began = time.time()
        yield
        collective.barrier(self._group)
        ended = time.time()
        freed = self.tail.end() if self.tail is not None else None
        if resident is not None:
            resident.store()
        collective.barrier(self._group)
        left = time.time()
        self._switch_s += began - granted + left - ended
        if not is_part:
            self._is_inside = False
            seconds, switch_s = left - granted - self._switch_s, self._switch_s
            leave = (lambda: gate.leave(name, seconds, switch_s)) if gate else None
            patiently(leave, self._group, self._alive)  # waits while the server is down
        if gate is None:
            return
        found = {} if is_part else {f"mux/wait_s/{name}": granted - asked}
        if resident is None:
            found[f"mux/{name}_s"] = left - granted
        else:
            found[f"mux/load_s/{name}"] = began - granted
            found[f"mux/store_s/{name}"] = left - ended
            found[f"mux/resident_gb/{name}"] = size / 1e9
        times = {"asked": asked, "granted": granted, "began": began, "ended": ended, "left": left}
        more: dict[str, Any] = {"part": True} if is_part else {}
        if freed is not None:
            nodes, at = freed
            found["mux/tail_s"] = left - at
            more["freed"] = {"nodes": list(nodes), "at": at}
        self._tell(found)
        self._write(phase=name, **times, **more)

    def leave_early(self, cells: Sequence[Cell]) -> TailMoves | None:
        """Let the tails of rollouts leave all but the first rollout nodes if another job could use
        the nodes. Return the policy for the controller on rank 0, None on the other ranks.

        Args:
            cells: the engines on each rollout node.
        """
        if self._gate is not None:
            self.tail = TailMoves(self._gate, cells)
        return self.tail

    def see(self, metrics: dict[str, float]) -> None:
        """Pass the job's host memory, from a step's metrics, to the gate for its next report."""
        assert self._gate is not None
        pools = phases.POOLS
        self._gate.has_on_host({pool: metrics[f"perf/{pool}_node_gb"] for pool in pools})

    def close(self) -> None:
        """Leave the cluster. Idempotent."""
        if self._gate is not None:
            self._gate.close()

    def _write(self, **row: Any) -> None:
        assert self._path is not None
        with self._writes.to(self._path), self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def join(
    connect: Callable[[], PermitGate | NoGate] | None,
    group: ProcessGroup | None,
    folder: Path | None,
    *,
    alive: Callable[[], None],
    tell: Callable[[dict[str, float]], None],
    writes: LogWrites | None = None,
) -> RanksGate | None:
    """Return the gate of this rank; None if the job does not share its nodes. Collective.

    Args:
        connect: on rank 0: joins the cluster, or returns a `NoGate` to run without sharing.
        folder: folder of the run, on rank 0.
        alive: called about every second while all ranks wait.
        tell: called on rank 0 with the overhead of a phase, by metric name.
        writes: what to do if a write to the log of permits fails; None: raise.
    """
    found = patiently(connect, group)
    gate = found if isinstance(found, PermitGate) else None
    if not collective.any_rank(gate is not None, group):
        return None
    return RanksGate(gate, folder, group, alive=alive, tell=tell, writes=writes)

"""Long-tail migration of RollMux, arXiv 2512.11306: the tail of a rollout releases nodes to the
next job.

    slots        r0        r1
    rollout A    ########  ########      80 % of the responses are done, and job B waits for r1
                 ####      B B B B       A continues on r0, with its tokens so far

The arbiter decides when to release which nodes (`phase_mux.py`); this module is the job's part. The
controller calls `TailMoves` after each response and periodically, like the policy that picks train
ranks in `--mode stream`. A thread talks to the server, so an outage prevents only the migration."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from rlcore.mux.gate import PermitGate
from rlcore.sched.phase_mux import TAIL
from rlcore.sched.roles import Cell, GroupState, Live
from rlcore.utils.log import log

LOOK_S = 0.2
"""Seconds between requests to the server in the tail of a rollout."""


class TailMoves:
    """`Elastic` policy whose released ranks leave the rollout and do not train. Runs on rank 0."""

    def __init__(self, gate: PermitGate, cells: Sequence[Cell], *, tail: float = TAIL) -> None:
        """Make the policy for one run.

        Args:
            cells: the engines on each rollout node, in the order of the job's `hosts`.
            tail: minimum share of finished responses before nodes may be released.
        """
        self._gate, self._cells, self._tail = gate, cells, tail
        self._talk: _Talk | None = None
        self.start()

    def start(self) -> None:
        self.end()
        self._leaving: set[int] = set()
        self._left: set[int] = set()

    def finished(self, num_tokens: int) -> None:
        """Ignore the length: it does not affect this policy."""

    def release(
        self, done: int, wanted: int, live: Callable[[], Iterable[Live]], up: Collection[int]
    ) -> Sequence[Cell]:
        if done < self._tail * wanted or self._leaving:
            return ()
        if self._talk is None:
            # If many requests are unfinished, replacement or surplus prompts run: no tail yet.
            if wanted - sum(1 for _ in live()) < self._tail * wanted:
                return ()
            self._talk = _Talk(self._gate, done, wanted)
        chosen = [self._cells[node] for node in self._talk.nodes]
        leaving = {rank for cell in chosen for rank in cell.leaders}
        if not chosen or leaving.issuperset(up):
            return ()
        self._leaving, self._left = leaving, leaving.difference(up)  # failed engines count as left
        self._tell()
        return chosen

    def take(self, ready: Sequence[GroupState], cell: Cell) -> int:
        raise AssertionError("a released rank must not train")

    def left(self, rank: int) -> None:
        self._left.add(rank)
        self._tell()

    def end(self) -> tuple[Sequence[int], float] | None:
        """End the rollout. Return the indices of the released rollout nodes of the job, and the
        `time.time` of the release. If no node was released, return None."""
        talk, self._talk = self._talk, None
        if talk is None:
            return None
        talk.over.set()
        talk.may_free.set()
        return (talk.nodes, talk.freed_at) if talk.freed_at else None

    def _tell(self) -> None:
        assert self._talk is not None
        if self._leaving <= self._left:
            self._talk.may_free.set()


class _Talk:
    """Communication with the arbiter about one rollout, in a thread."""

    def __init__(self, gate: PermitGate, done: int, wanted: int) -> None:
        self.nodes: Sequence[int] = ()
        """Rollout nodes to release, as indices in the node names of the job."""
        self.freed_at = 0.0
        self.may_free, self.over = threading.Event(), threading.Event()
        self._gate, self._progress = gate, (done, wanted)
        self._of = gate.asked
        threading.Thread(target=self._run, name="mux tail", daemon=True).start()

    def _run(self) -> None:
        try:
            self._gate.progress(*self._progress, of=self._of)
            while not self.nodes:
                if self.over.wait(LOOK_S):
                    return
                self.nodes = self._gate.leave_now(of=self._of)
            self.may_free.wait()
            if not self.over.is_set():
                at = time.time()  # time of release, before another job can start on the nodes
                self._gate.freed(self.nodes, of=self._of)
                self.freed_at = at
        except ConnectionError as error:
            log.warning("mux: the tail of this rollout keeps its nodes: %s", error)

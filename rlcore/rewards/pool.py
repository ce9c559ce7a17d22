"""Pool of child processes that score samples with functions: math, exact, user code.

One thread owns the children. A function that loops, raises, exits, forks or exhausts memory fails
only its own sample. The pool replaces the child and gives its remaining samples to another child.

PR_SET_PDEATHSIG kills a child when the thread that started it exits, not when the process exits.
The thread therefore runs as long as the pool.

Own code instead of `concurrent.futures`, where the failure of one child breaks the whole pool.
"""

import contextlib
import dataclasses
import math
import os
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Collection

import msgspec

from rlcore.config.schema import RewardConfig
from rlcore.records import RequestId, RewardResult
from rlcore.rewards.kind import RunnerHost
from rlcore.rewards.wire import READY, RewardStart, ScoreJob, ScoreReply
from rlcore.rewards.worker import PendingSample, RewardWorker
from rlcore.utils import net
from rlcore.utils.children import CappedLog, exit_text, last_lines
from rlcore.utils.log import log
from rlcore.utils.net import frame

_MAX_WINDOW = 256
_WINDOW_S = 0.005
_MAX_FAILED_STARTS = 3
_CLOSE_S = 20.0
_MEMORY_CHECK_S = 0.25


class RewardPool:
    """`kind.Runner` that scores samples in child processes; see the module docstring."""

    def __init__(
        self, config: RewardConfig, host: RunnerHost, start_timeout_s: float = 120.0
    ) -> None:
        """Start the pool's thread. `config` is the reward's config section. Output of the reward
        function goes to the host's log file, up to 4 MiB."""
        self._host, self._num_workers = host, config.workers
        self._memory, self._start_timeout_s = config.memory_limit_gb * 2**30, start_timeout_s
        self._start = frame(
            RewardStart(
                reward=host.name,
                config=dataclasses.asdict(config),
                sys_path=tuple(os.path.abspath(p) for p in sys.path),
                seed=host.seed,
            )
        )
        self._log = CappedLog(host.log_file, "reward")
        # fields shared with the thread, guarded by the lock
        self._lock = threading.Lock()
        self._inbox: deque[PendingSample] = deque()
        self._cancelled: set[RequestId] = set()
        self._closing = False
        # fields used by the thread only
        self._failure = ""
        self._queue: deque[PendingSample] = deque()
        self._workers: list[RewardWorker] = []
        self._failed_starts, self._failed_at = 0, 0.0
        self._latency_s = _WINDOW_S
        self._memory_checked = 0.0
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ, (None, "wake"))
        self._thread = threading.Thread(target=self._main, name=f"reward {host.name}", daemon=True)
        self._thread.start()

    # ---- the caller's thread

    def submit(self, job: ScoreJob) -> None:
        """Queue a job (`Runner.submit`)."""
        entry = PendingSample(job, frame(job))
        with self._lock:
            idle = not self._inbox
            self._inbox.append(entry)
        if idle:
            os.eventfd_write(self._wake, 1)

    def cancel(self, ids: Collection[RequestId]) -> None:
        """Cancel samples (`Runner.cancel`). Running samples continue, because stopping a sample
        would cost its child process."""
        with self._lock:
            self._inbox = deque(e for e in self._inbox if e.job.sample.id not in ids)
            self._cancelled |= set(ids)  # this cancels only samples that were queued before
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Stop all children."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            log.error("reward %s: children did not exit within %g s", self._host.name, _CLOSE_S)
            return
        os.close(self._wake)

    # ---- the pool's thread

    def _main(self) -> None:
        try:
            while not self._closing and not self._failure:
                self._step()
        except Exception as error:  # report the failed thread, so that `poll` raises an error
            log.exception("reward %s: the thread of its pool failed", self._host.name)
            self._fail(
                f"reward {self._host.name}: its pool failed: {type(error).__name__}: {error}"
            )
        finally:
            for worker in self._workers:
                worker.end()
            self._workers.clear()
            self._selector.close()

    def _step(self) -> None:
        while len(self._workers) < self._num_workers:
            self._workers.append(RewardWorker(self._selector, self._start, self._log.write))
        self._feed()
        for key, events in self._selector.select(self._wait_s()):
            worker, what = key.data
            if what == "wake":
                self._take_inbox()
            elif worker in self._workers:  # the child may have exited earlier in this loop
                self._serve(worker, what, events)
        self._check_deadlines()
        self._check_memory()

    def _take_inbox(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        with self._lock:
            gone, self._cancelled = self._cancelled, set()
            self._queue = deque(e for e in self._queue if e.job.sample.id not in gone)
            self._queue.extend(self._inbox)
            self._inbox.clear()

    def _feed(self) -> None:
        """Keep samples for about 5 ms of work queued at each child. Thus no child waits for the
        pool, and few samples wait behind a slow sample."""
        window = max(1, min(_MAX_WINDOW, int(_WINDOW_S / self._latency_s)))
        batches: dict[RewardWorker, list[PendingSample]] = {}
        open_workers = [w for w in self._workers if w.ready and not w.retiring]
        open_workers = [w for w in open_workers if len(w.inflight) <= window // 2]
        while self._queue and open_workers:
            worker = min(open_workers, key=lambda w: len(w.inflight))
            if len(worker.inflight) >= window:
                break
            entry = self._queue.popleft()
            worker.hold(entry)
            batches.setdefault(worker, []).append(entry)
        for worker, entries in batches.items():
            worker.send(b"".join(e.frame for e in entries))

    def _wait_s(self) -> float:
        """Return the seconds until the next deadline."""
        now = time.monotonic()
        ends = [self._end_of(w) for w in self._workers]
        wait = min((e for e in ends if e is not None), default=now + 60.0) - now
        if self._memory and any(w.inflight for w in self._workers):
            wait = min(wait, _MEMORY_CHECK_S)
        return max(0.0, wait)

    def _end_of(self, worker: RewardWorker) -> float | None:
        if not worker.ready:
            return worker.started + self._start_timeout_s
        if not worker.inflight:
            return None
        return worker.head_since + self._host.timeout_s(worker.inflight[0].job)

    def _serve(self, worker: RewardWorker, what: str, events: int) -> None:
        if what == "output":
            worker.read_output()
        else:
            if events & selectors.EVENT_WRITE:
                worker.flush()
            if events & selectors.EVENT_READ:
                self._receive(worker)

    def _receive(self, worker: RewardWorker) -> bool:
        """Process the available replies. Returns False if the child was replaced."""
        try:
            for body in worker.channel.receive():
                self._reply(worker, net.decode(body, ScoreReply))
        except EOFError:  # the child has exited or closed its channel
            self._replace(worker)
            return False
        except (ValueError, IndexError) as error:
            self._replace(worker, f"crash: the reward wrote to the service's channel ({error})")
            return False
        if worker.retiring and not worker.inflight:
            self._replace(worker, "memory")
            return False
        return True

    def _reply(self, worker: RewardWorker, reply: ScoreReply) -> None:
        if reply.key == READY and not worker.ready:
            self._started(worker, reply.result.error)
            return
        entry = worker.inflight[0]
        if entry.job.key != reply.key:
            raise ValueError(f"reply for sample {reply.key} instead of {entry.job.key}")
        if not 0 <= reply.result.latency_s < math.inf:
            raise ValueError(f"reply after {reply.result.latency_s} s")
        worker.end_first()
        self._failed_starts = 0
        self._latency_s += 0.1 * (reply.result.latency_s - self._latency_s)
        self._latency_s = max(self._latency_s, 1e-6)
        result = reply.result
        if result.latency_s > self._host.timeout_s(entry.job):
            result = msgspec.structs.replace(result, error=self._timeout_text(entry))
        self._settle(entry, result, worker)
        if reply.retire:
            worker.retire()

    def _started(self, worker: RewardWorker, error: str) -> None:
        if error:
            self._fail(f"reward {self._host.name} cannot start in a child process: {error}")
            return
        worker.become_ready()

    def _timeout_text(self, entry: PendingSample) -> str:
        return f"timeout after {round(self._host.timeout_s(entry.job), 3):g} s"

    def _settle(self, entry: PendingSample, result: RewardResult, worker: RewardWorker) -> None:
        """Report the result of a sample, a score or an error, to the host."""
        printed = ""
        if result.error:
            worker.read_output()
            printed = worker.printed() or "(nothing)"
        self._host.done(entry.job, result, printed)

    def _check_deadlines(self) -> None:
        for worker in list(self._workers):
            end = self._end_of(worker)
            if end is None or time.monotonic() < end:
                continue
            if not worker.ready:
                self._replace(worker, f"did not start within {self._start_timeout_s:g} s")
                continue
            head = worker.inflight[0]
            # read replies that arrived while this thread was delayed
            if self._receive(worker) and worker.inflight and worker.inflight[0] is head:
                worker.print_stack()
                self._replace(worker, self._timeout_text(head))

    def _check_memory(self) -> None:
        now = time.monotonic()
        if not self._memory or now < self._memory_checked + _MEMORY_CHECK_S:
            return
        self._memory_checked = now
        for worker in list(self._workers):
            grown = worker.rss() - worker.start_rss if worker.ready and worker.inflight else 0
            if grown > self._memory:
                grown_gb = grown / 2**30
                self._replace(worker, f"memory: the child grew by {grown_gb:.1f} GiB")
            elif grown > self._memory / 2:
                worker.retire()

    def _replace(self, worker: RewardWorker, reason: str = "") -> None:
        """Kill a child. The sample that it was scoring fails with `reason`, or with the exit status
        if `reason` is empty. Its other samples return to the front of the queue."""
        self._workers.remove(worker)
        status = worker.end(exiting=not reason)
        if self._failure:
            return
        reason = reason or f"crash: {exit_text(status)}"
        if worker.inflight:
            seconds = time.monotonic() - worker.head_since
            result = RewardResult(score=0.0, error=reason, latency_s=seconds)
            self._settle(worker.inflight.popleft(), result, worker)
            self._queue.extendleft(reversed(worker.inflight))
        elif not worker.retiring:
            self._failed_start(reason, worker)

    def _failed_start(self, reason: str, worker: RewardWorker) -> None:
        """Count a child process that failed without scoring a sample; after three such failures in
        a row, give up. Children that started together and fail together count once."""
        if worker.started > self._failed_at:
            self._failed_starts, self._failed_at = self._failed_starts + 1, time.monotonic()
        sentence = f"reward {self._host.name}: a child process failed before scoring: {reason}"
        log.warning("%s%s", sentence, last_lines(worker.printed()))
        if self._failed_starts >= _MAX_FAILED_STARTS:
            self._fail(f"{sentence}, {self._failed_starts} times in a row")

    def _fail(self, sentence: str) -> None:
        self._failure = sentence
        self._host.fail(sentence)

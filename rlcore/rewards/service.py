"""The reward service: scores samples in child processes, each sample with a deadline of its own.

A thread owns the children. A function that loops, raises, exits, forks or eats memory costs its own
sample: that one scores `on_error` and says why, the child is replaced, and the samples that waited
behind it are given to another child. The caller only submits and polls.

Children are tied to the thread that starts them (PR_SET_PDEATHSIG works by thread), which is one
more reason for the thread to live as long as the service.
"""

import contextlib
import dataclasses
import os
import selectors
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from rlcore.records import Prompt, RequestId, RewardResult, Sample
from rlcore.rewards.pool import Entry, Worker
from rlcore.rewards.registry import resolve
from rlcore.rewards.wire import READY, Job, Reply, SampleInfo, Start, frame
from rlcore.sched.reward import AdaptiveTimeout, key_of
from rlcore.utils import net
from rlcore.utils.log import log

_MAX_WINDOW = 256
_WINDOW_S = 0.005
_MAX_FAILED_STARTS = 3
_CLOSE_S = 20.0
_MEMORY_CHECK_S = 0.25
_LOG_BYTES = 4 << 20
_FULL_ERRORS = 5
_SHOWN_LINES, _SHOWN_CHARS = 12, 160


class RewardService:
    """See the module. `submit` and `poll` are called from one thread; nothing here blocks longer
    than `poll`'s time-out."""

    def __init__(
        self,
        reward: str,
        *,
        config: Any,
        workers: int = 1,
        timeout_s: float = 10.0,
        on_error: float = 0.0,
        seed: int = 0,
        log_file: Path | None = None,
        memory_gb: float = 8.0,
        start_timeout_s: float = 120.0,
        max_pending: int = 1 << 16,
        deadlines: AdaptiveTimeout | None = None,
        right_score: float = 1.0,
    ) -> None:
        """`config` is the section that `registry.config_class(reward)` describes. What the function
        prints goes to `log_file`, up to 4 MiB. A child that grows by more than `memory_gb` is
        killed; 0 does not look. `deadlines` shortens `timeout_s` for prompts that have an answer of
        at least `right_score`; what it holds is the caller's to save. ValueError where the reward
        does not exist."""
        for key, value, good in (
            ("workers", workers, workers >= 1),
            ("timeout_s", timeout_s, timeout_s > 0),
        ):
            if not good:
                raise ValueError(f"--reward.{key} {value}: must be above 0")
        resolve(reward)
        self._reward, self._timeout_s, self._on_error = reward, timeout_s, on_error
        self._memory, self._start_timeout_s = memory_gb * 2**30, start_timeout_s
        self._max_pending, self._num_workers = max_pending, workers
        self._deadlines, self._right_score = deadlines, right_score
        self._start = frame(
            Start(
                reward=reward,
                config=dataclasses.asdict(config),
                sys_path=tuple(os.path.abspath(p) for p in sys.path),
                seed=seed,
            )
        )
        self._log_file, self._log_room = log_file, _LOG_BYTES
        if log_file is not None:
            log_file.parent.mkdir(parents=True, exist_ok=True)
        self._changed = threading.Condition()
        # shared with the thread, under the lock
        self._inbox: deque[Entry] = deque()
        self._done: deque[tuple[RequestId, RewardResult]] = deque()
        self._cancelled: set[RequestId] = set()
        self._failure = ""
        self._closing = False
        # the caller's
        self._pending: set[RequestId] = set()
        self._next_key = 0
        # the thread's
        self._queue: deque[Entry] = deque()
        self._workers: list[Worker] = []
        self._failed_starts = 0
        self._latency_s = _WINDOW_S
        self._errors: Counter[str] = Counter()
        self._memory_checked = 0.0
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ, (None, "wake"))
        self._thread = threading.Thread(target=self._main, name="rewards", daemon=True)
        self._thread.start()

    # ---- the caller's side

    @property
    def num_pending(self) -> int:
        """Samples that were submitted and that `poll` has not returned."""
        return len(self._pending)

    def submit(self, id: RequestId, sample: Sample, prompt: Prompt, text: str) -> None:
        """Queue a sample; `text` is its decoded response. ValueError for an id that is pending,
        RuntimeError when closed or when more than `max_pending` wait."""
        if self._closing:
            raise RuntimeError(f"reward {self._reward}: the service is closed")
        if id in self._pending:
            raise ValueError(f"reward: {id} is pending already")
        if len(self._pending) >= self._max_pending:
            raise RuntimeError(f"reward: {self._max_pending} samples are pending; poll first")
        info = SampleInfo(
            id=id,
            num_tokens=len(sample.tokens),
            num_prompt_tokens=len(sample.prompt),
            finish=sample.finish,
        )
        text = text.encode("utf-8", "replace").decode()  # lone surrogates cannot travel
        try:
            data = frame(Job(self._next_key, info, prompt, text))
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"row {prompt.index} of {prompt.source} cannot be sent to the reward: {error}"
            ) from error
        entry = Entry(self._next_key, id, key_of(prompt), data)
        self._next_key += 1
        self._pending.add(id)
        with self._changed:
            idle = not self._inbox
            self._inbox.append(entry)
        if idle:
            os.eventfd_write(self._wake, 1)

    def poll(self, timeout_s: float) -> list[tuple[RequestId, RewardResult]]:
        """Scores since the last call, in no order; waits up to `timeout_s` for the first.
        RuntimeError where the reward cannot run at all."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._failure, timeout_s)
            done = list(self._done)
            self._done.clear()
            if not done and self._failure:
                raise RuntimeError(self._failure)
        self._pending.difference_update(id for id, _ in done)
        return done

    def cancel(self, ids: Collection[RequestId]) -> None:
        """These are of no use any more: what waits is not scored, and no score of what runs comes.
        Unknown ids are ignored."""
        gone = self._pending.intersection(ids)
        with self._changed:
            gone.difference_update(id for id, _ in self._done)
            self._cancelled |= gone
            self._done = deque((id, result) for id, result in self._done if id not in ids)
        self._pending.difference_update(ids)
        if gone:
            os.eventfd_write(self._wake, 1)

    def learn(self, anchors: Mapping[str, float]) -> None:
        """Seconds that right answers took at other ranks, by `sched.reward.key_of` their prompt."""
        if self._deadlines is not None:
            with self._changed:
                self._deadlines.learn(anchors)

    def close(self) -> None:
        """End all children. Pending samples are dropped. Safe to call twice."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            log.error("reward: children did not end within %g s", _CLOSE_S)
            return
        os.close(self._wake)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- the thread's side

    def _main(self) -> None:
        try:
            while not self._closing and not self._failure:
                self._step()
        except Exception as error:  # a thread's end must not be silent: poll raises it
            log.exception("reward: the service's thread failed")
            self._fail(
                f"reward {self._reward}: the service failed: {type(error).__name__}: {error}"
            )
        finally:
            for worker in self._workers:
                worker.end()
            self._workers.clear()
            self._selector.close()

    def _step(self) -> None:
        while len(self._workers) < self._num_workers:
            self._workers.append(Worker(self._selector, self._start, self._print))
        self._feed()
        for key, events in self._selector.select(self._wait_s()):
            worker, what = key.data
            if what == "wake":
                self._take_inbox()
            elif worker in self._workers:  # it may have ended earlier in this loop
                self._serve(worker, what, events)
        self._check_deadlines()
        self._check_memory()

    def _take_inbox(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        with self._changed:
            self._queue.extend(self._inbox)
            self._inbox.clear()
            if self._cancelled:
                waiting = {entry.id for entry in self._queue} & self._cancelled
                self._queue = deque(e for e in self._queue if e.id not in waiting)
                self._cancelled -= waiting

    def _feed(self) -> None:
        """Hand out samples, about 5 ms of work ahead: a child never waits for us, and no sample
        waits long behind one that it was not queued with."""
        window = max(1, min(_MAX_WINDOW, int(_WINDOW_S / self._latency_s)))
        batches: dict[Worker, list[Entry]] = {}
        open_workers = [w for w in self._workers if w.ready and not w.retiring]
        open_workers = [w for w in open_workers if len(w.inflight) <= window // 2]
        while self._queue and open_workers:
            worker = min(open_workers, key=lambda w: len(w.inflight))
            if len(worker.inflight) >= window:
                break
            entry = self._queue.popleft()
            if not worker.inflight:
                worker.head_since = time.monotonic()
            worker.inflight.append(entry)
            batches.setdefault(worker, []).append(entry)
        for worker, entries in batches.items():
            worker.send(b"".join(e.frame for e in entries))

    def _wait_s(self) -> float:
        """Seconds until the next deadline."""
        now = time.monotonic()
        ends = [self._end_of(w) for w in self._workers]
        wait = min((e for e in ends if e is not None), default=now + 60.0) - now
        if self._memory and any(w.inflight for w in self._workers):
            wait = min(wait, _MEMORY_CHECK_S)
        return max(0.0, wait)

    def _end_of(self, worker: Worker) -> float | None:
        if not worker.ready:
            return worker.started + self._start_timeout_s
        return worker.head_since + self._limit_s(worker.inflight[0]) if worker.inflight else None

    def _limit_s(self, entry: Entry) -> float:
        """How long it may take, as far as is known now: another's answer may shorten it while it
        runs."""
        return self._deadlines.timeout_s(entry.prompt) if self._deadlines else self._timeout_s

    def _serve(self, worker: Worker, what: str, events: int) -> None:
        if what == "output":
            worker.read_output()
        else:
            if events & selectors.EVENT_WRITE:
                worker.flush()
            if events & selectors.EVENT_READ:
                self._receive(worker)

    def _receive(self, worker: Worker) -> bool:
        """Take the replies that are there; False where the child was replaced."""
        data = worker.read()
        if data is None:
            return True
        if not data:  # closed: it has ended or closed its channel
            self._replace(worker)
            return False
        try:
            for body in worker.frames.feed(data):
                self._reply(worker, net.decode(body, Reply))
        except (ValueError, IndexError) as error:
            self._replace(worker, f"crash: wrote to the service's channel ({error})")
            return False
        if worker.retiring and not worker.inflight:
            self._replace(worker, "memory")
            return False
        return True

    def _reply(self, worker: Worker, reply: Reply) -> None:
        if reply.key == READY and not worker.ready:
            self._started(worker, reply.result.error)
            return
        entry = worker.inflight[0]
        if entry.key != reply.key:
            raise ValueError(f"reply {reply.key} to sample {entry.key}")
        worker.inflight.popleft()
        worker.head_since = time.monotonic()
        self._failed_starts = 0
        self._latency_s += 0.1 * (reply.result.latency_s - self._latency_s)
        self._latency_s = max(self._latency_s, 1e-6)
        result = reply.result
        if result.latency_s > self._limit_s(entry):
            result = msgspec.structs.replace(result, error=self._timeout_text(entry))
        self._settle(entry, result, worker)
        worker.retiring |= reply.retire

    def _started(self, worker: Worker, error: str) -> None:
        if error:
            self._fail(f"reward {self._reward} cannot start in a child process: {error}")
            return
        worker.ready = True
        worker.start_rss = worker.rss()

    def _timeout_text(self, entry: Entry) -> str:
        return f"timeout after {round(self._limit_s(entry), 3):g} s"

    def _settle(self, entry: Entry, result: RewardResult, worker: Worker) -> None:
        """A sample has its score, or the substitute."""
        if result.error:
            result = RewardResult(
                score=self._on_error, error=result.error, latency_s=result.latency_s
            )
            self._tell(entry, result.error, worker)
        with self._changed:
            if self._deadlines is not None:
                result = self._measured(self._deadlines, entry, result)
            if entry.id in self._cancelled:
                self._cancelled.discard(entry.id)
                return
            self._done.append((entry.id, result))
            self._changed.notify()

    def _measured(
        self, deadlines: AdaptiveTimeout, entry: Entry, result: RewardResult
    ) -> RewardResult:
        """The result with its deadline; a right answer is a measure for later ones."""
        limit, is_right = self._limit_s(entry), not result.error
        is_right = is_right and result.score >= self._right_score
        deadlines.scored(entry.prompt, result.latency_s, is_right)
        anchor_s = result.latency_s if is_right else 0.0
        return msgspec.structs.replace(result, timeout_s=limit, anchor_s=anchor_s)

    def _tell(self, entry: Entry, error: str, worker: Worker) -> None:
        """Log a failure with its sample; a kind of error that repeats is told every so often."""
        worker.read_output()
        kind = error.partition(":")[0]
        self._errors[kind] += 1
        count = self._errors[kind]
        if count > _FULL_ERRORS and count & (count - 1):
            return
        nth = f" ({count} samples so far)" if count > _FULL_ERRORS else ""
        printed = "\n  it printed last:" + _last_lines(worker.tail) if count == 1 else ""
        log.warning(
            "reward %s: sample %s scores %g: %s%s%s",
            self._reward,
            entry.id,
            self._on_error,
            error,
            nth,
            printed,
        )

    def _check_deadlines(self) -> None:
        for worker in list(self._workers):
            end = self._end_of(worker)
            if end is None or time.monotonic() < end:
                continue
            if not worker.ready:
                self._replace(worker, f"did not start within {self._start_timeout_s:g} s")
                continue
            head = worker.inflight[0]
            # replies may wait that came while this thread could not run
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
                worker.retiring = True

    def _replace(self, worker: Worker, reason: str = "") -> None:
        """End a child: `reason` falls on the sample that it was scoring, without one its exit
        status does; the samples behind that one are queued again, in front."""
        self._workers.remove(worker)
        if not reason:
            self._last_replies(worker)
        status = worker.end(exiting=not reason)
        if self._failure:
            return
        reason = reason or f"crash: {_exit_text(status)}"
        if worker.inflight:
            seconds = time.monotonic() - worker.head_since
            result = RewardResult(score=0.0, error=reason, latency_s=seconds)
            self._settle(worker.inflight.popleft(), result, worker)
            self._queue.extendleft(reversed(worker.inflight))
        elif not worker.retiring:
            self._failed_start(reason, worker)

    def _last_replies(self, worker: Worker) -> None:
        """What a dead child had still sent."""
        try:
            while data := worker.read():
                for body in worker.frames.feed(data):
                    self._reply(worker, net.decode(body, Reply))
        except (ValueError, IndexError) as error:
            log.warning("reward %s: a dying child sent junk: %s", self._reward, error)

    def _failed_start(self, reason: str, worker: Worker) -> None:
        """A child that ended without a sample to blame: try again, but not for ever."""
        self._failed_starts += 1
        sentence = f"reward {self._reward}: a child process failed before scoring: {reason}"
        log.warning("%s%s", sentence, _last_lines(worker.tail))
        if self._failed_starts >= _MAX_FAILED_STARTS:
            self._fail(f"{sentence}, {self._failed_starts} times in a row")

    def _fail(self, sentence: str) -> None:
        with self._changed:
            self._failure = sentence
            self._changed.notify_all()

    def _print(self, data: bytes) -> None:
        """What children print goes to the log file while there is room."""
        if self._log_file is None or self._log_room <= 0:
            return
        data = data[: self._log_room]
        self._log_room -= len(data)
        if not self._log_room:
            data += f"\n(cut: {_LOG_BYTES} bytes are enough)\n".encode()
        try:
            with self._log_file.open("ab") as file:
                file.write(data)
        except OSError as error:  # a full disk must not cost the scores
            self._log_room = 0
            log.warning("reward: %s cannot be written: %s", self._log_file, error)


def _last_lines(printed: bytes) -> str:
    """The end of what a child printed, indented; each line cut to a readable length."""
    lines = printed.decode("utf-8", "replace").strip().splitlines()[-_SHOWN_LINES:]
    return "".join(f"\n    {line[:_SHOWN_CHARS]}" for line in lines) or " nothing"


def _exit_text(status: int | None) -> str:
    if status is None:
        return "does not die"
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"

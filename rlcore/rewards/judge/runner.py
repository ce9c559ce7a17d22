"""Runner of the judge, and its local backend. `JudgeRunner` caches verdicts, `ProcessBackend` runs
a judge process. `engine.py` has the backend for a judge behind a URL."""

import dataclasses
import hashlib
import os
import selectors
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from typing import Protocol

import msgspec

from rlcore.hf.config import HFConfig
from rlcore.records import RequestId, RewardResult
from rlcore.rewards.judge.config import JudgeRewardConfig
from rlcore.rewards.judge.rubric import Rubric
from rlcore.rewards.judge.wire import (
    BatchDone,
    BatchStarted,
    CancelRequests,
    FromJudge,
    GradeRequest,
    JudgeReady,
    LoadJudge,
)
from rlcore.rewards.kind import RunnerHost
from rlcore.rewards.wire import ScoreJob
from rlcore.rewards.worker import RewardWorker
from rlcore.utils import bounds, net
from rlcore.utils.children import CappedLog
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import announce, log
from rlcore.utils.net import frame

_MAX_FAILED_STARTS = 3
_CLOSE_S = 20.0
_MEMORY_CHECK_S = 0.25

Settle = Callable[[int, RewardResult, str], None]
"""Callback that receives a request's key, its result and, after a failure, the judge's output."""


class Backend(Protocol):
    """Interface of a backend, which obtains verdicts. No call blocks, except `close`."""

    def ask(self, job: ScoreJob) -> None:
        """Request a verdict. The callback `Settle` later gets it, with the job's key."""

    def drop(self, keys: Collection[int]) -> None:
        """Cancel the requests with these keys."""

    def close(self) -> None:
        """Stop the backend and everything that it started."""


class JudgeRunner:
    """`kind.Runner` that asks the backend only once for each pair of prompt and response."""

    def __init__(
        self, cfg: JudgeRewardConfig, host: RunnerHost, make: Callable[[Settle], Backend]
    ) -> None:
        """Start the backend with `make`. Raises ConfigError if the rubric cannot be used."""
        # The judge is fixed for the whole run, so a verdict depends only on the judge's input.
        Rubric(cfg)
        self._host, self._room = host, cfg.cache_entries
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[bytes, float] = OrderedDict()
        self._waiting: dict[bytes, tuple[int, list[ScoreJob]]] = {}
        """Requests in flight, by digest: the backend's key, and the jobs that wait."""
        self._digests: dict[int, bytes] = {}
        self._backend = make(self._settle)

    def submit(self, job: ScoreJob) -> None:
        """Request a verdict, unless it is cached or already requested (`Runner.submit`)."""
        digest = digest_of(job)
        with self._lock:
            known = self._verdicts.get(digest)
            if known is not None:
                self._verdicts.move_to_end(digest)
            elif digest in self._waiting:
                self._waiting[digest][1].append(job)
                return
            else:
                self._waiting[digest] = (job.key, [job])
                self._digests[job.key] = digest
        if known is not None:
            self._host.done(job, _cached(known), "")
        else:
            self._backend.ask(job)

    def cancel(self, ids: Collection[RequestId]) -> None:
        """Cancel samples (`Runner.cancel`), and requests for which no other sample waits."""
        idle = []
        with self._lock:
            for digest, (key, jobs) in list(self._waiting.items()):
                jobs[:] = [job for job in jobs if job.sample.id not in ids]
                if not jobs:
                    idle.append(key)
                    del self._waiting[digest], self._digests[key]
        if idle:
            self._backend.drop(idle)

    def close(self) -> None:
        """Close the backend."""
        self._backend.close()

    def _settle(self, key: int, result: RewardResult, printed: str) -> None:
        with self._lock:
            digest = self._digests.pop(key, None)
            if digest is None:  # the request was cancelled
                return
            _, jobs = self._waiting.pop(digest)
            if not result.error and self._room:
                self._verdicts[digest] = result.score
                if len(self._verdicts) > self._room:
                    self._verdicts.popitem(last=False)
        for number, job in enumerate(jobs):
            again = _cached(result.score) if number and not result.error else result
            self._host.done(job, again, printed)


def _cached(score: float) -> RewardResult:
    return RewardResult(score=score, details={"judge_cached": 1.0})


def digest_of(job: ScoreJob) -> bytes:
    """Hash the parts of a job that the judge sees."""
    shown = (job.prompt.text, job.prompt.answer, job.text, job.prompt.fields)
    return hashlib.blake2b(net.encode(shown), digest_size=16).digest()


@dataclasses.dataclass(eq=False, slots=True)
class _Entry:
    """Request to the judge process."""

    ask: GradeRequest
    job: ScoreJob
    sent: bool = False

    def send(self, worker: RewardWorker) -> None:
        """Send the request to the judge process."""
        self.sent = True
        worker.send(frame(self.ask))

    def take_back(self) -> None:
        """Mark the request as unsent, because the process that received it has exited."""
        self.sent = False

    def send_alone(self) -> None:
        """Mark the request to be sent in a batch of its own."""
        self.ask = msgspec.structs.replace(self.ask, alone=True)


class ProcessBackend:
    """Backend with a local judge process. A thread owns the process, sends requests, and enforces
    batch deadlines. If a batch crashes the process, its requests are retried one by one. A request
    fails if its own retry crashes the process."""

    def __init__(
        self, cfg: JudgeRewardConfig, host: RunnerHost, device: str, settle: Settle
    ) -> None:
        """Start the thread. `device` is a torch device name such as cuda:0."""
        self._cfg, self._host, self._settle = cfg, host, settle
        self._load = frame(
            LoadJudge(
                config=dataclasses.asdict(cfg),
                device=device,
                sys_path=tuple(os.path.abspath(p) for p in sys.path),
            )
        )
        self._lock = threading.Lock()
        self._inbox: deque[_Entry] = deque()
        self._dropped: set[int] = set()
        self._closing = False
        self._failure = ""
        self._entries: dict[int, _Entry] = {}
        self._running: tuple[int, ...] = ()
        self._since = self._limit_s = 0.0
        self._is_asked = False
        """Whether the judge has unanswered requests. If so, the judge is restarted unless it sends
        a message within the time-out."""
        self._growth = self._begin_growth = 0
        """`_growth`: bytes by which the judge's memory may grow after its start. `_begin_growth`:
        bytes by which the judge exceeded `_growth` when its current batch began."""
        self._memory_checked = 0.0
        self._worker: RewardWorker | None = None
        self._failed_starts = 0
        self._log = CappedLog(host.log_file, "judge")
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ, (None, "wake"))
        self._thread = threading.Thread(target=self._main, name="judge", daemon=True)
        self._thread.start()

    # ---- the caller's thread

    def ask(self, job: ScoreJob) -> None:
        """Queue a request for the judge process (`Backend.ask`)."""
        prompt = job.prompt
        ask = GradeRequest(job.key, prompt.text, prompt.answer, job.text, prompt.fields)
        with self._lock:
            self._inbox.append(_Entry(ask, job))
        os.eventfd_write(self._wake, 1)

    def drop(self, keys: Collection[int]) -> None:
        """Cancel waiting requests (`Backend.drop`). A running batch continues."""
        with self._lock:
            self._dropped |= set(keys)
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Stop the process and the thread."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            log.error("judge: its process did not exit within %g s", _CLOSE_S)
            return
        os.close(self._wake)

    # ---- the backend's thread

    def _main(self) -> None:
        try:
            while not self._closing and not self._failure:
                self._step()
        except Exception as error:  # report the failed thread, so that `poll` raises an error
            log.exception("judge: its thread failed")
            self._fail(f"the judge's thread failed: {type(error).__name__}: {error}")
        finally:
            if self._worker is not None:
                self._worker.end()
            self._selector.close()

    def _step(self) -> None:
        if self._worker is None:
            self._running = ()
            self._worker = RewardWorker(
                self._selector, self._load, self._log.write, "rlcore.rewards.judge.process"
            )
        self._send()
        for key, events in self._selector.select(self._wait_s()):
            worker, what = key.data
            if what == "wake":
                self._take_inbox()
            elif worker is self._worker:
                self._serve(worker, what, events)
        self._check_deadline()
        self._check_memory()

    def _take_inbox(self) -> None:
        os.eventfd_read(self._wake)
        with self._lock:
            coming, self._inbox = self._inbox, deque()
            dropped, self._dropped = self._dropped, set()
        self._entries |= {entry.ask.key: entry for entry in coming}
        gone = []
        for key in dropped - set(self._running):
            entry = self._entries.pop(key, None)
            if entry is not None and entry.sent:
                gone.append(key)
        self._update_deadline(is_new=False)  # if no sent request is left, there is no deadline
        if gone and self._worker is not None:
            self._worker.send(frame(CancelRequests(tuple(gone))))

    def _send(self) -> None:
        """Send all unsent requests; the judge forms batches from them."""
        worker = self._worker
        if worker is None or not worker.ready:
            return
        for entry in self._entries.values():
            if not entry.sent:
                entry.send(worker)
                self._update_deadline(is_new=not self._is_asked)

    def _update_deadline(self, is_new: bool = True) -> None:
        """Update whether the judge has requests. If `is_new`, restart the judge's time-out."""
        self._is_asked = any(entry.sent for entry in self._entries.values())
        if is_new:
            self._since, self._limit_s = time.monotonic(), self._cfg.timeout_s

    def _wait_s(self) -> float | None:
        end = self._end()
        if end is None:
            return None
        left = max(0.0, end - time.monotonic())
        return min(left, _MEMORY_CHECK_S) if self._is_asked and self._cfg.memory_limit_gb else left

    def _end(self) -> float | None:
        worker = self._worker
        if worker is not None and not worker.ready:
            return worker.started + self._cfg.start_timeout_s
        return self._since + self._limit_s if self._is_asked else None

    def _serve(self, worker: RewardWorker, what: str, events: int) -> None:
        if what == "output":
            worker.read_output()
            return
        if events & selectors.EVENT_WRITE:
            worker.flush()
        if events & selectors.EVENT_READ:
            self._receive(worker)

    def _receive(self, worker: RewardWorker) -> None:
        """Process the judge's messages; if the judge has exited, handle its exit."""
        try:
            for body in worker.channel.receive():
                self._obey(worker, net.decode(body, FromJudge))
        except EOFError:
            self._ended("")
        except (ValueError, IndexError) as error:
            self._ended(f"crash: the judge wrote to the service's channel ({error})")

    def _obey(self, worker: RewardWorker, message: JudgeReady | BatchStarted | BatchDone) -> None:
        if isinstance(message, JudgeReady):
            if message.error:
                self._fail(f"cannot start: {message.error}")
                return
            worker.become_ready()
            self._growth = message.growth_bytes
        elif isinstance(message, BatchStarted):
            self._update_deadline()
            self._begin_growth = self._grown(worker)
            self._running = message.keys
            jobs = [self._entries[k].job for k in message.keys if k in self._entries]
            limits = [self._host.timeout_s(job) for job in jobs]
            self._limit_s = max(limits, default=self._cfg.timeout_s)
        else:
            self._failed_starts = 0
            seconds, keys, self._running = time.monotonic() - self._since, self._running, ()
            for key, result in zip(keys, message.results, strict=True):
                self._end_one(key, msgspec.structs.replace(result, latency_s=seconds))
            self._update_deadline()

    def _check_deadline(self) -> None:
        worker, end = self._worker, self._end()
        if worker is None or end is None or time.monotonic() < end:
            return
        if not worker.ready:
            self._ended(
                f"did not start within --reward.start_timeout_s {self._cfg.start_timeout_s:g}"
            )
            return
        begun = self._since
        self._receive(worker)  # read results that came while this thread was delayed
        if self._worker is worker and self._is_asked and self._since == begun:
            worker.print_stack()
            self._ended(f"timeout after {self._limit_s:g} s")

    def _grown(self, worker: RewardWorker) -> int:
        """Return the bytes by which the judge's memory exceeds its allowed growth."""
        return worker.rss() - worker.start_rss - self._growth

    def _check_memory(self) -> None:
        worker, limit = self._worker, self._cfg.memory_limit_gb * 2**30
        now = time.monotonic()
        if not limit or not self._is_asked or now < self._memory_checked + _MEMORY_CHECK_S:
            return
        self._memory_checked = now
        if worker is None or not worker.ready or (grown := self._grown(worker)) <= limit:
            return
        is_older = not self._running or self._begin_growth > limit / 2
        self._ended(
            f"memory: the judge grew by {grown / 2**30:.3g} GiB without its layers, but "
            f"--reward.memory_limit_gb is {self._cfg.memory_limit_gb:g}",
            is_older,
        )

    def _ended(self, reason: str, is_innocent: bool = False) -> None:
        """Stop the process, which has exited or must be killed. The running batch fails if it has
        one request or timed out; otherwise its requests are retried one by one. Other requests are
        sent again. If `is_innocent`, the batch did not cause the end, so all requests are
        sent again."""
        worker, self._worker = self._worker, None
        assert worker is not None
        status = worker.end(exiting=not reason)
        printed = worker.printed() or "(nothing)"
        keys, self._running = () if is_innocent else self._running, ()
        is_late = reason.startswith("timeout")
        if is_late and not keys:  # judge hangs between batches: any sent request may be the cause
            keys = tuple(key for key, entry in self._entries.items() if entry.sent)
        for asked in self._entries.values():
            asked.take_back()
        self._is_asked = False
        if not keys:
            self._failed_start(reason or f"exit status {status}", printed)
            return
        reason = reason or f"crash: the judge exited with status {status}"
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                continue
            if is_late or len(keys) == 1 or entry.ask.alone:
                seconds = time.monotonic() - self._since
                result = RewardResult(score=0.0, error=reason, latency_s=seconds)
                self._end_one(key, result, printed)
            else:
                entry.send_alone()
        log.warning("judge: %s; restarting it", reason)

    def _end_one(self, key: int, result: RewardResult, printed: str = "") -> None:
        if self._entries.pop(key, None) is not None:
            self._settle(key, result, printed)

    def _failed_start(self, reason: str, printed: str) -> None:
        self._failed_starts += 1
        log.warning("judge: its process exited without a running batch: %s\n%s", reason, printed)
        if self._failed_starts >= _MAX_FAILED_STARTS:
            self._fail(f"its process failed {self._failed_starts} times without a batch: {reason}")

    def _fail(self, sentence: str) -> None:
        self._failure = sentence
        self._host.fail(f"reward {self._host.name}: {sentence}")


def serve(cfg: JudgeRewardConfig, host: RunnerHost) -> JudgeRunner:
    """Create the runner for these settings. Raises ConfigError if they are invalid."""
    if found := [*bounds.broken(cfg, "reward"), *cfg.problems("reward")]:
        raise ConfigError("\n".join(found))
    if cfg.url:
        from rlcore.rewards.judge.engine import EngineBackend

        announce("judge", f"{cfg.model} at {cfg.url}, {cfg.workers} requests at a time")
        return JudgeRunner(cfg, host, lambda settle: EngineBackend(cfg, host, settle))
    HFConfig.from_folder(cfg.model, "--reward.model")
    import torch

    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{torch.cuda.current_device()}"
    announce("judge", f"{cfg.model}, {cfg.dtype}, {cfg.method}, on {device}, child process")
    return JudgeRunner(cfg, host, lambda settle: ProcessBackend(cfg, host, device, settle))

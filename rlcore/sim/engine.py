"""A virtual engine: continuous batching over a cost model, in virtual time.

All running requests grow by one token per step, so the state between two events has a closed form.
Events are: a request ends, the KV cache is full, requests arrive. The time to process an event is
O(log(requests)), for any number of tokens since the last event. If the KV cache is full, the most
recently started request is preempted. As in real engines, it waits and is prefilled again.

All tokens of a request except the last are prefilled; the last one goes through the decode step.
While a request of a group runs, further ones take the prompt from its KV cache. Each request still
takes up room for a prompt of its own, as in the torch engine.
"""

import heapq
import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from rlcore.records import GroupId, RequestId
from rlcore.sim.cost import EngineCost
from rlcore.sim.drafts import DraftGain

DRAFTED_STEPS = 256
"""Decode steps after which an engine considers again whether drafts pay."""


@dataclass(slots=True, eq=False)
class SimRequest:
    """A request that runs or waits in an engine."""

    id: RequestId
    prompt: int
    length: int
    """Final number of response tokens."""
    group: GroupId = ""
    """Group, whose requests have the same prompt; empty: none."""
    have: float = 0
    """Number of response tokens at `start`; not a whole number while drafts are used."""
    pace: float = 1.0
    """Forwards that the response takes with drafts, over those of the mean gain."""
    start: int = 0
    """Number of decode steps that the engine had done when it started the request."""
    gone: bool = False

    def start_at(self, step: int) -> None:
        """Start decoding the request after `step` decode steps of the engine."""
        self.start = step

    def settle(self, step: int, drafts: DraftGain | None) -> None:
        """Count the tokens that were decoded until `step` decode steps of the engine."""
        steps, self.start = step - self.start, step
        if drafts is None:
            self.have += steps
        elif steps:
            forwards = drafts.forwards(self.have) + steps / self.pace
            self.have = min(self.length, drafts.position(forwards))

    def left(self, drafts: DraftGain | None) -> int:
        """Return the number of decode steps to the last token."""
        if drafts is None:
            return self.length - int(self.have)
        forwards = drafts.forwards(self.length) - drafts.forwards(self.have)
        return max(1, math.ceil(self.pace * forwards - 1e-9))

    def finish(self) -> None:
        """Count all tokens as decoded: drafts may leave a part of the last one."""
        self.have = self.length

    def leave(self) -> None:
        """Stop decoding, and keep the decoded tokens."""
        self.have, self.gone = int(self.have), True

    def again(self) -> "SimRequest":
        """Return the request as one that waits, with the tokens that it has."""
        return SimRequest(
            id=self.id,
            prompt=self.prompt,
            length=self.length,
            group=self.group,
            have=self.have,
            pace=self.pace,
        )


class DecodeSpan(NamedTuple):
    """Interval of uninterrupted decoding or prefill. When the batch size crosses a power of two, a
    new interval begins."""

    start: float
    end: float
    running: int
    """Number of running requests at the start of the interval."""


@dataclass(slots=True)
class VirtualEngine:
    """Virtual engine; `now` is the virtual time up to which it has been simulated."""

    cost: EngineCost
    max_running: int = 1 << 30
    drafts: DraftGain | None = None
    """Gain of drafts, which the engine uses whenever they decode more tokens a second."""
    now: float = 0.0
    decoded: int = 0
    """Number of tokens decoded so far, over all requests."""
    steps: int = 0
    prefilled: int = 0
    cached: int = 0
    """Number of prompt tokens that another request had in the KV cache."""
    preemptions: int = 0
    busy_s: float = 0.0
    spans: list[DecodeSpan] = field(default_factory=list)
    """Intervals in which the engine decoded or prefilled."""
    peak_context: float = 0.0
    _on: DraftGain | None = None
    """`drafts` while they are used."""
    _grows: float = 0.0
    """Tokens that a step with drafts adds, over all requests."""
    _step: int = 0
    _context: float = 0.0
    _running: dict[RequestId, SimRequest] = field(default_factory=dict)
    _ends: list[tuple[int, int, SimRequest]] = field(default_factory=list)
    """Heap of running requests, as (last decode step, tie-breaker, request)."""
    _groups: Counter[GroupId] = field(default_factory=Counter)
    """Number of running requests by group."""
    _waiting: deque[SimRequest] = field(default_factory=deque)
    _ties: int = 0

    @property
    def live(self) -> int:
        return len(self._running) + len(self._waiting)

    @property
    def begun(self) -> list[RequestId]:
        """Ids of the running and waiting requests that have at least one response token."""
        ids = [job.id for job in self._running.values() if job.have or job.start < self._step]
        return ids + [job.id for job in self._waiting if job.have]

    def lengths(self, time: float) -> dict[RequestId, int]:
        """Return the response lengths of all requests at `time`."""
        self.advance(time)
        for job in self._running.values():
            job.settle(self._step, self._on)
        return {job.id: int(job.have) for job in (*self._running.values(), *self._waiting)}

    # ---- requests

    def submit(self, jobs: list[SimRequest], time: float) -> None:
        """Queue requests, and start as many as fit into the batch and the KV cache."""
        self.advance(time)
        self._waiting.extend(jobs)
        self._admit()

    def release(self, time: float) -> list[SimRequest]:
        """Remove and return all requests, for prefill on another engine."""
        return self.abort([*self._running, *(job.id for job in self._waiting)], time)

    def abort(self, ids: list[RequestId], time: float) -> list[SimRequest]:
        """Stop and return the given requests, which keep the tokens decoded so far."""
        self.advance(time)
        wanted, out = set(ids), []
        for id in ids:
            job = self._running.pop(id, None)
            if job is not None:
                self._leave(job)
                out.append(job)
        if len(out) < len(wanted):
            out += [job for job in self._waiting if job.id in wanted]
            self._waiting = deque(job for job in self._waiting if job.id not in wanted)
        self._admit()
        return out

    # ---- time

    def next_event(self) -> float | None:
        """Return when the next request ends or the KV cache is full; None if no request runs."""
        steps = self._steps_ahead()
        return None if steps is None else self.now + self._seconds(steps)

    def advance(self, time: float) -> None:
        """Decode until `time`, which must be before the next event."""
        if self._running and time > self.now:
            ahead = self._steps_ahead()
            steps = self.cost.steps_within(
                len(self._running), self._context, time - self.now, self._width, self._grows
            )
            if ahead is not None and steps >= ahead:
                steps = ahead - 1  # `step_to_event` does the step in which a request ends
            seconds = self._seconds(steps)
            self._decode(steps)
            self._worked(seconds)
        elif time > self.now:
            self.now = time

    def stand_still(self, time: float) -> None:
        """Stay idle until `time`, even if there are requests to decode."""
        self.now = max(self.now, time)

    def step_to_event(self) -> list[SimRequest]:
        """Decode up to the next event, and return the requests that end at this event."""
        ahead = self._steps_ahead()
        assert ahead is not None
        seconds = self._seconds(ahead)
        self._decode(ahead)
        self._worked(seconds)
        out = []
        while self._ends and (self._ends[0][2].gone or self._ends[0][0] <= self._step):
            _, _, job = heapq.heappop(self._ends)
            if job.gone:
                continue
            del self._running[job.id]
            self._leave(job)
            job.finish()
            out.append(job)
        while self._next_context > self.cost.cache_tokens and len(self._running) > 1:
            self._preempt()
        self._admit()
        return out

    # ---- internals

    @property
    def _next_context(self) -> float:
        """Total context tokens of the running requests after one more decode step."""
        return self._context + (self._grows or len(self._running))

    @property
    def _width(self) -> float:
        return self._on.width if self._on is not None else 1

    def _seconds(self, steps: int) -> float:
        return self.cost.decode_s(
            len(self._running), self._context, steps, self._width, self._grows
        )

    def _use_drafts(self) -> None:
        """Count what each request has, and use drafts if they decode more tokens a second."""
        if self.drafts is None:
            return
        jobs = list(self._running.values())
        for job in jobs:
            job.settle(self._step, self._on)
        self._context = sum(job.prompt + job.have for job in jobs)
        grows = sum(self.drafts.at(job.have) / job.pace for job in jobs)
        plain_s = self.cost.decode_s(len(jobs), self._context, 1)
        drafted_s = self.cost.decode_s(len(jobs), self._context, 1, self.drafts.width)
        on = self.drafts if grows * plain_s > len(jobs) * drafted_s else None
        self._grows = grows if on is not None else 0.0
        if on is not self._on:
            self._on = on
            self._ends = [(self._step + j.left(on), k, j) for k, j in enumerate(jobs)]
            self._ties = len(jobs)
            heapq.heapify(self._ends)

    def _worked(self, seconds: float) -> None:
        if seconds:
            running = len(self._running)
            last = self.spans[-1] if self.spans else None
            if (
                last is not None
                and abs(last.end - self.now) < 1e-9
                and last.running.bit_length() == running.bit_length()
            ):
                self.spans[-1] = DecodeSpan(last.start, self.now + seconds, last.running)
            else:
                self.spans.append(DecodeSpan(self.now, self.now + seconds, running))
        self.now += seconds
        self.busy_s += seconds

    def _steps_ahead(self) -> int | None:
        while self._ends and self._ends[0][2].gone:
            heapq.heappop(self._ends)
        if not self._ends:
            return None
        steps = max(1, self._ends[0][0] - self._step)
        if len(self._running) > 1:
            room = (self.cost.cache_tokens - self._context) / (self._grows or len(self._running))
            if room < steps:
                steps = max(1, int(room))
        return steps if self.drafts is None else min(steps, DRAFTED_STEPS)

    def _decode(self, steps: int) -> None:
        n = len(self._running)
        self._step += steps
        self.steps += steps
        self.decoded += round(steps * (self._grows or n))
        self._context += steps * (self._grows or n)
        self.peak_context = max(self.peak_context, self._context)

    def _leave(self, job: SimRequest) -> None:
        job.settle(self._step, self._on)
        self._groups[job.group] -= 1
        if not self._groups[job.group]:
            del self._groups[job.group]
        self._context -= job.prompt + job.have
        job.leave()

    def _preempt(self) -> None:
        job = self._running.pop(next(reversed(self._running)))
        self._leave(job)
        self.preemptions += 1
        self._waiting.appendleft(job.again())

    def _admit(self) -> None:
        """Start waiting requests in order, while the KV cache has room for their tokens and one
        more token per request. An idle engine starts the first request in any case."""
        prefill, seconds = 0, 0.0
        while self._waiting and len(self._running) < self.max_running:
            job = self._waiting[0]
            need = job.prompt + int(job.have)
            full = self._next_context + need + 1 > self.cost.cache_tokens
            if full and self._running:
                break
            self._waiting.popleft()
            job.start_at(self._step)
            self._running[job.id] = job
            self._context += need
            cached = max(job.prompt - 1, 0) if job.group and self._groups[job.group] else 0
            self._groups[job.group] += 1
            tokens = max(need - 1, 0)
            self.cached += cached
            prefill += tokens - cached
            seconds += self.cost.prompt_s(tokens, cached)
            self._ties += 1
            heapq.heappush(self._ends, (self._step + job.left(self._on), self._ties, job))
        self._use_drafts()
        if prefill:
            self.prefilled += prefill
            self._worked(seconds)

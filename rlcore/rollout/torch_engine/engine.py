"""Continuous batching over `CausalLM`: an `Engine` in plain torch.

A request waits, then runs in a row of the decode batch, then ends. Row i owns cache slot i. When
requests end, the last rows of the batch fill the gaps. All tokens of a request except the last are
prefilled. The last token goes through the decode step like a generated token, so that only the
decode step samples. Requests of a group share a prefill: while one request of the group runs, the
others copy the prompt's keys and values from its cache slot.

Work per token is vectorised over all rows; Python loops run only over requests that start or end.

With drafts (`drafter.py`), a decode step runs a row's last token and its draft through one forward.
It samples every position, each with its own random number. If the draft tokens before position i
are right, sampled token i equals that of plain decoding. So sampled tokens are accepted up to and
including the first that differs from the draft. By induction, the accepted tokens are those of
plain decoding, at any temperature and with any filter. A draft token is accepted with the
probability that the model gives it.

transformers' `generate` is slower: TRL, which uses it, samples for 1.13 s per step, this engine for
.12 s (`tools/results/README.md`).
"""

import ctypes
import heapq
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, final

import numpy as np
import torch

from rlcore.config.schema import RolloutConfig
from rlcore.hf.cache import Cache
from rlcore.hf.config import HFConfig
from rlcore.hf.model import CausalLM, ForwardInputs, Span
from rlcore.hf.quantize import Quantize
from rlcore.ops.logprob import log_probs
from rlcore.ops.products import replace_products
from rlcore.protocols import InProcess, PauseMode, Tag
from rlcore.records import (
    Aborted,
    AnyEvent,
    Bucket,
    Finish,
    Finished,
    History,
    LengthReport,
    Partial,
    Preempted,
    Request,
    RequestId,
    Sample,
    Stats,
    merge_routes,
)
from rlcore.rollout.histospec import Draft
from rlcore.rollout.torch_engine.drafter import Drafter, DraftSettings
from rlcore.rollout.torch_engine.sampler import GOLDEN, MOST_KEPT, SamplingTensors, sample
from rlcore.rollout.validation import check_request, check_tags, damage, gap
from rlcore.utils.buckets import as_tensor, open_payload, unpack
from rlcore.utils.seed import derive

Dtype = Literal["float32", "bfloat16", "float64"]

_PREFILL_TOKENS = {"cpu": 2048, "cuda": 16384}  # maximum tokens of one prefill, with padding
_IDLE_S = 0.002  # longest sleep of an idle `poll`, so that the caller's thread is free again soon
_SPAN = 64  # number of rows that attention pads to a common length, if lengths differ a lot
_WASTE = 1.25  # sort rows if attention otherwise reads this many times as many cache columns


@dataclass(slots=True, eq=False)
class _TorchRequest:
    """State of a request from submission to its end."""

    request: Request
    arrival: int
    key: int
    """Key of the request's random numbers, a signed 64-bit number."""
    prompt: np.ndarray  # [P] int32
    prefix: bytes
    """The prompt as bytes. Requests with equal group and prompt share a prefill."""
    prompt_key: int
    """Key of the prompt in the histories (earlier responses); 0 without drafts."""
    tokens: np.ndarray  # [R] int32, response so far; outdated while the request runs (see _Seats)
    logps: np.ndarray
    versions: np.ndarray
    drafted: np.ndarray
    routes: np.ndarray | None
    """[P + R, layers * K] experts of each token, -1: not known; None if they are not recorded."""
    seat: int = -1
    """Index in the per-request tables (`_Seats`) while the request runs, else -1."""
    told: int = 0
    """Number of response tokens already sent in progress events."""

    def sit(self, seat: int) -> None:
        """Mark the request as running in this seat of the per-request tables."""
        self.seat = seat

    def leave(
        self,
        tokens: np.ndarray,
        logps: np.ndarray,
        versions: np.ndarray,
        drafted: np.ndarray,
        routes: np.ndarray | None,
    ) -> None:
        """Mark the request as not running, and store its response so far."""
        self.tokens, self.logps = tokens, logps
        self.versions, self.drafted, self.routes = versions, drafted, routes
        self.seat = -1

    def tell(self, count: int) -> slice:
        """Return the slice of the `count` response tokens that was not sent in a progress event
        yet, and mark it as sent."""
        new = slice(self.told, count)
        self.told = count
        return new

    @property
    def order(self) -> tuple[int, int]:
        return self.request.priority, self.arrival


@dataclass(slots=True)
class _Seats:
    """Tables with the state of the running requests, in numpy on the host. A request has one fixed
    index (its seat) in all tables."""

    prompt: np.ndarray  # number of prompt tokens
    count: np.ndarray  # number of response tokens
    limit: np.ndarray  # maximum number of response tokens
    last: np.ndarray  # newest token, not yet in the KV cache
    key: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    stops: np.ndarray  # [seats, stops], padded with -1
    tokens: np.ndarray  # [seats, columns]
    logps: np.ndarray
    versions: np.ndarray
    drafted: np.ndarray
    routes: np.ndarray | None  # [seats, positions, layers * K], -1: not known
    free: list[int] = field(default_factory=list)

    @classmethod
    def make(cls, num: int, route: np.ndarray | None) -> "_Seats":
        """`route`: an unknown route, [layers * K]; None: routes are not recorded."""

        def table(dtype: type, *shape: int) -> np.ndarray:
            return np.zeros((num, *shape), dtype)

        ints, floats = np.int64, np.float64
        return cls(
            prompt=table(ints),
            count=table(ints),
            limit=table(ints),
            last=table(ints),
            key=table(ints),
            temperature=table(floats),
            top_k=table(ints),
            top_p=table(floats),
            min_p=table(floats),
            stops=np.full((num, 1), -1),
            tokens=table(np.int32, 64),
            logps=table(np.float32, 64),
            versions=table(np.int32, 64),
            drafted=table(np.bool_, 64),
            routes=None if route is None else np.tile(route, (num, 64, 1)),
            free=list(range(num - 1, -1, -1)),
        )

    def take(self, job: _TorchRequest) -> None:
        """Give the request a free seat (table index) and fill in its entries in the tables."""
        seat, sampling, count = self.free.pop(), job.request.sampling, len(job.tokens)
        job.sit(seat)
        self._widen(count + 1, len(sampling.stop_ids))
        self.prompt[seat] = len(job.prompt)
        self.count[seat] = count
        self.limit[seat] = sampling.max_tokens
        self.last[seat] = job.tokens[-1] if count else job.prompt[-1]
        self.key[seat] = job.key
        self.temperature[seat] = sampling.temperature
        self.top_k[seat] = sampling.top_k
        self.top_p[seat] = sampling.top_p
        self.min_p[seat] = sampling.min_p
        self.stops[seat] = -1
        self.stops[seat, : len(sampling.stop_ids)] = sampling.stop_ids
        self.tokens[seat, :count] = job.tokens
        self.logps[seat, :count] = job.logps
        self.versions[seat, :count] = job.versions
        self.drafted[seat, :count] = job.drafted
        if self.routes is not None:
            self._reach(len(job.prompt) + count)
            self.routes[seat] = -1
            if job.routes is not None:
                self.routes[seat, : len(job.routes)] = job.routes

    def record(
        self, seats: np.ndarray, positions: np.ndarray, routes: torch.Tensor, version: int
    ) -> None:
        """Store the routes of tokens [T] at these seats and positions, as policy `version` computed
        them. Known routes stay. A token gets no route if another version sampled the next token."""
        self._reach(int(positions.max()) + 1)
        assert self.routes is not None
        known = self.routes[seats, positions]
        found = routes.cpu().numpy().astype(known.dtype)
        following = np.maximum(positions + 1 - self.prompt[seats], 0)
        is_sampled = following < self.count[seats]
        by = self.versions[seats, np.where(is_sampled, following, 0)]
        found[is_sampled & (by != version)] = -1
        self.routes[seats, positions] = np.where(known < 0, found, known)

    def share(self, seat: int, other: int, count: int) -> None:
        """Copy the unknown routes of a request's first `count` tokens from the seat `other`, whose
        request begins with the same tokens."""
        if self.routes is not None:
            mine, theirs = self.routes[seat, :count], self.routes[other, :count]
            self.routes[seat, :count] = merge_routes(mine, theirs)

    def _reach(self, positions: int) -> None:
        """Make room for the routes of this many tokens."""
        assert self.routes is not None
        if (have := self.routes.shape[1]) < positions:
            more = ((0, 0), (0, max(positions, 2 * have) - have), (0, 0))
            self.routes = np.pad(self.routes, more, constant_values=-1)

    def leave(self, job: _TorchRequest) -> None:
        """Free the request's seat (table index) and copy its response from the tables."""
        seat, count = job.seat, self.count[job.seat]
        job.leave(
            tokens=self.tokens[seat, :count].copy(),
            logps=self.logps[seat, :count].copy(),
            versions=self.versions[seat, :count].copy(),
            drafted=self.drafted[seat, :count].copy(),
            routes=self._routes_of(seat),
        )
        self.free.append(seat)

    def _routes_of(self, seat: int) -> np.ndarray | None:
        """Return the routes of a request's tokens; the last token has no route yet."""
        if self.routes is None:
            return None
        count = self.prompt[seat] + self.count[seat]
        self._reach(int(count))
        return self.routes[seat, :count].copy()

    def _widen(self, tokens: int, stops: int) -> None:
        if tokens > self.tokens.shape[1]:
            more = ((0, 0), (0, max(tokens, 2 * self.tokens.shape[1]) - self.tokens.shape[1]))
            self.tokens = np.pad(self.tokens, more)
            self.logps = np.pad(self.logps, more)
            self.versions = np.pad(self.versions, more)
            self.drafted = np.pad(self.drafted, more)
        if stops > self.stops.shape[1]:
            more = ((0, 0), (0, stops - self.stops.shape[1]))
            self.stops = np.pad(self.stops, more, constant_values=-1)

    def write(
        self, seats: np.ndarray, tokens: np.ndarray, logps: np.ndarray, version: int
    ) -> np.ndarray:
        """Append a token per seat (table index). Return which responses end with it, [N] bool."""
        at = self.count[seats]
        self._widen(int(at.max()) + 1, 0)
        self.tokens[seats, at] = tokens
        self.logps[seats, at] = logps
        self.versions[seats, at] = version
        self.drafted[seats, at] = False
        self.last[seats] = tokens
        at += 1
        self.count[seats] = at
        stopped = (tokens[:, None] == self.stops[seats]).any(-1)
        return stopped | (at >= self.limit[seats])

    def write_many(
        self,
        seats: np.ndarray,
        tokens: np.ndarray,
        logps: np.ndarray,
        sizes: np.ndarray,
        version: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Append the first `sizes` (1 or more) of `tokens` [N, S] to the responses, up to a stop
        token. All of these tokens except the last were drafted. `logps` is [N, S].

        Returns:
            Which responses end, [N] bool, and the number of tokens appended to each, [N].
        """
        right = sizes - 1
        column = np.arange(tokens.shape[1])
        is_stop = (tokens[:, :, None] == self.stops[seats][:, None, :]).any(-1)
        is_stop &= column < sizes[:, None]
        stopped = is_stop.any(-1)
        sizes = np.where(stopped, is_stop.argmax(-1) + 1, sizes)
        start = self.count[seats]
        self._widen(int((start + sizes).max()), 0)
        row, at = np.nonzero(column < sizes[:, None])
        where = seats[row], start[row] + at
        self.tokens[where] = tokens[row, at]
        self.logps[where] = logps[row, at]
        self.versions[where] = version
        self.drafted[where] = at < right[row]
        self.last[seats] = tokens[np.arange(len(seats)), sizes - 1]
        self.count[seats] = start + sizes
        return stopped | (start + sizes >= self.limit[seats]), sizes


@dataclass(slots=True)
class _Batch:
    """Inputs of a decode step on the device, reused while the batch has the same rows."""

    step: ForwardInputs
    counter: torch.Tensor  # [N]
    settings: SamplingTensors

    def advance(self, tokens: torch.Tensor) -> None:
        """Advance every row by one position. `tokens` [N] are the newest tokens."""
        self.step.advance(tokens[:, None])
        self.counter += GOLDEN


@final
@dataclass(slots=True)
class _Totals:
    """Counters since the last report; `Stats` documents each field."""

    prefill_tokens: int = 0
    cached_tokens: int = 0
    busy_s: float = 0.0
    verify_steps: int = 0
    verify_rows: int = 0
    verify_inputs: int = 0
    verify_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    decode_steps: int = 0
    by_batch: list[list[int]] = field(default_factory=list)

    def prefill(self, num_tokens: int) -> None:
        """Count a prefill of `num_tokens` tokens."""
        self.prefill_tokens += num_tokens

    def reuse(self, num_tokens: int) -> None:
        """Count tokens that are copied from another request's cache slot."""
        self.cached_tokens += num_tokens

    def draft(self, seconds: float) -> None:
        """Count the time spent on making drafts."""
        self.draft_s += seconds

    def verify(self, drafted: int, accepted: int) -> None:
        """Count drafted and accepted tokens."""
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted

    def step(
        self, running: int, gained: int, verified: int, *, busy_s: float, seconds: float
    ) -> None:
        """Count a step that added `gained` tokens to `running` requests. The step took `busy_s`, of
        which `seconds` were decoding. `verified`: tokens of its forward; 0 without drafts."""
        self.busy_s += busy_s
        self.decode_steps += 1
        size = running.bit_length()
        while len(self.by_batch) < size:
            self.by_batch.append([0, 0, 0])
        counts = self.by_batch[size - 1]
        counts[0] += running
        counts[1] += gained
        counts[2] += running * bool(verified)
        if verified:
            self.verify_steps += 1
            self.verify_rows += running
            self.verify_inputs += verified
            self.verify_tokens += gained
            self.verify_s += seconds

    def take(self) -> dict[str, Any]:
        """Return the counters as fields of `Stats`, and reset them."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        found["by_batch"] = tuple((rows, tokens, on) for rows, tokens, on in self.by_batch)
        found["decode_tokens"] = sum(tokens for _, tokens, _ in self.by_batch)
        self.__init__()
        return found


class TorchEngine(InProcess):
    """Engine on one device. In addition to `protocols.Engine`:

    - `poll` decodes. It runs at least one step, and more until there are events or the timeout is
      over. If there is nothing to do, it returns early.
    - The engine decodes only while it is loaded, awake and not paused; otherwise requests wait.
    - Log-probs are of the distribution that was sampled; greedy samples have log-prob 0.
    - LengthReport and Stats are sent every `progress_s`; Stats also when the last request ends.

    `cache_tokens` limits running requests x length of the longest request. 0 means room for
    `max_running` full-length requests, or less if memory is short. If the cache is full, the latest
    request of lowest priority is preempted. `decode_floor_ms` is a decode step's shortest time.

    `quantize` rounds the projections of every weight update to a coarse grid (`quantize.py`); the
    log-probs are those of the rounded model. `draft` verifies guesses of the next tokens in one
    forward; `draft_settings` are the fields of `DraftSettings`. With `tell_tokens`, progress events
    contain the new tokens. `fp32_head` computes the final norm and logits of a bfloat16 engine in
    float32; wider dtypes ignore it. `true_on_policy`: log-probs of samples without filters have
    the bits of the learner's; needs float32 on the CPU, native code and a dense model.
    """

    def __init__(
        self,
        hf: HFConfig,
        *,
        max_model_tokens: int,
        dtype: Dtype = "float32",
        device: str | torch.device | None = None,
        seed: int = 0,
        max_running: int = RolloutConfig.max_running_requests,
        cache_tokens: int = 0,
        threads: int = 1,
        progress_s: float = RolloutConfig.progress_interval_s,
        decode_floor_ms: float = 0.0,
        quantize: Quantize = "none",
        fp32_head: bool = False,
        records_routes: bool = False,
        true_on_policy: bool = False,
        draft: Draft = "none",
        draft_settings: Mapping[str, Any] | None = None,
        rank: int = 0,
        tell_tokens: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.hf = hf
        self.version = -1
        """Version of the weights; -1 before the first weight update."""
        self._device = torch.device(device)
        if self._device.type == "cpu":
            replace_products(batch_invariant=true_on_policy)
        self._true_on_policy = true_on_policy
        self._dtype = getattr(torch, dtype)
        self._seed = seed
        self._max_running = max_running
        self._cache_tokens = cache_tokens
        self._max_tokens = max_model_tokens
        self._threads = threads
        self._progress_s = progress_s
        self._floor_s = decode_floor_ms / 1000
        self._rank = rank
        self._tell_tokens = tell_tokens
        self._clock = clock
        self._model = CausalLM(
            hf,
            dtype=self._dtype,
            device=self._device,
            max_tokens=max_model_tokens,
            quantize=quantize,
            fp32_head=fp32_head,
            records_routes=records_routes,
            batch_invariant=true_on_policy,
        )
        self._model.allocate()
        self._budget = 0
        """Cache size in tokens if `cache_tokens` is 0: the smallest size that fitted into free
        memory at the start and at all wakes so far. Otherwise 0."""
        self._cache: Cache | None = self._make_cache()
        route = None
        if records_routes:  # of the smallest type that holds the experts and -1
            kind = np.min_scalar_type(-hf.num_experts)
            route = np.full(hf.num_layers * hf.experts_per_token, -1, kind)
        self._seats = _Seats.make(max_running, route)
        self._jobs: dict[RequestId, _TorchRequest] = {}
        self._waiting: list[
            tuple[tuple[int, int], _TorchRequest]
        ] = []  # heap with requests that may have ended; `_admit` skips these
        self._rows: list[_TorchRequest] = []
        self._groups: dict[
            tuple[str, bytes], dict[_TorchRequest, None]
        ] = {}  # running requests in the order of their start, by group and prompt
        self._batch: _Batch | None = None
        self._events: list[AnyEvent] = []
        self._arrivals = 0
        self._loaded = False
        self._missing: set[str] | None = None  # tensors that the weight update still has to send
        self._next_version = 0
        self._paused = False
        self._closed = False
        self._drafter: Drafter | None = None
        if draft != "none":
            self._drafter = Drafter(draft, DraftSettings(**(draft_settings or {})), max_running)
        self._totals = _Totals()
        self._used = 0.0  # largest share of the cache in use since the last report
        self._reported = clock()

    # ---- requests

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue all requests. If a request is invalid, queue none and raise a ValueError that names
        the request."""
        seen: set[RequestId] = set()
        for request in requests:
            if request.id in self._jobs or request.id in seen:
                raise ValueError(f"request {request.id}: is already running; use each id once")
            seen.add(request.id)
            check_request(
                request,
                vocab=self.hf.vocab_size,
                max_tokens=self._max_tokens,
                cache_tokens=self._cache_tokens,
            )
        for request in requests:
            prompt = np.ascontiguousarray(request.prompt, np.int32)
            part = request.resume
            key = derive(self._seed, "sample", request.id)
            job = _TorchRequest(
                request=request,
                arrival=self._arrivals,
                key=key,
                prompt=prompt,
                prefix=prompt.tobytes(),
                prompt_key=request.draft_key if self._drafter is not None else 0,
                tokens=np.zeros(0, np.int32) if part is None else np.array(part.tokens, np.int32),
                logps=np.zeros(0, np.float32) if part is None else np.array(part.logps, np.float32),
                versions=np.zeros(0, np.int32)
                if part is None
                else np.array(part.versions, np.int32),
                drafted=np.zeros(0 if part is None else len(part.tokens), np.bool_)
                if part is None or part.drafted is None
                else np.array(part.drafted, np.bool_),
                routes=None if part is None else part.routes,
            )
            self._arrivals += 1
            self._jobs[request.id] = job
            heapq.heappush(self._waiting, (job.order, job))

    def abort(self, ids: Collection[RequestId]) -> None:
        """Stop requests. `poll` returns the partial samples as `Aborted` events."""
        jobs = [self._jobs[i] for i in ids if i in self._jobs]
        self._unseat([job for job in jobs if job.seat >= 0])
        for job in jobs:
            self._end(job, "abort")
        if jobs and not self._jobs:
            self._report()

    def poll(self, timeout_s: float) -> list[AnyEvent]:
        """Run steps until there are events, the timeout is over or no request can be decoded. Run
        at least one step, so that a timeout of 0 makes progress too."""
        end = self._clock() + timeout_s
        if not self._events:
            with self._own_threads():
                while self._step() and not self._events and self._clock() < end:
                    pass
            if not self._events and not self.can_work and timeout_s > 0:
                time.sleep(min(timeout_s, _IDLE_S))
        events, self._events = self._events, []
        return events

    @property
    def can_work(self) -> bool:
        """Whether the engine is ready to decode and has requests."""
        ready = self._loaded and self._missing is None and not self._paused and not self._closed
        return ready and self._cache is not None and bool(self._jobs)

    # ---- pausing, weights, memory

    def pause(self, mode: PauseMode) -> None:
        """Stop decoding; `protocols.Engine` documents the modes. `submit` is still allowed."""
        if mode not in ("in_place", "recompute", "abort"):
            raise ValueError(f"pause mode {mode}: must be in_place, recompute or abort")
        self._paused = True
        if mode == "abort":
            self.abort(list(self._jobs))
        elif mode == "recompute":
            self._requeue(list(self._rows))

    def resume(self) -> None:
        """Resume decoding after `pause`."""
        self._paused = False

    def begin_load(self, version: int) -> None:
        """Start a weight update. A call during an update starts the update over."""
        if not self._model.allocated:
            raise RuntimeError("the engine's weights are asleep; call wake(['weights']) first")
        self._missing = set(self._model.shapes)
        self._next_version = version
        self._loaded = False

    def load_bucket(self, bucket: Bucket, payloads: Sequence[bytes | memoryview]) -> None:
        """Copy the tensors of a bucket into the model.

        Raises:
            ValueError: a tensor has an unknown name, a wrong shape or too few bytes.
            RuntimeError: the checksum differs from the sender's. The bucket is not loaded, and all
                weights must be sent again.
        """
        if self._missing is None:
            raise RuntimeError("load_bucket without begin_load; call begin_load first")
        if len(payloads) != 1:
            raise ValueError(f"{len(payloads)} payloads: must be 1, as tensor-parallel size is 1")
        with torch.inference_mode():
            flat = as_tensor(bucket, open_payload(bucket, payloads[0]))
            if problem := damage(bucket, flat):
                self._missing = set(self._model.shapes)
                raise RuntimeError(problem)
            for name, tensor in unpack(bucket, flat):
                self._model.load(name, tensor)
                self._missing.discard(name)

    def end_load(self) -> None:
        """Finish a weight update: tokens sampled from now on carry the new version.

        Raises:
            RuntimeError: tensors are missing; the message names them.
        """
        if self._missing is None:
            raise RuntimeError("end_load without begin_load; call begin_load first")
        if self._missing:
            raise RuntimeError(gap(self._missing))
        self._missing = None
        self._loaded = True
        self.version = self._next_version

    def sleep(self, tags: Collection[Tag]) -> None:
        """Free the memory of `tags`. If the cache is freed, paused requests are prefilled again."""
        check_tags(tags)
        if self._rows and not self._paused:
            raise RuntimeError(f"{len(self._rows)} requests are running; pause the engine first")
        if "kv_cache" in tags and self._cache is not None:
            self._requeue(list(self._rows))
            self._cache.free()
            self._cache = None
        if "weights" in tags:
            self._model.free()
            self._loaded, self._missing = False, None
        _return_memory(self._device)

    def wake(self, tags: Collection[Tag]) -> None:
        """Allocate the memory of `tags` again. Weights then need an update before decoding."""
        check_tags(tags)
        if "weights" in tags:
            self._model.allocate()
        if "kv_cache" in tags and self._cache is None:
            self._cache = self._make_cache()

    def resize(self, tp: int) -> None:
        """Accept tensor-parallel size 1 only; raise ValueError for others."""
        if tp != 1:
            raise ValueError(f"tensor-parallel size {tp}: must be 1 for the torch engine")

    def remember(self, histories: Sequence[History]) -> None:
        """Index these earlier responses in the background, as a source of drafts. Remove the
        histories of prompts without a request on this engine."""
        if self._drafter is not None:
            self._drafter.remember(histories, {job.prompt_key for job in self._jobs.values()})

    def close(self) -> None:
        """Free all memory; requests are dropped without events."""
        if self._closed:
            return
        self._closed = True
        if self._drafter is not None:
            self._drafter.close()
        self._jobs, self._waiting, self._rows, self._groups = {}, [], [], {}
        self._batch = None
        self._model.free()
        if self._cache is not None:
            self._cache.free()
            self._cache = None

    @property
    def cache_bytes(self) -> int:
        """Size of the KV cache in bytes; 0 while the cache is freed."""
        return self._cache.num_bytes if self._cache is not None else 0

    def _make_cache(self) -> Cache:
        hf = self.hf
        full = self._max_running * self._max_tokens
        budget = self._cache_tokens
        if not budget:
            per_token = hf.num_layers * math.prod(hf.cache_shape) * self._dtype.itemsize
            budget = max(self._max_tokens, min(full, _free_bytes(self._device) // per_token))
            # Free memory differs at each wake, but the batch composition must not depend on it.
            self._budget = budget = min(budget, self._budget or budget)
        return Cache(
            hf.num_layers,
            hf.cache_shape,
            dtype=self._dtype,
            device=self._device,
            max_slots=self._max_running,
            max_columns=self._max_tokens,
            budget=budget,
        )

    # ---- the step

    @contextmanager
    def _own_threads(self):
        """Context manager: use the engine's number of torch threads, then restore the caller's."""
        before = torch.get_num_threads()
        if before != self._threads:
            torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            if before != self._threads:
                torch.set_num_threads(before)

    @torch.inference_mode()
    def _step(self) -> bool:
        """Start waiting requests and run one decode step. Return whether a step was run."""
        if not self.can_work:
            return False
        start = self._clock()
        self._admit()
        self._make_room()
        begin, running = self._clock(), len(self._rows)
        longest = self._drafter.gate.length(running) if self._drafter is not None else 0
        tokens, gained = self._verify(longest) if longest else self._decode()
        now = self._clock()
        took = max(now - start, self._floor_s)
        if took > now - start:
            time.sleep(took - (now - start))
        seconds = max(now - begin, self._floor_s)
        if self._drafter is not None:
            self._drafter.gate.note(running, length=longest, gained=gained, seconds=seconds)
        self._totals.step(running, gained, tokens if longest else 0, busy_s=took, seconds=seconds)
        self._report()
        return True

    def _longest(self) -> int:
        """Return the length of the longest running request in tokens, prompt included."""
        seats = self._row_seats()
        return int((self._seats.prompt[seats] + self._seats.count[seats]).max(initial=0))

    def _row_seats(self) -> np.ndarray:
        return np.fromiter((job.seat for job in self._rows), np.int64, len(self._rows))

    def _admit(self) -> None:
        """Start waiting requests while free rows, cache space and the prefill limit allow it."""
        if not self._waiting:
            return
        picked: list[_TorchRequest] = []
        cache = self._cache
        assert cache is not None
        longest, work = self._longest(), 0
        limit = _PREFILL_TOKENS.get(self._device.type, 2048) * 4
        while self._waiting and len(self._rows) + len(picked) < self._max_running:
            job = self._waiting[0][1]
            if self._jobs.get(job.request.id) is not job:
                heapq.heappop(self._waiting)
                continue
            length = len(job.prompt) + len(job.tokens)
            rows = len(self._rows) + len(picked) + 1
            if rows > 1 and not cache.fits(rows, max(longest, length)):
                break
            if picked and work + length > limit:
                break
            heapq.heappop(self._waiting)
            picked.append(job)
            longest, work = max(longest, length), work + length
        if picked:
            self._start(picked, longest, cache)

    def _start(self, picked: list[_TorchRequest], longest: int, cache: Cache) -> None:
        """Add the requests to the batch and prefill all tokens of each except the last."""
        leaders: list[_TorchRequest] = []
        followers: list[tuple[_TorchRequest, _TorchRequest]] = []
        for job in picked:
            group = self._groups.setdefault((job.request.group, job.prefix), {})
            if group:
                followers.append((job, next(iter(group))))
            else:
                leaders.append(job)
            group[job] = None
        # Sort, so that prefills of similar length share a batch.
        leaders.sort(key=lambda job: len(job.prompt) + len(job.tokens), reverse=True)
        followers.sort(key=lambda pair: len(pair[0].tokens), reverse=True)
        first = len(self._rows)
        cache.reserve(first + len(picked), longest, first)
        self._rows += leaders + [job for job, _ in followers]
        slot = {job: number for number, job in enumerate(self._rows)}
        for job in self._rows[first:]:
            self._seats.take(job)
        self._batch = None
        self._fill(leaders, first, [0] * len(leaders), cache)
        if not followers:
            return
        shared = [len(job.prompt) - 1 for job, _ in followers]
        jobs = [job for job, _ in followers]
        cache.move([slot[j] for j in jobs], [slot[s] for _, s in followers], max(shared))
        for (job, leader), count in zip(followers, shared, strict=True):
            self._seats.share(job.seat, leader.seat, count)
        self._totals.reuse(sum(shared))
        resumed = sum(bool(len(job.tokens)) for job in jobs)
        self._fill(jobs[:resumed], first + len(leaders), shared[:resumed], cache)

    def _fill(self, jobs: list[_TorchRequest], slot: int, starts: list[int], cache: Cache) -> None:
        """Prefill `jobs`, sorted longest first, in the batch rows from `slot` on. For each job,
        prefill the tokens from its position in `starts` to its last token (exclusive)."""
        budget = _PREFILL_TOKENS.get(self._device.type, 2048)
        parts = [
            np.concatenate((job.prompt, job.tokens))[start:-1]
            for job, start in zip(jobs, starts, strict=True)
        ]
        done = 0
        while done < len(parts) and len(parts[done]):
            width = len(parts[done])
            size = max(1, budget // width)
            batch = [part for part in parts[done : done + size] if 2 * len(part) >= width]
            tokens = np.zeros((len(batch), width), np.int64)
            for row, part in enumerate(batch):
                tokens[row, : len(part)] = part
            begin = np.array(starts[done : done + len(batch)])
            sizes = np.array([len(part) for part in batch])
            is_real = np.arange(width) < sizes[:, None]
            end = int((begin + sizes).max())
            # Padding is written behind the row's end. New tokens overwrite it before it is read.
            # Column `end` exists in the cache, because it is reserved for the row's last token.
            positions = np.minimum(begin[:, None] + np.arange(width), end)
            place = torch.from_numpy(np.flatnonzero(is_real)) if self._true_on_policy else None
            step = ForwardInputs(
                tokens=torch.from_numpy(tokens).to(self._device),
                positions=torch.from_numpy(positions).to(self._device),
                slot=slot + done,
                spans=[(0, len(batch), end)],
                causal=not begin.any(),
                place=place,
            )
            self._model.fill(step, cache)
            if self._seats.routes is not None:
                of, at = np.nonzero(is_real)
                seats = np.array([job.seat for job in jobs[done : done + len(batch)]])
                routes = self._model.take_routes()[torch.from_numpy(of * width + at)]
                self._seats.record(seats[of], begin[of] + at, routes, self.version)
            self._totals.prefill(int(sizes.sum()))
            done += len(batch)

    def _make_room(self) -> None:
        """Reserve cache so that every row can write its next token. If the cache is too small,
        preempt the last requests in `order` until the others fit."""
        cache, longest = self._cache, self._longest()
        assert cache is not None
        lost: list[_TorchRequest] = []
        while not cache.fits(len(self._rows) - len(lost), longest):
            rest = [job for job in self._rows if job not in lost]
            lost.append(max(rest, key=lambda job: job.order))
            seats = [job.seat for job in rest if job is not lost[-1]]
            longest = int((self._seats.prompt[seats] + self._seats.count[seats]).max())
        self._requeue(lost)
        for job in lost:
            self._emit(Preempted, id=job.request.id)
        self._used = max(self._used, cache.share(len(self._rows), longest))
        if cache.reserve(len(self._rows), longest, len(self._rows)) and self._batch:
            # Keep the batch: a rebuild may sort rows, but row order must not depend on cache size.
            self._batch.step.forget_cache()

    def _decode(self) -> tuple[int, int]:
        """Decode one token for every row. Return the number of tokens in the forward and the number
        of new response tokens."""
        if self._batch is None:
            self._batch = self._make_batch()
        batch = self._batch
        assert self._cache is not None
        hidden = self._model.forward(batch.step, self._cache)
        logits, seats = self._model.logits(hidden[:, 0]), self._row_seats()
        tokens, logps = self._sample(logits, batch.counter, batch.settings, seats)
        found, found_logps = _to_host(tokens, logps)
        self._check_finite(found_logps, np.arange(len(self._rows)))
        if (table := self._seats).routes is not None:
            last = table.prompt[seats] + table.count[seats] - 1
            table.record(seats, last, self._model.take_routes(), self.version)
        done = self._seats.write(seats, found, found_logps, self.version)
        if done.any():
            self._finish([self._rows[i] for i in np.flatnonzero(done)])
        else:
            batch.advance(tokens)
        return len(seats), len(seats)

    def _verify(self, longest: int) -> tuple[int, int]:
        """Make drafts of at most `longest` tokens and run one forward over them. Append the
        accepted draft tokens and one more token to every row. Return the numbers of forward tokens
        and of new response tokens."""
        drafter, table, cache = self._drafter, self._seats, self._cache
        assert drafter is not None and cache is not None
        seats = self._row_seats()
        lengths = table.prompt[seats] + table.count[seats]
        if self._batch is None and self._sort_rows(lengths):  # lengths of rows may have diverged
            seats = self._row_seats()
            lengths = table.prompt[seats] + table.count[seats]
        begin = self._clock()
        drafts, sizes = drafter.propose(seats, self._rows, table.tokens, table.count, longest)
        self._totals.draft(self._clock() - begin)
        # The draft and one more token must fit into the response and into the cache.
        sizes = np.minimum(sizes, table.limit[seats] - table.count[seats] - 1)
        sizes = np.minimum(sizes, cache.longest(len(seats)) - lengths).astype(np.int64)
        if not sizes.any():
            drafter.accepted(seats, sizes)
            return self._decode()
        ends = lengths + sizes
        cache.reserve(len(seats), int(ends.max()), len(seats))
        self._batch = None  # the batch's positions are outdated after a step with drafts
        column = np.arange(int(sizes.max()) + 1)  # [S], S: last token and longest draft
        is_real = column <= sizes[:, None]  # [N, S], false for padding
        row, at = np.nonzero(is_real)  # [T], row and column of each token in the forward
        grid = np.zeros((2, *is_real.shape), np.int64)
        grid[0, :, 0] = table.last[seats]
        grid[0, :, 1:] = np.where(is_real[:, 1:], drafts[:, : len(column) - 1], 0)
        grid[1] = lengths[:, None] - 1 + column
        with np.errstate(over="ignore"):
            counter = table.key[seats[row]] + (table.count[seats[row]] + at) * np.int64(GOLDEN)
        flat = torch.from_numpy(np.stack((row * len(column) + at, counter))).to(self._device)
        tokens, positions = torch.from_numpy(grid).to(self._device)
        step = ForwardInputs(
            tokens=tokens,
            positions=positions,
            slot=0,
            spans=_spans(ends),
            causal=False,
            place=flat[0],
        )
        hidden = self._model.forward(step, cache)
        logits, settings = self._model.logits(hidden), self._settings(seats[row])
        sampled, logps = self._sample(logits, flat[1], settings, seats[row])
        host, host_logps = _to_host(sampled, logps)
        self._check_finite(host_logps, row)
        found = np.full(is_real.shape, -1)
        found[row, at] = host
        found_logps = np.zeros(is_real.shape)
        found_logps[row, at] = host_logps
        right = (found[:, :-1] == grid[0, :, 1:]) & is_real[:, 1:]
        accepted = np.cumprod(right, axis=1).sum(1)
        if table.routes is not None:
            kept = at <= accepted[row]  # the last token and the accepted drafts
            routes = self._model.take_routes()[torch.from_numpy(kept)]
            positions = lengths[row[kept]] - 1 + at[kept]
            table.record(seats[row[kept]], positions, routes, self.version)
        done, gained = table.write_many(seats, found, found_logps, accepted + 1, self.version)
        drafter.accepted(seats, accepted)
        # A stop token inside the draft ends the response, which drops accepted tokens behind it.
        self._totals.verify(int(sizes.sum()), int(np.minimum(gained, accepted).sum()))
        if done.any():
            self._finish([self._rows[i] for i in np.flatnonzero(done)])
        return len(row), int(gained.sum())

    def _sample(
        self,
        logits: torch.Tensor,
        counter: torch.Tensor,
        settings: SamplingTensors,
        seats: np.ndarray,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample a token per row of logits, whose requests have these seats. With `true_on_policy`,
        the log-probs of rows without filters come from the learner's operation."""
        tokens, logps = sample(logits, counter, settings)
        if self._true_on_policy:
            temperature = np.where(self._has_filters(seats), 0, self._seats.temperature[seats])
            for value in np.unique(temperature[temperature > 0]).tolist():
                rows = torch.from_numpy(np.flatnonzero(temperature == value))
                where = {"vocab_size": self.hf.vocab_size, "temperature": value}
                logps[rows] = log_probs(logits[rows], tokens[rows], **where).logp.double()
        return tokens, logps

    def _check_finite(self, logps: np.ndarray, rows: np.ndarray) -> None:
        """Raise RuntimeError if a log-prob is not finite. `rows`: the row of each log-prob."""
        if not np.isfinite(logps).all():
            bad = self._rows[rows[int(np.argmin(np.isfinite(logps)))]].request.id
            raise RuntimeError(f"request {bad}: the logits are not finite; check the weights")

    def _finish(self, jobs: list[_TorchRequest]) -> None:
        self._unseat(jobs)
        for job in jobs:
            stopped = int(job.tokens[-1]) in job.request.sampling.stop_ids
            self._end(job, "stop" if stopped else "length")

    def _make_batch(self) -> _Batch:
        """Build the inputs of the decode step after rows were added or removed."""
        seats, table = self._row_seats(), self._seats
        lengths = table.prompt[seats] + table.count[seats]
        if self._sort_rows(lengths):
            seats = self._row_seats()
            lengths = table.prompt[seats] + table.count[seats]
        with np.errstate(over="ignore"):
            counter = table.key[seats] + table.count[seats] * np.int64(GOLDEN)
        ints = np.stack((table.last[seats], lengths - 1, counter))
        device = torch.from_numpy(ints).to(self._device)
        return _Batch(
            step=ForwardInputs(
                tokens=device[0][:, None],
                positions=device[1][:, None],
                slot=0,
                spans=_spans(lengths),
                causal=False,
            ),
            counter=device[2],
            settings=self._settings(seats),
        )

    def _settings(self, seats: np.ndarray) -> SamplingTensors:
        table, device = self._seats, self._device
        temperature = table.temperature[seats]
        greedy = temperature == 0
        scale = 1 / np.where(greedy, 1, temperature)
        dtype = torch.promote_types(self._dtype, torch.float32)
        plain = SamplingTensors(
            scale=torch.from_numpy(scale).to(device, dtype),
            greedy=torch.from_numpy(greedy).to(device) if greedy.any() else None,
            filtered=None,
            plain=bool((scale == 1).all()),
        )
        top_k, top_p, min_p = table.top_k[seats], table.top_p[seats], table.min_p[seats]
        rows = np.flatnonzero(self._has_filters(seats) & ~greedy)
        if not len(rows):
            return plain
        return replace(
            plain,
            filtered=torch.from_numpy(rows).to(device),
            top_k=torch.from_numpy(top_k[rows]).to(device),
            top_p=torch.from_numpy(top_p[rows]).to(device),
            min_p=torch.from_numpy(min_p[rows]).to(device),
            few=bool(((top_k[rows] > 0) & (top_k[rows] <= MOST_KEPT)).all()),
        )

    def _has_filters(self, seats: np.ndarray) -> np.ndarray:
        """Return which requests sample from some of the tokens only, [N] bool."""
        table = self._seats
        return (table.top_k[seats] > 0) | (table.top_p[seats] < 1) | (table.min_p[seats] > 0)

    def _sort_rows(self, lengths: np.ndarray) -> bool:
        """If attention over short rows is padded too much, sort the batch rows by length. Return
        whether rows were moved."""
        if len(lengths) <= _SPAN or self._model.decodes_natively:
            return False
        order = np.argsort(-lengths, kind="stable")
        if _attended(lengths) < _WASTE * _attended(lengths[order]):
            return False
        target = np.flatnonzero(order != np.arange(len(order)))
        assert self._cache is not None
        self._cache.move(target.tolist(), order[target].tolist(), int(lengths.max()))
        self._rows = [self._rows[i] for i in order]
        return True

    # ---- rows and events

    def _unseat(self, jobs: Collection[_TorchRequest]) -> None:
        """Remove requests from the batch and fill the gaps with its last rows."""
        if not jobs:
            return
        self._batch = None
        gone = set(jobs)
        longest = self._longest()
        keep = len(self._rows) - len(gone)
        holes = [i for i in range(keep) if self._rows[i] in gone]
        movers = [i for i in range(keep, len(self._rows)) if self._rows[i] not in gone]
        if self._cache is not None:
            with torch.inference_mode():
                self._cache.move(holes, movers, longest)
        for hole, mover in zip(holes, movers, strict=True):
            self._rows[hole] = self._rows[mover]
        del self._rows[keep:]
        if self._drafter is not None:
            self._drafter.leave(np.array([job.seat for job in jobs]))
        for job in jobs:
            self._seats.leave(job)
            key = (job.request.group, job.prefix)
            del self._groups[key][job]
            if not self._groups[key]:
                del self._groups[key]

    def _requeue(self, jobs: Collection[_TorchRequest]) -> None:
        """Remove requests from the batch and return them to their former places in the queue. They
        are prefilled again later."""
        self._unseat(jobs)
        for job in jobs:
            heapq.heappush(self._waiting, (job.order, job))

    def _end(self, job: _TorchRequest, finish: Finish) -> None:
        del self._jobs[job.request.id]
        sample = Sample(
            id=job.request.id,
            prompt=job.prompt,
            tokens=job.tokens,
            logps=job.logps,
            versions=job.versions,
            drafted=job.drafted if self._drafter is not None else None,
            routes=job.routes,
            finish=finish,
        )
        count = len(job.tokens)
        if finish == "abort":
            self._emit(Aborted, id=job.request.id, num_tokens=count, sample=sample)
            return
        self._emit(Finished, id=job.request.id, num_tokens=count, finish=finish, sample=sample)

    def _emit(self, kind: type, **fields) -> None:
        self._events.append(kind(rank=self._rank, time=self._clock(), **fields))

    def _tail(self, job: _TorchRequest) -> Partial:
        """Return the response's tokens since the last report."""
        table, seat = self._seats, job.seat
        new = job.tell(int(table.count[seat]))
        return Partial(
            tokens=table.tokens[seat, new].copy(),
            logps=table.logps[seat, new].copy(),
            versions=table.versions[seat, new].copy(),
            drafted=table.drafted[seat, new].copy() if self._drafter is not None else None,
        )

    def _report(self) -> None:
        """Emit `LengthReport` and `Stats` events if `progress_s` is over or no request is left."""
        due = self._clock() - self._reported >= self._progress_s
        if not due and self._jobs:
            return
        self._reported = self._clock()
        if self._rows:
            counts = self._seats.count[self._row_seats()].tolist()
            ids = tuple(job.request.id for job in self._rows)
            tails = tuple(self._tail(job) for job in self._rows) if self._tell_tokens else ()
            self._emit(LengthReport, ids=ids, lengths=tuple(counts), tails=tails)
        waiting = len(self._jobs) - len(self._rows)
        self._emit(
            Stats,
            **self._totals.take(),
            running=len(self._rows),
            waiting=waiting,
            cache_used=self._used,
            cache_tokens=self._cache.budget if self._cache is not None else 0,
        )
        self._used = 0.0


def build(config: Mapping[str, Any], **options: Any) -> TorchEngine:
    """Build an engine for `ChildEngine` from the contents of config.json and the keywords of
    `TorchEngine`. Progress events contain the new tokens, which then survive a failed child."""
    device = torch.device(options.get("device") or "cpu")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # otherwise code that names no device would use the first GPU
    return TorchEngine(HFConfig.from_dict(dict(config)), **(options | {"tell_tokens": True}))


def _to_host(tokens: torch.Tensor, logps: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and log-probs [N] on the host, with one copy from a device."""
    if tokens.device.type == "cpu":
        return tokens.numpy(), logps.numpy()
    host = torch.stack((tokens.double(), logps)).cpu().numpy()
    return host[0].astype(np.int64), host[1]


def _spans(lengths: np.ndarray) -> list[Span]:
    """Split batch rows into ranges (first row, end row, attended cache columns). Return one range
    unless several ranges save much attention work."""
    rows, longest = len(lengths), int(lengths.max())
    if rows <= _SPAN or rows * longest < _WASTE * _attended(lengths):
        return [(0, rows, longest)]
    starts = range(0, rows, _SPAN)
    ends = [*starts[1:], rows]
    return [(a, b, int(lengths[a:b].max())) for a, b in zip(starts, ends, strict=True)]


def _attended(lengths: np.ndarray) -> int:
    """Return the number of cache columns that attention reads over all rows, if each range of
    `_SPAN` rows is padded to its own longest row."""
    starts = np.arange(0, len(lengths), _SPAN)
    sizes = np.diff(np.append(starts, len(lengths)))
    return int((np.maximum.reduceat(lengths, starts) * sizes).sum())


def _free_bytes(device: torch.device) -> int:
    """Return the maximum cache size in bytes: free memory minus room for growth and activations."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.8)
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 // 2
    raise RuntimeError("/proc/meminfo has no MemAvailable; set --rollout.kv_cache_tokens")


def _return_memory(device: torch.device) -> None:
    """Return freed memory to the system; by default the allocators keep it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # a glibc function
        trim(0)

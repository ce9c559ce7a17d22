"""The production engine: an `Engine` on SGLang, over the ranks of a tensor-parallel group.

Requests wait in a heap in this process. At most `max_running` requests are in flight, that is, in
SGLang. For each request in flight, a task on SGLang's event loop appends the streamed tokens to the
request (`_Stay`). Abort, sleep and a pause in mode `recompute` take requests out of SGLang.
Unfinished requests then return to the heap with their tokens and are resubmitted as a longer
prompt. Samples do not change, because random numbers depend on the token's position. A pause in
mode `in_place` keeps the requests in SGLang.

Requests of a group share a prefill: after the first request's first token, the others start.
"""

import asyncio
import base64
import heapq
import itertools
import math
import queue
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlcore.config.schema import DraftConfig, RolloutConfig
from rlcore.config.sglang_args import RUNNERS
from rlcore.hf.config import HFConfig
from rlcore.hf.names import expected
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
from rlcore.rollout.sglang_engine.counters import Counters
from rlcore.rollout.sglang_engine.names import ALGORITHM, PROMPT_KEY, REMEMBER
from rlcore.rollout.sglang_engine.server import Server, set_environment
from rlcore.rollout.torch_engine.drafter import DraftSettings
from rlcore.rollout.torch_engine.sampler import GOLDEN
from rlcore.rollout.validation import check_request, check_tags, gap
from rlcore.utils.errors import ConfigError
from rlcore.utils.listen import open_store
from rlcore.utils.net import encode
from rlcore.utils.seed import derive

Dtype = Literal["float32", "bfloat16", "float16"]
_TAGS: tuple[Tag, ...] = ("weights", "kv_cache")

_SPARE = 8  # extra context tokens, because SGLang reserves some; `submit` checks the real limit
_IDLE_S = 0.002
_SEND_S = 0.02  # a request reaches SGLang's schedulers in about this time


def check_room(cache_tokens: int, longest: int) -> None:
    """Raise ConfigError if a sequence of `longest` tokens is longer than SGLang's KV cache. SGLang
    would cut it short without an error."""
    if cache_tokens < longest:
        raise ConfigError(
            f"--rollout.kv_cache_tokens 0: what else is on the GPU leaves SGLang room for "
            f"{cache_tokens} tokens of KV cache, but one sequence may need {longest}; raise "
            "--rollout.gpu_memory_utilization or --rollout.tp, or lower --rollout.max_tokens"
        )


@dataclass(slots=True, eq=False)
class _SGLangRequest:
    """State of a request from submission to its end."""

    request: Request
    arrival: int
    seed: int
    """Signed 64-bit seed of the request. Seed and position of a token determine its random
    number."""
    prompt: list[int]
    prompt_key: int
    """Key of the prompt in the histories (earlier responses); 0 without drafts."""
    tokens: list[int]
    logps: list[float]
    versions: list[int]
    routes: np.ndarray | None = None
    """[P + R, layers * K] as in `Sample`; None if they are not known."""
    flight: "_Stay | None" = None
    aborted: bool = False
    told: int = 0
    """Number of response tokens already sent in progress events."""

    def take_off(self, flight: "_Stay") -> None:
        """Mark the request as in flight in SGLang."""
        self.flight = flight

    def land(self) -> None:
        """Mark the request as no longer in SGLang."""
        self.flight = None

    def grow(self, tokens: Sequence[int], logps: Sequence[float], version: int) -> None:
        """Append tokens with their log-probs. Log-probs beyond the last token are ignored."""
        self.tokens += tokens
        self.logps += logps[: len(tokens)]
        self.versions += [version] * len(tokens)

    def take_routes(self, found: np.ndarray, base: int, version: int) -> None:
        """Store the routes [n, layers * K] of the first n tokens, as SGLang computed them after it
        got the request with policy `version`. Known routes stay. The first `base` response tokens
        came with the request; those of them from another version get no routes."""
        count = len(self.prompt) + len(self.tokens)
        routes = np.full((count, found.shape[1]), -1, found.dtype)
        n = min(len(found), count - 1)  # the last token has not been computed
        routes[:n] = found[:n]
        if base:
            # A token's route belongs to the version that sampled the next token.
            sampled_by = np.array([self.versions[0]] * len(self.prompt) + self.versions[1:base])
            routes[: len(sampled_by)][sampled_by != version] = -1
        self.routes = merge_routes(self.routes, routes)

    def tell(self) -> slice:
        """Return the slice of tokens that was not sent in a progress event yet, and mark it as
        sent."""
        new = slice(self.told, len(self.tokens))
        self.told = new.stop
        return new

    def abort(self) -> None:
        """Mark the request as aborted. It ends as aborted unless it finishes first."""
        self.aborted = True

    @property
    def order(self) -> tuple[int, int]:
        return self.request.priority, self.arrival

    @property
    def group(self) -> tuple[str, tuple[int, ...]]:
        """Key of the requests that share a prefill."""
        return self.request.group, tuple(self.prompt)


@dataclass(slots=True, eq=False)
class _Stay:
    """State of a request in flight: from submission to SGLang until SGLang ends the request."""

    rid: str
    """SGLang's request id. All ids are equally long, because SGLang's abort matches prefixes."""
    base: int
    """Number of response tokens that the request had when it was submitted to SGLang."""
    version: int
    """Policy version at that time."""
    task: "asyncio.Task[None]" = field(init=False)
    retractions: int = 0
    begun: bool = False
    """Whether SGLang has returned a token; its cache then holds the request's tokens."""
    deaf: bool = False
    """Whether to drop further tokens, because SGLang samples them with incomplete weights."""
    followers: list[_SGLangRequest] = field(default_factory=list)
    """Requests of the same group that wait for this request's first token."""

    def follow(self, task: "asyncio.Task[None]") -> None:
        """Set the asyncio task that receives the request's tokens."""
        self.task = task

    def begin(self) -> None:
        """Record that the first token has arrived."""
        self.begun = True

    def retract(self, retractions: int) -> int:
        """Record how often SGLang has retracted (preempted) the request. Return the number of new
        retractions."""
        more, self.retractions = retractions - self.retractions, max(retractions, self.retractions)
        return more

    def deafen(self) -> None:
        """Drop all further tokens that SGLang returns for the request."""
        self.deaf = True

    def free_followers(self) -> list[_SGLangRequest]:
        """Return the requests that wait for this request's first token, and clear their list."""
        followers, self.followers = self.followers, []
        return followers


class SGLangEngine(InProcess):
    """Engine on SGLang. In addition to `protocols.Engine`:

    - SGLang decodes in the background; `poll` returns the events so far. The engine decodes only
      while it is loaded, awake and not paused; otherwise requests wait.
    - Log-probs are of the distribution that was sampled; greedy samples have log-prob 0. For the
      same seed, this engine and the torch engine sample the same tokens, up to rounding.
    - A pause in mode `in_place` keeps the cache until a request is aborted or the engine sleeps.
    - Progress events are sent every `progress_s`, with lengths that are up to `stream_interval`
      tokens old; 0: 8, on a GPU 32, since 256 requests with 8 make 32 messages a step. With
      `tell_tokens` the events contain the new tokens. `Stats.decode_steps` is the largest number of
      tokens that one request has got since the last report.
    - A pause in mode `in_place` has no time limit. With SGLang's overlapped scheduler, the pause
      waits for the token being sampled, which keeps its version. Only the step after a pause runs
      without overlap.
    - With `draft`, decode steps verify guesses of the next tokens (`worker.py`). In a step, a
      request has at most `draft_width` tokens: its last token and the draft. `draft_settings` are
      the fields of `DraftSettings`. With `draft_matcher` device, drafts are made on the engine's
      device; with host, on the CPU, which turns SGLang's overlapped scheduler off.

    Each of `shares` processes makes one of these engines, which starts its share of the `tp` ranks.
    They are on one node or evenly on `nodes` nodes. Share 0 leads. Of the `tp` ranks, `ep` groups
    divide the experts of a mixture.

    `cache_tokens` is SGLang's max_total_tokens. If it is 0, `memory_fraction` (SGLang's
    mem_fraction_static) sets the cache size. `sglang` has further arguments of SGLang's server,
    which override ours. `deadline_s` is the deadline of each call; `ChildEngine` reads it too.
    """

    def __init__(
        self,
        hf: HFConfig,
        *,
        max_model_tokens: int,
        dtype: Dtype = "float32",
        device: str = "cpu",
        seed: int = 0,
        max_running: int = RolloutConfig.max_running_requests,
        cache_tokens: int = 0,
        memory_fraction: float = RolloutConfig.gpu_memory_utilization,
        threads: int = 1,
        progress_s: float = RolloutConfig.progress_interval_s,
        stream_interval: int = 0,
        fp32_head: bool = False,
        records_routes: bool = False,
        rank: int = 0,
        tp: int = 1,
        ep: int = 1,
        share: int = 0,
        shares: int = 1,
        nodes: int = 1,
        dist_init_addr: str = "",
        draft: Draft = "none",
        draft_width: int = DraftConfig.verify_tokens,
        draft_settings: Mapping[str, Any] | None = None,
        draft_matcher: Literal["device", "host"] = "host",
        tell_tokens: bool = False,
        sglang: Mapping[str, Any] | None = None,
        deadline_s: float = 110.0,
    ):
        if shares > 1 and (tp % shares or not dist_init_addr):
            raise ValueError(
                f"shares {shares}: must divide the tensor-parallel size {tp}, and needs "
                "dist_init_addr for the rendezvous"
            )
        kind, _, number = device.partition(":")
        self.hf = hf
        self.version = -1
        """Version of the weights; -1 before the first weight update."""
        self._shapes = expected(hf)
        self._seed = seed
        self._max_running = max_running
        self._cache_tokens = cache_tokens
        self._max_tokens = max_model_tokens
        self._progress_s = progress_s
        stream_interval = stream_interval or (8 if kind == "cpu" else 32)
        self._stream_interval = stream_interval
        self._rank, self._tp = rank, tp
        self._tell_tokens = tell_tokens
        self._deadline_s = deadline_s
        self._jobs: dict[RequestId, _SGLangRequest] = {}
        self._waiting: list[
            tuple[tuple[int, int], _SGLangRequest]
        ] = []  # heap with requests that may have ended; `_admit` skips these
        self._flying: dict[_SGLangRequest, None] = {}
        self._held = 0  # requests that wait for a group's prefill; they count in max_running
        self._leaders: dict[tuple[str, tuple[int, ...]], _SGLangRequest] = {}
        self._events: queue.SimpleQueue[AnyEvent] = queue.SimpleQueue()
        self._arrivals = self._flights = self._loads = 0
        self._loaded = False
        self._missing: set[str] | None = None  # tensors that the weight update still has to send
        self._next_version = 0
        self._session = False  # whether SGLang is in a weight-update session
        self._asleep: set[Tag] = set()
        self._paused = False
        self._still = False  # whether requests in flight are paused inside SGLang
        self._closed = False
        self._totals = _no_counts()
        self._grown: dict[RequestId, int] = {}
        self._sharing: dict[tuple[str, tuple[int, ...]], int] = {}  # requests in cache, by group
        self._cached = self._most_cached = 0  # tokens in the cache: now, maximum since last report
        self._busy_since = 0.0
        self._drafts = draft != "none"
        self._records_routes = records_routes
        self._tellings = itertools.count()

        # SGLang reserves cache for the tokens that two steps may add to a request.
        room = 2 * draft_width if self._drafts else 0
        drafts = None
        if self._drafts:
            drafts = {
                "draft": draft,
                "settings": _draft_settings(draft_width, draft_settings),
                "matcher": draft_matcher,
                "max_tokens": max_model_tokens + room,
                "stream_interval": stream_interval,
            }
        if not dist_init_addr:
            self._store = open_store()
            dist_init_addr = f"127.0.0.1:{self._store.port}"
        set_environment(kind, tp, dist_init_addr, nodes, drafts)
        arguments = {
            "device": kind,
            "dtype": dtype,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "context_length": max_model_tokens + _SPARE + room,
            "max_running_requests": max_running,
            "random_seed": seed % 2**31,
            "sampling_backend": "pytorch",  # our sampler replaces it; `pytorch` needs no library
            "stream_interval": stream_interval,
            "enable_fp32_lm_head": fp32_head,
            "sleep_on_idle": True,  # idle schedulers leave the CPU to the learner
            "tp_size": tp,
            "ep_size": ep,
            "nnodes": nodes,
            "node_rank": share,
            "dist_init_addr": dist_init_addr,
            "log_level": "error",
        }
        if cache_tokens:
            arguments["max_total_tokens"] = cache_tokens + _SPARE + room
        if kind == "cuda":
            arguments |= {
                "base_gpu_id": int(number or 0),
                "mem_fraction_static": memory_fraction,
                "enable_memory_saver": True,
            }
            if hf.num_experts:  # SGLang's own choice may store experts in another layout
                arguments["moe_runner_backend"] = RUNNERS[0]
        else:
            arguments |= {
                "attention_backend": "torch_native",
                "disable_overlap_schedule": True,
                "max_total_tokens": (
                    cache_tokens or _cpu_tokens(max_running, max_model_tokens + room)
                )
                + _SPARE
                + room,
            }
        if records_routes:
            arguments["enable_return_routed_experts"] = True
        if self._drafts:
            arguments |= {
                "speculative_algorithm": ALGORITHM,
                "speculative_num_draft_tokens": draft_width,
                "speculative_ngram_max_bfs_breadth": 1,  # a draft is a chain, not a tree
                "disable_overlap_schedule": draft_matcher == "host" or kind == "cpu",
            }
        arguments |= dict(sglang or {})
        self._server = Server(arguments, sglang_config(hf), deadline_s, shares)
        self._leads = self._server.manager is not None
        self._page: Counters | None = None
        if self._leads and self._drafts:
            self._page = Counters(self._server.folder)
        if self._leads:
            self._server.call(self._start(), "start")
            if not cache_tokens:
                check_room(self._server.cache_tokens, max_model_tokens + _SPARE + room)

    # ---- requests

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue all requests. If a request is invalid, queue none and raise a ValueError that names
        the request."""
        self._call(self._submit(requests), "submit")

    async def _submit(self, requests: Sequence[Request]) -> None:
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
            part, prompt = request.resume, request.prompt.tolist()
            key = derive(self._seed, "sample", request.id)
            job = _SGLangRequest(
                request=request,
                arrival=self._arrivals,
                # The sampler's positions include the prompt, so subtract the prompt's length.
                seed=_signed(key + (1 - len(prompt)) * GOLDEN),
                prompt=prompt,
                prompt_key=request.draft_key if self._drafts else 0,
                tokens=[] if part is None else part.tokens.tolist(),
                logps=[] if part is None else part.logps.tolist(),
                versions=[] if part is None else part.versions.tolist(),
                routes=None if part is None else part.routes,
            )
            self._arrivals += 1
            self._jobs[request.id] = job
            heapq.heappush(self._waiting, (job.order, job))
        self._admit()

    def abort(self, ids: Collection[RequestId]) -> None:
        """Stop requests. `poll` returns the partial samples as `Aborted` events."""
        self._call(self._abort(ids), "abort")

    async def _abort(self, ids: Collection[RequestId]) -> None:
        jobs = [self._jobs[i] for i in ids if i in self._jobs]
        for job in jobs:
            job.abort()
        flying = [job for job in jobs if job.flight is not None]
        # A paused SGLang ends no request. So resume it, take out all requests and requeue them.
        if flying:
            await self._land(list(self._flying) if self._still else flying)
        for job in jobs:
            if job.request.id in self._jobs:  # a job that was not in flight has not ended yet
                self._end(job, "abort")
        self._admit()
        if jobs and not self._jobs:
            self._report()

    def poll(self, timeout_s: float) -> list[AnyEvent]:
        """Return the events since the last call; wait up to `timeout_s` for the first event. Raise
        EngineFailedError if SGLang has failed."""
        self._server.check()
        events: list[AnyEvent] = []
        try:
            if timeout_s > 0:
                events.append(self._events.get(timeout=timeout_s))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            return events

    @property
    def can_work(self) -> bool:
        """Whether SGLang may decode now."""
        ready = self._loaded and self._missing is None and not self._paused and not self._closed
        return ready and not self._asleep

    # ---- pausing, weights, memory

    def pause(self, mode: PauseMode) -> None:
        """Stop decoding; `protocols.Engine` documents the modes. `submit` is still allowed."""
        if mode not in ("in_place", "recompute", "abort"):
            raise ValueError(f"pause mode {mode}: must be in_place, recompute or abort")
        self._call(self._pause(mode), "pause")

    async def _pause(self, mode: PauseMode) -> None:
        self._paused = True
        if mode == "abort":
            await self._abort(list(self._jobs))
        elif mode == "recompute":
            await self._land(list(self._flying))
        else:
            await self._hold()

    def resume(self) -> None:
        """Resume decoding after `pause`."""
        self._call(self._resume(), "resume")

    async def _resume(self) -> None:
        self._paused = False
        await self._go_on()

    def begin_load(self, version: int) -> None:
        """Start a weight update. A call during an update starts the update over."""
        self._call(self._begin_load(version), "begin_load")

    async def _begin_load(self, version: int) -> None:
        if "weights" in self._asleep:
            raise RuntimeError("the engine's weights are asleep; call wake(['weights']) first")
        await self._hold()
        if not self._session:
            from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

            _must(await self._manager.begin_weight_update(BeginWeightUpdateReqInput()))
            self._session = True
        self._missing = set(self._shapes)
        self._next_version = version
        self._loaded = False

    def load_bucket(self, bucket: Bucket, payloads: Sequence[bytes | memoryview]) -> None:
        """Pass a bucket of weights to SGLang's schedulers, which load it into the model.

        Raises:
            ValueError: a tensor has an unknown name or a wrong shape, or the number of payloads is
                not the tensor-parallel size.
            RuntimeError: the checksum differs from the sender's. The bucket is not loaded, and all
                weights must be sent again.
        """
        if not self._leads:
            return
        if self._missing is None:
            raise RuntimeError("load_bucket without begin_load; call begin_load first")
        if len(payloads) != self._tp:
            raise ValueError(
                f"{len(payloads)} payloads: must be one per rank, tensor-parallel size {self._tp}"
            )
        for meta in bucket.tensors:
            if meta.name not in self._shapes:
                raise ValueError(f"tensor {meta.name}: the model has no tensor of this name")
            if meta.shape != tuple(self._shapes[meta.name]):
                want = list(self._shapes[meta.name])
                raise ValueError(
                    f"tensor {meta.name}: shape {list(meta.shape)}, the model has {want}"
                )
        self._call(self._load_bucket(bucket, payloads), "load_bucket")

    async def _load_bucket(self, bucket: Bucket, payloads: Sequence[bytes | memoryview]) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        from rlcore.rollout.sglang_engine import weights

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=weights.encode(bucket, payloads),
            load_format=weights.LOAD_FORMAT,
            flush_cache=False,  # no flush: cache entries of old weights have another `extra_key`
        )
        try:
            _must(await self._manager.update_weights_from_tensor(request, None))
        except RuntimeError:
            self._missing = set(self._shapes)
            raise
        assert self._missing is not None
        self._missing.difference_update(meta.name for meta in bucket.tensors)

    def end_load(self) -> None:
        """Finish a weight update: tokens sampled from now on carry the new version.

        Raises:
            RuntimeError: tensors are missing; the message names them.
        """
        self._call(self._end_load(), "end_load")

    async def _end_load(self) -> None:
        if self._missing is None:
            raise RuntimeError("end_load without begin_load; call begin_load first")
        if self._missing:
            raise RuntimeError(gap(self._missing))
        await self._close_session()
        self._missing = None
        self._loaded = True
        self._loads += 1
        self.version = self._next_version
        await self._go_on()

    async def _close_session(self) -> None:
        if self._session:
            from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

            _must(await self._manager.end_weight_update(EndWeightUpdateReqInput()))
            self._session = False

    def sleep(self, tags: Collection[Tag]) -> None:
        """Free the memory of `tags`. Paused requests are prefilled again later."""
        check_tags(tags)
        self._call(self._sleep(tags), "sleep")

    async def _sleep(self, tags: Collection[Tag]) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        if self._flying and not self._paused:
            raise RuntimeError(f"{len(self._flying)} requests are running; pause the engine first")
        await self._land(list(self._flying))
        new = [tag for tag in _TAGS if tag in tags and tag not in self._asleep]
        if not new:
            return
        if "weights" in new:
            await self._close_session()
            self._loaded, self._missing = False, None
        await self._idle()
        self._asleep.update(new)
        await self._manager.release_memory_occupation(
            ReleaseMemoryOccupationReqInput(tags=list(new)), None
        )

    def wake(self, tags: Collection[Tag]) -> None:
        """Allocate the memory of `tags` again. Weights then need an update before decoding."""
        check_tags(tags)
        self._call(self._wake(tags), "wake")

    async def _wake(self, tags: Collection[Tag]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        back = [tag for tag in ("weights", "kv_cache") if tag in tags and tag in self._asleep]
        if not back:
            return
        await self._manager.resume_memory_occupation(
            ResumeMemoryOccupationReqInput(tags=list(back)), None
        )
        self._asleep.difference_update(back)
        await self._go_on()

    def resize(self, tp: int) -> None:
        """Accept only the tensor-parallel size that the engine was started with; raise ValueError
        for other sizes."""
        if tp != self._tp:
            raise ValueError(
                f"tensor-parallel size {tp}: this engine has {self._tp} and cannot change"
            )

    def remember(self, histories: Sequence[History]) -> None:
        """Index these earlier responses in the background, as a source of drafts. Remove the
        histories of prompts without a request on this engine."""
        if self._drafts and histories:
            self._call(self._remember(histories), "remember")

    async def _remember(self, histories: Sequence[History]) -> None:
        """Pass histories to SGLang's schedulers in a file, because SGLang logs whole messages."""
        wanted = sorted({job.prompt_key for job in self._jobs.values()})
        file = Path(self._server.folder) / f"histories-{next(self._tellings)}"
        file.write_bytes(encode((tuple(histories), wanted)))
        await self._server.everywhere(REMEMBER, path=str(file))

    def close(self) -> None:
        """Stop SGLang's processes; requests are dropped without events."""
        if not self._closed:
            self._closed = True
            self._server.close()

    # ---- on SGLang's event loop

    @property
    def _manager(self) -> Any:
        return self._server.manager

    def _call(self, work: Any, what: str) -> None:
        """Run a coroutine on SGLang's event loop and wait until it is done. Do nothing on a rank
        that does not lead the engine."""
        if self._leads:
            self._server.call(work, what)
        else:
            work.close()

    async def _start(self) -> None:
        self._manager.auto_create_handle_loop()
        self._reporter = asyncio.create_task(self._report_forever())

    def _admit(self) -> None:
        """Start waiting requests while fewer than `max_running` are in flight."""
        while self.can_work and not self._still and self._waiting:
            if len(self._flying) + self._held >= self._max_running:
                return
            job = heapq.heappop(self._waiting)[1]
            if self._jobs.get(job.request.id) is not job or job.flight is not None:
                continue
            leader = self._leaders.get(job.group)
            if leader is None:
                self._leaders[job.group] = job
                self._take_off(job)
            else:
                assert leader.flight is not None
                leader.flight.followers.append(job)
                self._held += 1

    def _take_off(self, job: _SGLangRequest) -> None:
        self._flights += 1
        base = len(job.tokens)
        flight = _Stay(rid=f"{self._flights:016x}", base=base, version=self.version)
        job.take_off(flight)
        if not self._flying:
            self._busy_since = time.monotonic()
        self._flying[job] = None
        flight.follow(asyncio.create_task(self._fly(job, flight)))

    async def _fly(self, job: _SGLangRequest, flight: _Stay) -> None:
        """Submit a request to SGLang and receive its tokens until SGLang ends it."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        sampling = job.request.sampling
        drafts = {"custom_params": {PROMPT_KEY: job.prompt_key}} if self._drafts else {}
        request = GenerateReqInput(
            rid=flight.rid,
            input_ids=job.prompt + job.tokens,
            sampling_params={
                "temperature": sampling.temperature,
                "top_k": sampling.top_k or -1,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "max_new_tokens": sampling.max_tokens - len(job.tokens),
                "stop_token_ids": list(sampling.stop_ids),
                "ignore_eos": not sampling.stop_ids,  # else the model's EOS would end the response
                "sampling_seed": job.seed,
                "stream_interval": self._stream_interval,
                **drafts,
            },
            return_logprob=True,
            logprob_start_len=-1,
            return_routed_experts=self._records_routes,
            stream=True,
            extra_key=str(self._loads),
        )
        reason: dict[str, Any] = {}
        try:
            async for out in self._manager.generate_request(request, None):
                self._take(job, flight, out)
                self._take_routes(job, flight, out["meta_info"])
                reason = out["meta_info"].get("finish_reason") or {}
            self._landed(job, flight, reason)
        except Exception as error:
            self._server.fail(f"request {job.request.id}: {type(error).__name__}: {error}")

    def _take(self, job: _SGLangRequest, flight: _Stay, out: Mapping[str, Any]) -> None:
        """Append the new tokens of SGLang's output `out` to the request."""
        if flight.deaf:
            return
        meta, ids = out["meta_info"], out["output_ids"]
        have = len(job.tokens) - flight.base
        new = ids[have:]
        logps = [entry[0] for entry in meta["output_token_logprobs"][have:]]
        if len(logps) != len(new) or not all(map(math.isfinite, logps)):
            self._server.fail(
                f"request {job.request.id}: log-probs {logps[:4]} of {len(new)} tokens; "
                "check the weights"
            )
            return
        if self._drafts:
            new = new[: self._up_to_stop(job, new)]
        job.grow(new, logps, self.version)
        if not flight.begun and new:
            flight.begin()
            if not self._sharing.get(job.group):
                self._cached += len(job.prompt)
            self._sharing[job.group] = self._sharing.get(job.group, 0) + 1
            self._cached += flight.base
        self._cached += len(new)
        self._most_cached = max(self._most_cached, self._cached)
        if not have and new:
            cached = meta.get("cached_tokens") or 0
            self._totals["cached_tokens"] += cached
            self._totals["prefill_tokens"] += max(0, meta["prompt_tokens"] - cached - 1)
            self._free_followers(job, flight)
        self._totals["decode_tokens"] += len(new)
        self._grown[job.request.id] = self._grown.get(job.request.id, 0) + len(new)
        for _ in range(flight.retract(meta.get("num_retractions") or 0)):
            self._emit(Preempted, id=job.request.id)

    def _take_routes(self, job: _SGLangRequest, flight: _Stay, meta: Mapping[str, Any]) -> None:
        """Read the experts of all tokens, which SGLang's last output has."""
        if (text := meta.get("routed_experts")) is None:
            return
        found = np.frombuffer(base64.b64decode(text), np.int32)
        width = self.hf.num_layers * self.hf.experts_per_token
        routes = found.reshape(-1, width).astype(np.min_scalar_type(-self.hf.num_experts))
        job.take_routes(routes, flight.base, flight.version)

    def _up_to_stop(self, job: _SGLangRequest, new: Sequence[int]) -> int:
        """Return how many new tokens belong to the response, up to its stop token. If SGLang aborts
        a request in a step with drafts, it also returns accepted tokens after a stop token."""
        stops = job.request.sampling.stop_ids
        if job.tokens and job.tokens[-1] in stops:
            return 0
        return next((i for i, token in enumerate(new, 1) if token in stops), len(new))

    def _free_followers(self, job: _SGLangRequest, flight: _Stay) -> None:
        """Start the requests that wait for the first token of `job`. If `job` has no tokens or
        SGLang may not decode, requeue them instead."""
        if self._leaders.get(job.group) is job:
            del self._leaders[job.group]
        followers = flight.free_followers()
        self._held -= len(followers)
        for follower in followers:
            if self._jobs.get(follower.request.id) is not follower:
                continue
            if self.can_work and not self._still and job.tokens:
                self._take_off(follower)
            else:
                heapq.heappush(self._waiting, (follower.order, follower))

    def _landed(self, job: _SGLangRequest, flight: _Stay, reason: Mapping[str, Any]) -> None:
        job.land()
        if flight.begun:
            self._cached -= len(job.tokens)
            self._sharing[job.group] -= 1
            if not self._sharing[job.group]:
                self._cached -= len(job.prompt)
                del self._sharing[job.group]
        del self._flying[job]
        if not self._flying and not self._still:
            self._totals["busy_s"] += time.monotonic() - self._busy_since
        self._free_followers(job, flight)
        # Check tokens before `reason`: an aborted request gets one more token, which may end it.
        sampling = job.request.sampling
        if job.tokens and job.tokens[-1] in sampling.stop_ids:
            self._end(job, "stop")
        elif len(job.tokens) >= sampling.max_tokens:
            self._end(job, "length")
        elif reason.get("status_code") or (reason.get("type") != "abort" and not flight.deaf):
            self._server.fail(f"request {job.request.id}: SGLang ended it: {reason}")
        elif job.aborted:
            self._end(job, "abort")
        else:
            heapq.heappush(self._waiting, (job.order, job))
        self._admit()
        if not self._jobs:
            self._report()

    async def _land(self, jobs: Sequence[_SGLangRequest]) -> None:
        """Take `jobs` out of SGLang. If SGLang is paused, resume it, because a paused SGLang never
        becomes idle. In this case `jobs` must be all requests in flight."""
        flights = [job.flight for job in jobs if job.flight is not None]
        for flight in flights:
            if not self._loaded:
                flight.deafen()
            if self._sent(flight):
                self._manager.abort_request(flight.rid)
        if self._still:
            await self._continue()
        while flights := [flight for flight in flights if not flight.task.done()]:
            for flight in flights:
                if self._sent(flight):  # SGLang ignores aborts of requests not yet dispatched
                    self._manager.abort_request(flight.rid)
            await asyncio.wait([flight.task for flight in flights], timeout=_SEND_S)

    def _sent(self, flight: _Stay) -> bool:
        """Return whether SGLang has dispatched the request and has not ended the request yet."""
        state = self._manager.rid_to_state.get(flight.rid)
        return state is not None and state.dispatched

    async def _hold(self) -> None:
        """Pause requests in flight inside SGLang. Return once all sampled tokens have arrived."""
        if self._still or not self._flying:
            return
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._still = True
        while not all(self._sent(f) or f.task.done() for j in self._flying if (f := j.flight)):
            await asyncio.sleep(0)
        self._totals["busy_s"] += time.monotonic() - self._busy_since
        await self._manager.pause_generation(PauseGenerationReqInput(mode="in_place"))
        for _ in range(2):  # wait twice, because replies and tokens arrive over two sockets
            await self._round_trip()
        await asyncio.sleep(0)

    async def _continue(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._still, self._busy_since = False, time.monotonic()
        await self._manager.continue_generation(ContinueGenerationReqInput())

    async def _go_on(self) -> None:
        if not self.can_work:
            return
        if self._still:
            await self._continue()
        self._admit()

    async def _round_trip(self) -> None:
        """Wait until the schedulers have processed all earlier messages."""
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        await self._manager.update_weight_version(
            UpdateWeightVersionReqInput(new_version=str(self._loads), abort_all_requests=False)
        )

    async def _idle(self) -> None:
        """Wait until the schedulers have no batch left, as SGLang's release of memory requires."""
        await self._round_trip()  # else flush_cache finds a batch and looks again only after 1 s
        result = await self._manager.flush_cache(timeout_s=self._deadline_s)
        if not result.success:
            raise RuntimeError(f"SGLang did not become idle: {result.message}")

    # ---- events

    def _end(self, job: _SGLangRequest, finish: Finish) -> None:
        del self._jobs[job.request.id]
        sample = Sample(
            id=job.request.id,
            prompt=np.asarray(job.prompt, np.int32),
            tokens=np.asarray(job.tokens, np.int32),
            logps=np.asarray(job.logps, np.float32),
            versions=np.asarray(job.versions, np.int32),
            routes=job.routes,
            finish=finish,
        )
        count = len(job.tokens)
        if finish == "abort":
            self._emit(Aborted, id=job.request.id, num_tokens=count, sample=sample)
            return
        self._emit(Finished, id=job.request.id, num_tokens=count, finish=finish, sample=sample)

    def _emit(self, kind: type, **fields: Any) -> None:
        self._events.put(kind(rank=self._rank, time=time.monotonic(), **fields))

    def _tail(self, job: _SGLangRequest) -> Partial:
        """Return the response's tokens since the last report."""
        new = job.tell()
        return Partial(
            tokens=np.asarray(job.tokens[new], np.int32),
            logps=np.asarray(job.logps[new], np.float32),
            versions=np.asarray(job.versions[new], np.int32),
        )

    async def _report_forever(self) -> None:
        try:
            while not self._closed:
                await asyncio.sleep(max(self._progress_s, _IDLE_S))
                if self._jobs and self.can_work:
                    self._report()
        except Exception as error:
            self._server.fail(f"progress report: {type(error).__name__}: {error}")

    def _report(self) -> None:
        """Emit a `LengthReport` (progress event) and a `Stats` event."""
        now, running = time.monotonic(), list(self._flying)
        if running:
            self._totals["busy_s"] += now - self._busy_since
            self._busy_since = now
            ids = tuple(job.request.id for job in running)
            lengths = tuple(len(job.tokens) for job in running)
            tails = tuple(map(self._tail, running)) if self._tell_tokens else ()
            self._emit(LengthReport, ids=ids, lengths=lengths, tails=tails)
        self._totals["decode_steps"] = max(self._grown.values(), default=0)
        if self._page is not None:
            self._totals |= self._page.take()
        self._emit(
            Stats,
            **self._totals,
            running=len(running),
            waiting=len(self._jobs) - len(running),
            cache_used=min(1.0, self._most_cached / self._server.cache_tokens),
            cache_tokens=self._server.cache_tokens,
        )
        self._totals, self._grown = _no_counts(), {}
        self._most_cached = self._cached


def build(config: Mapping[str, Any], **options: Any) -> SGLangEngine:
    """Build an engine for `ChildEngine` from the contents of config.json and the keywords of
    `SGLangEngine`. Progress events contain the new tokens, which then survive a failed child."""
    return SGLangEngine(HFConfig.from_dict(dict(config)), **(options | {"tell_tokens": True}))


def sglang_config(hf: HFConfig) -> dict[str, Any]:
    """Return config.json with settings by which SGLang computes the same model.

    Sequences fit the sliding window, so attention is full. SGLang reads YaRN's `attn_factor`
    instead of `attention_factor`, and fails if the factor of linear scaling is a whole number.
    """
    raw, rope = hf.to_dict(), hf.rope
    if hf.sliding_window:
        raw |= {"sliding_window": None, "use_sliding_window": False, "layer_types": None}
    if hf.mla:  # transformers has no keys for what all models of this class do
        raw = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"} | raw
    if rope.kind == "default":
        return raw
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    raw[key] = raw[key] | {"factor": float(rope.factor)}
    if rope.kind == "yarn":
        factor = rope.attention_factor
        raw[key] |= {"attention_factor": factor, "attn_factor": factor}
        # Their ratio multiplies attn_factor; with latent attention, the second scales the softmax.
        under = (raw[key].get("mscale_all_dim") or 0.0) if hf.mla else 1.0
        raw[key] |= {"mscale": under, "mscale_all_dim": under}
    return raw


def _draft_settings(width: int, settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields of `DraftSettings` for forwards of at most `width` tokens per request."""
    s = DraftSettings(**(settings or {}))
    s = replace(
        s, max_length=min(s.max_length, width - 1), initial_length=min(s.initial_length, width - 1)
    )
    return asdict(s)


def _no_counts() -> dict[str, Any]:
    names = ("decode_steps", "decode_tokens", "prefill_tokens", "cached_tokens")
    return dict.fromkeys(names, 0) | {"busy_s": 0.0}


def _signed(number: int) -> int:
    """Return the lowest 64 bits of `number` as a signed number."""
    return (number + 2**63) % 2**64 - 2**63


def _cpu_tokens(max_running: int, max_model_tokens: int) -> int:
    """Return the cache size in tokens on a CPU; SGLang's default would take most of the memory."""
    return min(max_running * max_model_tokens, 2**16)


def _must(result: tuple[bool, str]) -> None:
    """Raise RuntimeError if SGLang has returned a failure."""
    if not result[0]:
        raise RuntimeError(result[1])

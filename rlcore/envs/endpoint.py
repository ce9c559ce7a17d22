"""HTTP server through which harnesses sample turns of their episodes, with OpenAI's interface and
Anthropic's messages.

    endpoint = Endpoint(EndpointLimits())
    server = EndpointServer(endpoint)                # 127.0.0.1, a free port
    key = endpoint.open("t12.3", complete)           # complete: TurnRequest -> ChatAnswer
    ...                                              # the harness uses server.base_url and key
    endpoint.close("t12.3")                          # its turns are cancelled, its key is over

An episode is a key, given as API key or in the path (`/k/KEY/v1/...`). Requests are answered in the
server's own thread and event loop; `complete` runs there too. Any thread may open and close
episodes.

The engine has no stream of tokens. With `stream` a client gets comments while its turn is sampled,
and all events when the turn is complete. If the turn is complete before the first comment, its
error has an HTTP status.

Starlette instead of FastAPI, which is built on it: bodies are checked by msgspec, so FastAPI would
add 20 us to a request, 0.16 s to the start and pages of documentation without a key.
"""

import asyncio
import contextlib
import functools
import hmac
import math
import secrets
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rlcore.envs import chat_api, messages_api
from rlcore.envs.chat_api import ApiError, ChatAnswer, ChatCompletion, TextCompletion, TurnRequest
from rlcore.envs.harness import EpisodeScore, parse_score
from rlcore.envs.messages_api import MessagesForm
from rlcore.records import RequestId
from rlcore.utils.log import log

Complete = Callable[[TurnRequest], Awaitable[ChatAnswer]]
"""Function that samples one turn. If it is cancelled, the turn is dropped. It raises ApiError for
what the client is to know, such as a context that is used up."""
_KEY = "rlcore-"
_MOST_CLOSED = 1 << 14
"""Number of ended episodes whose keys are still told from wrong ones."""
_SCORE_BYTES = 1 << 16
_BACKLOG = 2048
_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104  # nosec B104  # compared only
_CLIENT_GONE = 499
"""Status of a response that no client reads."""


_Form = TypeVar("_Form", bound=chat_api.CompletionForm)


@dataclass(frozen=True, kw_only=True)
class EndpointLimits:
    """Limits of requests, and what harnesses may set."""

    max_body_bytes: int = 32 << 20
    """Largest body of a request."""
    max_parallel_requests: int = 16
    """Number of requests of one episode at a time."""
    max_connections: int = 4096
    """Number of open connections; above it, the connection that is idle for longest is closed."""
    turn_timeout_s: float = 1800.0
    """Seconds after which a turn is cancelled."""
    body_timeout_s: float = 60.0
    """Seconds in which a client must have sent its request's body."""
    comment_s: float = 10.0
    """Seconds between two comments of a stream whose turn is sampled."""
    allow_sampling: bool = False
    """Whether a request's temperature and top_p replace those of the run. Its stop texts and
    maximum number of tokens always hold."""


class _Render(NamedTuple):
    """Functions that write the answers of one kind of completion."""

    body: Callable[[ChatAnswer, str], bytes]
    events: Callable[[ChatAnswer, str, bool], bytes]


_CHAT = _Render(chat_api.chat_body, chat_api.chat_events)
_TEXT = _Render(chat_api.text_body, chat_api.text_events)
_MESSAGES = _Render(messages_api.messages_body, messages_api.messages_events)


class _Served:
    """An open episode. Requests are counted, and turns start and end, in the server's thread; any
    thread may close it."""

    def __init__(
        self, id: RequestId, key: str, complete: Complete, most: int, counts: Counter[str]
    ) -> None:
        """`most`: number of requests at a time."""
        self.id, self.key, self.is_over = id, key, False
        self._complete, self._most, self._counts = complete, most, counts
        self._lock = threading.Lock()
        self._requests = 0
        self._turns: set[asyncio.Task[ChatAnswer]] = set()
        self._score: EpisodeScore | None = None

    def enter(self) -> None:
        """Count one more request, before its body is in memory. Raises ApiError if there are too
        many."""
        if self._requests >= self._most:
            raise ApiError(
                429,
                f"episode {self.id} has {self._requests} requests in progress, the most that are "
                "allowed; wait for one of them",
                code="too_many_requests",
            )
        self._requests += 1

    def leave(self) -> None:
        """Count one request fewer."""
        self._requests -= 1

    def start(self, turn: TurnRequest) -> asyncio.Task[ChatAnswer]:
        """Start a turn. Raises ApiError if the episode is over."""
        with self._lock:
            if self.is_over:
                raise _over(self.id)
            task = asyncio.ensure_future(self._complete(turn))
            self._turns.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[ChatAnswer]) -> None:
        with self._lock:
            self._turns.discard(task)
        if task.cancelled():
            self._counts["cancelled"] += 1
        else:
            task.exception()  # asyncio logs exceptions that are not retrieved

    def close(self) -> None:
        """Mark the episode as over and cancel its turns. Idempotent."""
        with self._lock:
            self.is_over, turns = True, list(self._turns)
        for task in turns:
            with contextlib.suppress(RuntimeError):  # the server's loop is closed
                task.get_loop().call_soon_threadsafe(task.cancel)

    def post_score(self, score: EpisodeScore) -> None:
        """Record the score. Raises ApiError if there is one or the episode is over."""
        with self._lock:
            if self.is_over:
                raise _over(self.id)
            if self._score is not None:
                raise ApiError(409, f"episode {self.id} has a score already", code="has_score")
            self._score = score

    def score(self) -> EpisodeScore | None:
        """Return the posted score."""
        with self._lock:
            return self._score


class Endpoint:
    """Episodes that a server serves, and its application."""

    def __init__(self, limits: EndpointLimits | None = None, *, model: str = "rlcore") -> None:
        """`model`: name of the policy in answers. Requests may name any model."""
        self.limits, self._model = limits or EndpointLimits(), model
        self._lock = threading.Lock()
        self._open: dict[RequestId, _Served] = {}
        self._closed: OrderedDict[RequestId, str] = OrderedDict()
        self.counts: Counter[str] = Counter()
        """Number of answered turns (`turns`), of cancelled ones (`cancelled`) and of errors by
        their status (`error_401`). Only the server's thread writes."""
        self.app = self._make_app()

    def open(self, id: RequestId, complete: Complete) -> str:
        """Serve an episode and return its key. Raises ValueError if it is already served."""
        key = f"{_KEY}{id}-{secrets.token_hex(16)}"
        with self._lock:
            if id in self._open:
                raise ValueError(f"episode {id}: is already served; use each id once")
            most = self.limits.max_parallel_requests
            self._open[id] = _Served(id, key, complete, most, self.counts)
        return key

    def close(self, id: RequestId) -> None:
        """End an episode: cancel its turns, and answer further requests with 410. Idempotent."""
        with self._lock:
            episode = self._open.pop(id, None)
            if episode is None:
                return
            self._closed[id] = episode.key
            if len(self._closed) > _MOST_CLOSED:
                self._closed.popitem(last=False)
        episode.close()

    def close_all(self) -> None:
        """End all episodes."""
        for id in list(self._open):
            self.close(id)

    def score(self, id: RequestId) -> EpisodeScore | None:
        """Return the score that the harness of an open episode has posted."""
        episode = self._open.get(id)
        return episode.score() if episode else None

    # ---- routes

    def _make_app(self) -> Starlette:
        chat = self._turns(ChatCompletion, chat_api.chat_turn, _CHAT)
        text = self._turns(TextCompletion, chat_api.text_turn, _TEXT)
        messages = self._turns(MessagesForm, messages_api.messages_turn, _MESSAGES)
        keyed = [
            ("/v1/chat/completions", "POST", chat),
            ("/v1/completions", "POST", text),
            ("/v1/messages", "POST", messages),
            ("/v1/models", "GET", self._models),
            ("/v1/episodes/{id}/score", "POST", self._post_score),
        ]
        routes = [
            Route(prefix + path, self._guarded(handler), methods=[method])
            for prefix in ("", "/k/{key}")
            for path, method, handler in keyed
        ]
        return Starlette(
            routes=[*routes, Route("/health", _health, methods=["GET"])],
            exception_handlers={HTTPException: self._no_route},
        )

    def _guarded(self, handler: Callable[[Request, _Served], Awaitable[Response]]) -> Any:
        """Return a route that finds the episode of a request and turns errors into answers."""

        async def route(request: Request) -> Response:
            try:
                return await handler(request, self._episode_of(request))
            except ApiError as error:
                return self._error(error)
            except ClientDisconnect:
                return Response(status_code=_CLIENT_GONE)
            except Exception:
                log.exception("endpoint: %s failed", request.url.path.rpartition("/")[2])
                return self._error(ApiError(500, "rlcore failed to answer; its log has the reason"))

        return route

    def _error(self, error: ApiError) -> Response:
        self.counts[f"error_{error.status}"] += 1
        return Response(error.body(), error.status, media_type="application/json")

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        sentence = f"{request.method}: the endpoint has no such path or method"
        return self._error(ApiError(error.status_code, sentence, code="unknown_url"))

    def _episode_of(self, request: Request) -> _Served:
        """Return the episode of a request's key. Raises ApiError if there is none."""
        key = request.path_params.get("key") or _header_key(request)
        id = key.removeprefix(_KEY).rpartition("-")[0]
        episode = self._open.get(id)
        if episode is not None and _equal(key, episode.key):
            return episode
        if _equal(key, self._closed.get(id, "")):
            raise _over(id)
        raise ApiError(
            401,
            "the API key is missing or belongs to no episode; use the key of OPENAI_API_KEY",
            code="invalid_api_key",
        )

    async def _models(self, request: Request, episode: _Served) -> Response:
        return Response(chat_api.models_body(self._model), media_type="application/json")

    async def _post_score(self, request: Request, episode: _Served) -> Response:
        if request.path_params["id"] != episode.id:
            raise ApiError(403, "the API key belongs to another episode", code="other_episode")
        body = await _body(request, _SCORE_BYTES, self.limits.body_timeout_s)
        try:
            score = parse_score(body)
        except (ValueError, TypeError) as error:
            raise ApiError(400, str(error), param="score") from None
        episode.post_score(score)
        return Response(b'{"status":"ok"}', media_type="application/json")

    def _turns(
        self,
        kind: type[_Form],
        turn_of: Callable[[_Form, bool], TurnRequest],
        render: _Render,
    ) -> Callable[[Request, _Served], Awaitable[Response]]:
        """Return the handler of one kind of completion."""
        limits = self.limits

        async def handler(request: Request, episode: _Served) -> Response:
            is_late = False
            episode.enter()
            try:
                body = await _body(request, limits.max_body_bytes, limits.body_timeout_s)
                form = chat_api.read(body, kind)
                del body
                task = episode.start(turn_of(form, limits.allow_sampling))
                deadline = time.monotonic() + limits.turn_timeout_s
                patience = limits.comment_s if form.stream else math.inf
                is_done = await _until(task, request, min(patience, limits.turn_timeout_s))
                is_late = bool(form.stream) and not is_done and time.monotonic() < deadline
                if is_late:
                    events = self._later(episode, task, deadline, form, render)
                    return _LateStream(task, events, episode.leave)
            finally:
                if not is_late:
                    episode.leave()
            answer = self._answer(episode, task)
            if form.stream:
                events_now = render.events(answer, self._model, form.with_usage)
                return Response(events_now, media_type=chat_api.EVENTS)
            return Response(render.body(answer, self._model), media_type="application/json")

        return handler

    async def _later(
        self,
        episode: _Served,
        task: asyncio.Task[ChatAnswer],
        deadline: float,
        form: chat_api.CompletionForm,
        render: _Render,
    ) -> AsyncIterator[bytes]:
        """Yield comments until a turn is complete, then its events."""
        while not task.done() and (left := deadline - time.monotonic()) > 0:
            yield b": the turn is sampled\n\n"
            await asyncio.wait({task}, timeout=min(left, self.limits.comment_s))
        try:
            answer = self._answer(episode, task)
        except ApiError as error:
            self.counts[f"error_{error.status}"] += 1
            yield chat_api.error_event(error)
        else:
            yield render.events(answer, self._model, form.with_usage)

    def _answer(self, episode: _Served, task: asyncio.Task[ChatAnswer]) -> ChatAnswer:
        """Return the answer of a turn. Raises ApiError if it has none; cancels a late turn."""
        if not task.done():
            task.cancel()
            raise ApiError(
                504,
                f"the turn was not sampled within {self.limits.turn_timeout_s:g} s",
                code="turn_timeout",
            )
        if task.cancelled():
            if episode.is_over:
                raise _over(episode.id)
            raise ApiError(503, "the turn was dropped; send the request again", code="dropped")
        if (error := task.exception()) is not None:
            if isinstance(error, ApiError):
                raise error
            log.error("endpoint: a turn of episode %s failed", episode.id, exc_info=error)
            raise ApiError(500, "rlcore failed to sample the turn; its log has the reason")
        self.counts["turns"] += 1
        return task.result()


class _LateStream(StreamingResponse):
    """Stream of a turn that is not complete; the turn is cancelled if the client disconnects."""

    def __init__(
        self,
        task: asyncio.Task[ChatAnswer],
        events: AsyncIterator[bytes],
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(events, media_type=chat_api.EVENTS)
        self._task, self._on_end = task, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. Cancels the turn even if the first of them was never asked for."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._task.cancel()
            self._on_end()


async def _health(request: Request) -> Response:
    return Response(b'{"status":"ok"}', media_type="application/json")


def _header_key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _equal(key: str, right: str) -> bool:
    """Compare keys in constant time. No key equals the empty one."""
    return bool(right) and hmac.compare_digest(key.encode(), right.encode())


def _over(id: RequestId) -> ApiError:
    return ApiError(410, f"episode {id} is over", code="episode_over")


async def _body(request: Request, limit: int, timeout_s: float) -> bytes:
    """Return the body of a request. Raises ApiError if it is too large or too slow, before more
    than `limit` bytes are in memory."""
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise too_large
                chunks.append(chunk)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {timeout_s:g} s") from None
    return b"".join(chunks)


async def _until(task: asyncio.Task[ChatAnswer], request: Request, timeout_s: float) -> bool:
    """Wait for a turn; return whether it is complete. If the client disconnects first, cancel the
    turn and raise ClientDisconnect."""
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        done, _ = await asyncio.wait(
            {task, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
    except asyncio.CancelledError:
        task.cancel()
        raise
    finally:
        gone.cancel()
    if gone in done and task not in done:
        task.cancel()
        raise ClientDisconnect
    return task in done


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# ---- server


class _Uvicorn(uvicorn.Server):
    """uvicorn's server, stopped from another thread."""

    def stop(self) -> None:
        """End soon: refuse connections, and wait for the responses in progress."""
        self.should_exit = True

    def stop_now(self) -> None:
        """Do not wait for responses."""
        self.force_exit = True


# mypy does not know which class uvicorn takes; both have what is used here.
class _BoundedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # a variable
    """Connection of a client. Above a number of connections, the longest idle one is closed, so
    that a harness which opens connections in a loop does not use up the rank's descriptors."""

    def __init__(self, *args: Any, order: dict[Any, None], most: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._order, self._most = order, most

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._order[self] = None
        if len(self._order) > self._most:
            idle = next((c for c in self._order if c.is_idle), self)
            del self._order[idle]
            idle.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._order.pop(self, None)
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP, because asyncio else leaves out TCP_NODELAY, and answers wait 40 ms for an ACK.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(_BACKLOG)
    except OSError:
        found.close()
        raise
    return found


class EndpointServer:
    """HTTP server of an endpoint, in a thread of its own."""

    def __init__(
        self,
        endpoint: Endpoint,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        public_host: str = "",
    ) -> None:
        """Listen and start the thread. `port` 0: a free one. `public_host`: name of this machine in
        URLs; empty: `host`, or the host name if that is a wildcard. Raises OSError if the address
        cannot be listened on."""
        self._endpoint = endpoint
        self._socket = _listen(host, port)
        self.host = public_host or (socket.gethostname() if host in _WILDCARDS else host)
        self.port = int(self._socket.getsockname()[1])
        protocol = functools.partial(
            _BoundedProtocol, order={}, most=endpoint.limits.max_connections
        )
        config = uvicorn.Config(
            endpoint.app,
            http=protocol,  # type: ignore[arg-type]  # uvicorn only calls it
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=60,
        )
        self._uvicorn = _Uvicorn(config)
        self._thread = threading.Thread(target=self._main, name="endpoint", daemon=True)
        self._thread.start()

    @property
    def root_url(self) -> str:
        """Address of the server."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def base_url(self) -> str:
        """Address for OPENAI_BASE_URL."""
        return f"{self.root_url}/v1"

    def close(self, timeout_s: float = 10.0) -> None:
        """End all episodes and the server within `timeout_s`. Idempotent."""
        self._endpoint.close_all()
        self._uvicorn.stop()
        self._thread.join(timeout_s / 2)
        if self._thread.is_alive():
            self._uvicorn.stop_now()
            self._thread.join(timeout_s / 2)
        if self._thread.is_alive():
            log.error("endpoint: its server did not end within %g s", timeout_s)

    def _main(self) -> None:
        try:
            self._uvicorn.run(sockets=[self._socket])
        except Exception:
            log.exception("endpoint: the server failed")

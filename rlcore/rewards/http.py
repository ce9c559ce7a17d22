"""HTTP reward: one POST per sample to `--reward http://host:port/path`.

    request   {"id", "prompt", "response", "label", "dataset", "fields", "num_tokens", "finish"}
    answer    a number, or {"score": number, ...further numbers, shown as reward/<name>}

`label` is the data row's answer, `fields` its other columns. At most `--reward.workers` requests
are in flight at a time. Transient failures (a missing or broken connection, status 408, 425, 429 or
5xx) are retried with growing pauses. `timeout_s` is the wall-clock time limit of a sample,
including all retries and pauses. A server that sends one byte per second does not extend this
limit. An answer has at most 1 MiB and no content-encoding, because a few compressed bytes may
decode to gigabytes. Redirects are not followed, and cookies are not kept.
"""

import asyncio
import json
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Annotated, Any, Protocol

import httpx
import msgspec

from rlcore.config.schema import RewardConfig
from rlcore.records import RequestId, RewardResult
from rlcore.rewards.kind import RewardKind, RunnerHost, to_result
from rlcore.rewards.wire import ScoreJob
from rlcore.utils.bounds import at_least
from rlcore.utils.children import sentence
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import log
from rlcore.utils.scores import number

_AGAIN = frozenset((408, 425, 429))
_CLOSE_S = 10.0
_SHOWN_CHARS = 120
_LARGEST = 1 << 20


@dataclass(frozen=True, kw_only=True)
class HttpRewardConfig(RewardConfig):
    """Keys of `--reward http://host:port/path`."""

    workers: int = 32
    """Maximum number of concurrent requests per rank."""
    retries: Annotated[int, at_least(0)] = 4
    """Number of retries of a failed request, within reward.timeout_s."""
    backoff_s: Annotated[float, at_least(0)] = 0.25
    """Seconds before the first retry; each further pause is twice as long, minus a random part. A
    server's Retry-After header replaces the pause."""


class Requests(Protocol):
    """Config keys that `HttpReward` reads."""

    @property
    def workers(self) -> int: ...

    @property
    def retries(self) -> int: ...

    @property
    def backoff_s(self) -> float: ...


class _Refused(Exception):
    """Error of a request that returned no valid score. `wait_s`: seconds of the server's
    Retry-After header, 0 without this header; None: do not retry."""

    def __init__(self, text: str, wait_s: float | None) -> None:
        super().__init__(text)
        self.wait_s = wait_s


class HttpReward:
    """`kind.Runner` that sends HTTP requests from an event loop in its own thread."""

    def __init__(
        self,
        url: str,
        config: Requests,
        host: RunnerHost,
        *,
        write: Callable[[ScoreJob], bytes] | None = None,
        read: Callable[[bytes], RewardResult] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Start the event loop's thread.

        `write` encodes the body of a request. `read` decodes an answer to a result, and raises
        ValueError if the answer is invalid. `headers` are sent with every request.
        """
        self._url, self._config, self._host = url, config, host
        self._write, self._read = write or _request, read or _result
        own = {"content-type": "application/json", "accept-encoding": "identity"}
        self._headers = {**own, **(headers or {})}
        self._random = random.Random(host.seed)
        # `_queue` and `_tasks` are used by the event loop's thread only
        self._queue: deque[tuple[ScoreJob, bytes]] = deque()
        self._tasks: dict[asyncio.Task[None], RequestId] = {}
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="reward http", daemon=True)
        self._thread.start()

    def submit(self, job: ScoreJob) -> None:
        """Queue the request for a job (`Runner.submit`)."""
        body = self._write(job)
        self._tell(self._enqueue, job, body)

    def cancel(self, ids: Collection[RequestId]) -> None:
        """Cancel the requests of these samples (`Runner.cancel`)."""
        self._tell(self._forget, frozenset(ids))

    def close(self) -> None:
        """Cancel all requests and stop the thread."""
        if self._thread.is_alive():
            self._tell(self._stop.set)
            self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            log.error("reward %s: requests did not end within %g s", self._url, _CLOSE_S)

    def _tell(self, call: Callable[..., None], *about: object) -> None:
        """Call a function in the event loop's thread. If the loop is closed, do nothing, because
        the loop's failure has already been reported."""
        try:
            self._loop.call_soon_threadsafe(call, *about)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    # ---- the event loop's thread

    def _main(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:  # report the failed thread, so that `poll` raises an error
            log.exception("reward %s: its thread failed", self._url)
            self._host.fail(f"reward {self._url}: its thread failed: {sentence(error)}")
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        most = httpx.Limits(max_connections=self._config.workers)
        no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))
        # `_score` limits the whole time of a sample, so httpx needs no time-out
        async with httpx.AsyncClient(timeout=None, limits=most, cookies=no_cookies) as client:
            self._client = client
            self._start()
            await self._stop.wait()
            self._queue.clear()  # a task that ends now must not start a queued request
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _enqueue(self, job: ScoreJob, body: bytes) -> None:
        self._queue.append((job, body))
        self._start()

    def _forget(self, ids: frozenset[RequestId]) -> None:
        self._queue = deque(item for item in self._queue if item[0].sample.id not in ids)
        for task, id in self._tasks.items():
            if id in ids:
                task.cancel()

    def _start(self) -> None:
        """Start queued requests up to the limit `workers`."""
        client = getattr(self, "_client", None)
        while client is not None and self._queue and len(self._tasks) < self._config.workers:
            job, body = self._queue.popleft()
            task = self._loop.create_task(self._score(client, job, body))
            self._tasks[task] = job.sample.id
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._host.fail(f"reward {self._url}: {sentence(error)}")
        self._start()

    async def _score(self, client: httpx.AsyncClient, job: ScoreJob, body: bytes) -> None:
        begin, limit_s = time.monotonic(), self._host.timeout_s(job)
        last = ["no answer"]
        try:
            async with asyncio.timeout(limit_s):
                result = await self._tries(client, body, last)
        except TimeoutError:
            result = RewardResult(score=0.0, error=f"timeout after {limit_s:g} s: {last[0]}")
        except _Refused as error:
            result = RewardResult(score=0.0, error=f"http: {error}")
        except Exception as error:  # an error of the server must not end the run
            result = RewardResult(score=0.0, error=f"http: {sentence(error)}")
        latency_s = time.monotonic() - begin
        self._host.done(job, msgspec.structs.replace(result, latency_s=latency_s), "")

    async def _tries(self, client: httpx.AsyncClient, body: bytes, last: list[str]) -> RewardResult:
        """Send a request, with retries, and return the first valid result. Store the latest error
        in `last[0]` for the message of a time-out."""
        pause_s = self._config.backoff_s
        for k in range(self._config.retries + 1):
            try:
                return await self._post(client, body)
            except httpx.HTTPError as error:
                refused = _Refused(sentence(error), 0.0)
            except _Refused as error:
                refused = error
            last[0] = str(refused)
            if refused.wait_s is None or k == self._config.retries:
                break
            pause = pause_s * (1 - self._random.random() / 2)
            await asyncio.sleep(refused.wait_s or pause)
            pause_s *= 2
        tries = "" if k == 0 else f", after {k + 1} tries"
        raise _Refused(f"{refused}{tries}", None)

    async def _post(self, client: httpx.AsyncClient, body: bytes) -> RewardResult:
        async with client.stream("POST", self._url, content=body, headers=self._headers) as answer:
            if coding := answer.headers.get("content-encoding", "").replace("identity", ""):
                raise _Refused(
                    f"the answer has content-encoding {coding[:_SHOWN_CHARS]!r}; send it without",
                    None,
                )
            found = bytearray()
            async for piece in answer.aiter_raw():
                found += piece
                if len(found) > _LARGEST:
                    raise _Refused(f"the answer has more than {_LARGEST} bytes", None)
        text = bytes(found)
        if answer.status_code != 200:
            may_pass = answer.status_code >= 500 or answer.status_code in _AGAIN
            wait = answer.headers.get("retry-after", "")
            shown = text[:_SHOWN_CHARS].decode("utf-8", "replace")
            raise _Refused(
                f"status {answer.status_code}: {shown}".strip(": "),
                (float(wait) if wait.isascii() and wait.isdigit() else 0.0) if may_pass else None,
            )
        try:
            return self._read(text)
        except ValueError as error:
            shown = text[:_SHOWN_CHARS].decode("utf-8", "replace")
            raise _Refused(f"{sentence(error)}; the answer was {shown!r}", None) from error


def _request(job: ScoreJob) -> bytes:
    prompt, sample = job.prompt, job.sample
    body = {
        "id": sample.id,
        "prompt": prompt.text,
        "response": job.text,
        "label": prompt.answer,
        "dataset": prompt.dataset,
        "fields": prompt.fields,
        "num_tokens": sample.num_tokens,
        "finish": sample.finish,
    }
    return msgspec.json.encode(body)


def _result(text: bytes) -> RewardResult:
    """Decode the score in an answer. Raises ValueError if the answer is invalid."""
    try:
        # reading an integer of 1 MiB as float takes milliseconds, and as int seconds
        found = json.loads(text, parse_int=float, object_pairs_hook=_unique)
        if not isinstance(found, dict):
            return to_result(found)
        numbers = {k: v for k, v in found.items() if isinstance(v, int | float)}
        score = number("score", found.get("score"))
        numbers.pop("score", None)
        return to_result(RewardResult(score=score, details=numbers))
    except (TypeError, RecursionError) as error:
        raise ValueError(sentence(error)) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of the keys and values of a JSON object. Raises ValueError if a key repeats."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key of the JSON object repeats; send each key once")
    return found


def kind(url: str) -> RewardKind:
    """Return the reward kind for this address. Raises ConfigError if the address is invalid."""
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--reward {url}: {error}") from error
    if not address.host:
        raise ConfigError(f"--reward {url}: has no host; give http://host:port/path")
    return RewardKind(HttpRewardConfig, serve=lambda config, host: HttpReward(url, config, host))

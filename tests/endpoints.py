"""Served episodes for tests of the endpoint: their turns are answered by the test."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from rlcore.envs.chat_api import ChatAnswer, TurnRequest
from rlcore.envs.endpoint import Endpoint, EndpointLimits, EndpointServer

WAIT_S = 60.0
HELLO: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "hello"}]}


class Played:
    """Episode that keeps its turns and gives each the same answer, error or wait."""

    def __init__(self, answer: ChatAnswer | BaseException | None = None) -> None:
        """`answer` None: turns wait for `release`."""
        self.turns: list[TurnRequest] = []
        self.begun, self.cancelled = threading.Semaphore(0), threading.Semaphore(0)
        self._answer, self._waits = answer, answer is None
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def complete(self, turn: TurnRequest) -> ChatAnswer:
        self.turns.append(turn)
        event = asyncio.Event()
        self._waiting.append((asyncio.get_running_loop(), event))
        self.begun.release()
        try:
            if self._waits:
                await event.wait()
        except asyncio.CancelledError:
            self.cancelled.release()
            raise
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer or ChatAnswer()

    def release(self, answer: ChatAnswer | BaseException) -> None:
        """Answer all turns that wait, and all that come."""
        self._answer, self._waits = answer, False
        for loop, event in self._waiting:
            loop.call_soon_threadsafe(event.set)


class Served:
    """A server with one client."""

    def __init__(self, endpoint: Endpoint, server: EndpointServer, client: httpx.Client) -> None:
        self.endpoint, self.server, self.client = endpoint, server, client

    def open(self, id: str, episode: Played) -> dict[str, str]:
        """Open an episode; return the headers of its key."""
        return {"authorization": f"Bearer {self.endpoint.open(id, episode.complete)}"}

    def chat(self, headers: dict[str, str], **fields: Any) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json=HELLO | fields, headers=headers)


@contextmanager
def serve(**limits: Any) -> Iterator[Served]:
    endpoint = Endpoint(EndpointLimits(**limits))
    server = EndpointServer(endpoint)
    try:
        with httpx.Client(base_url=server.root_url, timeout=WAIT_S, trust_env=False) as client:
            yield Served(endpoint, server, client)
    finally:
        server.close()


def wait_until(is_true: Callable[[], bool]) -> None:
    """Wait for a state of another thread that has no event."""
    moment = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if is_true():
            return
        moment.wait(0.01)
    raise AssertionError("the state was not reached")

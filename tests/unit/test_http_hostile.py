"""Servers of a reward that send too much, too slowly or nonsense, byte by byte. Each costs its
samples, within the deadline, and no memory."""

import contextlib
import gzip
import socket
import threading
import time
import tracemalloc

import pytest

from rlcore.rewards.judge.config import JudgeRewardConfig
from rlcore.rewards.registry import config_class
from rlcore.rewards.service import RewardService
from tests.contracts.reward_contract import prompt_of, sample_of, score_all

BOMB = gzip.compress(gzip.compress(bytes(64 << 20)))
OK = b"HTTP/1.1 200 OK\r\n"


def whole(body: bytes, *headers: bytes) -> bytes:
    lines = [b"content-length: %d" % len(body), *headers]
    return OK + b"\r\n".join(lines) + b"\r\n\r\n" + body


@contextlib.contextmanager
def server(first: bytes, again: bytes = b"", pause_s: float = 0.0, seen: list | None = None):
    """Send `first` for each request, then `again` without end; keeps the connection open."""
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            while not over.is_set() and (data := client.recv(1 << 20)):
                if seen is not None:
                    seen.append(data)
                client.sendall(first)
                while again and not over.wait(pause_s):
                    client.sendall(again)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                client.settimeout(20)
                threading.Thread(target=serve, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        over.set()
        listener.close()


CASES = {
    "gzip in gzip": (whole(BOMB, b"content-encoding: gzip, gzip"), b"", 0.0, "content-encoding"),
    "deflate": (whole(b"x", b"content-encoding: deflate"), b"", 0.0, "content-encoding"),
    "a body without end": (OK + b"\r\n", b"0" * 4096, 0.0, "more than 1048576 bytes"),
    "chunks without end": (
        OK + b"transfer-encoding: chunked\r\n\r\n",
        b"1000\r\n" + b"0" * 4096 + b"\r\n",
        0.0,
        "more than 1048576 bytes",
    ),
    "a chunk's extension without end": (
        OK + b"transfer-encoding: chunked\r\n\r\n1;",
        b"x" * 4096,
        0.0,
        "RemoteProtocolError",
    ),
    "headers without end": (OK, b"x-more: " + b"y" * 4096 + b"\r\n", 0.0, "RemoteProtocolError"),
    "one header without end": (OK + b"x-more: ", b"y" * 4096, 0.0, "RemoteProtocolError"),
    "a byte now and then": (OK + b"content-length: 9999\r\n\r\n", b" ", 0.1, "timeout after 1 s"),
    "a header now and then": (OK, b"a: b\r\n", 0.1, "timeout after 1 s"),
    "interim answers without end": (b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.01, "timeout after"),
    "nothing": (b"", b"", 0.0, "timeout after 1 s"),
    "a body that is too short": (OK + b"content-length: 99\r\n\r\n1", b"", 0.0, "timeout after"),
    "a redirect": (
        b"HTTP/1.1 307 Go\r\nlocation: http://127.0.0.1:9/\r\ncontent-length: 0\r\n\r\n",
        b"",
        0.0,
        "status 307",
    ),
    "another protocol": (
        b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"",
        0.0,
        "",
    ),
    "nonsense": (b"\x00\xff\r\n\r\n", b"", 0.0, "RemoteProtocolError"),
    "a pause of a year": (
        b"HTTP/1.1 503 X\r\nretry-after: 31536000\r\ncontent-length: 0\r\n\r\n",
        b"",
        0.0,
        "timeout after 1 s",
    ),
    "a pause of another digit": (
        b"HTTP/1.1 503 X\r\nretry-after: \xb2\r\ncontent-length: 0\r\n\r\n",
        b"",
        0.0,
        "status 503",
    ),
    "two lengths": (whole(b"1", b"content-length: 2"), b"", 0.0, "RemoteProtocolError"),
    "a length that is negative": (OK + b"content-length: -1\r\n\r\n", b"", 0.0, "Protocol"),
}


def failed(url: str, name: str = "", **keys) -> str:
    """Error of one sample, of the reward `name` or of the server itself."""
    make = JudgeRewardConfig if name else config_class(url)
    keys |= {"url": url} if name else {}
    config = make(timeout_s=1.0, retries=1, backoff_s=0.01, on_error=-1.0, **keys)
    with RewardService(name or url, config=config) as service:
        service.submit("t0.0", sample_of("t0.0"), prompt_of("7"), "x")
        (result,) = score_all(service, 30.0).values()
    assert result.score == -1.0
    return result.error


@pytest.mark.parametrize("first, again, pause_s, error", CASES.values(), ids=CASES)
def test_a_hostile_server_costs_its_sample_and_little_memory(first, again, pause_s, error):
    tracemalloc.start()
    try:
        with server(first, again, pause_s) as url:
            begin = time.monotonic()
            found = failed(url)
            assert time.monotonic() - begin < 20, "the deadline is 1 s"
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert error in found and found
    assert peak < 16 << 20, "bytes of Python objects at most, where 2 MB are expected"


@pytest.mark.parametrize("name", ["gzip in gzip", "a body without end", "a byte now and then"])
def test_a_judge_behind_a_url_is_read_the_same_way(name):
    first, again, pause_s, error = CASES[name]
    with server(first, again, pause_s) as url:
        assert error in failed(url, "judge", model="big")


def test_an_answer_that_is_longer_than_it_says_costs_no_other_sample_and_cookies_are_dropped():
    seen: list[bytes] = []
    cookie = b"set-cookie: a=" + b"x" * 3000
    long = OK + b"content-length: 1\r\n" + cookie + b"\r\n\r\n1junk"
    with server(long, seen=seen) as url:
        config = config_class(url)(timeout_s=20.0, retries=4, backoff_s=0.01, workers=1)
        with RewardService(url, config=config) as service:
            for i in range(4):
                service.submit(f"t{i}.0", sample_of(f"t{i}.0"), prompt_of("7"), "x")
            found = score_all(service)
    assert [r.score for r in found.values()] == [1.0] * 4
    sent = b"".join(seen).lower()
    assert b"cookie" not in sent
    assert sent.count(b"accept-encoding: identity") == sent.count(b"post /v1") >= 4

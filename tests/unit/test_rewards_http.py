"""A reward server that is slow, broken, busy or rude, and one that answers."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlcore.rewards.registry import config_class
from rlcore.rewards.service import RewardService
from tests.contracts.reward_contract import prompt_of, sample_of, score_all


class Server(ThreadingHTTPServer):
    """Answers by the response it is asked about; counts tries and requests at a time."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.tries: dict[str, int] = {}
        self.bodies: list[dict] = []
        self.now = self.most = 0
        self.lock = threading.Lock()
        self.over = threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: object) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = body["response"]
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.tries[text] = self.server.tries.get(text, 0) + 1
            nth = self.server.tries[text]
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        try:
            self._answer(text, nth)
        finally:
            with self.server.lock:
                self.server.now -= 1

    def _answer(self, text: str, nth: int) -> None:
        if text == "busy twice" and nth < 3:
            self._send(503, b"later")
        elif text == "cut once" and nth == 1:
            self.close_connection = True
        elif text == "down":
            self._send(500, b"no")
        elif text == "refuse":
            self._send(400, b"I do not know this row")
        elif text == "huge":
            self._send(200, b'{"score": 1, "n": 1' + b"0" * 400 + b"}")
        elif text == "junk":
            self._send(200, b"<html>")
        elif text == "drip":  # a byte now and then, for ever
            self.send_response(200)
            self.send_header("content-length", "1000")
            self.end_headers()
            while not self.server.over.wait(0.1):
                self.wfile.write(b" ")
        elif text == "number":
            self._send(200, b"0.25")
        else:
            time.sleep(0.02)
            self._send(200, json.dumps({"score": 1, "style": 0.5, "why": "good"}).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server():
    made = Server()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield made
    made.over.set()
    made.shutdown()
    thread.join(10)
    made.server_close()


def test_a_server_is_asked_again_when_that_may_help_and_each_failure_is_one_samples(server) -> None:
    url = f"http://127.0.0.1:{server.server_port}/score"
    config = config_class(url)(timeout_s=1.5, retries=2, backoff_s=0.01, workers=4, on_error=-1.0)
    texts = ["good", "number", "busy twice", "cut once", "down", "refuse", "junk", "drip", "huge"]
    texts += [f"more {i}" for i in range(20)]
    with RewardService(url, config=config) as service:
        for i, text in enumerate(texts):
            service.submit(f"t{i}.0", sample_of(f"t{i}.0"), prompt_of("7"), text)
        found = score_all(service)
    results = [found[f"t{i}.0"] for i in range(len(texts))]
    assert [r.score for r in results] == [1, 0.25, 1, 1, -1, -1, -1, -1, -1] + [1] * 20
    assert results[0].details == {"style": 0.5}
    assert [r.error for r in results[4:6]] == [
        "http: status 500: no, after 3 tries",
        "http: status 400: I do not know this row",
    ]
    assert results[6].error.startswith("http: JSONDecodeError")
    assert results[7].error.startswith("timeout after 1.5 s")
    assert [server.tries[t] for t in texts[:8]] == [1, 1, 3, 2, 3, 1, 1, 1]
    assert 1 < server.most <= 5  # four workers; the server still drips when one has given up
    body = next(b for b in server.bodies if b["response"] == "good")
    assert (body["label"], body["prompt"], body["dataset"], body["id"]) == (
        "7",
        "q",
        "test",
        "t0.0",
    )


def test_nobody_at_the_address_costs_samples_and_closing_does_not_wait() -> None:
    with pytest.raises(ValueError, match="--reward http://: has no host"):
        config_class("http://")
    url = "http://127.0.0.1:9/"
    config = config_class(url)(timeout_s=30.0, retries=1, backoff_s=0.01)
    with RewardService(url, config=config) as service:
        service.submit("t0.0", sample_of("t0.0"), prompt_of("7"), "x")
        (result,) = score_all(service).values()
        assert result.score == 0.0 and result.error.startswith("http: ConnectError")
        row = prompt_of("7")
        fields = {f: getattr(row, f) for f in row.__struct_fields__}
        bad = type(row)(**(fields | {"fields": {"a": {1j}}}))
        with pytest.raises(ValueError, match="row 0 of test cannot be sent to the reward"):
            service.submit("t1.0", sample_of("t1.0"), bad, "x")
        assert service.num_pending == 0


def test_where_the_thread_of_requests_fails_the_run_hears_why(monkeypatch) -> None:
    def broken(**_: object) -> None:
        raise OSError("no certificates here")

    monkeypatch.setattr("rlcore.rewards.http.httpx.AsyncClient", broken)
    url = "http://127.0.0.1:9/"
    with RewardService(url, config=config_class(url)(timeout_s=30.0)) as service:
        for thread in threading.enumerate():
            if thread.name == "reward http":
                thread.join(10.0)
        service.submit("t0.0", sample_of("t0.0"), prompt_of("7"), "x")
        service.cancel(["t0.0"])
        with pytest.raises(RuntimeError, match="its thread failed: OSError: no certificates here"):
            service.poll(1.0)

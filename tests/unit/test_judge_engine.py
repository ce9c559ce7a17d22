"""A judge behind a URL, against a server of this file that speaks chat completions."""

import json
import math
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlcore.rewards.judge.config import JudgeRewardConfig
from rlcore.rewards.service import RewardService
from tests.contracts.reward_contract import prompt_of, sample_of, score_all


class Server:
    """Answers by what the response in the prompt says; keeps the requests."""

    def __init__(self) -> None:
        server = self
        self.requests: list[dict] = []
        self.keys: list[str | None] = []
        self.under_way = self.most = 0
        self.refuse_first = 0
        self._lock, self._closed = threading.Lock(), threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server._lock:
                    server.requests.append(body)
                    server.keys.append(self.headers["Authorization"])
                    server.under_way += 1
                    server.most = max(server.most, server.under_way)
                    refuse = server.refuse_first >= len(server.requests)
                time.sleep(0.05)
                status, reply = server.reply(self.path, body) if not refuse else (503, {})
                with server._lock:
                    server.under_way -= 1
                data = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                """Say nothing."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    def reply(self, path: str, body: dict) -> tuple[int, dict]:
        text = body["messages"][0]["content"]
        assert path == "/v1/chat/completions", path
        if "bad request" in text:
            return 400, {"error": "no such model"}
        if "sleep" in text:
            self._closed.wait(60)
        if "logprobs" not in body:
            return 200, {"choices": [{"message": {"content": "Fine. Verdict: Yes"}}]}
        if "no logprobs" in text:
            return 200, {"choices": [{"message": {"content": "Yes"}, "logprobs": None}]}
        shares = {"Yes": 0.5, " Yes": 0.1, "No": 0.2, "Perhaps": 0.2}
        if "undecided" in text:
            shares = {"Perhaps": 1.0}
        top = [{"token": t, "logprob": math.log(p)} for t, p in shares.items()]
        return 200, {"choices": [{"logprobs": {"content": [{"top_logprobs": top}]}}]}

    def close(self) -> None:
        self._closed.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(5)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def scores_of(server: Server, texts: list[str], **keys):
    cfg = JudgeRewardConfig(url=server.url, model="big", **keys)
    with RewardService("judge", config=cfg) as service:
        for i, text in enumerate(texts):
            service.submit(f"t{i}.0", sample_of(f"t{i}.0"), prompt_of("2"), text)
        found = score_all(service)
    return [found[f"t{i}.0"] for i in range(len(texts))]


def test_verdict_tokens_are_read_from_the_servers_log_probs_once_for_every_pair(server):
    first, again, third = scores_of(server, ["one", "one", "two"], workers=1)
    assert first.score == pytest.approx(0.6 / 0.8)
    assert first.details == {"judge_cached": 0.0, "judge_mass": pytest.approx(0.8)}
    assert (again.score, again.details) == (first.score, {"judge_cached": 1.0})
    assert third.details["judge_cached"] == 0.0 and len(server.requests) == 2
    request = server.requests[0]
    assert (request["model"], request["max_tokens"]) == ("big", 1)
    assert request["temperature"] == 0 and "[Response]\none\n" in request["messages"][0]["content"]
    assert server.most == 1 and server.keys == [None, None]


def test_requests_run_side_by_side_and_a_busy_server_is_asked_again(server, monkeypatch):
    server.refuse_first = 2
    monkeypatch.setenv("JUDGE_KEY", "secret")
    found = scores_of(server, ["one", "two", "three"], workers=3, api_key_env="JUDGE_KEY")
    assert [r.error for r in found] == ["", "", ""] and len(server.requests) == 5
    assert server.most > 1 and set(server.keys) == {"Bearer secret"}


def test_a_written_verdict_is_found(server):
    (found,) = scores_of(server, ["one"], method="generate", max_new_tokens=50)
    assert found.score == 1.0 and server.requests[0]["max_tokens"] == 50


def test_a_request_that_fails_costs_its_own_sample_and_says_why(server):
    texts = ["bad request", "no logprobs", "undecided", "fine", "sleep"]
    bad, lacks, undecided, fine, late = scores_of(server, texts, workers=5, timeout_s=4)
    assert bad.error.startswith("http: status 400") and "no such model" in bad.error
    assert lacks.error.startswith("http: ") and "the server must return log-probs" in lacks.error
    assert undecided.error.startswith("verdict: ") and not fine.error
    assert late.error.startswith("timeout after 4 s: ")


def test_a_rubric_that_a_row_does_not_suit_costs_that_row(server, tmp_path):
    path = tmp_path / "divides.jinja"
    path.write_text("{{ response }} {{ 1 / (response | int) }}")
    bad, fine = scores_of(server, ["0", "4"], rubric=str(path))
    assert bad.error.startswith("rubric: --reward.rubric: ZeroDivisionError") and not fine.error


def test_a_key_that_is_not_there_is_refused_at_the_start(server, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ValueError, match="--reward.api_key_env JUDGE_KEY: is not set"):
        scores_of(server, [], api_key_env="JUDGE_KEY")

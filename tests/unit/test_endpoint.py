"""The endpoint of harnesses, over loopback HTTP; the policy is a fake."""

import asyncio
import json
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rlcore.envs.chat_api import ApiError, ChatAnswer, ChatCall, TokenLogProb, TurnSampling
from rlcore.envs.endpoint import Endpoint, EndpointServer, _BoundedProtocol
from tests.endpoints import HELLO, WAIT_S, Played, Served, serve, wait_until

CALLS = (ChatCall("call_0", "weather", '{"city":"Oslo"}'), ChatCall("call_1", "now", "{}"))
ANSWER = ChatAnswer(
    content="Let me look.",
    reasoning="I need a tool.",
    calls=CALLS,
    finish="tool_calls",
    prompt_tokens=11,
    completion_tokens=7,
    cached_tokens=5,
    logprobs=(TokenLogProb("Let", -0.5, [76, 101, 116]),),
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
USAGE = {
    "prompt_tokens": 11,
    "completion_tokens": 7,
    "total_tokens": 18,
    "prompt_tokens_details": {"cached_tokens": 5},
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve() as found:
        yield found


@pytest.fixture
def id(request: pytest.FixtureRequest) -> str:
    """An episode's name of its own: the server is shared."""
    return "t." + re.sub(r"\W", "_", request.node.name)


def events_of(text: str) -> list[Any]:
    """Return the data of a stream's events."""
    skipped = ":", "event: error"
    lines = [line for line in text.split("\n") if line and not line.startswith(skipped)]
    assert all(line.startswith("data: ") for line in lines)
    return [
        line[6:] if line == "data: [DONE]" else json.loads(line.removeprefix("data: "))
        for line in lines
    ]


# ---- answers


def test_a_turn_is_answered_in_openais_form(served: Served, id: str) -> None:
    episode = Played(ANSWER)
    reply = served.chat(served.open(id, episode), tools=[TOOL], logprobs=True)
    assert reply.status_code == 200
    body = reply.json()
    assert body["object"] == "chat.completion" and body["model"] == "rlcore"
    assert body["usage"] == USAGE
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "Let me look.",
        "reasoning_content": "I need a tool.",
        "tool_calls": [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in CALLS
        ],
    }
    assert choice["logprobs"] == {
        "content": [{"token": "Let", "logprob": -0.5, "bytes": [76, 101, 116], "top_logprobs": []}]
    }
    (turn,) = episode.turns
    assert turn.messages == HELLO["messages"] and turn.tools == [TOOL]
    assert turn.sampling == TurnSampling(logprobs=True)


def test_a_stream_has_the_same_answer_in_events(served: Served, id: str) -> None:
    long = "x" * 5000
    episode = Played(
        ChatAnswer(
            content=long,
            reasoning="hm",
            calls=(ChatCall("call_0", "f", long), CALLS[1]),
            finish="tool_calls",
            prompt_tokens=11,
            completion_tokens=7,
            cached_tokens=5,
        )
    )
    key = served.open(id, episode)
    reply = served.chat(key, stream=True, stream_options={"include_usage": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    *events, last, done = events_of(reply.text)
    assert done == "[DONE]"
    assert last["choices"] == [] and last["usage"] == USAGE
    assert len({e["id"] for e in events}) == 1
    deltas = [e["choices"][0]["delta"] for e in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "hm"
    assert "".join(d.get("content", "") for d in deltas) == long
    calls = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
    assert [c["index"] for c in calls] == [0, 0, 1]
    assert (calls[0]["id"], calls[2]["id"]) == ("call_0", "call_1")
    assert "id" not in calls[1]
    assert "".join(c["function"]["arguments"] for c in calls[:2]) == long
    finishes = [e["choices"][0]["finish_reason"] for e in events]
    assert finishes == [None] * (len(events) - 1) + ["tool_calls"]
    assert max(len(line) for line in reply.text.split("\n")) < 4500
    without = events_of(served.chat(key, stream=True).text)
    assert without[-1] == "[DONE]" and all(e["choices"] for e in without[:-1])


def test_an_answer_of_calls_alone_has_no_content(served: Served, id: str) -> None:
    key = served.open(id, Played(ChatAnswer(calls=CALLS[:1], finish="tool_calls")))
    assert served.chat(key).json()["choices"][0]["message"]["content"] is None
    other = served.open(id + "2", Played(ChatAnswer()))
    assert served.chat(other).json()["choices"][0]["message"]["content"] == ""


def test_a_stream_has_comments_until_its_turn_is_sampled() -> None:
    with serve(comment_s=0.01) as served:
        episode = Played()
        key = served.open("t1.0", episode)
        body = HELLO | {"stream": True}
        with served.client.stream("POST", "/v1/chat/completions", json=body, headers=key) as reply:
            lines = reply.iter_lines()
            for _ in range(3):
                assert next(lines) == ": the turn is sampled" and next(lines) == ""
            episode.release(ChatAnswer(content="hi"))
            text = "\n".join(lines)
        first, second, *_, done = events_of(text)
        assert second["choices"][0]["delta"] == {"content": "hi"} and done == "[DONE]"


def test_text_completions_take_a_text_or_token_ids(served: Served, id: str) -> None:
    episode = Played(ANSWER)
    key = served.open(id, episode)

    def ask(**fields: Any) -> httpx.Response:
        return served.client.post("/v1/completions", json=fields, headers=key)

    body = ask(prompt="Once", max_tokens=3, stop="\n", logprobs=1).json()
    assert body["object"] == "text_completion" and body["usage"] == USAGE
    (choice,) = body["choices"]
    assert choice["text"] == "Let me look." and choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"] == ["Let"]
    assert choice["logprobs"]["token_logprobs"] == [-0.5]
    assert episode.turns[0].prompt == "Once"
    wanted = TurnSampling(max_tokens=3, stop_texts=("\n",), logprobs=True)
    assert episode.turns[0].sampling == wanted
    assert "token_ids" not in choice
    ask(prompt=[5, 6])
    ask(prompt=["Once"], return_token_ids=True)
    assert [t.sampling.token_ids for t in episode.turns] == [False, False, True]
    assert [t.prompt for t in episode.turns[1:]] == [(5, 6), "Once"]
    *events, done = events_of(ask(prompt="Once", stream=True).text)
    assert "".join(e["choices"][0]["text"] for e in events) == "Let me look."
    assert events[-1]["choices"][0]["finish_reason"] == "stop" and done == "[DONE]"
    assert ask(prompt=["a", "b"]).status_code == 400
    assert ask(prompt=[1, "b"]).status_code == 400
    assert ask(prompt=[]).status_code == 400


# ---- requests


def test_messages_are_brought_to_one_form(served: Served, id: str) -> None:
    episode = Played(ChatAnswer())
    parts = [{"type": "text", "text": text} for text in ("Be ", "brief.")]
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": parts},
        {"role": "user", "content": "hello", "name": "ann", "unknown": 1},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "reasoning": "hm",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "12:00"},
    ]
    assert served.chat(served.open(id, episode), messages=messages).status_code == 200
    assert episode.turns[0].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello", "name": "ann"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": messages[2]["tool_calls"],
        },
        {"role": "tool", "content": "12:00", "tool_call_id": "c"},
    ]


@pytest.mark.parametrize("allowed", [False, True])
def test_the_runs_own_sampling_holds_unless_harnesses_may_set_it(allowed: bool) -> None:
    with serve(allow_sampling=allowed) as served:
        episode = Played(ChatAnswer())
        key = served.open("t1.0", episode)
        asked = {"temperature": 0.0, "top_p": 0.5, "max_tokens": 9, "stop": ["a", "", "b"]}
        assert served.chat(key, **asked, max_completion_tokens=8).status_code == 200
        assert episode.turns[0].sampling == TurnSampling(
            max_tokens=8,
            stop_texts=("a", "b"),
            temperature=0.0 if allowed else None,
            top_p=0.5 if allowed else None,
        )


def test_tools_are_not_shown_if_the_choice_is_none(served: Served, id: str) -> None:
    episode = Played(ChatAnswer())
    key = served.open(id, episode)
    served.chat(key, tools=[TOOL], tool_choice="none")
    served.chat(key, tools=[TOOL], tool_choice="auto")
    assert [t.tools for t in episode.turns] == [[], [TOOL]]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"n": 2}, "n 2: a turn has one answer; must be 1"),
        ({"max_tokens": 0}, "max_tokens 0: must be at least 1"),
        ({"max_completion_tokens": -1}, "max_completion_tokens -1: must be at least 1"),
        ({"logit_bias": {"5": 1}}, "logit_bias ...: not supported; leave it out"),
        ({"frequency_penalty": 0.5}, "frequency_penalty 0.5: not supported; must be 0"),
        ({"presence_penalty": 1}, "presence_penalty 1.0: not supported; must be 0"),
        ({"temperature": 3}, "temperature 3.0: must be from 0 to 2"),
        ({"top_p": 0}, "top_p 0.0: must be above 0 and at most 1"),
        ({"top_logprobs": 2}, "top_logprobs 2: only sampled tokens have log-probs; use 0"),
        (
            {"tool_choice": "required"},
            "tool_choice required: calls cannot be forced; must be auto or none",
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice of a function: calls cannot be forced; must be auto or none",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format json_schema: the output is not constrained; leave it out",
        ),
        ({"functions": [{}]}, "functions ...: use tools and tool_choice"),
        ({"modalities": ["audio"]}, "modalities ['audio']: must be ['text']"),
        ({"messages": []}, "messages []: give at least one message"),
        (
            {"messages": [{"role": "user"}] * 10_001},
            "messages with 10001 messages: must be at most 10000",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content with a part image_url: must be text",
        ),
        ({"tools": [{"function": {}}]}, "tools[0].function without a name"),
        ({"temperature": "hot"}, "the body does not fit: Expected `float | null`, got `str`"),
        ({"messages": [{"role": "function", "content": ""}]}, "Invalid enum value 'function'"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_in_a_sentence(
    served: Served, id: str, fields: dict[str, Any], sentence: str
) -> None:
    episode = Played(ChatAnswer())
    reply = served.chat(served.open(id, episode), **fields)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["message"].startswith(sentence) or sentence in error["message"]
    assert error["type"] == "invalid_request_error"
    assert not episode.turns


def test_neutral_and_unknown_fields_change_nothing(served: Served, id: str) -> None:
    episode = Played(ChatAnswer())
    fields = {
        "n": 1,
        "user": "me",
        "seed": 3,
        "store": False,
        "logit_bias": {},
        "frequency_penalty": 0,
        "response_format": {"type": "text"},
        "tool_choice": None,
        "tools": None,
        "parallel_tool_calls": False,
        "stream": False,
        "stop": None,
        "top_logprobs": 0,
        "something_new": {"a": [1]},
    }
    assert served.chat(served.open(id, episode), **fields).status_code == 200
    assert episode.turns[0].sampling == TurnSampling()


# ---- keys


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer EMPTY"},
        {"authorization": "Basic KEY"},
        {"authorization": "Bearer KEYx"},
        {"authorization": "Bearer OTHER_SECRET"},
        {"authorization": "Bearer \xff\xfe"},
        {"authorization": "Bearer rlcore--"},
    ],
)
def test_without_the_key_nothing_is_answered(
    served: Served, id: str, headers: dict[str, str]
) -> None:
    episode = Played(ChatAnswer())
    key = served.endpoint.open(id, episode.complete)
    values = {"KEY": key, "OTHER_SECRET": f"{key.rpartition('-')[0]}-{'0' * 32}"}
    for name, value in values.items():
        headers = {k: v.replace(name, value) for k, v in headers.items()}
    raw = {k: v.encode("latin-1") for k, v in headers.items()}
    for method, path in [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("POST", f"/v1/episodes/{id}/score"),
        ("POST", "/k/x/v1/chat/completions"),
    ]:
        reply = served.client.request(method, path, headers=raw, content=b"{}")
        assert reply.status_code == 401, path
        error = reply.json()["error"]
        assert error["code"] == "invalid_api_key" and error["type"] == "authentication_error"
    assert not episode.turns


def test_a_key_is_an_api_key_or_a_part_of_the_path(served: Served, id: str) -> None:
    episode = Played(ChatAnswer())
    key = served.endpoint.open(id, episode.complete)
    for path, headers in [
        ("/v1/chat/completions", {"authorization": f"Bearer {key}"}),
        ("/v1/chat/completions", {"authorization": f"bearer {key}"}),
        (f"/k/{key}/v1/chat/completions", {"authorization": "Bearer EMPTY"}),
    ]:
        assert served.client.post(path, json=HELLO, headers=headers).status_code == 200
    assert len(episode.turns) == 3


def test_each_key_reaches_its_own_episode(served: Served, id: str) -> None:
    one, two = Played(ChatAnswer(content="one")), Played(ChatAnswer(content="two"))
    keys = served.open(id + ".0", one), served.open(id + ".1", two)
    told = [served.chat(key).json()["choices"][0]["message"]["content"] for key in keys]
    assert told == ["one", "two"] and len(one.turns) == len(two.turns) == 1


def test_an_episode_that_is_over_answers_no_more(served: Served, id: str) -> None:
    episode = Played(ChatAnswer())
    key = served.open(id, episode)
    served.endpoint.close(id)
    served.endpoint.close(id)
    reply = served.chat(key)
    assert reply.status_code == 410 and not episode.turns
    assert reply.json()["error"]["message"] == f"episode {id} is over"
    again = served.open(id, episode)
    assert served.chat(key).status_code == 410, "an old key is none of the next attempt"
    assert served.chat(again).status_code == 200
    with pytest.raises(ValueError, match="is already served"):
        served.endpoint.open(id, episode.complete)


def test_health_needs_no_key_and_models_name_one(served: Served, id: str) -> None:
    assert served.client.get("/health").json() == {"status": "ok"}
    reply = served.client.get("/v1/models", headers=served.open(id, Played()))
    assert [m["id"] for m in reply.json()["data"]] == ["rlcore"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/chat/completions", 405), ("POST", "/v1/embeddings", 404), ("GET", "/docs", 404)],
)
def test_other_paths_are_refused_in_openais_form(
    served: Served, method: str, path: str, status: int
) -> None:
    reply = served.client.request(method, path)
    assert reply.status_code == status and reply.json()["error"]["code"] == "unknown_url"


# ---- scores


def test_a_score_is_posted_once_and_for_the_episode_of_the_key(served: Served, id: str) -> None:
    key = served.open(id, Played())

    def post(body: bytes, to: str = id) -> int:
        return served.client.post(f"/v1/episodes/{to}/score", content=body, headers=key).status_code

    assert post(b"0.5", id + "x") == 403
    assert post(b"NaN") == post(b"") == post(b'{"numbers":{}}') == post(b'"good"') == 400
    assert post(b"1e31") == 400 and post(b" " * 70_000) == 413
    assert served.endpoint.score(id) is None
    assert post(b'{"score": 0.5, "numbers": {"tests passed": 3}}') == 200
    assert post(b"1") == 409
    assert served.endpoint.score(id) == (0.5, {"tests_passed": 3.0})
    served.endpoint.close(id)
    assert post(b"1") == 410 and served.endpoint.score(id) is None


# ---- hostile clients


def test_a_body_of_ten_megabytes_is_a_turn(served: Served, id: str) -> None:
    episode = Played(ChatAnswer())
    text = "a" * (10 << 20)
    reply = served.chat(served.open(id, episode), messages=[{"role": "user", "content": text}])
    assert reply.status_code == 200 and episode.turns[0].messages[0]["content"] == text


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_larger_body_than_allowed_is_refused(is_chunked: bool) -> None:
    with serve(max_body_bytes=1000) as served:
        episode = Played(ChatAnswer())
        key = served.open("t1.0", episode)
        body = json.dumps(HELLO).encode()
        for size, status in ((1000, 200), (1001, 413), (3 << 20, 413)):
            data = body + b" " * (size - len(body))
            content = (data[i : i + 500] for i in range(0, size, 500)) if is_chunked else data
            reply = served.client.post("/v1/chat/completions", content=content, headers=key)
            assert reply.status_code == status, size
        assert reply.json()["error"]["message"] == "the body is larger than 1000 bytes"
        with dial(served.server) as client:  # one that says so is refused before it sends it
            client.sendall(request_of(key, b"", length=1001))
            assert client.recv(100).startswith(b"HTTP/1.1 413")
        assert len(episode.turns) == 1


def test_a_body_that_stops_in_the_middle_is_given_up() -> None:
    with serve(body_timeout_s=0.05) as served:
        key = served.open("t1.0", Played(ChatAnswer()))
        with dial(served.server) as client:
            client.sendall(request_of(key, b'{"messages"', length=100))
            assert client.recv(100).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": ' + b"[" * 200_000,
        b'{"other": ' + b"[" * 200_000,
        b'{"tools": [{"function": {"name": ' + b'{"a":' * 200_000,
        b'{"max_tokens": ' + b"9" * 5000 + b', "messages": []}',
        b"\x00\x01\x02",
    ],
    ids=range(11),
)
def test_a_body_that_is_no_request_is_refused(served: Served, id: str, body: bytes) -> None:
    episode = Played(ChatAnswer())
    key = served.open(id, episode)
    reply = served.client.post("/v1/chat/completions", content=body, headers=key)
    assert reply.status_code == 400 and "the body" in reply.json()["error"]["message"]
    assert not episode.turns and served.chat(key).status_code == 200


def dial(server: EndpointServer) -> socket.socket:
    return socket.create_connection((server.host, server.port), WAIT_S)


def request_of(key: dict[str, str], body: bytes, length: int | None = None) -> bytes:
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n"
        f"authorization: {key['authorization']}\r\n"
        f"content-length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_whose_client_disconnects_is_cancelled(stream: bool) -> None:
    with serve(comment_s=0.01) as served:
        episode = Played()
        key = served.open("t1.0", episode)
        with dial(served.server) as client:
            client.sendall(request_of(key, json.dumps(HELLO | {"stream": stream}).encode()))
            assert episode.begun.acquire(timeout=WAIT_S)
            if stream:
                client.recv(10)  # in the middle of the stream
            assert not episode.cancelled.acquire(blocking=False)
        assert episode.cancelled.acquire(timeout=WAIT_S)
        other = served.open("t1.1", Played(ChatAnswer(content="fine")))
        assert served.chat(other).status_code == 200


def test_bytes_that_are_no_http_end_their_connection_alone(served: Served, id: str) -> None:
    with dial(served.server) as client:
        client.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 400")
    assert served.chat(served.open(id, Played(ChatAnswer()))).status_code == 200


@pytest.mark.parametrize("comment_s", [0.01, 60.0])
@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_that_takes_too_long_is_cancelled(stream: bool, comment_s: float) -> None:
    with serve(turn_timeout_s=0.05, comment_s=comment_s) as served:
        episode = Played()
        reply = served.chat(served.open("t1.0", episode), stream=stream)
        if stream and reply.status_code == 200:
            (error,) = events_of(reply.text)
        else:
            assert reply.status_code == 504
            error = reply.json()
        assert error["error"]["message"] == "the turn was not sampled within 0.05 s"
        assert error["error"]["type"] == "server_error"
        assert episode.cancelled.acquire(timeout=WAIT_S)


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_in_progress_ends_with_its_episode(stream: bool) -> None:
    with serve(comment_s=0.01) as served:
        episode = Played()
        key = served.open("t1.0", episode)
        replies: list[httpx.Response] = []
        client = threading.Thread(target=lambda: replies.append(served.chat(key, stream=stream)))
        client.start()
        assert episode.begun.acquire(timeout=WAIT_S)
        served.endpoint.close("t1.0")
        client.join(WAIT_S)
        (reply,) = replies
        error = events_of(reply.text)[0] if reply.status_code == 200 else reply.json()
        assert error["error"]["message"] == "episode t1.0 is over"
        assert reply.status_code in ((200, 410) if stream else (410,))
        assert episode.cancelled.acquire(timeout=WAIT_S)


def test_an_episode_has_few_requests_at_a_time_and_others_are_not_held_up() -> None:
    with serve(max_parallel_requests=2) as served:
        episode = Played()
        key = served.open("t1.0", episode)
        clients = [threading.Thread(target=served.chat, args=(key,)) for _ in range(2)]
        for client in clients:
            client.start()
            assert episode.begun.acquire(timeout=WAIT_S)
        reply = served.chat(key)
        assert reply.status_code == 429
        assert reply.json()["error"]["type"] == "rate_limit_error"
        other = Played(ChatAnswer())
        assert served.chat(served.open("t1.1", other)).status_code == 200
        episode.release(ChatAnswer())
        for client in clients:
            client.join(WAIT_S)
        assert served.chat(key).status_code == 200


def test_requests_are_counted_before_their_bodies_are_in_memory() -> None:
    with serve(max_parallel_requests=1) as served:
        episode = Played(ChatAnswer())
        key = served.open("t1.0", episode)
        body = json.dumps(HELLO).encode()
        with dial(served.server) as slow:
            slow.sendall(request_of(key, body[:5], length=len(body)))
            wait_until(lambda: served.chat(key).status_code == 429)
            slow.sendall(body[5:])
            assert slow.recv(100).startswith(b"HTTP/1.1 200")
        assert served.chat(key).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_ended_are_counted_no_more(stream: bool) -> None:
    with serve(max_parallel_requests=1, comment_s=0.01) as served:
        episode = Played()
        key = served.open("t1.0", episode)
        body = json.dumps(HELLO | {"stream": stream}).encode()
        with dial(served.server) as client:
            client.sendall(request_of(key, body))
            assert episode.begun.acquire(timeout=WAIT_S)
            if stream:
                client.recv(10)  # the stream has begun
            assert served.chat(key).status_code == 429
        assert episode.cancelled.acquire(timeout=WAIT_S)
        assert served.chat(key, n=2).status_code == 400
        episode.release(ApiError(400, "full"))
        assert served.chat(key).status_code == 400
        episode.release(ChatAnswer())
        assert served.chat(key, stream=stream).status_code == 200
        wait_until(lambda: served.endpoint.counts["cancelled"] == 1)


@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_a_turn_reach_its_client_alone(served: Served, id: str, stream: bool) -> None:
    full = ApiError(400, "the context is used up", code="context_length_exceeded")
    reply = served.chat(served.open(id, Played(full)), stream=stream)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    secret = served.chat(served.open(id + "2", Played(ValueError("a secret"))), stream=stream)
    assert secret.status_code == 500 and "secret" not in secret.text
    dropped = served.chat(served.open(id + "3", Played(asyncio.CancelledError())), stream=stream)
    assert dropped.status_code == 503
    assert served.chat(served.open(id + "4", Played(ChatAnswer()))).status_code == 200


def test_idle_connections_beyond_the_limit_are_closed_and_busy_ones_are_not() -> None:
    with serve(max_connections=3) as served:
        episode = Played()
        key = served.open("t1.0", episode)
        with dial(served.server) as busy:
            busy.sendall(request_of(key, json.dumps(HELLO).encode()))
            assert episode.begun.acquire(timeout=WAIT_S)
            idle = [dial(served.server) for _ in range(20)]
            for client in idle[:-2]:  # the last two are within the limit
                with pytest.raises(ConnectionResetError):
                    assert not client.recv(1)
                    raise ConnectionResetError  # closed without a reset
            episode.release(ChatAnswer())
            assert busy.recv(100).startswith(b"HTTP/1.1 200")
            for client in idle:
                client.close()


# ---- many, and the end


def test_256_episodes_at_a_time_get_their_own_answers(served: Served, id: str) -> None:
    async def play(name: str) -> None:
        key = {"authorization": f"Bearer {served.endpoint.open(name, echo)}"}
        for turn in range(3):
            content = f"{name} turn {turn}."
            body = HELLO | {"messages": [{"role": "user", "content": content}]}
            body["stream"] = bool(turn % 2)
            data = request_of(key, json.dumps(body).encode()).replace(
                b"\r\n", b"\r\nconnection: close\r\n", 1
            )
            reader, writer = await asyncio.open_connection(served.server.host, served.server.port)
            writer.write(data)
            reply = await reader.read()
            writer.close()
            assert reply.startswith(b"HTTP/1.1 200") and f"echo {content}".encode() in reply

    async def echo(turn: Any) -> ChatAnswer:
        if turn.messages[0]["content"].endswith(" turn 0."):
            arrived.append(turn)
            while len(arrived) < 256:  # all of them are here before one is answered
                await asyncio.sleep(0.01)
        return ChatAnswer(content="echo " + turn.messages[0]["content"])

    async def play_all() -> None:
        await asyncio.gather(*(play(f"{id}.{i}") for i in range(256)))

    arrived: list[Any] = []
    asyncio.run(play_all())


def test_a_server_ends_with_turns_in_progress() -> None:
    endpoint = Endpoint()
    server = EndpointServer(endpoint)
    assert server.host == "127.0.0.1" and server.base_url == f"http://127.0.0.1:{server.port}/v1"
    episode = Played()
    key = {"authorization": f"Bearer {endpoint.open('t1.0', episode.complete)}"}
    with dial(server) as client, dial(server):
        client.sendall(request_of(key, json.dumps(HELLO).encode()))
        assert episode.begun.acquire(timeout=WAIT_S)
        server.close(WAIT_S)
        assert client.recv(100).startswith(b"HTTP/1.1 410")
    server.close()
    assert episode.cancelled.acquire(timeout=WAIT_S)
    assert not any(t.name == "endpoint" and t is server._thread for t in threading.enumerate())
    with pytest.raises(ConnectionRefusedError):
        dial(server)


@pytest.mark.parametrize(
    ("host", "public", "shown"),
    [
        ("127.0.0.1", "", "127.0.0.1"),
        ("0.0.0.0", "", socket.gethostname()),
        ("0.0.0.0", "gateway", "gateway"),
        ("127.0.0.1", "2001:db8::1", "[2001:db8::1]"),
    ],
)
def test_urls_name_a_host_that_others_can_reach(host: str, public: str, shown: str) -> None:
    server = EndpointServer(Endpoint(), host, public_host=public)
    try:
        assert server.base_url == f"http://{shown}:{server.port}/v1"
        socket.create_connection(("127.0.0.1", server.port), WAIT_S).close()
    finally:
        server.close(WAIT_S)


def test_answers_do_not_wait_for_acknowledgements(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    connect = _BoundedProtocol.connection_made

    def note(self: Any, transport: Any) -> None:
        made.append(transport.get_extra_info("socket"))
        connect(self, transport)

    monkeypatch.setattr(_BoundedProtocol, "connection_made", note)
    with serve() as served:
        assert served.client.get("/health").status_code == 200
        assert made[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_port_in_use_is_an_error_at_the_start(served: Served) -> None:
    with pytest.raises(OSError, match="in use"):
        EndpointServer(Endpoint(), port=served.server.port)


def test_keys_of_the_last_ended_episodes_are_kept_and_no_more(monkeypatch: Any) -> None:
    monkeypatch.setattr("rlcore.envs.endpoint._MOST_CLOSED", 2)
    with serve() as served:
        keys = [served.open(f"t1.{i}", Played()) for i in range(3)]
        for i in range(3):
            served.endpoint.close(f"t1.{i}")
        assert [served.chat(key).status_code for key in keys] == [401, 410, 410]


def test_counts_name_turns_and_errors() -> None:
    with serve() as served:
        key = served.open("t1.0", Played(ChatAnswer()))
        for fields in ({}, {"stream": True}, {"n": 2}):
            served.chat(key, **fields)
        served.chat({})
        wait_until(lambda: served.endpoint.counts["error_401"] == 1)
        assert served.endpoint.counts == {"turns": 2, "error_400": 1, "error_401": 1}

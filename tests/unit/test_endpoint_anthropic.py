"""Anthropic's own client against the endpoint."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from rlcore.envs.chat_api import ApiError, ChatAnswer, ChatCall, TurnSampling
from tests.endpoints import WAIT_S, Played, Served, serve

anthropic = pytest.importorskip("anthropic", reason="no package anthropic: tools/setup.sh --test")

ANSWER = ChatAnswer(
    content="Let me look.",
    reasoning="Hm. " * 2000,
    calls=(ChatCall("call_0", "weather", '{"city":"Oslo"}'), ChatCall("call_1", "now", "{}")),
    finish="tool_calls",
    prompt_tokens=11,
    completion_tokens=7,
    cached_tokens=5,
)
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Weather in Oslo?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"name": "weather", "description": "Say it.", "input_schema": SCHEMA}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve() as found:
        yield found


def client_of(served: Served, key: str) -> Any:
    url = served.server.root_url
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=WAIT_S)


def check(reply: Any) -> None:
    thought, said, first, second = reply.content
    assert (thought.type, thought.thinking) == ("thinking", ANSWER.reasoning)
    assert (said.type, said.text) == ("text", "Let me look.")
    assert (first.type, first.id, first.name, first.input) == (
        *("tool_use", "call_0", "weather"),
        {"city": "Oslo"},
    )
    assert second.input == {} and reply.stop_reason == "tool_use"
    usage = reply.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (6, 5, 7)


def test_a_turn_with_tools_and_its_results(served: Served) -> None:
    episode = Played(ANSWER)
    client = client_of(served, served.endpoint.open("t1.0", episode.complete))
    common = {"model": "any", "max_tokens": 9, "system": "Be brief.", "tools": TOOLS}
    reply = client.messages.create(messages=ASKED, stop_sequences=["\n\n"], **common)
    check(reply)
    results = [
        {"type": "text", "text": "Here:"},
        {"type": "tool_result", "tool_use_id": "call_0", "content": "rain"},
        {
            "type": "tool_result",
            "tool_use_id": "call_1",
            "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "on"}],
        },
        {"type": "text", "text": "Go "},
        {"type": "text", "text": "on."},
    ]
    answer = {"role": "assistant", "content": [block.to_dict() for block in reply.content]}
    client.messages.create(
        messages=[*ASKED, answer, {"role": "user", "content": results}], **common
    )
    first, second = episode.turns
    assert first.sampling == TurnSampling(max_tokens=9, stop_texts=("\n\n",))
    function = {"name": "weather", "description": "Say it.", "parameters": SCHEMA}
    assert first.tools == [{"type": "function", "function": function}]
    calls = [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for c in ANSWER.calls
    ]
    assert second.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Oslo?"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": ANSWER.reasoning,
            "tool_calls": calls,
        },
        {"role": "user", "content": "Here:"},
        {"role": "tool", "tool_call_id": "call_0", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
        {"role": "user", "content": "Go on."},
    ]


def test_a_streamed_turn(served: Served) -> None:
    client = client_of(served, served.endpoint.open("t2.0", Played(ANSWER).complete))
    system = [{"type": "text", "text": "Be brief."}]
    with client.messages.stream(
        model="any", max_tokens=9, messages=ASKED, tools=TOOLS, system=system
    ) as stream:
        kinds = [event.type for event in stream]
        check(stream.get_final_message())
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"


@pytest.mark.parametrize(("finish", "reason"), [("stop", "end_turn"), ("length", "max_tokens")])
def test_how_a_turn_ended(served: Served, finish: Any, reason: str) -> None:
    key = served.endpoint.open(f"t3.{finish}", Played(ChatAnswer(finish=finish)).complete)
    reply = client_of(served, key).messages.create(model="any", max_tokens=9, messages=ASKED)
    assert reply.stop_reason == reason and reply.content == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice any: calls cannot be forced"),
        ({"extra_body": {"temperature": 3.0}}, "temperature 3.0: must be from 0 to 2"),
        ({"tools": [{"type": "web_search_1", "name": "w"}]}, r"tools\[0\] w: has no input_schema"),
        ({"messages": []}, "messages .*: give at least one message"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            r"messages\[0\].content with a block image: must be text",
        ),
        ({"messages": [{"role": "tool", "content": ""}]}, "the body does not fit"),
    ],
    ids=["forced", "hot", "server tool", "empty", "image", "role"],
)
def test_what_is_not_served_is_named(served: Served, fields: Any, words: str) -> None:
    id = "t4." + "".join(fields) + words[:12]
    client = client_of(served, served.endpoint.open(id, Played(ANSWER).complete))
    with pytest.raises(anthropic.BadRequestError, match=words):
        client.messages.create(**{"model": "any", "max_tokens": 9, "messages": ASKED} | fields)


def test_keys_and_missing_fields(served: Served) -> None:
    key = served.endpoint.open("t5.0", Played(ANSWER).complete)

    def status(headers: dict[str, str], **fields: Any) -> Any:
        return served.client.post(
            "/v1/messages", json={"messages": ASKED, **fields}, headers=headers
        )

    assert status({"x-api-key": key}, max_tokens=9).json()["type"] == "message"
    wrong = status({"x-api-key": "wrong"}, max_tokens=9)
    assert wrong.status_code == 401
    error = wrong.json()
    assert error["type"] == "error" and error["error"]["type"] == "authentication_error"
    assert "max_tokens: is missing" in status({"x-api-key": key}).text


def test_a_stream_that_fails_in_its_middle_is_an_error() -> None:
    with serve(comment_s=0.01) as served:
        episode = Played()
        client = client_of(served, served.endpoint.open("t1.0", episode.complete))
        stream = client.messages.create(model="any", max_tokens=9, messages=ASKED, stream=True)
        episode.release(ApiError(400, "the context is used up"))
        with pytest.raises(anthropic.APIStatusError, match="the context is used up"):
            list(stream)


def test_calls_keep_their_values(served: Served) -> None:
    value = {"a": [1.5, None, "\u4eac\n"], "b": {"c": True}}
    answer = ChatAnswer(calls=(ChatCall("c", "f", json.dumps(value)),), finish="tool_calls")
    client = client_of(served, served.endpoint.open("t6.0", Played(answer).complete))
    with client.messages.stream(model="any", max_tokens=9, messages=ASKED) as stream:
        assert stream.get_final_message().content[0].input == value

"""OpenAI's own client against the endpoint. SGLang brings the package, so CI has it."""

import threading
from collections.abc import Iterator

import pytest

from rlcore.envs.chat_api import ApiError, ChatAnswer, ChatCall, TokenLogProb
from tests.endpoints import WAIT_S, Played, Served, serve

openai = pytest.importorskip("openai", reason="no package openai: bash tools/setup.sh --openai")

ANSWER = ChatAnswer(
    content="Let me look.",
    calls=(ChatCall("call_0", "weather", '{"city":"Oslo"}'), ChatCall("call_1", "now", "{}")),
    finish="tool_calls",
    prompt_tokens=11,
    completion_tokens=7,
    cached_tokens=5,
    logprobs=(TokenLogProb("Let", -0.5, [76, 101, 116]),),
)
ASKED = [{"role": "user", "content": "Weather in Oslo?"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve() as found:
        yield found


def client_of(served: Served, key: str, **options):
    options = {"max_retries": 0, "timeout": WAIT_S} | options
    return openai.OpenAI(base_url=served.server.base_url, api_key=key, **options)


def test_a_turn_with_tools(served: Served) -> None:
    episode = Played(ANSWER)
    client = client_of(served, served.endpoint.open("t1.0", episode.complete))
    reply = client.chat.completions.create(
        model="any", messages=ASKED, tools=TOOLS, tool_choice="auto", logprobs=True
    )
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
    calls = [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls]
    assert calls == [(c.id, c.name, c.arguments) for c in ANSWER.calls]
    assert choice.logprobs.content[0].logprob == -0.5
    assert reply.usage.total_tokens == 18 and reply.usage.prompt_tokens_details.cached_tokens == 5
    # The client's message is the next request's, as agents send it.
    said = choice.message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": "call_0", "content": "rain"}
    client.chat.completions.create(model="any", messages=[*ASKED, said, result], tools=TOOLS)
    history = episode.turns[1].messages
    assert [m["role"] for m in history] == ["user", "assistant", "tool"]
    assert [c["id"] for c in history[1]["tool_calls"]] == ["call_0", "call_1"]


def test_a_streamed_turn_with_tools(served: Served) -> None:
    client = client_of(served, served.endpoint.open("t2.0", Played(ANSWER).complete))
    with client.chat.completions.stream(
        model="any", messages=ASKED, tools=TOOLS, stream_options={"include_usage": True}
    ) as stream:
        reply = stream.get_final_completion()
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
    calls = [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls]
    assert calls == [(c.id, c.name, c.arguments) for c in ANSWER.calls]
    assert reply.usage.total_tokens == 18


def test_a_streamed_turn_whose_client_waits() -> None:
    with serve(comment_s=0.01) as served:
        episode = Played()
        client = client_of(served, served.endpoint.open("t1.0", episode.complete))
        stream = client.chat.completions.create(model="any", messages=ASKED, stream=True)
        threading.Timer(0.05, episode.release, (ChatAnswer(content="rain"),)).start()
        assert "".join(c.choices[0].delta.content or "" for c in stream) == "rain"


def test_a_stream_that_fails_in_its_middle_is_an_error() -> None:
    with serve(comment_s=0.01) as served:
        episode = Played()
        client = client_of(served, served.endpoint.open("t1.0", episode.complete))
        stream = client.chat.completions.create(model="any", messages=ASKED, stream=True)
        episode.release(ApiError(400, "the context is used up"))
        with pytest.raises(openai.APIError, match="the context is used up"):
            list(stream)


def test_text_completions_and_models(served: Served) -> None:
    client = client_of(served, served.endpoint.open("t3.0", Played(ANSWER).complete))
    reply = client.completions.create(model="any", prompt="Once", logprobs=1)
    assert reply.choices[0].text == "Let me look."
    assert reply.choices[0].logprobs.token_logprobs == [-0.5]
    pieces = client.completions.create(model="any", prompt="Once", stream=True)
    assert "".join(c.choices[0].text for c in pieces) == "Let me look."
    assert [m.id for m in client.models.list()] == ["rlcore"]


def test_errors_are_those_that_the_client_knows(served: Served) -> None:
    key = served.endpoint.open("t4.0", Played(ANSWER).complete)
    client = client_of(served, key)
    with pytest.raises(openai.BadRequestError, match="n 2: a turn has one answer") as caught:
        client.chat.completions.create(model="any", messages=ASKED, n=2)
    assert caught.value.param == "n" and caught.value.code == "unsupported_value"
    with pytest.raises(openai.AuthenticationError, match="OPENAI_API_KEY"):
        client_of(served, "wrong").chat.completions.create(model="any", messages=ASKED)
    served.endpoint.close("t4.0")
    with pytest.raises(openai.APIStatusError, match="episode t4.0 is over") as caught:
        client.chat.completions.create(model="any", messages=ASKED)
    assert caught.value.status_code == 410


def test_no_turn_of_a_client_that_gave_up_goes_on() -> None:
    with serve() as served:
        episode = Played()
        key = served.endpoint.open("t1.0", episode.complete)
        client = client_of(served, key, timeout=0.2, max_retries=1)
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(model="any", messages=ASKED)
        for _ in episode.turns:
            assert episode.cancelled.acquire(timeout=WAIT_S)

"""OpenAI's chat and text completions: JSON of a request to a `TurnRequest`, and a `ChatAnswer` to
JSON or a stream of events.

All functions are pure. A field that OpenAI does not know is ignored. A known one that would change
the answer and that rlcore cannot obey is refused with an `ApiError` that names it.

Own structs instead of the types of the package `openai`: msgspec checks and reads a request in one
pass, and the trainer does not need the client.
"""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NoReturn, TypeVar

import msgspec
from msgspec import Struct

from rlcore.records import Record

FinishReason = Literal["stop", "length", "tool_calls"]
EVENTS = "text/event-stream"
_PIECE_CHARS = 4096
"""Maximum length of a text in one event; some clients limit the length of a line."""
_MOST_MESSAGES = 10_000
"""Maximum number of messages; a body of small ones would take far more memory than its bytes."""
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Error that a client gets, in OpenAI's form, which is also Anthropic's."""

    def __init__(
        self, status: int, sentence: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        """`code`: OpenAI's short name of the error. `param`: the field of the request at fault."""
        super().__init__(sentence)
        self.status, self.sentence, self.code, self.param = status, sentence, code, param

    @property
    def kind(self) -> str:
        """OpenAI's type of the error."""
        return _TYPES.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )

    def body(self) -> bytes:
        """Return the error as JSON."""
        error = {
            "message": self.sentence,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"type": "error", "error": error})


# ---- what an episode gets and returns


class TurnSampling(Struct, frozen=True, kw_only=True):
    """Sampling that a harness asks for; None: it does not say."""

    max_tokens: int | None = None
    stop_texts: tuple[str, ...] = ()
    """Texts that end the turn; they are not part of the answer."""
    temperature: float | None = None
    """None also if the run's own temperature holds, the default."""
    top_p: float | None = None
    """None also if the run's own value holds, the default."""
    logprobs: bool = False
    token_ids: bool = False
    """Whether the answer has its token ids."""


class TurnRequest(Record):
    """One turn that a harness asks for."""

    messages: list[dict[str, Any]] = []
    """Messages in OpenAI's form. `content` is a text or None, `developer` is `system`."""
    tools: list[dict[str, Any]] = []
    """Tools in OpenAI's form; empty with `tool_choice: none`."""
    prompt: str | tuple[int, ...] | None = None
    """Prompt of `/v1/completions`, as text or token ids, instead of messages."""
    sampling: TurnSampling = TurnSampling()


class ChatCall(Struct, frozen=True):
    """A call of a tool; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class TokenLogProb(Struct, frozen=True):
    """A sampled token and its log-prob."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class ChatAnswer(Record):
    """Answer to a `TurnRequest`."""

    content: str = ""
    reasoning: str | None = None
    calls: tuple[ChatCall, ...] = ()
    finish: FinishReason = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Number of prompt tokens that needed no prefill."""
    logprobs: tuple[TokenLogProb, ...] = ()
    """Tokens with log-probs, if the request asks for them."""
    token_ids: tuple[int, ...] = ()
    """Sampled token ids, if the request asks for them."""


# ---- requests


class _Part(Struct):
    type: str
    text: str = ""


class _CalledFunction(Struct):
    name: str
    arguments: str = "{}"


class _MessageCall(Struct):
    function: _CalledFunction
    id: str = ""


class _ChatMessage(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_MessageCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Tool(Struct):
    function: dict[str, Any]
    type: Literal["function"] = "function"


class _StreamOptions(Struct):
    include_usage: bool = False


class CompletionForm(Struct, kw_only=True):
    """Fields that both kinds of completion have."""

    model: str = ""
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    logit_bias: dict[str, Any] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with an event of the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatCompletion(CompletionForm, kw_only=True):
    """Body of `/v1/chat/completions`."""

    messages: list[_ChatMessage]
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None


class TextCompletion(CompletionForm, kw_only=True):
    """Body of `/v1/completions`."""

    prompt: str | list[str | int]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    return_token_ids: bool | None = None
    """Whether the answer has the field `token_ids`, as in vLLM."""


Body = TypeVar("Body", bound=Struct)


def read(body: bytes | bytearray, kind: type[Body]) -> Body:
    """Decode and check a body. Raises ApiError with the place of the error."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"the body does not fit: {error}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


def chat_turn(request: ChatCompletion, allow_sampling: bool) -> TurnRequest:
    """Return the turn that a request asks for. Raises ApiError for what is not supported."""
    _check_common(request)
    if not request.messages:
        _refuse("messages", "[]", "give at least one message")
    if len(request.messages) > _MOST_MESSAGES:
        count = f"with {len(request.messages)} messages"
        _refuse("messages", count, f"must be at most {_MOST_MESSAGES}")
    form = (request.response_format or {}).get("type", "text")
    if form != "text":
        _refuse("response_format", form, "the output is not constrained; leave it out")
    if request.functions or request.function_call not in (None, "none"):
        _refuse("functions", "...", "use tools and tool_choice")
    if request.modalities and request.modalities != ["text"]:
        _refuse("modalities", request.modalities, "must be ['text']")
    if request.top_logprobs:
        _refuse("top_logprobs", request.top_logprobs, "only sampled tokens have log-probs; use 0")
    choice = request.tool_choice
    if choice not in (None, "auto", "none"):
        shown = choice if isinstance(choice, str) else "of a function"
        _refuse("tool_choice", shown, "calls cannot be forced; must be auto or none")
    tools = [] if choice == "none" else request.tools or []
    if request.max_completion_tokens is not None and request.max_completion_tokens < 1:
        _refuse("max_completion_tokens", request.max_completion_tokens, "must be at least 1")
    most = request.max_completion_tokens or request.max_tokens
    return TurnRequest(
        messages=[_message(i, m) for i, m in enumerate(request.messages)],
        tools=[_tool(i, tool) for i, tool in enumerate(tools)],
        sampling=_sampling(request, most, bool(request.logprobs), allow_sampling),
    )


def text_turn(request: TextCompletion, allow_sampling: bool) -> TurnRequest:
    """Return the turn that a request asks for. Raises ApiError for what is not supported."""
    _check_common(request)
    if request.echo or request.suffix or (request.best_of or 1) > 1:
        _refuse("echo, suffix or best_of", "...", "not supported; leave them out")
    if (request.logprobs or 0) > 1:
        _refuse("logprobs", request.logprobs, "only sampled tokens have log-probs; must be 0 or 1")
    prompt: str | tuple[int, ...]
    if isinstance(request.prompt, str):
        prompt = request.prompt
    elif len(request.prompt) == 1 and isinstance(request.prompt[0], str):
        prompt = request.prompt[0]
    else:
        prompt = tuple(i for i in request.prompt if isinstance(i, int))
        if len(prompt) < len(request.prompt) or not prompt:
            _refuse("prompt", "a list", "must be one text or the token ids of one")
    wants_logprobs = request.logprobs is not None
    sampling = _sampling(request, request.max_tokens, wants_logprobs, allow_sampling)
    sampling = msgspec.structs.replace(sampling, token_ids=bool(request.return_token_ids))
    return TurnRequest(prompt=prompt, sampling=sampling)


def _check_common(request: CompletionForm) -> None:
    if request.n not in (None, 1):
        _refuse("n", request.n, "a turn has one answer; must be 1")
    if request.max_tokens is not None and request.max_tokens < 1:
        _refuse("max_tokens", request.max_tokens, "must be at least 1")
    if request.logit_bias:
        _refuse("logit_bias", "...", "not supported; leave it out")
    for name in ("frequency_penalty", "presence_penalty"):
        if getattr(request, name):
            _refuse(name, getattr(request, name), "not supported; must be 0")


def _sampling(
    request: CompletionForm, most: int | None, logprobs: bool, allow_sampling: bool
) -> TurnSampling:
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    temperature, top_p = request.temperature, request.top_p
    if temperature is not None and not 0 <= temperature <= 2:
        _refuse("temperature", temperature, "must be from 0 to 2")
    if top_p is not None and not 0 < top_p <= 1:
        _refuse("top_p", top_p, "must be above 0 and at most 1")
    if not allow_sampling:
        temperature = top_p = None
    return TurnSampling(
        max_tokens=most,
        stop_texts=tuple(text for text in stop if text),
        temperature=temperature,
        top_p=top_p,
        logprobs=logprobs,
    )


def _message(index: int, message: _ChatMessage) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    out: dict[str, Any] = {"role": role, "content": _content(index, message.content)}
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        out["reasoning_content"] = reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        out["name"] = message.name
    return out


def _content(index: int, content: str | list[_Part] | None) -> str | None:
    """Return a message's text; a list of texts is one text, as the template would show it."""
    if not isinstance(content, list):
        return content
    for part in content:
        if part.type != "text":
            _refuse(f"messages[{index}].content", f"with a part {part.type}", "must be text")
    return "".join(part.text for part in content)


def _tool(index: int, tool: _Tool) -> dict[str, Any]:
    if not isinstance(tool.function.get("name"), str):
        _refuse(f"tools[{index}].function", "without a name", "give each function a name")
    return {"type": tool.type, "function": tool.function}


def _refuse(param: str, value: Any, allowed: str) -> NoReturn:
    raise ApiError(400, f"{param} {value}: {allowed}", code="unsupported_value", param=param)


# ---- answers


def chat_body(answer: ChatAnswer, model: str) -> bytes:
    """Return the JSON of an answer to `/v1/chat/completions`."""
    message: dict[str, Any] = {
        "role": "assistant",
        # OpenAI's own answers with calls and no text have no content either.
        "content": None if answer.calls and not answer.content else answer.content,
    }
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [_call(call, call.arguments) for call in answer.calls]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _chat_logprobs(answer),
        "finish_reason": answer.finish,
    }
    head = _head("chat.completion", model)
    return msgspec.json.encode({**head, "choices": [choice], "usage": _usage(answer)})


def chat_events(answer: ChatAnswer, model: str, with_usage: bool) -> bytes:
    """Return the events of an answer to `/v1/chat/completions` with `stream`, `[DONE]` included."""
    head = _head("chat.completion.chunk", model)
    out = [_event({**head, "choices": [_delta({"role": "assistant", "content": ""})]})]
    for piece in pieces(answer.reasoning or ""):
        out.append(_event({**head, "choices": [_delta({"reasoning_content": piece})]}))
    logprobs = _chat_logprobs(answer)
    for piece in pieces(answer.content):
        choice = _delta({"content": piece}) | {"logprobs": logprobs}
        logprobs = None  # only the first piece has those of the turn
        out.append(_event({**head, "choices": [choice]}))
    for index, call in enumerate(answer.calls):
        first, *rest = pieces(call.arguments) or [""]
        deltas = [_call(call, first), *({"function": {"arguments": piece}} for piece in rest)]
        for delta in deltas:
            choice = _delta({"tool_calls": [{"index": index, **delta}]})
            out.append(_event({**head, "choices": [choice]}))
    end = _delta({}, answer.finish) | {"logprobs": logprobs}
    out.append(_event({**head, "choices": [end]}))
    return b"".join([*out, *_last(head, answer, with_usage)])


def text_body(answer: ChatAnswer, model: str) -> bytes:
    """Return the JSON of an answer to `/v1/completions`."""
    head = _head("text_completion", model)
    choice = _text_choice(answer.content, _finish(answer), _text_logprobs(answer)) | _ids(answer)
    return msgspec.json.encode({**head, "choices": [choice], "usage": _usage(answer)})


def text_events(answer: ChatAnswer, model: str, with_usage: bool) -> bytes:
    """Return the events of an answer to `/v1/completions` with `stream`, `[DONE]` included."""
    head = _head("text_completion", model)
    out = [
        _event({**head, "choices": [_text_choice(piece, None, None)]})
        for piece in pieces(answer.content)
    ]
    end = _text_choice("", _finish(answer), _text_logprobs(answer)) | _ids(answer)
    out.append(_event({**head, "choices": [end]}))
    return b"".join([*out, *_last(head, answer, with_usage)])


def error_event(error: ApiError) -> bytes:
    """Return an error as the last event of a stream that has begun."""
    return b"event: error\ndata: " + error.body() + b"\n\n"


def models_body(model: str) -> bytes:
    """Return the JSON of `/v1/models`."""
    one = {"id": model, "object": "model", "created": 0, "owned_by": "rlcore"}
    return msgspec.json.encode({"object": "list", "data": [one]})


def _head(kind: str, model: str) -> dict[str, Any]:
    name = f"chatcmpl-{uuid.uuid4().hex}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def _call(call: ChatCall, arguments: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _delta(delta: dict[str, Any], finish: FinishReason | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": finish}


def _usage(answer: ChatAnswer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def _chat_logprobs(answer: ChatAnswer) -> dict[str, Any] | None:
    if not answer.logprobs:
        return None
    return {"content": [{**msgspec.to_builtins(t), "top_logprobs": []} for t in answer.logprobs]}


def _text_choice(
    text: str, finish: FinishReason | None, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    return {"index": 0, "text": text, "finish_reason": finish, "logprobs": logprobs}


def _ids(answer: ChatAnswer) -> dict[str, Any]:
    return {"token_ids": answer.token_ids} if answer.token_ids else {}


def _text_logprobs(answer: ChatAnswer) -> dict[str, Any] | None:
    if not answer.logprobs:
        return None
    offsets = [0]
    for token in answer.logprobs:
        offsets.append(offsets[-1] + len(token.token))
    return {
        "tokens": [t.token for t in answer.logprobs],
        "token_logprobs": [t.logprob for t in answer.logprobs],
        "top_logprobs": None,
        "text_offset": offsets[:-1],
    }


def _finish(answer: ChatAnswer) -> FinishReason:
    return "length" if answer.finish == "length" else "stop"


def pieces(text: str) -> Sequence[str]:
    """Cut a text into the texts of events."""
    return [text[i : i + _PIECE_CHARS] for i in range(0, len(text), _PIECE_CHARS)]


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _last(head: dict[str, Any], answer: ChatAnswer, with_usage: bool) -> Iterator[bytes]:
    if with_usage:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"

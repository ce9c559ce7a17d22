"""Anthropic's messages: JSON of a request to a `TurnRequest`, and a `ChatAnswer` to JSON or events.

A request becomes one of OpenAI's chat completions, whose checks and limits then hold
(`chat_api.py`). `tool_use`, `tool_result` and `thinking` blocks become calls, messages of the role
`tool` and reasoning. Fields without a counterpart are ignored, such as `thinking` and
`cache_control`. All functions are pure.

Own structs instead of the types of the package `anthropic`, as in `chat_api.py`.
"""

import uuid
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from msgspec import Struct

from rlcore.envs.chat_api import (
    ApiError,
    ChatAnswer,
    ChatCompletion,
    CompletionForm,
    TurnRequest,
    chat_turn,
    pieces,
)

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class _ContentBlock(Struct):
    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: "str | list[_ContentBlock] | None" = None


class _BlockMessage(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_ContentBlock]


class _SchemaTool(Struct):
    name: str
    description: str = ""
    input_schema: dict[str, Any] | None = None


class MessagesForm(CompletionForm, kw_only=True):
    """Body of `/v1/messages`."""

    messages: list[_BlockMessage]
    system: str | list[_ContentBlock] | None = None
    tools: list[_SchemaTool] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None


def messages_turn(request: MessagesForm, allow_sampling: bool) -> TurnRequest:
    """Return the turn that a request asks for. Raises ApiError for what is not supported."""
    if request.max_tokens is None:
        raise ApiError(400, "max_tokens: is missing; give at least 1", param="max_tokens")
    messages = [m for i, asked in enumerate(request.messages) for m in _messages(i, asked)]
    if request.system:
        messages.insert(0, {"role": "system", "content": _text("system", request.system)})
    chat = {
        "messages": messages,
        "tools": [_tool(i, tool) for i, tool in enumerate(request.tools or ())],
        "tool_choice": (request.tool_choice or {}).get("type", "auto"),
        "max_tokens": request.max_tokens,
        "stop": request.stop_sequences,
        "temperature": request.temperature,
        "top_p": request.top_p,
    }
    return chat_turn(msgspec.convert(chat, ChatCompletion), allow_sampling)


def _messages(index: int, message: _BlockMessage) -> Iterator[dict[str, Any]]:
    """Yield OpenAI's messages for one message. Texts of a user between tool results are one."""
    place = f"messages[{index}].content"
    content = message.content
    blocks = [_ContentBlock("text", text=content)] if isinstance(content, str) else content
    if message.role == "assistant":
        yield _assistant(place, blocks)
        return
    texts: list[_ContentBlock] = []
    for block in blocks:
        if block.type != "tool_result":
            texts.append(block)
            continue
        if texts:
            yield {"role": message.role, "content": _text(place, texts)}
            texts = []
        result = _text(place, block.content or "")
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": result}
    if texts:
        yield {"role": message.role, "content": _text(place, texts)}


def _assistant(place: str, blocks: list[_ContentBlock]) -> dict[str, Any]:
    thinking = "".join(b.thinking for b in blocks if b.type == "thinking")
    kept = [b for b in blocks if b.type not in ("thinking", "redacted_thinking", "tool_use")]
    found: dict[str, Any] = {"role": "assistant", "content": _text(place, kept)}
    if thinking:
        found["reasoning_content"] = thinking
    if uses := [b for b in blocks if b.type == "tool_use"]:
        found["tool_calls"] = [
            {
                "id": b.id,
                "function": {"name": b.name, "arguments": msgspec.json.encode(b.input).decode()},
            }
            for b in uses
        ]
    return found


def _text(place: str, content: str | list[_ContentBlock]) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text":
            sentence = f"{place} with a block {block.type}: must be text"
            raise ApiError(400, sentence, code="unsupported_value", param=place)
    return "".join(block.text for block in content)


def _tool(index: int, tool: _SchemaTool) -> dict[str, Any]:
    if tool.input_schema is None:
        sentence = f"tools[{index}] {tool.name}: has no input_schema; only the harness's own tools"
        raise ApiError(400, f"{sentence} are served", code="unsupported_value", param="tools")
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}


# ---- answers


def messages_body(answer: ChatAnswer, model: str) -> bytes:
    """Return the JSON of an answer to `/v1/messages`."""
    content = [block | {field: value} for block, field, value, _ in _blocks(answer)]
    end = {"stop_reason": _STOP_REASONS[answer.finish], "usage": _usage(answer)}
    return msgspec.json.encode(_head(model) | {"content": content} | end)


def messages_events(answer: ChatAnswer, model: str, with_usage: bool) -> bytes:
    """Return the events of an answer to `/v1/messages` with `stream`."""
    usage = _usage(answer)
    out = [_event("message_start", message=_head(model) | {"usage": usage | {"output_tokens": 0}})]
    for index, (block, field, value, kind) in enumerate(_blocks(answer)):
        is_call = kind == "input_json_delta"
        empty: Any = {} if is_call else ""
        text = msgspec.json.encode(value).decode() if is_call else value
        out.append(_event("content_block_start", index=index, content_block=block | {field: empty}))
        for piece in pieces(text):
            delta = {"type": kind, "partial_json" if is_call else field: piece}
            out.append(_event("content_block_delta", index=index, delta=delta))
        out.append(_event("content_block_stop", index=index))
    end = {"stop_reason": _STOP_REASONS[answer.finish], "stop_sequence": None}
    out.append(_event("message_delta", delta=end, usage=usage))
    return b"".join([*out, _event("message_stop")])


def _blocks(answer: ChatAnswer) -> Iterator[tuple[dict[str, Any], str, Any, str]]:
    """Yield each block without its value, the name of that, the value, and the kind of a delta."""
    if answer.reasoning:
        yield {"type": "thinking", "signature": ""}, "thinking", answer.reasoning, "thinking_delta"
    if answer.content:
        yield {"type": "text"}, "text", answer.content, "text_delta"
    for call in answer.calls:
        block = {"type": "tool_use", "id": call.id, "name": call.name}
        yield block, "input", msgspec.json.decode(call.arguments), "input_json_delta"


def _head(model: str) -> dict[str, Any]:
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _usage(answer: ChatAnswer) -> dict[str, int]:
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_read_input_tokens": answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": answer.completion_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (
        kind.encode(),
        msgspec.json.encode({"type": kind, **fields}),
    )

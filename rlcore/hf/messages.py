"""Chat messages in OpenAI's form, brought to the form that every chat template can use.

Templates differ in what they read. Some write the arguments of a call with `tojson` or by key, some
append them as text; few read content that is a list of parts. Here the arguments of calls become
JSON text, which `hf/template.py` gives to the template as an object that serves as both, and parts
of text become one text. Other messages and keys are unchanged.

`split_messages` goes the other way, for readers of recorded conversations: rendered text to roles
and contents.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.utils.errors import ConfigError

_HEADER = re.compile(
    r"<\|(?:im_start|start_header_id)\|>(\w+)(?:<\|end_header_id\|>)?"
    r"|<[|\uff5c](system|user|assistant|observation)[|\uff5c]>",
    re.IGNORECASE,
)
_MARK = re.compile(
    rf"{_HEADER.pattern}|<\|(?:im_end|eot_id|eom_id)\|>|<\uff5cend\u2581of\u2581sentence\uff5c>",
    re.IGNORECASE,
)
_ROLES = {"ipython": "tool", "observation": "tool"}
_RESULT = "<tool_response>", "<\uff5ctool\u2581output"


def template_messages(chat: Sequence[Any], template: str) -> list[Any]:
    """Return the messages for a chat template. Raises ConfigError for a call without a name, or
    with arguments that are not a JSON object."""
    return [_message(m, template) if isinstance(m, Mapping) else m for m in chat]


def split_messages(text: str, sampled: str = "") -> list[tuple[str, str]]:
    """Split rendered text into messages, each a role and its text. `sampled` is the text of the
    turn that it follows, whose last token may already name the role. Tokens that end a message are
    left out, and so is an empty message, such as the header of the next turn. The role is empty
    where the template writes none, or in another format than those of `hf/tool_formats.py`."""
    before = list(_HEADER.finditer(sampled))
    role = _role(before[-1]) if before and before[-1].end() == len(sampled) else ""
    found, at = [], 0
    for mark in [*_MARK.finditer(text), None]:
        content = text[at : mark.start() if mark else len(text)].strip()
        if content:
            found.append(("tool" if content.startswith(_RESULT) else role, content))
        if mark:
            at, role = mark.end(), _role(mark)
    return found


def _role(mark: re.Match[str]) -> str:
    """Return the role that a header names; of a mark at the end of a message, which names none,
    an empty one."""
    name = (mark[1] or mark[2] or "").lower()
    return _ROLES.get(name, name)


def _message(message: Mapping[str, Any], template: str) -> Mapping[str, Any]:
    content, calls = message.get("content"), message.get("tool_calls")
    new = dict(message)
    if isinstance(content, list) and all(_is_text(part) for part in content):
        new["content"] = content = "".join(part["text"] for part in content)
    if calls:
        if not isinstance(calls, list):
            raise ConfigError(f"tool_calls {calls!r:.80}: must be a list of calls")
        new["tool_calls"] = [_call(call) for call in calls]
        if not content:  # the first templates of DeepSeek-V3 and R1 write calls beside None alone
            new["content"] = None if "['content'] is none" in template else ""
    elif "tool_calls" in message:  # templates ask whether the key is there
        del new["tool_calls"]
    return new


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _call(call: Any) -> dict[str, Any]:
    """Return a call in OpenAI's form, with its arguments as JSON text."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(f"tool call {call!r:.80}: has no name; give OpenAI's form of a call")
    name, arguments = function["name"], function.get("arguments") or "{}"
    try:
        text = (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
        is_object = isinstance(json.loads(text), dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"tool call of {name}: the arguments are not JSON ({error})") from error
    if not is_object:
        raise ConfigError(f"tool call of {name}: the arguments are not a JSON object")
    return {"type": "function", **call, "function": {"name": name, "arguments": text}}

"""Conversations for supervised fine-tuning: rows of files as token ids, and which of them to learn.

A row has a question and an answer, or a list of messages that ends with one of the assistant. The
policy learns every message of the assistant up to its end-of-sequence token, after exactly the
tokens that the engine would have been given: the chat template is rendered up to the message, and
what the message adds is tokenised on its own.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from rlcore.data import prompts
from rlcore.data.prompts import Message, PromptSettings
from rlcore.utils.errors import ConfigError

ASSISTANT = "assistant"


class Demonstration(msgspec.Struct):
    """Prompt and response to learn."""

    prompt: np.ndarray
    """int32 [P]: tokens before the first token to learn, at least one."""
    response: np.ndarray
    """int32 [R]: tokens from the first to the last token to learn."""
    learn: np.ndarray
    """bool [R]: whether the policy learns the token."""

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


class Renderer(Protocol):
    """Tokenizer methods that this module calls; `hf.tokenizer.Tokenizer` has them."""

    @property
    def eos_ids(self) -> Sequence[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def min_tokens(self, text: str) -> int: ...

    def render_chats(
        self, chats: Sequence[Sequence[Message]], **variables: Any
    ) -> list[str | ConfigError]: ...


def read(
    path: Path,
    config: PromptSettings,
    tokenizer: Renderer,
    cap: int = 0,
    seen: set[bytes] | None = None,
) -> list[Demonstration]:
    """Return the demonstrations of a file's usable rows, at most `cap` rows (0: all). Invalid rows,
    and conversations longer than data.max_prompt_tokens, are left out and logged. `seen`: hashes of
    the conversations so far, which are left out; None: keep them.

    Raises:
        ConfigError: the file cannot be read, or has no usable row; or with data.bad_rows `refuse`,
            a row is invalid.
    """
    found: list[Demonstration] = []
    num_rows, report = 0, prompts.RowReport(path)
    for place, row, _ in prompts.rows_of(path):
        if cap and num_rows == cap:
            break
        try:
            made = list(demonstrations(row, config, tokenizer))
        except (ValueError, RecursionError) as error:
            if config.bad_rows == "refuse":
                raise ConfigError(
                    f"{place}: {error}; fix the row, or skip such rows with --data.bad_rows skip"
                ) from error
            report.bad(place, error, row)
            continue
        if (longest := max(map(len, made))) > config.max_prompt_tokens:
            report.long(place, longest)
            continue
        if seen is not None:
            if (key := _hash(made[-1])) in seen:
                report.duplicate()
                continue
            seen.add(key)
        found += made
        num_rows += 1
    report.tell(num_rows, config)
    return found


def demonstrations(
    row: Any, config: PromptSettings, tokenizer: Renderer
) -> Iterator[Demonstration]:
    """Yield the demonstrations of a row: one, or one for each message of the assistant where the
    chat template writes earlier messages in another form than the last.

    Raises:
        ValueError: the row is invalid, or the template does not continue its generation prompt.
    """
    messages = _messages(row, config)
    if config.template == "none":
        tokens = _Tokens()
        tokens.add(tokenizer.encode("\n\n".join(m["content"] for m in messages[:-1])), False)
        tokens.add(_ended(tokenizer.encode(messages[-1]["content"]), tokenizer), True)
        yield tokens.taken()
        return
    places = [i for i, m in enumerate(messages) if m["role"] == ASSISTANT]
    befores = _rendered(tokenizer, [messages[:i] for i in places], True)
    throughs = _rendered(tokenizer, [messages[: i + 1] for i in places], False)
    tokens, text = _Tokens(), ""
    for before, through in zip(befores, throughs, strict=True):
        if not through.startswith(before):
            raise ValueError(
                "the chat template does not write an answer after its own generation prompt"
            )
        if text and not before.startswith(text):
            yield tokens.taken()
            tokens, text = _Tokens(), ""
        tokens.add(tokenizer.encode(before[len(text) :]), False)
        answer = tokenizer.encode(through[len(before) :])
        end = next((i for i, t in enumerate(answer) if t in tokenizer.eos_ids), None)
        if end is None:
            tokens.add(_ended(answer, tokenizer), True)
        else:
            tokens.add(answer[: end + 1], True)
            tokens.add(answer[end + 1 :], False)
        text = through
    yield tokens.taken()


def _hash(row: Demonstration) -> bytes:
    return hashlib.blake2b(row.prompt.tobytes() + row.response.tobytes(), digest_size=8).digest()


def _messages(row: Any, config: PromptSettings) -> list[dict[str, Any]]:
    """Return the messages of a row, of which the last is the assistant's."""
    if isinstance(row, Exception):
        raise row
    if not isinstance(row, dict):
        raise ValueError(f"the row is a {type(row).__name__}, not a JSON object")
    asked = prompts.field_of(row, config.prompt_field)
    last = asked[-1] if isinstance(asked, list) and asked else None
    if isinstance(last, dict) and last.get("role") == ASSISTANT:
        asked, answer = asked[:-1], last.get("content")
        if not isinstance(answer, str):
            raise ValueError(f"field {config.prompt_field!r}: a message lacks its content as text")
    else:
        answer = prompts.answer_of(row, config.answer_field)
    if not answer.strip():
        raise ValueError("the answer is empty")
    return [*prompts.messages_of(asked, config), {"role": ASSISTANT, "content": answer}]


def _rendered(tokenizer: Renderer, chats: Sequence[Sequence[Message]], prompt: bool) -> list[str]:
    texts = []
    for text in tokenizer.render_chats(chats, add_generation_prompt=prompt):
        if isinstance(text, ConfigError):
            raise text
        texts.append(text)
    return texts


def _ended(answer: list[int], tokenizer: Renderer) -> list[int]:
    """Return an answer without an end of sequence with one."""
    if not tokenizer.eos_ids:
        raise ValueError("the tokenizer has no end of sequence for the answer")
    return [*answer, tokenizer.eos_ids[0]]


class _Tokens:
    """Tokens of a conversation so far, and which of them to learn."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._learn: list[bool] = []

    def add(self, ids: list[int], learn: bool) -> None:
        self._ids += ids
        self._learn += [learn] * len(ids)

    def taken(self) -> Demonstration:
        first = self._learn.index(True)
        last = len(self._learn) - self._learn[::-1].index(True)
        if not first:
            raise ValueError("has no prompt tokens before the answer")
        return Demonstration(
            prompt=np.array(self._ids[:first], np.int32),
            response=np.array(self._ids[first:last], np.int32),
            learn=np.array(self._learn[first:last]),
        )

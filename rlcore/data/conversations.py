"""Conversations for supervised fine-tuning: rows of files as token ids, and which of them to learn.

A row has a question and an answer, or a list of messages that ends with one of the assistant. The
policy learns every message of the assistant up to its end-of-sequence token, after exactly the
tokens that the engine would have been given: the chat template is rendered up to the message with
its generation prompt, and once more to the message's end.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from rlcore.data import prompts
from rlcore.data.prompts import Message, PromptSettings
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import log

ASSISTANT = "assistant"
_BATCH_ROWS = 64

Chat = list[tuple[str, str]]
"""For each message of the assistant: the text that prompts it, and the text to its end."""


class Demonstration(msgspec.Struct):
    """Prompt and response to learn."""

    prompt: np.ndarray
    """int32 [P]: tokens before the first token to learn, at least one."""
    response: np.ndarray
    """int32 [R]: tokens from the first to the last token to learn."""
    learn: np.ndarray
    """bool [R]: whether the policy learns the token."""
    dataset: str = ""
    """Name of the file; `--teacher.models NAME=MODEL` selects its teacher."""

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
    limit: str = "--data.max_prompt_tokens",
) -> list[Demonstration]:
    """Return the demonstrations of a file's usable rows, at most `cap` rows (0: all). Invalid rows,
    and conversations longer than data.max_prompt_tokens, are left out and logged. `seen`: hashes of
    the conversations so far, which are left out; None: keep them. `limit`: name of the
    maximum length in messages.

    Raises:
        ConfigError: the file cannot be read, or has no usable row; or with data.bad_rows `refuse`,
            a row is invalid.
    """
    if config.template != "none":
        _warn_of_other_end(tokenizer)
    found: list[Demonstration] = []
    num_rows, report = 0, prompts.RowReport(path, limit)
    for place, row, chat in _chats(path, config, tokenizer):
        if cap and num_rows == cap:
            break
        try:
            if isinstance(chat, Exception):
                raise chat
            least = max(tokenizer.min_tokens(through) for _, through in chat)
            if least > config.max_prompt_tokens:
                report.long(place, least, "at least ")
                continue
            made = list(_encoded(chat, tokenizer))
        except (ValueError, RecursionError) as error:
            report.bad(place, error, row, config)
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
    (chat,) = _rendered([_messages(row, config)], config, tokenizer)
    if isinstance(chat, Exception):
        raise chat
    return _encoded(chat, tokenizer)


def _chats(
    path: Path, config: PromptSettings, tokenizer: Renderer
) -> Iterator[tuple[str, Any, Chat | Exception]]:
    """Yield place, row and chat of every row. Rows are rendered in batches."""
    rows = prompts.rows_of(path)
    while batch := list(itertools.islice(rows, _BATCH_ROWS)):
        asked: list[list[dict[str, Any]] | Exception] = []
        for _, row, _ in batch:
            try:
                asked.append(_messages(row, config))
            except (ValueError, RecursionError) as error:
                asked.append(error)
        good = [messages for messages in asked if not isinstance(messages, Exception)]
        chats = iter(_rendered(good, config, tokenizer))
        for (place, row, _), messages in zip(batch, asked, strict=True):
            yield place, row, messages if isinstance(messages, Exception) else next(chats)


def _rendered(
    rows: Sequence[list[dict[str, Any]]], config: PromptSettings, tokenizer: Renderer
) -> list[Chat | Exception]:
    """Return the chat of each list of messages, or why there is none."""
    if config.template == "none":
        return [[(m[-2]["content"], m[-2]["content"] + m[-1]["content"])] for m in rows]
    cuts = [(m, i) for m in rows for i, message in enumerate(m) if message["role"] == ASSISTANT]
    befores = tokenizer.render_chats([m[:i] for m, i in cuts], add_generation_prompt=True)
    throughs = tokenizer.render_chats([m[: i + 1] for m, i in cuts], add_generation_prompt=False)
    turns = iter(zip(befores, throughs, strict=True))
    found: list[Chat | Exception] = []
    for messages in rows:
        count = sum(message["role"] == ASSISTANT for message in messages)
        chat: Chat = []
        error: Exception | None = None
        for before, through in itertools.islice(turns, count):
            if isinstance(before, ConfigError):
                error = before
            elif isinstance(through, ConfigError):
                error = through
            elif not through.startswith(before):
                error = ValueError(
                    "the chat template does not write an answer after its own generation prompt; "
                    "give a tokenizer with another template (--model.tokenizer)"
                )
            else:
                chat.append((before, through))
        found.append(error or chat)
    return found


def _encoded(chat: Chat, tokenizer: Renderer) -> Iterator[Demonstration]:
    tokens, text = _Tokens(tokenizer), ""
    for before, through in chat:
        if text and not before.startswith(text):
            yield tokens.taken()
            tokens, text = _Tokens(tokenizer), ""
        tokens.add(text, before, False)
        answer = tokens.rest(before, through)
        end = next((i for i, t in enumerate(answer) if t in tokenizer.eos_ids), None)
        if end is None:  # the engine would not go on from an end that the template does not write
            if not tokenizer.eos_ids:
                raise ValueError("the tokenizer has no end of sequence for the answer")
            tokens.extend([*answer, tokenizer.eos_ids[0]], True)
            yield tokens.taken()
            tokens, text = _Tokens(tokenizer), ""
        else:
            tokens.extend(answer[: end + 1], True)
            tokens.extend(answer[end + 1 :], False)
            text = through
    if text:
        yield tokens.taken()


def _warn_of_other_end(tokenizer: Renderer) -> None:
    """Warn if the chat template ends a message with no end of sequence of the model."""
    chat = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}]
    (text,) = tokenizer.render_chats([chat], add_generation_prompt=False)
    if isinstance(text, str) and not set(tokenizer.encode(text)) & set(tokenizer.eos_ids):
        log.warning(
            "the chat template ends an answer with %r, which is no end of sequence of this model; "
            "the model also learns its own end after it, and each answer is a row of its own",
            text[-20:],
        )


def _hash(row: Demonstration) -> bytes:
    return hashlib.blake2b(row.prompt.tobytes() + row.response.tobytes(), digest_size=8).digest()


def _messages(row: Any, config: PromptSettings) -> list[dict[str, Any]]:
    """Return the messages of a row, of which the last is the assistant's."""
    if isinstance(row, Exception):
        raise row
    if not isinstance(row, dict):
        raise ValueError(f"the row is a {type(row).__name__}, not a JSON object")
    key = config.prompt_field
    asked = prompts.field_of(row, key)
    if config.template == "none" and not isinstance(asked, str):
        raise ValueError("a list of messages needs --data.template chat")
    last: dict[str, Any] = {"role": ASSISTANT}
    if isinstance(asked, list) and asked and prompts.role_of(asked[-1]) == ASSISTANT:
        last, asked = asked[-1], asked[:-1]
        if not asked:
            raise ValueError(f"field {key!r} has only messages of the assistant")
        answer = last.get("content") or ""
        if not isinstance(answer, str):
            raise ValueError(f"field {key!r}: a message lacks its content as text")
    else:
        answer = prompts.answer_of(row, config.answer_field)
    if not answer.strip() and not last.get("tool_calls"):
        raise ValueError("the answer is empty")
    return [*prompts.messages_of(asked, config), {**last, "content": answer}]


class _Tokens:
    """Tokens of a conversation so far, and which of them to learn."""

    def __init__(self, tokenizer: Renderer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._learn: list[bool] = []

    def rest(self, text: str, more: str) -> list[int]:
        """Return the tokens that `more` adds to `text`, whose tokens are here. If they are not the
        first ones of `more`, what is added is encoded alone, as an engine would go on."""
        whole, count = self._tokenizer.encode(more), len(self._ids)
        if whole[:count] == self._ids:
            return whole[count:]
        return self._tokenizer.encode(more[len(text) :])

    def add(self, text: str, more: str, learn: bool) -> None:
        """Add the tokens that `more` adds to `text`, whose tokens are here."""
        self.extend(self.rest(text, more), learn)

    def extend(self, ids: list[int], learn: bool) -> None:
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

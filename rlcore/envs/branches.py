"""What one episode of an outside harness has sampled: a tree of turns, and its rows for training.

    branches = Branches(tokenizer, family=family, num_tokens=vocabulary, max_tokens=32768)
    turn = branches.begin(messages, tools)      # a request of the harness, or its text or ids
    sample = ...                                # the engine continues turn.context
    answer = branches.end(turn, sample, stops)  # or branches.cancel(turn)
    rows = branches.rows()                      # at the end of the episode

A turn is a request and its answer. It continues the earlier turn whose conversation is the longest
prefix of the request's messages. Its context is the context and the sampled tokens of that turn,
unchanged, and the new messages as the chat template writes them. If no conversation is a prefix, or
if the tools are others, the whole request is rendered and tokenised.

    turn 0 --- turn 1 --- turn 2        row 0: turns 0, 1 and 2
           \\-- turn 3                   row 1: turn 3; its prompt has turn 0
    turn 4                              row 2: turn 4, such as that of a sub-agent

The first turn that continues a turn is in the same row, and every further one begins a row. So a
sampled token is trained in exactly one row, and rows share the ids of their common prefix. Parallel
requests with equal messages are turns of different rows in the same way.

`reuse` decides what a prefix is:

- `keep`: equal messages. An assistant message equals a sampled answer if it has the answer's
  content, except for white space around it, and calls with the same names and argument values. Its
  reasoning may be missing, but must not be another. A harness that never sends reasoning back
  therefore continues its row. The reasoning remains in the context, and is trained once.
- `template`: equal text. The template renders all messages, and the text of a turn's tokens must be
  a prefix of the result. The context always has the text that a stateless server would show. If the
  template drops reasoning or spells an answer differently, the turn begins a row. With Qwen3, every
  user message after a turn with reasoning does so.

A text completion is a turn without a template. Its prompt is the context: text, which is encoded,
or token ids. It continues the turn whose context and answer are the longest beginning of the
prompt: text continues text, ids continue ids, and with `template` text also continues a chat
without tools. The turn's tokens stay, and only the rest of the prompt is encoded. The prompt's
special tokens are special, and its answer is not parsed.

With `keep`, a context may differ from a whole rendering, which `changed_tokens` measures:

- The template drops or moves what is already in the context: reasoning before the last user message
  (Qwen3, GLM), or marks and tools beside the last message.
- New messages are rendered behind a placeholder turn, so the template does not see the turns
  before. DeepSeek-V3 marks only the first tool result of a whole conversation.
- The template would write an answer differently: a cut answer, a malformed call, other spaces in
  JSON, or other tokens for the same text.

If several turns have equal answers, ids of calls and reasoning in the request decide. Unknown keys
of messages are ignored. Special tokens in messages and tools are read as plain words.
"""

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import numpy as np

from rlcore.envs.chat_api import ApiError
from rlcore.envs.dialogue import Dialogue
from rlcore.hf.tokenizer import Tokenizer
from rlcore.hf.tool_calls import (
    OPENING_TOKENS,
    ParsedTurn,
    assistant_message,
    family_of,
    parse,
    reasoning_of,
)
from rlcore.hf.tool_formats import schemas_of
from rlcore.records import CUT, Finish, FloatArray, IntArray, Sample, merge_routes
from rlcore.utils.errors import ConfigError, LimitError

Reuse = Literal["keep", "template"]
"""What must be equal in a request and the turn that it continues: messages, or rendered text."""
FinishReason = Literal["stop", "length", "tool_calls"]
ChatMessage = dict[str, Any]
"""A message in OpenAI's form, with only the keys that are known here, and content as one text."""
Asked = list[ChatMessage] | str | tuple[int, ...]
"""What a request asks for: messages, or as text or token ids what the model is to continue."""

_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's answer to a request, as the API shows it."""

    message: ChatMessage
    """Content, reasoning and well-formed calls. A malformed call is in the content."""
    finish_reason: FinishReason
    num_tokens: int
    """Sampled tokens, up to the one that completes a stop text."""


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeRow:
    """One row of an episode for training. Rows of an episode share its reward."""

    prompt: IntArray  # [P] tokens before the first token that this row trains
    tokens: IntArray  # [R]
    logps: FloatArray  # [R], 0 where not trained
    versions: IntArray  # [R] policy version of each trained token; -1 where not trained
    finish: Finish
    routes: np.ndarray | None = None  # [P + R, layers * K], as in `Sample`


class BranchCounts(NamedTuple):
    """Statistics of an episode; see `Branches.counts`."""

    turns: int
    """Turns that were not cancelled."""
    branches: int
    """Number of rows for training, including those whose turns are still sampled."""
    reused_tokens: int
    """Context tokens that were taken from earlier turns, over all requests."""
    new_tokens: int
    """Context tokens that were rendered and tokenised, over all requests."""


@dataclass(slots=True, eq=False)
class Turn:
    """A request of the harness and, once it has ended, its answer."""

    number: int
    parent: "Turn | None"
    """The turn that this one continues; None if the whole request was rendered."""
    asked: Asked
    """What follows the conversation of `parent`; messages are text if `reuse` is `template`."""
    new: IntArray
    """Tokens of `asked`."""
    tools: list[Any]
    is_chat: bool
    """Whether the request has messages and the answer may have calls."""
    children: "list[Turn]" = field(default_factory=list)
    """The turns that continue this one, in the order in which they began."""
    answer: ChatMessage | None = None
    """The answer as the API shows it; None until the turn has ended."""
    text: str = ""
    """Text of the sampled tokens, special tokens included."""
    tokens: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    logps: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    routes: np.ndarray | None = None
    """Routes of context and tokens, as in `Sample`."""
    finish: Finish = "stop"

    @property
    def context(self) -> IntArray:
        """Token ids for the engine."""
        pieces, turn = [self.new], self.parent
        while turn is not None:
            pieces += [turn.tokens, turn.new]
            turn = turn.parent
        return np.concatenate(pieces[::-1])

    @property
    def next_in_row(self) -> "Turn | None":
        """The first of the children that have ended; the others begin rows."""
        return next((child for child in self.children if child.answer is not None), None)

    @property
    def begins_row(self) -> bool:
        return self.parent is None or self.parent.next_in_row is not self

    def set_answer(
        self, sample: Sample, size: int, finish: Finish, text: str, answer: ChatMessage
    ) -> None:
        """Store the first `size` tokens of a sample, their text, and the answer's message."""
        self.tokens = np.asarray(sample.tokens[:size], np.int32)
        self.logps = np.asarray(sample.logps[:size], np.float32)
        self.versions = np.asarray(sample.versions[:size], np.int32)
        if sample.routes is not None:
            self.routes = sample.routes[: len(sample.prompt) + size]
        self.finish, self.text, self.answer = finish, text, answer

    def prefix_end(self, request: Asked, at: int) -> int:
        """Return the length of the prefix of a request that is this turn's conversation, given that
        of the parent's, `at`. -1: the conversation is not a prefix."""
        if self.answer is None:
            return -1
        end = at + len(self.asked)
        if not isinstance(request, list):
            shown = self.text if isinstance(request, str) else tuple(self.tokens.tolist())
            is_prefix = request[at:end] == self.asked and request[end : end + len(shown)] == shown
            return end + len(shown) if is_prefix else -1
        if end >= len(request) or request[at:end] != self.asked:
            return -1
        return end + 1 if _is_answer(request[end], self.answer) else -1


class Branches:
    """The turns of one episode. Not for use by several threads at a time."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        family: str,
        num_tokens: int,
        max_tokens: int,
        max_branches: int = 64,
        reuse: Reuse = "keep",
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """Store the settings.

        Args:
            family: format of tool calls, a key of `hf.tool_formats.FAMILIES`; "" if the template
                has none, so that requests with tools are refused.
            num_tokens: size of the model's vocabulary.
            max_tokens: maximum number of tokens in a row, prompt and answers together.
            max_branches: maximum number of rows of the episode.
            reuse: what must be equal in a request and the turn that it continues; see the module's
                docstring.
            variables: further variables for the chat template, such as `enable_thinking`.
        """
        self._tokenizer, self._family, self._num_tokens = tokenizer, family, num_tokens
        self._max_tokens, self._max_branches = max_tokens, max_branches
        self._reuse, self._variables = reuse, dict(variables or {})
        self._dialogue = Dialogue(tokenizer, is_chat=True)
        self._first: dict[str, list[Turn]] = {}  # turns without a parent, by tools
        self._turns: list[Turn] = []
        self._num_begun = self._num_reused = self._num_new = 0

    def begin(
        self,
        messages: Sequence[Mapping[str, Any]] | str | tuple[int, ...],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Turn:
        """Return the turn of a request; the engine continues its `context`. `messages`: those of a
        chat, or the prompt of a text completion, as text or ids.

        Raises:
            ApiError: the messages or tools are invalid, the template refuses them, or a limit
                is reached. The episode is as before.
            LimitError: the template exceeds its limits of time or memory again and again.
        """
        is_chat = not isinstance(messages, str | tuple)
        try:
            listed = _checked(tools)
            if listed and not self._family:
                family_of(self._tokenizer.chat_template)  # raises
            key = json.dumps(listed)
            request = self._request(messages, listed)
            parent, at = _longest(self._first.get(key, []), request)
            siblings = parent.children if parent else self._first.get(key, [])
            asked = request[at:]
            equal = next((turn for turn in siblings if turn.asked == asked), None)
            new = equal.new if equal else self._tokens_of(asked, parent, listed)
        except LimitError:
            raise
        except (ConfigError, RecursionError) as error:
            raise ApiError(400, str(error)) from error
        given = parent.tools if parent else listed  # equal lists are one object
        turn = Turn(self._num_begun, parent, asked, new, given, is_chat)
        self._check_limits(turn)
        (parent.children if parent else self._first.setdefault(key, [])).append(turn)
        self._turns.append(turn)
        self._num_begun += 1
        num_new = 0 if equal else len(new)
        self._num_new += num_new
        self._num_reused += len(turn.context) - num_new
        return turn

    def room(self, turn: Turn) -> int:
        """Return how many tokens the answer may have, at least 1."""
        return self._max_tokens - len(turn.context)

    def end(self, turn: Turn, sample: Sample, stop_texts: Sequence[str] = ()) -> Answer:
        """Record the sample of a turn and return the answer for the harness.

        The token that first completes a stop text is the last one that counts; further ones are
        dropped. As in OpenAI's API, the message ends before the stop text. An aborted sample does
        not end a turn: sample again, or cancel the turn. Raises ValueError for a turn that has
        ended or was cancelled.
        """
        if turn.answer is not None or turn not in self._turns:
            raise ValueError(f"turn {turn.number}: has ended or was cancelled; end each turn once")
        ids = sample.tokens.tolist()
        size, text, shown = self._cut(ids, [stop for stop in stop_texts if stop])
        finish = sample.finish if shown == text else "stop"
        if size and ids[size - 1] in self._tokenizer.eos_ids:
            shown = shown.removesuffix(self._decode([ids[size - 1]]))
        message = self._message(turn, shown)
        turn.set_answer(sample, size, finish, text, _normal(message, 0))
        done: FinishReason = "tool_calls" if "tool_calls" in message else "stop"
        return Answer(message, "length" if finish in CUT else done, size)

    def cancel(self, turn: Turn) -> None:
        """Remove a turn whose answer the harness did not receive, ended or not. It leaves no trace,
        because an answer that was never seen cannot have changed the reward. Idempotent. If a later
        turn continues this one, it remains."""
        if turn in self._turns and not turn.children:
            self._turns.remove(turn)
            siblings = turn.parent.children if turn.parent else self._first[json.dumps(turn.tools)]
            siblings.remove(turn)

    def rows(self) -> list[EpisodeRow]:
        """Return the rows of the turns that have ended, in the order in which the rows began."""
        rows = [_row(turn) for turn in self._turns if turn.begins_row]
        return [row for row in rows if row is not None]

    @property
    def counts(self) -> BranchCounts:
        """Statistics of the episode so far."""
        return BranchCounts(
            turns=len(self._turns),
            branches=sum(not turn.children for turn in self._turns),
            reused_tokens=self._num_reused,
            new_tokens=self._num_new,
        )

    def changed_tokens(self, turn: Turn, messages: Sequence[Mapping[str, Any]]) -> int:
        """Return the number of tokens after the first difference between a turn's context and the
        whole rendering of `messages`, those of its request, tokenised again. 0: equal ids."""
        again = self._tokenizer.encode(self._rendered(_all_normal(messages), turn.tools))
        pairs = list(zip_longest(turn.context.tolist(), again))
        return len(pairs) - next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))

    def _message(self, turn: Turn, shown: str) -> ChatMessage:
        """Return the message of an answer with the text `shown`."""
        if not turn.is_chat:
            return {"role": "assistant", "content": shown}
        opening = self._decode(turn.context[-OPENING_TOKENS:].tolist())
        reasoning = reasoning_of(self._tokenizer.chat_template, opening)
        parsed = _with_lost_text(parse(self._family, shown, turn.tools, reasoning))
        names = [f"call_{turn.number}_{i}" for i in range(len(parsed.calls))]
        return assistant_message(parsed, names)

    def _request(self, messages: Sequence[Any] | str | tuple[int, ...], tools: list[Any]) -> Asked:
        """Return what is compared with earlier turns: messages or their text, or a prompt."""
        if isinstance(messages, str):
            self._check_length(self._tokenizer.min_tokens(messages))
            return messages
        if isinstance(messages, tuple):
            self._check_length(len(messages))
            return messages
        asked = _all_normal(messages)
        least = sum(self._tokenizer.min_tokens(message["content"]) for message in asked)
        self._check_length(least)  # to encode a very long text takes minutes
        return self._rendered(asked, tools) if self._reuse == "template" else asked

    def _tokens_of(self, asked: Asked, parent: Turn | None, tools: list[Any]) -> IntArray:
        """Return the tokens of what follows a turn, or of a whole request."""
        if isinstance(asked, str):
            ids = self._tokenizer.encode(asked)
        elif isinstance(asked, tuple):
            ids = list(asked)
        elif parent is None:
            ids = self._tokenizer.encode(self._rendered(asked, tools))
        else:
            last = int(parent.tokens[-1]) if len(parent.tokens) else -1
            variables = self._variables | {"tools": self._defused(tools) or None}
            ids = self._dialogue.appended(self._defused(asked), last, **variables)
        if strange := [i for i in ids if not 0 <= i < self._num_tokens]:
            raise ConfigError(
                f"the request has token {strange[0]}, but the model has only {self._num_tokens}; "
                "use the model's own tokenizer"
            )
        if not ids and parent is None:
            raise ConfigError("the request has no tokens; give at least one to continue")
        return np.array(ids, np.int32)

    def _rendered(self, messages: list[ChatMessage], tools: list[Any]) -> str:
        variables = self._variables | {"tools": self._defused(tools) or None}
        return self._tokenizer.render_chat(self._defused(messages), **variables)

    def _defused(self, value: Any) -> Any:
        """Return messages or tools with special tokens read as plain words."""
        if isinstance(value, str):
            return self._tokenizer.defused(value)
        if isinstance(value, Mapping):
            return {self._defused(key): self._defused(item) for key, item in value.items()}
        return [self._defused(item) for item in value] if isinstance(value, list) else value

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _cut(self, ids: list[int], stop_texts: list[str]) -> tuple[int, str, str]:
        """Return how many tokens count, their text, and that text before the stop text."""

        def places(size: int) -> list[int]:
            text = self._decode(ids[:size])
            return [at for stop in stop_texts if (at := text.find(stop)) >= 0]

        size = len(ids)
        if places(size):
            size = bisect_left(range(size), True, key=lambda n: bool(places(n)))
        text = self._decode(ids[:size])
        return size, text, text[: min(places(size), default=len(text))]

    def _check_limits(self, turn: Turn) -> None:
        """Raise ApiError if the episode has no room for a turn that is not in it yet."""
        is_branch = turn.parent is None or bool(turn.parent.children)
        if self.counts.branches + is_branch > self._max_branches:
            raise ApiError(
                400,
                f"the episode has {self._max_branches} branches, the most it may have; continue "
                "the messages of the latest answer instead of rewriting them",
            )
        self._check_length(len(turn.context))

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens >= self._max_tokens:
            raise ApiError(
                400,
                f"This model's maximum context length is {self._max_tokens} tokens, but the "
                f"request has {num_tokens} or more, and an answer needs one; shorten it",
                code="context_length_exceeded",
            )


def _longest(turns: Sequence[Turn], request: Asked) -> tuple[Turn | None, int]:
    """Return the turn whose conversation is the longest prefix of a request, and its length. Equal
    ids and reasoning decide a tie, then whether a turn is not continued yet, then its age."""
    best: tuple[Turn | None, int] = None, 0
    best_rank: tuple[int, int, bool, int] = (0, 0, False, 0)
    open_ends = [(turn, 0, 0) for turn in turns]
    while open_ends:
        turn, at, num_equal = open_ends.pop()
        if (end := turn.prefix_end(request, at)) < 0:
            continue
        num_equal += request[end - 1] == turn.answer
        rank = end, num_equal, not turn.children, -turn.number
        if best[0] is None or rank > best_rank:
            best, best_rank = (turn, end), rank
        open_ends += [(child, end, num_equal) for child in turn.children]
    return best


def _row(first: Turn) -> EpisodeRow | None:
    """Return the row that begins with a turn; None if no token of it was sampled."""
    chain = [first]
    while (following := chain[-1].next_in_row) is not None:
        chain.append(following)
    turns = [turn for turn in chain if len(turn.tokens)]
    if not turns:
        return None
    ids = np.concatenate([turns[-1].context, turns[-1].tokens])
    logps, versions = np.zeros(len(ids), np.float32), np.full(len(ids), -1, np.int32)
    routes = None
    for turn in turns:
        routes = merge_routes(routes, turn.routes)
        begin = len(turn.context)
        end = begin + len(turn.tokens)
        logps[begin:end], versions[begin:end] = turn.logps, turn.versions
    start = len(turns[0].context)
    return EpisodeRow(
        prompt=ids[:start],
        tokens=ids[start:],
        logps=logps[start:],
        versions=versions[start:],
        finish=turns[-1].finish,
        routes=routes,
    )


def _checked(tools: Sequence[Any] | None) -> list[Any]:
    listed = list(tools or ())
    try:
        schemas_of(listed)
    except (ValueError, AttributeError) as error:  # AttributeError: a tool is no object
        raise ApiError(400, f"tools: {error}") from error
    return listed


def _all_normal(messages: Sequence[Any]) -> list[ChatMessage]:
    if not messages:
        raise ApiError(400, "messages: is empty; send at least one message")
    return [_normal(message, i) for i, message in enumerate(messages)]


def _normal(message: Any, place: int) -> ChatMessage:
    """Return a message with its known keys alone, its content as one text, and the arguments of its
    calls as JSON text."""
    where = f"messages[{place}]"
    if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
        raise ApiError(400, f"{where}: must be an object with a role of {', '.join(_ROLES)}")
    content = message.get("content")
    parts = [{"text": content or ""}] if content is None or isinstance(content, str) else content
    if not isinstance(parts, list) or not all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts
    ):
        raise ApiError(400, f"{where}: content must be text or a list of parts of text")
    found = {"role": message["role"], "content": "".join(part["text"] for part in parts)}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if message.get(key) and isinstance(message[key], str):
            found[key] = message[key]
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise ApiError(400, f"{where}: tool_calls must be a list")
        found["tool_calls"] = [_normal_call(call, where) for call in calls]
    return found


def _normal_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{where}: a tool call must have a function with a name")
    arguments = function.get("arguments") or "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    named = {"name": function["name"], "arguments": text}
    return {"id": str(call.get("id", "")), "type": "function", "function": named}


def _is_answer(sent: ChatMessage, answer: ChatMessage) -> bool:
    """Return whether a message of a request is a sampled answer, maybe without its reasoning."""
    reasoning = sent.get("reasoning_content", "").strip()
    return (
        sent["role"] == "assistant"
        and sent["content"].strip() == answer["content"].strip()
        and reasoning in ("", answer.get("reasoning_content", "").strip())
        and _named_values(sent) == _named_values(answer)
    )


def _named_values(message: ChatMessage) -> list[tuple[str, str]]:
    """Return the name of each call and its arguments as canonical JSON. Numbers are compared as
    JavaScript does, which writes 1.0 as 1."""
    found = []
    for call in message.get("tool_calls", ()):
        name, text = call["function"]["name"], call["function"]["arguments"]
        with suppress(ValueError, RecursionError):  # the template refuses such a call
            text = json.dumps(json.loads(text, parse_int=float), sort_keys=True)
        found.append((name, text))
    return found


def _with_lost_text(parsed: ParsedTurn) -> ParsedTurn:
    """Return a turn whose content has the text that a message has no place for."""
    lost = [bad.text for bad in parsed.malformed if bad.fault != "in_reasoning"]
    return replace(parsed, content="".join([parsed.content, *lost, parsed.rest]))

"""Conversion of observations to the tokens that are appended between turns of the policy.

A conversation is never tokenized again: sampled tokens stay unchanged, and observations are
appended. The chat template surrounds an observation with tokens that end the assistant's message
and begin the next. For every observation, a conversation of two turns is rendered to obtain these
tokens, so that no template is reproduced here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from rlcore.envs.kind import Seen, ToolTurn, TurnCall
from rlcore.envs.pool import EnvError
from rlcore.hf.tool_calls import ParsedTurn, family_of, parse, reasoning_of
from rlcore.hf.tool_formats import MalformedCall, ToolCall
from rlcore.utils import net
from rlcore.utils.errors import ConfigError

_TURN = "\u2766turn\u2766"
"""Placeholder for the assistant's turn in the template."""
_PROMPT_END = 16
"""Tokens at the end of a prompt that say whether it opens the reasoning."""


def replies(turn: ParsedTurn, results: Sequence[str]) -> list[str]:
    """Return what the model is told about each call of a turn, in the order of the calls: the
    result of a well-formed one, the reason of a malformed one. `results` are those of `turn.calls`.
    Raises ValueError if there are more or fewer."""
    if len(results) != len(turn.calls):
        raise ValueError(f"{len(results)} results for {len(turn.calls)} calls: give one for each")
    left = iter(results)
    return [
        f"error: {call.reason}" if isinstance(call, MalformedCall) else next(left)
        for call in turn.attempts
    ]


def _sendable(call: ToolCall | MalformedCall) -> ToolCall | MalformedCall:
    if isinstance(call, ToolCall):
        try:
            net.encode(call.arguments)
        except (OverflowError, RecursionError):
            reason = f"{call.name} has an integer beyond 64 bits, or is nested too deeply"
            return MalformedCall(call.text, reason, "bad_arguments")
    return call


def tool_turn(turn: ParsedTurn) -> ToolTurn:
    """Return a turn as an environment gets it."""
    calls = tuple(TurnCall(call.name, dict(call.arguments)) for call in turn.calls)
    return ToolTurn(turn.content, calls, len(turn.malformed))


class Texts(Protocol):
    """Tokenizer methods used here; `hf.tokenizer.Tokenizer` has them."""

    @property
    def chat_template(self) -> str: ...

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str: ...

    def encode(self, text: str) -> list[int]: ...

    def defused(self, text: str) -> str: ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str: ...


class Dialogue:
    """Converter of observations to tokens that continue a conversation."""

    def __init__(
        self,
        tokenizer: Texts,
        *,
        is_chat: bool,
        num_tokens: int = 2**31,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Store the settings. `is_chat`: an observation becomes a user message, else it is used
        unchanged. `num_tokens`: size of the model's vocabulary. `tools`: tools that the chat
        template shows; raises ConfigError if its format of calls is unknown."""
        self._tokenizer, self._is_chat, self._num_tokens = tokenizer, is_chat, num_tokens
        self._tools = tools
        self._family = family_of(tokenizer.chat_template) if tools else ""

    def parsed(self, tokens: Sequence[int], context: np.ndarray) -> ParsedTurn | None:
        """Return the parts of a turn that was sampled after `context`; None without tools. A call
        that cannot be sent to an environment is malformed."""
        if not self._tools:
            return None
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        before = self._tokenizer.decode(context[-_PROMPT_END:].tolist(), skip_special_tokens=False)
        reasoning = reasoning_of(self._tokenizer.chat_template, before)
        turn = parse(self._family, text, self._tools, reasoning)
        return replace(turn, attempts=tuple(map(_sendable, turn.attempts)))

    def answer(self, turn: ParsedTurn | None, seen: Seen, last: int) -> list[int]:
        """Return the tokens to append after a turn: an observation, or the results of its calls.

        Raises:
            EnvError: the environment has not returned one result for each call.
        """
        if turn is None or isinstance(seen, str):
            return self.observation(seen, last)
        try:
            results = replies(turn, [str(text) for text in seen])
        except ValueError as error:
            raise EnvError("error", str(error)) from error
        if not results:
            raise EnvError("error", "no result for a turn without calls; end it or return a text")
        return self.tool_results(results, last)

    def observation(self, seen: Seen, last: int) -> list[int]:
        """Return the tokens to append after a turn that ended with the token `last`.

        If the end token was already sampled, it is not repeated. An observation of token ids is
        used unchanged; in text, special tokens are disabled. Raises ConfigError if the template
        does not keep the turn unchanged, and EnvError for ids outside of the vocabulary.
        """
        if not isinstance(seen, str):
            ids = [int(i) for i in seen]
            if strange := [i for i in ids if not 0 <= i < self._num_tokens]:
                raise EnvError(
                    "error", f"shows token {strange[0]}, but the model has only {self._num_tokens}"
                )
            return ids
        if not seen:
            return []
        if not self._is_chat:
            return self._tokenizer.encode(self._tokenizer.defused(seen))
        return self.appended([{"role": "user", "content": self._tokenizer.defused(seen)}], last)

    def tool_results(self, results: Sequence[str], last: int) -> list[int]:
        """Return the tokens to append after a turn that ended with the token `last`, for the
        results of its calls (`replies`). They are messages of the role `tool`. Raises ConfigError
        as `observation` does."""
        defused = map(self._tokenizer.defused, results)
        return self.appended([{"role": "tool", "content": text} for text in defused], last)

    def appended(self, new: Sequence[Mapping[str, Any]], last: int, **variables: Any) -> list[int]:
        """Return the tokens to append after a turn that ended with the token `last`, for new
        messages. Special tokens in the messages stay special. `variables` are passed to the
        template. Raises ConfigError as `observation` does."""
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _TURN},
            *new,
        ]
        _, found, after = self._tokenizer.render_chat(messages, **variables).partition(_TURN)
        if not found:
            raise ConfigError(
                "--env: the chat template drops earlier assistant turns, so a conversation "
                "cannot grow turn by turn; use --data.template none, or another model"
            )
        ids = self._tokenizer.encode(after)
        return ids[1:] if ids and ids[0] == last else ids

"""What the policy reads between its turns, as tokens to append.

A conversation is never tokenised again: what was sampled stays as it was sampled, and what an
environment shows comes after it, between the tokens that end the assistant's message and begin its
next one. These are read off the chat template once for every observation, in a conversation of two
turns, so that no template has to be reproduced here.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rlcore.envs.kind import Seen
from rlcore.envs.pool import EnvError
from rlcore.utils.errors import ConfigError

_TURN = "\u2766turn\u2766"
"""Stands for the assistant's turn in the template."""


class Texts(Protocol):
    """What this needs of a tokenizer; `hf.tokenizer.Tokenizer` is one."""

    def encode(self, text: str) -> list[int]: ...

    def defused(self, text: str) -> str: ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str: ...


class Dialogue:
    """How observations become tokens."""

    def __init__(self, tokenizer: Texts, *, is_chat: bool, num_tokens: int = 2**31) -> None:
        """`is_chat`: an observation is a message of the user; else it is taken as it is.
        `num_tokens`: of the model's vocabulary."""
        self._tokenizer, self._is_chat, self._num_tokens = tokenizer, is_chat, num_tokens

    def observation(self, seen: Seen, last: int) -> list[int]:
        """Tokens to append behind a turn that ended with the token `last`. An end that was sampled
        already is not repeated. Token ids are taken as they are, text of the environment can hold
        no special token. ValueError where the template does not show the turn as it is; EnvError
        for ids that the model does not have."""
        if not isinstance(seen, str):
            if strange := [i for i in seen if not 0 <= i < self._num_tokens]:
                raise EnvError(
                    "error", f"shows token {strange[0]}, and the model has {self._num_tokens}"
                )
            return list(seen)
        if not seen:
            return []
        if not self._is_chat:
            return self._tokenizer.encode(self._tokenizer.defused(seen))
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _TURN},
            {"role": "user", "content": self._tokenizer.defused(seen)},
        ]
        before, found, after = self._tokenizer.render_chat(messages).partition(_TURN)
        if not found:
            raise ConfigError(
                "--env: the chat template leaves out earlier turns of the assistant, so nothing "
                "can be appended to a conversation; take --data.template none, or another model"
            )
        ids = self._tokenizer.encode(after)
        return ids[1:] if ids and ids[0] == last else ids

"""What every drafter is behind: the history once, then live requests in batches.

    build -> start -> (append_batch -> speculate_batch)* -> stop

A request is a small int chosen by the caller. A peer whose own API takes one request at a time
fills in `append` and `speculate`; one with a batch API overrides the `_batch` pair and gets flat
arrays, so that it is not charged for Python lists.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from drafts.workload import Texts

Chains = list[Sequence[int] | np.ndarray] | tuple[np.ndarray, np.ndarray]
"""A draft per request, or (tokens int32 [B, W], lengths int32 [B])."""


class Absent(Exception):
    """The peer cannot run here; the text says why in one line."""


class Drafter:
    tree = False
    """Drafts are trees, in one of the forms of `replay.accept_tree`."""
    wants_context: int | None = None
    """Trailing tokens of the stream that `speculate` looks at; None: it keeps its own."""
    one_by_one = True
    """The replay may ask for single drafts now and then, to time them."""
    own_window = False
    """It takes no window from the replay."""
    modules: tuple[str, ...] = ()
    """What must import, or the peer is absent."""
    home = "venv"
    """Whose Python runs it: the peers' (`venv`) or this one (`here`)."""
    knobs: tuple[dict[str, Any], ...] = ({},)
    """Settings that `--equal` scans beside the window, each an argument of `tune`."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        unknown = set(settings) - set(self.defaults())
        if unknown:
            raise ValueError(f"{unknown.pop()}: not a setting; there are {sorted(self.defaults())}")
        for name, value in {**self.defaults(), **settings}.items():
            setattr(self, name, value)

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The settings and their default values."""
        return {}

    def build(self, history: Texts) -> None:
        """Index the history; prompt i has key i."""

    def tune(self, **knobs: Any) -> None:
        """Change settings of an index that is built."""
        for name, value in {**self.defaults(), **self.settings, **knobs}.items():
            setattr(self, name, value)

    def start(self, requests: np.ndarray, prompts: np.ndarray, texts: list[np.ndarray]) -> None:
        """Begin requests [B] of prompts [B], whose tokens are texts."""

    def append_batch(self, requests: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> None:
        """Request i goes on with tokens[offsets[i] : offsets[i + 1]]."""
        one, ends = self.append, offsets.tolist()
        for request, begin, end in zip(requests.tolist(), ends, ends[1:], strict=False):
            one(request, tokens[begin:end])

    def append(self, request: int, tokens: np.ndarray) -> None:
        pass

    def verified(self, requests: np.ndarray, accepted: np.ndarray) -> None:
        """How many of its last drafted tokens each request accepted; then they are appended."""

    def speculate_batch(
        self, requests: np.ndarray, contexts: list[np.ndarray], windows: np.ndarray
    ) -> Chains:
        """Drafts of at most windows[i] tokens."""
        one = self.speculate
        rows = zip(requests.tolist(), contexts, windows.tolist(), strict=True)
        return [one(request, context, window) for request, context, window in rows]

    def speculate(self, request: int, context: np.ndarray, window: int) -> Any:
        raise NotImplementedError

    def stop(self, requests: np.ndarray) -> None:
        """End requests; what they wrote is forgotten."""

    def nbytes(self) -> int | None:
        """What the peer says its index takes; None: it does not say."""
        return None

"""rlcore's suffix forest behind the drafters' interface."""

import inspect
from typing import Any

import numpy as np
from drafts.drafter import Chains, Drafter
from drafts.workload import Texts

MAX_WINDOW = 64  # of `fixed:N`


class Rlcore(Drafter):
    """`rlcore.ops.suffix.Forest`, driven by flat arrays. Settings are the forest's arguments, and
    `step`: accept, advance and draft in one call (then the time of the draft is the whole),
    `own_window`: the forest's window instead of the harness's, and `weighted`: branches go by the
    rewards, else by how often they were taken."""

    modules = ("rlcore",)
    home = "here"
    knobs = tuple({"min_prob": p} for p in (0.05, 0.2, 0.3, 0.4, 0.6, 0.8))

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        from rlcore.ops.suffix import Forest

        forest = {n: p.default for n, p in inspect.signature(Forest).parameters.items()}
        return {**forest, "threads": 1, "prompt": True, "step": False, "own_window": False} | {
            "weighted": True
        }

    def build(self, history: Texts) -> None:
        from rlcore.ops.suffix import Forest

        self.history = history  # arrays of the caller, no copy: `tune` builds again
        given = {name: getattr(self, name) for name in inspect.signature(Forest).parameters}
        if not self.own_window:
            given["max_window"] = max(given["max_window"], MAX_WINDOW)
        self.forest = Forest(**given)
        keys = np.arange(history.num_prompts, dtype=np.int64)
        self.forest.build(
            keys,
            history.tokens,
            history.response_offsets,
            history.prompt_offsets,
            history.rewards if self.weighted else np.zeros_like(history.rewards),
        )
        self.forest.swap()
        self.handles = np.zeros(0, np.int64)
        self.one_by_one = not self.step

    def tune(self, **knobs: Any) -> None:
        super().tune(**knobs)
        self.build(self.history)

    def start(self, requests: np.ndarray, prompts: np.ndarray, texts: list[np.ndarray]) -> None:
        if len(self.handles) <= requests.max():
            self.handles = np.resize(self.handles, int(requests.max()) + 1)
        handles = self.forest.open(prompts.astype(np.int64))
        self.handles[requests] = handles
        if self.prompt:
            offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
            self.forest.advance(handles, np.concatenate(texts), offsets)
        self.waiting: tuple[np.ndarray, np.ndarray] | None = None

    def verified(self, requests: np.ndarray, accepted: np.ndarray) -> None:
        self.accepted = accepted

    def append_batch(self, requests: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> None:
        if self.step:
            self.waiting = tokens, offsets
            return
        handles = self.handles[requests]
        if self.own_window:
            self.forest.accept(handles, self.accepted)
        self.forest.advance(handles, tokens, offsets)

    def speculate_batch(
        self, requests: np.ndarray, contexts: list[np.ndarray], windows: np.ndarray
    ) -> Chains:
        handles = self.handles[requests]
        given = None if self.own_window else windows
        if self.waiting is None:
            return self.forest.draft(handles, given)
        (tokens, offsets), self.waiting = self.waiting, None
        return self.forest.step(handles, self.accepted, tokens, offsets, given)

    def speculate(self, request: int, context: np.ndarray, window: int) -> np.ndarray:
        tokens, lengths = self.forest.draft(
            self.handles[request : request + 1],
            None if self.own_window else np.array([window], np.int32),
        )
        return tokens[0, : lengths[0]]

    def stop(self, requests: np.ndarray) -> None:
        self.forest.close(self.handles[requests])

    def nbytes(self) -> int:
        return int(self.forest.nbytes)

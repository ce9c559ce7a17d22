"""HistoSpec's memory: earlier responses by prompt, and the index that drafts from them.

    Library   on rank 0, for the whole run: what the last epochs' responses to each prompt were,
              bounded, the oldest go first; part of the checkpoint
    Index     at every engine: the responses to the prompts that it has, as a suffix forest. A
              thread of its own builds it beside decoding, then it takes the old one's place

RhymeRL, arXiv:2508.18588. A prompt is known by its tokens, so it may move to another row or file.
"""

import hashlib
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from rlcore.ops.suffix import LARGEST_REWARD, Forest
from rlcore.records import (
    GroupId,
    History,
    IntArray,
    Prompt,
    Remember,
    Request,
    RequestId,
    group_of,
)
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import log

Draft = Literal["none", "ngram", "history", "history_reward"]
CONTEXT = 8
"""Of the prompt's tokens, these go before a response, so that its first tokens are drafted too."""
_STOP_S = 30.0


def prompt_key(prompt: IntArray) -> int:
    """The name of a prompt in all epochs, 63 bits of its tokens' hash. [P] int32."""
    data = np.ascontiguousarray(prompt, np.int32).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1


def history_of(id: RequestId, prompt: IntArray, response: IntArray, score: float) -> History:
    """What is kept of a scored response."""
    tokens = np.concatenate((prompt[-CONTEXT:], response)).astype(np.int32)
    return History(key=prompt_key(prompt), id=id, tokens=tokens, score=score)


class Library:
    """Histories of prompts by age. The same records in any order make the same library."""

    def __init__(self, *, max_tokens: int, epochs: int = 1) -> None:
        """`max_tokens`: the oldest prompts are forgotten beyond it; `epochs`: how many times' of
        a prompt's responses are kept."""
        self._max_tokens, self._epochs = max_tokens, epochs
        self._prompts: dict[int, list[list[History]]] = {}
        """In order of their last responses, oldest first; of each the last epochs, oldest first."""
        self._tokens = 0

    @property
    def num_tokens(self) -> int:
        return self._tokens

    def __len__(self) -> int:
        """Prompts that it knows."""
        return len(self._prompts)

    def add(self, histories: Iterable[History]) -> None:
        """All responses of one round, and no prompt's of an earlier one."""
        found: dict[int, list[History]] = {}
        for history in sorted(histories, key=lambda h: h.id):
            found.setdefault(history.key, []).append(history)
        for key, group in found.items():
            kept = self._prompts.pop(key, [])
            self._prompts[key] = [*kept, group]
            self._tokens += _count(group)
            while len(self._prompts[key]) > self._epochs:
                self._tokens -= _count(self._prompts[key].pop(0))
        while self._tokens > self._max_tokens and self._prompts:
            oldest = self._prompts.pop(next(iter(self._prompts)))
            self._tokens -= sum(map(_count, oldest))

    def of(self, keys: Iterable[int]) -> list[History]:
        """What is known of these prompts."""
        return [
            history
            for key in dict.fromkeys(keys)
            for group in self._prompts.get(key, ())
            for history in group
        ]

    def save(self, path: Path) -> None:
        """Write everything to a file. OSError where it cannot be written."""
        groups = [(k, g) for k, kept in self._prompts.items() for g in kept]
        flat = [h for _, group in groups for h in group]
        with open(path, "wb") as file:
            np.savez(
                file,
                keys=np.array([key for key, _ in groups], np.int64),
                sizes=np.array([len(group) for _, group in groups], np.int64),
                ids=np.array([h.id for h in flat], np.str_),
                scores=np.array([h.score for h in flat], np.float64),
                lengths=np.array([len(h.tokens) for h in flat], np.int64),
                tokens=np.concatenate([np.zeros(0, np.int32), *(h.tokens for h in flat)]),
            )

    def load(self, path: Path) -> None:
        """Take what `save` wrote in place of what is known. ValueError where it is no such file."""
        try:
            with np.load(path, allow_pickle=False) as file:
                parts = {name: file[name] for name in file.files}
            ends, at, first = np.cumsum(parts["lengths"]), 0, 0
            prompts: dict[int, list[list[History]]] = {}
            for key, size in zip(parts["keys"].tolist(), parts["sizes"].tolist(), strict=True):
                group = []
                for i in range(first, first + size):
                    group.append(
                        History(
                            key=key,
                            id=str(parts["ids"][i]),
                            tokens=parts["tokens"][at : ends[i]].copy(),
                            score=float(parts["scores"][i]),
                        )
                    )
                    at = int(ends[i])
                first += size
                prompts.setdefault(key, []).append(group)
        except (KeyError, ValueError, IndexError, EOFError) as error:
            raise ConfigError(f"{path}: holds no histories ({error})") from error
        self._prompts, self._tokens = prompts, int(parts["lengths"].sum())
        self.add(())  # the bound may be another one now


def _count(group: Iterable[History]) -> int:
    return sum(len(h.tokens) for h in group)


class Teacher:
    """Tells every replica, once in a round, what is known of the prompts that it gets."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._told: set[tuple[int, int]] = set()

    def before(
        self, rank: int, prompts: Mapping[GroupId, Prompt], requests: Sequence[Request] = ()
    ) -> Remember | None:
        """What to send to a rank before these prompts and requests; None where there is nothing
        new. Of a request that was elsewhere before it is told again: the rank may have been through
        with that prompt and forgotten it."""
        if not len(self._library):
            return None
        moved = {group_of(r.id) for r in requests if r.resume is not None}
        for group in moved.intersection(prompts):
            self._told.discard((rank, prompt_key(prompts[group].tokens)))
        keys = {prompt_key(p.tokens): None for p in prompts.values()}
        new = [key for key in keys if (rank, key) not in self._told]
        self._told.update((rank, key) for key in new)
        histories = self._library.of(new)
        return Remember(rank=rank, histories=tuple(histories)) if histories else None

    def lost(self, rank: int) -> None:
        """A replica's engine is gone, and all that it was told."""
        self._told = {(r, key) for r, key in self._told if r != rank}


class Index:
    """A suffix forest that is built in the background. Calls come from one thread."""

    def __init__(self, forest: Forest, *, rewards: bool, wait: bool = False) -> None:
        """`rewards`: branches go by them, else by how often they were taken. `wait`: `remember`
        returns when the index is there, so that drafts do not depend on the clock."""
        self.forest = forest
        self._rewards, self._wait = rewards, wait
        self._known: dict[int, list[History]] = {}
        self._lock = threading.Condition()
        self._todo: Mapping[int, Sequence[History]] | None = None
        self._building = False
        self._news = False
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def remember(self, histories: Sequence[History], wanted: Collection[int]) -> None:
        """Index these histories beside those of the prompts in `wanted`; other prompts go."""
        known = {key: group for key, group in self._known.items() if key in wanted}
        for key in {h.key for h in histories}:
            known[key] = []
        for history in histories:
            known[history.key].append(history)
        self._known = known
        with self._lock:
            self._todo = dict(known)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="histories")
                self._thread.start()
            self._lock.notify_all()
            if self._wait:
                self._lock.wait_for(self._is_through)

    def _is_through(self) -> bool:
        """Nothing is to be built, or nobody is there who would; then `take_news` says why."""
        is_idle = self._todo is None and not self._building
        return is_idle or self._error is not None or self._is_closed

    def take_news(self) -> bool:
        """Does another index serve since the last call? Requests that are opened now find it.
        RuntimeError where the thread has failed."""
        with self._lock:
            if self._error is not None:
                raise RuntimeError(f"the index of histories failed: {self._error!r}")
            news, self._news = self._news, False
        return news

    @property
    def num_prompts(self) -> int:
        """Prompts whose histories it was given."""
        return len(self._known)

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._todo is not None or self._is_closed)
                if self._is_closed:
                    return
                todo, self._todo, self._building = self._todo, None, True
            assert todo is not None
            error: BaseException | None = None
            serves = False
            try:
                serves = self._build(todo)
            except Exception as found:
                error = found
            with self._lock:
                self._building, self._error = False, error
                self._news |= serves
                self._lock.notify_all()
                if error is not None:
                    return

    def _build(self, known: Mapping[int, Sequence[History]]) -> bool:
        groups = {key: group for key, group in known.items() if group}
        flat = [h for group in groups.values() for h in group]
        rewards = np.array([h.score if self._rewards else 0.0 for h in flat], np.float32)
        try:
            self.forest.build(
                np.array(list(groups), np.int64),
                np.concatenate([np.zeros(0, np.int32), *(h.tokens for h in flat)]),
                _offsets(len(h.tokens) for h in flat),
                _offsets(map(len, groups.values())),
                np.nan_to_num(rewards).clip(-LARGEST_REWARD, LARGEST_REWARD),
            )
        except MemoryError:
            log.warning(
                "no memory for an index of %d tokens of history: drafts come from what there was "
                "before; lower --draft.max_tokens or --draft.epochs",
                _count(flat),
            )
            return False
        self.forest.swap()
        return True


def _offsets(sizes: Iterable[int]) -> np.ndarray:
    return np.cumsum([0, *sizes], dtype=np.int64)

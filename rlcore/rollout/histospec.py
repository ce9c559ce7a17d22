"""Histories for HistoSpec: earlier responses by prompt, and the index from which engines draft.

    HistoryStore   on rank 0, saved in checkpoints: the responses to each prompt in its most recent
                   epochs. Its size is limited; the oldest prompts are removed first
    Index          in every engine: the responses to the engine's prompts, as a suffix forest. A
                   background thread builds a new forest while the engine decodes, then swaps it in

Source: RhymeRL, arXiv:2508.18588. The key of a prompt depends on its tokens only, so the prompt may
move to another row or file of the data.
"""

import threading
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from msgspec import structs

from rlcore.ops.suffix import LARGEST_REWARD, Forest
from rlcore.records import (
    AnyCommand,
    GroupId,
    History,
    IntArray,
    Prompt,
    Remember,
    Request,
    RequestId,
    Sample,
    Submit,
    group_of,
    prompt_key,
)
from rlcore.utils.errors import ConfigError
from rlcore.utils.files import fault
from rlcore.utils.log import log

Draft = Literal["none", "ngram", "history", "history_reward"]
CONTEXT = 8
"""Number of prompt tokens stored before each response, to draft its first tokens too."""
_STOP_S = 30.0


def history_of(id: RequestId, prompt: IntArray, response: IntArray, score: float) -> History:
    """Return the history record of a scored response."""
    tokens = np.concatenate((prompt[-CONTEXT:], response)).astype(np.int32)
    return History(key=prompt_key(prompt), id=id, tokens=tokens, score=score)


def histories_of(sample: Sample, key: int, score: float) -> list[History]:
    """Return the history records of a scored sample, one for each row. `key` is that of the data's
    prompt, since the first context of an episode may differ from it."""
    return [
        structs.replace(history_of(sample.id, row.prompt, row.tokens, score), key=key)
        for row in sample.rows
        if len(row.tokens)
    ]


class HistoryStore:
    """Store of earlier responses (histories) by prompt, oldest prompts first. The order in which
    the records of a round are added does not matter. A batch of `--mode async` is a round."""

    def __init__(self, *, max_tokens: int, epochs: int = 1) -> None:
        """
        Args:
            max_tokens: maximum number of stored tokens; beyond it the oldest prompts are removed.
            epochs: number of most recent epochs whose responses to a prompt are kept.
        """
        self._max_tokens, self._epochs = max_tokens, epochs
        self._prompts: dict[int, list[list[History]]] = {}
        """Histories by prompt key: one list per epoch, oldest first. Prompts are in the order of
        their latest responses, oldest first."""
        self._tokens = 0

    @property
    def num_tokens(self) -> int:
        return self._tokens

    def __len__(self) -> int:
        """Return the number of prompts with histories."""
        return len(self._prompts)

    def add(self, histories: Iterable[History]) -> None:
        """Add all responses of one round. A prompt's responses in one round form one epoch."""
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
        """Return the histories of the prompts with these keys."""
        return [
            history
            for key in dict.fromkeys(keys)
            for group in self._prompts.get(key, ())
            for history in group
        ]

    def save(self, path: Path) -> None:
        """Write all histories to a file. Raise OSError if the file cannot be written."""
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
        """Replace all histories by those in a file that `save` wrote. Raise ConfigError if the file
        has another format."""
        try:
            if why := fault(path):
                raise ValueError(why)
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
        except (
            KeyError,
            ValueError,
            IndexError,
            EOFError,
            OSError,
            TypeError,
            MemoryError,
            zipfile.BadZipFile,
            zlib.error,
        ) as error:
            raise ConfigError(f"{path}: not a file of histories ({error})") from error
        self._prompts, self._tokens = prompts, int(parts["lengths"].sum())
        self.add(())  # apply max_tokens, which may be smaller than in the saved run


def _count(group: Iterable[History]) -> int:
    return sum(len(h.tokens) for h in group)


class HistorySender:
    """Sender of histories: every engine gets earlier responses to its prompts once per sender. A
    sender serves one round or, with `--mode async`, one policy version."""

    def __init__(self, library: HistoryStore) -> None:
        self._library = library
        self._told: set[tuple[int, int]] = set()

    def before(
        self, rank: int, prompts: Mapping[GroupId, Prompt], requests: Sequence[Request] = ()
    ) -> Remember | None:
        """Return the command that sends the histories of these prompts to a rank, or None if
        there is nothing to send. Send the command before the requests. For a moved request, send
        histories again, because the engine may have removed them."""
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
        """Record that a rank's engine has failed and has lost its histories."""
        self._told = {(r, key) for r, key in self._told if r != rank}


def with_histories(
    commands: Iterable[AnyCommand], sender: HistorySender | None
) -> Iterator[AnyCommand]:
    """Yield `commands`, and before each `Submit` the `Remember` with its prompts' histories. If
    `sender` is None, no engine drafts from histories."""
    for command in commands:
        if sender is not None and isinstance(command, Submit):
            first = sender.before(command.rank, command.prompts, command.requests)
            if first is not None:
                yield first
        yield command


class Index:
    """Suffix forest over histories, built in a background thread. Call all methods from one
    thread."""

    def __init__(
        self,
        forest: Forest,
        *,
        rewards: bool,
        wait: bool = False,
        upload: Callable[[Forest], None] | None = None,
    ) -> None:
        """
        Args:
            rewards: if true, weight branches by reward; if false, by how often they were taken.
            wait: if true, `remember` returns only once the index is built, so that drafts do not
                depend on timing.
            upload: function that the thread calls with every new index, to copy it to a device.
        """
        self.forest = forest
        self._rewards, self._wait, self._upload = rewards, wait, upload
        self._known: dict[int, list[History]] = {}
        self._lock = threading.Condition()
        self._todo: Mapping[int, Sequence[History]] | None = None
        self._building = False
        self._news = False
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def remember(self, histories: Sequence[History], wanted: Collection[int]) -> None:
        """Index `histories`. Remove earlier histories of prompts that are not in `wanted`."""
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
        """Return whether the thread has indexed all given histories or has stopped. If the thread
        has failed, `take_news` raises the reason."""
        is_idle = self._todo is None and not self._building
        return is_idle or self._error is not None or self._is_closed

    def take_news(self) -> bool:
        """Return whether a new index was swapped in since the last call. Requests opened from now
        on use the new index. Raise RuntimeError if the thread has failed."""
        with self._lock:
            if self._error is not None:
                raise RuntimeError(f"building the index of histories failed: {self._error!r}")
            news, self._news = self._news, False
        return news

    @property
    def num_prompts(self) -> int:
        """Number of prompts with an entry in the index."""
        return len(self._known)

    def close(self) -> None:
        """Stop the background thread. Idempotent."""
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
            self.forest.swap()
            if self._upload is not None:
                self._upload(self.forest)
        except MemoryError:
            log.warning(
                "no memory for an index of %d tokens of history, so drafts use the previous "
                "index; lower --draft.max_history_tokens or --draft.history_epochs",
                _count(flat),
            )
            return False
        return True


def _offsets(sizes: Iterable[int]) -> np.ndarray:
    return np.cumsum([0, *sizes], dtype=np.int64)

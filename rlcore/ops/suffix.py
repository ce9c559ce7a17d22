"""Draft tokens for speculative decoding from earlier responses to the same prompt (suffix forest).

This is RhymeRL's HistoSpec, arXiv:2508.18588. Each prompt has an index over its earlier responses
(its history). The end of a request's stream (its tokens so far) is matched in the index. The draft
is the continuation with the largest sum of rewards.

    match   longest suffix of the stream (response, and prompt if appended) that occurs in one of
            the prompt's responses, at most `limit` tokens. A match below `min_match` gives no
            draft. If no occurrence has a continuation, the match is shortened until one has.
    branch  next token. Branches are ranked by the sum of rewards over their occurrences, then by
            the number of occurrences, then by the smaller id. If a prompt has negative rewards, the
            smallest is subtracted from all its rewards. Rewards are rounded to steps of 2**-16.
    draft   the highest-ranked branch at every token, at most `window` tokens. The draft ends where
            the product of branch probabilities, count(path) / count(match), falls below `min_prob`.
            If the first token's probability is below `min_prob`, the most frequent first token
            replaces it (on a tie, the smaller id). If that token is below, too, there is no draft.
    live    match in the request's own stream. Candidates are the most recent `candidates` earlier
            positions at which the stream's last `live_match` tokens occur. The candidate with the
            longest match backwards is used (at most `limit` tokens, 64 if `limit` is 0), on a tie
            the most recent. Its continuation is the draft; past the stream's end, the draft repeats
            itself. The live draft replaces the history's draft if its match is longer, or if the
            history gives no draft.
    window  maximum draft length. It starts at `start_window`, grows by `growth` up to `max_window`
            after a fully accepted draft, and is reset by a rejection, but not by an empty draft.
            `knee` is the number of tokens per forward pass from which on compute limits the speed.
            If it is set, each of `running` requests drafts at most knee // running - 1 tokens (its
            budget, 1 to max_window). Start and growth of windows are then at least budget // 4,
            rounded down to even.

Additions to the paper: live matches, unlimited match length, and the load rule of `knee`. The C++
code (`csrc/suffix`) is used if built; `ReferenceForest` gives the same drafts, a thousand times
slower. The GPU version is `rlcore.ops.suffix_device`.

Own code instead of arctic-inference's suffix trees: 235 us instead of 16,027 us per 256 requests,
and 42 instead of 258 bytes per token of history (`csrc/README.md`, window 16, one core).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlcore.ops import native

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float32]

LIVE_CAP = 64
WEIGHT_UNIT = 65536
LARGEST_REWARD = 16384.0


class Forest:
    """Suffix forest: histories of prompts, and open requests that draft from these histories.

    B: number of requests in a call; W: width of the draft array. Arrays are numpy, contiguous, and
    of exactly the stated dtype; returned arrays are new. A ValueError names the invalid argument.
    Lack of memory raises MemoryError. Neither error changes the forest. Calls release the GIL and
    may come from several threads: only `build` runs concurrently with other calls.
    """

    def __init__(
        self,
        *,
        limit: int = 7,
        min_match: int = 3,
        min_prob: float = 0.3,
        max_window: int = 32,
        start_window: int = 2,
        growth: int = 2,
        knee: int = 0,
        live: bool = True,
        candidates: int = 16,
        live_match: int = 3,
        factor: float = 0.0,
        stream: int = 4096,
        threads: int = 0,
    ) -> None:
        """Create an empty forest.

        Args:
        limit: maximum match length in tokens; 0: no limit.
        min_match: minimum match length in the history for a draft.
        min_prob: minimum probability of a draft, the product over its tokens; 0: off.
        max_window: maximum draft length.
        start_window: window of a new request, and after a rejection.
        growth: increase of the window after a fully accepted draft.
        knee: tokens per forward pass from which on compute limits the speed; 0: unknown.
        live: whether to match the request's own stream, too.
        candidates: number of earlier positions in the request's own stream that are compared.
        live_match: minimum match length in the request's own stream for a draft.
        factor: maximum draft length as a multiple of the match length; 0: off.
        stream: initial capacity of a stream in tokens; it grows by a third or a half when full.
            A stream without repeats takes 22 to 36 bytes per token at batch 256 (up to 48 at batch
            64, due to slabs of 4 MiB). When all requests are closed, one slab stays allocated.
        threads: number of threads of `build`; 0: one per core.
        """
        options = dict(
            limit=limit,
            min_match=min_match,
            min_prob=min_prob,
            max_window=max_window,
            start_window=start_window,
            growth=growth,
            knee=knee,
            live=live,
            candidates=candidates,
            live_match=live_match,
            factor=factor,
            stream=stream,
            threads=threads,
        )
        _check_types(options)
        core = native.load("suffix forest", "SuffixForest")
        make: Callable[..., ReferenceForest] = (
            ReferenceForest if core is None else core.SuffixForest
        )
        self._impl = make(**options)

    def build(
        self,
        keys: Longs,
        tokens: Ints,
        response_offsets: Longs,
        prompt_offsets: Longs,
        rewards: Floats,
    ) -> dict[str, float]:
        """Index R responses to P prompts, for use after `swap`. Open requests may draft meanwhile.

        Args:
            keys: [P] keys of the prompts, distinct.
            tokens: [N] tokens of all responses, one response after the other.
            response_offsets: [R + 1] start of each response in `tokens`.
            prompt_offsets: [P + 1] index of each prompt's first response among the R responses.
            rewards: [R] reward of every response; finite, at most 16384 in magnitude.

        Returns:
            The counts `tokens`, `states`, `edges` and `bytes`, and the duration `seconds`.
        """
        return self._impl.build(keys, tokens, response_offsets, prompt_offsets, rewards)

    def swap(self) -> None:
        """Use the histories of the most recent `build` for requests opened from now on.

        Open requests keep the old histories, which are freed once all these requests are closed.
        """
        self._impl.swap()

    def open(self, keys: Longs) -> Longs:
        """Open a request per prompt key [B]; return handles [B]. An unknown key has no history."""
        return self._impl.open(keys)

    def close(self, handles: Longs) -> None:
        """Close the requests of handles [B]; the handles become invalid."""
        self._impl.close(handles)

    def advance(self, handles: Longs, tokens: Ints, offsets: Longs) -> None:
        """Append tokens[offsets[i] : offsets[i + 1]] to the stream of handles[i]."""
        self._impl.advance(handles, tokens, offsets)

    def draft(
        self, handles: Longs, windows: Ints | None = None, *, running: int = 0
    ) -> tuple[Ints, Ints]:
        """Propose draft tokens for each request.

        Args:
            handles: [B] handles of open requests.
            windows: [B] maximum draft lengths; None: each request's window, limited by `knee`.
            running: number of requests that share the forward pass; 0: B.

        Returns:
            tokens [B, W], filled up with -1, and draft lengths [B]. W is the largest of `windows`;
            if `windows` is None, the maximum length under `knee` (max_window if it is 0).
        """
        return self._impl.draft(handles, windows, check_running(running))

    def accept(self, handles: Longs, lengths: Ints) -> None:
        """Report how many tokens of each request's last draft were accepted, [B], and update the
        windows."""
        self._impl.accept(handles, lengths)

    def step(
        self,
        handles: Longs,
        accepted: Ints,
        tokens: Ints,
        offsets: Longs,
        windows: Ints | None = None,
        *,
        running: int = 0,
    ) -> tuple[Ints, Ints]:
        """Run `accept`, `advance` and `draft` in one call."""
        return self._impl.step(handles, accepted, tokens, offsets, windows, check_running(running))

    def matches(self, handles: Longs) -> tuple[Ints, Ints]:
        """Return each request's match length in its history and own stream, [B] each; 0: none."""
        return self._impl.matches(handles)

    def windows(self, handles: Longs) -> Ints:
        """Return each request's window (maximum draft length), [B], before the load rule."""
        return self._impl.windows(handles)

    @property
    def nbytes(self) -> int:
        """Bytes of histories and streams in memory; 0 without the native build."""
        return self._impl.nbytes

    def stats(self) -> dict[str, int]:
        """Return counts: prompts, tokens, states, edges, history_bytes, live_bytes, live_tokens,
        requests.

        `prompts` to `edges` count the current histories; history_bytes includes older ones still in
        use. Without the native build, states, edges and bytes are 0.
        """
        return self._impl.stats()

    def arena(self) -> NDArray[np.uint8]:
        """Return the current histories as read-only bytes [nbytes], for a copy to a device.

        Raises:
            ValueError: before the first `swap`, or without the native build.
        """
        block = self._impl.arena()
        if block is None:
            raise ValueError("arena: no histories (swap was not called, or no native build)")
        return block


# ---- the reference -----------------------------------------------------------------------------


@dataclass(slots=True)
class _History:
    """History of a prompt. `ends`: occurrences (response, end) of each run of min_match tokens."""

    responses: list[list[int]]
    weights: list[int]
    ends: dict[tuple[int, ...], list[tuple[int, int]]]


_NOTHING = _History([], [], {})


@dataclass(slots=True)
class _Request:
    history: _History
    stream: list[int] = field(default_factory=list)
    window: int = 0
    proposed: int = 0
    start: int = 0
    growth: int = 0

    def append(self, tokens: list[int]) -> None:
        """Append tokens to the stream."""
        self.stream += tokens

    def take_load(self, start: int, growth: int) -> None:
        """Set start and growth of the window for the current load."""
        self.window = self.window or start
        self.start, self.growth = start, growth

    def propose(self, num: int) -> None:
        """Store the length of the draft."""
        self.proposed = num

    def accept(self, num: int, max_window: int) -> None:
        """Record that `num` tokens of the draft were accepted, and set the next window."""
        if self.proposed > 0:
            grown = min(self.window + self.growth, max_window)
            self.window = grown if num >= self.proposed else self.start
        self.proposed = 0


class ReferenceForest:
    """Python reference of `Forest`. For every draft it visits all occurrences of the match."""

    def __init__(
        self,
        *,
        limit: int,
        min_match: int,
        min_prob: float,
        max_window: int,
        start_window: int,
        growth: int,
        knee: int,
        live: bool,
        candidates: int,
        live_match: int,
        factor: float,
        stream: int,
        threads: int,
    ) -> None:
        given = locals()
        del given["self"]
        _check_types(given)

        def need(good: bool, sentence: str) -> None:
            if not good:
                raise ValueError(sentence)

        need(1 <= min_match <= LIVE_CAP, f"min_match {min_match}: must be 1 to {LIVE_CAP}")
        need(
            limit == 0 or limit >= min_match,
            f"limit {limit}: must be 0 (none) or at least min_match {min_match}",
        )
        need(0 <= min_prob <= 1, f"min_prob {min_prob}: must be from 0 to 1")
        need(1 <= max_window <= 4096, f"max_window {max_window}: must be 1 to 4096")
        need(
            1 <= start_window <= max_window,
            f"start_window {start_window}: must be 1 to max_window {max_window}",
        )
        need(0 <= growth <= 4096, f"growth {growth}: must be 0 to 4096")
        need(knee >= 0, f"knee {knee}: must be 0 (unknown) or tokens per forward")
        need(candidates >= 1, f"candidates {candidates}: must be at least 1")
        need(1 <= live_match <= LIVE_CAP, f"live_match {live_match}: must be 1 to {LIVE_CAP}")
        need(0 <= factor <= 4096, f"factor {factor}: must be 0 (none) to 4096")
        need(0 <= stream <= 1 << 30, f"stream {stream}: must be 0 to {1 << 30}")
        need(threads >= 0, f"threads {threads}: must be 0 (all cores) or more")
        self.limit, self.min_match, self.min_prob = limit, min_match, min_prob
        self.max_window, self.start_window, self.growth = max_window, start_window, growth
        self.knee, self.live, self.candidates = knee, live, candidates
        self.live_match, self.factor = live_match, factor
        self._current: dict[int, _History] = {}
        self._next: dict[int, _History] | None = None
        self._requests: dict[int, _Request] = {}
        self._opened = 0

    # ---- histories

    def build(
        self,
        keys: Longs,
        tokens: Ints,
        response_offsets: Longs,
        prompt_offsets: Longs,
        rewards: Floats,
    ) -> dict[str, float]:
        check_array("keys", keys, np.int64)
        check_array("tokens", tokens, np.int32)
        check_array("response_offsets", response_offsets, np.int64)
        check_array("prompt_offsets", prompt_offsets, np.int64)
        check_array("rewards", rewards, np.float32)
        check_offsets("prompt_offsets", prompt_offsets, len(keys), len(rewards))
        check_offsets("response_offsets", response_offsets, len(rewards), len(tokens))
        check_tokens(tokens)
        for i, reward in enumerate(rewards.tolist()):
            if not abs(reward) <= LARGEST_REWARD:
                raise ValueError(
                    f"rewards[{i}] {reward}: must be finite, at most 16384 in magnitude"
                )
        made: dict[int, _History] = {}
        flat, starts = tokens.tolist(), response_offsets.tolist()
        for p, key in enumerate(keys.tolist()):
            if key in made:
                raise ValueError(f"keys[{p}] {key}: is listed twice; list every prompt once")
            mine = range(prompt_offsets[p], prompt_offsets[p + 1])
            made[key] = self._index(
                [flat[starts[r] : starts[r + 1]] for r in mine],
                [round(float(rewards[r]) * WEIGHT_UNIT) for r in mine],
            )
        self._next = made
        return {"tokens": len(tokens), "states": 0, "edges": 0, "bytes": 0, "seconds": 0.0}

    def _index(self, responses: list[list[int]], units: list[int]) -> _History:
        least = min(0, min(units, default=0))
        ends: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        for r, text in enumerate(responses):
            for end in range(self.min_match, len(text) + 1):
                ends[tuple(text[end - self.min_match : end])].append((r, end))
        return _History(responses, [u - least for u in units], dict(ends))

    def swap(self) -> None:
        if self._next is None:
            raise ValueError("swap: nothing was built since the last swap; call build first")
        self._current, self._next = self._next, None

    # ---- requests

    def open(self, keys: Longs) -> Longs:
        check_array("keys", keys, np.int64)
        handles = np.arange(self._opened, self._opened + len(keys), dtype=np.int64)
        for handle, key in zip(handles.tolist(), keys.tolist(), strict=True):
            self._requests[handle] = _Request(self._current.get(key, _NOTHING))
        self._opened += len(keys)
        return handles

    def close(self, handles: Longs) -> None:
        self._find(handles)
        for handle in handles.tolist():
            del self._requests[handle]

    def _find(self, handles: Longs, *, once: bool = True) -> list[_Request]:
        check_array("handles", handles, np.int64)
        seen: set[int] = set()
        for i, handle in enumerate(handles.tolist()):
            if handle not in self._requests:
                raise ValueError(f"handles[{i}] {handle}: is not open (closed, or never opened)")
            if once and handle in seen:
                raise ValueError(f"handles[{i}] {handle}: is listed twice; list every handle once")
            seen.add(handle)
        return [self._requests[h] for h in handles.tolist()]

    def advance(self, handles: Longs, tokens: Ints, offsets: Longs) -> None:
        requests = self._check_advance(handles, tokens, offsets)
        self._append(requests, tokens, offsets)

    def _check_advance(self, handles: Longs, tokens: Ints, offsets: Longs) -> list[_Request]:
        requests = self._find(handles)
        check_array("tokens", tokens, np.int32)
        check_array("offsets", offsets, np.int64)
        check_offsets("offsets", offsets, len(handles), len(tokens))
        check_tokens(tokens)
        return requests

    def _append(self, requests: list[_Request], tokens: Ints, offsets: Longs) -> None:
        for i, request in enumerate(requests):
            request.append(tokens[offsets[i] : offsets[i + 1]].tolist())

    def accept(self, handles: Longs, lengths: Ints) -> None:
        self._accept(self._check_accept(handles, lengths), lengths)

    def _check_accept(self, handles: Longs, accepted: Ints) -> list[_Request]:
        requests = self._find(handles)
        check_array("accepted", accepted, np.int32)
        check_accepted(accepted, [request.proposed for request in requests])
        return requests

    def _accept(self, requests: list[_Request], accepted: Ints) -> None:
        for request, n in zip(requests, accepted.tolist(), strict=True):
            request.accept(n, self.max_window)

    def step(
        self,
        handles: Longs,
        accepted: Ints,
        tokens: Ints,
        offsets: Longs,
        windows: Ints | None,
        running: int,
    ) -> tuple[Ints, Ints]:
        self._check_windows(windows, len(handles))
        requests = self._check_advance(handles, tokens, offsets)
        self._check_accept(handles, accepted)
        self._accept(requests, accepted)
        self._append(requests, tokens, offsets)
        return self.draft(handles, windows, running)

    def _check_windows(self, windows: Ints | None, batch: int) -> None:
        if windows is None:
            return
        check_array("windows", windows, np.int32)
        check_windows(windows, batch, self.max_window)

    def _load(self, running: int) -> tuple[int, int, int]:
        """Return maximum, start and growth of windows if `running` requests share a forward."""
        if self.knee == 0 or running <= 0:
            return self.max_window, self.start_window, self.growth
        budget = max(1, min(self.knee // running - 1, self.max_window))
        step = budget // 4 // 2 * 2
        return budget, max(self.start_window, step), max(self.growth, step)

    def draft(self, handles: Longs, windows: Ints | None, running: int) -> tuple[Ints, Ints]:
        requests = self._find(handles)
        self._check_windows(windows, len(handles))
        budget, start, growth = self._load(running if running > 0 else len(handles))
        sizes: Sequence[int] = [] if windows is None else windows.tolist()
        width = budget if windows is None else max(sizes, default=0)
        tokens = np.full((len(handles), width), -1, np.int32)
        lengths = np.zeros(len(handles), np.int32)
        for i, request in enumerate(requests):
            request.take_load(start, growth)
            window = sizes[i] if windows is not None else min(request.window, budget)
            made = self._propose(request, window)
            request.propose(len(made))
            lengths[i] = len(made)
            tokens[i, : len(made)] = made
        return tokens, lengths

    def matches(self, handles: Longs) -> tuple[Ints, Ints]:
        requests = self._find(handles, once=False)
        history = [self._match(r)[0] for r in requests]
        live = [self._own(r)[1] if self.live else 0 for r in requests]
        return np.array(history, np.int32), np.array(live, np.int32)

    def windows(self, handles: Longs) -> Ints:
        requests = self._find(handles, once=False)
        return np.array([r.window or self.start_window for r in requests], np.int32)

    # ---- match and draft

    def _match(self, request: _Request) -> tuple[int, list[tuple[int, int, int]]]:
        """Return the longest match length, and (response, end, length) of all history matches."""
        stream, history = request.stream, request.history
        limit = self.limit or len(stream)
        found = []
        if len(stream) >= self.min_match:
            for r, end in history.ends.get(tuple(stream[-self.min_match :]), []):
                text, n = history.responses[r], self.min_match
                while n < min(limit, end, len(stream)) and text[end - n - 1] == stream[-n - 1]:
                    n += 1
                found.append((r, end, n))
        return max((n for _, _, n in found), default=0), found

    def _propose(self, request: _Request, window: int) -> list[int]:
        if window <= 0:
            return []
        longest, found = self._match(request)
        history, draft, length = request.history, [], 0
        for length in range(longest, self.min_match - 1, -1):
            places = [(r, end) for r, end, n in found if n >= length]
            if self._children(history, places):
                draft = self._grow(history, places, self._window_for(window, length))
                break
        if not draft:
            length = 0
        if self.live:
            end, own = self._own(request)
            if own > length:
                stream = request.stream.copy()
                for i in range(self._window_for(window, own)):
                    stream.append(stream[end + i])
                draft = stream[len(request.stream) :]
        return draft

    def _window_for(self, window: int, length: int) -> int:
        return min(window, int(self.factor * length)) if self.factor > 0 else window

    @staticmethod
    def _children(
        history: _History, places: list[tuple[int, int]]
    ) -> list[tuple[int, list[tuple[int, int]]]]:
        """Return the tokens that follow one of `places` (response, end), by descending priority.
        Return each token with its own places, which lie after the token."""
        after: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for r, end in places:
            if end < len(history.responses[r]):
                after[history.responses[r][end]].append((r, end + 1))
        weight = history.weights

        def order(child: tuple[int, list[tuple[int, int]]]) -> tuple[int, int, int]:
            return -sum(weight[r] for r, _ in child[1]), -len(child[1]), child[0]

        return sorted(after.items(), key=order)

    def _grow(self, history: _History, places: list[tuple[int, int]], window: int) -> list[int]:
        draft: list[int] = []
        least = self.min_prob * len(places)
        while len(draft) < window:
            children = self._children(history, places)
            if not draft and children and len(children[0][1]) < least:
                children = sorted(children, key=lambda child: (-len(child[1]), child[0]))
            if not children or len(children[0][1]) < least:
                break
            token, places = children[0]
            draft.append(token)
        return draft

    def _own(self, request: _Request) -> tuple[int, int]:
        """Return (end, length) of the best match in the request's own stream; (0, 0) if none."""
        stream, gram = request.stream, self.live_match
        cap = max(self.limit or LIVE_CAP, gram)
        best, seen = (0, 0), 0
        for end in range(len(stream) - 1, gram - 1, -1):
            if stream[end - gram : end] != stream[-gram:]:
                continue
            n = gram
            while n < min(cap, end) and stream[end - n - 1] == stream[-n - 1]:
                n += 1
            best = max(best, (end, n), key=lambda place: place[1])
            seen += 1
            if seen == self.candidates:
                break
        return best

    # ---- statistics

    @property
    def nbytes(self) -> int:
        return 0

    def stats(self) -> dict[str, int]:
        tokens = sum(len(t) for h in self._current.values() for t in h.responses)
        names = ["states", "edges", "history_bytes", "live_bytes"]
        return {
            "prompts": len(self._current),
            "tokens": tokens,
            **dict.fromkeys(names, 0),
            "live_tokens": sum(len(r.stream) for r in self._requests.values() if self.live),
            "requests": len(self._requests),
        }

    def arena(self) -> NDArray[np.uint8] | None:
        return None


# ---- checks ------------------------------------------------------------------------------------


def _check_types(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name == "live":
            if not isinstance(value, bool | np.bool_):
                raise ValueError(f"live {value!r}: must be True or False")
        elif name in ("min_prob", "factor"):
            real = isinstance(value, float | int | np.floating | np.integer)
            if not real or isinstance(value, bool):
                raise ValueError(f"{name} {value!r}: must be a number")
            if abs(value) == math.inf:
                raise ValueError(f"{name} {value!r}: must be a finite number")
        else:
            _check_whole(name, value)


def _check_whole(name: str, value: Any) -> None:
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise ValueError(f"{name} {value!r}: must be a whole number")
    if not -(2**31) <= value < 2**31:
        raise ValueError(f"{name} {value}: must be a 32-bit integer")


def check_running(running: Any) -> int:
    """Return `running` as an int. Raise ValueError unless it is a whole number, 0 or more."""
    _check_whole("running", running)
    if running < 0:
        raise ValueError(f"running {running}: must be 0 (the batch size) or more")
    return int(running)


def check_accepted(accepted: Ints, proposed: Sequence[int]) -> None:
    """Raise ValueError if an accepted length is negative or exceeds the proposed length."""
    if len(accepted) != len(proposed):
        raise ValueError(f"accepted: {len(proposed)} entries are needed, got {len(accepted)}")
    for i, (n, most) in enumerate(zip(accepted.tolist(), proposed, strict=True)):
        if not 0 <= n <= most:
            raise ValueError(f"accepted[{i}] {n}: must be 0 to the last draft's length, {most}")


def check_windows(windows: Ints, batch: int, max_window: int) -> None:
    """Raise ValueError if a window is not within 0 to `max_window`."""
    if len(windows) != batch:
        raise ValueError(f"windows: {batch} entries are needed, got {len(windows)}")
    for i, window in enumerate(windows.tolist()):
        if not 0 <= window <= max_window:
            raise ValueError(f"windows[{i}] {window}: must be 0 to max_window {max_window}")


def check_array(name: str, array: Any, dtype: type) -> None:
    """Raise ValueError unless `array` is a contiguous 1-D numpy array of the given dtype."""
    wanted = np.dtype(dtype)
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{name}: must be a numpy array of {wanted}, not {type(array).__name__}")
    if array.dtype != wanted:
        raise ValueError(f"{name}: must be {wanted}, not {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name}: must have one dimension, not {array.ndim}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: must be contiguous, has a stride of {array.strides[0]} bytes")


def check_offsets(name: str, offsets: Longs, parts: int, total: int) -> None:
    """Raise ValueError unless the offsets divide `total` entries into `parts` parts."""
    if len(offsets) != parts + 1:
        raise ValueError(f"{name}: {parts + 1} entries are needed, got {len(offsets)}")
    if offsets[0] != 0:
        raise ValueError(f"{name}[0] {offsets[0]}: offsets must begin with 0")
    for i in np.flatnonzero(np.diff(offsets) < 0)[:1] + 1:
        raise ValueError(
            f"{name}[{i}] {offsets[i]}: offsets must not fall, the one before is {offsets[i - 1]}"
        )
    if offsets[parts] != total:
        raise ValueError(
            f"{name}[{parts}] {offsets[parts]}: the last offset must be the number of entries, "
            f"{total}"
        )


def check_tokens(tokens: Ints) -> None:
    """Raise ValueError if a token id is negative."""
    for i in np.flatnonzero(tokens < 0)[:1]:
        raise ValueError(f"tokens[{i}] {tokens[i]}: token ids must be 0 or more")

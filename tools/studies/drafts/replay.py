"""Lock-step decoding of known responses: draft, verify against the truth, append, repeat.

Verification is greedy: a draft is accepted as far as it agrees with the truth; then the truth's
next token, the bonus, is emitted as well. Times are CPU time of the process, so that other work on
the machine counts little, and contain no verification.
"""

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from drafts.drafter import Chains, Drafter
from drafts.workload import Workload

SINGLE_EVERY = 8  # rounds; that one asks request by request
MAX_WINDOW = 64
POSITIONS = (0, 1024, 4096, 16384)
"""First positions in a response of the ranges in `Run.by_position`."""


@dataclass(frozen=True, slots=True)
class Requests:
    prompts: np.ndarray  # int64 [B]
    texts: list[np.ndarray]  # the prompts' tokens
    truths: list[np.ndarray]


@dataclass(frozen=True, slots=True)
class Run:
    """One replay. Acceptance is per verify step of one request; times are of full batches."""

    window: str
    batch: int
    rounds: int
    """Full batches that were timed."""
    tok_per_step: float
    drafted_per_step: float
    """Tokens, or nodes of a tree."""
    accepted_per_step: float
    precision: float
    """Accepted / drafted."""
    frac_accepted: float
    """Accepted / emitted."""
    batch_p50_us: float
    """append_batch + speculate_batch of the whole batch."""
    batch_p99_us: float
    draft_p50_us: float
    """speculate_batch alone."""
    draft_p99_us: float
    req_p50_us: float
    """speculate of one request alone."""
    req_p99_us: float
    append_us_per_token: float
    start_us_per_request: float
    """start, with the prompt's tokens."""
    by_position: list[dict[str, float]]
    """By range of positions in a response (`POSITIONS`): from, steps, tok_per_step,
    drafted_per_step."""


class Window:
    """`fixed:N`, or `aimd`: start at 2, +2 when all that was proposed is accepted, up to 32, back
    to 2 on any rejection, unchanged by an empty draft."""

    def __init__(self, spec: str, batch: int) -> None:
        self.adapts = spec == "aimd"
        size = 2 if self.adapts else fixed(spec)
        self.sizes = np.full(batch, size, np.int32)

    def update(self, rows: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        if not self.adapts:
            return
        now = self.sizes[rows]
        now = np.where(accepted >= drafted, np.minimum(now + 2, 32), 2)
        self.sizes[rows] = np.where(drafted > 0, now, self.sizes[rows])


def fixed(spec: str) -> int:
    """The N of `fixed:N`. ValueError for what is no window."""
    head, _, number = spec.partition(":")
    if head != "fixed" or not number.isdigit() or not 1 <= int(number) <= MAX_WINDOW:
        raise ValueError(f"--windows {spec}: aimd, or fixed:N with N from 1 to {MAX_WINDOW}")
    return int(number)


def choose(w: Workload, batch: int, length: int) -> Requests:
    """`batch` of the responses to replay, the same for every peer, cut after `length` tokens."""
    total = len(w.truth.rewards)
    if not 1 <= batch <= total:
        raise ValueError(f"--batch {batch}: from 1 to prompts x group = {total}")
    picked = np.random.default_rng(1).permutation(total)[:batch]
    prompts = np.searchsorted(w.truth.prompt_offsets, picked, "right") - 1
    offsets = w.truth.response_offsets
    truths = [w.truth.tokens[offsets[r] : offsets[r + 1]][:length] for r in picked]
    return Requests(prompts, [w.prompts[p] for p in prompts], truths)


def replay(drafter: Drafter, requests: Requests, spec: str) -> Run:
    """Decode all of `requests` with the window `spec`."""
    batch = len(requests.truths)
    window, clock = Window(spec, batch), time.process_time
    streams = [
        np.concatenate([text, truth])
        for text, truth in zip(requests.texts, requests.truths, strict=True)
    ]
    base = np.array([len(text) for text in requests.texts])
    ends = np.array([len(truth) for truth in requests.truths])
    done = np.zeros(batch, np.int64)  # emitted so far
    live = np.arange(batch)
    total = _Totals()

    began = clock()
    drafter.start(live, requests.prompts, requests.texts)
    total.start_s = clock() - began
    append_s, round_number = 0.0, 0
    while len(live):
        now = base[live] + done[live]
        contexts = _contexts(drafter, streams, live, now)
        sizes = window.sizes[live]
        if drafter.one_by_one and round_number % SINGLE_EVERY == SINGLE_EVERY - 1:
            drafts = []
            for i, context, size in zip(live.tolist(), contexts, sizes.tolist(), strict=True):
                began = clock()
                drafts.append(drafter.speculate(i, context, size))
                total.single_s.append(clock() - began)
        else:
            began = clock()
            drafts = drafter.speculate_batch(live, contexts, sizes)
            draft_s = clock() - began
            if len(live) == batch and round_number:
                total.draft_s.append(draft_s)
                total.batch_s.append(append_s + draft_s)
        round_number += 1

        drafted, accepted = _verify(drafter, drafts, [streams[i] for i in live], now)
        window.update(live, drafted, accepted)
        step = np.minimum(accepted + 1, ends[live] - done[live])
        total.count(done[live], drafted, accepted, step)
        done[live] += step
        goes_on = done[live] < ends[live]
        accepted, now, step, live = accepted[goes_on], now[goes_on], step[goes_on], live[goes_on]
        if not len(live):
            break
        new = [streams[i][a : a + n] for i, a, n in zip(live, now, step, strict=True)]
        tokens, offsets = np.concatenate(new), np.cumsum([0, *step], dtype=np.int64)
        drafter.verified(live, accepted.astype(np.int32))
        began = clock()
        drafter.append_batch(live, tokens, offsets)
        append_s = clock() - began
        total.append_s += append_s
        total.appended += len(tokens)
    drafter.stop(np.arange(batch))
    return total.run(spec, batch)


def as_dict(run: Run) -> dict[str, Any]:
    """The fields of a run."""
    return dataclasses.asdict(run)


@dataclass(slots=True)
class _Totals:
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    appended: int = 0
    append_s: float = 0.0
    start_s: float = 0.0
    draft_s: list[float] = dataclasses.field(default_factory=list)
    batch_s: list[float] = dataclasses.field(default_factory=list)
    single_s: list[float] = dataclasses.field(default_factory=list)
    ranges: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros((3, len(POSITIONS)), np.int64)
    )
    """Steps, emitted and drafted tokens by range of positions."""

    def count(
        self, at: np.ndarray, drafted: np.ndarray, accepted: np.ndarray, step: np.ndarray
    ) -> None:
        ranges = np.searchsorted(POSITIONS, at, "right") - 1
        for row, numbers in zip(self.ranges, (np.ones_like(step), step, drafted), strict=True):
            np.add.at(row, ranges, numbers)
        self.steps += len(step)
        self.drafted += int(drafted.sum())
        self.accepted += int(accepted.sum())
        self.emitted += int(step.sum())

    def run(self, spec: str, batch: int) -> Run:
        return Run(
            window=spec,
            batch=batch,
            rounds=len(self.batch_s),
            tok_per_step=self.emitted / self.steps,
            drafted_per_step=self.drafted / self.steps,
            accepted_per_step=self.accepted / self.steps,
            precision=self.accepted / max(1, self.drafted),
            frac_accepted=self.accepted / self.emitted,
            batch_p50_us=_percentile_us(self.batch_s, 50),
            batch_p99_us=_percentile_us(self.batch_s, 99),
            draft_p50_us=_percentile_us(self.draft_s, 50),
            draft_p99_us=_percentile_us(self.draft_s, 99),
            req_p50_us=_percentile_us(self.single_s, 50),
            req_p99_us=_percentile_us(self.single_s, 99),
            append_us_per_token=self.append_s / max(1, self.appended) * 1e6,
            start_us_per_request=self.start_s / batch * 1e6,
            by_position=[
                {
                    "from": first,
                    "steps": steps,
                    "tok_per_step": emitted / steps,
                    "drafted_per_step": drafted / steps,
                }
                for first, (steps, emitted, drafted) in zip(
                    POSITIONS, self.ranges.T.tolist(), strict=True
                )
                if steps
            ],
        )


def _percentile_us(seconds: list[float], p: float) -> float:
    return float(np.percentile(seconds, p) * 1e6) if seconds else 0.0


def _contexts(
    drafter: Drafter, streams: list[np.ndarray], live: np.ndarray, now: np.ndarray
) -> list[np.ndarray]:
    width = drafter.wants_context or 0
    return [streams[i][max(0, at - width) : at] for i, at in zip(live, now, strict=True)]


def _verify(
    drafter: Drafter, drafts: Any, streams: list[np.ndarray], now: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Drafted and accepted tokens [B] of each draft against streams[i][now[i]:]."""
    truths = [stream[at : at + MAX_WINDOW] for stream, at in zip(streams, now, strict=True)]
    if drafter.tree:
        pairs = [accept_tree(d, truth) for d, truth in zip(drafts, truths, strict=True)]
    else:
        chains = as_chains(drafts)
        pairs = [
            (len(chain), accept_chain(chain, truth))
            for chain, truth in zip(chains, truths, strict=True)
        ]
    both = np.array(pairs, np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def as_chains(drafts: Chains) -> Iterator[Any] | list[Any]:
    """A draft per request, whichever of the two forms they came in."""
    if isinstance(drafts, tuple):
        tokens, lengths = drafts
        return [row[:n] for row, n in zip(tokens, lengths.tolist(), strict=True)]
    return drafts


def accept_chain(draft: Any, truth: np.ndarray) -> int:
    """How many tokens of a chain agree with the truth, up to the first that does not."""
    n = min(len(draft), len(truth))
    if not n:
        return 0
    same = np.asarray(draft[:n]) == truth[:n]
    return n if same.all() else int(np.argmin(same))


def accept_tree(draft: Any, truth: np.ndarray) -> tuple[int, int]:
    """Nodes of a tree, and the depth to which some branch agrees with the truth. Forms: a list of
    paths (-2 ends one early); (tokens, parents) with parent -1 at the root; (tokens, mask) with
    row 0 the last emitted token and mask[i, j] = j is i or an ancestor of it."""
    if isinstance(draft, list):
        paths = [p[: p.index(-2)] if -2 in p else p for p in draft]
        nodes = {tuple(p[:k]) for p in paths for k in range(1, len(p) + 1)}
        return len(nodes), max((accept_chain(p, truth) for p in paths), default=0)
    tokens, parents = draft
    first = 0
    if getattr(parents, "ndim", 1) == 2:
        first, depth = 1, parents.sum(1) - 1
        # Filler of a tree that is too small has no ancestors; it is verified all the same.
        parents = [
            int(np.flatnonzero(row[:i])[-1]) if i and depth[i] > 0 else -2
            for i, row in enumerate(parents)
        ]
    agreed = {first - 1: 0}  # the root
    for i in range(first, len(tokens)):
        above = agreed.get(parents[i])
        if above is not None and above < len(truth) and truth[above] == tokens[i]:
            agreed[i] = above + 1
    return len(tokens) - first, max(agreed.values())

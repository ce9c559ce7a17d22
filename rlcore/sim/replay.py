"""What drafts would have gained in a run: the shipped drafter drafts the run's own responses, each
from the responses to its prompt in earlier epochs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from rlcore.config.schema import DraftConfig
from rlcore.ops.suffix import Forest
from rlcore.rollout.torch_engine.drafter import KNEE
from rlcore.sched.histospec import DraftGate
from rlcore.sim.cost import EngineCost
from rlcore.sim.drafts import DraftGain
from rlcore.sim.job import SimJob

STARTS = (0, *(8 << k for k in range(12)))
"""First positions of the ranges for which a gain is measured: 0, 8, 16, ... 16,384."""
LEAST_FORWARDS = 64
"""Forwards in a range of positions, below which it takes the gain of the range before it."""


@dataclass(slots=True)
class _Counts:
    forwards: np.ndarray
    emitted: np.ndarray
    drafted: np.ndarray
    responses: list[tuple[int, int, int]] = field(default_factory=list)
    """(prompt, length, forwards) of each response."""


def gain(
    responses: Sequence[tuple[int, int, np.ndarray]], draft: DraftConfig, job: SimJob, first: int
) -> DraftGain | None:
    """Replay all steps from step `first` on whose prompts were answered before. `responses`: (step,
    row of the workload, tokens) in the order of the steps. Return None if no prompt was answered
    twice."""
    cost, engines = job.engine(job.cfg.rollout.tp), job.gpus // job.cfg.rollout.tp
    history: dict[int, list[list[np.ndarray]]] = {}
    counts = _Counts(*np.zeros((3, len(STARTS)), np.int64))
    gate = DraftGate(window=draft.max_length, switches=draft.adaptive)
    for step, rows in groupby(responses, key=lambda row: row[0]):
        by_prompt: dict[int, list[np.ndarray]] = {}
        for _, prompt, tokens in rows:
            by_prompt.setdefault(prompt, []).append(tokens)
        if step >= first and all(prompt in history for prompt in by_prompt):
            _replay(by_prompt, history, draft, cost, engines, counts, gate)
        for prompt, group in by_prompt.items():
            history[prompt] = [*history.get(prompt, ()), group][-draft.history_epochs :]
    if not counts.forwards.sum():
        return None
    starts: list[int] = []
    gains: list[float] = []
    for start, forwards, emitted in zip(STARTS, counts.forwards, counts.emitted, strict=True):
        if forwards >= LEAST_FORWARDS or not starts:
            starts.append(start)
            gains.append(float(emitted / max(forwards, 1)))
    width = 1 + counts.drafted.sum() / counts.forwards.sum()
    mean = DraftGain(starts=tuple(starts), gains=tuple(gains), width=float(width))
    paces: list[list[tuple[int, float]]] = [[] for _ in range(1 + max(history))]
    for prompt, length, forwards in counts.responses:
        paces[prompt].append((length, forwards / mean.forwards(length)))
    return replace(mean, paces=tuple(map(tuple, paces)))


def _replay(
    by_prompt: dict[int, list[np.ndarray]],
    history: dict[int, list[list[np.ndarray]]],
    draft: DraftConfig,
    cost: EngineCost,
    engines: int,
    counts: _Counts,
    gate: DraftGate,
) -> None:
    """Decode the responses of one step with drafts, all at the same time, and add to `counts`. The
    gate chooses as in an engine whose batch is 1/`engines` of the unfinished responses."""
    forest = _forest(draft)
    keys = list(by_prompt)
    old = [response for prompt in keys for group in history[prompt] for response in group]
    sizes = [sum(map(len, history[prompt])) for prompt in keys]
    forest.build(
        np.arange(len(keys), dtype=np.int64),
        np.concatenate([np.zeros(0, np.int32), *old]),
        _offsets(map(len, old)),
        _offsets(sizes),
        np.zeros(len(old), np.float32),
    )
    forest.swap()
    texts = [text for prompt in keys for text in by_prompt[prompt]]
    of = [k for k, prompt in enumerate(keys) for _ in by_prompt[prompt]]
    handles = forest.open(np.array(of, np.int64))
    ends = np.array([len(text) for text in texts])
    done, fed, forwards = np.zeros((3, len(texts)), np.int64)
    accepted = np.zeros(len(texts), np.int32)
    live = np.flatnonzero(ends > 0)
    while len(live):
        running = max(1, len(live) // engines)
        longest = gate.length(running)
        right, lengths = np.zeros((2, len(live)), np.int32)
        if longest:
            new = [texts[i][fed[i] : done[i]] for i in live]
            drafts, lengths = forest.step(
                handles[live],
                accepted[live],
                np.concatenate([np.zeros(0, np.int32), *new]).astype(np.int32),
                _offsets(map(len, new)),
                running=KNEE // (longest + 1),
            )
            fed[live] = done[live]
            right[:] = [
                _agree(row[:n], texts[i][done[i] : done[i] + n])
                for i, row, n in zip(live, drafts, lengths.tolist(), strict=True)
            ]
            accepted[live] = right
        step = np.minimum(right + 1, ends[live] - done[live])
        width = 1 + float(lengths.mean())
        seconds = cost.decode_s(running, running * float(done[live].mean()), 1, width)
        gate.note(running, length=longest, gained=running * float(step.mean()), seconds=seconds)
        ranges = np.searchsorted(STARTS, done[live], "right") - 1
        for to, numbers in (
            (counts.forwards, np.ones_like(step)),
            (counts.emitted, step),
            (counts.drafted, lengths),
        ):
            np.add.at(to, ranges, numbers)
        done[live] += step
        forwards[live] += 1
        live = live[done[live] < ends[live]]
    forest.close(handles)
    rows = (keys[k] for k in of)
    found = zip(rows, ends.tolist(), forwards.tolist(), strict=True)
    counts.responses.extend((row, length, n) for row, length, n in found if length)


def _forest(draft: DraftConfig) -> Forest:
    return Forest(
        limit=draft.max_match,
        min_match=draft.min_match,
        live_match=draft.min_match,
        factor=draft.max_spec_factor,
        min_prob=draft.min_token_prob,
        max_window=draft.max_length,
        start_window=min(draft.initial_length, draft.max_length),
        growth=draft.length_growth,
        knee=KNEE if draft.adaptive else 0,
        threads=1,
    )


def _agree(draft: np.ndarray, truth: np.ndarray) -> int:
    same = draft[: len(truth)] == truth
    return len(same) if same.all() else int(np.argmin(same))


def _offsets(sizes: Iterable[int]) -> np.ndarray:
    return np.cumsum([0, *sizes], dtype=np.int64)

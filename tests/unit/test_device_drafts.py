"""Drafts of SGLang's requests matched on the device: those of the host's matcher, token by token.

`Generation` plays SGLang's scheduler with and without overlap, for both matchers at once, with the
field names of its batches. The device is the CPU, where the kernel's body runs, too;
tests/gpu/test_suffix.py has a GPU.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlcore.ops import native
from rlcore.rollout.histospec import history_of, prompt_key
from rlcore.rollout.sglang_engine.counters import Counters
from rlcore.rollout.sglang_engine.device_drafts import DeviceDrafts
from rlcore.rollout.sglang_engine.drafts import Drafts, HostDrafts
from rlcore.rollout.sglang_engine.names import PROMPT_KEY
from rlcore.rollout.torch_engine.drafter import DraftSettings
from tests.native.test_suffix import needs_build

pytestmark = [pytest.mark.native, needs_build]
STOP = 1
SEATS = 6
WIDTH = 8
BASE = dict(max_length=WIDTH - 1, initial_length=2, length_growth=2, adaptive=False, wait=True)


@pytest.fixture(autouse=True)
def build() -> None:
    if native.torch_ops("suffix forest", "cpu") is None:
        pytest.skip("no native build of torch ops")


@dataclass
class Job:
    """A request, and the response that the model will sample."""

    rid: str
    prompt: np.ndarray
    text: list[int]
    limit: int
    seat: int = -1
    done: int = 0
    """Number of sampled tokens."""
    new: list[int] = field(default_factory=list)
    """Tokens of the last step."""

    @property
    def is_finished(self) -> bool:
        return self.done >= self.limit or STOP in self.text[: self.done]


class Generation:
    """Requests that run with `host` and `device`. With `overlap` the device's side learns the
    result of a step after the next one was launched."""

    def __init__(
        self,
        rng: np.random.Generator,
        host: Drafts,
        device: Drafts,
        overlap: bool,
        where: str | torch.device = "cpu",
        watch: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ):
        self.rng, self.host, self.device, self.overlap = rng, host, device, overlap
        self.where, self.watch = where, watch
        self.free = list(range(1, SEATS + 1))
        self.jobs: list[Job] = []
        self.reqs: dict[str, tuple[Any, Any]] = {}
        self.results: deque[Callable[[], None]] = deque()
        self.drafted = self.accepted = 0

    def admit(self, job: Job) -> None:
        """Prefill a request: a new one, or one that was thrown out of the cache."""
        job.seat = self.free.pop(0)
        self.jobs.append(job)
        if job.rid not in self.reqs:
            self.reqs[job.rid] = (self._req(job), self._req(job))
        host, device = self.reqs[job.rid]
        size = torch.tensor([len(job.prompt) + job.done])
        self.host.prefill(SimpleNamespace(reqs=[host]))
        self.device.prefill(SimpleNamespace(reqs=[device], seq_lens_cpu=size))
        job.new = job.text[job.done : job.done + 1]
        job.done += 1
        host.output_ids += job.new
        first = list(job.new)
        self._launch(lambda: device.output_ids.extend(first))

    def _req(self, job: Job) -> Any:
        sampling = SimpleNamespace(
            custom_params={PROMPT_KEY: prompt_key(job.prompt)},
            max_new_tokens=job.limit,
            stop_token_ids={STOP},
            stream_interval=8,
        )
        req = SimpleNamespace(
            rid=job.rid,
            origin_input_ids=job.prompt.tolist(),
            output_ids=[],
            sampling_params=sampling,
            is_retracted=False,
        )
        req.finished = lambda: len(req.output_ids) >= job.limit or STOP in list(req.output_ids)
        return req

    def evict(self, job: Job) -> None:
        """Throw a request out of the cache; its last result has been processed."""
        self.settle()
        self.jobs.remove(job)
        self.free.append(job.seat)

    def step(self) -> None:
        """Decode all requests, and compare the drafts."""
        for job in [j for j in self.jobs if self.reqs[j.rid][1].finished()]:
            self.jobs.remove(job)
            self.free.append(job.seat)
        if not self.jobs:
            return
        self.jobs = [self.jobs[i] for i in self.rng.permutation(len(self.jobs))]
        jobs = list(self.jobs)
        live = [i for i, job in enumerate(jobs) if not job.is_finished]
        batch = self._batch(jobs)
        with self.watch():
            drafts = self.device.propose(batch)
        there = drafts.cpu().numpy()
        # The device's side may run a request that has ended; the host's side has no such step.
        found = np.zeros((len(jobs), there.shape[1] + 1), np.int64)
        taken = np.ones(len(jobs), np.int64)
        if live:
            here = self.host.propose(
                SimpleNamespace(reqs=[self.reqs[jobs[i].rid][0] for i in live])
            ).numpy()
            np.testing.assert_array_equal(there[live], here)
        for i, job in enumerate(jobs):
            sampled = (job.text + [0] * WIDTH)[job.done : job.done + found.shape[1]]
            found[i, : len(sampled)] = sampled
            wrong = (k for k, t in enumerate(there[i]) if t != found[i, k])
            taken[i] = next(wrong, there.shape[1]) + 1
        if live:
            reqs = [self.reqs[jobs[i].rid][0] for i in live]
            self.host.verified(reqs, found[live], taken[live])
            self.drafted += int((there[live] >= 0).sum())
            self.accepted += int(taken[live].sum()) - len(live)
        counts = []
        for i, job in enumerate(jobs):
            job.new = found[i, : taken[i]].tolist()
            room = job.limit - job.done
            kept = job.new[: job.new.index(STOP) + 1] if STOP in job.new else job.new
            counts.append(len(kept[:room]))
            if i in live:
                self.reqs[job.rid][0].output_ids += kept[:room]
            job.done += int(taken[i])
        self._launch(lambda: self._process(jobs, found, taken, counts))

    def settle(self) -> None:
        """Process all results."""
        while self.results:
            self.results.popleft()()

    def _launch(self, result: Callable[[], None]) -> None:
        """Queue a result; process the one before, or this one if steps do not overlap."""
        self.results.append(result)
        while len(self.results) > self.overlap:
            self.results.popleft()()

    def _process(
        self, jobs: list[Job], found: np.ndarray, taken: np.ndarray, counts: list[int]
    ) -> None:
        reqs = [self.reqs[job.rid][1] for job in jobs]
        ended = [req.finished() for req in reqs]
        self.device.verified(reqs, found, taken)
        for i, req in enumerate(reqs):
            if not ended[i]:
                req.output_ids += found[i, : counts[i]].tolist()

    def _batch(self, jobs: list[Job]) -> Any:
        """A batch of SGLang's scheduler, with the fields that are read."""
        tokens = np.full((len(jobs), WIDTH), -1, np.int32)
        for row, job in zip(tokens, jobs, strict=True):
            row[: len(job.new)] = job.new
        seats = torch.tensor([job.seat for job in jobs])
        lengths = torch.tensor([len(job.prompt) + job.done - 1 for job in jobs])
        return SimpleNamespace(
            reqs=[self.reqs[job.rid][1] for job in jobs],
            req_pool_indices=seats.to(self.where),
            req_pool_indices_cpu=seats,
            seq_lens=lengths.to(self.where),
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(SEATS + 1, 1)),
            spec_info=SimpleNamespace(
                accept_tokens=torch.from_numpy(tokens.flatten()).to(self.where),
                accept_lens=torch.tensor([len(job.new) for job in jobs]).int().to(self.where),
            ),
        )


def prompts(rng: np.random.Generator) -> list[np.ndarray]:
    return [rng.integers(2, 40, rng.integers(3, 12)).astype(np.int32) for _ in range(5)]


def responses(rng: np.random.Generator, count: int) -> list[list[int]]:
    """Texts with repeats of their own, which the next ones change here and there."""
    part = rng.integers(2, 40, 12).tolist()
    base = (rng.integers(2, 40, 40).tolist() + part + rng.integers(2, 40, 9).tolist() + part) * 2
    return [
        [int(t) if rng.random() > 0.1 else int(rng.integers(2, 40)) for t in base]
        for _ in range(count)
    ]


def generate(
    tmp_path: Any,
    seed: int,
    kind: Any,
    overlap: bool,
    lengths: list[int] | None = None,
    *,
    where: str | torch.device = "cpu",
    watch: Callable[[], AbstractContextManager[Any]] = nullcontext,
    **options: Any,
) -> tuple[Generation, dict[str, Any], dict[str, Any]]:
    """Run 24 requests to their ends, in two epochs, with renewed histories in between."""
    rng = np.random.default_rng(seed)
    settings = DraftSettings(**(BASE | options))
    pages, sides = [], []
    for name in ("host", "device"):
        (tmp_path / name).mkdir()
        page = Counters(str(tmp_path / name), new=True)
        pages.append(Counters(str(tmp_path / name)))
        shared: dict[str, Any] = dict(num_seats=SEATS, stream_interval=8, counters=page)
        if name == "host":
            sides.append(HostDrafts(kind, settings, **shared))
        else:
            sides.append(DeviceDrafts(kind, settings, max_tokens=200, device=where, **shared))
    run = Generation(rng, *sides, overlap, where, watch)
    if lengths is not None:  # the gate's choices; it would decide by measured seconds
        for side in sides:
            steps = iter(lengths * 1000)
            side._gate = SimpleNamespace(
                length=lambda running, steps=steps: next(steps),
                note=lambda running, **_: None,
                renew=lambda: None,
            )
    keys = prompts(rng)
    texts = {i: responses(rng, 8) for i in range(len(keys))}
    waiting = []
    for k in range(24):
        i = int(rng.integers(len(keys)))
        text = list(texts[i][int(rng.integers(8))])
        if rng.random() < 0.5:
            text[int(rng.integers(20, len(text)))] = STOP
        waiting.append(Job(f"r{k}", keys[i], text, limit=int(rng.integers(5, 120))))
    out: list[Job] = []
    step = 0
    while waiting or run.jobs or out:
        if step % 25 == 5:
            histories = [
                history_of(f"{step}.{i}.{j}", keys[i], np.array(t, np.int32), float(j % 2))
                for i in range(len(keys))
                for j, t in enumerate(texts[i][(step // 25) % 4 :][:3])
            ]
            for side in sides:
                side.remember(histories, [prompt_key(key) for key in keys])
        for source in (out, waiting):
            while source and run.free and rng.random() < 0.6:
                run.admit(source.pop(0))
        if lengths is None and run.jobs and rng.random() < 0.05:
            run.settle()
            job = run.jobs[int(rng.integers(len(run.jobs)))]
            if not job.is_finished:
                run.evict(job)
                out.append(job)
        run.step()
        step += 1
    run.settle()
    for side in sides:
        side.close()
    return run, pages[0].take(), pages[1].take()


@pytest.mark.parametrize("overlap", [False, True], ids=["in_turn", "overlapped"])
@pytest.mark.parametrize(
    "kind, options",
    [
        ("history", {}),
        ("history_reward", dict(min_match=3, max_match=7, max_spec_factor=0.0)),
        ("history", dict(min_match=2, max_spec_factor=1.0, length_growth=1)),
        ("history", dict(min_token_prob=0.0, initial_length=7, length_growth=0)),
        ("ngram", {}),
        ("ngram", dict(min_match=3, max_match=5, initial_length=1)),
    ],
)
def test_drafts_of_whole_generations_are_those_of_the_host(tmp_path, kind, options, overlap):
    run, host, device = generate(tmp_path, 0, kind, overlap, **options)
    assert 0 < run.accepted < run.drafted
    for name in ("verify_tokens", "accepted_tokens"):
        assert host[name] == device[name]
    if not overlap:
        for name in ("decode_steps", "drafted_tokens", "verify_inputs", "by_batch"):
            assert host[name] == device[name]


def test_steps_without_drafts_in_between_change_no_draft(tmp_path):
    """The gate's choices are given, the same to both. The device reads tokens of plain steps at
    once, the host at the next draft."""
    lengths = [0, 0, 7, 3, 0, 1, 7, 7]
    run, host, device = generate(tmp_path, 1, "history", False, lengths, adaptive=True)
    assert 0 < run.accepted < run.drafted
    assert host["verify_steps"] == device["verify_steps"] < host["decode_steps"]

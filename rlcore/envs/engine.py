"""Implementation of `Engine` whose responses are episodes; an inner engine generates the turns.

The controller and the rollout workers do not handle environments: a request is an episode, and its
sample has all turns and observations. Each episode is an asyncio task (`episode.py`) in the event
loop of a separate thread. Turns go to the inner engine as requests, so an episode that waits for
its environment takes no decode slot. Only the caller's thread calls the inner engine.

    caller's thread   submit, abort, poll --- turns ---> inner engine
                          |          ^
                       episodes    turns, results
                          v          |
    loop's thread     one task per episode <-- frames ---> processes of environments (`pool.py`)

If the inner engine releases an episode (abort, a weight update with release, or a failure), all its
tokens are discarded. The episode restarts from its prompt on another engine, because an environment
cannot move.
"""

import asyncio
import itertools
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from msgspec import structs

from rlcore.config.schema import EnvConfig
from rlcore.envs.dialogue import Dialogue
from rlcore.envs.episode import EpisodeLimits, PlayedEpisode, Policy, Transcript, play
from rlcore.envs.kind import EnvKind
from rlcore.envs.pool import EnvError, EnvPool
from rlcore.protocols import Engine, PauseMode, Tag
from rlcore.records import (
    CUT,
    Aborted,
    AnyEvent,
    Bucket,
    Down,
    Finish,
    Finished,
    GroupId,
    History,
    LengthReport,
    Preempted,
    Prompt,
    Request,
    RequestId,
    Sample,
    Sampling,
    Stats,
)
from rlcore.utils.log import log
from rlcore.utils.seed import derive

_BUSY_S = 0.004
"""Longest poll of the inner engine, in seconds, while episodes may request new turns."""
_CLOSE_S = 20.0
_FULL_ERRORS = 5
_MOST_RESTARTS = 16
"""Maximum number of restarts of one episode because of crashes that other episodes caused. Further
restarts count as failures of the episode itself."""
_MOST_FAILURES = 16
"""Number of failed attempts after which the run ends, if no episode has succeeded yet."""


class EpisodeHost(Protocol):
    """Interface of an object that runs whole episodes, instead of environments in processes;
    `harness_env.HarnessHost` has it."""

    async def play(
        self, so_far: Transcript, policy: Policy, sampling: Sampling, prompt: Prompt, name: str
    ) -> PlayedEpisode: ...

    def close(self) -> None: ...


class EpisodeOutcome(NamedTuple):
    """Outcome of an episode, from which `EnvScorer` computes the score."""

    score: float
    text: str
    """Text of the episode's last turn."""
    details: dict[str, float]
    error: str = ""
    finish: Finish = "stop"
    """Finish of the turn that `text` is from. The finish of the sample is `length` if any of its
    rows was cut."""


@dataclass(slots=True, eq=False)
class _Episode:
    """State of an episode. Unless a field says otherwise, only the event loop's thread uses it."""

    request: Request
    prompt: Prompt
    so_far: Transcript
    task: asyncio.Task | None = None
    turns: set[RequestId] = field(default_factory=set)
    """Ids of the turns that the inner engine is generating. Used by the caller's thread only."""
    length: int = 0
    """Number of response tokens up to the latest turn. Used by the caller's thread only."""
    is_aborted: bool = False
    """Whether the episode is aborted. Used by the caller's thread only."""

    def play(self, task: asyncio.Task) -> None:
        """Record the task that plays the episode. Called in the event loop's thread."""
        self.task = task

    def attempt(self) -> Transcript:
        """Start a new attempt with an empty transcript. Called in the event loop's thread."""
        self.so_far = Transcript(self.request.id, self.so_far.prompt)
        return self.so_far

    def ask(self, turn: RequestId) -> None:
        """Record a turn that the inner engine generates. Called in the caller's thread."""
        self.turns.add(turn)

    def end_turn(self, turn: RequestId) -> None:
        """Forget a turn in progress. Called in the caller's thread."""
        self.turns.discard(turn)

    def lengthen(self, turn: Sample) -> int:
        """Update `length` after a turn and return it. Called in the caller's thread."""
        self.length = len(self.so_far.tokens) + len(turn.tokens)
        return self.length

    def abort(self) -> None:
        """Mark the episode as aborted. Called in the caller's thread."""
        self.is_aborted = True


class EpisodeEngine:
    """`protocols.Engine` whose responses are episodes; see the module docstring."""

    def __init__(
        self,
        inner: Engine,
        name: str,
        kind: EnvKind,
        config: EnvConfig,
        *,
        dialogue: Dialogue,
        decode: Callable[[Sequence[int]], str],
        prompt_of: Callable[[GroupId], Prompt],
        seed: int = 0,
        barrier: bool = False,
        log_file: Path | None = None,
        host: EpisodeHost | None = None,
    ) -> None:
        """Start the event loop's thread.

        Args:
            name: name of the environment kind in `--env`.
            prompt_of: returns the data row of a group; called when a request is submitted.
            seed: base of the environments' seeds. An environment's seed depends on `seed` and the
                data row, so all episodes of a group start in the same state.
            host: plays the episodes instead of environments, and is closed with the engine.
            barrier: whether to submit turns only when every episode has requested one, except
                episodes that wait for a process.
        """
        self._inner, self._name, self._kind, self._config = inner, name, kind, config
        self._dialogue, self._decode, self._prompt_of = dialogue, decode, prompt_of
        self._seed, self._barrier = seed, barrier
        self._has_tools = bool(kind.tools(config))
        self._host = host
        self.outcomes: dict[RequestId, EpisodeOutcome] = {}
        """Outcomes of finished episodes, until the scorer takes them."""
        # fields used by the caller's thread only
        self._episodes: dict[RequestId, _Episode] = {}
        self._turns: dict[RequestId, _Episode] = {}
        self._held: list[tuple[_Episode, Request]] = []
        """Turns not submitted yet; see `barrier`."""
        self._unwanted: set[RequestId] = set()
        """Turns that the inner engine is aborting, while their episodes continue."""
        self._histories: list[History] = []
        """Histories of the prompts of running episodes."""
        self._closed = False
        # shared fields, guarded by the lock
        self._changed = threading.Condition()
        self._asked: deque[tuple[_Episode, Request]] = deque()
        self._ended: deque[tuple[_Episode, Sample, EpisodeOutcome]] = deque()
        self._dropped: set[tuple[_Episode, RequestId]] = set()
        """Turns whose client has disconnected or whose episode is over. The next `poll` aborts them
        in the inner engine."""
        self._counts: defaultdict[str, float] = defaultdict(int)
        self._failure = ""
        # fields used by the event loop's thread only
        self._waiting: dict[tuple[_Episode, RequestId], asyncio.Future[Sample]] = {}
        """Turns that wait for their sample. An episode that starts again has turns of the same ids,
        while the last request of the one before it may still arrive."""
        self._errors: Counter[str] = Counter()
        self._ended_well = False
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._main, args=(log_file, started), name="envs", daemon=True
        )
        self._thread.start()
        started.wait()
        if self._failure:
            raise RuntimeError(self._failure)

    # ---- requests

    def submit(self, requests: Sequence[Request]) -> None:
        """Start episodes. A partial response from another engine (`Request.resume`) is ignored."""
        for request in requests:
            if request.id in self._episodes:
                raise ValueError(f"request {request.id}: is already running; use each id once")
        for request in requests:
            episode = _Episode(
                request,
                self._prompt_of(request.group),
                Transcript(request.id, np.asarray(request.prompt, np.int32)),
            )
            self._episodes[request.id] = episode
            self._loop.call_soon_threadsafe(self._begin, episode)

    def abort(self, ids: Collection[RequestId]) -> None:
        """Abort episodes; each is returned as `Aborted` with an empty sample."""
        turns: list[RequestId] = []
        for episode in [self._episodes[i] for i in ids if i in self._episodes]:
            episode.abort()
            self._loop.call_soon_threadsafe(self._cancel, episode)
            turns += episode.turns
        if turns:
            self._inner.abort(turns)

    def poll(self, timeout_s: float) -> list[AnyEvent]:
        """Return the events of episodes, with a `LengthReport` after every turn. Raises
        RuntimeError if no environment can run."""
        self._hand_over()
        if self._turns:
            # An episode of a host may ask for further turns at any time.
            waits = self._host is not None or len(self._turns) < len(self._episodes)
            found = self._inner.poll(min(timeout_s, _BUSY_S) if waits else timeout_s)
        else:
            if self._episodes:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._asked or self._ended or self._failure, timeout_s
                    )
            found = self._inner.poll(0.0 if self._episodes else timeout_s)
            self._hand_over()
        out: list[AnyEvent] = []
        for event in found:
            out += self._translate(event)
        out += self._aborted() + self._finished()
        with self._changed:
            failure = self._failure
            counts, self._counts = self._counts, defaultdict(int)
        if failure:
            raise RuntimeError(failure)
        if counts:
            out.append(structs.replace(Stats(running=len(self._episodes)), **counts))
        return out

    # ---- the caller's thread

    def _hand_over(self) -> None:
        """Submit the turns that episodes have requested to the inner engine."""
        with self._changed:
            asked, self._asked = list(self._asked), deque()
            dropped, self._dropped = self._dropped, set()
        self._held += [(e, r) for e, r in asked if not e.is_aborted]
        self._held = [(e, r) for e, r in self._held if (e, r.id) not in dropped]
        # Another attempt of an episode that was aborted has turns of the same names.
        if started := [turn for e, turn in dropped if self._turns.get(turn) is e]:
            self._unwanted.update(started)
            self._inner.abort(started)
        if self._barrier:
            live = sum(not e.is_aborted for e in self._episodes.values())
            # Episodes that wait for a process cannot request a turn before others have ended.
            waiting = self._pool.num_waiting if self._pool is not None else 0
            if len(self._held) < min(live, self._config.max_running_episodes) - waiting:
                return
            self._held.sort(key=lambda pair: pair[0].request.id)
        ready, self._held = [pair for pair in self._held if not pair[0].is_aborted], []
        for episode, request in ready:
            episode.ask(request.id)
            self._turns[request.id] = episode
        if ready:
            self._inner.submit([request for _, request in ready])

    def _translate(self, event: AnyEvent) -> list[AnyEvent]:
        if isinstance(event, Finished):
            return self._turn_ended(event.id, event.sample)
        if isinstance(event, Aborted):
            return self._turn_ended(event.id, None)
        if isinstance(event, Preempted):
            episode = self._turns.get(event.id)
            return [Preempted(id=episode.request.id)] if episode is not None else []
        if isinstance(event, LengthReport):
            lengths: dict[RequestId, int] = {}
            for i, n in zip(event.ids, event.lengths, strict=True):
                if (episode := self._turns.get(i)) is not None:
                    id = episode.request.id
                    lengths[id] = n + lengths.get(id, len(episode.so_far.tokens))
            return [LengthReport(ids=tuple(lengths), lengths=tuple(lengths.values()))]
        if isinstance(event, Stats):
            return [structs.replace(event, running=max(event.running, len(self._episodes)))]
        if isinstance(event, Down):
            lost = tuple(self._episodes)
            self._drop_all()
            return [Down(reason=event.reason, lost=lost)]
        return [event]

    def _turn_ended(self, turn: RequestId, sample: Sample | None) -> list[AnyEvent]:
        """Handle the end of a turn. `sample` is None if the inner engine aborted the turn."""
        episode = self._turns.pop(turn, None)
        if episode is None:
            return []
        episode.end_turn(turn)
        if turn in self._unwanted:
            self._unwanted.discard(turn)
            return []
        if episode.is_aborted:
            return []  # the next `poll` reports the episode as aborted
        if sample is None:  # the inner engine itself aborted the turn, to release all requests
            episode.abort()
            self._loop.call_soon_threadsafe(self._cancel, episode)
            return []
        length = episode.lengthen(sample)
        self._loop.call_soon_threadsafe(self._answer, episode, turn, sample)
        return [LengthReport(ids=(episode.request.id,), lengths=(length,))]

    def _aborted(self) -> list[AnyEvent]:
        """Return an `Aborted` event per aborted episode without a turn in the inner engine."""
        gone = [e for e in self._episodes.values() if e.is_aborted and not e.turns]
        out: list[AnyEvent] = []
        for episode in gone:
            so_far = episode.so_far
            nothing = Transcript(so_far.id, so_far.prompt).sample("abort")
            out.append(Aborted(id=so_far.id, num_tokens=episode.length, sample=nothing))
            del self._episodes[so_far.id]
        return out

    def _finished(self) -> list[AnyEvent]:
        with self._changed:
            ended, self._ended = list(self._ended), deque()
        out: list[AnyEvent] = []
        for episode, sample, outcome in ended:
            if self._episodes.get(sample.id) is not episode:  # the episode was aborted meanwhile
                continue
            del self._episodes[sample.id]
            self.outcomes[sample.id] = outcome
            out.append(
                Finished(
                    id=sample.id,
                    num_tokens=sample.num_tokens,
                    finish=sample.finish,
                    sample=sample,
                    num_observed=sample.num_observed,
                )
            )
        return out

    def _drop_all(self) -> None:
        """Drop all episodes after the inner engine has lost its requests."""
        for episode in self._episodes.values():
            episode.abort()  # the episode's task may be requesting a turn
            self._loop.call_soon_threadsafe(self._cancel, episode)
        self._episodes.clear()
        self._turns.clear()
        self._held.clear()
        self._unwanted.clear()
        self._histories.clear()
        with self._changed:
            self._asked.clear()
            self._ended.clear()
            self._dropped.clear()

    # ---- the event loop's thread

    def _main(self, log_file: Path | None, started: threading.Event) -> None:
        try:
            asyncio.run(self._run(log_file, started))
        except Exception as error:  # report the failed thread, so that `poll` raises an error
            log.exception("env %s: its thread failed", self._name)
            self._fail(f"--env {self._name}: its thread failed: {error!r}")
        finally:
            started.set()

    async def _run(self, log_file: Path | None, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._pool = (
            EnvPool(self._name, self._config, log_file=log_file) if not self._host else None
        )
        self._slots = asyncio.Semaphore(self._config.max_running_episodes)
        started.set()
        try:
            await self._over.wait()
        finally:
            if self._pool is not None:
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()  # episodes call their environments no more
                await self._pool.close()

    def _begin(self, episode: _Episode) -> None:
        task = self._loop.create_task(self._live(episode))
        task.add_done_callback(self._check)
        episode.play(task)

    def _check(self, task: asyncio.Task) -> None:
        """Report an unexpected error of an episode's task, so that poll raises it."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an episode failed", exc_info=error)
            self._fail(f"--env {self._name}: an episode's task failed: {error!r}")

    def _fail(self, sentence: str) -> None:
        with self._changed:
            self._failure = self._failure or sentence
            self._changed.notify_all()

    def _cancel(self, episode: _Episode) -> None:
        if episode.task is not None:
            episode.task.cancel()

    def _answer(self, episode: _Episode, turn: RequestId, sample: Sample) -> None:
        future = self._waiting.pop((episode, turn), None)
        if future is not None and not future.done():
            future.set_result(sample)

    async def _live(self, episode: _Episode) -> None:
        """Run an episode with all its attempts."""
        failures = 0
        async with self._slots:
            for attempt in itertools.count():
                try:
                    await self._attempt(episode, attempt, alone=failures > 0)
                except EnvError as error:
                    self._count_failure(episode, error)
                    failures += not error.is_innocent or attempt >= _MOST_RESTARTS
                    if failures <= self._config.retries:
                        continue
                    nothing = Transcript(episode.request.id, episode.so_far.prompt)
                    why = EpisodeOutcome(0.0, "", {}, f"{error.reason}: {error}")
                    self._end(episode, nothing.sample("failed"), why)
                finally:
                    with self._changed:
                        self._counts["turns"] += episode.so_far.num_turns
                        self._counts["env_calls"] += episode.so_far.num_calls
                        self._counts["env_s"] += episode.so_far.env_s
                return

    async def _attempt(self, episode: _Episode, attempt: int, *, alone: bool) -> None:
        request, cfg = episode.request, self._config
        so_far = episode.attempt()
        if self._host is not None:
            return await self._serve(episode, self._host, so_far, attempt)
        assert self._pool is not None
        place = await self._pool.open(alone=alone)
        try:
            finish = await play(
                so_far,
                place,
                lambda turn: self._policy(episode, turn),
                self._dialogue,
                self._decode,
                request.sampling,
                EpisodeLimits(cfg.max_turns, cfg.max_turn_tokens),
                prompt=episode.prompt,
                seed=derive(self._seed, "env", episode.prompt.dataset, episode.prompt.index),
                name=f"{request.id}.again{attempt}" if attempt else request.id,
            )
        finally:
            place.close()
        more = {"env/malformed_calls": float(so_far.num_malformed)} if self._has_tools else {}
        self._succeed(episode, so_far.sample(finish), more)

    async def _serve(
        self, episode: _Episode, host: EpisodeHost, so_far: Transcript, attempt: int
    ) -> None:
        """Let a harness play an episode."""
        request = episode.request
        played = await host.play(
            so_far,
            lambda turn: self._policy(episode, turn),
            request.sampling,
            episode.prompt,
            f"{request.id}.again{attempt}" if attempt else request.id,
        )
        self._succeed(episode, played.sample, played.numbers)

    def _succeed(self, episode: _Episode, sample: Sample, more: Mapping[str, float]) -> None:
        """Record the end of an episode; `more` are details of its outcome."""
        self._ended_well = True
        so_far = episode.so_far
        details = {
            "env/turns": float(so_far.num_turns),
            "env/wait_s": so_far.env_s,
            "env/cut": float(sample.finish in CUT),
            **more,
            **{f"env/{name}": value for name, value in so_far.numbers.items()},
        }
        finish = so_far.finish or sample.finish
        outcome = EpisodeOutcome(so_far.score, so_far.text, details, finish=finish)
        self._end(episode, sample, outcome)

    async def _policy(self, episode: _Episode, turn: Request) -> Sample:
        turn = structs.replace(turn, history_key=episode.request.draft_key)
        key = episode, turn.id
        future = self._waiting[key] = self._loop.create_future()
        with self._changed:
            self._asked.append((episode, turn))
            self._changed.notify_all()
        try:
            return await future
        except asyncio.CancelledError:
            with self._changed:
                self._dropped.add(key)
            raise
        finally:
            self._waiting.pop(key, None)

    def _end(self, episode: _Episode, sample: Sample, outcome: EpisodeOutcome) -> None:
        with self._changed:
            self._counts["episodes"] += 1
            self._ended.append((episode, sample, outcome))
            self._changed.notify_all()

    def _count_failure(self, episode: _Episode, error: EnvError) -> None:
        names = {"timeout": "env_timeouts", "crash": "env_crashes", "error": "env_errors"}
        with self._changed:
            self._counts[names[error.reason]] += 1
            self._counts["env_lost_tokens"] += episode.so_far.num_sampled
        self._errors[error.reason] += 1
        count = self._errors[error.reason]
        if count <= _FULL_ERRORS or not count & (count - 1):
            nth = f" ({count} such errors so far)" if count > _FULL_ERRORS else ""
            log.warning("env %s: episode %s: %s%s", self._name, episode.request.id, error, nth)
        if self._pool is not None and self._pool.failure:
            self._fail(self._pool.failure)
        elif not self._ended_well and sum(self._errors.values()) >= _MOST_FAILURES:
            self._fail(
                f"--env {self._name}: the first {_MOST_FAILURES} episodes all failed, the last "
                f"with {error.reason}: {error}"
            )

    # ---- other methods of `Engine`

    def pause(self, mode: PauseMode) -> None:
        """Pause the inner engine; environments continue."""
        if mode == "abort":
            self.abort(list(self._episodes))
        self._inner.pause(mode)

    def resume(self) -> None:
        self._inner.resume()

    def begin_load(self, version: int) -> None:
        self._inner.begin_load(version)

    def load_bucket(self, bucket: Bucket, payloads: Sequence[bytes | memoryview]) -> None:
        self._inner.load_bucket(bucket, payloads)

    def send_bucket(
        self, bucket: Bucket, payloads: Sequence[bytes | memoryview]
    ) -> Callable[[], None] | None:
        return self._inner.send_bucket(bucket, payloads)

    def end_load(self) -> None:
        self._inner.end_load()

    def sleep(self, tags: Collection[Tag]) -> None:
        self._inner.sleep(tags)

    def wake(self, tags: Collection[Tag]) -> None:
        self._inner.wake(tags)

    def resize(self, tp: int) -> None:
        self._inner.resize(tp)

    def remember(self, histories: Sequence[History]) -> None:
        """Store histories, and give the inner engine those of all running episodes again: it drops
        those of prompts without a turn in progress, and an episode may wait for its environment."""
        wanted = {e.request.draft_key for e in self._episodes.values()}
        new = {h.key for h in histories}
        kept = [h for h in self._histories if h.key in wanted and h.key not in new]
        self._histories = [*kept, *histories]
        self._inner.remember(self._histories)

    @property
    def failure(self) -> str:
        """Error of the inner engine; empty if it has not failed."""
        return self._inner.failure

    def fail(self, reason: str) -> None:
        """Make the inner engine fail; `poll` then returns its `Down` event."""
        self._inner.fail(reason)

    def restart(self) -> None:
        """Drop all episodes and restart the inner engine."""
        self._drop_all()
        self._inner.restart()

    def is_starting(self, timeout_s: float) -> bool:
        return self._inner.is_starting(timeout_s)

    def close(self) -> None:
        """Stop the inner engine, the episodes and their environments. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._inner.close()
        self._loop.call_soon_threadsafe(self._over.set)
        if self._host is not None:
            self._host.close()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            log.error("env %s: its processes did not end within %g s", self._name, _CLOSE_S)

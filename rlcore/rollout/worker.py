"""The rollout worker of one rank, class `RolloutWorker`. It passes the controller's commands to the
engine, finished samples to the reward service and events to the controller. Tokens stay on this
rank until `Rollout.route` sends them to the train ranks.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from rlcore.config.schema import ClusterConfig
from rlcore.protocols import Engine, Scorer
from rlcore.records import (
    Abort,
    Aborted,
    AnyCommand,
    AnyEvent,
    Down,
    DropEngine,
    EndRound,
    Fail,
    Finished,
    Group,
    GroupId,
    Held,
    Histories,
    Hold,
    JoinSync,
    Move,
    Moved,
    Partial,
    Prompt,
    Ready,
    Release,
    Released,
    Remember,
    Repair,
    RequestId,
    Rewarded,
    RewardResult,
    Sample,
    SendHistories,
    Ship,
    Stats,
    Submit,
    Train,
    Trained,
    TrainOrder,
    group_of,
)
from rlcore.rollout.exchange import SampleExchange, StageLayers
from rlcore.rollout.histospec import histories_of
from rlcore.rollout.transport import Hub

POLL_S = 0.02
COUNTS = ("decode_steps", "decode_tokens", "prefill_tokens", "cached_tokens", "busy_s")
"""Fields of `Stats` that each rank sums per round. The controller cannot sum them, because an
engine's last report may arrive after the controller has ended the round."""
DRAFT_COUNTS = (
    "verify_steps",
    "verify_rows",
    "verify_inputs",
    "verify_tokens",
    "drafted_tokens",
    "accepted_tokens",
    "draft_s",
    "verify_s",
)
ENV_COUNTS = (
    "episodes",
    "turns",
    "env_calls",
    "env_s",
    "env_timeouts",
    "env_crashes",
    "env_errors",
    "env_lost_tokens",
)
"""Fields of `Stats` that are nonzero only with an environment (`--env`)."""
BATCHES = tuple(2**i for i in range(12))
"""Smallest batch size of each batch-size class; the last class has no upper bound."""
BATCH_COUNTS = tuple(f"{what}/{n}" for n in BATCHES for what in ("rows", "tokens", "on"))
"""Names of the counters that come from `Stats.by_batch`."""
LATE_POLLS = 10
"""Maximum number of polls at the end of a round for the idle engine's last counters."""


class Learns(Protocol):
    def learn(self, reference_latency: Mapping[str, float]) -> None: ...


class NoScorer:
    """Scorer of a rank that only trains. It keeps the adaptive reward deadlines up to date, because
    rank 0 writes these deadlines to the checkpoint."""

    def __init__(self, deadlines: Learns | None = None) -> None:
        self.num_pending, self.room, self._deadlines = 0, 0, deadlines

    def submit(self, id: RequestId, sample: Sample, prompt: Prompt, text: str) -> None:
        raise AssertionError(f"{id} was sampled on a rank without an engine")

    def poll(self, timeout_s: float) -> list[tuple[RequestId, RewardResult]]:
        return []

    def cancel(self, ids: Collection[RequestId]) -> None:
        """Do nothing, as no sample is ever submitted."""

    def close(self) -> None:
        """Do nothing, as no process was started."""

    def learn(self, reference_latency: Mapping[str, float]) -> None:
        if self._deadlines is not None:
            self._deadlines.learn(reference_latency)


class Streamer(Protocol):
    """The learner's interface for training in the middle of a round (`--mode stream`)."""

    def engine_leaves(self) -> None:
        """Give the engine's memory to the learner. The engine is idle or has failed."""

    def train(
        self, groups: Sequence[Group], dp_ranks: Sequence[int], samples: Mapping[RequestId, Sample]
    ) -> None:
        """Accumulate the gradient of this rank's share of `groups`."""

    def forget(self) -> None:
        """Discard the accumulated gradient, because all engines restart. The learner gets the same
        groups again later."""


@dataclass(frozen=True, slots=True)
class RoundCallbacks:
    """Callbacks for work that ranks do together in the middle of a round, besides sampling."""

    repair: Callable[[], None] | None = None
    """Function that restarts failed engines and sends them weights; called on all ranks. If None,
    failed engines stay down."""
    streamer: Streamer | None = None
    """Learner that trains while other ranks decode; None outside of `--mode stream`."""


NO_CALLBACKS = RoundCallbacks()


class RolloutWorker:
    """Rollout worker of one rank; `engine` is None on ranks that only train."""

    def __init__(
        self,
        hub: Hub,
        engine: Engine | None,
        scorer: Scorer,
        decode: Callable[[Sequence[int]], str],
        deadline_s: float,
        timeout_s: float = ClusterConfig.timeout_s,
        reward_barrier: bool = False,
        *,
        is_endless: bool = False,
        keep_sample: Callable[[Sample, Prompt, str, RewardResult], bool] | None = None,
        observers: Sequence[Callable[[AnyCommand | AnyEvent], None]] = (),
        stages: StageLayers | None = None,
    ) -> None:
        """
        Args:
            deadline_s: longest wait for a command from the controller.
            timeout_s: longest wait for a sample from another rank.
            reward_barrier: if true, score samples only while this rank decodes no request.
            is_endless: keep finished samples across evaluation rounds, as `--mode async` needs.
            keep_sample: function that returns whether to train on a scored sample; gets the
                sample, its prompt, its text and its result. None keeps all samples.
            observers: functions called with every executed command and every sent event.
            stages: layers whose routes each train rank gets; None: all layers.
        """
        self._hub, self._engine, self._scorer, self._decode = hub, engine, scorer, decode
        self._deadline_s, self._timeout_s = deadline_s, timeout_s
        self._reward_barrier, self._keep_sample = reward_barrier, keep_sample
        self.prompts: dict[str, Prompt] = {}
        """Prompts of the round to which this rank samples responses, by group."""
        self._callbacks = NO_CALLBACKS
        self._observers = observers
        self._live: set[RequestId] = set()
        self._unscored: set[RequestId] = set()
        self._to_score: deque[RequestId] = deque()
        """Unscored samples that have not been submitted to the reward service yet."""
        self._down = ""
        """Reason why the engine has failed; empty while it works."""
        self._round = self._rounds = 0
        self._is_endless = is_endless
        self._paused = False
        """Whether the engine is paused: it keeps its requests and does not decode."""
        self._lost = False
        """Whether the engine has failed while it was paused and has lost its requests."""
        self.exchange = SampleExchange(hub, timeout_s, stages)
        """Finished samples of the round, and their transfer between ranks."""
        self.texts: dict[RequestId, str] = {}
        self._releasing = False
        self._partials: dict[RequestId, Partial] = {}
        """Tokens so far of the requests that are being released, by request id."""
        self._moving: set[RequestId] = set()
        """Requests that move to another engine, until this engine has aborted them."""
        self._to_train: deque[Train] = deque()
        self.scores: dict[RequestId, float] = {}
        """Scores of the round's samples so far, by request id."""
        self.counts = _no_counts()
        """Sums over the engine's `Stats` events in the round, late events included."""
        self.cache_used = 0.0
        """Largest share of the engine's KV cache that was in use in the round."""
        self._has_reported = True
        """Whether the engine is idle and has reported its last counters."""

    @property
    def samples(self) -> dict[RequestId, Sample]:
        """Finished samples of the round, by request id."""
        return self.exchange.own

    def run_round(self, callbacks: RoundCallbacks = NO_CALLBACKS) -> EndRound:
        """Execute the controller's commands until it ends the round.

        Raises:
            RuntimeError: the controller has failed; the message gives the reason.
            TimeoutError: the controller has sent no command for `deadline_s`.
        """
        self._callbacks = callbacks
        self._rounds += 1
        self._round = self._rounds
        aside = self.samples, self.texts, self.prompts
        self.texts, self.prompts = {}, {}
        self.exchange.begin_round({})
        self.scores.clear()
        self._partials.clear()  # the last round may have ended before `Released` was sent
        self._releasing = False
        self._begin()
        end = self._serve()
        if self._is_endless:
            samples, self.texts, self.prompts = aside
            self.exchange.begin_round(samples)
        assert isinstance(end, EndRound), end
        return end

    def go_on(self, callbacks: RoundCallbacks = NO_CALLBACKS) -> Hold:
        """Sample from one weight update to the next (`--mode async`, rollout ranks). Keep finished
        samples until the controller lists their groups in `Hold.forget`. Raise RuntimeError if the
        controller fails and TimeoutError if it is silent for too long."""
        self._callbacks = callbacks
        self._round = 0
        if self._paused:
            self._resume()
        if self._lost:
            self._send([Released(partials=self._partials)])
            self._partials, self._lost = {}, False
        self._begin()
        end = self._serve()
        assert isinstance(end, Hold), end
        return end

    def next_batch(self, callbacks: RoundCallbacks = NO_CALLBACKS) -> TrainOrder:
        """Wait for the groups of the next training step (`--mode async`, train ranks). Raise
        RuntimeError if the controller fails and TimeoutError if it is silent for too long."""
        self._callbacks = callbacks
        self._round = 0
        for read in (self.texts, self.prompts, self.samples):  # drop the previous batch
            read.clear()
        end = self._serve()
        assert isinstance(end, TrainOrder), end
        return end

    def _begin(self) -> None:
        self.counts, self.cache_used = _no_counts(), 0.0
        self._enter()

    def _serve(self) -> EndRound | Hold | TrainOrder:
        """Execute commands up to `EndRound`, `Hold` or `TrainOrder`; return this last command."""
        heard = time.monotonic()
        while True:
            # If this rank has work, do not wait for a command: train, or poll the engine below.
            busy = self._train_next() or bool(self._live or self._unscored)
            command = self._hub.receive("worker", AnyCommand, 0.0 if busy else POLL_S)
            while command is not None:
                heard = time.monotonic()
                if isinstance(command, EndRound):
                    self._train_all()
                    self._drain()
                if isinstance(command, Hold):
                    self._hold(command)
                if isinstance(command, EndRound | Hold) and command.reference_latency:
                    self._scorer.learn(command.reference_latency)
                for see in self._observers:
                    see(command)
                if isinstance(command, EndRound | Hold | TrainOrder):
                    return command
                self._obey(command)
                command = self._hub.receive("worker", AnyCommand, 0.0)
            events = self._engine_events() + self._reward_events()
            if events:
                self._send(events)
            self._release()
            if time.monotonic() - heard > self._deadline_s:
                raise TimeoutError(
                    f"--rollout.stall_timeout_s {self._deadline_s:g} exceeded: rank "
                    f"{self._hub.rank} got no message from the controller on rank 0 in phase gen"
                )

    # ---- the endless round of --mode async

    def _hold(self, command: Hold) -> None:
        """Stop decoding and report all pending events. In mode `release`, also wait for all aborts
        and rewards, so that the controller knows the state of every sample."""
        if not self._down and self._live:
            if command.mode == "release":
                self._engine_does("abort", list(self._live))
            else:
                self._engine_does("pause", command.mode)
                self._paused = True
        self._releasing = command.mode == "release"
        deadline = time.monotonic() + self._deadline_s
        while True:
            events = self._engine_events() + self._reward_events()
            if events:
                self._send(events)
            if not (self._releasing and (self._live or self._unscored)):
                break
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"--rollout.stall_timeout_s {self._deadline_s:g} exceeded: rank "
                    f"{self._hub.rank} waits in phase pause_engines for {len(self._live)} "
                    f"requests of its engine and {len(self._unscored)} rewards"
                )
        self._forget(command.forget)
        self._release()
        self._send([Held()])

    def _engine_does(self, method: str, *args: Any) -> None:
        """Call a method of the engine. If the engine fails in this call, raise nothing: the next
        poll reports the failure."""
        assert self._engine is not None
        try:
            getattr(self._engine, method)(*args)
        except RuntimeError:
            if not self._engine.failure:
                raise

    def _resume(self) -> None:
        self._paused = False
        if not self._down:
            self._engine_does("resume")

    def _forget(self, groups: Collection[GroupId]) -> None:
        gone = set(groups)
        unscored = {i for i in self._unscored if group_of(i) in gone}
        if unscored:
            self._scorer.cancel(unscored)
            self._unscored -= unscored
            self._to_score = deque(i for i in self._to_score if i not in unscored)
        for found in (self.samples, self.texts, self.scores):
            for i in [i for i in found if group_of(i) in gone]:
                del found[i]
        for group in gone:
            self.prompts.pop(group, None)

    def restart_engine(self) -> None:
        """Restart the failed engine and discard its pending events. In an asynchronous round,
        `go_on` then returns the engine's requests to the controller."""
        assert self._engine is not None
        self._engine.restart()
        words = self._engine.poll(0.0)
        self._paused = False
        if self._live:
            for event in words:
                if isinstance(event, Down):
                    self._partials |= event.partials
            self._lost = True
            self._live.clear()
            self._moving.clear()

    def wait_for_sync(self) -> None:
        """On a rank that only samples, wait between rounds until rank 0 sends `JoinSync`. Rank 0
        sends `Alive` while it trains.

        Raises:
            TimeoutError: rank 0 has sent nothing for `timeout_s`.
        """
        heard = time.monotonic()
        while True:
            command = self._hub.receive("worker", AnyCommand, POLL_S)
            if isinstance(command, JoinSync):
                return
            if isinstance(command, Fail):
                raise RuntimeError(command.reason)
            if command is not None:
                heard = time.monotonic()
            elif time.monotonic() - heard > self._timeout_s:
                raise TimeoutError(
                    f"--cluster.timeout_s {self._timeout_s:g} exceeded: rank {self._hub.rank} "
                    "waits for the step of the train ranks, but got no message from rank 0"
                )

    def adopt(self, samples: Iterable[Sample]) -> None:
        """Add finished samples of another process, such as those of a checkpoint."""
        self.samples.update((sample.id, sample) for sample in samples)

    def read(self, prompts: Mapping[GroupId, Prompt], samples: Iterable[Sample]) -> None:
        """Add prompts and samples of other ranks, as if this rank had sampled them."""
        self.prompts.update(prompts)
        for sample in samples:
            self.samples[sample.id] = sample
            self.texts[sample.id] = self._decode(sample.tokens.tolist())

    def _enter(self) -> None:
        """Send `Ready` to the controller; also send `Down` if the engine has failed already."""
        self._down = self._engine.failure if self._engine is not None else ""
        self._send([Ready(), Down(reason=self._down)] if self._down else [Ready()])

    def _obey(self, command: AnyCommand) -> None:
        if isinstance(command, Fail):
            raise RuntimeError(command.reason)
        if isinstance(command, Repair):
            assert not self._live, sorted(self._live)[:3]
            self._train_all()  # the model-parallel group trains together, so this rank must join
            if self._callbacks.streamer is not None:
                self._callbacks.streamer.forget()
            self._releasing = False
            if self._callbacks.repair is not None:
                self._callbacks.repair()
            self._enter()
            return
        if isinstance(command, DropEngine):
            if self._engine is not None:
                self._engine.fail(command.reason)
            return
        if isinstance(command, Submit):
            assert self._engine is not None
            if self._down:  # the controller resubmits these requests when it gets `Down`
                return
            self.prompts.update(command.prompts)
            self._live.update(r.id for r in command.requests)
            self._has_reported = False
            self._engine.submit(command.requests)
        elif isinstance(command, Remember):
            assert self._engine is not None
            if not self._down:
                self._engine.remember(command.histories)
        elif isinstance(command, Abort):
            assert self._engine is not None
            self._engine.abort(command.ids)
        elif isinstance(command, Move):
            assert self._engine is not None
            ids = self._live.intersection(command.ids)
            if ids and not self._down:
                self._moving |= ids
                self._engine.abort(sorted(ids))
        elif isinstance(command, Release):
            assert self._engine is not None
            if not self._down:
                self._releasing = True
                self._engine.abort(list(self._live))
                self._release()
            elif self._callbacks.streamer is not None:  # a repair must not restart this engine
                self._callbacks.streamer.engine_leaves()
        elif isinstance(command, Train):
            self._to_train.append(command)
        elif isinstance(command, Ship):
            self.exchange.send(command.ids, command.to)
        elif isinstance(command, SendHistories):
            found = [
                history
                for i, score in command.scores.items()
                for history in histories_of(self.samples[i], command.keys[group_of(i)], score)
            ]
            self._hub.send(0, "histories", Histories(rank=self._hub.rank, histories=tuple(found)))

    # ---- training while other ranks decode

    def _release(self) -> None:
        """Send `Released` once the engine has aborted all requests."""
        if self._live or not self._releasing:
            return
        self._releasing = False
        if self._callbacks.streamer is not None:
            self._callbacks.streamer.engine_leaves()
        self._send([Released(partials=self._partials)])
        self._partials = {}

    def _train_next(self) -> bool:
        """Execute the oldest pending `Train` command, if all its samples are on this rank. Return
        whether a command was executed."""
        if not self._to_train:
            return False
        here, todo = self.exchange.here(), self._to_train[0]
        if self._missing(todo, here):
            return False
        self._to_train.popleft()
        assert self._callbacks.streamer is not None
        begin = time.monotonic()
        self._callbacks.streamer.train(todo.groups, todo.dp_ranks, here)
        self._send([Trained(seconds=time.monotonic() - begin)])
        return True

    def _missing(self, todo: Train, here: Container[RequestId]) -> dict[RequestId, int]:
        """Return `todo`'s samples that are not in `here`, each with the rank that sends it."""
        return {
            ref.id: ref.owner for group in todo.groups for ref in group.refs if ref.id not in here
        }

    def _train_all(self) -> None:
        """Execute all pending `Train` commands, as do all ranks of the model-parallel group."""
        deadline = time.monotonic() + self._timeout_s
        while self._to_train:
            if self._train_next():
                deadline = time.monotonic() + self._timeout_s
            elif time.monotonic() > deadline:
                missing = self._missing(self._to_train[0], self.exchange.here())
                raise TimeoutError(
                    f"--cluster.timeout_s {self._timeout_s:g} exceeded: rank {self._hub.rank} "
                    f"waits in --mode stream for {len(missing)} samples such as {min(missing)} "
                    f"from ranks {sorted(set(missing.values()))}"
                )
            else:
                time.sleep(POLL_S / 10)

    def _engine_events(self, is_idle: bool = False) -> list[AnyEvent]:
        """Poll the engine and return its events. With `is_idle`, poll even without requests."""
        if self._engine is None:
            return []
        alive = not self._engine.failure
        if not self._live and not is_idle and (self._down or alive):
            return []
        out: list[AnyEvent] = []
        waits = (self._live or is_idle) and not self._paused  # a paused engine has nothing to come
        for event in self._engine.poll(POLL_S if waits else 0.0):
            if isinstance(event, Finished):
                sample = event.sample
                assert sample is not None, event.id
                self._live.discard(event.id)
                self._moving.discard(event.id)
                if sample.group in self.prompts:
                    read = self.prompts[sample.group].teacher_tokens
                    if read is not None:
                        sample = msgspec.structs.replace(sample, teacher_prompt=read)
                    self.samples[event.id] = sample
                    self.texts[event.id] = self._decode(sample.tokens.tolist())
                    self._unscored.add(event.id)
                    self._to_score.append(event.id)
                else:  # a `Hold` has removed the group, and no other will: keep nothing of it
                    self._scorer.cancel([event.id])
                event = msgspec.structs.replace(event, sample=None, version=sample.oldest_version)
            elif isinstance(event, Aborted):
                self._live.discard(event.id)
                moves = event.id in self._moving
                self._moving.discard(event.id)
                if (self._releasing or moves) and event.sample is not None:
                    s = event.sample
                    part = Partial(
                        tokens=s.tokens,
                        logps=s.logps,
                        versions=s.versions,
                        drafted=s.drafted,
                        routes=s.routes,
                    )
                    if self._releasing:
                        self._partials[s.id] = part
                    else:
                        out.append(Moved(partials={s.id: part}))
                    continue
                event = msgspec.structs.replace(event, sample=None)
            elif isinstance(event, Stats):
                self._has_reported = not event.running and not event.waiting
                self.cache_used = max(self.cache_used, event.cache_used)
                for name in (*COUNTS, *DRAFT_COUNTS, *ENV_COUNTS):
                    self.counts[name] += getattr(event, name)
                for i, told in enumerate(event.by_batch):
                    size = BATCHES[min(i, len(BATCHES) - 1)]
                    for what, value in zip(("rows", "tokens", "on"), told, strict=True):
                        self.counts[f"{what}/{size}"] += value
            elif isinstance(event, Down):
                self._live.clear()
                self._moving.clear()
                self._down = event.reason
            out.append(event)
        return out

    def _reward_events(self) -> list[AnyEvent]:
        self._ask_for_scores()
        wait = 0.0 if self._live else (POLL_S if self._scorer.num_pending else 0.0)
        scores = [(i, self._with_decision(i, result)) for i, result in self._scorer.poll(wait)]
        self._unscored.difference_update(i for i, _ in scores)
        self.scores.update((i, result.score) for i, result in scores)
        return [Rewarded(id=i, result=result) for i, result in scores]

    def _with_decision(self, id: RequestId, result: RewardResult) -> RewardResult:
        """Return the result with the decision of the run's callbacks about the sample."""
        sample = self.samples.get(id)
        if self._keep_sample is None or sample is None or sample.group not in self.prompts:
            return result
        kept = self._keep_sample(sample, self.prompts[sample.group], self.texts[id], result)
        return msgspec.structs.replace(result, is_trained=kept)

    def _ask_for_scores(self) -> None:
        """Submit samples to the reward service while it has room."""
        if self._reward_barrier and self._live:
            return
        while self._to_score and self._scorer.room > 0:
            id = self._to_score.popleft()
            sample = self.samples[id]
            self._scorer.submit(id, sample, self.prompts[sample.group], self.texts[id])

    def _send(self, events: list[AnyEvent]) -> None:
        for see in self._observers:
            for event in events:
                see(event)
        stamp = {"rank": self._hub.rank, "round": self._round, "time": time.monotonic()}
        self._hub.send(0, "controller", [msgspec.structs.replace(e, **stamp) for e in events])

    def _drain(self) -> None:
        """Wait at the end of the round until the engine has aborted its remaining requests, then
        briefly for its last counters. Cancel the scoring of late samples."""
        deadline = time.monotonic() + self._deadline_s
        while self._live and self._engine is not None:
            self._engine_events()
            if time.monotonic() > deadline:
                some = min(self._live)
                raise TimeoutError(
                    f"--rollout.stall_timeout_s {self._deadline_s:g} exceeded: the engine of rank "
                    f"{self._hub.rank} did not abort {len(self._live)} requests such as {some}"
                )
        for _ in range(LATE_POLLS):
            if self._has_reported or self._down:
                break
            self._engine_events(is_idle=True)
        self._scorer.cancel(self._unscored)
        self._unscored.clear()
        self._to_score.clear()
        self._live.clear()


def _no_counts() -> dict[str, float]:
    return dict.fromkeys((*COUNTS, *DRAFT_COUNTS, *ENV_COUNTS, *BATCH_COUNTS), 0.0)

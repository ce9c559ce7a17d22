"""The agent of one replica: carries commands to the engine, samples to the reward service, events
to the controller. Tokens stay here until `route` sends them to the rank that trains them.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from rlcore.protocols import Engine, Mortal
from rlcore.records import (
    Abort,
    Aborted,
    AnyCommand,
    AnyEvent,
    Down,
    Drop,
    EndRound,
    Fail,
    Finished,
    Prompt,
    Ready,
    Repair,
    RequestId,
    Rewarded,
    RewardResult,
    Sample,
    Submit,
)
from rlcore.rollout.transport import Hub

POLL_S = 0.02


class Scorer(Protocol):
    """What the agent needs of the reward service."""

    num_pending: int

    def submit(self, id: RequestId, sample: Sample, prompt: Prompt, text: str) -> None: ...

    def poll(self, timeout_s: float) -> list[tuple[RequestId, RewardResult]]: ...

    def cancel(self, ids: Collection[RequestId]) -> None: ...

    def learn(self, anchors: Mapping[str, float]) -> None: ...


class Agent:
    """One per rank; `engine` is None on ranks that only train. `repair` starts a dead engine again
    and gives it weights, together with all other ranks; without it a round ends when no engine is
    left."""

    def __init__(
        self,
        hub: Hub,
        engine: Engine | None,
        scorer: Scorer,
        decode: Callable[[Sequence[int]], str],
        deadline_s: float,
    ) -> None:
        self._hub, self._engine, self._scorer, self._decode = hub, engine, scorer, decode
        self._deadline_s = deadline_s
        self.prompts: dict[str, Prompt] = {}
        """Rows of the round's groups that this replica took part in."""
        self.repair: Callable[[], None] | None = None
        self._live: set[RequestId] = set()
        self._unscored: set[RequestId] = set()
        self._down = ""
        """Why the engine is dead; empty while it lives."""
        self._round = 0
        self.samples: dict[RequestId, Sample] = {}
        """Finished samples of the round, by id."""
        self.texts: dict[RequestId, str] = {}

    def run_round(self) -> EndRound:
        """Serve the controller until it ends the round. Raises RuntimeError with the controller's
        reason, TimeoutError when the controller is silent."""
        self._round += 1
        self.samples.clear()
        self.texts.clear()
        self.prompts.clear()
        self._enter()
        heard = time.monotonic()
        while True:
            busy = bool(self._live or self._scorer.num_pending)  # then they are waited for below
            command = self._hub.receive("agent", AnyCommand, 0.0 if busy else POLL_S)
            while command is not None:
                heard = time.monotonic()
                if isinstance(command, EndRound):
                    self._drain()
                    if command.anchors:
                        self._scorer.learn(command.anchors)
                    return command
                self._obey(command)
                command = self._hub.receive("agent", AnyCommand, 0.0)
            events = self._engine_events() + self._reward_events()
            if events:
                self._send(events)
            if time.monotonic() - heard > self._deadline_s:
                raise TimeoutError(
                    f"--rollout.deadline_s {self._deadline_s:g} is over: rank {self._hub.rank} has "
                    "heard nothing from the controller on rank 0 in phase rollout"
                )

    def _enter(self) -> None:
        """Tell the controller that this rank is there; its engine may have died before."""
        self._down = getattr(self._engine, "down", "")
        self._send([Ready(), Down(reason=self._down)] if self._down else [Ready()])

    def _obey(self, command: AnyCommand) -> None:
        if isinstance(command, Fail):
            raise RuntimeError(command.reason)
        if isinstance(command, Repair):
            assert not self._live, sorted(self._live)[:3]
            if self.repair is not None:
                self.repair()
            self._enter()
            return
        if isinstance(command, Drop):
            if isinstance(self._engine, Mortal):
                self._engine.fail(command.reason)
            return
        if isinstance(command, Submit):
            assert self._engine is not None
            if self._down:  # sent before the controller heard of it, which gives them to others
                return
            self.prompts.update(command.prompts)
            self._live.update(r.id for r in command.requests)
            self._engine.submit(command.requests)
        elif isinstance(command, Abort):
            assert self._engine is not None
            self._engine.abort(command.ids)

    def _engine_events(self) -> list[AnyEvent]:
        if self._engine is None:
            return []
        if not self._live and (self._down or not getattr(self._engine, "down", "")):
            return []
        out: list[AnyEvent] = []
        for event in self._engine.poll(POLL_S if self._live else 0.0):
            if isinstance(event, Finished):
                sample = event.sample
                assert sample is not None, event.id
                self._live.discard(event.id)
                self.samples[event.id] = sample
                text = self._decode(sample.tokens.tolist())
                self.texts[event.id] = text
                self._scorer.submit(event.id, sample, self.prompts[sample.group], text)
                self._unscored.add(event.id)
                event = msgspec.structs.replace(event, sample=None)
            elif isinstance(event, Aborted):
                self._live.discard(event.id)
                event = msgspec.structs.replace(event, sample=None)
            elif isinstance(event, Down):
                self._live.clear()
                self._down = event.reason
            out.append(event)
        return out

    def _reward_events(self) -> list[AnyEvent]:
        wait = 0.0 if self._live else (POLL_S if self._scorer.num_pending else 0.0)
        scores = self._scorer.poll(wait)
        self._unscored.difference_update(i for i, _ in scores)
        return [Rewarded(id=i, result=result) for i, result in scores]

    def _send(self, events: list[AnyEvent]) -> None:
        stamp = {"rank": self._hub.rank, "round": self._round, "time": time.monotonic()}
        self._hub.send(0, "controller", [msgspec.structs.replace(e, **stamp) for e in events])

    def _drain(self) -> None:
        """Wait until the engine has let go of everything that the end of the round aborted. What
        was too late to be kept is not scored."""
        deadline = time.monotonic() + self._deadline_s
        while self._live and self._engine is not None:
            self._engine_events()
            if time.monotonic() > deadline:
                some = min(self._live)
                raise TimeoutError(
                    f"rank {self._hub.rank}: the engine did not abort {len(self._live)} requests "
                    f"such as {some} within {self._deadline_s:g} s"
                )
        self._scorer.cancel(self._unscored)
        self._unscored.clear()
        self._live.clear()

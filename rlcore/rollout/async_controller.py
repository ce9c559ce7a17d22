"""Controller of `--mode async`: one endless sampling round (ROLL Flash, arXiv:2510.11345).

`AsyncController` extends `Controller`, which handles placement, rewards and engine failures.
Responses survive a weight update. `AsyncController` adds this call and these events:

    go(version)   weights loaded: abort stale groups; submit requests once all engines are `Ready`
    Wanted        the learner wants a batch: send TrainOrder once the buffer has a full batch
    Holding       the learner wants to update weights: send Hold; all rollout ranks answer Held

The sample buffer (`sched/staleness.py`) decides which groups may start, which are trained next and
which are too old. A group is removed when a batch takes it or when it is dropped.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import Struct, structs

from rlcore.records import (
    AnyCommand,
    AnyEvent,
    Finished,
    GroupId,
    Held,
    Hold,
    Holding,
    LengthReport,
    Move,
    Moved,
    Preempted,
    Prompt,
    Released,
    RequestId,
    Rewarded,
    TrainOrder,
    Version,
    Wanted,
    Work,
    group_of,
)
from rlcore.rollout.controller import Controller
from rlcore.sched.histopipe import HistoPipe
from rlcore.sched.roles import GroupState, RequestState, Router
from rlcore.sched.router import Loads
from rlcore.sched.staleness import Refill, SampleBuffer
from rlcore.sched.stop import EQUAL_REWARDS


class SavedGroup(Struct, frozen=True):
    """State of a group in a checkpoint. An unfinished request has its tokens so far in `resume`."""

    work: Work
    requests: tuple[RequestState, ...]
    counted: tuple[RequestId, ...]
    is_closed: bool


class Saved(Struct, frozen=True):
    """State of an `AsyncController` in a checkpoint. Rollout ranks save the finished samples."""

    buffer: dict[str, Any]
    groups: tuple[SavedGroup, ...]
    order: int
    pipe: dict[str, Any] = {}


class AsyncController(Controller):
    """Controller of an endless round. The ranks in `trainers` get the batches. `rollout_ranks` are
    all other ranks; `ranks` are the rollout ranks that lead an engine."""

    def __init__(
        self,
        *,
        buffer: SampleBuffer,
        issue: Callable[[int], list[Work]],
        trainers: Sequence[int],
        rollout_ranks: Sequence[int],
        ranks: Sequence[int],
        place: Router | HistoPipe,
        deadline_s: float,
        members: Mapping[int, Sequence[int]] | None = None,
        max_replaced: int = 0,
    ) -> None:
        """
        Args:
            issue: function that returns the work of the next n prompts.
            place: router of requests to engines. A router of class `HistoPipe` also orders new
                work and may move running requests to another engine.
            max_replaced: number of groups of equal rewards per version that other prompts replace.
        """
        self._pipe = place if isinstance(place, HistoPipe) else None
        self._refill = Refill(buffer, self._issue_by(issue), max_replaced)
        super().__init__(
            ranks=ranks,
            all_ranks=[*trainers, *rollout_ranks],
            members=members,
            place=place,
            stop=self._refill,
            deadline_s=deadline_s,
        )
        self.buffer = buffer
        self._learners, self._rollout_ranks = tuple(trainers), tuple(rollout_ranks)
        self._wants = False
        """Whether the learner waits for a batch."""
        self._holds = True
        self._version = 0
        """Version of the weights that the engines decode with."""
        self._held: set[int] = set()
        self._forget: list[GroupId] = []
        """Removed groups, whose samples the rollout ranks drop at the next `Hold`."""
        self.prompts: dict[GroupId, Prompt] = {}
        """Prompts of the most recent batch, by group."""
        self._found: dict[str, float] = {}
        """Scoring time in seconds of the slowest right answer since the last `Hold`, by prompt; for
        adaptive reward deadlines."""

    def _issue_by(self, issue: Callable[[int], list[Work]]) -> Callable[[int], list[Work]]:
        pipe = self._pipe
        if pipe is None:
            return issue

        def ordered(count: int) -> list[Work]:
            work = issue(count)
            pipe.order(work)
            return work

        return ordered

    # ---- the interface

    def go(self, version: Version, now: float) -> list[AnyCommand]:
        """Start decoding with the weights of `version`, once all engines have sent `Ready`. Abort
        the groups that are too old for this version."""
        self.done = self._holds = False
        self._version = version
        self._held.clear()
        self._repairs = 0
        self._ready = set(self._learners)
        self._seen = dict.fromkeys(self._all_ranks, now)
        self._heard = dict(self._seen)
        self._last_alive, self._look_at = now, now + self._deadline_s
        self._up = Loads(self._ranks)
        for request in self._requests.values():
            if request.rank in self._up and not request.finish:
                self._up[request.rank] += 1
        aborts = self._drop(self.buffer.advance(version))
        live = [r for r in self._requests.values() if not r.finish]
        self._count("async/carried", sum(r.num_tokens > 0 for r in live))
        self._add(self._refill.fill())
        return aborts

    def handle(self, event: AnyEvent, now: float) -> list[AnyCommand]:
        """Process one event and return the resulting commands. If the event's group was removed,
        only free the request's slot on the engine."""
        self._heard[event.rank] = now
        if isinstance(event, Wanted | Holding | Held):
            self._seen[event.rank] = now
            return self._on_request(event, now)
        if isinstance(event, Moved):
            self._seen[event.rank] = now
            return self._moved(event)
        if isinstance(event, LengthReport):
            event = self._known(event)
            for i, length in zip(event.ids, event.lengths, strict=True):
                if length:
                    self.buffer.decoded(group_of(i), self._version)
        elif isinstance(event, Finished) and event.num_tokens:  # a failed episode has no tokens
            self.buffer.decoded(group_of(event.id), event.version)
        if isinstance(event, Finished | Rewarded | Preempted) and event.id not in self._requests:
            if isinstance(event, Finished) and event.rank in self._up:
                self._up[event.rank] -= 1
            return self._submit()
        commands = super().handle(event, now)
        if isinstance(event, LengthReport):
            commands += self._move(event)
        return [*commands, *self._give()]

    def take_stats(self) -> dict[str, float]:
        """Return the counters since the last call and reset them."""
        found, self._stats = self._stats, {}
        found.pop("timing_s/reward", None)  # in an endless round, no phase waits for rewards
        return found | (self._pipe.metrics() if self._pipe is not None else {})

    # ---- requests of the learner

    def _on_request(self, event: Wanted | Holding | Held, now: float) -> list[AnyCommand]:
        if self.done:
            return []
        if isinstance(event, Holding):
            return self._hold(event, now)
        if isinstance(event, Wanted):
            self._wants = True
            return self._give()
        self._held.add(event.rank)
        self.done = self._held.issuperset(self._rollout_ranks)
        return []

    def _give(self) -> list[AnyCommand]:
        """If the learner waits for a batch and the buffer has a full one, return its `TrainOrder`
        commands. Groups are in the order of their start, as in a synchronous round."""
        if not self._wants or self._holds or self.done:
            return []
        if not self._up:
            return self._go_on()
        chosen = self.buffer.take()
        if chosen is None:
            return []
        self._wants = False
        groups = tuple(self._group(self._groups[g]) for g in sorted(chosen, key=self._place_of))
        self.prompts = {g: self._groups[g].work.prompt for g in chosen}
        stats = self._reward_stats(groups) | self.buffer.metrics()
        self._found |= self._reference_latency(chosen)
        if self._pipe is not None:
            for group in groups:
                self._pipe.learn(self._groups[group.id].work.prompt, group.lengths)
        for name in chosen:
            self._leave(name)
        return [TrainOrder(rank=r, groups=groups, stats=stats) for r in self._learners]

    def _hold(self, event: Holding, now: float) -> list[AnyCommand]:
        """Return a `Hold` per rollout rank, which stops decoding and names the removed groups."""
        equal = [g for g, why in self._dropped.items() if why == EQUAL_REWARDS]
        if self._refill.max_replaced:
            self._count("training/replaced_groups", len(equal))
        self._count("async/stale_groups", len(self._dropped) - len(equal))
        for group in self._dropped:
            self._leave(group)
        self._dropped = {}
        self._holds = True
        # Restart all deadlines: idle rollout ranks were allowed to be silent, now all must answer.
        self._ready = set(self._learners)
        self._seen = dict.fromkeys(self._all_ranks, now)
        self._look_at = now + self._deadline_s
        forget, self._forget = tuple(self._forget), []
        reference_latency, self._found = self._found, {}
        return [
            Hold(rank=rank, mode=event.mode, forget=forget, reference_latency=reference_latency)
            for rank in self._rollout_ranks
        ]

    def _drop(self, late: Sequence[GroupId]) -> list[AnyCommand]:
        """Abort and remove the groups in `late`, which are too old to train."""
        lost = [r for g in late for r in self._groups[g].requests.values()]
        self._count("async/stale_groups", len(late))
        self._count("async/stale_tokens", sum(r.num_tokens for r in lost))
        aborts = self._close(late)
        for group in late:
            self._leave(group)
        return aborts

    def _leave(self, group: GroupId) -> None:
        """Remove the group and its requests."""
        for request in self._groups.pop(group).requests:
            del self._requests[request]
        self._place.forget(group)
        self._forget.append(group)
        self.counted.clear()

    def _place_of(self, group: GroupId) -> int:
        """Return the position of the group's first request in the start order of all requests."""
        return min(r.order for r in self._groups[group].requests.values())

    def _known(self, event: LengthReport) -> LengthReport:
        """Return the length report without requests of removed groups and without new tokens."""
        pairs = [
            (i, n) for i, n in zip(event.ids, event.lengths, strict=True) if i in self._requests
        ]
        return structs.replace(
            event, ids=tuple(i for i, _ in pairs), lengths=tuple(n for _, n in pairs), tails=()
        )

    # ---- requests that move to another engine

    def _move(self, event: LengthReport) -> list[AnyCommand]:
        """Return the command to move requests that are too long for their engine (`HistoPipe`)."""
        if self._pipe is None or self._holds or event.rank not in self._up:
            return []
        here = {
            i: length
            for i, length in zip(event.ids, event.lengths, strict=True)
            if self._requests[i].rank == event.rank and not self._requests[i].finish
        }
        ids = self._pipe.leave(here)
        return [Move(rank=event.rank, ids=tuple(ids))] if ids else []

    def _moved(self, event: Moved) -> list[AnyCommand]:
        """Put requests that move from one engine to another at the front of the queue."""
        for i, partial in event.partials.items():
            if event.rank in self._up:
                self._up[event.rank] -= 1
            request = self._requests.get(i)
            if request is None or request.finish:  # the request's group was removed or closed
                self._count("sched/aborted_tokens", len(partial.tokens))
                continue
            request.requeue(partial)
            self._waiting.appendleft(request)
            self._count("sched/migrated", 1)
            self._count("sched/migrated_tokens", request.num_tokens)
        return self._submit()

    # ---- released requests and failed engines

    def _released(self, event: Released) -> list[AnyCommand]:
        """Requeue all requests of an engine that released its requests for a weight update, or that
        failed during a weight update."""
        self._requeue(event.rank, event.partials)
        if event.rank in self._up:
            self._up[event.rank] = 0
        return self._submit()

    def _go_on(self) -> list[AnyCommand]:
        """Continue after an engine has failed: the next weight update restarts it. If the learner
        waits for a batch and no engine is left, restart all engines now."""
        if self._up or self._holds or not self._wants:
            return self._submit()
        return super()._go_on()

    # ---- checkpoints

    def save(self) -> Saved:
        """Return the complete state for a checkpoint. Call this only between a hold in mode
        `release` and the next `go`."""
        assert self.done, "the controller is still running"
        groups = tuple(
            SavedGroup(
                work=state.work,
                requests=tuple(state.requests.values()),
                counted=tuple(r.id for r in state.counted),
                is_closed=state.is_closed,
            )
            for state in self._groups.values()
        )
        pipe = self._pipe.state() if self._pipe is not None else {}
        return Saved(buffer=self.buffer.state(), groups=groups, order=self._num_started, pipe=pipe)

    def restore(self, saved: Saved, owner_of: Callable[[int], int]) -> None:
        """Restore the state that `save` returned. `owner_of` maps the rank that had samples in the
        saved run to the rank that has these samples now."""
        self.buffer.restore(saved.buffer)
        if self._pipe is not None and saved.pipe:
            self._pipe.restore(saved.pipe)
        self._num_started = saved.order
        for group in saved.groups:
            requests = {
                r.id: replace(r, rank=owner_of(r.rank)) if r.finish and r.rank >= 0 else r
                for r in group.requests
            }
            self._groups[group.work.id] = GroupState(
                work=group.work,
                requests=requests,
                counted=[requests[i] for i in group.counted],
                is_closed=group.is_closed,
            )
            self._requests |= requests
            if group.is_closed and group.work.id not in self.buffer:
                self._dropped[group.work.id] = EQUAL_REWARDS  # the next `Hold` removes the group
            self._waiting += [r for r in requests.values() if not r.finish]

"""Controller of one sampling round: a deterministic state machine from events to commands.

The controller decides which request starts on which engine, when the round is over and which
requests are aborted. It does no tensor work and has no clock and no socket. `round.py` feeds events
to the controller and sends its commands. The simulator runs the controller with virtual engines.
The same events in the same order give the same commands.

    start(work)         -> nothing; EndRound if there is no work
    handle(event, now)  -> Submit, Abort, Release, Ship, Train, Repair, DropEngine, EndRound, Fail
    tick(now)           -> Alive, Release, Fail: deadlines and other time-based decisions
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from msgspec import structs

from rlcore.records import (
    Abort,
    Aborted,
    Alive,
    AnyCommand,
    AnyEvent,
    Down,
    DropEngine,
    EndRound,
    Fail,
    Finish,
    Finished,
    Group,
    GroupId,
    LengthReport,
    Partial,
    Preempted,
    Ready,
    Release,
    Released,
    Repair,
    Request,
    RequestId,
    Rewarded,
    SampleRef,
    Ship,
    Stats,
    Streamed,
    Submit,
    Train,
    Trained,
    Work,
    group_of,
    is_baseline,
    is_training,
    request_of,
)
from rlcore.sched.completion_order import ByTokens, CompletionOrder
from rlcore.sched.reward_timeout import key_of
from rlcore.sched.roles import Cell, Elastic, GroupState, Live, RequestState, Router, Stop
from rlcore.sched.router import Loads

ALIVE_INTERVAL_S = 20.0
MAX_REPAIRS = 3
"""Maximum number of repairs per round. A repair restarts all engines when none is left."""


@dataclass(slots=True)
class Trainer:
    """Training state of a cell that has stopped decoding. A cell is a set of ranks that switch from
    decoding to training together."""

    cell: Cell
    busy: set[int] = field(default_factory=set)
    """Ranks that are still training their assigned groups."""
    seconds: float = 0.0

    def trained(self, rank: int, seconds: float) -> None:
        """Record that a rank has trained its assigned groups in `seconds`."""
        self.busy.discard(rank)
        self.seconds += seconds / len(self.cell.ranks)


class Controller:
    """Controller of one round over the engines on `ranks`. It sends the end of the round to
    `all_ranks` (default: `ranks`).

    An engine may span several ranks: `members` maps the engine's leading rank to its other ranks.
    If one of these ranks reports `Down`, the whole engine is down.
    """

    def __init__(
        self,
        *,
        ranks: Sequence[int],
        place: Router,
        stop: Stop,
        deadline_s: float,
        all_ranks: Sequence[int] | None = None,
        members: Mapping[int, Sequence[int]] | None = None,
        by_tokens: bool = False,
        elastic: Elastic | None = None,
    ) -> None:
        """
        Args:
            by_tokens: if true, count responses in order of length; if false, in order of scoring.
            elastic: policy that moves engines from decoding to training; None moves no engine.
        """
        self._place, self._stop, self._deadline_s = place, stop, deadline_s
        self._ranks = tuple(ranks)
        self._all_ranks = tuple(all_ranks if all_ranks is not None else ranks)
        self._leader = {r: rank for rank, rest in (members or {}).items() for r in rest}
        self._repairs = 0
        self._up = Loads(ranks)  # live requests per decoding engine, by leading rank
        self._ready: set[int] = set()
        self._seen: dict[int, float] = {}  # rank -> time of its latest event that shows progress
        self._heard: dict[int, float] = {}  # rank -> time of its latest event of any kind
        self._groups: dict[str, GroupState] = {}
        self._requests: dict[str, RequestState] = {}
        self._waiting: deque[RequestState] = deque()
        self._race: CompletionOrder | None = ByTokens(self._requests.values) if by_tokens else None
        self._dropped: dict[GroupId, str] = {}
        self._elastic = elastic
        self._leaving: set[int] = set()
        """Engines that must release their requests and have not sent `Released` yet."""
        self._gone: set[int] = set()
        """Leading ranks of released engines whose ranks do not train in this round."""
        self._trainers: list[Trainer] = []
        self._to_train: deque[GroupState] = deque()
        """Complete groups that are kept and wait for a cell (set of ranks) that trains them."""
        self._streamed: list[Streamed] = []
        self._reasons: dict[int, str] = {}
        # Interval of `Alive`: short, so that no waiting rank times out before the controller.
        self._alive_s = min(ALIVE_INTERVAL_S, deadline_s / 4)
        self._last_alive = 0.0
        self._look_at = 0.0
        """Earliest time at which a rank can exceed the deadline; earlier calls of `tick` skip the
        check."""
        self._stats: dict[str, float] = {}
        self._last_finish = 0.0
        self.done = False
        self._num_requests = self._num_started = 0
        self.num_done = 0
        """Number of responses counted so far. Only scored responses are counted."""
        self._num_dropped = 0
        """Number of counted responses whose groups were dropped."""
        self.counted: list[RequestState] = []
        """Responses counted so far, in the order of counting."""
        self.kept: tuple[GroupId, ...] | None = None
        """Groups that the round kept; None until the round has ended."""

    @property
    def num_requests(self) -> int:
        """Number of responses that the round needs."""
        if not self._num_requests:  # cached: a sum over all groups, read after every reward
            self._num_requests = self._stop.num_wanted(self._groups)
        return self._num_requests

    @property
    def groups(self) -> Mapping[GroupId, GroupState]:
        """All groups that the round has started so far, in the order of their start."""
        return self._groups

    @property
    def dropped(self) -> Mapping[GroupId, str]:
        """Complete groups that are not trained, each with the reason."""
        return self._dropped

    def decide_by(
        self, make: Callable[[Callable[[], Collection[RequestState]]], CompletionOrder]
    ) -> None:
        """Set the order in which responses count (default: order of arrival). `make` creates the
        `CompletionOrder` from a function that returns all requests of the round. Call this before
        the first event."""
        self._race = make(self._requests.values)

    # ---- the interface

    def start(self, work: Iterable[Work], now: float) -> list[AnyCommand]:
        """Begin a round. Requests are submitted once all engines have sent `Ready`."""
        self._add(work)
        self._seen = dict.fromkeys(self._all_ranks, now)
        self._heard = dict(self._seen)
        self._last_alive, self._look_at = now, now + self._deadline_s
        if self._elastic is not None:
            self._elastic.start()
        if not self._groups:
            return self._end([])
        return []

    def handle(self, event: AnyEvent, now: float) -> list[AnyCommand]:
        """Process one event and return the resulting commands."""
        self._heard[event.rank] = now
        if self._moves(event):
            self._seen[event.rank] = now
        if self.done:
            return []
        if isinstance(event, Ready):
            self._ready.add(event.rank)
            return self._submit()
        if isinstance(event, Finished):
            return self._finished(event, now)
        if isinstance(event, Rewarded):
            return self._rewarded(event, now)
        if isinstance(event, Down):
            return self._down(event)
        if isinstance(event, Released):
            return self._released(event)
        if isinstance(event, Trained):
            return self._trained(event)
        if isinstance(event, LengthReport):
            for i, n in zip(event.ids, event.lengths, strict=True):
                self._requests[i].progress(n)
            return []
        if isinstance(event, Stats):
            for key in (
                "decode_steps",
                "decode_tokens",
                "prefill_tokens",
                "cached_tokens",
                "busy_s",
            ):
                self._count(f"sched/{key}", getattr(event, key))
            return []
        if isinstance(event, Preempted):
            self._count("sched/preemptions", 1)
            return []
        assert isinstance(event, Aborted), event
        self._count("sched/aborted_tokens", event.num_tokens)
        if event.rank in self._up:
            self._up[event.rank] -= 1
        return self._submit()

    def tick(self, now: float) -> list[AnyCommand]:
        """Check deadlines and return time-based commands: `Fail` if a rank is silent for too long,
        `Alive` to keep waiting ranks from timing out. Call this periodically."""
        if self.done:
            return []
        silent: list[int] = []
        if now > self._look_at:
            silent = [r for r in self._all_ranks if now - self._seen[r] > self._deadline_s]
            self._look_at = min(self._seen.values()) + self._deadline_s
        owing = [r for r in silent if r not in self._ready or self._owed_by(r)]
        if owing:
            return self._fail(self._verdict(owing, now))
        if now - self._last_alive > self._alive_s:
            self._last_alive = now
            return [Alive(rank=r) for r in self._all_ranks]
        return self._release()

    # ---- events

    def _add(self, work: Iterable[Work]) -> None:
        self._num_requests = 0
        for w in work:
            state = GroupState(work=w)
            for k in range(w.num_samples):
                request = RequestState(id=request_of(w.id, k), order=self._num_started)
                self._num_started += 1
                state.requests[request.id] = request
                self._requests[request.id] = request
                self._waiting.append(request)
            self._groups[w.id] = state

    def _finished(self, event: Finished, now: float) -> list[AnyCommand]:
        self._last_finish = now
        request = self._requests[event.id]
        request.end(event.finish, event.num_tokens, event.num_observed)
        if self._elastic is not None:
            self._elastic.finished(event.num_tokens)
        if event.rank in self._up:  # false if the engine is being released
            self._up[event.rank] -= 1
        return self._submit()  # the response counts only after its reward has arrived

    def _rewarded(self, event: Rewarded, now: float) -> list[AnyCommand]:
        request = self._requests[event.id]
        if request.result is not None:
            return []
        request.reward(event.result)
        self._stats["timing_s/reward"] = now - self._last_finish
        if self._race is None:
            return self._counts(request)
        self._race.arrive(request)
        return self._count_in()

    def _count_in(self) -> list[AnyCommand]:
        """Count the responses that the completion order releases. Count them one at a time, because
        a counted response may complete its group and thereby exclude other responses."""
        assert self._race is not None
        commands: list[AnyCommand] = []
        while not self.done and (request := self._race.next(self._is_open)) is not None:
            commands += self._counts(request)
        return commands

    def _is_open(self, request: RequestState) -> bool:
        """Return whether the response may still count: it is not aborted and its group is open."""
        return request.finish != "abort" and not self._groups[group_of(request.id)].is_closed

    def _counts(self, request: RequestState) -> list[AnyCommand]:
        """Count a scored response. If its group is closed, the response is too late: ignore it."""
        group = self._groups[group_of(request.id)]
        if group.is_closed:
            return []
        group.counted.append(request)
        self.counted.append(request)
        self.num_done += 1
        if not group.is_complete:
            return self._release()
        group.close()
        verdict = self._stop.judge(self._groups, group)
        self._dropped |= verdict.dropped
        self._num_dropped += sum(len(self._groups[g].counted) for g in verdict.dropped)
        if verdict.kept is not None:
            self._count("sched/short_of_groups", float(verdict.is_short))
            return self._end(verdict.kept)
        aborts = self._close([group.work.id, *verdict.closed])
        self._add(verdict.more)
        if self._elastic is not None and group.work.id not in verdict.dropped:
            self._to_train.append(group)
        return [*aborts, *self._submit(), *self._release(), *self._feed()]

    def _close(self, groups: Iterable[GroupId]) -> list[AnyCommand]:
        """Close these groups and abort their unfinished requests."""
        live: dict[int, list[str]] = {}
        for g in groups:
            self._groups[g].close()
            for r in self._groups[g].requests.values():
                if r.finish:
                    continue
                r.abort()
                if r.rank in self._up:
                    live.setdefault(r.rank, []).append(r.id)
        return [Abort(rank=rank, ids=tuple(ids)) for rank, ids in live.items()]

    def _down(self, event: Down) -> list[AnyCommand]:
        """Requeue the unfinished requests of a failed engine. Other engines continue each request
        from its last known token. If no other engine is left, all ranks restart their engines."""
        self._reasons[event.rank] = event.reason
        if self._repairs and event.rank not in self._ready:  # a running repair restarts this engine
            return []
        leader = self._leader.get(event.rank)
        if leader is not None:  # stop the engine on its leading rank, which then sends Down
            decodes = leader in self._up or leader in self._leaving
            return [DropEngine(rank=leader, reason=event.reason)] if decodes else []
        if event.rank in self._leaving:
            self._has_left(event.rank)
        elif self._up.pop(event.rank, None) is None:
            return []
        lost = self._requeue(event.rank, event.partials)
        self._count("sched/kept_tokens", sum(r.num_tokens for r in lost))
        self._count("sched/engines_down", 1)
        return self._go_on()

    def _go_on(self) -> list[AnyCommand]:
        """Continue after an engine has stopped decoding. If no engine is decoding any more, restart
        all engines, but first wait until all released engines have returned their requests."""
        if self._up:
            return [*self._submit(), *self._feed()]
        if self._leaving:
            return []
        if self._repairs == MAX_REPAIRS:
            reasons = "; ".join(f"rank {r}: {why}" for r, why in sorted(self._reasons.items()))
            return self._fail(
                f"no engine is left in this round after {MAX_REPAIRS} restarts of all engines "
                f"({reasons})"
            )
        self._repairs += 1
        self._count("sched/repairs", 1)
        self._forget_training()
        self._place.clear()  # otherwise all groups would go back to the engine that failed last
        self._up = Loads(rank for rank in self._ranks if rank not in self._gone)
        self._ready.clear()
        return [Repair(rank=r) for r in self._all_ranks]

    def _requeue(self, rank: int, partials: Mapping[RequestId, Partial]) -> list[RequestState]:
        """Put an engine's unfinished requests, with their tokens so far, back at the front of the
        queue. Return these requests."""
        lost = [r for r in self._requests.values() if r.rank == rank and not r.finish]
        for r in lost:
            r.requeue(partials.get(r.id, r.resume))
        self._waiting.extendleft(reversed(lost))
        return lost

    # ---- training while other engines decode

    def _release(self) -> list[AnyCommand]:
        """Return commands that stop decoding on the engines that the elastic policy chooses."""
        if self._elastic is None or self._trainers or self._gone:
            return []
        done = self.num_done - self._num_dropped
        chosen = self._elastic.release(done, self.num_requests, self._live, self._up)
        if not chosen:
            return []
        self._trainers = [Trainer(cell) for cell in chosen if cell.dp_ranks]
        self._gone = {r for cell in chosen if not cell.dp_ranks for r in cell.leaders}
        name = "sched/stream_at" if self._trainers else "sched/tail_at"
        self._stats[name] = done / self.num_requests
        self._leaving = {r for cell in chosen for r in cell.leaders if r in self._up}
        for rank in self._leaving:
            del self._up[rank]
        # Send `Release` to failed engines too, so that a repair does not restart these engines.
        told = self._leaving | self._gone
        return [Release(rank=rank) for rank in sorted(told)] + self._feed()

    def _live(self) -> list[Live]:
        found = []
        for group in self._groups.values():
            prompt, limit = len(group.work.prompt.tokens), group.work.sampling.max_tokens
            found += [
                Live(prompt, r.num_tokens, limit)
                for r in (() if group.is_closed else group.requests.values())
                if not r.finish
            ]
        return found

    def _released(self, event: Released) -> list[AnyCommand]:
        """Requeue the requests that an engine has released, with their tokens so far."""
        if event.rank not in self._leaving:  # the engine has failed and has already sent Down
            return []
        self._has_left(event.rank)
        moved = self._requeue(event.rank, event.partials)
        self._count("sched/migrated", len(moved))
        self._count("sched/migrated_tokens", sum(r.num_tokens for r in moved))
        aborted = [p for i, p in event.partials.items() if self._requests[i].finish]
        self._count("sched/aborted_tokens", sum(len(p.tokens) for p in aborted))
        return self._go_on()

    def _has_left(self, rank: int) -> None:
        self._leaving.discard(rank)
        if rank in self._gone:
            assert self._elastic is not None
            self._elastic.left(rank)

    def _trained(self, event: Trained) -> list[AnyCommand]:
        for trainer in self._trainers:
            if event.rank in trainer.cell.ranks:
                trainer.trained(event.rank, event.seconds)
        return self._feed()

    def _feed(self) -> list[AnyCommand]:
        """Return commands that assign complete groups to idle training cells (sets of ranks)."""
        commands: list[AnyCommand] = []
        for trainer in self._trainers:
            cell = trainer.cell
            if not self._to_train:
                break
            if trainer.busy or self._leaving.intersection(cell.leaders):
                continue
            assert self._elastic is not None
            count = self._elastic.take(self._to_train, cell)
            states = [self._to_train.popleft() for _ in range(count)]
            groups = tuple(self._group(state) for state in states)
            ids = tuple(group.id for group in groups)
            self._streamed.append(Streamed(groups=ids, dp_ranks=cell.dp_ranks))
            trainer.busy.update(cell.ranks)
            # Send Ship before Train, because a rank cannot send samples while it trains.
            owners: dict[int, list[str]] = {}
            for ref in (ref for group in groups for ref in group.refs):
                owners.setdefault(ref.owner, []).append(ref.id)
            commands += [Ship(rank=o, ids=tuple(i), to=cell.ranks) for o, i in owners.items()]
            commands += [Train(rank=r, groups=groups, dp_ranks=cell.dp_ranks) for r in cell.ranks]
        return commands

    def _forget_training(self) -> None:
        """Put the groups that were already assigned for training back into the training queue,
        because all engines restart. The learner then discards its accumulated gradient."""
        streamed = [g for s in self._streamed for g in s.groups]
        self._to_train.extendleft(self._groups[g] for g in reversed(streamed))
        self._streamed.clear()
        self._trainers.clear()
        self._leaving.clear()

    def _stream_stats(self, kept: Sequence[GroupId]) -> dict[str, float]:
        """Return metrics of training within the round; {} if no engine was released to train."""
        if not self._trainers:
            return {}
        tokens = {g: sum(r.num_tokens for r in self._groups[g].counted) for g in kept}
        early = sum(tokens[g] for s in self._streamed for g in s.groups)
        return {
            "sched/streamed_tokens": early / max(sum(tokens.values()), 1),
            "sched/stream_s": max(trainer.seconds for trainer in self._trainers),
        }

    # ---- decisions

    def _submit(self) -> list[AnyCommand]:
        """Submit waiting requests to engines that have room. Wait until every engine has sent
        `Ready`, so that placement does not depend on the order in which engines start."""
        if not self._waiting or not self._ready.issuperset(self._up):
            return []
        chosen: dict[int, list[RequestState]] = {}
        while self._waiting:
            request = self._waiting[0]
            if request.finish:  # the request was aborted, as its group was closed
                self._waiting.popleft()
                continue
            rank = self._place.choose(request.id, self._up)
            if rank is None:
                break
            self._waiting.popleft()
            request.assign(rank)
            self._up[rank] += 1
            chosen.setdefault(rank, []).append(request)
        return [self._order(rank, requests) for rank, requests in chosen.items()]

    def _order(self, rank: int, requests: list[RequestState]) -> Submit:
        out, prompts = [], {}
        for r in requests:
            work = self._groups[group_of(r.id)].work
            prompts[work.id] = work.prompt
            out.append(
                Request(id=r.id, prompt=work.prompt.tokens, sampling=work.sampling, resume=r.resume)
            )
        return Submit(rank=rank, requests=tuple(out), prompts=prompts)

    def _end(self, kept: Sequence[str]) -> list[AnyCommand]:
        self.done, self.kept = True, tuple(kept)
        groups = tuple(self._group(self._groups[g]) for g in kept)
        aborts = self._close(self._groups)
        self._stats |= self._reward_stats(groups) | self._surplus_stats(kept)
        self._stats |= self._stream_stats(kept)
        end = EndRound(
            rank=0,
            groups=groups,
            dropped=self._dropped,
            streamed=tuple(self._streamed),
            reference_latency=self._reference_latency(self._groups),
            stats=self._stats,
        )
        return [*aborts, *(structs.replace(end, rank=r) for r in self._all_ranks)]

    def _reference_latency(self, groups: Iterable[GroupId]) -> dict[str, float]:
        """Return the longest time in seconds to score a right answer, by prompt. Adaptive reward
        deadlines use these times."""
        found: dict[str, float] = {}
        for state in (self._groups[g] for g in groups):
            for r in state.requests.values():
                if r.result is not None and r.result.reference_latency_s:
                    key = key_of(state.work.prompt)
                    found[key] = max(r.result.reference_latency_s, found.get(key, 0.0))
        return found

    def _surplus_stats(self, kept: Sequence[GroupId]) -> dict[str, float]:
        """Return metrics of responses that were started but not kept.

        `sched/length_shift`: in kept groups, mean length of kept responses / mean length of all
        started responses, minus 1. Unfinished responses count with their length so far.
        """
        counted = [r.num_tokens for g in kept for r in self._groups[g].counted]
        every = sum(r.num_tokens for r in self._requests.values())
        out = {}
        if every > sum(counted):
            out["sched/surplus_tokens"] = 1 - sum(counted) / every
        started = [r.num_tokens for g in kept for r in self._groups[g].requests.values()]
        if len(started) > len(counted) and sum(started) > 0:
            mean = sum(started) / len(started)
            out["sched/length_shift"] = sum(counted) / len(counted) / mean - 1
        return out

    def _reward_stats(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return metrics of scoring times, and the mean of each value in `RewardResult.details`."""
        trained = [g for g in groups if not is_baseline(g.id)]
        kept = [self._requests[ref.id].result for g in trained for ref in g.refs]
        results = [r for r in kept if r is not None]
        if not results:
            return {}
        latency = [r.latency_s for r in results]
        out = {
            "reward/latency_s/mean": sum(latency) / len(latency),
            "reward/latency_s/max": max(latency),
            "reward/queued_s/mean": sum(r.queued_s for r in results) / len(results),
            "reward/queued_s/max": max(r.queued_s for r in results),
            "reward/queue_depth/max": float(max(r.num_ahead for r in results)),
        }
        if limits := [r.timeout_s for r in results if r.timeout_s]:
            out["reward/timeout_s/mean"] = sum(limits) / len(limits)
            out["reward/timeout_s/min"] = min(limits)
        for name in dict.fromkeys(name for r in results for name in r.details):
            values = [r.details[name] for r in results if name in r.details]
            key = name if name.startswith("env/") else f"reward/{name}"
            out[key] = sum(values) / len(values)
        return out

    def _group(self, state: GroupState) -> Group:
        requests = sorted(state.counted, key=lambda r: r.order)
        results = [r.result for r in requests]
        assert all(r is not None for r in results), state.work.id
        observed = tuple(r.num_observed for r in requests)
        excluded = tuple(not r.is_trained for r in results if r)
        answers = tuple(r.answer for r in results if r)
        terms = tuple(r.terms for r in results if r)
        return Group(
            id=state.work.id,
            prompt_index=state.work.prompt.index,
            dataset=state.work.prompt.dataset,
            refs=tuple(SampleRef(owner=r.rank, id=r.id) for r in requests),
            scores=tuple(r.score for r in results if r),
            lengths=tuple(r.num_tokens for r in requests),
            finishes=tuple(cast(Finish, r.finish) for r in requests),
            errors=tuple(r.error for r in results if r),
            prompt_length=len(state.work.prompt.tokens),
            observed=observed if any(observed) else (),
            answers=answers if any(answers) and not is_training(state.work.id) else (),
            excluded=excluded if any(excluded) else (),
            terms=terms if any(terms) else (),
        )

    # ---- deadlines

    def _moves(self, event: AnyEvent) -> bool:
        """Return whether the event shows progress. Periodic reports of a stuck engine show none."""
        if isinstance(event, LengthReport):
            lengths = zip(event.ids, event.lengths, strict=True)
            return any(n > self._requests[i].num_tokens for i, n in lengths)
        if isinstance(event, Stats):
            return bool(event.decode_tokens or event.prefill_tokens)
        return not isinstance(event, Preempted)

    def _owed_by(self, rank: int) -> list[str]:
        return [
            r.id
            for r in self._requests.values()
            if r.rank == rank and r.result is None and self._is_open(r)
        ]

    def _verdict(self, silent: Sequence[int], now: float) -> str:
        parts = []
        for rank in silent[:4]:
            quiet = f"rank {rank}: no message for {now - self._heard[rank]:.0f} s"
            if now - self._heard[rank] <= self._deadline_s:  # the rank still sends reports
                quiet = f"rank {rank}: no new token for {now - self._seen[rank]:.0f} s"
            if rank not in self._ready:
                parts.append(f"{quiet}, it never entered phase gen")
                continue
            owed = self._owed_by(rank)
            parts.append(f"{quiet} in phase gen, with {len(owed)} open requests such as {owed[0]}")
        return f"--rollout.stall_timeout_s {self._deadline_s:g} exceeded. " + "; ".join(parts)

    def _fail(self, reason: str) -> list[AnyCommand]:
        self.done = True
        return [Fail(rank=r, reason=reason) for r in self._all_ranks]

    def _count(self, name: str, value: float) -> None:
        self._stats[name] = self._stats.get(name, 0.0) + value

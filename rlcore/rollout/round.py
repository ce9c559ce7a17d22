"""One sampling round over all ranks: the controller on rank 0, a rollout worker on every rank."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from rlcore.records import (
    Alive,
    AnyEvent,
    Down,
    EndRound,
    Fail,
    GroupId,
    Histories,
    JoinSync,
    Sample,
    Work,
    group_of,
    is_baseline,
    prompt_key,
)
from rlcore.rollout.controller import Controller
from rlcore.rollout.exchange import by_owner
from rlcore.rollout.histospec import HistorySender, HistoryStore, histories_of, with_histories
from rlcore.rollout.round_log import Rounds
from rlcore.rollout.transport import Hub
from rlcore.rollout.worker import NO_CALLBACKS, RolloutWorker, RoundCallbacks
from rlcore.sched.completion_order import ReplayMismatch
from rlcore.sched.roles import Elastic, Stop
from rlcore.sched.stop import StopAtAll
from rlcore.utils.log import log

TICK_S = 0.25
ALIVE_S = 5.0
JOIN_S = 10.0


class Heartbeat:
    """Heartbeat: `Alive` messages from rank 0 to the ranks that only sample."""

    def __init__(self, hub: Hub, rollout_ranks: Sequence[int]) -> None:
        """`rollout_ranks`: the ranks that only sample."""
        self._hub, self._rollout_ranks, self._told = hub, rollout_ranks, 0.0

    def alive(self) -> None:
        """Send `Alive` if the last `Alive` is older than `ALIVE_S`. Do nothing on ranks other than
        0."""
        now = time.monotonic()
        if self._hub.rank == 0 and now - self._told > ALIVE_S:
            self._told = now
            for rank in self._rollout_ranks:
                self._hub.send(rank, "worker", Alive(rank=rank))


class Rollout:
    """Synchronous rollout: rounds of sampling over all ranks, one `run` per round."""

    def __init__(
        self,
        hub: Hub,
        worker: RolloutWorker,
        make_controller: Callable[[Stop, Elastic | None], Controller],
        *,
        on_progress: Callable[[int, int], None] | None = None,
        rollout_ranks: Sequence[int] = (),
        rounds: Rounds | None = None,
        library: HistoryStore | None = None,
    ) -> None:
        """
        Args:
            make_controller: called on rank 0 per round, with the round's stop and elastic policies.
            on_progress: called in the controller's thread with two numbers: counted responses and
                needed responses.
            rollout_ranks: the ranks that only sample.
            rounds: log of the rounds that have a `stop` policy; on rank 0 only.
            library: earlier responses from which engines draft; on rank 0 only.
        """
        self._hub, self.worker, self.library = hub, worker, library
        self._rollout_ranks, self._rounds = rollout_ranks, rounds
        self._make_controller, self._on_progress = make_controller, on_progress
        self._round = 0
        self._controller: Controller | None = None

    def run(
        self,
        work: Sequence[Work],
        stop: Stop | None = None,
        elastic: Elastic | None = None,
        callbacks: RoundCallbacks = NO_CALLBACKS,
    ) -> EndRound:
        """Sample and score `work` until `stop` ends the round (default: once all responses are
        scored). With `elastic`, some ranks may stop decoding earlier. Only rank 0 reads `work`,
        `stop` and `elastic`; every rank returns the same groups."""
        if self._hub.rank != 0:
            return self.worker.run_round(callbacks)
        self._round += 1
        gone = threading.Event()
        self._controller = self._make_controller(stop or StopAtAll(), elastic)
        thread = threading.Thread(
            target=_control,
            args=(
                self._controller,
                self._hub,
                work,
                self._round,
                gone,
                self._on_progress,
                self._rounds if stop is not None else None,
                HistorySender(self.library) if self.library is not None else None,
            ),
            daemon=True,
        )
        thread.start()
        try:
            return self.worker.run_round(callbacks)
        except BaseException:
            gone.set()
            raise
        finally:
            thread.join(timeout=JOIN_S)

    def route(
        self, destination: dict[str, Sequence[int]], owners: dict[str, int]
    ) -> dict[str, Sample]:
        """Send each sample from its owner to the ranks that train on it. Return the samples for
        this rank, by id. `destination` and `owners` must be the same on every rank."""
        for (owner, ranks), ids in by_owner(destination, owners).items():
            if owner == self._hub.rank:
                self.worker.exchange.send(ids, ranks)
        mine = [i for i, ranks in destination.items() if self._hub.rank in ranks]
        return self.worker.exchange.collect(mine, owners)

    def learn_histories(self) -> None:
        """Add the scored responses of the finished round to the histories on rank 0. If engines
        draft from histories, call this on every rank: rank 0 waits for all ranks."""
        worker, hub = self.worker, self._hub
        mine = [
            history
            for i, score in worker.scores.items()
            if not is_baseline(group := group_of(i))
            for history in histories_of(
                worker.samples[i], prompt_key(worker.prompts[group].tokens), score
            )
        ]
        if hub.rank != 0:
            hub.send(0, "histories", Histories(rank=hub.rank, histories=tuple(mine)))
            return
        assert self.library is not None
        others = worker.exchange.receive_histories(range(1, hub.world_size))
        self.library.add([*mine, *others])

    def call(self) -> None:
        """On rank 0, make the ranks that only sample join the weight update. Else do nothing."""
        if self._hub.rank == 0:
            for rank in self._rollout_ranks:
                self._hub.send(rank, "worker", JoinSync(rank=rank))

    def read(self, groups: Collection[GroupId], samples: Iterable[Sample]) -> None:
        """Add these samples of the last round to the worker of rank 0, as if this worker had
        sampled them."""
        assert self._controller is not None
        started = self._controller.groups
        self.worker.read({g: started[g].work.prompt for g in groups}, samples)


def _control(
    controller: Controller,
    hub: Hub,
    work: Sequence[Work],
    round_: int,
    gone: threading.Event,
    on_progress: Callable[[int, int], None] | None,
    rounds: Rounds | None,
    teacher: HistorySender | None,
) -> None:
    """Run the controller in its own thread, so that an abort never waits for a decode step. If it
    raises an error, make every rank fail with this error as the reason."""
    try:
        _serve(controller, hub, work, round_, gone, on_progress, rounds, teacher)
    except (
        ReplayMismatch,
        OSError,
    ) as e:  # errors of the log of rounds, whose messages need no prefix
        _fail(hub, str(e))
    except Exception as e:
        log.exception("the controller failed")
        _fail(hub, f"the controller failed: {e!r}")
    finally:
        hub.release()


def _fail(hub: Hub, reason: str) -> None:
    for rank in range(hub.world_size):
        hub.send(rank, "worker", Fail(rank=rank, reason=reason))


def _serve(
    controller: Controller,
    hub: Hub,
    work: Sequence[Work],
    round_: int,
    gone: threading.Event,
    on_progress: Callable[[int, int], None] | None,
    rounds: Rounds | None,
    teacher: HistorySender | None,
) -> None:
    """Feed events to the controller until the round is over. If the worker of rank 0 has failed
    (`gone`), make the other ranks fail at once."""
    if rounds is not None:
        rounds.begin(controller, work)
    commands = controller.start(work, time.monotonic())
    while not gone.is_set():
        if controller.done and rounds is not None:
            rounds.end(controller)
        for command in with_histories(commands, teacher):
            hub.send(command.rank, "worker", command)
        if controller.done:
            return
        commands = []
        events = hub.receive("controller", list[AnyEvent], TICK_S)
        now = time.monotonic()
        for event in events or []:
            if event.round == round_:
                if isinstance(event, Down):
                    log.warning("rank %d: %s; its requests are re-routed", event.rank, event.reason)
                    if teacher is not None:
                        teacher.lost(event.rank)
                commands += controller.handle(event, now)
        if events and on_progress is not None:
            on_progress(controller.num_done, controller.num_requests)
        commands += controller.tick(now)
    for rank in range(1, hub.world_size):
        hub.send(rank, "worker", Fail(rank=rank, reason="rank 0 has failed; see its log"))

"""Asynchronous rollout over all ranks, `--mode async`: sampling continues across training steps.

Rank 0 runs the controller in a thread from one weight update to the next. Train ranks call `take`
for the groups to train on and `fetch` for their samples. Meanwhile the rollout ranks run
`RolloutWorker.go_on`, which returns when `hold` stops decoding for the next weight update.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rlcore.records import (
    AnyCommand,
    AnyEvent,
    Down,
    Fail,
    Holding,
    HoldMode,
    RequestId,
    Sample,
    SendHistories,
    Ship,
    TrainOrder,
    Version,
    Wanted,
    prompt_key,
)
from rlcore.rollout.async_controller import AsyncController, Saved
from rlcore.rollout.exchange import by_owner
from rlcore.rollout.histospec import HistorySender, HistoryStore, with_histories
from rlcore.rollout.replay import EventLog, Recorder
from rlcore.rollout.transport import Hub
from rlcore.rollout.worker import NO_CALLBACKS, RolloutWorker, RoundCallbacks
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import log
from rlcore.utils.net import decode, encode

TICK_S = 0.25
FOLDER = "buffer"
"""Name of the folder in a checkpoint for the state of the asynchronous rollout."""


class AsyncRollout:
    """One rank's part of the asynchronous rollout. `controller` is None on ranks other than 0."""

    def __init__(
        self,
        hub: Hub,
        worker: RolloutWorker,
        controller: AsyncController | None,
        *,
        rollout_ranks: Sequence[int],
        deadline_s: float,
        record: Recorder | None = None,
        replay: EventLog | None = None,
        library: HistoryStore | None = None,
    ) -> None:
        """
        Args:
            deadline_s: time in seconds after which the controller fails because of a silent rank.
            record: writer of this run's log; None writes no log.
            replay: log of a recorded run that this run repeats; None if this run is no replay.
            library: earlier responses from which engines draft; on rank 0 only. A replay adds
                nothing, because its engines sample no training prompt.
        """
        self._hub, self._worker, self._rollout_ranks = hub, worker, rollout_ranks
        self._record, self._replay, self._version = record, replay, 0
        self.controller = controller
        self._deadline_s = deadline_s
        self._thread: threading.Thread | None = None
        self._gone = threading.Event()
        self._error = ""
        self._library = library if replay is None else None
        self._sender: HistorySender | None = None
        self._owing: list[int] = []
        """Ranks that send rank 0 the histories of the most recent batch."""

    # ---- train ranks

    def take(self, version: Version, callbacks: RoundCallbacks = NO_CALLBACKS) -> TrainOrder:
        """Return the groups on which policy `version` is trained, the same on every train rank. The
        engines decode with this version until `hold`. Raise RuntimeError if the controller fails
        and TimeoutError if it is silent for too long."""
        self._version = version
        if self.controller is not None:
            self._start(self.controller, version)
            self._hub.send(0, "controller", [Wanted()])
        batch = self._worker.next_batch(callbacks)
        if self._library is not None:
            self._request_histories(batch)
        return batch

    def fetch(
        self, destination: dict[RequestId, Sequence[int]], owners: dict[RequestId, int]
    ) -> dict[RequestId, Sample]:
        """Return the samples that this rank trains on, by id. `owners` has the rank that sends each
        sample, `destination` the ranks that train on it. Both must be the same on all train ranks.

        Raises:
            ReplayMismatch: the log of a replay does not have the samples.
        """
        if self._replay is not None:
            mine = [i for i, ranks in destination.items() if self._hub.rank in ranks]
            return self._replay.samples(self._version, mine)
        if self._hub.rank == 0:
            for (owner, ranks), ids in by_owner(destination, owners).items():
                self._hub.send(owner, "worker", Ship(rank=owner, ids=tuple(ids), to=ranks))
        mine = [i for i, ranks in destination.items() if self._hub.rank in ranks]
        found = self._worker.exchange.collect(mine, owners)
        if self._record is not None:  # the first rank of a model-parallel group writes samples
            own = [s for i, s in found.items() if min(destination[i]) == self._hub.rank]
            self._record.samples(self._version, self._hub.rank, own)
        return found

    def read(self, samples: Iterable[Sample]) -> None:
        """Give samples of the last batch to the worker of rank 0, so that it can log them. Call
        this on rank 0 only."""
        assert self.controller is not None
        self._worker.read(self.controller.prompts, samples)

    def _request_histories(self, batch: TrainOrder) -> None:
        """Ask the ranks that own samples of this batch for the samples' histories. The ranks send
        them while this rank trains."""
        assert self.controller is not None
        keys = {g: prompt_key(p.tokens) for g, p in self.controller.prompts.items()}
        scores: dict[int, dict[RequestId, float]] = {}
        for group in batch.groups:
            for ref, score in zip(group.refs, group.scores, strict=True):
                scores.setdefault(ref.owner, {})[ref.id] = score
        for rank, of_rank in scores.items():
            self._hub.send(rank, "worker", SendHistories(rank=rank, scores=of_rank, keys=keys))
        self._owing = list(scores)

    def hold(self, mode: HoldMode) -> dict[str, float]:
        """Stop all decoding, so that weights can be updated. Return the counters since the last
        hold. Call this on rank 0 only.

        Raises:
            RuntimeError: the controller has failed.
            TimeoutError: the controller did not end in time, because a rank did not stop, or a rank
                did not send its histories.
        """
        assert self.controller is not None and self._thread is not None
        if self._error:
            raise RuntimeError(self._error)
        # Receive before `Hold`, with which the owners drop the samples of the batch.
        histories = self._worker.exchange.receive_histories(self._owing)
        self._hub.send(0, "controller", [Holding(mode=mode)])
        # Wait for two deadlines: after one, the controller fails and names the silent rank.
        self._thread.join(timeout=2 * self._deadline_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"--rollout.stall_timeout_s {self._deadline_s:g} exceeded: the controller is still "
                "running"
            )
        self._thread = None
        if self._error:
            raise RuntimeError(self._error)
        if self._library is not None:  # no lock: the controller's thread, which reads it, has ended
            self._library.add(histories)
        return self.controller.take_stats()

    def close(self) -> None:
        """Stop the controller's thread, even if ranks still decode."""
        self._gone.set()
        if self._thread is not None:
            self._thread.join(timeout=10 * TICK_S)

    # ---- the controller's thread

    def _start(self, controller: AsyncController, version: Version) -> None:
        args = controller, version
        self._thread = threading.Thread(target=self._control, args=args, daemon=True)
        self._thread.start()

    def _control(self, controller: AsyncController, version: Version) -> None:
        """Run the controller. If it raises an error, make every rank fail with this error as the
        reason."""
        try:
            self._serve(controller, version)
        except Exception as e:
            log.exception("the controller failed")
            self._error = f"the controller failed: {e!r}"
            for rank in range(self._hub.world_size):
                self._hub.send(rank, "worker", Fail(rank=rank, reason=self._error))
        finally:
            self._hub.release()

    def _serve(self, controller: AsyncController, version: Version) -> None:
        """Feed events to the controller until all rollout ranks have stopped decoding."""
        if self._library is not None:
            self._sender = HistorySender(self._library)
        self._send(controller.go(version, time.monotonic()))
        while not controller.done and not self._gone.is_set():
            commands = []
            events = self._hub.receive("controller", list[AnyEvent], TICK_S)
            now = time.monotonic()
            for event in events or []:
                if event.round:  # a late event of an evaluation round, whose number is not 0
                    continue
                if isinstance(event, Down):
                    log.warning("rank %d: %s; its requests are re-routed", event.rank, event.reason)
                    if self._sender is not None:
                        self._sender.lost(event.rank)
                answer = controller.handle(event, now)
                if self._record is not None:
                    self._record.handled(event, answer, controller.prompts, now)
                commands += answer
            self._send([*commands, *controller.tick(now)])
        if self._record is not None and not self._error and not self._gone.is_set():
            self._record.end(version)

    def _send(self, commands: Sequence[AnyCommand]) -> None:
        for command in with_histories(commands, self._sender):
            if isinstance(command, Fail):
                self._error = command.reason
            self._hub.send(command.rank, "worker", command)

    # ---- checkpoints

    def save(self, folder: Path) -> None:
        """Write this rank's part of a checkpoint into the existing `folder`: the controller's state
        on rank 0, finished samples on rollout ranks. Call this after a hold in mode `release`. A
        replay writes nothing, because it has no unfinished requests to resume."""
        if self._replay is not None:
            return
        if self.controller is not None:
            saved = self.controller.save()
            (folder / "controller.msgpack").write_bytes(encode(saved))
        if self._hub.rank in self._rollout_ranks:
            name = f"samples{self._hub.rank}.msgpack"
            (folder / name).write_bytes(encode(list(self._worker.samples.values())))

    def load(self, folder: Path) -> None:
        """Read this rank's part of a checkpoint. The number of rollout ranks may have changed.

        Raises:
            ConfigError: the checkpoint has other buffer settings, or a replay wrote it.
        """
        if self._replay is not None:
            return
        if self.controller is not None:
            file = folder / "controller.msgpack"
            if not file.is_file():
                raise ConfigError(
                    f"--run.resume {folder.parent}: was written by a replay, which does not save "
                    "running requests; resume the replayed run, or use --run.resume fresh"
                )
            saved, owner_now = _read(file, Saved), self._owner_now(folder)
            self.controller.restore(saved, owner_now)
            if self._record is not None:
                owners = {rank: owner_now(rank) for rank in _owners(folder)}
                self._record.restored(saved, owners)
        if self._hub.rank in self._rollout_ranks:
            owner_now = self._owner_now(folder)
            for rank in _owners(folder):
                if owner_now(rank) == self._hub.rank:
                    file = folder / f"samples{rank}.msgpack"
                    self._worker.adopt(_read(file, list[Sample]))

    def _owner_now(self, folder: Path):
        """Return a function that maps a rank that saved samples to the rank that owns them now."""
        place = {rank: i for i, rank in enumerate(_owners(folder))}
        return lambda rank: self._rollout_ranks[place[rank] % len(self._rollout_ranks)]


def _owners(folder: Path) -> list[int]:
    """Return the ranks that wrote samples to this checkpoint folder."""
    ranks = (p.stem.removeprefix("samples") for p in folder.glob("samples*.msgpack"))
    return sorted(int(rank) for rank in ranks if rank.isdecimal())


def _read(file: Path, kind: Any) -> Any:
    try:
        return decode(file.read_bytes(), kind)
    except (msgspec.MsgspecError, ValueError, OSError, RecursionError) as error:
        raise ConfigError(
            f"--run.resume {file}: cannot be read ({error}); resume from another checkpoint"
        ) from error

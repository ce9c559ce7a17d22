"""Sampling that does not stop at the end of a step, over all ranks: `--mode async`.

Rank 0 has the controller in a thread from one push to the next. Train ranks `take` the groups of an
update and `fetch` their samples; meanwhile ranks that sample are in `Agent.go_on`, which ends when
the controller `hold`s them for the push.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rlcore.records import (
    AnyCommand,
    AnyEvent,
    Batch,
    Down,
    Fail,
    Holding,
    HoldMode,
    RequestId,
    Sample,
    Ship,
    Version,
    Wanted,
)
from rlcore.rollout.async_controller import AsyncController, Saved
from rlcore.rollout.exchange import by_owner
from rlcore.rollout.replay import EventLog, Recorder
from rlcore.rollout.replica import NO_CALLBACKS, Agent, RoundCallbacks
from rlcore.rollout.transport import Hub
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import log
from rlcore.utils.net import decode, encode

TICK_S = 0.25
FOLDER = "buffer"
"""Of a checkpoint."""


class Flow:
    """One rank's part. `controller` is rank 0's alone."""

    def __init__(
        self,
        hub: Hub,
        agent: Agent,
        controller: AsyncController | None,
        *,
        samplers: Sequence[int],
        deadline_s: float,
        record: Recorder | None = None,
        replay: EventLog | None = None,
    ) -> None:
        """`deadline_s`: of a hold; `record`: writes the log
        of this run; `replay`: the log that decides it, and has its samples."""
        self._hub, self._agent, self._samplers = hub, agent, samplers
        self._record, self._replay, self._version = record, replay, 0
        self.controller = controller
        self._deadline_s = deadline_s
        self._thread: threading.Thread | None = None
        self._gone = threading.Event()
        self._error = ""

    # ---- train ranks

    def take(self, version: Version, callbacks: RoundCallbacks = NO_CALLBACKS) -> Batch:
        """The groups that policy `version` trains, the same on every train rank. From here on the
        engines decode with its weights, until `hold`. Raises as `Agent.run_round`."""
        self._version = version
        if self.controller is not None:
            self._start(self.controller, version)
            self._hub.send(0, "controller", [Wanted()])
        return self._agent.next_batch(callbacks)

    def fetch(
        self, destination: dict[RequestId, Sequence[int]], owners: dict[RequestId, int]
    ) -> dict[RequestId, Sample]:
        """The samples that this rank trains, by id. `destination` and `owners` are the same on
        every train rank; rank 0 has the owners send. Misfit where a replay's log has them not."""
        if self._replay is not None:
            mine = [i for i, ranks in destination.items() if self._hub.rank in ranks]
            return self._replay.samples(self._version, mine)
        if self._hub.rank == 0:
            for (owner, ranks), ids in by_owner(destination, owners).items():
                self._hub.send(owner, "agent", Ship(rank=owner, ids=tuple(ids), to=ranks))
        mine = [i for i, ranks in destination.items() if self._hub.rank in ranks]
        found = self._agent.exchange.collect(mine, owners)
        if self._record is not None:  # of a model replica the first rank writes
            own = [s for i, s in found.items() if min(destination[i]) == self._hub.rank]
            self._record.samples(self._version, self._hub.rank, own)
        return found

    def read(self, samples: Iterable[Sample]) -> None:
        """On rank 0: have its agent know these samples of the last batch, to show them."""
        assert self.controller is not None
        self._agent.read(self.controller.prompts, samples)

    def hold(self, mode: HoldMode) -> dict[str, float]:
        """On rank 0: nobody decodes from here on, and weights may be pushed. Returns the counters
        since the last hold.

        Raises:
            RuntimeError: the controller has failed meanwhile.
            TimeoutError: a rank does not stop.
        """
        assert self.controller is not None and self._thread is not None
        self._hub.send(0, "controller", [Holding(mode=mode)])
        # The controller names a silent rank after this deadline; past it nobody is there to do so.
        self._thread.join(timeout=2 * self._deadline_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"--rollout.deadline_s {self._deadline_s:g} is over: the controller did not stop"
            )
        self._thread = None
        if self._error:
            raise RuntimeError(self._error)
        return self.controller.take_stats()

    def close(self) -> None:
        """End the thread, whatever it is at."""
        self._gone.set()
        if self._thread is not None:
            self._thread.join(timeout=10 * TICK_S)

    # ---- the controller's thread

    def _start(self, controller: AsyncController, version: Version) -> None:
        args = controller, version
        self._thread = threading.Thread(target=self._control, args=args, daemon=True)
        self._thread.start()

    def _control(self, controller: AsyncController, version: Version) -> None:
        """An error here ends the run on every rank with its reason."""
        try:
            self._serve(controller, version)
        except Exception as e:
            log.exception("the controller failed")
            self._error = f"the controller failed: {e!r}"
            for rank in range(self._hub.world_size):
                self._hub.send(rank, "agent", Fail(rank=rank, reason=self._error))
        finally:
            self._hub.release()

    def _serve(self, controller: AsyncController, version: Version) -> None:
        """Until all ranks that sample have stopped."""
        self._send(controller.go(version, time.monotonic()))
        while not controller.done and not self._gone.is_set():
            commands = []
            events = self._hub.receive("controller", list[AnyEvent], TICK_S)
            now = time.monotonic()
            for event in events or []:
                if event.round:  # of an evaluation
                    continue
                if isinstance(event, Down):
                    log.warning("rank %d: %s; its requests go elsewhere", event.rank, event.reason)
                answer = controller.handle(event, now)
                if self._record is not None:
                    self._record.handled(event, answer, controller.prompts, now)
                commands += answer
            self._send([*commands, *controller.tick(now)])
        if self._record is not None and not self._error and not self._gone.is_set():
            self._record.end(version)

    def _send(self, commands: Sequence[AnyCommand]) -> None:
        for command in commands:
            if isinstance(command, Fail):
                self._error = command.reason
            self._hub.send(command.rank, "agent", command)

    # ---- checkpoints

    def save(self, folder: Path) -> None:
        """Write this rank's part: the controller's state, or finished samples. After a hold with
        release. `folder` is there. A replay has nothing under way that another run could use."""
        if self._replay is not None:
            return
        if self.controller is not None:
            saved = self.controller.save()
            (folder / "controller.msgpack").write_bytes(encode(saved))
        if self._hub.rank in self._samplers:
            name = f"samples{self._hub.rank}.msgpack"
            (folder / name).write_bytes(encode(list(self._agent.samples.values())))

    def load(self, folder: Path) -> None:
        """Read it again; ranks that sample may be more or fewer than there were.

        Raises:
            ConfigError: the buffer was filled under other settings, or by a replay.
        """
        if self._replay is not None:
            return
        if self.controller is not None:
            file = folder / "controller.msgpack"
            if not file.is_file():
                raise ConfigError(
                    f"--run.resume {folder.parent}: was written by a replay, which has no samples "
                    "under way; resume from the run that it replayed, or take --run.resume fresh"
                )
            saved, owner_now = decode(file.read_bytes(), Saved), self._owner_now(folder)
            self.controller.restore(saved, owner_now)
            if self._record is not None:
                owners = {rank: owner_now(rank) for rank in _owners(folder)}
                self._record.restored(saved, owners)
        if self._hub.rank in self._samplers:
            owner_now = self._owner_now(folder)
            for rank in _owners(folder):
                if owner_now(rank) == self._hub.rank:
                    data = (folder / f"samples{rank}.msgpack").read_bytes()
                    self._agent.adopt(decode(data, list[Sample]))

    def _owner_now(self, folder: Path):
        """From the rank that wrote samples to the one that has them from now on."""
        place = {rank: i for i, rank in enumerate(_owners(folder))}
        return lambda rank: self._samplers[place[rank] % len(self._samplers)]


def _owners(folder: Path) -> list[int]:
    """Ranks that wrote samples."""
    return sorted(int(p.stem.removeprefix("samples")) for p in folder.glob("samples*.msgpack"))

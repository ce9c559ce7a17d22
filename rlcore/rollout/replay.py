"""Record and replay of an asynchronous run: `--debug.record`, `--debug.replay`.

In `--mode async`, timing decides the order of the controller's events and the policy version of
each token. `<run>/record/` has events and tokens, in two kinds of files per step:

    step_000003.events.msgpack           events of the controller, from `go` to the end of the hold
    step_000003.samples<rank>.msgpack    samples of the batch on which train rank <rank> trained

A replay feeds the events to a shadow controller, whose commands are ignored, and trains on the
recorded samples. The batches and their order are the same on any number of ranks. The engines of a
replay decode only for evaluations. Every train rank reads the folder.
"""

import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from rlcore.metrics.jsonl import write_atomic
from rlcore.records import (
    Alive,
    AnyCommand,
    AnyEvent,
    GroupId,
    Held,
    Hold,
    Holding,
    Prompt,
    RequestId,
    Sample,
    TrainOrder,
    Version,
    Wanted,
)
from rlcore.rollout.async_controller import AsyncController, Saved
from rlcore.sched.completion_order import ReplayMismatch
from rlcore.utils.errors import ConfigError
from rlcore.utils.files import fault
from rlcore.utils.net import decode, encode
from rlcore.utils.writes import LogWrites

FOLDER = "record"
_STEP = re.compile(r"step_(\d+)\.events\.msgpack")


class Restored(Struct, frozen=True):
    """State from which a recorded run was resumed: the controller's part of the checkpoint, and
    `owners`, which maps a rank of the earlier run to the rank that got its samples."""

    saved: Saved
    owners: dict[int, int]


class TrainedGroup(Struct, frozen=True, array_like=True):
    """Group of a recorded batch, to check that a replay has the same batch."""

    id: GroupId
    row: int
    """Row number of the group's prompt in the data set (`Prompt.index`)."""
    checksum: int
    """CRC-32 of the prompt's tokens."""


class LoggedStep(Struct, frozen=True, kw_only=True):
    """Contents of one `events` file: the record of one training step."""

    version: Version
    """Version of the policy that is trained on the batch."""
    seed: int
    events: tuple[tuple[float, AnyEvent], ...]
    """Events, each with the time at which the controller handled it, in seconds of its clock."""
    groups: tuple[TrainedGroup, ...]
    """Groups of the batch on which the step trained."""
    restored: Restored | None = None


class Recorder:
    """Writer of the log of an asynchronous run."""

    def __init__(self, run_folder: Path, seed: int, writes: LogWrites | None = None) -> None:
        """`writes`: what to do if a write fails; None: raise."""
        self._writes = writes or LogWrites()
        self._folder, self._seed = run_folder / FOLDER, seed
        self._folder.mkdir(parents=True, exist_ok=True)
        self._events: list[tuple[float, AnyEvent]] = []
        self._groups: tuple[TrainedGroup, ...] = ()
        self._restored: Restored | None = None

    def restored(self, saved: Saved, owners: dict[int, int]) -> None:
        """Record that the run was resumed from a checkpoint."""
        self._restored = Restored(saved=saved, owners=owners)

    def handled(
        self,
        event: AnyEvent,
        commands: Iterable[AnyCommand],
        prompts: Mapping[GroupId, Prompt],
        now: float,
    ) -> None:
        """Record an event that the controller has handled. If there is a batch among the resulting
        `commands`, record the batch too. `prompts`: prompts of the batch, by group."""
        self._events.append((now, event))
        self._groups = _trained(commands, prompts) or self._groups

    def end(self, version: Version) -> None:
        """Write the events of the step. Call this after all rollout ranks have stopped. Raise
        OSError if the file cannot be written and the run does not continue without it."""
        step = LoggedStep(
            version=version,
            seed=self._seed,
            events=tuple(self._events),
            groups=self._groups,
            restored=self._restored,
        )
        file = _events(self._folder, version)
        with self._writes.to(file):
            write_atomic(file, encode(step))
        self._events, self._groups, self._restored = [], (), None

    def samples(self, version: Version, rank: int, samples: Iterable[Sample]) -> None:
        """Write the samples of a batch on which `rank` trains. Raise OSError if the file cannot be
        written and the run does not continue without it."""
        file = self._folder / f"{_name(version)}.samples{rank}.msgpack"
        with self._writes.to(file):
            write_atomic(file, encode(list(samples)))


class EventLog:
    """Reader of the log of a recorded run."""

    def __init__(self, path: Path, seed: int) -> None:
        """
        Args:
            path: folder of the recorded run.
            seed: seed of the replay; `step` checks that the recorded run has the same seed.

        Raises:
            ConfigError: the folder has no log.
        """
        self.path = path / FOLDER if (path / FOLDER).is_dir() else path
        self._seed = seed
        if not self._have:
            raise ConfigError(
                f"--debug.replay {path}: has no events of a run with --mode async; give the "
                "folder of a run with --debug.record"
            )

    @property
    def _have(self) -> list[int]:
        """Numbers of the recorded steps, in ascending order."""
        steps = (_STEP.fullmatch(f.name) for f in self.path.glob("step_*.events.msgpack"))
        return sorted(int(found[1]) for found in steps if found)

    def begins_at(self, version: Version) -> bool:
        """Return whether the first recorded step is the step that trains policy `version`."""
        return self._have[0] == version + 1

    def step(self, version: Version) -> LoggedStep:
        """Read the events of a step. Raise ReplayMismatch if the log does not have the step or has
        another seed."""
        file = _events(self.path, version)
        if fault(file) == "no such file":
            have = self._have
            raise ReplayMismatch(
                f"--debug.replay {self.path}: has no step {version + 1}, only {have[0]} to "
                f"{have[-1]}; take fewer --run.steps, or the log of a longer run"
            )
        found = _read(file, LoggedStep)
        if found.seed != self._seed:
            raise ReplayMismatch(
                f"--debug.replay {self.path}: was recorded with --run.seed {found.seed}, not "
                f"{self._seed}"
            )
        return found

    def samples(self, version: Version, wanted: Iterable[RequestId]) -> dict[RequestId, Sample]:
        """Read the samples in `wanted`, by id. Raise ReplayMismatch if the log lacks one of these
        samples."""
        found: dict[RequestId, Sample] = {}
        for file in sorted(self.path.glob(f"{_name(version)}.samples*.msgpack")):
            found |= {s.id: s for s in _read(file, list[Sample])}
        wanted = list(wanted)
        if missing := [i for i in wanted if i not in found]:
            raise ReplayMismatch(
                f"--debug.replay {self.path}: has no tokens of {missing[0]} for step {version + 1}"
            )
        return {i: found[i] for i in wanted}


class Replayed(AsyncController):
    """Controller that repeats the decisions in a log. It has the interface of `AsyncController` but
    submits no requests to the engines."""

    def __init__(self, log: EventLog, **controller: Any) -> None:
        """Make the controller from a log and the keyword arguments of `AsyncController`."""
        super().__init__(**controller)
        self._log = log
        self._rest: list[tuple[float, AnyEvent]] = []
        """Logged events of the step, from its `Holding` event on."""
        self._batch: list[AnyCommand] = []

    def go(self, version: Version, now: float) -> list[AnyCommand]:
        """Replay the step's events before `Holding`. Raise ReplayMismatch if the log does not fit
        this run or if earlier events are missing."""
        step = self._log.step(version)
        if step.restored is not None:
            owners = step.restored.owners
            self._start_anew()
            self.restore(step.restored.saved, lambda rank: owners.get(rank, rank))
        elif self.buffer.version < 0 and not self._log.begins_at(version):
            raise ReplayMismatch(
                f"--debug.replay {self._log.path}: has no requests that were running at step "
                f"{version + 1}; replay from the first step, with --run.resume fresh"
            )
        super().go(version, now)
        at = next(
            (k for k, (_, e) in enumerate(step.events) if isinstance(e, Holding)), len(step.events)
        )
        self._rest = list(step.events[at:])
        try:
            self._batch = [c for c in self._play(step.events[:at]) if isinstance(c, TrainOrder)]
        except LookupError as error:
            raise ReplayMismatch(
                f"--debug.replay {self._log.path}: an event of step {version + 1} names a group or "
                f"request that no earlier event has begun ({error}); the log is damaged"
            ) from error
        if (groups := _trained(self._batch, self.prompts)) != step.groups:
            here, there = (
                ", ".join(f"{g.id} (row {g.row})" for g in found[:3]) or "none"
                for found in (groups, step.groups)
            )
            raise ReplayMismatch(
                f"--debug.replay {self._log.path}: its batch of step {version + 1} has the groups "
                f"{there} ..., this run's has {here}, or other prompts; replay with the settings "
                "and --data of the run that wrote it"
            )
        return []

    def handle(self, event: AnyEvent, now: float) -> list[AnyCommand]:
        """Answer `Wanted`, `Holding` and `Held`. Ignore all other events, because the log replaces
        them."""
        if isinstance(event, Wanted):
            return self._batch
        if isinstance(event, Held):
            return super().handle(event, now)
        if isinstance(event, Holding):
            commands = super().handle(event, now)
            late = [(t, e) for t, e in self._rest if not isinstance(e, Holding | Held)]
            self._play(late)
            return [c for c in commands if isinstance(c, Hold)]
        return []

    def tick(self, now: float) -> list[AnyCommand]:
        """Return periodic `Alive` commands. No deadline applies, because no engine has requests."""
        if self.done or now - self._last_alive <= self._alive_s:
            return []
        self._last_alive = now
        return [Alive(rank=rank) for rank in self._all_ranks]

    def _play(self, events: Iterable[tuple[float, AnyEvent]]) -> list[AnyCommand]:
        commands: list[AnyCommand] = []
        for now, event in events:
            commands += super().handle(event, now)
        return commands

    def _start_anew(self) -> None:
        """Remove all groups and requests."""
        for group in list(self._groups):
            self._leave(group)
        self._waiting.clear()
        self._place.clear()


def controller_of(log: EventLog | None) -> Callable[..., AsyncController]:
    """Return the constructor of the controller: `Replayed` with a log, else `AsyncController`."""
    if log is None:
        return AsyncController
    return lambda **settings: Replayed(log, **settings)


def _trained(
    commands: Iterable[AnyCommand], prompts: Mapping[GroupId, Prompt]
) -> tuple[TrainedGroup, ...]:
    """Return the groups of the batch among the commands; () if there is no batch."""
    batch = next((c for c in commands if isinstance(c, TrainOrder)), None)
    return tuple(
        TrainedGroup(g.id, g.prompt_index, zlib.crc32(prompts[g.id].tokens.tobytes()))
        for g in (batch.groups if batch else ())
    )


def _read(file: Path, kind: Any) -> Any:
    try:
        if why := fault(file):
            raise ValueError(why)
        return decode(file.read_bytes(), kind)
    except (OSError, ValueError, RecursionError) as error:  # msgspec raises ValueErrors
        raise ReplayMismatch(f"--debug.replay {file}: cannot be read ({error})") from error


def _name(version: Version) -> str:
    return f"step_{version + 1:06d}"


def _events(folder: Path, version: Version) -> Path:
    return folder / f"{_name(version)}.events.msgpack"

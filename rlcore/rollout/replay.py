"""The log of an asynchronous run, and runs that it decides: `--debug.record`, `--debug.replay`.

What the clock decides in `--mode async` is the order of the controller's events, and which token is
of which version. `<run>/record/` has both, two kinds of files a step:

    step_000003.events.msgpack       what the controller was told, from `go` to the halt
    step_000003.samples<rank>.msgpack    what this train rank trained of the batch, tokens and all

A replay plays the events to a controller of its own, whose orders nobody obeys, and trains the
recorded samples: the same batches in the same order, over any number of ranks. Its engines decode
for evaluations alone. Every train rank reads the folder.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from rlcore.metrics.jsonl import write_atomic
from rlcore.records import (
    Alive,
    AnyCommand,
    AnyEvent,
    Batch,
    GroupId,
    Held,
    Hold,
    Holding,
    Prompt,
    RequestId,
    Sample,
    Version,
    Wanted,
)
from rlcore.rollout.async_controller import AsyncController, Saved
from rlcore.sched.race import Misfit
from rlcore.utils.errors import ConfigError
from rlcore.utils.net import decode, encode

FOLDER = "record"


class Restored(Struct, frozen=True):
    """What a run was resumed with: the checkpoint's part of the controller, and which rank has the
    samples of which former one."""

    saved: Saved
    owners: dict[int, int]


class Trained(Struct, frozen=True, array_like=True):
    """A group of a batch."""

    id: GroupId
    row: int
    """`Prompt.index`."""
    checksum: int
    """Of the prompt's tokens."""


class Step(Struct, frozen=True, kw_only=True):
    """One file of events."""

    version: Version
    """That the batch trains."""
    seed: int
    events: tuple[tuple[float, AnyEvent], ...]
    """With the controller's clock."""
    groups: tuple[Trained, ...]
    """Of the batch."""
    restored: Restored | None = None


class Recorder:
    """Writes the log of a run."""

    def __init__(self, run_folder: Path, seed: int) -> None:
        self._folder, self._seed = run_folder / FOLDER, seed
        self._folder.mkdir(parents=True, exist_ok=True)
        self._events: list[tuple[float, AnyEvent]] = []
        self._groups: tuple[Trained, ...] = ()
        self._restored: Restored | None = None

    def restored(self, saved: Saved, owners: dict[int, int]) -> None:
        """The run goes on from a checkpoint."""
        self._restored = Restored(saved=saved, owners=owners)

    def handled(
        self,
        event: AnyEvent,
        commands: Iterable[AnyCommand],
        prompts: Mapping[GroupId, Prompt],
        now: float,
    ) -> None:
        """The controller was told something, and what it made of it. `prompts`: of its batch."""
        self._events.append((now, event))
        self._groups = _trained(commands, prompts) or self._groups

    def end(self, version: Version) -> None:
        """All have stopped. OSError where the file cannot be written."""
        step = Step(
            version=version,
            seed=self._seed,
            events=tuple(self._events),
            groups=self._groups,
            restored=self._restored,
        )
        write_atomic(_events(self._folder, version), encode(step))
        self._events, self._groups, self._restored = [], (), None

    def samples(self, version: Version, rank: int, samples: Iterable[Sample]) -> None:
        """What `rank` trains of a batch. OSError where the file cannot be written."""
        file = self._folder / f"{_name(version)}.samples{rank}.msgpack"
        write_atomic(file, encode(list(samples)))


class EventLog:
    """Reads it."""

    def __init__(self, path: Path, seed: int) -> None:
        """ConfigError where there is no log. `path`: the run's folder; `seed`: of the replay."""
        self.path = path / FOLDER if (path / FOLDER).is_dir() else path
        self._seed = seed
        if not self._have:
            raise ConfigError(
                f"--debug.replay {path}: has no events of a run with --mode async; give the folder "
                "of one that ran with --debug.record"
            )

    @property
    def _have(self) -> list[int]:
        """Steps."""
        return sorted(int(f.name[5:11]) for f in self.path.glob("step_*.events.msgpack"))

    def begins_at(self, version: Version) -> bool:
        """Nothing was under way before it."""
        return self._have[0] == version + 1

    def step(self, version: Version) -> Step:
        """Misfit where there is none, or another run's."""
        file = _events(self.path, version)
        if not file.is_file():
            have = self._have
            raise Misfit(
                f"--debug.replay {self.path}: has no step {version + 1}, only {have[0]} to "
                f"{have[-1]}; take fewer --run.steps, or the log of a longer run"
            )
        try:
            found = decode(file.read_bytes(), Step)
        except msgspec.MsgspecError as error:
            raise Misfit(f"--debug.replay {file}: cannot be read ({error})") from error
        if found.seed != self._seed:
            raise Misfit(
                f"--debug.replay {self.path}: was recorded with --run.seed {found.seed}, not "
                f"{self._seed}"
            )
        return found

    def samples(self, version: Version, wanted: Iterable[RequestId]) -> dict[RequestId, Sample]:
        """Misfit where one is not there."""
        found: dict[RequestId, Sample] = {}
        for file in sorted(self.path.glob(f"{_name(version)}.samples*.msgpack")):
            found |= {s.id: s for s in decode(file.read_bytes(), list[Sample])}
        wanted = list(wanted)
        if missing := [i for i in wanted if i not in found]:
            raise Misfit(
                f"--debug.replay {self.path}: has no tokens of {missing[0]} for step {version + 1}"
            )
        return {i: found[i] for i in wanted}


class Replayed(AsyncController):
    """Decides by a log. To the ranks it looks like any other, but gives them nothing to decode."""

    def __init__(self, log: EventLog, **controller: Any) -> None:
        """`controller`: as of the `AsyncController`."""
        super().__init__(**controller)
        self._log = log
        self._rest: list[tuple[float, AnyEvent]] = []
        """Of the step, from the halt on."""
        self._batch: list[AnyCommand] = []

    def go(self, version: Version, now: float) -> list[AnyCommand]:
        """Everything up to the halt happens at once. Misfit where the log is of another run."""
        step = self._log.step(version)
        if step.restored is not None:
            owners = step.restored.owners
            self._start_anew()
            self.restore(step.restored.saved, lambda rank: owners.get(rank, rank))
        elif self.buffer.version < 0 and not self._log.begins_at(version):
            raise Misfit(
                f"--debug.replay {self._log.path}: what was under way at step {version + 1} is in "
                "no file; replay from the first step, with --run.resume fresh"
            )
        super().go(version, now)
        at = next(
            (k for k, (_, e) in enumerate(step.events) if isinstance(e, Holding)), len(step.events)
        )
        self._rest = list(step.events[at:])
        self._batch = [c for c in self._play(step.events[:at]) if isinstance(c, Batch)]
        if (groups := _trained(self._batch, self.prompts)) != step.groups:
            here, there = (
                ", ".join(f"{g.id} (row {g.row})" for g in found[:3]) or "none"
                for found in (groups, step.groups)
            )
            raise Misfit(
                f"--debug.replay {self._log.path}: its batch of step {version + 1} has the groups "
                f"{there} ..., here they would be {here}, or have other prompts; replay with the "
                "settings and --data of the run that wrote it"
            )
        return []

    def handle(self, event: AnyEvent, now: float) -> list[AnyCommand]:
        """What ranks say of themselves does not count, but that they ask, and have stopped."""
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
        """Nobody owes anything."""
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
        """Nothing is known."""
        for group in list(self._groups):
            self._leave(group)
        self._waiting.clear()
        self._place.clear()


def controller_of(log: EventLog | None) -> Callable[..., AsyncController]:
    """The class of the controller."""
    if log is None:
        return AsyncController
    return lambda **settings: Replayed(log, **settings)


def _trained(
    commands: Iterable[AnyCommand], prompts: Mapping[GroupId, Prompt]
) -> tuple[Trained, ...]:
    """Of the batch that is among them; () where there is none."""
    batch = next((c for c in commands if isinstance(c, Batch)), None)
    return tuple(
        Trained(g.id, g.prompt_index, zlib.crc32(prompts[g.id].tokens.tobytes()))
        for g in (batch.groups if batch else ())
    )


def _name(version: Version) -> str:
    return f"step_{version + 1:06d}"


def _events(folder: Path, version: Version) -> Path:
    return folder / f"{_name(version)}.events.msgpack"

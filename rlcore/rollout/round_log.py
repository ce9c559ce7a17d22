"""The log of rounds, rounds.jsonl: the timing-dependent decisions of every training round.
`--debug.replay` repeats these decisions.

Everything else in a round follows from the seed, the data and the weights. A token depends on seed,
request and position. The kept groups depend on the order in which responses were counted.
Evaluations wait for all responses and have no line in the log.
"""

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from rlcore.metrics.jsonl import JsonLines, read_lines
from rlcore.records import GroupId, Sampling, Work
from rlcore.rollout.controller import Controller
from rlcore.sched.completion_order import ByLog, Counted, ReplayMismatch
from rlcore.sched.roles import GroupState
from rlcore.utils.errors import ConfigError
from rlcore.utils.files import fault
from rlcore.utils.log import log
from rlcore.utils.writes import LogWrites

FILE = "rounds.jsonl"


class Started(Struct, frozen=True, array_like=True):
    """Group that a round has started, as recorded in the log."""

    id: GroupId
    row: int
    """Row number of the group's prompt in the data set (`Prompt.index`)."""
    checksum: int
    """CRC-32 of the prompt's tokens."""
    num_samples: int
    wanted: int


class LoggedRound(Struct, frozen=True, kw_only=True):
    """One line of the round log. `started` and `counted` are in chronological order."""

    step: int
    seed: int
    sampling: Sampling
    started: tuple[Started, ...]
    counted: tuple[Counted, ...]
    kept: tuple[GroupId, ...]
    dropped: dict[GroupId, str] = {}


class Log:
    """A log of rounds to replay. The id of a round's first group identifies the round, because it
    is the same in every run."""

    def __init__(self, path: Path) -> None:
        """Read the log at `path`, a file or a run's folder. Raise ConfigError if there is no log or
        the log has no rounds."""
        self.path = path / FILE if path.is_dir() else path
        if why := fault(self.path):
            raise ConfigError(f"--debug.replay {path}: {why}; give a run's {FILE}, or its folder")
        self._rounds: dict[GroupId, LoggedRound] = {}
        try:
            for row in read_lines(self.path):  # if a resumed run repeats a step, keep its last line
                found = msgspec.convert(row, LoggedRound)
                self._rounds[found.started[0].id] = found
        except (msgspec.ValidationError, UnicodeDecodeError, IndexError) as error:
            raise ConfigError(
                f"--debug.replay {path}: is not a log of rounds ({error}); give a run's {FILE}"
            ) from error
        if not self._rounds:
            raise ConfigError(
                f"--debug.replay {path}: has no rounds; give the {FILE} of a longer run"
            )

    @property
    def rounds(self) -> list[LoggedRound]:
        """All rounds, in the order of their steps."""
        return sorted(self._rounds.values(), key=lambda r: r.step)

    def of(self, work: Sequence[Work], seed: int) -> LoggedRound:
        """Return the logged round that began with `work`.

        Raises:
            ReplayMismatch: the log has no such round, or was written with other settings.
        """
        found = self._rounds.get(work[0].id)
        if found is None:
            last = max(r.step for r in self._rounds.values())
            raise ReplayMismatch(
                f"--debug.replay {self.path}: has no round that starts with {work[0].id}; it ends "
                f"with step {last}: take fewer --run.steps, or the log of a run with the same "
                "--data, --rollout and --schedule"
            )
        if seed != found.seed:
            raise self.misfit(found, f"was sampled with --run.seed {found.seed}, not {seed}")
        here, there = work[0].sampling, found.sampling
        for name in Sampling.__struct_fields__:
            if (was := getattr(there, name)) != (now := getattr(here, name)):
                raise self.misfit(found, f"was sampled with {name} {was}, not {now}")
        for ours, theirs in zip(map(_started, work), found.started, strict=False):
            for name, hint in (
                ("id", "--schedule and --algo.adv_estimator"),
                ("row", "--data and --run.seed"),
                ("checksum", "--data and --model.tokenizer"),
                ("num_samples", "--rollout.samples_per_prompt and --tail.eta_samples"),
                ("wanted", "--rollout.samples_per_prompt"),
            ):
                if (was := getattr(theirs, name)) != (now := getattr(ours, name)):
                    raise self.misfit(
                        found, f"has {name} {was} for the group {theirs.id}, not {now}", hint
                    )
        if len(work) > len(found.started):
            raise self.misfit(
                found,
                f"started {len(found.started)} prompts, not {len(work)}",
                "--data.prompts_per_step and --tail",
            )
        return found

    def misfit(self, round_: LoggedRound, what: str, hint: str = "settings") -> ReplayMismatch:
        """Return an error whose message names the round and the settings to change."""
        return ReplayMismatch(
            f"--debug.replay {self.path}: its round of step {round_.step} {what}; replay with the "
            f"{hint} of the run that wrote it"
        )


class Rounds:
    """Writer of this run's log of rounds. With `replay`, it also makes responses count in the order
    of another run's log. It runs on rank 0, in the controller's thread."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        step: Callable[[], int],
        replay: Log | None = None,
        writes: LogWrites | None = None,
    ) -> None:
        """`step` returns the step of the current round. The first round opens the log and removes
        the lines of its own step and of later steps. `writes`: what to do if a write fails; None:
        raise."""
        self._writes = writes or LogWrites()
        self._path, self._seed, self._step, self._replay = folder / FILE, seed, step, replay
        self._lines: JsonLines | None = None
        self._round: LoggedRound | None = None
        self._race: ByLog | None = None

    def begin(self, controller: Controller, work: Sequence[Work]) -> None:
        """Open the log before a round. In a replay, set the order in which responses count.

        Raises:
            ReplayMismatch: the replayed log does not fit this run.
        """
        if self._lines is None:
            with self._writes.to(self._path):
                self._lines = JsonLines(self._path, self._step(), self._writes)
        if self._replay is None or not work:
            return
        log_ = self._replay
        round_ = self._round = log_.of(work, self._seed)

        def order(requests: Callable) -> ByLog:
            self._race = ByLog(round_.counted, requests, partial(log_.misfit, round_))
            return self._race

        controller.decide_by(order)

    def end(self, controller: Controller) -> None:
        """Write the log line of a finished round.

        Raises:
            ReplayMismatch: the round and the replayed log differ in groups or responses.
            OSError: the line cannot be written, and the run does not continue without it.
        """
        if controller.kept is None or not controller.groups:  # the round has failed or had no work
            return
        groups = list(controller.groups.values())
        counted = [
            Counted(r.id, r.num_tokens, r.result.score, r.result.error)
            for r in controller.counted
            if r.result is not None
        ]
        done = LoggedRound(
            step=self._step(),
            seed=self._seed,
            sampling=groups[0].work.sampling,
            started=tuple(_started(g) for g in groups),
            counted=tuple(counted),
            kept=controller.kept,
            dropped=dict(controller.dropped),
        )
        if self._replay is not None and self._round is not None:
            self._compare(self._replay, self._round, done)
        row = msgspec.to_builtins(done)
        if self._lines is not None:  # None: the log could not be opened
            self._lines.append(row.pop("step"), [row])

    def _compare(self, log_: Log, there: LoggedRound, here: LoggedRound) -> None:
        if there.kept != here.kept or len(there.counted) != len(here.counted):
            raise log_.misfit(
                there,
                f"ended with {len(there.kept)} groups of {len(there.counted)} responses, this "
                f"run's with {len(here.kept)} of {len(here.counted)}, or with others",
                "--data.prompts_per_step, --rollout.samples_per_prompt and --tail",
            )
        if self._race is not None and self._race.others:
            log.warning(
                "--debug.replay: %d of the %d responses of step %d differ from the log in length "
                "or score, e.g. %s; weights, reward or machine differ",
                len(self._race.others),
                len(here.counted),
                here.step,
                min(self._race.others),
            )

    def close(self) -> None:
        """Close the log. Idempotent."""
        if self._lines is not None:
            self._lines.close()


def _started(of: Work | GroupState) -> Started:
    work = of.work if isinstance(of, GroupState) else of
    return Started(
        id=work.id,
        row=work.prompt.index,
        checksum=zlib.crc32(work.prompt.tokens.tobytes()),
        num_samples=work.num_samples,
        wanted=work.wanted or work.num_samples,
    )

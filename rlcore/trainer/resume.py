"""Save and restore checkpoints: the learner's checkpoint plus all other state of a run.

A new checkpoint is written to a temporary folder and renamed, so a kill leaves the previous intact.
With `--checkpoint.async_save`, `save` returns when the state is in host memory. When all ranks have
written their files, a thread of rank 0 seals and renames the folder. `finalize` then reports the
result on all ranks.

    <run>/checkpoints/step_000040/{learner/, critic/, buffer/, histories.npz, state.json,
                                   manifest.json}

A run resumes from the newest folder whose files match the manifest, its seal (`trainer/seal.py`).
"""

import json
import math
import os
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any, Literal

from rlcore.algos.kl import AdaptiveController
from rlcore.config.schema import Config
from rlcore.hf.config import HFConfig
from rlcore.hf.lora import ADAPTER_FILES, save_adapters
from rlcore.hf.weights import MODEL_FILES, check_target, save_folder
from rlcore.metrics.sinks import MetricsWriter
from rlcore.protocols import Learner, WrittenFiles
from rlcore.rollout.async_rollout import FOLDER as ASYNC_ROLLOUT
from rlcore.rollout.async_rollout import AsyncRollout
from rlcore.rollout.histospec import HistoryStore
from rlcore.sched.reward_timeout import AdaptiveTimeout
from rlcore.sched.roles import EngineSizePolicy
from rlcore.trainer import seal
from rlcore.trainer.progress import Data, Progress, Ranks
from rlcore.utils import collective, disk
from rlcore.utils.errors import ConfigError
from rlcore.utils.files import read_json
from rlcore.utils.log import log
from rlcore.utils.waits import waiting
from rlcore.utils.writes import reason

FORMAT = 3
PARTIAL = ".partial"
"""Ending of the folder of a checkpoint that is being written."""
RESTARTS = "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"
CLOSE_S = 20.0
"""Longest time that a failed run waits for its pending checkpoint; torchrun kills after 30 s."""
HISTORIES = "histories.npz"
"""File of earlier responses in a checkpoint, if these are used as draft source."""


def folder_of(run_folder: Path) -> Path:
    return run_folder / "checkpoints"


def found(run_folder: Path) -> list[Path]:
    """Return the checkpoint folders of a run, newest first, including damaged ones."""
    folders = [
        p
        for p in folder_of(run_folder).glob("step_*")
        if p.is_dir() and p.name.removeprefix("step_").isdecimal()
    ]
    return sorted(folders, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was saved."""
    return int(checkpoint.name.removeprefix("step_"))


def _folder_at(run_folder: Path, step: int) -> Path:
    return folder_of(run_folder) / f"step_{step:06d}"


def wanted_by(cfg: Config, run_folder: Path) -> str:
    """Return --run.resume, or `auto` if Slurm or torchrun has restarted a run that has checkpoints:
    `fresh` or a path would discard the run's progress at every restart."""
    counts = (os.environ.get(name, "0") for name in RESTARTS)
    if any(count not in ("", "0") for count in counts) and found(run_folder):
        return "auto"
    return cfg.run.resume


def check(cfg: Config, run_folder: Path) -> None:
    """Check the checkpoint that the run would start from, by names and sizes of files only.

    Raises:
        ConfigError: no checkpoint is complete. Only `choose` finds wrong checksums.
    """
    wanted = wanted_by(cfg, run_folder)
    if wanted not in ("auto", "fresh") and (fault := seal.look(Path(wanted))[0]):
        raise ConfigError(_no_checkpoint(wanted, fault))
    paths = found(run_folder) if wanted == "auto" else []
    if paths and all(seal.look(path)[0] for path in paths):
        raise ConfigError(_none_whole(run_folder, len(paths)))


def _no_checkpoint(wanted: str, fault: str) -> str:
    return f"--run.resume {wanted}: cannot resume from this checkpoint: {fault}"


def _none_whole(run_folder: Path, num: int) -> str:
    return (
        f"--run.resume auto: none of the {num} checkpoints in {folder_of(run_folder)} is complete; "
        "--run.resume fresh moves them aside and starts a new run"
    )


def best_of(paths: Sequence[Path]) -> Path | None:
    """Return the checkpoint with the highest validation accuracy, of equals the first; None if no
    checkpoint has one."""

    def accuracy(path: Path) -> float | None:
        try:
            saved = read_json(path / "state.json").get("accuracy")
        except ConfigError:
            return None
        return saved if isinstance(saved, int | float) and math.isfinite(saved) else None

    known = [(found, path) for path in paths if (found := accuracy(path)) is not None]
    return max(known, key=lambda pair: pair[0])[1] if known else None


def _wrong_state(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"--run.resume {path}: its state.json does not fit this version ({why}); resume from "
        "another checkpoint, or start a new run with --run.resume fresh"
    )


def move_aside(folder: Path) -> Path | None:
    """Rename the folder of an older run to the first free `<name>.old<k>` and return the new path.
    Only checkpoints that were never completed are deleted. Return None if there is no older run."""
    if not any(folder.glob("*.jsonl")) and not folder_of(folder).exists():
        return None
    _remove_partial(folder)
    k = 1
    while folder.with_name(f"{folder.name}.old{k}").exists():
        k += 1
    target = folder.with_name(f"{folder.name}.old{k}")
    return folder.rename(target)


def check_exports(cfg: Config, folder: Path) -> None:
    """Check that the run may replace what is in its folder under the names of its exports. Raise
    ConfigError if a file there is not of an export."""
    if cfg.checkpoint.export_hf:
        check_target(folder / "hf", MODEL_FILES)
        if cfg.lora.rank:
            check_target(folder / "adapters", ADAPTER_FILES)


def _remove_partial(run_folder: Path) -> None:
    """Delete the checkpoints in whose writing a start of the run was killed."""
    for path in folder_of(run_folder).glob(f"*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def _error_of(work: Callable[..., Any], *args: Any) -> str:
    """Do `work`, which writes files. Return the cause of a failure, or ""."""
    try:
        work(*args)
    except OSError as e:
        return reason(e)
    return ""


@dataclass(frozen=True, slots=True)
class _Pending:
    """Checkpoint that is being written while training continues."""

    step: int
    parts: Mapping[str, Future[WrittenFiles]]
    """Files that this rank is writing, by subfolder; done when their list is written, too."""
    sealed: Future[None] | None
    """On rank 0: the sealing and renaming of the folder."""
    cancelled: Event


@dataclass(slots=True, kw_only=True)
class Checkpoints:
    """Writer and reader of one rank's checkpoints, with all objects whose state is saved."""

    cfg: Config
    folder: Path
    """Folder of the run."""
    ranks: Ranks
    learner: Learner | None
    kind: Literal["rl", "sft"] = "rl"
    """What trains the model; a run resumes from checkpoints of its own kind only."""
    critic: Learner | None = None
    kl: AdaptiveController
    data: Data
    async_rollout: AsyncRollout | None = None
    library: HistoryStore | None = None
    """Earlier responses used as draft source, on rank 0; None on other ranks."""
    deadlines: AdaptiveTimeout | None = None
    """Reward deadlines that adapt to prompts."""
    sizes: EngineSizePolicy | None = None
    """Policy that chooses the engine size, on rank 0; None on other ranks."""
    async_save: bool = False
    """Whether training continues while the learners' files are written. Train ranks reset it if one
    of them has no memory for the copy."""
    _pending: _Pending | None = field(default=None, init=False)

    def choose(self) -> Path | None:
        """Return the checkpoint to start from according to --run.resume, or None; the same on every
        rank. Damaged checkpoints are logged and skipped.

        Raises:
            ConfigError: the given path is not an intact checkpoint, or the run's checkpoints are
                all damaged; raised on every rank.
        """
        first, everyone = self.ranks.rank == 0, self.ranks.everyone
        own = wanted_by(self.cfg, self.folder) if first else ""  # Only rank 0 reads the folder.
        wanted = collective.broadcast_text(own, everyone)
        if wanted == "fresh":
            return None
        if wanted != "auto":
            if fault := seal.fault(Path(wanted), everyone):
                raise ConfigError(_no_checkpoint(wanted, fault))
            return Path(wanted)
        names = "\n".join(map(str, found(self.folder))) if first else ""
        paths = [Path(p) for p in collective.broadcast_text(names, everyone).splitlines()]
        for path in paths:
            fault = seal.fault(path, everyone)
            if not fault:
                if first and path.stat().st_mode & stat.S_IWOTH:
                    log.warning(
                        "%s is writable by every user of this machine; run chmod o-w on it", path
                    )
                return path
            if first:
                log.error("checkpoint %s is damaged: %s; trying the previous one", path, fault)
        if paths:
            raise ConfigError(_none_whole(self.folder, len(paths)))
        return None

    def save(
        self, progress: Progress, writer: MetricsWriter | None, accuracy: float | None = None
    ) -> Path | None:
        """Write a checkpoint of the finished step. Collective over all ranks. If writing fails,
        earlier checkpoints stay, and --checkpoint.on_error decides whether the run ends. With
        `async_save`, call `finalize` with `wait` first. The last step is always saved
        synchronously, because no training follows.

        Returns:
            The checkpoint's folder; None if it could not be written or is still being written.

        Args:
            writer: metrics writer on rank 0, flushed to disk before the checkpoint becomes valid.
            accuracy: mean validation accuracy of the step on rank 0; None: the step has none.

        Raises:
            RuntimeError: the checkpoint was not written, and --checkpoint.on_error is not
                `continue` or this was the last step.
        """
        assert self._pending is None
        step, everyone = progress.step, self.ranks.everyone
        progress.begin_save()
        with waiting(f"writing the checkpoint of step {step}"):
            error, parts = self._write(progress, writer, accuracy)
            num_lists = int(collective.reduce_floats([float(len(parts))], group=everyone)[0])
            if num_lists and not error:
                self._pending = self._seal_when_written(step, parts, num_lists)
                return None
            aside = _folder_at(self.folder, step).with_suffix(PARTIAL)
            wait_for(parts.values())  # Rank 0 deletes the folder after an error.
            error = self._any(error) or seal.write(aside, everyone)
            if not error and self.ranks.rank == 0:
                error = _error_of(self._publish, step)
            return self._end(step, error, progress)

    @property
    def is_pending(self) -> bool:
        """Whether a checkpoint is being written while training continues; the same on all ranks."""
        return self._pending is not None

    def finalize(self, progress: Progress, *, wait: bool) -> Path | None:
        """If all ranks have written their files of the pending checkpoint, end its save. With
        `wait`, wait until they have. Collective over all ranks. Errors are handled as in `save`.

        Returns:
            The folder of the checkpoint that became complete; None if there is none.
        """
        pending, everyone = self._pending, self.ranks.everyone
        if pending is None:
            return None
        with waiting(f"writing the checkpoint of step {pending.step}"):
            is_written = wait or all(part.done() for part in pending.parts.values())
            if collective.any_rank(not is_written, everyone):
                return None
            errors = [_error_of(part.result) for part in pending.parts.values()]
            error, sealed = self._any(next(filter(None, errors), "")), pending.sealed
            if error:
                pending.cancelled.set()
            is_sealed = wait or error or sealed is None or sealed.done()
            if collective.any_rank(not is_sealed, everyone):
                return None
            if sealed is not None:
                wait_for([sealed])
                error = error or _error_of(sealed.result)
            self._pending = None
            seconds = 0.0
            if not error:
                seconds = sum(part.result().seconds for part in pending.parts.values())
            slowest = collective.reduce_floats([seconds], "max", everyone)[0]
            progress.add({"timing_s/write_checkpoint": slowest})
            return self._end(pending.step, error, progress)

    def close(self) -> None:
        """If a checkpoint is still being written, because the run has failed, wait up to `CLOSE_S`
        seconds for it, then stop writing."""
        pending = self._pending
        if pending is not None:
            futures: list[Future[Any]] = list(pending.parts.values())
            if pending.sealed is not None:
                futures.append(pending.sealed)
            if wait_for(futures, CLOSE_S).not_done:
                log.error("checkpoint of step %d: not written in %g s", pending.step, CLOSE_S)
            pending.cancelled.set()

    def _seal_when_written(
        self, step: int, parts: Mapping[str, Future[WrittenFiles]], num_lists: int
    ) -> _Pending:
        """Start a thread on rank 0 that waits for all ranks' lists of files, then seals and renames
        the folder."""
        cancelled, sealed = Event(), Future[None]()
        aside = _folder_at(self.folder, step).with_suffix(PARTIAL)

        def seal_and_rename() -> None:
            try:
                seal.write_from_lists(aside, num_lists, cancelled)
                self._publish(step)
                sealed.set_result(None)
            except Exception as e:
                sealed.set_exception(e)

        if self.ranks.rank == 0:
            Thread(target=seal_and_rename, name="seal", daemon=True).start()
        return _Pending(step, parts, sealed if self.ranks.rank == 0 else None, cancelled)

    def _publish(self, step: int) -> None:
        """Give a sealed checkpoint its final name, and delete old ones."""
        final = _folder_at(self.folder, step)
        shutil.rmtree(final, ignore_errors=True)
        disk.rename(final.with_suffix(PARTIAL), final)
        self.prune()

    def _end(self, step: int, error: str, progress: Progress) -> Path | None:
        """End the save of `step`. After an error on any rank, delete what was written."""
        final = _folder_at(self.folder, step)
        error = self._any(error)
        if not error:
            return final
        if self.ranks.rank == 0:
            shutil.rmtree(final.with_suffix(PARTIAL), ignore_errors=True)
        what = f"checkpoint of step {step} could not be written to {final.parent}"
        self._failed(progress, step, what, error)
        return None

    def _write(
        self, progress: Progress, writer: MetricsWriter | None, accuracy: float | None
    ) -> tuple[str, dict[str, Future[WrittenFiles]]]:
        """Write all parts of a checkpoint; with `async_save`, only begin to write the learners.

        Returns:
            The error on every rank, or "" if there is none; and the files that are still being
            written, by subfolder.
        """
        step, is_last = progress.step, progress.stops or progress.step >= self.cfg.run.steps
        aside = _folder_at(self.folder, step).with_suffix(PARTIAL)
        error, parts = "", dict[str, Future[WrittenFiles]]()
        try:
            if self.ranks.rank == 0:
                if writer is not None:
                    writer.sync()
                _remove_partial(self.folder)
                aside.mkdir(parents=True)
                if self.async_rollout is not None:
                    (aside / ASYNC_ROLLOUT).mkdir()
        except OSError as e:
            error = reason(e)
        if error := self._any(error):
            return error, parts
        try:
            for name, learner in (("learner", self.learner), ("critic", self.critic)):
                if learner is None:
                    continue
                if (
                    self.async_save
                    and not is_last
                    and (part := self._save_async(name, learner, aside))
                ):
                    parts[name] = part
                else:
                    learner.save(aside / name)
            if self.async_rollout is not None:
                self.async_rollout.save(aside / ASYNC_ROLLOUT)
            if self.ranks.rank == 0:
                if self.library is not None:
                    self.library.save(aside / HISTORIES)
                state = self._state(step) | {"accuracy": accuracy}
                disk.write_text(aside / "state.json", json.dumps(state, indent=1))
        except OSError as e:
            log.debug("checkpoint of step %d", step, exc_info=e)
            error = reason(e)
        return self._any(error), parts

    def _save_async(self, name: str, learner: Learner, aside: Path) -> Future[WrittenFiles] | None:
        """Start the asynchronous save of a learner. The future is done when this rank has written
        its files and their list. Return None on all ranks if one has no memory for the copy.
        Collective."""

        def leave_list(written: WrittenFiles) -> None:
            seal.leave_list(aside, name, self.ranks.rank, written.checksums)

        try:
            return learner.save_async(aside / name, leave_list)
        except MemoryError as e:
            self.async_save = False
            log.warning("checkpoints are saved synchronously from now on: %s", e)
            return None

    def _any(self, error: str) -> str:
        """If any rank has failed, return this rank's error, or else an error that names a failed
        rank; otherwise return "". Collective."""
        mine = float(self.ranks.rank + 1 if error else 0)
        last = int(collective.reduce_floats([mine], "max", self.ranks.everyone)[0]) - 1
        return (error or f"rank {last} failed; read its log") if last >= 0 else ""

    def _failed(self, progress: Progress, step: int, what: str, why: str) -> None:
        """After the failed save of `step`, continue or end the run, the same on every rank."""
        is_last = step == progress.step and (progress.stops or step >= self.cfg.run.steps)
        if self.cfg.checkpoint.on_error == "continue" and not is_last:
            name = "training/failed_saves"
            progress.add({name: progress.metrics.get(name, 0.0) + 1})
            if self.ranks.rank == 0:
                log.error("%s (%s); the run continues, and earlier checkpoints are kept", what, why)
            return
        raise RuntimeError(
            f"{what} ({why}); earlier checkpoints are kept. Free disk space or change --run.dir, "
            "and start again to resume from the last checkpoint"
        )

    def _state(self, step: int) -> dict[str, Any]:
        assert self.data.order is not None
        state = {
            "format": FORMAT,
            "kind": self.kind,
            "step": step,
            "source": self.data.source.state() if self.data.source is not None else None,
            "sampler": self.data.order.state(),
            "kl": self.kl.state(),
            "deadlines": self.deadlines.state() if self.deadlines is not None else None,
        }
        if self.sizes is not None:
            state["sizes"] = {type(self.sizes).__name__: self.sizes.state()}
        return state

    def prune(self) -> None:
        """Delete all but the newest `checkpoint.keep` checkpoints and the best. If a deletion
        fails, for example because another program reads the files, the next save tries again."""
        cfg, paths = self.cfg.checkpoint, found(self.folder)
        best = best_of(paths) if cfg.keep_best else None
        for old in paths[cfg.keep :] if cfg.keep else []:
            if old == best:
                continue
            try:
                shutil.rmtree(old)
            except OSError as e:
                log.warning("cannot delete an old checkpoint: %s", reason(e))

    def load(self, path: Path, progress: Progress) -> None:
        """Restore the state of the run from the checkpoint `path`. Collective over the train ranks.
        A rank that only samples restores the step and its part of the sample buffer."""
        state = read_json(path / "state.json", "resume from another checkpoint")
        if (written := state.get("format")) != FORMAT:
            raise ConfigError(
                f"--run.resume {path}: has format {written} but this version reads "
                f"{FORMAT}; resume with the version that wrote it, or start a new run with "
                "--run.resume fresh"
            )
        if (kind := state.get("kind", "rl")) != self.kind:
            raise ConfigError(
                f"--run.name {self.folder.name}: {path} is of a run of {kind}, and this one is of "
                f"{self.kind}; choose another name, or --run.resume fresh"
            )
        step = state.get("step")
        if not isinstance(step, int):
            raise _wrong_state(path, "it has no step")
        progress.begin(step)
        if (
            self.async_rollout is not None and (path / ASYNC_ROLLOUT).is_dir()
        ):  # Without a saved buffer, all requests start from their prompts.
            self.async_rollout.load(path / ASYNC_ROLLOUT)
        elif (path / ASYNC_ROLLOUT).is_dir() and self.ranks.rank == 0:
            log.warning(
                "%s: was written with --mode async; this run has another mode, so the prompts that "
                "were under way and the samples in its buffer are left out",
                path,
            )
        if self.learner is None:
            return
        self.learner.load(path / "learner")
        if self.critic is not None:
            if not (path / "critic").is_dir():
                raise ConfigError(
                    f"--run.resume {path}: was written without a critic, which "
                    "--algo.adv_estimator gae needs; resume with that run's estimator, or start "
                    "anew with --run.resume fresh"
                )
            self.critic.load(path / "critic")
        try:
            self._restore(state)
        except (LookupError, TypeError, AttributeError) as error:
            raise _wrong_state(path, f"{type(error).__name__}: {error}") from error
        if self.library is not None and (path / HISTORIES).is_file():  # Histories are optional.
            self.library.load(path / HISTORIES)
        if self.ranks.rank == 0:
            self.set_later_aside(step)
            log.info("resumed from %s: %d of %d steps done", path, step, self.cfg.run.steps)
            if step >= self.cfg.run.steps:
                log.info(
                    "the run is complete; raise --run.steps to continue, or set --run.resume fresh "
                    "for a new run"
                )

    def _restore(self, state: dict[str, Any]) -> None:
        """Restore the small states in `state`, the contents of state.json."""
        self.kl.restore(state["kl"])
        if self.deadlines is not None and state.get("deadlines"):
            self.deadlines.restore(state["deadlines"])
        if self.data.order is not None:
            self.data.order.restore(state["sampler"])
            if self.data.source is not None:
                self.data.source.restore(state["source"], self.data.order.state()["num_rows"])
        if self.sizes is not None:
            saved = state.get("sizes", {})
            if type(self.sizes).__name__ in saved:  # Skip the state of another policy class.
                self.sizes.restore(saved[type(self.sizes).__name__])

    def set_later_aside(self, step: int) -> None:
        """After a resume from an earlier step, rename the checkpoints of later steps to `.old<k>`.
        Otherwise `auto` would choose one of these, and `prune` would delete new checkpoints first.
        Metrics and rollouts are copied, because the run truncates them to this step."""
        later = [p for p in found(self.folder) if step_of(p) > step]
        if not later:
            return
        k = 1
        while any(p.with_name(f"{p.name}.old{k}").exists() for p in later):
            k += 1
        # Copy before renaming: after a kill in between, the restarted run copies and renames again.
        for path in self.folder.glob("*.jsonl"):
            shutil.copyfile(path, path.with_name(f"{path.name}.old{k}"))
        for path in later:
            path.rename(path.with_name(f"{path.name}.old{k}"))
        log.warning("moved %d checkpoints of later steps to *.old%d", len(later), k)

    def export_hf(self, hf: HFConfig) -> None:
        """Write the weights as a Hugging Face folder, `<run>/hf`, and adapters, which are also in
        these weights, as a PEFT folder, `<run>/adapters`. Collective: ranks share the work.

        Raises:
            RuntimeError: the folder could not be written; raised on every rank. The checkpoints
                hold the same weights.
        """
        if self.learner is None:
            return
        model, lora, target = self.cfg.model, self.cfg.lora, self.folder / "hf"
        adapters = self.folder / "adapters"
        tokenizer = model.tokenizer or model.path
        try:
            with waiting(f"writing {target}"):
                save_folder(self.learner.export(), hf, tokenizer, target, together=True)
                if lora.rank:
                    tensors = self.learner.export_adapters()
                    save_adapters(tensors, hf, lora, model.path, adapters, together=True)
        except OSError as e:
            raise RuntimeError(f"--checkpoint.export_hf: {e}") from e
        if self.ranks.rank == 0:
            log.info("model: %s", target)

"""Checkpoints: the learner's own plus everything else that is state. Written aside, then renamed,
so a kill at any moment leaves the previous one whole.

    <run>/checkpoints/step_000040/{learner/, critic/, buffer/, histories.npz, state.json,
                                   manifest.json}

The manifest is the seal (`trainer/seal.py`): a run goes on from the newest checkpoint that is as it
was written.
"""

import errno
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

from rlcore.config.schema import Config
from rlcore.hf.weights import save_folder
from rlcore.rollout.flow import FOLDER as FLOW
from rlcore.trainer import seal
from rlcore.trainer.run import Run
from rlcore.utils import collective
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import log

FORMAT = 3
RESTARTS = "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"
HISTORIES = "histories.npz"
"""Earlier responses, where engines draft from them."""


def folder_of(run_folder: Path) -> Path:
    return run_folder / "checkpoints"


def found(run_folder: Path) -> list[Path]:
    """The checkpoints of a run, the newest first; which of them are whole `choose` finds out."""
    folders = (p for p in folder_of(run_folder).glob("step_*") if p.is_dir() and p.suffix == "")
    return sorted(folders, reverse=True)


def wanted_by(cfg: Config, run_folder: Path) -> str:
    """--run.resume, which is of the first start alone: where Slurm or torchrun has started the run
    again, `fresh` and a path would undo what it has saved since, every time."""
    counts = (os.environ.get(name, "0") for name in RESTARTS)
    if any(count not in ("", "0") for count in counts) and found(run_folder):
        return "auto"
    return cfg.run.resume


def choose(run: Run) -> Path | None:
    """The checkpoint to start from, as --run.resume says; the same on every rank. A damaged one is
    named and passed over. ConfigError on every rank where a path is no checkpoint, or none of the
    run's is whole."""
    own = wanted_by(run.cfg, run.folder) if run.rank == 0 else ""  # files as rank 0 sees them
    wanted = collective.broadcast_text(own, run.everyone)
    if wanted == "fresh":
        return None
    if wanted != "auto":
        if fault := seal.fault(Path(wanted), run.everyone):
            raise ConfigError(_no_checkpoint(wanted, fault))
        return Path(wanted)
    names = "\n".join(map(str, found(run.folder))) if run.rank == 0 else ""
    paths = [Path(p) for p in collective.broadcast_text(names, run.everyone).splitlines()]
    for path in paths:
        fault = seal.fault(path, run.everyone)
        if not fault:
            if run.rank == 0 and path.stat().st_mode & stat.S_IWOTH:
                log.warning("%s can be written by everybody on this machine: chmod o-w", path)
            return path
        if run.rank == 0:
            log.error("checkpoint %s is damaged: %s; the one before it is tried", path, fault)
    if paths:
        raise ConfigError(_none_whole(run.folder, len(paths)))
    return None


def check(cfg: Config, run_folder: Path) -> None:
    """Look for the checkpoint to start from, by the names and sizes of files. ConfigError where
    `choose` would raise one; a wrong checksum is found there alone."""
    wanted = wanted_by(cfg, run_folder)
    if wanted not in ("auto", "fresh") and (fault := seal.look(Path(wanted))[0]):
        raise ConfigError(_no_checkpoint(wanted, fault))
    paths = found(run_folder) if wanted == "auto" else []
    if paths and all(seal.look(path)[0] for path in paths):
        raise ConfigError(_none_whole(run_folder, len(paths)))


def _no_checkpoint(wanted: str, fault: str) -> str:
    return f"--run.resume {wanted}: is no checkpoint to go on from: {fault}"


def _none_whole(run_folder: Path, num: int) -> str:
    return (
        f"--run.resume auto: none of the {num} checkpoints in {folder_of(run_folder)} is whole; "
        "--run.resume fresh starts anew and moves them aside"
    )


def move_aside(folder: Path) -> Path | None:
    """Rename the folder of an older run to the first free `<name>.old<k>` and return that; nothing
    is deleted. None where there is no older run."""
    if not any(folder.glob("*.jsonl")) and not folder_of(folder).exists():
        return None
    k = 1
    while folder.with_name(f"{folder.name}.old{k}").exists():
        k += 1
    target = folder.with_name(f"{folder.name}.old{k}")
    return folder.rename(target)


def save(run: Run) -> None:
    """Write a checkpoint of the step just done. Collective over all ranks. Where it cannot be
    written the checkpoints that exist stay, and the run ends in one sentence, or says it and goes
    on, as --checkpoint.on_error has it.

    Raises:
        RuntimeError: it could not be written, and the run shall end or has nothing left to do.
    """
    final = folder_of(run.folder) / f"step_{run.step:06d}"
    aside = final.with_suffix(".partial")
    error = _write(run, aside)
    if not error:
        error = seal.write(aside, run.everyone)
    if error:
        if run.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        _failed(run, f"checkpoint of step {run.step} could not be written to {final.parent}", error)
        return
    try:
        if run.rank == 0:
            if run.writer is not None:
                run.writer.sync()
            shutil.rmtree(final, ignore_errors=True)
            aside.rename(final)
            prune(run)
    except OSError as e:
        error = _reason(e)
    if error := _any(run, error):
        _failed(run, f"checkpoint of step {run.step} could not be written to {final.parent}", error)


def _write(run: Run, aside: Path) -> str:
    """All parts into the folder `aside`; on every rank why not, "" where all is there."""
    error = ""
    try:
        if run.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            if run.flow is not None:
                (aside / FLOW).mkdir()
    except OSError as e:
        error = _reason(e)
    if error := _any(run, error):
        return error
    try:
        if run.learner is not None:
            run.learner.save(aside / "learner")
        if run.critic is not None:
            run.critic.save(aside / "critic")
        if run.flow is not None:
            run.flow.save(aside / FLOW)
        if run.rank == 0:
            if run.rollout.library is not None:
                run.rollout.library.save(aside / HISTORIES)
            (aside / "state.json").write_text(json.dumps(_state(run), indent=1))
    except OSError as e:
        log.debug("checkpoint of step %d", run.step, exc_info=e)
        error = _reason(e)
    return _any(run, error)


def _reason(error: OSError) -> str:
    return "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)


def _any(run: Run, error: str) -> str:
    """This rank's reason, or which rank has one; "" where none has. Collective."""
    mine = float(run.rank + 1 if error else 0)
    last = int(collective.reduce_floats([mine], "max", run.everyone)[0]) - 1
    return (error or f"rank {last} failed, see its log") if last >= 0 else ""


def _failed(run: Run, what: str, why: str) -> None:
    """The same on every rank."""
    if run.cfg.checkpoint.on_error == "go_on" and not run.is_last_step:
        run.pending["training/failed_saves"] = run.pending.get("training/failed_saves", 0.0) + 1
        if run.rank == 0:
            log.error("%s (%s); earlier checkpoints are untouched, and the run goes on", what, why)
        return
    raise RuntimeError(
        f"{what} ({why}); earlier checkpoints are untouched. Free space or set --run.dir elsewhere "
        "and start again: it goes on from the last one"
    )


def _state(run: Run) -> dict[str, Any]:
    assert run.source is not None
    assert run.sampler is not None
    state = {
        "format": FORMAT,
        "step": run.step,
        "source": run.source.state(),
        "sampler": run.sampler.state(),
        "kl": run.kl.state(),
        "deadlines": run.deadlines.state() if run.deadlines is not None else None,
    }
    if run.relayout is not None and run.relayout.policy is not None:
        policy = run.relayout.policy
        state["sizes"] = {type(policy).__name__: policy.state()}
    return state


def prune(run: Run) -> None:
    """Keep the newest `checkpoint.keep`. One that cannot be deleted, since somebody reads it, is
    tried again with the next checkpoint."""
    keep = run.cfg.checkpoint.keep
    for old in found(run.folder)[keep:] if keep else []:
        try:
            shutil.rmtree(old)
        except OSError as e:
            log.warning("an old checkpoint cannot be deleted: %s", _reason(e))


def load(run: Run, path: Path) -> None:
    """Restore everything. Collective over the train ranks; a rank that only samples takes the
    step."""
    state = json.loads((path / "state.json").read_text())
    if state["format"] != FORMAT:
        raise ConfigError(
            f"--run.resume {path}: is of format {state['format']}, this version reads {FORMAT}; "
            "go on with the version that wrote it, or start anew with --run.resume fresh"
        )
    run.step = state["step"]
    if run.flow is not None and (path / FLOW).is_dir():  # else all that is wanted is started anew
        run.flow.load(path / FLOW)
    if run.learner is None:
        return
    run.learner.load(path / "learner")
    if run.critic is not None:
        if not (path / "critic").is_dir():
            raise ConfigError(
                f"--run.resume {path}: was written without a critic, and --algo.adv_estimator gae "
                "needs one; resume with the estimator it had, or start anew"
            )
        run.critic.load(path / "critic")
    run.kl.restore(state["kl"])
    if run.deadlines is not None and state.get("deadlines"):
        run.deadlines.restore(state["deadlines"])
    if run.source is not None and run.sampler is not None:
        run.sampler.restore(state["sampler"])
        run.source.restore(state["source"], run.sampler.state()["num_rows"])
    if run.relayout is not None and run.relayout.policy is not None:
        policy, sizes = run.relayout.policy, state.get("sizes", {})
        if type(policy).__name__ in sizes:  # else it was written without, or by another policy
            policy.restore(sizes[type(policy).__name__])
    library = run.rollout.library
    if library is not None and (path / HISTORIES).is_file():  # else it was written without
        library.load(path / HISTORIES)
    if run.rank == 0:
        set_later_aside(run)
        log.info("resumed from %s: %d of %d steps done", path, run.step, run.cfg.run.steps)
        if run.step >= run.cfg.run.steps:
            log.info("nothing is left to do: --run.resume fresh starts anew, --run.steps goes on")


def set_later_aside(run: Run) -> None:
    """Whoever goes back to an earlier step leaves the later ones: their checkpoints are renamed to
    `.old<k>`, or `auto` would go on with them and `prune` would take the new ones for older, and
    metrics and rollouts are copied, which are cut back to this step."""
    later = [p for p in found(run.folder) if int(p.name.removeprefix("step_")) > run.step]
    if not later:
        return
    k = 1
    while any(p.with_name(f"{p.name}.old{k}").exists() for p in later):
        k += 1
    for path in run.folder.glob("*.jsonl"):  # first: whoever ends in between finds them later still
        shutil.copyfile(path, path.with_name(f"{path.name}.old{k}"))
    for path in later:
        path.rename(path.with_name(f"{path.name}.old{k}"))
    log.warning("%d checkpoints of later steps are set aside as *.old%d", len(later), k)


def export_hf(run: Run) -> None:
    """Write the weights as a Hugging Face folder, `<run>/hf`. Collective. RuntimeError on every
    rank in one sentence where it cannot be written; the checkpoints hold the same weights."""
    if run.learner is None:
        return
    target, error = run.folder / "hf", ""
    try:
        save_folder(
            run.learner.export(),
            run.hf,
            run.cfg.model.tokenizer or run.cfg.model.path,
            target if run.rank == 0 else None,
        )
    except OSError as e:
        error = str(e)
    if collective.any_rank(bool(error)):
        raise RuntimeError(f"--checkpoint.export_hf: {error or f'rank 0 could not write {target}'}")
    if run.rank == 0:
        log.info("model: %s", target)

"""Checkpoints: the learner's own plus everything else that is state. Written aside, then renamed,
so a kill at any moment leaves the previous one whole.

    <run>/checkpoints/step_000040/{learner/, critic/, buffer/, histories.npz, state.json}
"""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

from rlcore.hf.weights import save_folder
from rlcore.rollout.flow import FOLDER as FLOW
from rlcore.trainer.run import Run
from rlcore.utils import collective
from rlcore.utils.log import log

FORMAT = 3
HISTORIES = "histories.npz"
"""Earlier responses, where engines draft from them."""


def folder_of(run_folder: Path) -> Path:
    return run_folder / "checkpoints"


def newest(run_folder: Path) -> Path | None:
    """The newest complete checkpoint of a run."""
    found = sorted(p for p in folder_of(run_folder).glob("step_*") if (p / "state.json").is_file())
    found = [p for p in found if p.suffix == ""]
    return found[-1] if found else None


def choose(run: Run) -> Path | None:
    """The checkpoint to start from, as --run.resume says; the same on every rank. ValueError on
    every rank where the path is no checkpoint."""
    wanted = run.cfg.run.resume
    found = ""
    if run.rank == 0:
        if wanted == "auto":
            found = str(newest(run.folder) or "")
        elif wanted != "fresh":
            found = wanted
    found = collective.broadcast_text(found, run.everyone)
    if found:
        read_step(Path(found))
    return Path(found) if found else None


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
    """Write a checkpoint of the step just done. Collective over all ranks. A full disk is one
    sentence, and the checkpoints that exist stay."""
    final = folder_of(run.folder) / f"step_{run.step:06d}"
    aside = final.with_suffix(".partial")
    error = ""
    if run.rank == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        if run.flow is not None:
            (aside / FLOW).mkdir()
    collective.barrier(run.everyone)
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
        error = e.strerror or str(e)
        if e.errno == errno.ENOSPC:
            error = "the disk is full"
    if collective.any_rank(bool(error), run.everyone):
        if run.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise RuntimeError(
            f"checkpoint of step {run.step} could not be written to {final.parent} "
            f"({error or 'another rank failed'}); earlier checkpoints are untouched. "
            "Free space or set --run.dir elsewhere and start again: it goes on from the last one"
        )
    if run.rank == 0:
        if run.writer is not None:
            run.writer.sync()
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        prune(run)
    collective.barrier(run.everyone)


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
    """Keep the newest `checkpoint.keep`."""
    keep = run.cfg.checkpoint.keep
    found = sorted(p for p in folder_of(run.folder).glob("step_*") if p.suffix == "")
    for old in found[:-keep] if keep else []:
        shutil.rmtree(old)


def read_step(path: Path) -> int:
    """The step of a checkpoint. ValueError where it is none."""
    state = path / "state.json"
    if not state.is_file():
        raise ValueError(f"--run.resume {path}: is no checkpoint (no state.json in it)")
    return int(json.loads(state.read_text())["step"])


def load(run: Run, path: Path) -> None:
    """Restore everything. Collective over the train ranks; a rank that only samples takes the
    step."""
    state = json.loads((path / "state.json").read_text())
    if state["format"] != FORMAT:
        raise ValueError(
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
            raise ValueError(
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
    found = folder_of(run.folder).glob("step_*")
    later = [p for p in found if p.suffix == "" and int(p.name.removeprefix("step_")) > run.step]
    if not later:
        return
    k = 1
    while any(p.with_name(f"{p.name}.old{k}").exists() for p in later):
        k += 1
    for path in later:
        path.rename(path.with_name(f"{path.name}.old{k}"))
    for path in run.folder.glob("*.jsonl"):
        shutil.copyfile(path, path.with_name(f"{path.name}.old{k}"))
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

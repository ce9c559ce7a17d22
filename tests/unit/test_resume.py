"""Which checkpoint a run goes on from, and what happens to the others."""

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlcore.algos.kl import AdaptiveController
from rlcore.protocols import WrittenFiles
from rlcore.sched.planner import TPPlanner
from rlcore.trainer import resume, seal
from rlcore.trainer.progress import Data, Progress, Ranks
from rlcore.trainer.resume import Checkpoints
from rlcore.utils import disk


def run_with(folder: Path, steps: list[int], keep: int = 2) -> Checkpoints:
    """A finished run with a checkpoint at each of `steps` and a row of metrics per step."""
    for step in steps:
        path = folder / "checkpoints" / f"step_{step:06d}"
        (path / "learner").mkdir(parents=True)
        state = {
            "format": resume.FORMAT,
            "step": step,
            "issued": 0,
            "sampler": {},
            "kl": {"scale": 1.5},
        }
        (path / "state.json").write_text(json.dumps(state))
        (path / "learner" / "weights").write_bytes(bytes(range(256)))
        assert not seal.write(path, None)
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {s}}}\n' for s in range(9)))
    return Checkpoints(
        cfg=SimpleNamespace(
            run=SimpleNamespace(steps=9, resume="auto"),
            checkpoint=SimpleNamespace(keep=keep, keep_best=True, on_error="stop"),
        ),
        folder=folder,
        ranks=Ranks(rank=0, size=1, model_parallel_groups=[[0]], dp_rank=0),
        learner=SimpleNamespace(load=lambda path: None),
        kl=AdaptiveController(0.1, 100),
        data=Data(),
    )


def go_on(run: Checkpoints, path: Path) -> int:
    """Load a checkpoint; the step that the run is at."""
    progress = Progress()
    run.load(path, progress)
    return progress.step


def test_the_controller_of_the_kl_goes_on_where_it_was(tmp_path: Path) -> None:
    run = run_with(tmp_path, [2])
    go_on(run, tmp_path / "checkpoints" / "step_000002")
    assert run.kl.scale == 1.5


def test_a_critic_that_the_checkpoint_does_not_have_is_one_sentence(tmp_path: Path) -> None:
    run = run_with(tmp_path, [2])
    run = replace(run, critic=SimpleNamespace(load=lambda path: None))
    with pytest.raises(ValueError, match="was written without a critic, which .* gae needs"):
        go_on(run, tmp_path / "checkpoints" / "step_000002")


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


def test_auto_goes_on_from_the_newest_and_moves_nothing(tmp_path: Path) -> None:
    run = run_with(tmp_path, [2, 4])
    chosen = run.choose()
    assert chosen is not None and chosen.name == "step_000004"
    go_on(run, chosen)
    assert names(tmp_path) == ["step_000002", "step_000004"]
    assert [p.name for p in tmp_path.glob("metrics*")] == ["metrics.jsonl"]


def cut(path: Path) -> None:
    (path / "learner" / "weights").write_bytes(bytes(100))


def flip(path: Path) -> None:
    file = path / "learner" / "weights"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")


def manifest(text: str) -> Callable[[Path], None]:
    """A damage: the manifest holds this text instead."""
    return lambda path: (path / seal.MANIFEST).write_text(text)


def lose_an_entry(path: Path) -> None:
    seals = json.loads((path / seal.MANIFEST).read_text())
    del seals["files"]["learner/weights"]
    (path / seal.MANIFEST).write_text(json.dumps(seals))
    (path / "learner" / "weights").unlink()


def name_a_file_outside(path: Path) -> None:
    outside = path.parent / "outside"
    outside.write_text("")
    seals = {"../outside": (0, 0)}
    text = json.dumps({"files": seals, "checksum": seal._checksum_of(seals)})
    (path / seal.MANIFEST).write_text(text)


def make_a_pipe(path: Path) -> None:
    (path / seal.MANIFEST).unlink()
    os.mkfifo(path / seal.MANIFEST)


DAMAGES = {
    "learner/weights has 100 of 256 bytes": cut,
    "learner/weights has a wrong checksum": flip,
    "learner/weights is missing": lambda path: (path / "learner" / "weights").unlink(),
    "has no manifest.json": lambda path: (path / seal.MANIFEST).unlink(),
    "cannot read its manifest.json": manifest('{"fi'),
    "cannot read its manifest.json (": manifest("[]"),
    "Expected `object`, got `array` - at `$.files`": manifest('{"files": [], "checksum": 0}'),
    "Expected `int`, got `str`": manifest('{"files": {"state.json": ["x", 1]}, "checksum": 0}'),
    "(maximum recursion depth": manifest('{"x": ' + "[" * 100_000),
    "has lost or changed entries": lose_an_entry,
    "its manifest.json has lost or changed": manifest('{"files": {}, "checksum": 0}'),
    "an earlier version of rlcore": manifest('{"files": {"state.json": [1, 1]}}'),
    "which is outside of the checkpoint": name_a_file_outside,
    "is a named pipe, not a file": make_a_pipe,
}


@pytest.mark.parametrize("said", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path: Path, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_with(tmp_path, [2, 4])
    DAMAGES[said](tmp_path / "checkpoints" / "step_000004")
    with caplog.at_level("ERROR", logger="rlcore"):
        chosen = run.choose()
    assert chosen == tmp_path / "checkpoints" / "step_000002"
    assert said in caplog.text and "step_000004 is damaged" in caplog.text
    run.cfg.run.resume = str(tmp_path / "checkpoints" / "step_000004")
    with pytest.raises(ValueError, match="cannot resume from this checkpoint"):
        run.choose()


def test_a_checkpoint_that_everybody_can_write_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, path = run_with(tmp_path, [2]), tmp_path / "checkpoints" / "step_000002"
    for mode, warned in ((0o755, False), (0o757, True)):
        path.chmod(mode)
        with caplog.at_level("WARNING", logger="rlcore"):
            assert run.choose() == path
        assert ("is writable by every user" in caplog.text) == warned


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew_in_silence(
    tmp_path: Path,
) -> None:
    run = run_with(tmp_path, [2, 4])
    for step in (2, 4):
        cut(tmp_path / "checkpoints" / f"step_{step:06d}")
    with pytest.raises(ValueError, match="none of the 2 checkpoints .* fresh moves them aside"):
        run.choose()
    run.cfg.run.resume = "fresh"
    assert run.choose() is None


def test_going_back_to_an_older_checkpoint_sets_the_later_ones_aside(tmp_path: Path) -> None:
    """They are another course of the run: `auto` would go on with them, and pruning by number would
    delete what is written from here on."""
    run = run_with(tmp_path, [2, 6, 8])
    go_on(run, tmp_path / "checkpoints" / "step_000002")
    assert names(tmp_path) == ["step_000002", "step_000006.old1", "step_000008.old1"]
    assert run.choose() == tmp_path / "checkpoints" / "step_000002"
    kept = (tmp_path / "metrics.jsonl.old1").read_text()
    assert kept == (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "checkpoints" / "step_000003").mkdir()
    run.prune()
    assert "step_000003" in names(tmp_path)


def test_what_a_killed_save_left_goes_with_the_next_save_or_start(tmp_path: Path) -> None:
    """A save at SIGTERM has a step of its own, which no later save may have again."""
    run = replace(run_with(tmp_path, [2]), learner=None)
    left = tmp_path / "checkpoints" / "step_000005.partial"
    (left / "learner").mkdir(parents=True)
    progress = Progress()
    progress.begin(6)
    with pytest.raises(AssertionError):  # the run has no data, which comes last
        run.save(progress, None)
    assert names(tmp_path) == ["step_000002", "step_000006.partial"]
    aside = resume.move_aside(tmp_path)
    assert aside is not None and names(aside) == ["step_000002"]


def test_sizes_of_engines_go_on_and_a_checkpoint_without_them_changes_none(tmp_path: Path) -> None:
    run, path = run_with(tmp_path, [2]), tmp_path / "checkpoints" / "step_000002"
    policy = TPPlanner(1, 4)
    run = replace(run, sizes=policy)
    go_on(run, path)
    assert policy.size("long") == 1
    before = TPPlanner(4, 4)
    before.after("long", 3)
    state = json.loads((path / "state.json").read_text())
    for name, size in (("FixedSizes", 1), ("TPPlanner", 4)):
        (path / "state.json").write_text(json.dumps(state | {"sizes": {name: before.state()}}))
        go_on(run, path)
        assert policy.size("long") == size


def test_an_old_checkpoint_that_cannot_be_deleted_ends_no_run(tmp_path, monkeypatch, caplog):
    """Somebody reads it over NFS; the next save tries again."""
    run, remove = run_with(tmp_path, [1, 2, 3, 4]), resume.shutil.rmtree

    def busy(path, **keys):
        if path.name == "step_000002":
            raise OSError(39, "Directory not empty", str(path))
        remove(path, **keys)

    monkeypatch.setattr(resume.shutil, "rmtree", busy)
    run.prune()
    assert [p.name for p in resume.found(tmp_path)] == ["step_000004", "step_000003", "step_000002"]
    assert "cannot delete an old checkpoint" in caplog.text
    monkeypatch.undo()
    run.prune()
    assert [p.name for p in resume.found(tmp_path)] == ["step_000004", "step_000003"]


class FakeLearner:
    """Writes one file, as one rank does."""

    def __init__(self) -> None:
        self.begun: list[tuple[Path, Future[WrittenFiles]]] = []

    def save(self, path: Path) -> None:
        path.mkdir()
        (path / "weights").write_bytes(bytes(8))

    def save_async(self, path: Path, then: Callable[[WrittenFiles], None]) -> Future[WrittenFiles]:
        self.save(path)
        self.begun.append((path, Future()))
        self._then = then
        return self.begun[-1][1]

    def end_save(self, checksum: int | None = None) -> None:
        """As the thread of a learner does at its end."""
        path, future = self.begun[-1]
        if checksum is None:
            checksum = disk.checksum(path / "weights")
        written = WrittenFiles({"weights": checksum}, 1.5)
        self._then(written)
        future.set_result(written)


def saving(folder: Path, keep: int = 1, **more: object) -> Checkpoints:
    """A run that can save."""
    state = SimpleNamespace(state=lambda: {})
    run = run_with(folder, [], keep)
    return replace(run, learner=FakeLearner(), data=Data(order=state, source=state), **more)


def save(run: Checkpoints, step: int, accuracy: float | None = None) -> None:
    progress = Progress()
    progress.begin(step)
    run.save(progress, None, accuracy)


@pytest.mark.parametrize(
    ("keep_best", "accuracies", "kept"),
    [
        (True, [0.2, 0.5, None, 0.5, 0.3, None], [4, 6]),  # of equals the newest
        (True, [None] * 6, [6]),
        (True, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [6]),
        (True, [0.9, 0.2, 0.3, 0.4, float("nan"), 0.6], [1, 6]),
        (False, [0.9, 0.2, 0.3, 0.4, 0.5, 0.6], [6]),
    ],
)
def test_the_newest_and_the_best_checkpoint_are_kept(
    tmp_path: Path, keep_best: bool, accuracies: list[float | None], kept: list[int]
) -> None:
    run = saving(tmp_path)
    run.cfg.checkpoint.keep_best = keep_best
    for step, accuracy in enumerate(accuracies, 1):
        save(run, step, accuracy)
    assert names(tmp_path) == [f"step_{step:06d}" for step in kept]


def test_all_of_a_checkpoint_is_on_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of power then leaves a whole checkpoint or none."""
    calls: list[tuple[str, str]] = []
    flush, rename = os.fsync, os.replace

    def fsync(fd: int) -> None:
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))
        flush(fd)

    def replace_(old: Path, new: Path) -> None:
        calls.append(("rename", str(new)))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace_)
    save(saving(tmp_path), 3)
    folder = tmp_path / "checkpoints" / "step_000003"
    at = calls.index(("rename", str(folder)))
    before = {path for kind, path in calls[:at] if kind == "fsync"}
    wanted = {folder, *folder.rglob("*")}
    aside = str(folder) + ".partial"
    assert before >= {str(path).replace(str(folder), aside) for path in wanted}
    assert calls[at + 1] == ("fsync", str(folder.parent))


# ---- asynchronous saves


def begun(folder: Path, on_error: str = "stop") -> tuple[Checkpoints, Progress, FakeLearner]:
    """A run with a checkpoint of step 2 that is being written, after one of step 1."""
    run = saving(folder, keep=2)
    run.cfg.checkpoint.on_error = on_error
    save(run, 1)
    run.async_save = True
    progress = Progress()
    progress.begin(2)
    assert run.save(progress, None) is None
    assert isinstance(run.learner, FakeLearner)
    return run, progress, run.learner


def test_a_checkpoint_counts_once_it_is_written(tmp_path: Path) -> None:
    run, progress, learner = begun(tmp_path)
    assert run.finalize(progress, wait=False) is None
    assert [path.name for path in resume.found(tmp_path)] == ["step_000001"]
    progress.begin(3)
    learner.end_save()
    saved = run.finalize(progress, wait=True)
    assert saved is not None and resume.step_of(saved) == 2
    assert not seal.fault(saved, None)
    assert progress.take() == {"timing_s/write_checkpoint": 1.5}
    assert names(tmp_path) == ["step_000001", "step_000002"]
    assert sorted(p.name for p in saved.iterdir()) == ["learner", "manifest.json", "state.json"]
    assert run.finalize(progress, wait=True) is None
    run.close()


def test_a_checkpoint_is_complete_without_the_next_step(tmp_path: Path) -> None:
    """The run may fail or be killed in it."""
    run, _, learner = begun(tmp_path)
    learner.end_save()
    run.close()  # all that a failed run does
    chosen = saving(tmp_path, keep=2).choose()
    assert chosen is not None and chosen.name == "step_000002"


def test_a_failed_run_does_not_wait_long_for_its_checkpoint(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(resume, "CLOSE_S", 0.1)
    run, _, _ = begun(tmp_path)
    run.close()
    assert "checkpoint of step 2: not written in 0.1 s" in caplog.text
    chosen = saving(tmp_path, keep=2).choose()
    assert chosen is not None and chosen.name == "step_000001"


@pytest.mark.parametrize("stops", [False, True])
def test_the_last_step_is_saved_synchronously(tmp_path: Path, stops: bool) -> None:
    run = saving(tmp_path, keep=2, async_save=True)
    progress = Progress()
    progress.begin(1 if stops else run.cfg.run.steps)
    if stops:
        progress.stop(is_complete=False)
    assert run.save(progress, None) is not None and not run.is_pending


def test_without_memory_for_the_copy_training_waits_for_checkpoints(tmp_path, caplog) -> None:
    class Small(FakeLearner):
        def save_async(self, *_: object) -> Future[WrittenFiles]:
            raise MemoryError("no host memory for a copy of 9.0 GB")

    run = replace(saving(tmp_path, keep=2, async_save=True), learner=Small())
    for step in (1, 2):
        save(run, step)
    assert names(tmp_path) == ["step_000001", "step_000002"]
    assert caplog.text.count("no host memory for a copy of 9.0 GB") == 1


def test_the_folder_stays_until_the_thread_is_done_with_it(tmp_path: Path) -> None:
    """The critic fails after the learner's thread has begun."""

    class Slow(FakeLearner):
        def save_async(
            self, path: Path, then: Callable[[WrittenFiles], None]
        ) -> Future[WrittenFiles]:
            future = super().save_async(path, then)
            threading.Timer(0.2, self.write_more).start()
            return future

        def write_more(self) -> None:
            (self.begun[-1][0] / "more").write_bytes(bytes(8))
            self.end_save()

    class Failing(FakeLearner):
        def save_async(self, *_: object) -> Future[WrittenFiles]:
            raise OSError(28, "No space left on device")

    run = replace(saving(tmp_path, async_save=True), learner=Slow(), critic=Failing())
    run.cfg.checkpoint.on_error = "continue"
    save(run, 1)
    assert run.learner.begun[-1][1].exception(0) is None
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_the_checksums_of_the_thread_seal_its_files(tmp_path: Path) -> None:
    """The files are not read again."""
    run, progress, learner = begun(tmp_path)
    learner.end_save(checksum=7)
    saved = run.finalize(progress, wait=True)
    assert saved is not None and "learner/weights has a wrong checksum" in seal.fault(saved, None)


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_file_that_rank_0_does_not_see_as_it_was_written_is_an_error(
    tmp_path: Path, is_gone: bool
) -> None:
    folder = tmp_path / "x"
    (folder / "learner").mkdir(parents=True)
    file = folder / "learner" / "weights"
    file.write_bytes(bytes(8))
    seal.leave_list(folder, "learner", 0, {"weights": 0})
    if is_gone:
        file.unlink()
    else:
        file.write_bytes(bytes(7))
    with pytest.raises(OSError, match="is missing" if is_gone else "has 7 of 8 bytes"):
        seal.write_from_lists(folder, 1, threading.Event())


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path: Path) -> None:
    run, _, _ = begun(tmp_path)
    again = saving(tmp_path, keep=2)
    chosen = again.choose()
    assert chosen is not None and chosen.name == "step_000001"
    save(again, 2)
    assert names(tmp_path) == ["step_000001", "step_000002"]


def test_an_error_of_the_thread_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    run, progress, learner = begun(tmp_path)
    learner.begun[-1][1].set_exception(OSError(28, "No space left on device"))
    progress.begin(3)
    with pytest.raises(RuntimeError, match="of step 2 could not be written .*the disk is full"):
        run.finalize(progress, wait=False)
    assert names(tmp_path) == ["step_000001"]


def test_an_error_of_the_thread_is_counted_where_the_run_shall_go_on(tmp_path: Path) -> None:
    run, progress, learner = begun(tmp_path, "continue")
    learner.begun[-1][1].set_exception(OSError(5, "Input/output error"))
    progress.begin(3)
    assert run.finalize(progress, wait=False) is None
    assert progress.take()["training/failed_saves"] == 1
    assert names(tmp_path) == ["step_000001"]
    assert not run.is_pending

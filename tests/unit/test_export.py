"""`rlcore export`: the folder is the one that the run itself exports; errors are sentences."""

import filecmp
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rlcore.cli import export
from tests import kit, runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    model = runs.tiny_model(folder / "model")
    keys = "--run.steps", 2, "--checkpoint.every", 1, "--model.dtype", "bfloat16"
    job: runs.Job = {"name": "run", "argv": runs.arguments(model, folder, "run", *keys)}
    runs.run(1, [job], folder / "gang").check("run")
    return folder / "run"


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trains adapters of a random model, with a reference."""
    folder = tmp_path_factory.mktemp("adapted")
    model = runs.tiny_model(folder / "model")
    keys = "--run.steps", 2, "--lora.rank", 4, "--train.lr", "1e-2", "--algo.kl_coef", "0.1"
    job: runs.Job = {"name": "run", "argv": runs.arguments(model, folder, "run", *keys)}
    runs.run(1, [job], folder / "gang").check("run")
    return folder / "run"


def same(left: Path, right: Path) -> bool:
    files = [sorted(path.name for path in folder.iterdir()) for folder in (left, right)]
    return files[0] == files[1] and not filecmp.cmpfiles(left, right, files[0], shallow=False)[1]


def test_the_newest_checkpoint_is_the_folder_that_the_run_wrote(run: Path, tmp_path: Path) -> None:
    assert export.main([str(run), "--out", str(tmp_path / "hf")]) == 0
    assert same(run / "hf", tmp_path / "hf")


def test_an_earlier_step_and_another_data_type(run: Path, tmp_path: Path) -> None:
    first, last = tmp_path / "first", tmp_path / "last"
    assert export.main([str(run), "--step", "1", "--out", str(first)]) == 0
    assert not same(run / "hf", first)
    folder = run / "checkpoints/step_000002"
    assert export.main([str(folder), "--dtype", "float32", "--out", str(last)]) == 0
    assert (last / "model.safetensors").stat().st_size > 1.9 * (
        run / "hf/model.safetensors"
    ).stat().st_size


def test_a_run_with_adapters_is_exported_in_both_forms(adapted: Path, tmp_path: Path) -> None:
    merged, adapters = tmp_path / "hf", tmp_path / "adapters"
    assert export.main([str(adapted), "--out", str(merged)]) == 0
    assert export.main([str(adapted), "--adapters", "--out", str(adapters)]) == 0
    assert same(adapted / "hf", merged) and same(adapted / "adapters", adapters)
    assert {path.name for path in adapters.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    trained = load_file(adapters / "adapter_model.safetensors")
    assert all(tensor.abs().max() > 0 for tensor in trained.values())
    sizes = [f.stat().st_size for f in (adapted / "checkpoints").rglob("rank*.safetensors")]
    assert 0 < sum(sizes) < (merged / "model.safetensors").stat().st_size


@pytest.mark.parametrize("words", [[], ["--adapters"]])
def test_an_export_replaces_only_one_of_its_kind(
    adapted: Path, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    own, other = ("adapters", "hf") if words else ("hf", "adapters")
    out, foreign = tmp_path / own, tmp_path / "foreign"
    backup = tmp_path / f"{own}.old/file"
    shutil.copytree(adapted / own, out)
    for file in (foreign / "notes.txt", backup):
        file.parent.mkdir()
        file.touch()
    assert export.main([str(adapted), *words, "--out", str(out)]) == 0
    assert same(adapted / own, out)
    capsys.readouterr()
    model = adapted.parent / "model"
    for folder in (foreign, adapted, adapted.parent, adapted / other, model):
        before = sorted(folder.rglob("*"))
        assert export.main([str(adapted), *words, "--out", str(folder)]) == 2
        assert capsys.readouterr().err.count(str(folder)) == 1
        assert sorted(folder.rglob("*")) == before
    assert backup.exists()


@pytest.mark.ranks(2)
def test_several_processes_export_adapters(adapted: Path, tmp_path: Path) -> None:
    args = {"run": str(adapted), "out": str(tmp_path / "adapters")}
    kit.run_ranks(2, "tests.unit.test_export:write_adapters", args, timeout_s=50)
    assert same(adapted / "adapters", tmp_path / "adapters")


def write_adapters(rank: int, run: str, out: str) -> None:
    export.export_adapters(export.source_of(Path(run), None, ""), Path(out), "float32")


def test_adapters_of_a_run_without_are_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export.main([str(run), "--adapters"]) == 2
    assert "--adapters: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--step", "7"], "has no such checkpoint; it has 1, 2"),
        (["--model", "/missing"], "--model /missing: no such folder"),
    ],
)
def test_an_error_says_what_to_give(
    run: Path, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export.main([str(run), *words]) == 2
    assert text in capsys.readouterr().err


def test_a_changed_checkpoint_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = next((run / "checkpoints/step_000001/learner").glob("*.safetensors"))
    data = file.read_bytes()
    try:
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert export.main([str(run), "--step", "1", "--out", str(tmp_path / "hf")]) == 2
    finally:
        file.write_bytes(data)
    assert "has a wrong checksum; choose another checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()

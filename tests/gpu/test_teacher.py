"""A teacher on a GPU: the bits of a resident model when its layers stream, no memory afterwards."""

from pathlib import Path

import pytest
import torch

from rlcore.data import label_task
from rlcore.hf.tokenizer import make_char_tokenizer
from rlcore.teacher.model import TeacherModel
from rlcore.teacher.scores import TeacherRow, TeacherScores
from tests import runs
from tests.gpu import side
from tests.kit import tiny_hf_folder

pytestmark = pytest.mark.gpu

LAYERS = 7
CPU = torch.device("cpu")


def rows() -> list[TeacherRow]:
    g = torch.Generator().manual_seed(1)
    return [
        TeacherRow(torch.randint(0, 53, (n,), generator=g), torch.arange(n) > n // 3)
        for n in (90, 17, 60, 90)
    ]


def scored(folder: Path, device: torch.device, dtype: str, ratio: float) -> list[TeacherScores]:
    model = TeacherModel(
        folder,
        dtype=getattr(torch, dtype),
        device=device,
        vocab_size=53,
        temperature=0.8,
        top_k=6,
        batch_tokens=200,
        resident_ratio=ratio,
    )
    for _ in range(2):  # the second pass finds copies in host memory
        with model.loaded():
            found = model.score(rows())
    model.close()
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_streamed_layers_give_the_bits_of_resident_ones(dtype: str, tmp_path: Path) -> None:
    folder = tiny_hf_folder(tmp_path / "m", num_hidden_layers=LAYERS, hidden_size=256)
    want = scored(folder, side.DEVICE, dtype, 1.0)
    for ratio in (0.5, 0.0):
        for ours, theirs in zip(scored(folder, side.DEVICE, dtype, ratio), want, strict=True):
            assert torch.equal(ours.log_probs, theirs.log_probs)
            assert torch.equal(ours.top_ids, theirs.top_ids)
    if dtype == "float32":
        for ours, theirs in zip(want, scored(folder, CPU, dtype, 1.0), strict=True):
            assert torch.allclose(ours.log_probs, theirs.log_probs, atol=1e-3)
            assert torch.allclose(ours.top_log_probs, theirs.top_log_probs, atol=1e-3)


@side.needs_gpu
def test_a_teacher_holds_the_gpu_only_while_it_scores(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 1024}
    folder = tiny_hf_folder(tmp_path / "m", num_hidden_layers=LAYERS, **sizes)
    scored(folder, side.DEVICE, "float32", 1.0)  # workspaces of products stay
    before = torch.cuda.memory_reserved(side.DEVICE)
    scored(folder, side.DEVICE, "float32", 1.0)
    assert torch.cuda.memory_reserved(side.DEVICE) - before < 1e6  # a layer has 20 MB


@pytest.mark.parametrize("algo", ["opd", "gkd"])
def test_a_run_learns_from_a_teacher_on_its_own_gpu(algo: str, tmp_path: Path) -> None:
    runs.tiny_model(tmp_path / "model")
    path = tiny_hf_folder(
        tmp_path / "teacher",
        vocab_size=len(label_task.VOCAB),
        num_hidden_layers=LAYERS,
        max_position_embeddings=256,
    )
    make_char_tokenizer(path, label_task.CHARS)
    words = "--algo", algo, "--teacher.models", path, "--run.steps", 2
    if algo == "gkd":
        words += ("--teacher.top_k", 6)
    side.train(tmp_path, algo, *side.OFFLOAD, *words)
    found = runs.rows(tmp_path / "runs" / algo)
    for step in (1, 2):
        assert abs(found[step]["actor/teacher_kl"]) > 0 and found[step]["actor/skipped"] == 0

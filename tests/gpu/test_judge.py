"""The judge's layers on a GPU: copies by a stream of their own, and the same bits."""

import shutil
from pathlib import Path

import pytest
import torch

from rlcore.cli import judge
from rlcore.data import label_task
from rlcore.hf import layer_pipeline as pipeline
from rlcore.hf.tokenizer import make_char_tokenizer
from rlcore.rewards.judge import mps
from rlcore.rewards.judge.model import JudgeModel
from rlcore.rewards.judge.residency import STEADY
from tests import runs
from tests.gpu import side
from tests.kit import ARCHS, tiny_hf_folder

pytestmark = pytest.mark.gpu

LAYERS = 9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ARCHS)
def test_layers_that_stream_from_pinned_memory_give_the_bits_of_a_resident_model(
    arch: str, dtype: str, tmp_path: Path
):
    folder = tiny_hf_folder(tmp_path / "m", arch, num_hidden_layers=LAYERS, hidden_size=256)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 53, (n,), generator=generator).tolist() for n in (90, 17, 60)]
    found = []
    for ratio in (1.0, 0.5, 0.0):
        model = JudgeModel(folder, dtype=dtype, device=side.DEVICE, resident_ratio=ratio)
        for _ in range(5):  # a copy that came too early or too late would show in one of them
            found.append((model.probabilities(rows, range(53)), model.generate(rows, 5, ())))
        model.close()
    for probabilities, tokens in found[1:]:
        assert torch.equal(probabilities, found[0][0]) and tokens == found[0][1]


@side.needs_gpu
def test_layers_leave_the_gpu_when_others_need_it_and_come_back_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # torch returns blocks below 10 MB only as segments of 20 MB, so a layer has 13 MB.
    sizes = {"hidden_size": 1024, "intermediate_size": 1024}
    folder = tiny_hf_folder(tmp_path / "m", num_hidden_layers=LAYERS, **sizes)
    free = 1e9
    model = JudgeModel(
        folder, dtype="float32", device=side.DEVICE, resident_ratio=1.0, free=lambda: free
    )
    model.load_layers(0)
    monkeypatch.setattr(pipeline, "read_layer", None)
    before = model.probabilities([[1, 2, 3]], range(53))
    full = torch.cuda.memory_reserved(side.DEVICE)
    free = -1e9
    after = model.probabilities([[1, 2, 3]], range(53))
    assert model.last.streamed_layers == LAYERS and torch.equal(before, after)
    assert torch.cuda.memory_reserved(side.DEVICE) < full
    free = 1e9
    for number in range(STEADY):
        again = model.probabilities([[1, 2, 3]], range(53))
        assert model.last.streamed_layers == (LAYERS if number + 1 < STEADY else 0)
        assert torch.equal(before, again)
    model.close()


@pytest.mark.parametrize("use", ["off", "on"])
def test_a_run_is_judged_on_its_own_gpu_with_and_without_mps(use: str, tmp_path: Path):
    if use == "on" and shutil.which(mps.CONTROL) is None:
        pytest.skip(f"{mps.CONTROL} is not on PATH")
    runs.tiny_model(tmp_path / "model")
    path = tiny_hf_folder(
        tmp_path / "judge", vocab_size=len(label_task.VOCAB), num_hidden_layers=LAYERS
    )
    make_char_tokenizer(path, label_task.CHARS)
    (path / "rubric.jinja").write_text(judge.RUBRIC)
    keys = {"model": path, "rubric": path / "rubric.jinja", "good": "*", "bad": "-", "mps": use}
    words = [word for name, value in keys.items() for word in (f"--reward.{name}", value)]
    said = side.train(
        tmp_path, "judged", *side.OFFLOAD, "--reward", "judge", *words, "--run.steps", 2
    )
    assert f"prefill, on {side.DEVICE.type}" in said and ("MPS: " in said) == (use == "on")
    rows = runs.rows(tmp_path / "runs" / "judged")
    for step in (1, 2):
        assert 0 < rows[step]["critic/score/min"] < rows[step]["critic/score/max"] < 1
        assert rows[step]["reward/errors"] == 0

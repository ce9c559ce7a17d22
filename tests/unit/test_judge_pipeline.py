"""The judge's layers: which stay, which stream, and that nobody sees it in the numbers.

Not covered: the copies on CUDA.
"""

from pathlib import Path

import pytest
import torch

from rlcore.hf import layer_pipeline as pipeline
from rlcore.hf.config import HFConfig
from rlcore.hf.residency import (
    SLOTS,
    ModelSizes,
    most_resident,
    num_resident,
    sizes_of,
    spread,
    work_bytes,
)
from rlcore.hf.weights import WeightReader, drop_pages
from rlcore.rewards.judge.config import JudgeRewardConfig
from rlcore.rewards.judge.model import JudgeModel
from rlcore.rewards.judge.residency import STEADY, footprint, host_growth
from rlcore.utils import host_room
from tests.kit import ARCHS, tiny_hf_folder

CPU = torch.device("cpu")
LAYERS = 7


def rows_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 53, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("arch", ARCHS)
def test_a_model_whose_layers_stream_gives_the_bits_of_one_that_is_here(arch, tmp_path):
    folder = tiny_hf_folder(tmp_path / "m", arch, num_hidden_layers=LAYERS)
    rows, found = rows_of(5, 17, 9), []
    for ratio, overlap in ((1.0, True), (0.5, True), (0.0, True), (0.8, True), (0.5, False)):
        model = JudgeModel(
            folder, dtype="float32", device=CPU, resident_ratio=ratio, overlap=overlap
        )
        for _ in range(2):  # the second finds its first streamed layers on their way
            found.append((model.probabilities(rows, range(53)), model.generate(rows, 5, ())))
        assert model.last.streamed_layers == LAYERS - most_resident(LAYERS, ratio)
        assert model.last.prefill_tokens == 31
        model.close()
    for probabilities, tokens in found[1:]:
        assert torch.equal(probabilities, found[0][0]) and tokens == found[0][1]
    assert found[0][0].sum(-1) == pytest.approx([1.0] * 3, abs=1e-5)


def test_the_judge_computes_what_transformers_does(tmp_path):
    """Other architectures: test_torch_engine_model.py, it is the same forward."""
    from transformers import AutoModelForCausalLM

    folder = tiny_hf_folder(tmp_path / "m", "qwen3")
    model = JudgeModel(folder, dtype="float32", device=CPU, resident_ratio=0.5)
    oracle = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    rows = rows_of(5, 17)
    found, wrote = model.probabilities(rows, range(53)), model.generate(rows, 4, ())
    model.close()
    for row, ours, tokens in zip(rows, found, wrote, strict=True):
        with torch.no_grad():
            theirs = oracle(torch.tensor([row])).logits[0, -1].softmax(-1)
            all_ids = oracle.generate(
                torch.tensor([row]),
                max_new_tokens=4,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
        assert tokens == all_ids[0, len(row) :].tolist()


def test_layers_leave_and_come_back_between_batches_as_memory_does(tmp_path):
    folder = tiny_hf_folder(tmp_path / "m", num_hidden_layers=LAYERS)
    hf = HFConfig.from_folder(folder)
    sizes, rows = sizes_of(hf, torch.float32), rows_of(5, 9)
    work = work_bytes(hf, torch.float32, 2, 9)

    def free() -> float:  # what others leave, less what the judge has taken already
        return others - model.layers.num_buffers * sizes.layer

    model = JudgeModel(folder, dtype="float32", device=CPU, resident_ratio=1.0, free=free)
    seen, results = [], []
    for held, batches in ((9.5, 1), (6.5, 1), (3.5, 1), (2.5, 1), (6.5, STEADY), (9.5, STEADY)):
        others = held * sizes.layer + work
        for _ in range(batches):
            results.append(model.probabilities(rows, range(53)))
            seen.append((model.layers.num_resident, model.layers.num_buffers))
    model.close()
    down, up = [(7, 7), (4, 6), (1, 3), (0, 2)], STEADY - 1
    assert seen == [*down, *[(0, 2)] * up, (4, 6), *[(4, 6)] * up, (7, 7)]
    assert all(torch.equal(r, results[0]) for r in results)


def test_memory_that_changes_by_one_layer_from_batch_to_batch_moves_one_layer_once(tmp_path):
    folder = tiny_hf_folder(tmp_path / "m", num_hidden_layers=LAYERS)
    hf = HFConfig.from_folder(folder)
    sizes, rows, seen = sizes_of(hf, torch.float32), rows_of(5, 9), []
    work, held = work_bytes(hf, torch.float32, 2, 9), 0.0

    def free() -> float:
        return held * sizes.layer + work - model.layers.num_buffers * sizes.layer

    model = JudgeModel(folder, dtype="float32", device=CPU, resident_ratio=1.0, free=free)
    for number in range(3 * STEADY):
        held = (6.5, 5.5)[number % 2]
        model.probabilities(rows, range(53))
        seen.append(model.layers.num_resident)
    model.close()
    assert seen == [4] + [3] * (3 * STEADY - 1)


def test_a_layer_is_read_from_its_files_once_and_its_host_copy_stays(tmp_path, monkeypatch):
    """The carrier of CUDA on the CPU, whose streams have no effect. The plan has the bytes of its
    host memory."""
    monkeypatch.setattr(host_room, "BLOCK", 1000)
    folder = tiny_hf_folder(tmp_path / "m", num_hidden_layers=LAYERS)
    hf, reader, read = HFConfig.from_folder(folder), WeightReader(folder), []
    expected = [pipeline.Buffer(hf, torch.float32, CPU) for _ in range(LAYERS)]
    for number, buffer in enumerate(expected):
        pipeline.read_layer(reader, number, buffer, read.append)
    once = sum(read)
    read.clear()
    carrier = pipeline.PinnedCarrier(reader, CPU, read.append)
    layers = pipeline.LayerPipeline(hf, torch.float32, CPU, carrier)
    layers.set_resident(4)
    layers.load()
    assert sum(read) == once
    cfg = JudgeRewardConfig(model=str(folder), dtype="float32", resident_ratio=4 / LAYERS)
    layer = sizes_of(hf, torch.float32).layer
    assert layer % 1000
    assert carrier.host_bytes == footprint(cfg, hf).host == -(-3 * layer // 1000) * 1000
    read.clear()
    for resident in (4, 6, 0, 2, 7, 1):
        layers.set_resident(resident)
        for _ in range(2):
            for number, (found, buffer) in enumerate(zip(layers, expected, strict=True)):
                for name in ("qkv", "gate_up", "down", "norm1"):
                    assert torch.equal(getattr(found, name), getattr(buffer.layer(number), name))
    assert not read
    assert carrier.host_bytes == -(-LAYERS * layer // 1000) * 1000
    assert carrier.host_bytes - footprint(cfg, hf).host <= host_growth(cfg, hf, "cuda", 4)
    layers.close()
    assert carrier.host_bytes == 0


@pytest.mark.parametrize("fit", [0, 1])
def test_a_change_that_memory_ended_in_the_middle_leaves_the_pipeline_in_order(
    fit, tmp_path, monkeypatch
):
    folder = tiny_hf_folder(tmp_path / "m", num_hidden_layers=LAYERS)
    model = JudgeModel(folder, dtype="float32", device=CPU, resident_ratio=1.0)
    rows = rows_of(6)
    before = model.probabilities(rows, range(53))
    model.shrink()
    make, made = pipeline.Buffer, []

    def no_more(*args):
        made.append(args)
        if len(made) > fit:
            raise torch.OutOfMemoryError("no room")
        return make(*args)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "Buffer", no_more)
        with pytest.raises(torch.OutOfMemoryError):
            model.layers.set_resident(3)
    model.shrink()
    assert model.layers.num_resident == 0
    assert torch.equal(model.probabilities(rows, range(53)), before)
    model.close()


def test_a_forward_that_was_given_up_leaves_the_pipeline_in_order(tmp_path):
    folder = tiny_hf_folder(tmp_path / "m", num_hidden_layers=LAYERS)
    model = JudgeModel(folder, dtype="float32", device=CPU, resident_ratio=0.3)
    rows = rows_of(6)
    before = model.probabilities(rows, range(53))
    half = iter(model.layers)
    for _ in range(4):
        next(half)
    half.close()
    assert torch.equal(model.probabilities(rows, range(53)), before)
    model.close()


def test_what_stays_is_spread_evenly_and_one_more_that_leaves_moves_no_other():
    assert spread(8) == [0, 4, 2, 6, 1, 5, 3, 7]
    for layers in (1, 5, 28, 36):
        order = spread(layers)
        assert sorted(order) == list(range(layers))
        half = sorted(order[: layers // 2])
        gaps = [b - a for a, b in zip(half, half[1:], strict=False)]
        assert max(gaps, default=0) <= 4


@pytest.mark.parametrize(
    "ratio, fits, stay",
    [
        (1.0, 10, 10),  # all, and no slots
        (1.0, 9, 9 - SLOTS),
        (0.5, 100, 5),
        (0.5, 10, 5),
        (0.5, 6, 4),
        (0.45, 100, 5),  # ceil
        (0.0, 100, 0),
        (1.0, 1, 0),
    ],
)
def test_layers_stay_as_far_as_ratio_and_memory_go(ratio, fits, stay):
    sizes = ModelSizes(num_layers=10, layer=1000, outer=0)
    assert num_resident(sizes, ratio, fits * 1000 / 0.97) == stay


def test_pages_of_a_tensor_that_was_read_leave_this_process(tmp_path: Path):
    folder = tiny_hf_folder(tmp_path / "m", vocab_size=1 << 14, hidden_size=256)
    reader = WeightReader(folder)

    def mapped_kb() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssFile"))

    reader.get("model.norm.weight").sum()  # the code's own pages are read now
    before = mapped_kb()
    tensor = reader.get("model.embed_tokens.weight")
    total = tensor.sum()
    assert mapped_kb() - before > 15 << 10  # it has 16 MiB
    drop_pages(tensor)
    assert mapped_kb() - before < 1 << 10
    assert tensor.sum() == total  # from the file again

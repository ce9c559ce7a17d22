"""What the pretend device notices. test_device.py runs this file where there is such a device."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.mcore.memory import HostRoom
from rlcore.rewards.judge.model import JudgeModel
from rlcore.utils import buckets
from tests import pretend
from tests.kit import tiny_hf_folder

CUDA = torch.device("cuda")
RACE = "no wait orders them"


@pytest.fixture(autouse=True)
def idle():
    """No test sees accesses or copies of the one before."""
    torch.cuda.synchronize()


def ramp(count: int = 100) -> torch.Tensor:
    return torch.arange(float(count), device=CUDA)


# ---- numbers and devices


def test_results_and_gradients_are_those_of_the_cpu() -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for device in ("cpu", "cuda"):
        leaf = x.clone().to(device).requires_grad_()
        out = torch.nn.functional.silu(leaf @ leaf.T).softmax(-1)
        out.square().sum().backward()
        assert out.device.type == leaf.grad.device.type == device
        found.append((out.detach().cpu(), leaf.grad.cpu()))
    torch.testing.assert_close(found[1], found[0])  # blocks of a product differ by alignment


def test_tensors_of_different_devices_do_not_meet() -> None:
    for other in (torch.ones(100), torch.ones(100, device="cuda:1")):
        with pytest.raises(RuntimeError, match="same device"):
            ramp() + other
        with pytest.raises(RuntimeError, match="same device"):
            torch.cat([ramp(), other])
    assert (ramp() + torch.tensor(1.0))[torch.tensor([3])].item() == 4  # as a GPU allows


def test_a_cpu_generator_gives_the_device_no_numbers() -> None:
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
        torch.randn(3, device=CUDA, generator=torch.Generator())
    ours = torch.Generator(device=CUDA).manual_seed(3)
    state = ours.get_state()
    first = torch.rand(5, device=CUDA, generator=ours)
    ours.set_state(state)
    assert torch.equal(torch.rand(5, device=CUDA, generator=ours), first)


def test_the_host_reads_no_device_memory() -> None:
    with pytest.raises(TypeError, match="can't convert cuda"):
        ramp().numpy()


def test_memory_that_is_not_written_is_nan() -> None:
    assert torch.empty(5, device=CUDA).isnan().all()
    assert (torch.empty(5, dtype=torch.int64, device=CUDA) == -1).all()


def test_views_stay_views_when_storage_is_emptied_and_filled() -> None:
    flat = ramp()
    part = flat[10:20].view(2, 5)
    flat.untyped_storage().resize_(0)
    assert part.untyped_storage().nbytes() == 0
    flat.untyped_storage().resize_(400)
    flat.fill_(3)
    assert (part == 3).all()


def test_memory_is_counted_and_ends() -> None:
    before = pretend.stats()
    held = torch.empty(1_000_000, dtype=torch.uint8, device=CUDA)
    assert pretend.stats()["allocated"] - before["allocated"] == 1_000_448  # in blocks of 512
    del held
    assert pretend.stats()["allocated"] == before["allocated"]
    assert torch.cuda.max_memory_allocated() >= before["allocated"] + 1_000_000
    pretend.reset_peak()
    assert torch.cuda.max_memory_allocated() == before["allocated"]
    with pytest.raises(torch.cuda.OutOfMemoryError, match="out of memory"):
        torch.empty(200_000_000_000, dtype=torch.uint8, device=CUDA)


def test_launches_syncs_and_bytes_are_counted() -> None:
    x, before = ramp(), pretend.stats()
    (x + 1).mul_(2)
    after = pretend.stats()
    assert after["launches"] - before["launches"] == 2 and after["syncs"] == before["syncs"]
    x.sum().item()
    x.cpu()
    assert pretend.stats()["syncs"] - before["syncs"] == 2
    assert pretend.stats()["bytes_to_host"] - before["bytes_to_host"] == 400


# ---- pinned memory


def test_a_pinned_copy_is_there_after_a_sync_and_not_before() -> None:
    host = torch.zeros(100, pin_memory=True)
    assert host.is_pinned()
    host.copy_(ramp(), non_blocking=True)
    assert host.isnan().all()
    torch.cuda.synchronize()
    assert torch.equal(host, ramp().cpu())


def test_pinned_memory_is_not_overwritten_before_a_sync() -> None:
    host = torch.zeros(100, pin_memory=True)
    there = host.to(CUDA, non_blocking=True)
    host[7] = 1
    with pytest.raises(RuntimeError, match="overwritten before its copy"):
        torch.cuda.synchronize()
    assert not there.any()


def test_host_room_that_is_reused_before_a_sync_is_found() -> None:
    room = HostRoom(block=256)
    first = ramp().view(torch.uint8)
    room.write([first])
    torch.cuda.synchronize()
    back = torch.empty_like(first)
    room.read([back])
    room.write([first + 1])  # on the same stream, after the copy of `read`
    torch.cuda.synchronize()
    room.read([back])
    with torch.cuda.stream(torch.cuda.Stream()):
        room.write([first + 2])  # the copy of `read` may still run
    with pytest.raises(RuntimeError, match="overwritten before its copy"):
        torch.cuda.synchronize()


def test_host_memory_comes_back_in_the_order_of_the_stream() -> None:
    host, back = torch.zeros(100, pin_memory=True), torch.zeros(100, device=CUDA)
    host.copy_(ramp(), non_blocking=True)
    back.copy_(host, non_blocking=True)
    assert torch.equal(back, ramp())


# ---- streams


def test_another_stream_waits_before_it_reads() -> None:
    x, side = ramp(), torch.cuda.Stream()
    with torch.cuda.stream(side), pytest.raises(RuntimeError, match=RACE):
        x + 1
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    with pytest.raises(RuntimeError, match=RACE):
        y.sum()
    torch.cuda.current_stream().wait_stream(side)
    assert y.sum().item() == 5050


def test_another_stream_waits_before_it_overwrites() -> None:
    x, side = ramp(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    x.sum()  # reads after what the other stream waits for
    with torch.cuda.stream(side), pytest.raises(RuntimeError, match=RACE):
        x.zero_()


def test_parts_of_one_buffer_do_not_wait_for_each_other() -> None:
    x, side = ramp(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x[:50].add_(1)
    x[50:].add_(1)
    with pytest.raises(RuntimeError, match=RACE):
        x[49:].add_(1)
    side.synchronize()


def test_an_event_orders_what_was_before_it_alone() -> None:
    x, y, side = ramp(), ramp(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
        event = side.record_event()
        y.add_(1)
    torch.cuda.current_stream().wait_event(event)
    x.sum()
    with pytest.raises(RuntimeError, match=RACE):
        y.sum()
    side.synchronize()
    assert y.sum().item() == 5050


def test_memory_of_another_stream_is_recorded_before_it_is_freed() -> None:
    side = torch.cuda.Stream()
    for recorded in (True, False):
        x = ramp()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.mul(2)
        if recorded:
            x.record_stream(side)
        del x
        if recorded:
            ramp()
    with pytest.raises(RuntimeError, match="record_stream"):
        ramp()


def test_gradients_follow_the_streams_of_the_forward() -> None:
    x, side = ramp().requires_grad_(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    torch.cuda.current_stream().wait_stream(side)
    y.sum().backward()
    assert (x.grad == 2).all()


@pytest.mark.parametrize("missing", ["", "wait_stream", "wait_event"])
def test_a_judge_whose_copies_wait_for_nothing_is_found(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_hf_folder(tmp_path / "m", num_hidden_layers=5)
    if missing:
        monkeypatch.setattr(torch.cuda.Stream, missing, lambda *_: None)

    def judge(resident: float = 0.0) -> torch.Tensor:
        place = torch.device("cuda:0")
        model = JudgeModel(folder, dtype="float32", device=place, resident_ratio=resident)
        try:
            return model.probabilities([[1, 2, 3]], range(53))
        finally:
            model.close()

    if not missing:
        assert torch.equal(judge(), judge(resident=1.0))
        return
    with pytest.raises(RuntimeError, match=RACE):
        judge()
    torch.cuda.synchronize()


# ---- handles of memory


def test_a_bucket_opens_in_another_process_and_a_closed_handle_is_stale() -> None:
    buffer = torch.arange(10_000, device=CUDA).view(torch.uint8)
    held = pretend.stats()["allocated"]
    payload = buckets.cuda_handle(buffer)
    ended, done = os.pipe()
    child = os.fork()  # torch refuses CUDA in a fork; the memory alone is read here
    if not child:
        from tests.pretend import device

        opened = device._native.open_shared(*device_handle(payload))
        os.write(done, bytes([int(opened.view(torch.int64).sum().item() == 49_995_000)]))
        del opened
        os._exit(0)
    assert os.read(ended, 1) == b"\1"
    os.waitpid(child, 0)
    with pytest.raises(RuntimeError, match="stale"):
        buckets.open_cuda(payload)
    payload = buckets.cuda_handle(buffer)
    del buffer
    assert pretend.stats()["allocated"] == held  # as long as somebody may read it
    there = buckets.open_cuda(payload)
    assert there.view(torch.int64)[-1].item() == 9_999
    del there
    torch.cuda.ipc_collect()
    assert pretend.stats()["allocated"] < held
    with pytest.raises(RuntimeError, match="stale"):
        buckets.open_cuda(payload)


def test_a_bucket_whose_handle_is_dropped_is_freed() -> None:
    before = pretend.stats()["allocated"]
    buffer = torch.zeros(10_000, dtype=torch.uint8, device=CUDA)
    payload = buckets.cuda_handle(buffer)
    del buffer
    torch.cuda.ipc_collect()
    assert pretend.stats()["allocated"] > before
    buckets.drop_cuda(payload)
    torch.cuda.ipc_collect()
    assert pretend.stats()["allocated"] == before


def device_handle(payload: bytes) -> tuple[str, int]:
    import msgspec

    _, handle, num_bytes, *_ = msgspec.msgpack.decode(payload)
    return handle.decode(), num_bytes


# ---- what is not there


def test_what_is_not_there_says_so() -> None:
    with pytest.raises(NotImplementedError, match="no CUDA graphs"):
        torch.cuda.CUDAGraph()
    with pytest.raises(NotImplementedError, match="interprocess"):
        torch.cuda.Event(interprocess=True)


def test_micro_batches_come_from_pinned_memory_without_a_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rlcore.config.schema import TrainConfig
    from rlcore.hf.rope_settings import Rope
    from rlcore.mcore import microbatch
    from rlcore.mcore.layout import layout_of
    from rlcore.tensors import Batch, cumulative

    copied: list[bool] = []
    plain = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if self.numel() and not self.is_cuda and args[0] == device:
            copied.append(self.is_pinned() and options.get("non_blocking", False))
        return plain(self, *args, **options)

    device = torch.device("cuda", 0)
    cutter = microbatch.Cutter(
        layout_of(TrainConfig(), 1, 0),
        sequence_parallel=False,
        head_dim=8,
        rope=Rope(theta=1e4),
        dtype=torch.bfloat16,
        device=device,
        budget=8,
    )
    lengths = [5, 3, 7]
    batch = Batch(
        tokens=torch.arange(sum(lengths)),
        cu_seqlens=cumulative(lengths),
        mask=torch.ones(sum(lengths), dtype=torch.bool),
    )
    list(cutter.cut(batch, [[2]], 1).micro_batches)  # the longest row makes the tables of RoPE
    monkeypatch.setattr(torch.Tensor, "to", to)
    made = list(cutter.cut(batch, [[2], [0, 1]], 3).micro_batches)
    assert len(made) == 3 and all(micro.tokens.is_cuda for micro in made)
    assert len(copied) > 16 and all(copied)

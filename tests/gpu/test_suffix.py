"""The draft kernel on a GPU against the same body on the CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from rlcore.ops import native
from rlcore.ops.suffix import Forest
from rlcore.ops.suffix_device import DeviceForest
from tests import pretend
from tests.gpu import side
from tests.unit.test_device_drafts import generate

pytestmark = [pytest.mark.gpu, side.needs_kernels]


@pytest.fixture(autouse=True)
def build() -> None:
    if native.torch_ops("suffix forest", side.DEVICE.type) is None:
        pytest.skip("no native build with kernels for the device")


@pytest.mark.parametrize("requests", [1, 33, 256])
@pytest.mark.parametrize("options", [{}, dict(limit=0, min_match=1, min_prob=0.3, factor=3.0)])
def test_the_kernel_drafts_what_the_host_drafts(requests, options):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 6, 8000).astype(np.int32)
    offsets = np.arange(0, 8001, 500)
    forest = Forest(threads=1, **options)
    forest.build(np.arange(4), tokens, offsets, np.arange(0, 17, 4), rng.random(16, np.float32))
    forest.swap()
    sides = [DeviceForest(d, requests=requests, **options) for d in ("cpu", side.DEVICE)]
    keys = rng.integers(0, 5, requests)
    handles = []
    for one in sides:
        one.upload(forest)
        one.swap()
        handles.append(one.put(one.open(keys)))
    accepted = torch.zeros(requests, dtype=torch.int32)
    for _ in range(10):
        lengths = rng.integers(0, 9, requests)
        ends = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
        text = torch.from_numpy(rng.integers(0, 6, int(lengths.sum())).astype(np.int32))
        results = [
            [t.cpu() for t in one.step(h, *(x.to(one.device) for x in (accepted, text, ends)))]
            for one, h in zip(sides, handles, strict=True)
        ]
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
        accepted = (results[0][1] * torch.rand(requests)).int()


def test_rows_of_tokens_and_renewed_histories_are_those_of_the_host():
    rng = np.random.default_rng(1)
    sides = [DeviceForest(d, requests=8, min_match=1) for d in ("cpu", side.DEVICE)]
    keys, drafted = np.arange(8) % 3, 0
    tables = [one.put(one.open(keys)) for one in sides]
    accepted = torch.zeros(8, dtype=torch.int32)
    for k in range(12):
        if k % 4 == 2:
            forest = Forest(threads=1, min_match=1)
            text = rng.integers(0, 6, 2000).astype(np.int32)
            places = np.arange(0, 2001, 500), np.arange(0, 5, 2)
            forest.build(np.arange(2), text, *places, rng.random(4, np.float32))
            forest.swap()
            for one, table in zip(sides, tables, strict=True):
                one.upload(forest)
                one.swap()
                one.renew(table.cpu().numpy(), keys)
            accepted.zero_()
        new = torch.from_numpy(rng.integers(0, 6, (8, 4)).astype(np.int32))
        counts = torch.from_numpy(rng.integers(0, 5, 8)).int()
        results = []
        for one, table in zip(sides, tables, strict=True):
            inputs = [x.to(one.device) for x in (accepted, new, counts)]
            if k % 3 == 0:
                one.advance(table, *inputs[:2], counts=inputs[2])
            else:
                out = one.step(table, *inputs[:2], counts=inputs[2])
                results.append([t.cpu() for t in out])
        accepted.zero_()
        if results:
            assert all(map(torch.equal, *results))
            accepted = (results[0][1] * torch.rand(8)).int()
            drafted += int(results[0][1].sum())
    assert drafted > 40


@contextmanager
def no_wait() -> Iterator[None]:
    """Fail if the host waits for the device."""
    if "RLCORE_PRETEND_CUDA" in os.environ:
        before = pretend.stats()["syncs"]
        yield
        assert pretend.stats()["syncs"] == before
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@side.needs_gpu
@pytest.mark.parametrize("overlap", [False, True], ids=["in_turn", "overlapped"])
def test_drafts_of_whole_generations_are_the_hosts_and_wait_for_nothing(tmp_path, overlap):
    """Requests enter and leave, and histories are renewed in between."""
    run, _, _ = generate(tmp_path, 0, "history", overlap, where=side.DEVICE, watch=no_wait)
    assert 0 < run.accepted < run.drafted


@side.needs_gpu
@side.needs_real_gpu
def test_a_cuda_graph_drafts_what_the_host_drafts():
    rng, requests, new = np.random.default_rng(0), 33, 3
    forest = Forest(threads=1)
    tokens = rng.integers(0, 6, 8000).astype(np.int32)
    offsets = np.arange(0, 8001, 500)
    forest.build(np.arange(4), tokens, offsets, np.arange(0, 17, 4), rng.random(16, np.float32))
    forest.swap()
    host, device = (DeviceForest(d, requests=requests) for d in ("cpu", side.DEVICE))
    keys = rng.integers(0, 5, requests)
    handles = []
    for one in (host, device):
        one.upload(forest)
        one.swap()
        handles.append(one.put(one.open(keys)))
    text = torch.zeros(requests * new, dtype=torch.int32)
    ends = torch.arange(requests + 1) * new
    accepted = torch.zeros(requests, dtype=torch.int32)
    inputs = [x.to(side.DEVICE) for x in (accepted, text, ends)]
    # A kernel's first launch loads it, which a graph cannot do.
    other = DeviceForest(side.DEVICE, requests=1)
    other.step(other.put(other.open(keys[:1])), None, inputs[1][:new], inputs[2][:2])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drafts, lengths = device.step(handles[1], *inputs)
    drafted = 0
    for _ in range(10):
        text.copy_(torch.from_numpy(rng.integers(0, 6, requests * new)))
        inputs[0].copy_(accepted)
        inputs[1].copy_(text)
        graph.replay()
        want, want_lengths = host.step(handles[0], accepted, text, ends)
        assert torch.equal(lengths.cpu(), want_lengths) and torch.equal(drafts.cpu(), want)
        drafted += int(want_lengths.sum())
        accepted = (want_lengths * torch.rand(requests)).int()
    assert drafted > requests


@side.needs_gpu  # the CPU raises
def test_a_handle_that_is_not_open_has_length_minus_one():
    forest = DeviceForest(side.DEVICE, requests=2)
    handles = torch.tensor([0, 5, -1], device=side.DEVICE)
    tokens = torch.zeros(0, dtype=torch.int32, device=side.DEVICE)
    offsets = torch.zeros(4, dtype=torch.int64, device=side.DEVICE)
    assert forest.step(handles, None, tokens, offsets)[1].tolist() == [-1, -1, -1]


@side.needs_gpu  # the CPU raises
def test_of_equal_handles_one_row_moves_the_request():
    forest = DeviceForest(side.DEVICE, requests=1)
    handles = forest.put(forest.open(np.zeros(1, np.int64))).repeat(64)
    tokens = torch.arange(64 * 50, dtype=torch.int32, device=side.DEVICE)
    offsets = torch.arange(65, device=side.DEVICE) * 50
    for _ in range(4):
        lengths = forest.step(handles, None, tokens, offsets)[1]
        assert (lengths >= 0).sum() == 1


@side.needs_gpu  # the CPU has one stream
def test_a_call_on_another_stream_is_refused():
    forest = DeviceForest(side.DEVICE, requests=2)
    forest.open(np.zeros(1, np.int64))
    with (
        torch.cuda.stream(torch.cuda.Stream(side.DEVICE)),
        pytest.raises(AssertionError, match="its first call was on"),
    ):
        forest.open(np.zeros(1, np.int64))
    forest.open(np.zeros(1, np.int64))

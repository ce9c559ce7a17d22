"""The device forest on the CPU: the kernel's body against the forest, and what it refuses."""

import inspect
from dataclasses import asdict

import numpy as np
import pytest
import torch

from rlcore.ops import native
from rlcore.ops.suffix import Forest
from rlcore.ops.suffix_device import DeviceForest, DeviceOptions
from tests.native.test_suffix import batch, corpus, i32, i64, needs_build

pytestmark = [pytest.mark.native, needs_build]


@pytest.fixture(autouse=True)
def build() -> None:
    if native.torch_ops("suffix forest", "cpu") is None:
        pytest.skip("no native build of torch ops")


def forest_of(texts: dict[int, list[int]], **options) -> Forest:
    forest = Forest(threads=1, **options)
    forest.build(*corpus({key: [(text, 1.0)] for key, text in texts.items()}))
    forest.swap()
    return forest


def tensors(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(a) for a in arrays]


@pytest.mark.parametrize("options", [{}, dict(limit=0, min_match=1, min_prob=0.3, knee=200)])
def test_the_device_drafts_what_the_forest_drafts(options):
    rng = np.random.default_rng(0)
    texts = {key: rng.integers(0, 4, 400).tolist() for key in range(4)}
    forest = forest_of(texts, **options)
    device = DeviceForest(requests=8, **options)
    device.upload(forest)
    keys = i64(0, 1, 2, 3, 3, 99)
    here, there = forest.open(keys), device.open(keys)
    accepted = np.zeros(6, np.int32)
    for _ in range(20):
        text = batch([rng.integers(0, 4, rng.integers(0, 9)).tolist() for _ in keys])
        expected = forest.step(here, accepted, *text)
        got = device.step(there, *tensors(accepted, *text))
        np.testing.assert_array_equal(got[0].numpy(), expected[0])
        np.testing.assert_array_equal(got[1].numpy(), expected[1])
        accepted = rng.integers(0, expected[1] + 1, dtype=np.int32)


def test_requests_keep_the_histories_that_they_were_opened_on():
    device = DeviceForest(requests=2)
    device.upload(forest_of({0: [1, 2, 3, 4]}))
    old = device.open(i64(0))
    held = device.nbytes
    device.upload(forest_of({0: [1, 2, 3, 5]}))
    assert device.nbytes > held
    both = torch.cat([old, device.open(i64(0))])
    out, lengths = device.step(both, None, *tensors(*batch([[1, 2, 3]] * 2)))
    assert out[:, 0].tolist() == [4, 5] and lengths.tolist() == [1, 1]
    device.close(old)
    assert device.nbytes == held


def test_a_stream_without_room_drafts_from_the_history_alone():
    device = DeviceForest(requests=1, stream=8)
    device.upload(forest_of({0: [1, 2, 3, 4]}))
    handle = device.open(i64(0))
    first = device.step(
        handle, None, *tensors(*batch([[7, 8, 9, 7, 8, 9]])), torch.tensor([2]).int()
    )
    assert first[0][0, :2].tolist() == [7, 8]
    more = device.step(handle, None, *tensors(*batch([[7, 8, 9]])))
    assert more[1].tolist() == [0]
    assert device.step(handle, None, *tensors(*batch([[1, 2, 3]])))[0][0, 0] == 4


def test_a_reused_slot_does_not_know_the_stream_before():
    device = DeviceForest(requests=1)
    text = tensors(*batch([[7, 8, 9, 7, 8, 9]]))
    first = device.open(i64(0))
    assert device.step(first, None, *text)[1].tolist() == [2]
    device.close(first)
    second = device.open(i64(0))
    assert second.tolist() != first.tolist()
    assert device.step(second, None, *tensors(*batch([[7, 8, 9]])))[1].tolist() == [0]


def test_a_closed_handle_is_refused():
    device = DeviceForest(requests=1)
    handle = device.open(i64(0))
    device.close(handle)
    with pytest.raises(ValueError, match=r"handles\[0\] 0: .*not open"):
        device.close(handle)
    with pytest.raises(ValueError, match=r"handles\[0\] 0: .*not open"):
        device.step(handle, None, *tensors(*batch([[1]])))
    handle = device.open(i64(0))
    with pytest.raises(ValueError, match=r"handles\[1\] \d+: is listed twice"):
        device.close(torch.cat([handle, handle]))
    device.close(handle)


@pytest.mark.parametrize(
    "keys, message",
    [
        (np.array([1.5]), "keys: must be int64, not float64"),
        (np.array(["1"]), "keys: must be int64, not <U1"),
        (np.zeros((1, 1), np.int64), "keys: must have one dimension, not 2"),
        ([1], "keys: must be a numpy array of int64, not list"),
    ],
)
def test_bad_keys_are_refused_and_take_no_room(keys, message):
    device = DeviceForest(requests=1)
    with pytest.raises(ValueError, match=message):
        device.open(keys)
    assert device.open(i64(1)).tolist() == [0]


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(offsets=i64(0, -3, 2)), r"offsets\[1\] -3: offsets .* not fall"),
        (dict(offsets=i64(7, 1, 2)), r"offsets\[0\] 7: offsets .*begin with 0"),
        (dict(offsets=i64(0, 1, 99)), r"offsets\[2\] 99: the last offset"),
        (dict(tokens=i32(3, -5)), r"tokens\[1\] -5: token ids .* 0 or more"),
        (dict(accepted=i32(0, 500)), r"accepted\[1\] 500: must be 0 to the last draft's length, 1"),
        (dict(accepted=i32(-7, 0)), r"accepted\[0\] -7: must be 0 to the last draft's length, 1"),
        (dict(windows=i32(33, 1)), r"windows\[0\] 33: must be 0 to max_window 32"),
        (dict(windows=i32(1, -3)), r"windows\[1\] -3: must be 0 to max_window 32"),
        (dict(handles=i64(0, 0)), r"handles\[1\] 0: is listed twice"),
        (dict(handles=i64(0, 5)), r"handles\[1\] 5: .*not open"),
        (dict(running=-1), "running -1: must be 0 .the batch"),
    ],
)
def test_bad_values_are_refused_on_the_cpu_and_change_nothing(change, message):
    device = DeviceForest(requests=2)
    device.upload(forest_of({0: [1, 2, 3, 4]}))
    handles = device.open(i64(0, 0))
    device.step(handles, None, *tensors(*batch([[1, 2, 3]] * 2)))
    before = device._records.clone(), device._text.clone(), device._slots.clone()
    good = dict(handles=handles.numpy(), accepted=i32(1, 0), tokens=i32(4, 1), offsets=i64(0, 1, 2))
    call = {k: torch.from_numpy(v) if k != "running" else v for k, v in {**good, **change}.items()}
    with pytest.raises(ValueError, match=message):
        device.step(**call)
    for old, new in zip(before, (device._records, device._text, device._slots), strict=True):
        assert torch.equal(old, new)


def test_the_defaults_are_those_of_the_forest():
    own = inspect.signature(Forest).parameters
    assert asdict(DeviceOptions()) == {name: own[name].default for name in asdict(DeviceOptions())}


def test_there_is_no_room_for_more_requests_than_were_asked_for():
    device = DeviceForest(requests=2)
    device.open(i64(1))
    with pytest.raises(ValueError, match="keys: 2 requests, but only 1 slots are free"):
        device.open(i64(1, 2))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(handles=torch.zeros(1, dtype=torch.int32)), "handles: must be torch.int64"),
        (dict(tokens=torch.zeros(1)), "tokens: must be torch.int32, not torch.float32"),
        (dict(tokens=torch.zeros(4, dtype=torch.int32)[::2]), "tokens: must be contiguous"),
        (dict(tokens=[1]), "tokens: must be a tensor, not list"),
        (dict(tokens=torch.zeros(1, dtype=torch.int32, device="meta")), "tokens: must be on cpu"),
        (dict(offsets=torch.zeros(3, dtype=torch.int64)), "offsets: 2 entries are needed, got 3"),
        (dict(accepted=torch.zeros(2, dtype=torch.int32)), "accepted: 1 entries are needed, got 2"),
        (dict(windows=torch.zeros(0, dtype=torch.int32)), "windows: 1 entries are needed, got 0"),
    ],
)
def test_a_bad_step_names_the_argument(change, message):
    device = DeviceForest(requests=1)
    good = dict(handles=device.open(i64(0)), accepted=None, tokens=torch.from_numpy(i32(1)))
    good["offsets"] = torch.from_numpy(i64(0, 1))
    with pytest.raises(ValueError, match=message):
        device.step(**{**good, **change})


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(limit=2), "limit 2: .*0 .*none.* or at least min_match 3"),
        (dict(requests=1.5), "requests 1.5: must be a whole number"),
        (dict(requests=0), "requests 0: must be at least 1"),
        (dict(stream=-1), "stream -1: must be 0 to"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DeviceForest(**options)


def test_histories_are_uploaded_from_a_forest_that_has_some():
    with pytest.raises(ValueError, match="arena: no histories"):
        DeviceForest(requests=1).upload(Forest(threads=1))


@pytest.mark.parametrize("call", ["upload", "open", "step", "close"])
def test_a_call_on_another_stream_is_refused(call, monkeypatch):
    """The CPU has one stream, 0: the other one is pretended."""
    device, forest = DeviceForest(requests=2), forest_of({0: [1, 2, 3, 4]})
    device.upload(forest)
    handle = device.open(i64(0))
    calls = {
        "upload": lambda: device.upload(forest),
        "open": lambda: device.open(i64(0)),
        "step": lambda: device.step(handle, None, *tensors(*batch([[1]]))),
        "close": lambda: device.close(handle),
    }
    with monkeypatch.context() as patch:
        patch.setattr(native, "stream", lambda device: 0x7F)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        with pytest.raises(AssertionError, match="on stream 0x7f: it was made on stream 0x0"):
            calls[call]()
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        if call == "step":  # a CUDA graph records it
            calls[call]()
        else:
            with pytest.raises(AssertionError, match="on stream 0x7f"):
                calls[call]()
    calls[call]()

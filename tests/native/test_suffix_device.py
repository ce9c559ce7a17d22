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


COUNTS = dict(offsets=None, counts=torch.tensor([2], dtype=torch.int32))


def forest_of(texts: dict[int, list[int]], **options) -> Forest:
    forest = Forest(threads=1, **options)
    forest.build(*corpus({key: [(text, 1.0)] for key, text in texts.items()}))
    forest.swap()
    return forest


def upload(device: DeviceForest, forest: Forest) -> None:
    device.upload(forest)
    device.swap()


def opened(device: DeviceForest, *keys: int) -> torch.Tensor:
    return torch.from_numpy(device.open(i64(*keys)))


def tensors(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(a) for a in arrays]


@pytest.mark.parametrize("options", [{}, dict(limit=0, min_match=1, min_prob=0.3, knee=200)])
def test_the_device_drafts_what_the_forest_drafts(options):
    rng = np.random.default_rng(0)
    texts = {key: rng.integers(0, 4, 400).tolist() for key in range(4)}
    forest = forest_of(texts, **options)
    device = DeviceForest(requests=8, **options)
    upload(device, forest)
    keys = i64(0, 1, 2, 3, 3, 99)
    here, there = forest.open(keys), opened(device, *keys)
    accepted = np.zeros(6, np.int32)
    for _ in range(20):
        text = batch([rng.integers(0, 4, rng.integers(0, 9)).tolist() for _ in keys])
        expected = forest.step(here, accepted, *text)
        got = device.step(there, *tensors(accepted, *text))
        np.testing.assert_array_equal(got[0].numpy(), expected[0])
        np.testing.assert_array_equal(got[1].numpy(), expected[1])
        accepted = rng.integers(0, expected[1] + 1, dtype=np.int32)


def test_rows_of_tokens_with_counts_are_appended_as_with_offsets():
    rng = np.random.default_rng(1)
    forest = forest_of({0: rng.integers(0, 4, 400).tolist()}, min_match=1)
    sides = [DeviceForest(requests=5, min_match=1) for _ in range(2)]
    for device in sides:
        upload(device, forest)
    ragged, rows = (opened(device, 0, 0, 0, 0, 7) for device in sides)
    accepted = torch.zeros(5, dtype=torch.int32)
    for _ in range(20):
        counts = rng.integers(0, 5, 5)
        text = torch.from_numpy(rng.integers(0, 4, (5, 4)).astype(np.int32))
        flat = tensors(*batch([row[:n].tolist() for row, n in zip(text, counts, strict=True)]))
        expected = sides[0].step(ragged, accepted, *flat)
        got = sides[1].step(rows, accepted, text, counts=torch.from_numpy(counts).int())
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
        accepted = torch.from_numpy(rng.integers(0, expected[1] + 1, dtype=np.int32))


@pytest.mark.parametrize("options", [{}, dict(knee=1 << 20, limit=0, min_match=1)])
def test_steps_that_only_advance_are_those_in_which_the_forest_does_not_draft(options):
    """The forest gets the tokens of such steps at its next draft, as the host's drafter does."""
    rng = np.random.default_rng(2)
    texts = {key: rng.integers(0, 4, 400).tolist() for key in range(3)}
    forest, device = forest_of(texts, **options), DeviceForest(requests=4, **options)
    upload(device, forest)
    here, there = forest.open(i64(0, 1, 2, 9)), opened(device, 0, 1, 2, 9)
    accepted, late, drafted = np.zeros(4, np.int32), [[] for _ in range(4)], 0
    for _ in range(40):
        new = [rng.integers(0, 4, rng.integers(1, 5)).tolist() for _ in range(4)]
        late = [a + b for a, b in zip(late, new, strict=True)]
        if rng.random() < 0.5:
            device.advance(there, *tensors(accepted * (len(late[0]) == len(new[0])), *batch(new)))
            continue
        running = (1 << 20) // rng.integers(2, 33)
        expected = forest.step(here, accepted, *batch(late), running=int(running))
        once = accepted * (len(late[0]) == len(new[0]))
        got = device.step(there, *tensors(once, *batch(new)), running=int(running))
        np.testing.assert_array_equal(got[0].numpy(), expected[0])
        accepted, late = rng.integers(0, expected[1] + 1, dtype=np.int32), [[] for _ in range(4)]
        drafted += int(expected[1].sum())
    assert drafted > 40


@pytest.mark.parametrize("options", [{}, dict(limit=0, min_match=1, factor=4.0)])
def test_a_renewed_request_drafts_as_one_that_was_opened_again(options):
    rng = np.random.default_rng(3)
    first, second = ({k: rng.integers(0, 4, 300).tolist() for k in range(3)} for _ in range(2))
    device, keys = DeviceForest(requests=4, **options), i64(0, 1, 2, 9)
    upload(device, forest_of(first, **options))
    there = opened(device, *keys)
    streams = [rng.integers(0, 4, 30).tolist() for _ in keys]
    device.step(there, None, *tensors(*batch(streams)))
    upload(device, forest_of(second, **options))
    device.renew(there.numpy(), keys)
    other = forest_of(second, **options)
    again = other.open(keys)
    other.advance(again, *batch(streams))
    for k in range(10):
        text = batch([rng.integers(0, 4, 3).tolist() for _ in keys])
        expected = other.step(again, np.zeros(4, np.int32), *text)
        got = device.step(there, *tensors(np.zeros(4, np.int32), *text))
        np.testing.assert_array_equal(got[0].numpy(), expected[0], err_msg=str(k))


def test_renewing_frees_the_histories_before_and_needs_streams():
    device = DeviceForest(requests=2)
    upload(device, forest_of({0: [1, 2, 3, 4]}))
    handle, one = opened(device, 0), device.nbytes
    upload(device, forest_of({0: [1, 2, 3, 5]}))
    assert device.nbytes > one
    device.renew(handle.numpy(), i64(0))
    assert device.nbytes == one
    with pytest.raises(ValueError, match="live must be True"):
        DeviceForest(requests=1, live=False).renew(i64(), i64())


def test_requests_keep_the_histories_that_they_were_opened_on():
    device = DeviceForest(requests=2)
    upload(device, forest_of({0: [1, 2, 3, 4]}))
    old = opened(device, 0)
    held = device.nbytes
    upload(device, forest_of({0: [1, 2, 3, 5]}))
    assert device.nbytes > held
    both = torch.cat([old, opened(device, 0)])
    out, lengths = device.step(both, None, *tensors(*batch([[1, 2, 3]] * 2)))
    assert out[:, 0].tolist() == [4, 5] and lengths.tolist() == [1, 1]
    device.close(old.numpy())
    assert device.nbytes == held


def test_a_stream_without_room_drafts_from_the_history_alone():
    device = DeviceForest(requests=1, stream=8)
    upload(device, forest_of({0: [1, 2, 3, 4]}))
    handle = opened(device, 0)
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
    first = opened(device, 0)
    assert device.step(first, None, *text)[1].tolist() == [2]
    device.close(first.numpy())
    second = opened(device, 0)
    assert second.tolist() != first.tolist()
    assert device.step(second, None, *tensors(*batch([[7, 8, 9]])))[1].tolist() == [0]


def test_a_closed_handle_is_refused():
    device = DeviceForest(requests=1)
    handle = opened(device, 0)
    device.close(handle.numpy())
    with pytest.raises(ValueError, match=r"handles\[0\] 0: .*not open"):
        device.close(handle.numpy())
    with pytest.raises(ValueError, match=r"handles\[0\] 0: .*not open"):
        device.step(handle, None, *tensors(*batch([[1]])))
    handle = opened(device, 0)
    with pytest.raises(ValueError, match=r"handles\[1\] \d+: is listed twice"):
        device.close(torch.cat([handle, handle]).numpy())
    device.close(handle.numpy())


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
    assert opened(device, 1).tolist() == [0]


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
    upload(device, forest_of({0: [1, 2, 3, 4]}))
    handles = opened(device, 0, 0)
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
    opened(device, 1)
    with pytest.raises(ValueError, match="keys: 2 requests, but only 1 slots are free"):
        opened(device, 1, 2)


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
        (dict(offsets=None), "offsets, counts: one of them is needed"),
        (dict(counts=torch.zeros(1, dtype=torch.int32)), "offsets, counts: .* and not both"),
        (COUNTS, "tokens: must be contiguous and 2-D"),
        (COUNTS | dict(tokens=torch.zeros(2, 3, dtype=torch.int32)), "tokens: 1 rows are needed"),
        (COUNTS | dict(tokens=torch.zeros(1, 1, dtype=torch.int32)), r"counts\[0\] 2: .* row, 1"),
        (COUNTS | dict(tokens=torch.tensor([[3, -1, -1]]).int()), r"tokens\[1\] -1: token ids"),
    ],
)
def test_a_bad_step_names_the_argument(change, message):
    device = DeviceForest(requests=1)
    good = dict(handles=opened(device, 0), accepted=None, tokens=torch.from_numpy(i32(1)))
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


@pytest.mark.parametrize("call", ["swap", "open", "renew", "step", "close"])
def test_a_call_on_another_stream_is_refused(call, monkeypatch):
    """The CPU has one stream, 0: the other one is pretended."""
    device = DeviceForest(requests=2)
    upload(device, forest_of({0: [1, 2, 3, 4]}))
    handle = opened(device, 0)
    calls = {
        "swap": device.swap,
        "renew": lambda: device.renew(handle.numpy(), i64(0)),
        "open": lambda: opened(device, 0),
        "step": lambda: device.step(handle, None, *tensors(*batch([[1]]))),
        "close": lambda: device.close(handle.numpy()),
    }
    with monkeypatch.context() as patch:
        patch.setattr(native, "stream", lambda device: 0x7F)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        with pytest.raises(AssertionError, match="on stream 0x7f: its first call was on 0x0"):
            calls[call]()
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        if call == "step":  # a CUDA graph records it
            calls[call]()
        else:
            with pytest.raises(AssertionError, match="on stream 0x7f"):
                calls[call]()
    calls[call]()

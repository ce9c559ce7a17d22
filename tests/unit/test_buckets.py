import gc
import os
import signal
import subprocess
import sys

import msgspec
import pytest
import torch

from rlcore.ops.reshard import checksum
from rlcore.protocols import InProcess
from rlcore.sync.colocated import ColocatedChannel
from rlcore.sync.pack import Packer, pack
from rlcore.utils.buckets import SharedRoom, as_tensor, open_payload, shared, unpack


def tensors():
    gen = torch.Generator().manual_seed(0)
    return [
        ("a", torch.randn(3, 5, generator=gen)),
        ("b", torch.randn(7, generator=gen).bfloat16()),
        ("odd", torch.arange(3, dtype=torch.uint8)),
        ("c", torch.randn(2, 2, generator=gen).double().T),
        ("scalar", torch.tensor(4.0)),
        ("empty", torch.zeros(0, 4)),
    ]


@pytest.mark.parametrize("max_bytes", [1, 64, 100, 10**6])
def test_tensors_come_back_bit_for_bit_whatever_the_bucket_size(max_bytes):
    back = {}
    for bucket, buffer in pack(iter(tensors()), max_bytes):
        assert bucket.num_bytes == len(buffer)
        assert bucket.num_bytes <= max_bytes or len(bucket.tensors) == 1
        assert all(m.offset % 16 == 0 for m in bucket.tensors)
        back.update(unpack(bucket, buffer))
    assert list(back) == [name for name, _ in tensors()]
    for name, want in tensors():
        assert back[name].dtype == want.dtype and back[name].shape == want.shape
        assert torch.equal(back[name], want)


def test_a_read_only_payload_and_a_shared_file_hold_the_same_tensors():
    bucket, buffer = next(pack(tensors(), 10**6))
    with shared(buffer) as path:
        shm = msgspec.structs.replace(bucket, transport="shm")
        from_file = dict(unpack(shm, open_payload(shm, path.encode())))
        from_bytes = dict(unpack(bucket, open_payload(bucket, bytes(buffer))))
        for name, want in tensors():
            assert torch.equal(from_file[name], want) and torch.equal(from_bytes[name], want)
        from_file["a"].zero_()  # private: the file does not change
        again = dict(unpack(shm, open_payload(shm, path.encode())))
        assert torch.equal(again["a"], tensors()[0][1])
    assert not os.path.exists(path)


def test_a_killed_process_leaves_no_shared_memory_behind():
    """It dies within the block, where it could not have cleaned up."""
    code = (
        "import os; from rlcore.utils.buckets import shared\n"
        "with shared(b'x' * 99) as path: print(path, flush=True); os.kill(os.getpid(), 9)"
    )
    before = set(os.listdir("/dev/shm"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not os.path.exists(done.stdout.strip())
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "rlcore" in name]


def test_a_short_payload_and_a_tensor_outside_its_bucket_are_refused():
    bucket, buffer = next(pack(tensors(), 10**6))
    with pytest.raises(ValueError, match="the buffer has only 8 bytes"):
        list(unpack(bucket, buffer[:8]))
    meta = msgspec.structs.replace(bucket.tensors[0], offset=bucket.num_bytes)
    with pytest.raises(ValueError, match="tensor a: must end within"):
        list(unpack(msgspec.structs.replace(bucket, tensors=(meta,)), buffer))


def test_a_bucket_carries_the_checksum_of_its_bytes():
    for bucket, buffer in pack(tensors(), 64):
        assert bucket.checksum == checksum(as_tensor(bucket, buffer))
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(bucket), type=type(bucket)) == bucket


def test_the_bytes_between_tensors_are_zeros_whatever_was_there():
    dirty = torch.full((4096,), 255, dtype=torch.uint8)
    [(bucket, buffer)] = Packer(10**6).pack(tensors(), lambda n: dirty[:n])
    used = torch.zeros(bucket.num_bytes, dtype=torch.bool)
    for meta, (_, tensor) in zip(bucket.tensors, tensors(), strict=True):
        used[meta.offset : meta.offset + tensor.nbytes] = True
    assert not used.all() and not torch.frombuffer(buffer, dtype=torch.uint8)[~used].any()


def test_a_packer_takes_tensors_of_another_layout_under_the_same_names():
    packer = Packer(10**6)
    for tensor in (torch.arange(6.0).view(2, 3), torch.arange(6.0).view(3, 2).T, torch.ones(5)):
        [(bucket, buffer)] = packer.pack([("a", tensor)])
        assert torch.equal(dict(unpack(bucket, buffer))["a"], tensor)


def test_one_room_serves_buckets_of_growing_size_and_another_process_reads_them():
    room = SharedRoom()
    packer = Packer(10**6)
    for count in (3, 5000, 40):
        want = torch.arange(float(count))
        [(bucket, _)] = packer.pack([("a", want)], room.take)
        shm = msgspec.structs.replace(bucket, transport="shm")
        code = (
            "import sys, msgspec, torch; from rlcore.records import Bucket\n"
            "from rlcore.utils.buckets import open_payload, unpack\n"
            "bucket = msgspec.json.decode(sys.argv[1], type=Bucket)\n"
            "[(_, a)] = unpack(bucket, open_payload(bucket, sys.argv[2].encode()))\n"
            "assert torch.equal(a, torch.arange(float(len(a)))); print(len(a))"
        )
        arguments = [msgspec.json.encode(shm).decode(), room.path]
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60
        )
        assert done.stdout.strip() == str(count), done.stderr
    room.close()


def test_a_tensor_of_six_dimensions_in_any_order_and_lazy_views_are_packed_too():
    six = torch.arange(64.0).view((2,) * 6).permute(5, 4, 3, 2, 1, 0)
    number = torch.tensor([1 + 2j, 3 - 4j])
    want = [("six", six), ("conj", number.conj()), ("neg", number.conj().imag)]
    assert want[1][1].is_conj() and want[2][1].is_neg()
    for bucket, buffer in pack(want, 10**6):
        got = dict(unpack(bucket, buffer))
        assert all(torch.equal(got[name], tensor) for name, tensor in want)


class Weights:
    """A learner's export."""

    def __init__(self, count):
        self.tensor = torch.arange(float(count))

    def export(self):
        yield "a", self.tensor


class Reader(InProcess):
    """An engine that maps each bucket and copies what is in it, as the child engine does."""

    def begin_load(self, version):
        self.loaded = None

    def load_bucket(self, bucket, payloads):
        flat = as_tensor(bucket, open_payload(bucket, payloads[0]))
        assert checksum(flat) == bucket.checksum
        self.loaded = dict(unpack(bucket, flat))["a"].clone()
        self.payload = payloads[0]

    def end_load(self): ...


@pytest.mark.parametrize("shared_memory", [False, True])
def test_a_channel_keeps_its_room_from_push_to_push_but_no_larger_one_than_a_bucket(shared_memory):
    channel, engine = ColocatedChannel(4096, shared_memory), Reader()
    rooms = []
    for count in (100, 1000, 7, 5000, 8):  # 5000 floats are more than a bucket
        learner = Weights(count)
        channel.update_weights(learner, engine, 1)
        assert torch.equal(engine.loaded, learner.tensor)
        room = next(iter(channel._handover._rooms), None)
        rooms.append((room, room.num_bytes if room else 0))
    assert [size for _, size in rooms] == [400, 4000, 4000, 0, 32]
    assert rooms[0][0] is rooms[1][0] is rooms[2][0] and rooms[4][0] is not rooms[0][0]


def test_a_room_goes_with_its_channel():
    channel, engine = ColocatedChannel(shared_memory=True), Reader()
    channel.update_weights(Weights(10), engine, 1)
    path = engine.payload.decode()
    held = os.stat(path).st_ino
    del channel
    gc.collect()
    assert not os.path.exists(path) or os.stat(path).st_ino != held


def test_a_bucket_size_below_one_byte_is_refused():
    with pytest.raises(ValueError, match="max_bytes 0"):
        next(pack(tensors(), 0))

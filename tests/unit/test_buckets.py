import os
import signal
import subprocess
import sys

import msgspec
import pytest
import torch

from rlcore.utils.buckets import open_payload, pack, shared, unpack


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
    with pytest.raises(ValueError, match="only 8 came"):
        list(unpack(bucket, buffer[:8]))
    meta = msgspec.structs.replace(bucket.tensors[0], offset=bucket.num_bytes)
    with pytest.raises(ValueError, match="tensor a: lies outside"):
        list(unpack(msgspec.structs.replace(bucket, tensors=(meta,)), buffer))

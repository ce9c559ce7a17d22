"""Memory that a learner gives away and takes again, without a GPU."""

import pytest
import torch

from rlcore.mcore.memory import Parked, storages
from rlcore.utils.host_room import HostRoom


@pytest.mark.parametrize("sizes", [[5, 0, 11], [16], [3, 5], []])
def test_what_is_written_into_blocks_is_read_back_bit_by_bit(sizes: list[int]) -> None:
    room = HostRoom(block=8)
    for _ in range(3):
        sources = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in sizes]
        room.write(sources)
        targets = [torch.zeros_like(s) for s in sources]
        room.read(targets)
        assert all(torch.equal(a, b) for a, b in zip(sources, targets, strict=True))
        assert room.num_bytes == -(-sum(sizes) // 8) * 8  # the same blocks every time


def test_contents_are_written_and_read_from_any_byte_on() -> None:
    room = HostRoom(block=8)
    parts = [torch.randint(0, 256, (11,), dtype=torch.uint8) for _ in range(3)]
    for number, part in enumerate(parts):
        room.write([part], 11 * number)
    for number in (2, 0, 1):
        target = torch.zeros(11, dtype=torch.uint8)
        room.read([target], 11 * number)
        assert torch.equal(target, parts[number])
    assert room.num_bytes == 40


def test_a_part_that_comes_back_as_zeros_is_gone_meanwhile_and_its_views_live() -> None:
    flat = torch.ones(100)
    view = flat[10:20].view(2, 5)
    part = Parked(lambda: [flat, view], zeros=True)
    assert part.resident_bytes == 400
    part.park()
    part.park()
    assert part.resident_bytes == 0 and part.is_away
    part.restore()
    part.restore()
    assert part.resident_bytes == 400
    assert view.tolist() == [[0.0] * 5] * 2
    flat[12] = 3
    assert view[0, 2] == 3


def test_what_is_on_the_cpu_stays_there_untouched() -> None:
    weights = torch.arange(10.0)
    part = Parked(lambda: [weights])
    part.park()
    assert part.is_away and part.resident_bytes == 40 and part.host_bytes == 0
    part.restore()
    assert weights.tolist() == list(range(10))


def test_shared_memory_is_counted_once_also_while_it_is_empty() -> None:
    a, b = torch.ones(4), torch.ones(4)
    view = a[:2]
    for tensor in (a, b):
        tensor.untyped_storage().resize_(0)
    assert len(storages([a, view, b])) == 2

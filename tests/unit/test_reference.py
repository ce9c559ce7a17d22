"""The start weights, kept as they are and in blocks of host memory."""

import pytest
import torch

from rlcore.mcore.reference import ReferenceModel


@pytest.mark.parametrize("pinned", [False, True])
def test_the_start_weights_come_in_place_and_go_again_bit_by_bit(pinned: bool) -> None:
    g = torch.Generator().manual_seed(0)
    flat = torch.randn(40, generator=g)
    own = [
        torch.nn.Parameter(flat[:12].view(3, 4)),  # as Megatron has it, a view of a flat buffer
        torch.nn.Parameter(torch.randn(5, 7, generator=g).t()),
        torch.nn.Parameter(torch.randn(3, generator=g).to(torch.bfloat16)),
    ]
    start = [p.detach().clone() for p in own]
    reference = ReferenceModel(own, pinned=pinned)
    with torch.no_grad():
        for p in own:
            p += 1
    pointers = [p.data_ptr() for p in own]
    for _ in range(2):
        with reference.in_place():
            assert reference.is_in_place
            assert all(torch.equal(p, want) for p, want in zip(own, start, strict=True))
            flat[:12] += 1  # the optimizer's view is of the own weights
        assert not reference.is_in_place
        assert [p.data_ptr() for p in own] == pointers
    assert torch.equal(own[0], start[0] + 1 + 1 + 1)
    assert torch.equal(own[2], start[2] + 1)

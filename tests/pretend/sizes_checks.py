"""Mode `sizes`: large tensors have shapes and addresses alone. test_device.py runs this file."""

import psutil
import torch

from tests import pretend

CUDA = torch.device("cuda")


def test_a_large_model_is_walked_through_without_its_memory() -> None:
    resident = psutil.Process().memory_info().rss
    pretend.reset_peak()
    start = pretend.stats()["allocated"]
    weight = torch.empty(150_000, 8192, dtype=torch.bfloat16, device=CUDA, requires_grad=True)
    hidden = torch.randn(4096, 8192, device=CUDA).bfloat16()
    loss = (hidden @ weight.T).float().square().mean()
    loss.backward()
    assert weight.grad.shape == weight.shape
    assert pretend.stats()["allocated"] - start > 2 * weight.nbytes  # and its gradient
    logits = 4096 * 150_000
    assert pretend.stats()["peak"] - start > 2 * weight.nbytes + (2 + 4) * logits
    assert psutil.Process().memory_info().rss - resident < 500_000_000


def test_small_tensors_are_computed_and_what_large_ones_give_is_zero() -> None:
    assert (torch.arange(10, device=CUDA) * 2).sum().item() == 90
    large = torch.ones(1_000_000, device=CUDA)
    assert large.sum().item() == 0
    out = torch.ones(1, device=CUDA)
    torch.sum(large, 0, keepdim=True, out=out)
    assert out.item() == 0


def test_storages_of_any_size_are_emptied_and_filled() -> None:
    large = torch.empty(4_000_000_000, dtype=torch.uint8, device=CUDA)
    held = pretend.stats()["allocated"]
    large.untyped_storage().resize_(0)
    assert held - pretend.stats()["allocated"] == 4_000_000_000
    host = torch.empty(1_000_000, pin_memory=True)
    host.copy_(torch.ones(1_000_000, device=CUDA), non_blocking=True)
    assert pretend.stats()["pinned"] >= 2**22 and pretend.stats()["copies"] == 0

"""What a draft may see, as SGLang's kernels want to be told."""

import torch
from torch import Tensor


def chain_mask(lengths: Tensor, width: int, device: str | torch.device) -> Tensor:
    """For every request [W, length + W] bool, one after the other. A token sees all that the cache
    has, and of the draft itself and what stands before it.

    Args:
        lengths: [N] tokens in the cache, on the host.
        width: W
        device: of the mask.
    """
    sizes = (lengths + width) * width
    begins = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    row, column = torch.triu_indices(width, width, 1)
    later = begins[:-1, None] + row * (lengths[:, None] + width) + lengths[:, None] + column
    mask = torch.ones(int(begins[-1]), dtype=torch.bool, device=device)
    mask[later.flatten().to(device)] = False
    return mask

"""Attention mask for drafts, in the layout of SGLang's kernels."""

import torch
from torch import Tensor


def chain_mask(lengths: Tensor, width: int, device: str | torch.device) -> Tensor:
    """Build the causal mask of chain drafts: [W, length + W] bool per request, flattened and
    concatenated. A token attends to the request's cache, to earlier draft tokens and to itself.

    Args:
        lengths: [N] number of cached tokens per request, on the CPU.
        width: W, number of tokens in the step: the last token and its draft.
        device: device of the mask.
    """
    sizes = (lengths + width) * width
    begins = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    row, column = torch.triu_indices(width, width, 1)
    later = begins[:-1, None] + row * (lengths[:, None] + width) + lengths[:, None] + column
    mask = torch.ones(int(begins[-1]), dtype=torch.bool, device=device)
    mask[later.flatten().to(device)] = False
    return mask

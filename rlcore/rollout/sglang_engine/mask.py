"""Attention mask for drafts, in the layout of SGLang's kernels."""

import torch
from torch import Tensor


def chain_mask(lengths: Tensor, width: int, total: int) -> Tensor:
    """Build the causal mask of chain drafts: [W, length + W] bool per request, flattened and
    concatenated. A token attends to the request's cache, to earlier draft tokens and to itself. A
    GPU is not waited for.

    Args:
        lengths: [N] number of cached tokens per request, on the device of the mask.
        width: W, number of tokens in the step: the last token and its draft.
        total: sum of `lengths`, or more.
    """
    device = lengths.device
    sizes = (lengths + width) * width
    begins = sizes.cumsum(0) - sizes
    row, column = torch.triu_indices(width, width, 1, device=device)
    later = begins[:, None] + row * (lengths[:, None] + width) + lengths[:, None] + column
    numel = (total + width * len(lengths)) * width
    mask = torch.ones(numel, dtype=torch.bool, device=device)
    return mask.index_fill_(0, later.flatten(), False)

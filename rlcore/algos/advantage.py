"""Rewards of a group to advantages of its samples.

    grpo:   A_i = (R_i - mean R) / (std R + 1e-6)     std over the group with n - 1, as verl

A group of one has no baseline: its advantage is its reward, as in verl. A group with equal rewards
has advantage 0.
"""

from collections.abc import Sequence

import torch

EPSILON = 1e-6


def grpo(rewards: Sequence[float], norm_by_std: bool = True) -> list[float]:
    """Advantages of one group, in the order of its rewards."""
    r = torch.tensor(rewards, dtype=torch.float64)
    if r.numel() == 1:
        return r.tolist()
    a = r - r.mean()
    if norm_by_std:
        a = a / (r.std() + EPSILON)
    return a.tolist()


def is_equal(rewards: Sequence[float]) -> bool:
    """All rewards of the group are the same, so none of its samples teaches anything."""
    return max(rewards) - min(rewards) < 1e-8

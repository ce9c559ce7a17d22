"""Rewards: functions that score a response, and the service that runs them in child processes.

`--reward NAME` selects an entry of `registry.REWARDS`. `--reward my_pkg.my_reward` selects a user's
module, function or class on PYTHONPATH. `rewards.score(text, gold, kind)` computes one score in
this process. This file imports nothing before it is used, so that child processes start fast.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.rewards.in_process import score as score


def __getattr__(name: str) -> Any:
    """Import `score` on first use."""
    if name == "score":
        from rlcore.rewards.in_process import score

        return score
    raise AttributeError(f"module {__name__} has no attribute {name}")

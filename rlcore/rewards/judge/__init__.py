"""Judge reward (`--reward judge`): a language model grades responses; see README.md."""

from typing import Any

from rlcore.rewards.judge.config import JudgeRewardConfig
from rlcore.rewards.kind import RewardKind, Runner, RunnerHost


def _serve(cfg: Any, host: RunnerHost) -> Runner:
    from rlcore.rewards.judge.runner import serve

    return serve(cfg, host)


KIND = RewardKind(JudgeRewardConfig, serve=_serve)

"""The torch engine from plain data, for `child.ChildEngine`."""

from typing import Any

from rlcore.hf.config import HFConfig
from rlcore.rollout.torch_engine.engine import TorchEngine

NAME = f"{__name__}:build"


def build(config: dict[str, Any], **options: Any) -> TorchEngine:
    """`config` is `HFConfig.to_dict()`, the rest are `TorchEngine`'s arguments."""
    return TorchEngine(HFConfig.from_dict(config), **options)

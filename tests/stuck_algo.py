"""An objective in which rank 1 gets stuck in its first update: it stops, dies, sleeps or raises."""

import os
import signal
import time
from dataclasses import dataclass
from typing import Literal

from rlcore.algos import grpo
from rlcore.tensors import LossInputs, LossOutput


@dataclass(frozen=True, kw_only=True)
class StuckConfig(grpo.GRPOConfig):
    how: Literal["stop", "die", "sleep", "raise"] = "sleep"


def loss(x: LossInputs, cfg: StuckConfig) -> LossOutput:
    """GRPO's, where the rank comes so far."""
    if os.environ["RANK"] == "1":
        if cfg.how == "raise":
            raise RuntimeError("the loss of rank 1 is broken")
        if cfg.how == "sleep":
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGSTOP if cfg.how == "stop" else signal.SIGKILL)
    return grpo.loss(x, cfg)

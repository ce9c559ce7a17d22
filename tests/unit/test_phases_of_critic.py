"""The critic's phase: what it trains on, with a stand-in for the critic."""

from types import SimpleNamespace
from typing import Any

import torch

from rlcore.config.schema import Config
from rlcore.tensors import Batch, cumulative
from rlcore.trainer import learn, report


def test_the_critic_takes_the_mean_over_tokens_whatever_share_a_row_has(monkeypatch: Any) -> None:
    seen: list[Batch] = []
    critic = SimpleNamespace(
        accumulate=lambda batch, loss: seen.append(batch), apply=lambda n: {"n": n}
    )
    run = SimpleNamespace(
        critic=critic, cfg=Config(), spans=SimpleNamespace(alive=lambda: None), told=[]
    )
    monkeypatch.setattr(report, "add_update", lambda run, found, name: run.told.append(found))
    batch = Batch(
        tokens=torch.zeros(6, dtype=torch.int64),
        cu_seqlens=cumulative([3, 3]),
        mask=torch.tensor([False, True, True] * 2),
        rollout_log_probs=torch.zeros(6),
        weight=torch.tensor([0.25, 0.25, 0.25, 0.75, 0.75, 0.75]),  # rows of one sample
        ids=("t0.0", "t0.0"),
    )
    todo = SimpleNamespace(lengths=lambda update: [4])
    learn.update_critic(run, todo, [batch])  # type: ignore[arg-type]
    assert [part.weight for part in seen] == [None] and run.told == [{"n": 4.0}]

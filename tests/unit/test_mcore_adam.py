"""Optimizer states in host memory against Megatron's own optimizer, bit by bit."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.mcore import adam
from rlcore.mcore.learner import MegatronLearner
from tests import kit
from tests.ranks import learner_ranks as ranks

OFFLOAD = {"offload_optimizer": True}


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """About twenty chunks, so that device memory is used again, and slices cut parameters."""
    monkeypatch.setattr(adam, "CHUNK_BYTES", 4096)


def inner(learner: MegatronLearner) -> Any:
    return learner._optimizer.chained_optimizers[0].optimizer


def without_copies(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name != "actor/offloaded_gb"}


def stepped(settings: dict[str, Any], **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """Metrics and weights of three updates."""
    learner = ranks.make({"weight_decay": 0.1} | settings, **options)
    metrics = [without_copies(ranks.step(learner, number)) for number in range(3)]
    weights = kit.state(learner.export())
    learner.close()
    return metrics, weights


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_equal_those_of_the_plain_optimizer(dtype: str, distributed: bool) -> None:
    plain = {"distributed_optimizer": distributed}
    want = stepped(plain, dtype=dtype)
    found = stepped(plain | OFFLOAD, dtype=dtype)
    assert found[0] == want[0]
    kit.assert_bitwise(found[1], want[1])


def test_experts_too() -> None:
    want = stepped({}, dtype="bfloat16", arch="qwen3_moe")
    kit.assert_bitwise(stepped(OFFLOAD, dtype="bfloat16", arch="qwen3_moe")[1], want[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nothing_of_the_optimizer_is_on_the_device(dtype: str) -> None:
    learner = ranks.make(OFFLOAD, dtype=dtype)
    metrics = ranks.step(learner, 0)
    assert learner.resident_bytes()["optimizer"] == 0
    count = sum(p.numel() for p in learner._parameters())
    held = inner(learner).host_bytes
    assert held == pytest.approx((12 if dtype == "bfloat16" else 8) * count, rel=0.1)
    assert (
        metrics["actor/offloaded_gb"] == ranks.step(learner, 1)["actor/offloaded_gb"] == held / 1e9
    )
    before = kit.state(learner.export())
    learner.offload(["optimizer"])
    learner.onload(["optimizer"])
    kit.assert_bitwise(kit.state(learner.export()), before)
    learner.close()


@pytest.mark.parametrize("first, then", [({}, OFFLOAD), (OFFLOAD, {}), (OFFLOAD, OFFLOAD)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_checkpoint_resumes_with_and_without(
    tmp_path: Path, first: dict[str, Any], then: dict[str, Any], dtype: str
) -> None:
    """The loading learner has stepped, so that each main parameter and moment must be replaced."""
    learner = ranks.make(first, dtype=dtype)
    ranks.step(learner, 0)
    learner.save(tmp_path / "saved")
    want = [without_copies(ranks.step(learner, number)) for number in (1, 2)]
    weights = kit.state(learner.export())
    learner.close()
    other = ranks.make(then, dtype=dtype)
    ranks.step(other, 3)
    ranks.step(other, 4)
    other.load(tmp_path / "saved")
    assert [without_copies(ranks.step(other, number)) for number in (1, 2)] == want
    kit.assert_bitwise(kit.state(other.export()), weights)
    other.close()


def test_a_skipped_update_leaves_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = ranks.make(OFFLOAD)
    learner.accumulate(ranks.rows(0), ranks.Loss())
    before = kit.state(learner.export())
    monkeypatch.setattr(learner, "_step", lambda rate: float("nan"))
    assert learner.apply(1.0)["actor/skipped"] == 1
    assert inner(learner).param_groups[0].get("step", 0) == 0
    kit.assert_bitwise(kit.state(learner.export()), before)
    learner.close()


def test_chunks_hold_every_value_once_and_are_full() -> None:
    choice = random.Random(0)
    everything = [({}, torch.empty(choice.randrange(0, 5000))) for _ in range(40)]
    most = adam.CHUNK_BYTES // 4
    chunks = list(adam.divide(everything))
    for chunk in chunks:
        ends = [s.at + s.size for s in chunk]
        assert max(ends) <= most and all(s.at % 64 == 0 for s in chunk)
        assert all(a <= b.at for a, b in zip(ends, chunk[1:], strict=False))
    slices = [s for chunk in chunks for s in chunk]
    for _, main in everything:
        mine = [s for s in slices if s.main is main]
        assert [s.start for s in mine] == [0, *torch.tensor([s.size for s in mine]).cumsum(0)][:-1]
        assert sum(s.size for s in mine) == main.numel()
    total = sum(main.numel() + 64 for _, main in everything)
    assert len(chunks) <= 1 + total // most

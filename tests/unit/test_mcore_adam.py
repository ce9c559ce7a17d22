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
DIST = {"distributed_optimizer": True}


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """About twenty chunks, so that device memory is used again, and slices cut parameters."""
    monkeypatch.setattr(adam, "CHUNK_BYTES", 4096)


def inner(learner: MegatronLearner) -> Any:
    return learner._optimizer.chained_optimizers[0].optimizer


def stepped(settings: dict[str, Any], **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """Metrics and weights of three updates."""
    learner = ranks.make({"weight_decay": 0.1} | settings, **options)
    metrics = [ranks.step(learner, number) for number in range(3)]
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


def test_a_chunk_may_be_a_few_values_short() -> None:
    """The first one has 1000 values of 1024."""
    g = torch.Generator().manual_seed(0)
    start = [torch.randn(n, generator=g) for n in (1000, 3000)]
    grads = [torch.randn(n, generator=g) for n in (1000, 3000)]
    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-8}
    found, want = ([t.clone() for t in start] for _ in range(2))
    ours = adam.ChunkedAdamW([{"params": found} | settings], [], offload=True)
    plain = torch.optim.AdamW(want, **settings)
    for _ in range(2):
        for params in (found, want):
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad.clone()
        ours.step()
        plain.step()
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "offload, dtype", [(False, "bfloat16"), (True, "bfloat16"), (True, "float32")]
)
def test_moments_in_bfloat16_are_those_of_float32_rounded_after_each_step(
    offload: bool, dtype: str, tmp_path: Path
) -> None:
    rounded = {"moments_dtype": "bfloat16", "offload_optimizer": offload}
    learners = [ranks.make(settings, dtype=dtype) for settings in ({}, rounded)]
    plain, ours = learners
    for number in range(3):
        want, found = (ranks.step(learner, number) for learner in learners)
        assert found == want
        for state in inner(plain).state.values():
            for kind in adam.MOMENTS:
                state[kind].copy_(state[kind].bfloat16())
    weights = kit.state(plain.export())
    kit.assert_bitwise(kit.state(ours.export()), weights)
    held = {
        name: sum(one.resident_bytes().values()) for name, one in zip("po", learners, strict=True)
    }
    count = sum(p.numel() for p in plain._parameters())
    saved = 12 if offload and dtype == "bfloat16" else 8 if offload else 4
    assert held["p"] - held["o"] == pytest.approx(saved * count, rel=0.1)
    ours.offload(["optimizer"])
    ours.onload(["optimizer"])
    ours.save(tmp_path / "saved")
    plain.load(tmp_path / "saved")
    want, found = (ranks.step(learner, 3) for learner in learners)
    assert found == want
    kit.assert_bitwise(kit.state(ours.export()), kit.state(plain.export()))
    for learner in learners:
        learner.close()


def test_experts_too() -> None:
    want = stepped({}, dtype="bfloat16", arch="qwen3_moe")
    kit.assert_bitwise(stepped(OFFLOAD, dtype="bfloat16", arch="qwen3_moe")[1], want[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nothing_of_the_optimizer_is_on_the_device(dtype: str) -> None:
    learner = ranks.make(OFFLOAD, dtype=dtype)
    ranks.step(learner, 0)
    assert learner.resident_bytes()["optimizer"] == 0
    count = sum(p.numel() for p in learner._parameters())
    held = inner(learner).host_bytes
    assert held == pytest.approx((12 if dtype == "bfloat16" else 8) * count, rel=0.1)
    copied = []
    for _ in range(2):
        learner.accumulate(ranks.rows(1), ranks.Loss())
        copied.append(learner.apply(1.0)["actor/offloaded_gb"])
    assert copied == [held / 1e9] * 2
    before = kit.state(learner.export())
    learner.offload(["optimizer"])
    learner.onload(["optimizer"])
    kit.assert_bitwise(kit.state(learner.export()), before)
    learner.close()


@pytest.mark.parametrize(
    "first, then, dtype",
    [
        (DIST, DIST | OFFLOAD, "bfloat16"),
        (DIST | OFFLOAD, DIST, "bfloat16"),
        (OFFLOAD, {}, "float32"),
        (OFFLOAD, OFFLOAD, "float32"),
    ],
)
def test_a_checkpoint_resumes_with_and_without(
    tmp_path: Path, first: dict[str, Any], then: dict[str, Any], dtype: str
) -> None:
    """The loading learner has stepped, so that each main parameter and moment must be replaced."""
    learner = ranks.make(first, dtype=dtype)
    ranks.step(learner, 0)
    learner.save(tmp_path / "saved")
    want = [ranks.step(learner, number) for number in (1, 2)]
    weights = kit.state(learner.export())
    learner.close()
    other = ranks.make(then, dtype=dtype)
    ranks.step(other, 3)
    ranks.step(other, 4)
    other.load(tmp_path / "saved")
    assert [ranks.step(other, number) for number in (1, 2)] == want
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

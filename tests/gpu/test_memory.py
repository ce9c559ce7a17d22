"""Who gives GPU memory back, and what comes back into it."""

import dataclasses
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlcore.cli.settings import parse
from rlcore.config.schema import ModelConfig, TrainConfig
from rlcore.hf.config import HFConfig
from rlcore.mcore.layout import layout_of
from rlcore.mcore.learner import MegatronLearner
from rlcore.rollout.torch_engine.engine import TorchEngine
from rlcore.sync.pack import load_weights
from rlcore.trainer import memory
from rlcore.utils.host_room import BLOCK
from tests import kit, runs
from tests.contracts.engine_contract import requests as some_requests
from tests.contracts.engine_contract import run, weights
from tests.gpu import side
from tests.ranks import learner_ranks as ranks

pytestmark = [pytest.mark.gpu, side.needs_gpu]

WHOLE_DEVICE = True
"""`tools/gpu_check.sh` runs this file alone: it measures free memory."""

# 17 million parameters: much against cuBLAS' workspace, which stays.
LARGE = {
    "vocab_size": 16_384,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


@pytest.fixture(autouse=True)
def _clean():
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


def large() -> HFConfig:
    return HFConfig.from_dict(kit.tiny_config("qwen3", **LARGE))


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offload_frees_the_memory_and_onload_restores_every_bit(
    dtype: str, distributed: bool
) -> None:
    train = TrainConfig(lr=1e-4, distributed_optimizer=distributed)
    model = ModelConfig(dtype=dtype, random_init=True)
    learner = MegatronLearner(large(), model, train, seed=3)
    try:
        ranks.step(learner, 0)
        held = sum(learner.resident_bytes().values())
        per_parameter = 18 if dtype == "bfloat16" else 16  # main parameters are the parameters
        count = sum(p.numel() for p in learner._parameters())
        assert abs(held / count - per_parameter) < 0.1
        for _ in range(2):
            logp, state = learner.logprobs(ranks.rows(0)), side.state(learner)
            allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            learner.offload()
            learner.offload()  # once is enough
            assert allocated - torch.cuda.memory_allocated() > 0.99 * held
            assert (
                reserved - torch.cuda.memory_reserved() > 0.5 * held
            )  # segments that others share stay
            with pytest.raises(RuntimeError, match="offloaded; call onload"):
                learner.logprobs(ranks.rows(0))
            learner.onload()
            learner.onload()
            assert torch.cuda.memory_allocated() > 0.99 * allocated
            kit.assert_bitwise(side.state(learner), state)
            assert torch.equal(learner.logprobs(ranks.rows(0)), logp)
            assert not any(t.any() for t in learner._gradient_buffers())
            assert ranks.step(learner, 1)["actor/skipped"] == 0
    finally:
        learner.close()


def test_parts_go_by_themselves_and_host_memory_is_taken_once() -> None:
    learner = MegatronLearner(
        large(), ModelConfig(dtype="bfloat16", random_init=True), TrainConfig(lr=1e-4), seed=3
    )
    try:
        ranks.step(learner, 0)
        here, state = learner.resident_bytes(), side.state(learner)
        held = []
        for _ in range(3):
            learner.offload(["optimizer", "gradients"])
            steps = learner.resident_bytes()["optimizer"]  # Adam counts on the host
            assert steps < 1e5
            assert learner.resident_bytes() == here | {"optimizer": steps, "gradients": 0}
            kit.assert_bitwise(kit.state(learner.export()), kit.state(learner.export()))
            learner.offload(["weights"])
            held.append(sum(part.host_bytes for part in learner._parts.values()))
            blocks = [b for part in learner._parts.values() for b in part._room._blocks]
            assert blocks and all(block.is_pinned() for block in blocks)  # else copies are slow
            assert sum(learner.resident_bytes().values()) == steps
            learner.onload()
            kit.assert_bitwise(side.state(learner), state)
        kept = here["weights"] + here["optimizer"]
        assert len(set(held)) == 1 and kept <= held[0] < kept + 2 * BLOCK
    finally:
        learner.close()


def test_offload_does_not_change_the_training() -> None:
    found = {}
    for offload in (False, True):
        with side.learner({"distributed_optimizer": True}, dtype="bfloat16") as learner:
            figures = []
            for number in range(3):
                figures.append(ranks.step(learner, number))
                if offload:
                    learner.offload()
                    learner.onload()
            found[offload] = figures, side.state(learner)
    assert found[True][0] == found[False][0]
    kit.assert_bitwise(found[True][1], found[False][1])


def test_a_closed_learner_leaves_nothing_but_workspaces() -> None:
    before = torch.cuda.memory_allocated()
    learner = MegatronLearner(large(), ModelConfig(random_init=True), TrainConfig(lr=1e-4), seed=3)
    ranks.step(learner, 0)
    learner.close()
    del learner
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 100e6


def engine() -> TorchEngine:
    return TorchEngine(
        large(), max_model_tokens=128, dtype="bfloat16", device=side.DEVICE, seed=7, max_running=64
    )


def test_a_sleeping_engine_holds_no_memory_and_wakes_to_the_same_tokens() -> None:
    made, state = engine(), weights(large(), 0, 0.05)
    load_weights(made, state.items(), 0)
    todo = some_requests(16, group=4)
    first = {i: s.tokens.tolist() for i, s in run(made, todo).items()}
    weight_bytes = sum(2 * t.numel() for t in state.values())
    cache_bytes = made.cache_bytes
    assert cache_bytes > 1e6
    allocated = torch.cuda.memory_allocated()
    made.sleep(["kv_cache"])
    assert allocated - torch.cuda.memory_allocated() > 0.99 * cache_bytes
    made.sleep(["weights"])
    assert allocated - torch.cuda.memory_allocated() > 0.99 * (cache_bytes + weight_bytes)
    made.wake(["weights", "kv_cache"])
    load_weights(made, state.items(), 1)
    again = run(made, todo)
    assert {i: s.tokens.tolist() for i, s in again.items()} == first
    assert all(set(s.versions.tolist()) == {1} for s in again.values())
    made.close()
    assert torch.cuda.memory_allocated() < allocated - 0.99 * (weight_bytes + cache_bytes)


def test_a_device_that_somebody_else_holds_is_refused_before_the_learner_comes() -> None:
    cfg = parse(["--model.path", "m", "--train.offload", "--rollout.max_running_requests", "4"])
    total = torch.cuda.get_device_properties(side.DEVICE).total_memory
    plan = memory.make(cfg, large(), layout_of(cfg.train, 1, 0), gpu_bytes=total)
    guard = memory.Residency(plan, side.DEVICE)
    guard.before("load_learner", [])
    guard.check("gen", [])
    found = guard.take()
    assert 0 < found["memory/device_gb/gen"] * 1e9 <= total
    free, _ = torch.cuda.mem_get_info(side.DEVICE)
    held = torch.empty(int(0.98 * free), dtype=torch.uint8, device=side.DEVICE)
    large_plan = dataclasses.replace(
        plan,
        phases=plan.phases | {"update_actor": (memory.Item("learner weights", int(0.5 * total)),)},
    )
    with pytest.raises(
        RuntimeError, match="memory: phase update_actor on rank 0 needs .* more are needed"
    ):
        memory.Residency(large_plan, side.DEVICE).before("load_learner", [])
    del held


def test_a_run_holds_no_more_than_planned_in_any_phase(
    tmp_path: Path, record_property: Callable
) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4}
    runs.tiny_model(tmp_path / "model", **sizes, head_dim=64)  # 40 million parameters
    keys = "--run.steps", 2, "--checkpoint.every", 1, "--checkpoint.no_export_hf"
    side.train(tmp_path, "run", *side.OFFLOAD, *keys)
    row = runs.rows(tmp_path / "runs" / "run")[2]
    found = {}
    for phase in ("gen", "load_learner", "update_weights", "save_checkpoint"):
        taken, planned = (row[f"memory/{what}_gb/{phase}"] for what in ("device", "planned"))
        record_property(phase, f"{taken:.2f} GB, planned {planned:.2f} GB")
        found[phase] = taken, planned
    peak, most = row["perf/max_memory_allocated_gb"], max(planned for _, planned in found.values())
    record_property("peak of tensors", f"{peak:.2f} GB")
    # Weights and gradients are planned without Megatron's padding.
    assert all(0 < taken <= 1.01 * planned for taken, planned in found.values()), found
    assert 0 < peak <= most

"""The learner on a GPU against itself on the CPU, in other precisions and with other layers."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.mcore import experts, wgrad
from rlcore.tensors import LossInputs, LossOutput
from tests import kit
from tests.gpu import side
from tests.ranks import learner_ranks as ranks

pytestmark = pytest.mark.gpu

CASES: dict[str, dict[str, Any]] = {
    "qwen2": {"layout": {}, "arch": "qwen2"},
    "qwen3": {"layout": {"distributed_optimizer": True}},
    "llama": {"layout": {"recompute": "full"}, "arch": "llama"},
    "qwen3_moe": {
        "layout": {"distributed_optimizer": True, "recompute": "selective"},
        "arch": "qwen3_moe",
    },
    "glm4_moe": {"layout": {"distributed_optimizer": True}, "arch": "glm4_moe"},
    "deepseek_v3": {"layout": {"recompute": "selective"}, "arch": "deepseek_v3"},
    "glm4_moe LoRA": {
        "layout": {"distributed_optimizer": True},
        "arch": "glm4_moe",
        "lora": {"rank": 3, "targets": ("up_proj", "down_proj")},
    },
}
MIXTURES = ["qwen3_moe", "glm4_moe", "deepseek_v3"]
LONG = [700, 513, 300, 65, 20, 2]


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


needs_apex = pytest.mark.skipif(
    not installed("fused_weight_gradient_mlp_cuda"),
    reason="Apex' extension fused_weight_gradient_mlp_cuda is not installed",
)


class Likelihood:
    """Minus the log-prob: unlike a policy gradient's, its value says how good the model is."""

    needs_entropy_grad = False

    def __call__(self, x: LossInputs) -> LossOutput:
        return LossOutput(per_token=-x.log_probs, metrics={})


def one_step(learner: Any, lengths: list[int] | None = None) -> dict[str, float]:
    """An update on the likelihood."""
    batch = ranks.rows(0, lengths or ranks.LENGTHS).with_(weight=None)
    learner.accumulate(batch, Likelihood())
    return learner.apply(float(batch.mask.sum()))


# ---- float32: the padded attention, cuBLAS without TF32


@pytest.fixture(scope="module")
def cpu() -> dict[str, Any]:
    return side.on_cpu("gpu.side:parity", cases=CASES)


@pytest.mark.parametrize("case", CASES)
def test_in_float32_a_learner_is_the_same_on_cpu_and_gpu(cpu: dict[str, Any], case: str) -> None:
    want, found = cpu[case], side.parity(0, {case: CASES[case]})[case]
    kit.assert_close_named({"logp": found["logp"]}, {"logp": want["logp"]}, rtol=0, atol=1e-4)
    figures = {name: value for name, value in want.items() if isinstance(value, float)}
    assert figures["actor/grad_norm 0"] > 0.5
    for update, rtol in ((" 0", 1e-4), (" 1", 2e-3)):
        theirs = {name: value for name, value in figures.items() if name.endswith(update)}
        ours = {name: found[name] for name in theirs}
        kit.assert_close_named(ours, theirs, rtol=rtol, atol=1e-5)
    ours = {name: tensor.cpu() for name, tensor in found["weights"].items()}
    kit.assert_close_named(ours, want["weights"], rtol=1e-4, atol=2e-4)


# ---- bfloat16: flash attention, float32 main parameters


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama", "mistral", *MIXTURES])
def test_in_bfloat16_an_update_is_close_to_that_in_float32(arch: str, distributed: bool) -> None:
    layout, found, logps = {"distributed_optimizer": distributed}, {}, {}
    for dtype in ("float32", "bfloat16"):
        with side.learner(layout, arch=arch, dtype=dtype) as learner:
            logps[dtype] = learner.logprobs(ranks.rows(0))
            found[dtype] = one_step(learner)
    exact, rough = found["float32"], found["bfloat16"]
    assert 2 < exact["actor/loss"] < 20
    assert abs(rough["actor/loss"] - exact["actor/loss"]) < 2e-2
    assert rough["actor/skipped"] == 0
    # A few tokens of a mixture may take another expert.
    limit = 0.15 if arch in MIXTURES else 0.05
    assert abs(rough["actor/grad_norm"] / exact["actor/grad_norm"] - 1) < limit
    assert (logps["bfloat16"] - logps["float32"]).abs().mean() < limit / 2


@pytest.mark.parametrize("distributed", [False, True])
def test_main_parameters_move_where_bfloat16_would_round_the_step_away(distributed: bool) -> None:
    layout = {"distributed_optimizer": distributed, "lr": 1e-6}
    with side.learner(layout, dtype="bfloat16") as learner:
        main = side.main_parameters(learner)
        assert main and all(p.dtype is torch.float32 for p in main)
        before = [p.detach().clone() for p in main]
        norms = side.weights(learner)
        assert one_step(learner)["actor/skipped"] == 0
        moved = [float((a != b).float().mean()) for a, b in zip(main, before, strict=True)]
        assert min(moved) > 0.2 and sum(moved) / len(moved) > 0.5
        far = max(float((a - b).abs().max()) for a, b in zip(main, before, strict=True))
        assert far < 2e-6
        after = side.weights(learner)
    for name in [n for n in norms if n.endswith("norm.weight")]:
        assert torch.equal(after[name], norms[name]), name  # 1 + 1e-6 is 1 in bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
def test_two_runs_have_the_same_bits(arch: str, dtype: str) -> None:
    found = []
    for _ in range(2):
        layout = {"distributed_optimizer": True, "tokens_per_micro_batch": 1024}
        with side.learner(layout, arch=arch, dtype=dtype) as learner:
            figures = [one_step(learner, LONG) for _ in range(2)]
            found.append((figures, learner.logprobs(ranks.rows(1, LONG)), side.state(learner)))
    (figures, logp, state), (figures_again, logp_again, state_again) = found
    assert figures == figures_again
    assert torch.equal(logp, logp_again)
    kit.assert_bitwise(state_again, state)


def test_packed_sequences_do_not_see_each_other() -> None:
    with side.learner({"tokens_per_micro_batch": 4096}, dtype="bfloat16") as learner:
        batch = ranks.rows(0, LONG)
        packed = learner.logprobs(batch)
        alone = [learner.logprobs(batch.select([i])) for i in range(batch.num_sequences)]
    distance = (packed - torch.cat(alone)).abs()
    # Products of another size are rounded otherwise; to see a neighbour would be worth nats.
    assert distance.mean() < 1e-2 and distance.max() < 0.25


def test_a_batch_may_lie_on_the_gpu() -> None:
    batch = ranks.rows(0)
    there = batch.with_(
        **{
            name: value.to(side.DEVICE)
            for name in ("tokens", "mask", "old_log_probs", "advantage", "weight", "correction")
            if isinstance(value := getattr(batch, name), Tensor)
        }
    )
    found = []
    for rows in (batch, there):
        with side.learner() as learner:
            logp = learner.logprobs(rows)
            assert logp.device.type == "cpu"
            learner.accumulate(rows, ranks.Loss())
            found.append((logp, learner.apply(float(rows.mask.sum()))))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_the_reference_stands_in_for_the_actor_and_leaves_again() -> None:
    with side.learner({}, keep_reference=True) as learner:
        batch = ranks.rows(0)
        start = learner.logprobs(batch)
        ranks.step(learner, 0)
        moved, state = learner.logprobs(batch), side.state(learner)
        assert torch.equal(learner.logprobs(batch, "reference"), start)
        assert (moved - start).abs().max() > 1e-3
        assert torch.equal(learner.logprobs(batch), moved)
        kit.assert_bitwise(side.state(learner), state)


# ---- what makes it faster where it is installed


def test_the_fastest_adam_that_is_installed_steps() -> None:
    if installed("transformer_engine"):
        from transformer_engine.pytorch.optimizers import FusedAdam as Wanted
    elif installed("apex") and installed("apex.optimizers"):
        from apex.optimizers import FusedAdam as Wanted
    else:
        from torch.optim import AdamW as Wanted
    with side.learner({"distributed_optimizer": True}, dtype="bfloat16") as learner:
        inner = [part.optimizer for part in learner._optimizer.chained_optimizers]
        assert inner and all(isinstance(optimizer, Wanted) for optimizer in inner), inner
        assert ranks.step(learner, 0)["actor/skipped"] == 0


@side.needs_te
@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "qwen3_moe"])
def test_transformer_engines_layers_equal_ours(arch: str) -> None:
    figures, logps, start, after = {}, {}, {}, {}
    for spec in ("local", "te"):
        layout = {"transformer_impl": spec, "distributed_optimizer": True}
        with side.learner(layout, arch=arch, dtype="bfloat16") as learner:
            start[spec] = side.weights(learner)
            logps[spec] = learner.logprobs(ranks.rows(0))
            figures[spec] = one_step(learner)
            after[spec] = side.weights(learner)
    kit.assert_bitwise(start["te"], start["local"])
    assert (logps["te"] - logps["local"]).abs().mean() < 2e-2
    assert abs(figures["te"]["actor/loss"] - figures["local"]["actor/loss"]) < 2e-2
    norms = [figures[spec]["actor/grad_norm"] for spec in ("te", "local")]
    assert abs(norms[0] / norms[1] - 1) < 0.05
    for name in after["local"]:
        step = (after["local"][name] - start["local"][name]).float()
        far = (after["te"][name] - after["local"][name]).float()
        assert far.norm() < 0.5 * step.norm() + 1e-3, name


@needs_apex
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_apex_accumulates_the_same_gradients(dtype: str) -> None:
    found = {}
    for apex in (False, True):
        layout = {"apex": apex, "distributed_optimizer": True}
        with side.learner(layout, dtype=dtype) as learner:
            # Two passes into one gradient: what is accumulated must not be overwritten.
            for number in (0, 1):
                learner.accumulate(ranks.rows(number), ranks.Loss())
            found[apex] = learner.apply(300.0), side.weights(learner)
    limit = 1e-4 if dtype == "float32" else 2e-2
    kit.assert_close_named(found[True][0], found[False][0], rtol=limit, atol=limit)
    kit.assert_close_named(found[True][1], found[False][1], rtol=limit, atol=limit)


@side.needs_gpu
def test_experts_in_one_product_are_those_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    figures, logps, after = {}, {}, {}
    for grouped in (True, False):
        if not grouped:
            monkeypatch.setattr(experts, "can_group", lambda device, dtype: False)
        layout = {"distributed_optimizer": True, "recompute": "full"}
        with side.learner(layout, arch="qwen3_moe", dtype="bfloat16") as learner:
            found = [m for m in learner._models[0].modules() if "local_experts" in dict(m._modules)]
            assert found and all(isinstance(m, experts.GroupedExperts) is grouped for m in found)
            logps[grouped] = learner.logprobs(ranks.rows(0))
            figures[grouped] = one_step(learner)
            after[grouped] = side.weights(learner)
    assert (logps[True] - logps[False]).abs().mean() < 1e-2
    norms = [figures[grouped]["actor/grad_norm"] for grouped in (True, False)]
    assert abs(norms[0] / norms[1] - 1) < 0.02
    kit.assert_close_named(after[True], after[False], rtol=2e-2, atol=2e-3)


@side.needs_gpu  # CPUs round the product before they add it
@side.needs_real_gpu
def test_torch_accumulates_the_same_gradients_as_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(wgrad, "prepare", lambda dtype: False)
        with side.learner({"distributed_optimizer": True}, dtype="bfloat16") as learner:
            assert learner._models[0].config.gradient_accumulation_fusion is fused
            for number in (0, 1):
                learner.accumulate(ranks.rows(number), ranks.Loss())
            found[fused] = learner.apply(300.0), side.weights(learner)
    kit.assert_close_named(found[True][0], found[False][0], rtol=2e-2, atol=2e-2)
    kit.assert_close_named(found[True][1], found[False][1], rtol=2e-2, atol=2e-2)


def test_without_deterministic_kernels_an_update_is_the_same_but_for_rounding() -> None:
    found = {}
    for fixed in (True, False):
        layout = {"distributed_optimizer": True, "deterministic": fixed}
        with side.learner(layout, dtype="bfloat16") as learner:
            found[fixed] = one_step(learner, LONG), learner.logprobs(ranks.rows(1, LONG))
    kit.assert_close_named(found[False][0], found[True][0], rtol=2e-2, atol=2e-2)
    assert (found[False][1] - found[True][1]).abs().mean() < 2e-2

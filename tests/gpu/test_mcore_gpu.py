"""The learner on an NVIDIA GPU: attention kernel, offload, Transformer Engine's layers."""

import importlib.util

import pytest
import torch

pytestmark = pytest.mark.gpu

LENGTHS = [37, 5, 64, 21, 1, 20, 19, 2]


def heads(count: int, seed: int, total: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(total, count, 64, generator=generator).cuda()


@pytest.mark.parametrize("cp", [1, 2])
def test_variable_length_attention_equals_the_padded_one(cp: int) -> None:
    from rlcore.mcore import attention

    lengths = LENGTHS if cp == 1 else [-(-n // (2 * cp)) * 2 * cp for n in LENGTHS]
    total, device = sum(lengths), torch.device("cuda")
    for rank in range(cp):
        made = attention.plan(lengths, cp=cp, cp_rank=rank, device=device)
        index, _ = attention.local_positions(lengths, cp, rank)
        q = heads(4, 0, total)[index.cuda()].requires_grad_()
        k, v = heads(2, 1, total).requires_grad_(), heads(2, 2, total).requires_grad_()
        grad = heads(4, 3, total)[index.cuda()]
        want = attention.attend(q, k, v, made)
        ours = attention.attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), made)
        assert (ours.float() - want).abs().max() < 2e-2
        wants = torch.autograd.grad(want, (q, k, v), grad)
        grads = torch.autograd.grad(ours, (q, k, v), grad.bfloat16())
        for a, b in zip(grads, wants, strict=True):
            assert (a - b).abs().max() < 3e-2 * b.abs().max()


def test_offload_frees_the_memory_and_onload_brings_everything_back() -> None:
    from tests import kit
    from tests.ranks import learner_ranks as ranks

    learner = ranks.make({"distributed_optimizer": True}, dtype="bfloat16")
    try:
        ranks.step(learner, 0)
        before, held = kit.state(learner.export()), torch.cuda.memory_allocated()
        before = {name: tensor.cpu() for name, tensor in before.items()}
        learner.offload()
        assert torch.cuda.memory_allocated() < held / 4
        learner.onload()
        after = {name: tensor.cpu() for name, tensor in learner.export()}
        kit.assert_bitwise(after, before)
        assert ranks.step(learner, 1)["actor/skipped"] == 0.0
    finally:
        learner.close()


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="Transformer Engine is not installed",
)
@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_transformer_engines_layers_equal_ours(arch: str) -> None:
    from tests import kit
    from tests.ranks import learner_ranks as ranks

    found = {}
    for spec in ("local", "te"):
        learner = ranks.make({"spec": spec}, arch=arch, dtype="bfloat16")
        found[spec] = {"logp": learner.logprobs(ranks.rows(0))} | ranks.step(learner, 0)
        learner.close()
    kit.assert_close_named(found["te"], found["local"], rtol=5e-2, atol=5e-2)

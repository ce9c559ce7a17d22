"""A critic in a world of one, in this process. tests/ranks/test_critic.py has the layouts."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlcore.hf.names import HEAD
from rlcore.mcore.learner import MegatronLearner
from rlcore.tensors import LossOutput, ValueInputs
from tests import kit
from tests.ranks import critic_ranks as critics
from tests.ranks import learner_ranks as ranks

DIST = {"distributed_optimizer": True}


@pytest.fixture
def actor() -> Iterator[MegatronLearner]:
    made = ranks.make(DIST)
    yield made
    made.close()


@pytest.fixture
def critic() -> Iterator[MegatronLearner]:
    made = critics.make(DIST)
    critics.set_head(made)
    yield made
    made.close()


def squares(x: ValueInputs) -> LossOutput:
    return LossOutput(per_token=(x.value - x.returns).square(), metrics={})


# ---- values


def test_a_value_is_the_hidden_state_before_the_token_times_the_head(
    actor: MegatronLearner, critic: MegatronLearner
) -> None:
    batch = ranks.rows(0)
    hidden: list[Tensor] = []
    norm = actor._models[0].module.decoder.final_layernorm
    norm.register_forward_hook(lambda module, x, out: hidden.append(out.squeeze(1)))
    head = critics.head_of(critic)
    by_hand = []
    for row in range(batch.num_sequences):
        actor.logprobs(batch.select([row]))
        by_hand.append(torch.cat([torch.zeros(1), (hidden[-1] @ head.squeeze(0))[:-1]]))
    found = critic.values(batch)
    assert found.dtype is torch.float32 and found.abs().max() > 1
    assert torch.allclose(found, torch.cat(by_hand), rtol=1e-5, atol=1e-5)


METRICS = ("grad_norm", "lr", "loss", "skipped", "shared_tokens")


def test_a_new_critic_says_zero_and_learns_from_the_first_update() -> None:
    critic = critics.make({"adam_eps": 1e-8})
    try:
        batch = critics.rows(0).with_(value_old=None, weight=None)
        assert not critic.values(batch).any()
        seen: list[ValueInputs] = []

        def look(x: ValueInputs) -> LossOutput:
            seen.append(x)
            return squares(x)

        critic.accumulate(batch, look)
        metrics = critic.apply(float(batch.mask.sum()))
        assert metrics.keys() == {f"critic/{n}" for n in METRICS}
        want = batch.returns[batch.mask].square().mean()
        assert metrics["critic/loss"] == pytest.approx(float(want), rel=1e-5)
        after = critic.values(batch)
        assert after[batch.mask].all()
        firsts = batch.cu_seqlens[:-1].long()
        assert not after[firsts].any()
        assert sum(int((~x.mask).sum()) for x in seen) == int((~batch.mask).sum())
        assert all(torch.equal(x.value_old, x.value.detach()) for x in seen)
        assert all(x.value.requires_grad for x in seen)
    finally:
        critic.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_values_are_multiplied_in_float32_at_least(dtype: str) -> None:
    critic = critics.make({}, dtype=dtype)
    try:
        critics.set_head(critic)
        seen: list[Tensor] = []

        def look(x: ValueInputs) -> LossOutput:
            seen.append(x.value.detach())
            return squares(x)

        batch = critics.rows(0)
        critic.accumulate(batch, look)
        wide = torch.float64 if dtype == "float64" else torch.float32
        assert {x.dtype for x in seen} == {wide}
        values = torch.cat(seen)
        assert not torch.equal(values, values.bfloat16().to(wide))
        assert critic.values(batch).dtype is torch.float32
        assert critic.apply(10.0)["critic/skipped"] == 0
    finally:
        critic.close()


def test_a_gradient_that_is_not_finite_changes_nothing(critic: MegatronLearner) -> None:
    before = critics.weights(critic)
    batch = critics.rows(0)
    critic.accumulate(batch, lambda x: LossOutput(per_token=x.value * float("inf"), metrics={}))
    assert critic.apply(10.0)["critic/skipped"] == 1.0
    kit.assert_bitwise(critics.weights(critic), before)
    assert critics.step(critic, 0)["critic/skipped"] == 0.0
    assert critic.version == 1


# ---- the trunk


def test_the_trunk_comes_from_a_folder_without_lm_head(tmp_path: Path) -> None:
    folder = kit.tiny_hf_folder(tmp_path, "llama")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[HEAD]
    save_file(tensors, file, metadata={"format": "pt"})
    critic = critics.make({}, folder=str(folder))
    try:
        found = critics.weights(critic)
        assert not found.pop("head").any()
        kit.assert_bitwise(found, tensors)
    finally:
        critic.close()
    with pytest.raises(ValueError, match="lm_head"):
        ranks.make({}, folder=str(folder))


def test_a_tied_model_has_an_embedding_that_the_head_leaves_alone(critic: MegatronLearner) -> None:
    assert critic.hf.tie_word_embeddings
    embedding = critic._models[0].module.embedding.word_embeddings.weight.detach().clone()
    critics.set_head(critic)
    assert critics.head_of(critic).shape == (1, 32)
    assert torch.equal(critic._models[0].module.embedding.word_embeddings.weight, embedding)


# ---- two learners in one process


def test_the_last_learner_to_leave_takes_the_world_with_it(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    actor = ranks.make(DIST)
    state = torch.get_rng_state()
    critic = critics.make(DIST)
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn, nothing is seeded
    actor.close()
    actor.close()
    assert critics.step(critic, 0)["critic/grad_norm"] > 0
    critic.save(tmp_path / "critic")
    critic.close()
    assert not dist.is_initialized()


def test_a_learner_that_cannot_be_made_leaves_nothing_behind(tmp_path: Path) -> None:
    kit.tiny_hf_folder(tmp_path, "qwen3")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="model.safetensors"):
        critics.make({}, folder=str(tmp_path))
    assert not dist.is_initialized()


def test_actor_and_critic_share_no_memory_that_is_parked(
    actor: MegatronLearner, critic: MegatronLearner
) -> None:
    ranks.step(actor, 0)
    critics.step(critic, 0)
    storages = []
    for learner in (actor, critic):
        kept = [*learner._parameters(), *learner._optimizer_tensors()]
        tensors = [*kept, *learner._gradient_buffers()]
        storages.append({t.untyped_storage().data_ptr() for t in tensors})
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        count = sum(p.numel() for p in learner._parameters())
        # Weights, two moments, gradients; the step counts and padding are small.
        assert 16 * count <= sum(sizes.values()) < 17 * count
    assert not storages[0] & storages[1]


# ---- what a critic is not


def test_a_critic_has_no_log_probs_and_an_actor_no_values(
    actor: MegatronLearner, critic: MegatronLearner
) -> None:
    batch = critics.rows(0)
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: critic.logprobs(batch), "logprobs of a critic: .*; use the actor"),
        (lambda: critic.logprobs(batch, "reference"), "logprobs of a critic: .*; use the actor"),
        (lambda: critic.export(), "export of a critic: .*; use the actor"),
        (lambda: critic.reference().__enter__(), "keep_reference"),
        (lambda: actor.values(batch), "values of an actor: .*; use the critic"),
    ]
    for call, sentence in refused:
        with pytest.raises(RuntimeError, match=sentence):
            call()


def test_a_critic_wants_returns_and_no_reference(critic: MegatronLearner) -> None:
    with pytest.raises(ValueError, match="the batch has no returns"):
        critic.accumulate(ranks.rows(0), squares)
    critic.accumulate(ranks.rows(0).select([]), squares)
    assert critic.apply(1.0)["critic/grad_norm"] == 0
    with pytest.raises(ValueError, match="keep_reference True: a critic"):
        critics.make(DIST, keep_reference=True)


def test_actors_and_critics_do_not_load_each_others_checkpoints(
    actor: MegatronLearner, critic: MegatronLearner, tmp_path: Path
) -> None:
    actor.save(tmp_path / "actor")
    critic.save(tmp_path / "critic")
    with pytest.raises(ValueError, match="head lm, but this model has head value"):
        critic.load(tmp_path / "actor")
    with pytest.raises(ValueError, match="head value, but this model has head lm"):
        actor.load(tmp_path / "critic")
    actor.load(tmp_path / "actor")
    critic.load(tmp_path / "critic")

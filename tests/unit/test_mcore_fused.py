"""--train.fused_loss and --train.head_chunk_tokens in a world of one, in this process.
tests/ranks/test_fused_layouts.py has the layouts."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from rlcore import algos
from rlcore.algos.objective import Objective
from rlcore.config import rules
from rlcore.config.schema import Config, SelectConfig, TrainConfig
from rlcore.mcore.learner import MegatronLearner
from rlcore.ops import native
from rlcore.tensors import Batch, LossInputs, LossOutput
from tests import kit
from tests.ranks import learner_ranks, objective_ranks

WAYS = {
    "plain": {},
    "fused": {"fused_loss": True},
    "chunks": {"head_chunk_tokens": 7},
    "fused, chunks": {"fused_loss": True, "head_chunk_tokens": 7},
    "chunks, fp32 logits": {"head_chunk_tokens": 7, "fp32_lm_head": True},
}
SETTINGS = {
    "kl_coef": 0.1,
    "entropy_coef": 0.01,
    "rollout_is_threshold": 1.1,
    "rollout_rs": ("token_k1",),
    "rollout_rs_threshold": ("0.8_1.3",),
}


def objective(name: str = "grpo", **settings: Any) -> Objective:
    cfg = algos.config_class(name)(**settings)
    return Objective(algos.module(name), cfg, max_tokens=20)


def batch_near(learner: MegatronLearner) -> Batch:
    """Rows whose policies are near the learner's."""
    rows = objective_ranks.rows()
    return objective_ranks.with_log_probs(rows, learner.logprobs(rows))


def two_updates(way: str, dtype: str, batch: Batch | None) -> tuple[Batch, dict[str, Any]]:
    """The first of a rollout, whose old log-probs are its own, and one with given ones. The batch
    is the first learner's."""
    layout = WAYS[way] | {"distributed_optimizer": dtype == "bfloat16"}
    learner = learner_ranks.make(layout, dtype=dtype)
    batch = batch_near(learner) if batch is None else batch
    found: dict[str, Any] = {"logp": learner.logprobs(batch)}
    for step, rows in enumerate((batch.with_(old_log_probs=None), batch)):
        loss = objective(**SETTINGS)
        learner.accumulate(rows, loss)
        figures = {"tokens": float(learner.kept()[0])} | loss.mismatch(lambda xs, _: xs)
        figures |= learner.apply(50.0)
        found[f"figures {step}"] = figures
    found["weights"] = kit.state(learner.export())
    learner.close()
    return batch, found


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_every_way_trains_alike_and_reports_alike(dtype: str) -> None:
    batch, want = two_updates("plain", dtype, None)
    limit = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 2e-2}[dtype]
    every = {"actor/kl_loss", "actor/pg_clipfrac", "actor/entropy", "rollout_corr/kl", "actor/lr"}
    assert every <= want["figures 0"].keys()
    trained = int(batch.mask.sum())
    assert 0 < want["figures 0"]["tokens"] < trained  # rejection is at work
    for way in list(WAYS)[1:]:
        if dtype == "bfloat16" and WAYS[way].get("fp32_lm_head"):
            continue  # the other ways round logits
        _, found = two_updates(way, dtype, batch)
        for name, value in want.items():
            if isinstance(value, dict):
                kit.assert_close_named(found[name], value, rtol=limit, atol=limit)
            else:
                kit.assert_close_named({name: found[name]}, {name: value}, rtol=limit, atol=limit)


def test_the_weights_gradient_adds_up_in_float32_for_bfloat16() -> None:
    """One update of a tied model: main_grad is float32 and holds embedding and output layer."""
    found = {}
    for way, layout in WAYS.items():
        learner = learner_ranks.make(layout, dtype="bfloat16")
        learner.accumulate(batch_near(learner), objective())
        (weight,) = (p for n, p in learner._models[0].named_parameters() if "word_emb" in n)
        assert weight.main_grad.dtype is torch.float32 and weight.grad is None
        found[way] = weight.main_grad.clone()
        learner.close()
    for way, grad in found.items():
        apart = (grad - found["plain"]).norm() / found["plain"].norm()
        assert apart < 0.02, way


def test_a_loss_of_any_form_takes_chunks() -> None:
    """With sequence terms, entropy and rejection; and it is not asked for what to fuse."""
    found = {}
    for way in ("plain", "chunks"):
        learner = learner_ranks.make(WAYS[way])
        found[way] = [learner_ranks.step(learner, n) for n in range(2)]
        found[way].append(kit.state(learner.export()))
        learner.close()
    for ours, theirs in zip(found["chunks"], found["plain"], strict=True):
        kit.assert_close_named(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_an_empty_batch_takes_part_and_a_rerun_has_the_same_bits(way: str) -> None:
    runs = []
    for _ in range(2):
        learner = learner_ranks.make(WAYS[way])
        batch = batch_near(learner)
        learner.accumulate(batch.select([]), objective())
        learner.accumulate(batch, objective())
        runs.append(learner.apply(9.0) | kit.state(learner.export()))
        learner.close()
    assert runs[0]["actor/grad_norm"] > 0
    kit.assert_bitwise(*runs)


def test_a_checkpoint_does_not_know_how_the_head_was_applied(tmp_path: Any) -> None:
    found = []
    for i, way in enumerate(("chunks", "plain")):
        learner = learner_ranks.make(WAYS[way])
        if i == 0:
            learner_ranks.step(learner, 0)
            learner.save(tmp_path / "one")
        else:
            learner.load(tmp_path / "one")
        found.append(learner.logprobs(learner_ranks.rows(1)))
        learner.close()
    assert (found[0] - found[1]).abs().max() < 1e-6


def test_the_reference_and_a_critic_go_through_the_same_settings() -> None:
    learner = learner_ranks.make(WAYS["chunks"], keep_reference=True)
    batch = learner_ranks.rows(0)
    start = learner.logprobs(batch)
    learner_ranks.step(learner, 0)
    assert torch.equal(learner.logprobs(batch, "reference"), start)
    assert not torch.allclose(learner.logprobs(batch), start, atol=1e-4)
    critic = learner_ranks.make(WAYS["fused, chunks"], head="value")
    assert (critic.values(batch) == 0).all()
    critic.close()
    learner.close()


def test_what_runs_is_announced_when_the_learner_is_built(caplog: pytest.LogCaptureFixture) -> None:
    native.torch_ops.cache_clear()
    with caplog.at_level("INFO", logger="rlcore"):
        learner_ranks.make(WAYS["fused, chunks"]).close()
    said = caplog.text
    assert "fused policy loss, output layer in chunks of 7 tokens" in said
    for op in ("token_logprob", "policy_loss"):
        assert f"{op}: native on cpu" in said or f"{op}: torch on cpu" in said


def test_what_cannot_be_fused_is_refused_before_anything_runs() -> None:
    learner = learner_ranks.make(WAYS["fused"])
    batch = learner_ranks.rows(0)
    with pytest.raises(ValueError, match="--train.fused_loss: this loss has no `policy`"):
        learner.accumulate(batch, learner_ranks.Loss())
    with pytest.raises(ValueError, match="--train.fused_loss: the batch has no rollout_log_probs"):
        learner.accumulate(batch, objective())
    learner.close()


@pytest.mark.parametrize("settings", [{"rollout_is": "none"}, {"bypass_mode": True}, {}], ids=str)
def test_a_correction_that_comes_with_the_batch_counts_as_in_the_text(settings: Any) -> None:
    found = []
    for way in ("plain", "fused"):
        learner = learner_ranks.make(WAYS[way])
        batch = batch_near(learner)
        g = torch.Generator().manual_seed(3)
        batch = batch.with_(correction=4 * torch.rand(batch.num_tokens, generator=g))
        learner.accumulate(batch, objective(**settings))
        found.append(learner.apply(9.0))
        learner.close()
    kit.assert_close_named(found[1], found[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_loss_whose_text_says_something_else_is_not_trained_quietly(
    monkeypatch: pytest.MonkeyPatch, what: str, own: bool
) -> None:
    """A fork's edit of algos/grpo.py: three times the loss, or the same with another gradient."""
    text = algos.module("grpo").loss

    def edited(x: LossInputs, cfg: Any) -> LossOutput:
        out = text(x, cfg)
        terms = out.per_token
        more = terms if what == "loss" else terms - terms.detach()
        return replace(out, per_token=terms + 2 * more)

    learner = learner_ranks.make(WAYS["fused"])
    batch = batch_near(learner)
    batch = batch.with_(old_log_probs=None) if own else batch
    monkeypatch.setattr(algos.module("grpo"), "loss", edited)
    with pytest.raises(ValueError, match=f"fused_loss: .* another loss: the {what} of a token"):
        learner.accumulate(batch, objective())
    learner.close()


def test_weight_0_on_a_trained_token_is_refused() -> None:
    """Its log-prob would count as 0 in the metrics."""
    learner = learner_ranks.make(WAYS["fused"])
    batch = batch_near(learner)
    with pytest.raises(ValueError, match="--train.fused_loss: the batch has weight 0 on trained"):
        learner.accumulate(batch.with_(weight=1.0 - batch.mask.float()), objective())
    learner.accumulate(batch.with_(weight=batch.mask.float()), objective())
    learner.close()


def config(algo: str, fused: bool = True, **settings: Any) -> Config:
    return replace(
        Config(),
        select=SelectConfig(algo=algo),
        algo=algos.config_class(algo)(**settings),
        train=TrainConfig(fused_loss=fused),
    )


@pytest.mark.parametrize("algo", algos.NAMES)
def test_the_configuration_refuses_fused_loss_exactly_where_it_cannot_be(algo: str) -> None:
    named = [line for line in rules.broken(config(algo)) if "--train.fused_loss" in line]
    assert not [x for x in rules.broken(config(algo, fused=False)) if "fused_loss" in x]
    if algo in ("ppo", "grpo", "dapo", "dr_grpo"):
        assert not named
        for level in ("sequence", "geometric"):
            found = rules.broken(config(algo, rollout_is=level))
            (line,) = [x for x in found if "fused_loss" in x]
            assert f"rollout_is {level} " in line and "use token or none" in line
        for keys in ({"off_policy_mask_threshold": 0.5}, {"kl_coef": 0.1, "kl_unbiased": True}):
            (line,) = [x for x in rules.broken(config(algo, **keys)) if "fused_loss" in x]
            assert f"--algo.{list(keys)[-1]} " in line and "turn fused_loss off" in line
    else:
        assert len(named) == 1 and algo in named[0] and "turn it off" in named[0]


def test_a_negative_chunk_is_refused() -> None:
    broken = rules.broken(replace(Config(), train=TrainConfig(head_chunk_tokens=-1)))
    assert "--train.head_chunk_tokens -1: must be 0 or more" in broken


def test_fp32_logits_need_chunks_and_half_precision() -> None:
    alone = replace(Config(), train=TrainConfig(fp32_lm_head=True))
    assert any(
        "--train.fp32_lm_head True: needs train.head" in line for line in rules.broken(alone)
    )
    chunks = replace(Config(), train=TrainConfig(fp32_lm_head=True, head_chunk_tokens=64))
    assert not any("fp32_lm_head" in line for line in rules.broken(chunks))


def test_log_probs_of_a_bfloat16_learner_do_not_round_logits() -> None:
    batch, found = objective_ranks.rows(), {}
    for name, layout in {"rounded": WAYS["chunks"], "fp32": WAYS["chunks, fp32 logits"]}.items():
        learner = learner_ranks.make(layout, dtype="bfloat16")
        found[name] = learner.logprobs(batch)
        learner.close()
    gap = (found["rounded"] - found["fp32"]).abs().max()
    assert 1e-4 < gap < 0.1

"""The loss of rows, `algos.loss_of`: by hand, padded and packed, as the learner computes it, and
what it refuses. test_compare_algos.py has it on every row of the comparison."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore import algos
from rlcore.algos import update
from rlcore.algos.objective import Objective
from rlcore.tensors import LossInputs
from rlcore.trainer import plan
from tests.ranks import learner_ranks, objective_ranks

NAN = math.nan
LENGTHS = [6, 0, 4]
R = 7
REJECTS_NOTHING: dict[str, Any] = {"rollout_rs": ("token_k2",), "rollout_rs_threshold": ("1e9",)}


def padded(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Three responses, one without a trained token, and NaN in the padding."""
    g = torch.Generator().manual_seed(0)
    mask = torch.arange(R) < torch.tensor(LENGTHS)[:, None]

    def near(scale: float, to: Tensor | float = -1.0) -> Tensor:
        return torch.where(mask, to + scale * torch.randn(3, R, generator=g, dtype=dtype), NAN)

    logp = near(0.3)
    top = torch.randn(3, R, 5, generator=g, dtype=dtype).log_softmax(-1)[..., :3]
    return {
        "log_probs": logp.clone().requires_grad_(),
        "entropy": near(0.1, 1.0).requires_grad_(),
        "mask": mask,
        "score": torch.tensor([1.0, 0.0, 0.0], dtype=dtype),
        "advantage": torch.tensor([1.5, -7.0, -0.5], dtype=dtype),
        "old_log_probs": near(0.2, logp),
        "rollout_log_probs": near(0.3, logp),
        "ref_log_probs": near(0.2, logp),
        "teacher_log_probs": near(0.2, logp),
        "teacher_top_log_probs": torch.where(mask[..., None], top.flip(-1), NAN),
        "top_log_probs": torch.where(mask[..., None], top, NAN).requires_grad_(),
    }


def packed(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same rows without padding, each behind two tokens that are not trained."""
    mask, out = rows["mask"], {}
    for name, value in rows.items():
        value = value.detach()
        if value.dim() == 1:
            value = value[:, None].expand(mask.shape)
        parts = []
        for row, n in enumerate(LENGTHS):
            part = value[row, :n]
            before = torch.full_like(value[row, :2], 0 if name == "mask" else 3)
            parts += [before, part]
        out[name] = torch.cat(parts)
    out["sequence"] = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS) + 2)
    for name in ("log_probs", "entropy", "top_log_probs"):
        out[name].requires_grad_()
    return out


def test_kept_rows_normaliser_mean_weight_and_loss_by_hand() -> None:
    """reinforce, -w A log p. The weights are 2, 1/2, 3, 1: 3 is capped at 2, their mean is 5.5 / 4.
    The rule takes the third token, whose 1 / w is below 0.4, and with it the whole second row."""
    w = torch.tensor([[2.0, 0.5], [3.0, 1.0], [1.0, 1.0]]).double()
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    logp = torch.tensor([[-1.0, -2.0], [-3.0, -4.0], [-5.0, -6.0]]).double().requires_grad_()
    rows = {
        "log_probs": logp,
        "mask": mask,
        "advantage": torch.tensor([1.0, -1.0, 9.0]).double(),
        "old_log_probs": torch.zeros(3, 2).double(),
        "rollout_log_probs": -w.log(),
    }
    settings = {"rollout_is_batch_normalize": True, "rollout_rs": ("token_k1",)}
    settings |= {"rollout_rs_threshold": ("0.4_2.5",)}
    mean = (2 + 0.5 + 2) / 3
    total = (2 * 1 + 0.5 * 2) / mean
    for mode, n, want in (
        ("token-mean", 2, total / 2),
        ("seq-mean-token-sum", 1, total),
        ("seq-mean-token-mean", 1, total / 2),
        ("seq-mean-token-sum-norm", 1, total / 8),
    ):
        found = algos.loss_of(rows, "reinforce", max_tokens=8, loss_agg_mode=mode, **settings)
        assert found.kept.tolist() == [[True, True], [False, False], [False, False]]
        assert found.normaliser == n and found.correction_mean == pytest.approx(mean, rel=1e-15)
        assert found.loss.item() == pytest.approx(want, rel=1e-14), mode
    (gradient,) = torch.autograd.grad(found.loss, logp)
    assert gradient.tolist() == [[-2 / mean / 8, -0.5 / mean / 8], [0, 0], [0, 0]]
    assert found.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 3)
    assert found.metrics["actor/pg_loss"] == pytest.approx(total / 2)
    assert not {"actor/entropy", "rollout_corr/score_is"} & found.metrics.keys()  # not given


@pytest.mark.parametrize("name", algos.NAMES)
@pytest.mark.parametrize("rule", [(), ("token_k1",)])
def test_padded_and_packed_rows_give_one_loss_and_one_gradient(name: str, rule: tuple) -> None:
    """NaN in the padding and 3 on prompts have no influence."""
    settings: dict[str, Any] = {"rollout_rs": rule, "kl_coef": 0.1, "entropy_coef": 0.01}
    rows = padded()
    flat = packed(rows)
    inside = flat["mask"].bool()
    one = algos.loss_of(rows, name, max_tokens=9, **settings)
    other = algos.loss_of(flat, name, max_tokens=9, **settings)
    torch.testing.assert_close(one.loss, other.loss, rtol=1e-13, atol=0)
    assert torch.equal(one.kept[rows["mask"]], other.kept[inside])
    assert one.normaliser == other.normaliser > 0
    assert one.metrics == pytest.approx(other.metrics, rel=1e-10)
    leaves = [n for n in ("log_probs", "entropy", "top_log_probs") if rows[n].requires_grad]
    for a, b in zip(
        torch.autograd.grad(one.loss, [rows[n] for n in leaves], allow_unused=True),
        torch.autograd.grad(other.loss, [flat[n] for n in leaves], allow_unused=True),
        strict=True,
    ):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a[rows["mask"]], b[inside], rtol=1e-12, atol=1e-15)
            assert not a[~rows["mask"]].any() and not b[~inside].any()


@pytest.mark.parametrize("name", objective_ranks.OBJECTIVES)
def test_the_learner_has_this_loss_from_many_micro_batches(name: str) -> None:
    """The inputs of all micro-batches, joined, give the loss and the metrics of the update."""
    algo, settings = objective_ranks.OBJECTIVES[name]
    learner = learner_ranks.make({"tokens_per_micro_batch": 40})
    rows = objective_ranks.rows()
    batch = objective_ranks.with_log_probs(rows, learner.logprobs(rows))
    cfg, seen = algos.config(algo, **settings), []
    objective = Objective(algos.module(algo), cfg, max_tokens=20)

    def spy(x: LossInputs):
        seen.append(x)
        return objective(x)

    learner.accumulate(batch, spy)
    kept = learner.kept()
    joined = {n: [getattr(x, n) for x in seen] for n in update.NAMES}
    start = 0
    for i, x in enumerate(seen):
        joined["sequence"][i], start = x.sequence + start, start + x.num_sequences
    given = {n: torch.cat(parts).detach() for n, parts in joined.items() if parts[0] is not None}
    found = algos.loss_of(given, algo, max_tokens=20, **settings)
    by_mode = {"token-mean": kept[0]}.get(cfg.loss_agg_mode, kept[1])
    assert len(seen) > 2 and found.normaliser == by_mode > 0
    metrics = learner.apply(found.normaliser) | objective.mismatch(lambda values, op: values)
    assert metrics["actor/loss"] == pytest.approx(found.loss.item(), rel=1e-5, abs=1e-7)
    for figure, value in found.metrics.items():
        assert metrics[figure] == pytest.approx(value, rel=1e-4, abs=1e-6), figure
    learner.close()


def test_rows_of_one_sample_are_one_sequence_of_the_normaliser() -> None:
    """N of a loss that rejects is that of the plan, which counts samples, not rows. Rows that lie
    in different micro-batches are joined, too."""
    learner = learner_ranks.make({"tokens_per_micro_batch": 40})
    rows = objective_ranks.rows()
    ids = list(rows.ids)
    ids[1] = ids[-1] = ids[0]  # an episode of three rows
    batch = objective_ranks.with_log_probs(rows.with_(ids=tuple(ids)), learner.logprobs(rows))
    cfg = algos.config("grpo", **REJECTS_NOTHING)
    learner.accumulate(batch, Objective(algos.module("grpo"), cfg, max_tokens=20))
    trained = rows.mask.split(rows.lengths)
    assert all(part.any() for part in trained)
    assert learner.kept() == (int(rows.mask.sum()), len(set(ids))) == (int(rows.mask.sum()), 10)
    learner.discard()
    assert learner.kept() == (0, 0)
    learner.accumulate(batch.with_(ids=()), Objective(algos.module("grpo"), cfg, max_tokens=20))
    assert learner.kept()[1] == len(ids)
    learner.close()


@pytest.mark.parametrize("rules", [{}, REJECTS_NOTHING])
def test_a_row_without_trained_tokens_is_in_no_normaliser(rules: dict[str, Any]) -> None:
    """N of the plan, which the trainer uses if the loss rejects nothing, and N of the loss."""
    members = tuple(
        plan.TrainRow(f"t0.{i}", "t0", 0, 0.0, 0.0, n + 2, 3, num_observed=2)
        for i, n in enumerate(LENGTHS)
    )
    lengths = plan.StepPlan(((members,),), 0).lengths(0)
    found = algos.loss_of(padded(), "gmpo", **rules)
    assert found.normaliser == len(lengths) == 2
    assert algos.loss_of(padded(), "grpo", **rules).normaliser == sum(lengths) == 10


def test_without_a_kept_token_the_loss_is_0_and_n_too() -> None:
    rows = padded() | {"mask": torch.zeros(3, R)}
    found = algos.loss_of(rows, "grpo")
    assert found.normaliser == 0 == found.loss.item() and found.metrics == {}
    found.loss.backward()
    assert not rows["log_probs"].grad.any()


def test_missing_old_and_sampler_log_probs_are_those_of_the_learner() -> None:
    rows = {n: v for n, v in padded().items() if n in ("log_probs", "mask", "advantage")}
    found = algos.loss_of(rows, "grpo")
    assert found.metrics["actor/ppo_kl"] == 0 == found.metrics["rollout_corr/kl"]
    own = {n: rows["log_probs"].detach() for n in ("old_log_probs", "rollout_log_probs")}
    assert torch.equal(algos.loss_of(rows | own, "grpo").loss, found.loss)


def test_only_the_learner_of_this_pass_has_a_gradient() -> None:
    rows = padded()
    old = rows["old_log_probs"].requires_grad_()
    found = algos.loss_of(rows | {"rollout_log_probs": old}, "grpo")
    found.loss.backward()
    assert old.grad is None and rows["log_probs"].grad.abs().sum() > 0


def refused(name: str, rows: dict[str, Any], **settings: Any) -> list[str]:
    with pytest.raises(ValueError) as e:
        algos.loss_of(rows, name, **settings)
    return str(e.value).split("\n")


def test_every_wrong_setting_is_named() -> None:
    wrong = {"clip_lo": 0.1, "kl_type": "k9", "rollout_rs": "token_k1", "clip_high": True}
    said = refused("grpo", padded(), **wrong)
    assert said[0] == "--algo.clip_lo: there is no such key; did you mean --algo.clip_low?"
    assert said[1].startswith("--algo.kl_type 'k9': must be one of k1, k2")
    assert said[2].startswith("--algo.rollout_rs 'token_k1': must be a tuple, each one of token")
    assert said[3:] == ["--algo.clip_high True: must be a number (float)"]
    wrong = {"clip_low": -1, "rollout_is_threshold": 0.5, "rollout_rs": ("token_k2",)}
    said = refused("grpo", padded(), **wrong, bypass_mode=True, rollout_is_batch_normalize=True)
    keys = [line.split(":")[0].split()[0] for line in said]
    assert sorted(keys) == [
        "--algo.clip_low",
        "--algo.rollout_is_batch_normalize",
        "--algo.rollout_is_threshold",
        "--algo.rollout_rs",
    ]
    assert refused("gkd", padded(), rollout_is="token")[0].startswith("--algo.rollout_is token: ")


@pytest.mark.parametrize(
    "key, settings",
    [
        ("kl_target", {"kl_target": 0.1}),
        ("max_replaced_groups", {"max_replaced_groups": 2.0}),
        ("truncated_responses", {"truncated_responses": "drop", "kl_coef": 0.1}),
        ("equal_reward_groups", {"equal_reward_groups": "drop", "entropy_coef": 0.1}),
        ("equal_reward_groups", {"equal_reward_groups": "drop", "adv_estimator": "remax"}),
        ("equal_reward_groups", {"equal_reward_groups": "replace", "adv_estimator": "remax"}),
        ("equal_reward_groups", {"equal_reward_groups": "drop", "adv_estimator": "gdpo"}),
        ("equal_reward_groups", {"equal_reward_groups": "drop", "teacher_kl_coef": 0.1}),
        ("equal_reward_groups", {"equal_reward_groups": "replace", "adv_estimator": "gae"}),
        ("equal_reward_groups", {"equal_reward_groups": "replace", "adv_estimator": "none"}),
        ("kl_reward_coef", {"kl_reward_coef": 0.1, "adv_estimator": "maxrl"}),
        ("kl_reward_coef", {"kl_reward_coef": 0.1, "adv_estimator": "none"}),
        ("overlong_share", {"overlong_share": 0.1, "adv_estimator": "none"}),
        ("whiten_advantages", {"whiten_advantages": True, "adv_estimator": "none"}),
        ("bypass_mode", {"bypass_mode": True, "adv_estimator": "optimal_token_baseline"}),
    ],
)
def test_settings_that_exclude_each_other_are_named(key: str, settings: dict[str, Any]) -> None:
    (said,) = refused("grpo", padded(), **settings)
    assert said.startswith(f"--algo.{key}")


def test_every_tensor_that_is_missing_or_wrong_is_named() -> None:
    rows = padded()
    said = refused("topr", {"log_probs": rows["log_probs"]}, kl_coef=0.1, entropy_coef=0.1)
    names = [line.split()[1] for line in said]
    assert names == ["mask", "advantage", "entropy", "score", "ref_log_probs"]
    assert "max_tokens None" in refused("dr_grpo", rows)[0]
    said = refused("gkd", {n: rows[n] for n in ("log_probs", "mask")})
    assert [line.split()[1] for line in said] == ["teacher_top_log_probs", "top_log_probs"]
    assert "teacher_log_probs" in refused("opd", {n: rows[n] for n in ("log_probs", "mask")})[0]
    said = refused("grpo", {n: rows[n][0] for n in ("log_probs", "mask", "advantage")})
    assert said == [
        "rows: sequence is missing: packed rows need the row of each token; padded rows are [B, R]"
    ]
    old = rows["old_log_probs"].clone()
    old[2, 3] = NAN
    bad = {"old_logprobs": old, "old_log_probs": old, "score": rows["score"][:2]}
    said = refused("grpo", rows | bad | {"log_probs": rows["log_probs"][:, :4]})
    assert sorted(said) == [
        "rows: log_probs has shape [3, 4], mask [3, 7]; it needs one value per token",
        "rows: old_log_probs is not finite at [2, 3], where the mask is 1; check the pass that "
        "produced it",
        "rows: old_logprobs is unknown; did you mean old_log_probs?",
        "rows: score has shape [2], mask [3, 7]; it needs one value per token, or one per padded "
        "row",
    ]
    assert "mask" in refused("grpo", rows | {"mask": rows["mask"] * 0.5})[0]
    of_rows = rows | {"old_log_probs": torch.zeros(3)}  # only advantage and score may be
    assert refused("grpo", of_rows)[0].startswith("rows: old_log_probs has shape [3], mask [3, 7]")
    below = {"sequence": torch.arange(7) - 1} | {n: rows[n][0] for n in ("log_probs", "mask")}
    assert "sequence" in refused("grpo", below | {"advantage": torch.ones(7)})[0]

"""Every algorithm and every way to make advantages and corrections, through the whole program: two
steps each, one after the other in one process."""

import math
from pathlib import Path
from typing import Any

import pytest

from rlcore import algos
from tests import kit, runs

BARE = "--checkpoint.no_at_end", "--checkpoint.no_export_hf", "--eval.no_at_start"
TWO = *BARE, "--eval.no_at_end", "--run.steps", 2, "--train.samples_per_update", 8
OFF = "--algo.rollout_is", "none"
WAYS: dict[str, tuple[Any, ...]] = {
    "remax": ("--algo.adv_estimator", "remax"),
    "rloo": ("--algo.adv_estimator", "rloo"),
    "maxrl": ("--algo.adv_estimator", "maxrl"),
    "opo": ("--algo.adv_estimator", "opo"),
    "passk": ("--algo.adv_estimator", "grpo_passk"),
    "rf": ("--algo.adv_estimator", "reinforce_plus_plus", "--algo.gamma", 0.99),
    "otb": ("--algo.adv_estimator", "optimal_token_baseline"),
    "tir_otb": ("--algo.adv_estimator", "tir_optimal_token_baseline", "--algo.rollout_is", "none"),
    "rf_baseline": ("--algo.adv_estimator", "reinforce_plus_plus_baseline"),
    "whitened": ("--algo.whiten_advantages",),
    "kl_reward": ("--algo.kl_reward_coef", 0.1, "--algo.kl_target", 1e-6, "--algo.kl_horizon", 64),
    "kl_loss": ("--algo.kl_coef", 0.1, "--algo.kl_type", "k3+", "--algo.kl_target", 1e-6),
    "kl_token": ("--algo.kl_reward_coef", 0.1, "--algo.adv_estimator", "reinforce_plus_plus"),
    "sequence_is": ("--algo.rollout_is", "sequence", "--algo.rollout_is_batch_normalize"),
    "geometric_is": ("--algo.rollout_is", "geometric"),
    "rejected": ("--algo.rollout_rs", "token_k1", "--algo.rollout_rs_threshold", 1.001),
    "all_rejected": ("--algo.rollout_rs", "token_k2", "--algo.rollout_rs_threshold", 1e-30),
    "off_policy_mask": ("--algo.off_policy_mask_threshold", 1e-6),
    "kl_unbiased": ("--algo.kl_coef", 0.1, "--algo.kl_unbiased"),
    "ppo_is": ("--algo.bypass_mode",),
    "truncated": ("--algo.truncated_responses", "drop", "--rollout.max_tokens", 12),
    "gdpo": (
        "--algo.adv_estimator",
        "gdpo",
        "--reward",
        "tests.scores.variety:1,tests.scores.half:0.5",
    ),
    "own": ("--algo", "tests.own_algo", "--algo.push", 0.5),
    "warm_critic": ("--algo", "ppo", "--critic.warmup_steps", 1),
}
EVERYTHING = (
    *("--algo", "ppo", "--algo.kl_reward_coef", 0.1, "--algo.kl_target", 1e-6, "--train.epochs", 2),
    *("--algo.kl_horizon", 64, "--checkpoint.every", 1, "--checkpoint.keep", 0),
)
INT8 = "--rollout.quantize", "int8"
"""A sampler that differs from the learner."""


class Found:
    def __init__(self, folder: Path):
        self.folder = folder
        self.model = runs.tiny_model(folder / "model")
        teacher = runs.tiny_model(folder / "teacher")
        kit.random_weights(teacher)
        taught = {
            "opd": ("--teacher.models", teacher),
            "gkd": ("--teacher.models", teacher, "--teacher.top_k", 6),
        }
        jobs = [self.job(name, "--algo", name, *taught.get(name, ())) for name in algos.NAMES]
        jobs += [self.job(name, *INT8, *keys) for name, keys in WAYS.items()]
        jobs += [self.job("off", *OFF), self.job("on"), self.job("int8", *INT8)]
        saved = folder / "runs" / "straight" / "checkpoints" / "step_000001"
        jobs += [
            self.job("straight", *EVERYTHING),
            self.job("resumed", *EVERYTHING, "--run.resume", saved),
        ]
        self.gang = runs.run(1, jobs, folder / "gang")

    def job(self, name: str, *keys: object) -> runs.Job:
        argv = runs.arguments(self.model, self.folder / "runs", name, *TWO, *keys)
        return {"name": name, "argv": argv}

    def rows(self, name: str) -> list[dict[str, float]]:
        self.gang.check(name)
        found = runs.rows(self.folder / "runs" / name)
        return [found[step] for step in (1, 2)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("algos"))


@pytest.mark.parametrize("name", [*algos.NAMES, *WAYS])
def test_two_steps_train(found: Found, name: str) -> None:
    for row in found.rows(name):
        for key, value in row.items():
            assert math.isfinite(value), (key, value)
        if "actor/grad_norm" in row:
            assert row["actor/skipped"] == 0 and row["actor/grad_norm"] > 0
    assert "actor/pg_loss" in found.rows(name)[1] or name == "all_rejected"


def test_with_equal_log_probs_the_correction_is_exactly_nothing(found: Found) -> None:
    """Sampler and learner are the same float32 model here; where they differ by rounding, weights
    do by as much."""
    on, off = found.rows("on"), found.rows("off")
    for row in on:
        assert row["rollout_corr/rollout_is_max"] == pytest.approx(1, abs=1e-4)
    assert on[0]["actor/grad_norm"] == pytest.approx(off[0]["actor/grad_norm"], rel=1e-5)


def test_a_quantised_sampler_shows_in_the_metrics(found: Found) -> None:
    for row in found.rows("int8"):
        assert row["rollout_corr/rollout_is_max"] > 1.0005
        assert row["rollout_corr/rollout_is_eff_sample_size"] < 1
        assert row["training/rollout_probs_diff_max"] > 1e-4
        assert row["rollout_corr/response_max_diff_max"] == pytest.approx(
            row["training/rollout_probs_diff_max"]
        )


def test_rejected_tokens_are_counted_and_leave_the_denominator(found: Found) -> None:
    for row in found.rows("rejected"):
        assert 0 < row["rollout_corr/rollout_rs_masked_fraction"] < 1
    for row in found.rows("all_rejected"):
        assert row["rollout_corr/rollout_rs_masked_fraction"] == 1
        assert row["actor/skipped"] == 2 and "actor/grad_norm" not in row


def test_masked_tokens_are_counted(found: Found) -> None:
    for row in found.rows("off_policy_mask"):
        assert 0 < row["rollout_corr/off_policy_masked_fraction"] < 1
        assert row["actor/skipped"] == 0


def test_bypass_asks_for_no_old_log_probs_and_applies_no_weight(found: Found) -> None:
    for row in found.rows("ppo_is"):
        assert "rollout_corr/rollout_is_max" not in row
        assert row["rollout_corr/k3_kl"] > 0


def test_the_critic_learns_alone_first(found: Found) -> None:
    first, second = found.rows("warm_critic")
    assert "actor/grad_norm" not in first and first["critic/vf_loss"] > 0
    assert second["actor/grad_norm"] > 0 and second["critic/grad_norm"] > 0


def test_the_kl_in_the_reward_is_measured_and_steered(found: Found) -> None:
    first, second = found.rows("kl_reward")
    assert first["actor/reward_kl_penalty_coeff"] == pytest.approx(0.1)
    assert second["actor/reward_kl_penalty_coeff"] != pytest.approx(0.1)
    first, second = found.rows("kl_loss")
    assert second["actor/kl_loss_coeff"] > first["actor/kl_loss_coeff"] == 0.1


def test_gdpo_whitens_and_shows_each_term_of_the_reward(found: Found) -> None:
    for row in found.rows("gdpo"):
        assert row["critic/advantages/mean"] == pytest.approx(0, abs=1e-5)
        total = row["reward/variety"] + 0.5 * row["reward/half"]
        assert row["critic/score/mean"] == pytest.approx(total)


def test_an_algorithm_of_ones_own_brings_its_keys_its_advantages_and_its_metrics(
    found: Found,
) -> None:
    for row in found.rows("own"):
        assert row["critic/advantages/max"] == 1 and row["critic/advantages/min"] == -1
        assert -1 < row["algo/advantage"] < 1


def test_critic_and_kl_controller_resume_bit_for_bit(found: Found) -> None:
    straight = found.rows("straight")[1]
    found.gang.check("resumed")
    resumed = runs.rows(found.folder / "runs" / "resumed")[2]
    assert runs.same(resumed) == runs.same(straight)
    assert resumed["actor/reward_kl_penalty_coeff"] != 0.1


def test_truncated_rows_are_not_trained(found: Found) -> None:
    for row in found.rows("truncated"):
        assert row["training/trained_rows"] == round(16 * (1 - row["response_length/clip_ratio"]))

"""Names, settings and refusals of the algorithms, and the aggregation of their losses."""

import dataclasses
import inspect
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore import algos
from rlcore.algos import (
    clip_cov,
    correction,
    dapo,
    decoupled_ppo,
    dppo,
    gpg,
    grpo,
    kimi15,
    kl_cov,
    ppo,
    reduce,
    reinforce,
    sapo,
    tis_ratio01,
    topr,
    vespo,
)
from rlcore.algos.base import AlgoConfig
from rlcore.config import resolve
from rlcore.rewards import registry
from rlcore.utils import bounds

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def problems(cfg):
    return [*bounds.broken(cfg, "algo"), *cfg.problems()]


# ---- names


@pytest.mark.parametrize("name", algos.NAMES)
def test_every_name_has_a_loss_and_a_config_without_problems(name):
    cfg = algos.config_class(name)()
    assert callable(algos.module(name).loss)
    assert problems(cfg) == []


@pytest.mark.parametrize("name", algos.NAMES)
def test_every_key_of_an_algorithm_says_what_it_does(name):
    """`--help` prints the sentence under a field; a key without one would be silent."""
    own = algos.config_class(name)
    source = inspect.getsource(own)
    for f in own.__annotations__:
        if "ClassVar" not in str(own.__annotations__[f]):
            after = source.split(f"    {f}: ")[1].split("\n")[1]
            assert after.strip().startswith('"""'), f


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(ValueError, match=r"--algo grop: allowed are ppo, grpo, .*mean grpo\?$"):
        algos.module("grop")
    with pytest.raises(ValueError, match="or a dotted path$"):
        algos.module("foo")


def test_a_dotted_path_is_any_module_with_a_loss():
    assert algos.module("rlcore.algos.grpo") is grpo
    assert algos.config_class("rlcore.algos.grpo") is grpo.GRPOConfig
    with pytest.raises(ValueError, match="cannot import no_such_package"):
        algos.module("no_such_package.loss")
    with pytest.raises(ValueError, match="has no function loss"):
        algos.module("json.decoder")


# ---- settings


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (grpo.GRPOConfig(clip_low=-0.1), "--algo.clip_low -0.1: must be 0 or more"),
        (ppo.PPOConfig(clip_high=math.nan), "--algo.clip_high nan: must be 0 or more"),
        (ppo.PPOConfig(clip_dual=-3.0), "--algo.clip_dual -3: must be above 1; 0 turns it off"),
        (dapo.DAPOConfig(clip_dual=1.0), "--algo.clip_dual 1: must be above 1; 0 turns it off"),
        (sapo.SAPOConfig(tau_neg=0.0), "--algo.tau_neg 0: must be above 0"),
        (kimi15.Kimi15Config(tau=-1.0), "--algo.tau -1: must be 0 or more"),
        (topr.TOPRConfig(negative_weight=-0.5), "--algo.negative_weight -0.5: must be 0 or more"),
        (tis_ratio01.TISRatio01Config(clip_min=2.0), "--algo.clip_min 2.0: must be at most"),
        (decoupled_ppo.DecoupledPPOConfig(behave_cap=0.0), "--algo.behave_cap 0: must be above"),
        (vespo.VESPOConfig(lambda_neg=0.0), "--algo.lambda_neg 0: must be above 0"),
        (dppo.DPPOConfig(clip_low=-0.1), "--algo.clip_low -0.1: must be 0 or more"),
        (kl_cov.KLCovConfig(kl_cov_ratio=1.5), "--algo.kl_cov_ratio 1.5: must be above 0 and"),
        (
            clip_cov.ClipCovConfig(clip_cov_lb=6.0),
            "--algo.clip_cov_lb 6: must be below algo.clip_cov_ub 5; ",
        ),
        (
            decoupled_ppo.DecoupledPPOConfig(rollout_is="token"),
            "--algo.rollout_is token: decoupled_ppo weighs by p_old / p_sampler itself",
        ),
        (
            decoupled_ppo.DecoupledPPOConfig(bypass_mode=True),
            "--algo.bypass_mode True: makes p_prox the sampler",
        ),
    ],
)
def test_a_setting_that_cannot_work_is_named_in_one_sentence(config, said):
    [sentence] = problems(config)
    assert sentence.startswith(said)


@pytest.mark.parametrize("off", [0.0, math.inf])
def test_the_dual_clip_can_be_off(off):
    assert problems(grpo.GRPOConfig(clip_dual=off)) == []


def test_decoupled_ppo_without_a_weight_of_its_own_may_be_corrected():
    cfg = decoupled_ppo.DecoupledPPOConfig(behave="none", rollout_is="token")
    assert problems(cfg) == []


def test_the_defaults_that_a_method_defines():
    changed = {}
    base = {f.name: f.default for f in dataclasses.fields(AlgoConfig)}
    for name in algos.NAMES:
        cfg = algos.config_class(name)()
        changed[name] = {k: getattr(cfg, k) for k in base if getattr(cfg, k) != base[k]}
    mean = {"loss_agg_mode": "seq-mean-token-mean"}
    assert {k: v for k, v in changed.items() if v} == {
        "ppo": {"adv_estimator": "gae"},
        "dapo": {"equal_reward_groups": "replace", "overlong_share": 0.2},
        "dr_grpo": {"norm_adv_by_std": False, "loss_agg_mode": "seq-mean-token-sum-norm"},
        "gspo": mean,
        "gmpo": mean,
        "sapo": mean,
        "decoupled_ppo": {"rollout_is": "none"},
        "kimi15": {"norm_adv_by_std": False},
        "gpg": {"adv_estimator": "gpg"},
        "reinforce": {"adv_estimator": "rloo", "loss_agg_mode": "seq-mean-token-sum"},
        "opd": {"adv_estimator": "none", "teacher_kl_coef": 1.0},
        "gkd": {"adv_estimator": "none", "rollout_is": "none"},
    }


def test_losses_without_p_over_p_old_say_so():
    """With bypass_mode these get the weight p / p_sampler, the others have it in their ratio."""
    without = {name for name in algos.NAMES if not algos.config_class(name).has_ratio}
    assert without == {"gpg", "reinforce", "kimi15", "gkd"}
    assert not (gpg.GPGConfig.has_ratio or reinforce.ReinforceConfig.has_ratio)


# ---- aggregation: sequences of 3 and 2 tokens after prompts, one with all its tokens rejected

SEQUENCE = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2])
MASK = torch.tensor([False, True, True, True, False, True, True, False, False])
LOSS = torch.tensor([9.0, 1.0, 2.0, 3.0, 9.0, 4.0, 6.0, 9.0, 9.0], dtype=torch.float64)


def aggregated(mode: str, mask: torch.Tensor, loss: torch.Tensor = LOSS) -> float:
    """L with the counts of `mask`, max_tokens 10."""
    weight = reduce.weights(mode, mask, SEQUENCE, 3, 10)
    sequences = len(set(SEQUENCE[mask].tolist()))
    n = reduce.normaliser(mode, int(mask.sum()), sequences)
    return float(torch.where(mask, loss * weight, 0.0).sum() / n)


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        ("token-mean", (1 + 2 + 3 + 4 + 6) / 5),
        ("seq-mean-token-sum", ((1 + 2 + 3) + (4 + 6)) / 2),
        ("seq-mean-token-mean", ((1 + 2 + 3) / 3 + (4 + 6) / 2) / 2),
        ("seq-mean-token-sum-norm", ((1 + 2 + 3) / 10 + (4 + 6) / 10) / 2),
    ],
)
def test_a_sequence_without_tokens_is_in_no_mean(mode, value):
    assert aggregated(mode, MASK) == pytest.approx(value)


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        ("token-mean", (1 + 3 + 4 + 6) / 4),
        ("seq-mean-token-sum", ((1 + 3) + (4 + 6)) / 2),
        ("seq-mean-token-mean", ((1 + 3) / 2 + (4 + 6) / 2) / 2),
        ("seq-mean-token-sum-norm", ((1 + 3) / 10 + (4 + 6) / 10) / 2),
    ],
)
def test_a_rejected_token_leaves_the_denominator(mode, value):
    left = MASK.clone()
    left[2] = False
    assert aggregated(mode, left) == pytest.approx(value)


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        ("token-mean", 5.0),
        ("seq-mean-token-sum", 10.0),
        ("seq-mean-token-mean", 5.0),
        ("seq-mean-token-sum-norm", 1.0),
    ],
)
def test_a_rejected_sequence_leaves_both_denominators(mode, value):
    assert aggregated(mode, MASK & (SEQUENCE == 1)) == pytest.approx(value)


@pytest.mark.parametrize("mode", MODES)
def test_weights_are_finite_where_everything_is_rejected(mode):
    weight = reduce.weights(mode, MASK & False, SEQUENCE, 3, 10)
    assert weight.isfinite().all()


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(MODES), st.integers(0, 3), st.integers(0, 2**9 - 1))
def test_the_sum_over_micro_batches_is_the_loss_of_the_batch(mode, cut, bits):
    """Weights see whole sequences and N is global, so a cut between sequences changes nothing."""
    mask = torch.tensor([bool(bits >> i & 1) for i in range(9)])
    if not mask.any():
        return
    n = reduce.normaliser(mode, int(mask.sum()), len(set(SEQUENCE[mask].tolist())))
    total = 0.0
    for part in (cut > SEQUENCE, cut <= SEQUENCE):
        names, renumbered = torch.unique(SEQUENCE[part], return_inverse=True)
        weight = reduce.weights(mode, mask[part], renumbered, len(names), 10)
        total += float((LOSS[part] * weight)[mask[part]].sum())
    assert total / n == pytest.approx(aggregated(mode, mask))


# ---- the README

README = (Path(algos.__file__).parent / "README.md").read_text()


def test_the_readme_has_a_row_for_every_algorithm():
    table = README.split("## Losses")[1].split("## Advantages")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.M)) == algos.NAMES


@pytest.mark.parametrize("keys", re.findall(r"^- [^:\n]+:\s+`(--algo[^`]*)`", README, re.M))
def test_the_keys_of_the_readme_make_a_configuration(keys):
    sections = {"algo": algos.config_class, "reward": registry.config_class}
    cfg = resolve.parse(keys.split(), sections).algo
    assert [*problems(cfg), *correction.problems(cfg)] == []


def test_icepop_and_token_mis_keep_what_they_say():
    """The bounds of the README are of the weight's inverse."""
    log_w = torch.tensor([0.4, 0.6, 1.9, 2.1, 4.9, 5.1]).log()
    where = (torch.ones(6, dtype=torch.bool), torch.zeros(6, dtype=torch.int64), 1)

    def kept(bounds: str) -> list[bool]:
        cfg = AlgoConfig(rollout_rs=("token_k1",), rollout_rs_threshold=(bounds,))
        return correction.keep(cfg, log_w, *where).tolist()

    assert kept("0.2_2.0") == [False, True, True, True, True, False]
    assert kept("0.5_2.0") == [False, True, True, False, False, False]


def test_the_name_of_an_advantage_says_where_it_belongs():
    with pytest.raises(
        ValueError, match="remax is an advantage estimator: .* --algo.adv_estimator remax"
    ):
        algos.module("remax")

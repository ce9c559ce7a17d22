"""Mismatch figures by hand, against a slow reference, and what must not move them."""

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.algos import correction, mismatch
from rlcore.algos.base import AlgoConfig
from rlcore.metrics import names
from rlcore.tensors import LossInputs

NAN, INF = math.nan, math.inf
examples = settings(max_examples=40, deadline=None)

Row = list[tuple[float, float]]
"""Log-probs of sampler and learner of the trained tokens of one response."""


def inputs(rows: list[Row], versions: list[list[int]], outside: float) -> LossInputs:
    """Every response behind two prompt tokens, with one more after it; `outside` stands there."""
    log_p, mask, age = [], [], []
    for row, v in zip(rows, versions, strict=True):
        log_p += [outside, outside, *(p for p, _ in row), outside]
        mask += [False, False, *[True] * len(row), False]
        age += [-1, -1, *v, -1]
    values = torch.tensor(log_p, dtype=torch.float64)
    lengths = torch.tensor([len(row) + 3 for row in rows])
    return LossInputs(
        log_probs=values,
        entropy=values,
        mask=torch.tensor(mask),
        score=torch.where(torch.tensor(mask), 1.0, outside),
        advantage=values,
        old_log_probs=values,
        rollout_log_probs=values,
        correction=torch.ones_like(values),
        ref_log_probs=None,
        sequence=torch.arange(len(rows)).repeat_interleave(lengths),
        num_sequences=len(rows),
        versions=torch.tensor(age, dtype=torch.int32),
    )


def sums(
    rows: list[Row],
    cfg: AlgoConfig | None = None,
    versions: list[list[int]] | None = None,
    version: int = 0,
    outside: float = NAN,
) -> mismatch.Sums:
    cfg = cfg or AlgoConfig()
    x = inputs(rows, versions or [[0] * len(row) for row in rows], outside)
    log_w = torch.full_like(x.rollout_log_probs, outside)
    log_w[x.mask] = torch.tensor([q - p for row in rows for p, q in row], dtype=torch.float64)
    where = (x.mask, x.sequence, x.num_sequences)
    trained, keep = x.mask, correction.keep(cfg, log_w, *where)
    x = replace(x, mask=trained & keep, correction=correction.weights(cfg, log_w, *where))
    return mismatch.sums(x, log_w, trained, cfg, version)


def figures(*parts: mismatch.Sums, cfg: AlgoConfig | None = None) -> dict[str, float]:
    total = mismatch.Sums.total(parts)
    return mismatch.metrics(total.added.tolist(), total.highest.tolist(), cfg or AlgoConfig())


def logs(*pairs: tuple[float, float]) -> Row:
    """Probabilities of sampler and learner."""
    return [(math.log(p), math.log(q)) for p, q in pairs]


BY_HAND = [logs((0.5, 0.25), (0.5, 0.5)), logs((0.2, 0.8))]
"""w = 1/2, 1 and 4; |p - q| = 1/4, 0 and 3/5."""
LN2 = math.log(2)


def test_divergences_by_hand():
    m = figures(sums(BY_HAND))
    assert m["rollout_corr/kl"] == pytest.approx((LN2 + 0 - 2 * LN2) / 3)
    assert m["rollout_corr/k3_kl"] == pytest.approx((-0.5 + LN2 + 3 - 2 * LN2) / 3)
    assert m["rollout_corr/chi2_token"] == pytest.approx((0.25 + 1 + 16) / 3 - 1)
    assert m["rollout_corr/chi2_seq"] == pytest.approx((0.25 + 16) / 2 - 1)


def test_perplexities_by_hand():
    """Per-token geometric means: sampler 2 and 5, learner sqrt 8 and 5/4."""
    m = figures(sums(BY_HAND))
    assert m["rollout_corr/rollout_ppl"] == pytest.approx((2 + 5) / 2)
    assert m["rollout_corr/training_ppl"] == pytest.approx((math.sqrt(8) + 1.25) / 2)
    assert m["rollout_corr/rollout_log_ppl"] == pytest.approx((LN2 + math.log(5)) / 2)
    assert m["rollout_corr/training_log_ppl"] == pytest.approx((1.5 * LN2 + math.log(1.25)) / 2)
    assert m["rollout_corr/log_ppl_diff"] == pytest.approx((LN2 / 2 - 2 * LN2) / 2)
    assert m["rollout_corr/log_ppl_abs_diff"] == pytest.approx((LN2 / 2 + 2 * LN2) / 2)
    assert m["rollout_corr/log_ppl_diff_max"] == pytest.approx(LN2 / 2)
    assert m["rollout_corr/log_ppl_diff_min"] == pytest.approx(-2 * LN2)
    assert m["rollout_corr/ppl_ratio"] == pytest.approx((math.sqrt(2) + 0.25) / 2)


def test_differences_of_probabilities_by_hand():
    m = figures(sums(BY_HAND))
    mean = 0.85 / 3
    assert m["training/rollout_probs_diff_mean"] == pytest.approx(mean)
    assert m["training/rollout_probs_diff_max"] == pytest.approx(0.6)
    assert m["rollout_corr/log_prob_diff_max"] == pytest.approx(2 * LN2)
    std = math.sqrt((0.0625 + 0.36) / 3 - mean * mean)
    assert m["training/rollout_probs_diff_std"] == pytest.approx(std)
    assert m["rollout_corr/response_max_diff_mean"] == pytest.approx((0.25 + 0.6) / 2)
    assert m["rollout_corr/response_max_diff_max"] == pytest.approx(0.6)
    assert m["rollout_corr/response_mean_diff_mean"] == pytest.approx((0.125 + 0.6) / 2)
    assert m["rollout_corr/response_mean_diff_max"] == pytest.approx(0.6)
    assert m["rollout_corr/responses_above_half"] == 0.5
    p, q = torch.tensor([[0.5, 0.5, 0.2], [0.25, 0.5, 0.8]]).double()
    want = torch.corrcoef(torch.stack([p, q]))[0, 1].item()
    assert m["training/rollout_actor_probs_pearson_corr"] == pytest.approx(want)


def test_token_weights_by_hand():
    """Weights 1/2, 1, 4 with C = 2 count as 1/2, 1, 2."""
    m = figures(sums(BY_HAND))
    prefix = "rollout_corr/rollout_is_"
    assert m[prefix + "mean"] == pytest.approx(3.5 / 3)
    assert (m[prefix + "min"], m[prefix + "max"]) == pytest.approx((0.5, 2))
    assert m[prefix + "uncapped_mean"] == pytest.approx(5.5 / 3)
    assert m[prefix + "uncapped_max"] == pytest.approx(4)
    assert m[prefix + "std"] == pytest.approx(math.sqrt(5.25 / 3 - (3.5 / 3) ** 2))
    assert m[prefix + "eff_sample_size"] == pytest.approx(3.5**2 / (3 * 5.25))
    assert m[prefix + "ratio_fraction_high"] == pytest.approx(1 / 3)
    assert m[prefix + "ratio_fraction_low"] == 0


def test_sequence_weights_by_hand():
    """1/4 on two tokens and 2 on one: none above C, one of two responses below 1/C."""
    cfg = AlgoConfig(rollout_is="sequence")
    rows = [logs((0.5, 0.25), (0.5, 0.25)), logs((0.25, 0.375))]
    m = figures(sums(rows, cfg), cfg=cfg)
    prefix = "rollout_corr/rollout_is_"
    assert m[prefix + "mean"] == pytest.approx((0.25 + 0.25 + 1.5) / 3)
    assert (m[prefix + "min"], m[prefix + "max"]) == pytest.approx((0.25, 1.5))
    assert m[prefix + "eff_sample_size"] == pytest.approx(2.0**2 / (3 * 2.375))
    assert m[prefix + "ratio_fraction_high"] == 0 and m[prefix + "ratio_fraction_low"] == 0.5


def test_an_explosion_of_sequence_weights_shows_before_the_cap():
    """Two responses of 100 and 2 tokens. The learner's probabilities are 1.153 times the sampler's,
    so the first weighs 1.153^100 = 1.5e6 and counts as 2; no token differs much."""
    cfg = AlgoConfig(rollout_is="sequence")
    p = math.log(0.5)
    gap = math.log(1.153)
    rows = [[(p, p + gap)] * 100, [(p, p + gap)] * 2]
    m = figures(sums(rows[:1], cfg), sums(rows[1:], cfg), cfg=cfg)
    prefix = "rollout_corr/rollout_is_"
    assert m[prefix + "uncapped_max"] == pytest.approx(1.153**100) and 1.153**100 > 1.5e6
    assert m[prefix + "uncapped_mean"] == pytest.approx((1.153**100 + 1.153**2) / 2)
    assert m[prefix + "max"] == 2 and m[prefix + "ratio_fraction_high"] == 0.5
    far = figures(sums([[(p, p + 1.0)] * 100], cfg), cfg=cfg)
    assert far[prefix + "uncapped_max"] == pytest.approx(math.exp(20))  # the clamp of log w


def test_a_step_whose_weights_are_all_capped_is_not_healthy():
    """1.01^500 = 145 of every response: each figure of tokens is healthy, and so is the sample
    size, since all capped weights are 2."""
    cfg = AlgoConfig(rollout_is="sequence")
    p = math.log(0.5)
    m = figures(sums([[(p, p + math.log(1.01))] * 500] * 3, cfg), cfg=cfg)
    assert m["rollout_corr/rollout_is_eff_sample_size"] == 1
    found = mismatch.unhealthy(m)
    assert found == "mismatch: max |dp| 0.005, k1 -0.01, k3 5e-05, ess 1, max w 1.4e+02"


def test_geometric_weights_by_hand():
    """1/4 on two tokens, whose product is 1/16, and 3/2 on one; C = 2."""
    cfg = AlgoConfig(rollout_is="geometric")
    rows = [logs((0.5, 0.25), (0.5, 0.0625)), logs((0.25, 0.375))]
    m = figures(sums(rows, cfg), cfg=cfg)
    prefix = "rollout_corr/rollout_is_"
    assert m[prefix + "mean"] == pytest.approx((0.25 + 0.25 + 1.5) / 3)
    assert (m[prefix + "min"], m[prefix + "max"]) == pytest.approx((0.25, 1.5))
    assert m[prefix + "ratio_fraction_high"] == 0 and m[prefix + "ratio_fraction_low"] == 0.5
    assert m[prefix + "uncapped_mean"] == pytest.approx((0.25 + 1.5) / 2)  # over responses
    cfg = AlgoConfig(rollout_is="geometric", rollout_is_threshold=5.0)
    m = figures(sums(rows, cfg), cfg=cfg)
    assert m[prefix + "ratio_fraction_low"] == 0, "1/16 is below 1/5, the geometric mean is not"


def test_rejection_by_hand():
    """Bounds of 1/w are 0.4 and 2.5: the token with w = 4 goes."""
    cfg = AlgoConfig(rollout_rs=("token_k1",), rollout_rs_threshold=("0.4_2.5",))
    m = figures(sums(BY_HAND, cfg), cfg=cfg)
    assert m["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 3)
    assert m["rollout_corr/rollout_rs_seq_masked_fraction"] == 0.5
    assert m["rollout_corr/kl"] == figures(sums(BY_HAND))["rollout_corr/kl"]  # before rejection


def test_the_score_is_weighted_by_the_learners_share_of_each_response():
    """Weights 1/2 and 4 on scores 1 and 0; outside the mask nothing counts."""
    cfg = AlgoConfig()
    x = inputs(BY_HAND, [[0, 0], [0]], outside=NAN)
    score = torch.where(x.mask & (x.sequence == 0), 1.0, torch.where(x.mask, 0.0, NAN))
    log_w = torch.tensor([q - p for row in BY_HAND for p, q in row]).double()
    log_w = torch.full_like(x.log_probs, NAN).masked_scatter(x.mask, log_w)
    part = mismatch.sums(replace(x, score=score), log_w, x.mask, cfg, 0)
    assert figures(part)["rollout_corr/score_is"] == pytest.approx(0.5 / 4.5)


def test_staleness_by_hand():
    """Version 7; one response of versions 3 3 5, one of 7, one empty."""
    rows = [logs(*[(0.5, 0.5)] * 3), logs((0.5, 0.5)), []]
    m = figures(sums(rows, versions=[[3, 3, 5], [7], []], version=7))
    prefix = "training/off_policy/"
    found = {k.removeprefix(prefix): v for k, v in m.items() if k.startswith(prefix)}
    assert found == {
        "token_staleness/mean": 10 / 4,
        "token_staleness/max": 4,
        "trajectory_staleness/mean": 1,
        "trajectory_staleness/max": 2,
        "trajectory_staleness/min": 0,
        "trajectory_staleness_worst/mean": 2,
        "trajectory_staleness_worst/max": 4,
        "trajectory_staleness_worst/min": 0,
        "trajectory_spans/mean": 2,
        "trajectory_spans/max": 3,
        "trajectory_spans/min": 1,
    }


def test_tokens_of_unknown_version_have_no_staleness():
    rows = [logs((0.5, 0.5), (0.5, 0.5)), logs((0.5, 0.5))]
    m = figures(sums(rows, versions=[[-1, 2], [-1]], version=3))
    assert m["training/off_policy/token_staleness/mean"] == 1
    assert m["training/off_policy/trajectory_staleness/mean"] == 1
    nothing = figures(sums(rows, versions=[[-1, -1], [-1]], version=3))
    assert not any(k.startswith("training/off_policy/") for k in nothing)


def test_equal_log_probs_are_healthy_and_every_divergence_is_exactly_zero():
    cfg = AlgoConfig(rollout_rs=("token_k1", "seq_mean_k1"))
    m = figures(sums([[(-0.3, -0.3), (-1.7, -1.7)], [(-1e-7, -1e-7)]], cfg), cfg=cfg)
    for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_diff", "log_ppl_abs_diff"):
        assert m["rollout_corr/" + name] == 0
    for name in ("rollout_is_std", "rollout_rs_masked_fraction", "rollout_rs_seq_masked_fraction"):
        assert m["rollout_corr/" + name] == 0
    for name in ("ppl_ratio", "rollout_is_mean", "rollout_is_min", "rollout_is_max"):
        assert m["rollout_corr/" + name] == 1
    assert m["rollout_corr/rollout_is_eff_sample_size"] == 1
    assert m["training/rollout_probs_diff_max"] == m["training/rollout_probs_diff_std"] == 0
    assert m["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1, abs=1e-12)
    assert mismatch.unhealthy(m) == ""


def test_correlation_keeps_its_digits_where_the_model_is_sure():
    rows = [[(-1e-9, -2e-9), (-3e-9, -6e-9), (-2e-9, -4e-9)]]
    m = figures(sums(rows))
    assert m["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1, abs=1e-6)


def test_a_correlation_without_spread_is_left_out():
    m = figures(sums([logs((0.5, 0.5), (0.5, 0.5))]))
    assert "training/rollout_actor_probs_pearson_corr" not in m


@pytest.mark.parametrize(
    "algo", [{"rollout_is": "none"}, {"bypass_mode": True}], ids=["off", "the ratio corrects"]
)
def test_weights_that_are_not_used_have_no_figures(algo: dict[str, Any]):
    cfg = AlgoConfig(**algo)
    m = figures(sums(BY_HAND, cfg), cfg=cfg)
    assert not any("rollout_is" in name or "rollout_rs" in name for name in m)
    assert "rollout_corr/kl" in m


def test_no_cap_has_an_effective_sample_size_too():
    cfg = AlgoConfig(rollout_is_threshold=INF)
    m = figures(sums(BY_HAND, cfg), cfg=cfg)
    ess = 5.5**2 / (3 * (0.25 + 1 + 16))
    assert m["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(ess)
    assert m["rollout_corr/rollout_is_ratio_fraction_high"] == 0


# what adds up, and what has no influence


def test_nothing_trained_gives_no_figures():
    total = mismatch.Sums.total([])
    assert not total.added.any() and (total.highest == -INF).all()
    assert figures() == {}
    for rows in ([[]], [[], []]):
        assert figures(sums(rows)) == {}


def test_a_micro_batch_without_trained_tokens_contributes_nothing():
    assert figures(sums(BY_HAND), sums([[]]), sums([[], []])) == figures(sums(BY_HAND))


ROWS = st.lists(
    st.lists(st.tuples(st.floats(-6, 0), st.floats(-6, 0)), max_size=6), min_size=1, max_size=5
)
CONFIGS = st.sampled_from(
    [
        AlgoConfig(),
        AlgoConfig(rollout_is="sequence", rollout_rs=("token_k1", "seq_mean_k1")),
        AlgoConfig(rollout_is_threshold=INF, rollout_is="none", rollout_rs=("seq_mean_k3",)),
    ]
)


def stable(m: dict[str, float]) -> dict[str, float]:
    """Without the correlation, which has few digits where the spread is tiny."""
    return {k: v for k, v in m.items() if not k.endswith("pearson_corr")}


@examples
@given(ROWS, CONFIGS, st.data())
def test_two_micro_batches_are_one(rows, cfg, data):
    cut = data.draw(st.integers(0, len(rows)))
    versions = [[data.draw(st.integers(0, 5)) for _ in row] for row in rows]
    whole = figures(sums(rows, cfg, versions, 6), cfg=cfg)
    ends = [s for s in (slice(0, cut), slice(cut, None)) if rows[s]]
    parts = figures(*(sums(rows[s], cfg, versions[s], 6) for s in ends), cfg=cfg)
    assert stable(parts) == pytest.approx(stable(whole), rel=1e-9, abs=1e-7)


@examples
@given(ROWS, CONFIGS, st.sampled_from([NAN, INF, -INF, -3.0, 700.0]))
def test_what_stands_outside_the_mask_has_no_influence(rows, cfg, garbage):
    assert figures(sums(rows, cfg, outside=garbage), cfg=cfg) == figures(
        sums(rows, cfg, outside=0.0), cfg=cfg
    )


@examples
@given(ROWS, CONFIGS)
def test_no_figure_is_nan_and_the_bounded_ones_are_in_their_bounds(rows, cfg):
    m = figures(sums(rows, cfg), cfg=cfg)
    assert all(math.isfinite(v) for v in m.values())
    if not m:
        return
    assert m["rollout_corr/k3_kl"] >= 0
    assert 0 < m.get("rollout_corr/rollout_is_eff_sample_size", 1) <= 1 + 1e-12
    assert -1 <= m.get("training/rollout_actor_probs_pearson_corr", 0) <= 1
    for name in ("responses_above_half", "rollout_rs_masked_fraction", "response_max_diff_max"):
        assert 0 <= m.get("rollout_corr/" + name, 0) <= 1
    assert (
        m["rollout_corr/response_mean_diff_max"] <= m["rollout_corr/response_max_diff_max"] + 1e-15
    )


@examples
@given(ROWS)
def test_ranks_that_hold_the_same_tokens_may_count_them_twice(rows):
    cfg = AlgoConfig()
    part = sums(rows, cfg)
    once, twice = figures(part), figures(part, part)
    assert stable(twice) == pytest.approx(stable(once), rel=1e-12, abs=1e-7)


def reference(rows: list[Row], cap: float) -> dict[str, float]:
    """Padded, response by response, as the definitions read."""
    rows = [r for r in rows if r]
    n, length = len(rows), max(map(len, rows))
    mask = torch.zeros(n, length, dtype=torch.bool)
    p, q = torch.zeros(2, n, length, dtype=torch.float64)
    for i, row in enumerate(rows):
        mask[i, : len(row)] = True
        p[i, : len(row)], q[i, : len(row)] = torch.tensor(row, dtype=torch.float64).T
    count = mask.sum(1)
    w, diff = (q - p).exp(), (p.exp() - q.exp()).abs()
    h_p, h_q = -(p * mask).sum(1) / count, -(q * mask).sum(1) / count
    u = w[mask].clamp(max=cap)
    product = torch.where(mask, w, 1.0).prod(1)
    by_row = torch.where(mask, diff, 0.0)
    both = torch.stack([p.exp()[mask], q.exp()[mask]])
    found = {
        "rollout_corr/kl": (p - q)[mask].mean(),
        "rollout_corr/k3_kl": (w - 1 - (q - p))[mask].mean(),
        "rollout_corr/training_ppl": h_q.exp().mean(),
        "rollout_corr/training_log_ppl": h_q.mean(),
        "rollout_corr/rollout_ppl": h_p.exp().mean(),
        "rollout_corr/rollout_log_ppl": h_p.mean(),
        "rollout_corr/log_ppl_diff": (h_q - h_p).mean(),
        "rollout_corr/log_ppl_abs_diff": (h_q - h_p).abs().mean(),
        "rollout_corr/log_ppl_diff_max": (h_q - h_p).max(),
        "rollout_corr/log_ppl_diff_min": (h_q - h_p).min(),
        "rollout_corr/ppl_ratio": (h_q - h_p).exp().mean(),
        "rollout_corr/log_prob_diff_max": w[mask].log().abs().max(),
        "rollout_corr/chi2_token": w[mask].square().mean() - 1,
        "rollout_corr/chi2_seq": product.square().mean() - 1,
        "rollout_corr/rollout_is_mean": u.mean(),
        "rollout_corr/rollout_is_std": u.std(correction=0),
        "rollout_corr/rollout_is_min": w[mask].min(),
        "rollout_corr/rollout_is_max": u.max(),
        "rollout_corr/rollout_is_uncapped_mean": w[mask].mean(),
        "rollout_corr/rollout_is_uncapped_max": w[mask].max(),
        "rollout_corr/rollout_is_eff_sample_size": u.mean() ** 2 / u.square().mean(),
        "rollout_corr/rollout_is_ratio_fraction_high": (w[mask] > cap).double().mean(),
        "rollout_corr/rollout_is_ratio_fraction_low": (w[mask] < 1 / cap).double().mean(),
        "rollout_corr/response_max_diff_mean": by_row.amax(1).mean(),
        "rollout_corr/response_max_diff_max": by_row.max(),
        "rollout_corr/response_mean_diff_mean": (by_row.sum(1) / count).mean(),
        "rollout_corr/response_mean_diff_max": (by_row.sum(1) / count).max(),
        "rollout_corr/responses_above_half": (by_row.amax(1) > 0.5).double().mean(),
        "training/rollout_probs_diff_mean": diff[mask].mean(),
        "training/rollout_probs_diff_max": diff[mask].max(),
        "training/rollout_probs_diff_std": diff[mask].std(correction=0),
        "training/rollout_actor_probs_pearson_corr": torch.corrcoef(both)[0, 1],
    }
    return {k: float(v) for k, v in found.items()}


@pytest.mark.parametrize("noise", [0.01, 0.3, 1.0])
def test_all_figures_agree_with_the_slow_reference(noise):
    g = torch.Generator().manual_seed(5)
    rows: list[Row] = []
    for n in (1, 7, 0, 13, 30, 4):
        p = -3 * torch.rand(n, generator=g, dtype=torch.float64)
        q = p + noise * torch.randn(n, generator=g, dtype=torch.float64)
        rows.append(list(zip(p.tolist(), q.clamp(max=0).tolist(), strict=True)))
    found = figures(sums(rows[:3]), sums(rows[3:]))
    found = {k: v for k, v in found.items() if "off_policy" not in k}
    assert found.pop("rollout_corr/score_is") == pytest.approx(1)  # all scores are 1
    assert found == pytest.approx(reference(rows, 2.0), rel=1e-12, abs=1e-12)


def test_sums_take_float32_and_give_float64_on_the_device_of_the_loss():
    x = inputs(BY_HAND, [[0, 0], [0]], outside=NAN)
    x = replace(x, rollout_log_probs=x.rollout_log_probs.float())
    found = mismatch.sums(x, torch.zeros_like(x.rollout_log_probs), x.mask, AlgoConfig(), 0)
    assert found.added.dtype == found.highest.dtype == torch.float64
    assert found.added.shape == (len(mismatch.ADDED),)
    assert found.highest.shape == (len(mismatch.HIGHEST),)


def test_nothing_is_read_back_from_the_device():
    """Tensors on the meta device have no values: reading one is an error."""
    x = inputs(BY_HAND, [[0, 0], [0]], outside=NAN)
    moved = {
        f.name: getattr(x, f.name).to("meta")
        for f in fields(x)
        if isinstance(getattr(x, f.name), torch.Tensor)
    }
    x = replace(x, **moved)
    cfg = AlgoConfig(rollout_is="geometric", rollout_rs=("token_k1", "seq_mean_k1"))
    where = (x.mask, x.sequence, x.num_sequences)
    log_w = torch.zeros_like(x.log_probs)
    assert correction.keep(cfg, log_w, *where).shape == log_w.shape
    assert correction.weights(cfg, log_w, *where).shape == log_w.shape
    parts = [mismatch.sums(x, log_w, x.mask, cfg, 0)] * 2
    assert mismatch.Sums.total(parts).added.shape == (len(mismatch.ADDED),)


def test_the_names_are_declared():
    cfg = AlgoConfig(rollout_rs=("token_k1",))
    for name in figures(sums(BY_HAND, cfg), cfg=cfg):
        names.check(name)


# the step line


def test_a_mismatch_outside_the_healthy_range_is_a_phrase():
    found = mismatch.unhealthy(figures(sums(BY_HAND)))
    assert found == "mismatch: max |dp| 0.6, k1 -0.23, k3 0.6, ess 0.78, max w 4"


@pytest.mark.parametrize(
    "name, value",
    [
        ("response_max_diff_max", 0.51),
        ("k3_kl", 0.011),
        ("rollout_is_eff_sample_size", 0.89),
        ("rollout_is_ratio_fraction_high", 0.51),
    ],
)
def test_one_figure_suffices_and_nan_is_not_healthy(name, value):
    good = {
        "rollout_corr/response_max_diff_max": 0.5,
        "rollout_corr/k3_kl": 0.01,
        "rollout_corr/kl": 0.001,
        "rollout_corr/rollout_is_eff_sample_size": 0.9,
        "rollout_corr/rollout_is_ratio_fraction_high": 0.5,
    }
    assert mismatch.unhealthy(good) == ""
    for bad in (value, NAN):
        assert mismatch.unhealthy(good | {"rollout_corr/" + name: bad}).startswith("mismatch: ")


def test_the_phrase_leaves_out_what_was_not_measured():
    assert mismatch.unhealthy({}) == "" and mismatch.unhealthy({"actor/loss": 1.0}) == ""
    found = mismatch.unhealthy({"rollout_corr/k3_kl": 0.02, "rollout_corr/kl": 0.01})
    assert found == "mismatch: max |dp| 0, k1 0.01, k3 0.02"

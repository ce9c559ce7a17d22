"""Weights and rejection between sampler and learner: by hand, against a padded reference, and their
identities."""

import math
from itertools import accumulate
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore.algos import correction
from rlcore.algos.base import AlgoConfig, Rejection, Weighting

NAN, INF = math.nan, math.inf
examples = settings(max_examples=50, deadline=None)
RULES = get_args(Rejection)
LEVELS = [level for level in get_args(Weighting) if level != "none"]
LOG_RATIOS = st.lists(st.floats(-3, 3), min_size=1, max_size=30)


def rules(*names: str, at: tuple[str, ...] = (), **algo: Any) -> AlgoConfig:
    return AlgoConfig(rollout_rs=names, rollout_rs_threshold=at, **algo)


def packed(rows: list[list[float]], outside: float = NAN) -> tuple[Tensor, Tensor, Tensor, int]:
    """log w, mask, sequence and number of sequences; every row begins with two prompt tokens and
    ends with one more, `outside` the mask."""
    log_w = torch.tensor(
        [v for r in rows for v in (outside, outside, *r, outside)], dtype=torch.float64
    )
    mask = torch.tensor([m for r in rows for m in (False, False, *[True] * len(r), False)])
    lengths = torch.tensor([len(r) + 3 for r in rows])
    return log_w, mask, torch.arange(len(rows)).repeat_interleave(lengths), len(rows)


def rows_of(values: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int) -> list[list]:
    """What the mask holds of every row."""
    return [values[mask & (sequence == b)].tolist() for b in range(num_sequences)]


def weights(rows: list[list[float]], outside: float = NAN, **algo: Any) -> list[list[float]]:
    log_w, *where = packed(rows, outside)
    found = correction.weights(AlgoConfig(**algo), log_w, *where)
    assert found.isfinite().all() and found.dtype == torch.float64
    return rows_of(found, *where)


def kept(cfg: AlgoConfig, rows: list[list[float]], outside: float = NAN) -> list[list[bool]]:
    log_w, *where = packed(rows, outside)
    found = correction.keep(cfg, log_w, *where)
    assert found.dtype == torch.bool and found[~where[0]].all()
    return rows_of(found, *where)


LN2 = math.log(2)

# weights


def test_a_token_weight_is_the_ratio_up_to_the_cap_and_has_no_lower_bound():
    found = weights([[LN2 / 2, 2 * LN2, -2 * LN2], [0.0]], rollout_is_threshold=2.0)
    assert found[0] == pytest.approx([math.sqrt(2), 2, 0.25], rel=1e-15) and found[1] == [1]


def test_a_sequence_weight_is_the_product_of_its_tokens_on_all_of_them():
    found = weights([[LN2, -3 * LN2], [LN2, LN2], []], rollout_is="sequence")
    assert found[0] == pytest.approx([0.25, 0.25]) and found[1] == pytest.approx([2, 2])
    assert found[2] == []


def test_a_geometric_weight_is_the_geometric_mean_of_the_tokens_of_a_response():
    found = weights([[LN2, -3 * LN2], [3 * LN2, LN2], []], rollout_is="geometric")
    assert found[0] == pytest.approx([0.5, 0.5]) and found[1] == pytest.approx([2, 2])
    assert found[2] == []


def test_without_correction_every_weight_is_one():
    assert weights([[LN2, -5.0]], rollout_is="none") == [[1, 1]]


def test_log_ratios_are_clamped_at_twenty():
    for level in LEVELS:
        found = weights([[900.0], [-900.0]], rollout_is=level, rollout_is_threshold=INF)
        assert found == [[math.exp(20)], [math.exp(-20)]]


def test_the_weight_is_detached():
    log_w, *where = packed([[0.5]])
    log_w.requires_grad_()
    assert not correction.weights(AlgoConfig(), log_w, *where).requires_grad
    assert not correction.keep(rules("token_k1"), log_w, *where).requires_grad


@pytest.mark.parametrize(
    "cap, factor",
    [(INF, 256), (2.0, 4), (8.0, 64)],
    ids=["vanilla importance sampling", "C = 2", "C = 8"],
)
def test_gradient_noise_at_w_16_grows_with_the_square_of_the_weight(cap, factor):
    """The variance of the gradient of a token is multiplied by the square of its weight: 256 times
    without truncation, 4 at C = 2 and 64 at C = 8."""
    log_w, *where = packed([[math.log(16.0)]])
    cfg = AlgoConfig(rollout_is_threshold=cap)
    weight = correction.weights(cfg, log_w, *where)
    noise = torch.tensor([0.3, -1.1, 0.7, 0.1]).double()  # the token's gradient in four draws
    logp = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    (weight[where[0]] * logp * noise).sum().backward()
    assert (logp.grad.var() / noise.var()).item() == pytest.approx(factor, rel=1e-12)


@examples
@given(LOG_RATIOS)
def test_with_an_infinite_cap_the_weight_is_vanilla_importance_sampling(ratios):
    for level in LEVELS:
        found = weights([ratios], rollout_is=level, rollout_is_threshold=INF)[0]
        whole = math.fsum(ratios) / (len(ratios) if level == "geometric" else 1)
        whole = min(max(whole, -20.0), 20.0)
        want = [math.exp(v) for v in (ratios if level == "token" else [whole] * len(ratios))]
        assert found == pytest.approx(want, rel=1e-12)


@examples
@given(st.lists(st.lists(st.floats(-0.6, 0.6), max_size=30), min_size=1, max_size=4))
def test_a_sequence_weight_is_the_product_of_the_token_weights(rows):
    tokens = weights(rows, rollout_is="token", rollout_is_threshold=INF)
    for row, whole in zip(
        tokens, weights(rows, rollout_is="sequence", rollout_is_threshold=INF), strict=True
    ):
        assert whole == pytest.approx([math.prod(row)] * len(row), rel=1e-12)


@examples
@given(LOG_RATIOS, st.floats(1.0, 10.0), st.sampled_from(LEVELS))
def test_truncation_changes_nothing_below_the_cap_and_holds_the_rest_at_it(ratios, cap, level):
    free = weights([ratios], rollout_is=level, rollout_is_threshold=INF)[0]
    assert weights([ratios], rollout_is=level, rollout_is_threshold=cap)[0] == [
        min(w, cap) for w in free
    ]


@examples
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.sampled_from(LEVELS))
def test_equal_log_probs_are_a_no_op(lengths, level):
    rows = [[0.0] * n for n in lengths]
    assert weights(rows, rollout_is=level) == [[1.0] * n for n in lengths]
    bounds = tuple("0.9_1.1" if r.endswith("k1") else "1e-9" for r in RULES)
    assert kept(rules(*RULES, at=bounds), rows) == [[True] * n for n in lengths]
    log_w, *where = packed(rows)
    total, count = correction.normalisation_sums(AlgoConfig(rollout_is=level), log_w, *where)
    assert total == count


@examples
@given(LOG_RATIOS, st.sampled_from([NAN, INF, -INF, 7.0]), st.sampled_from(RULES))
def test_what_stands_outside_the_mask_has_no_influence(ratios, garbage, rule):
    rows = [ratios, [0.1, -0.2], []]
    bound = "0.8_1.3" if rule.endswith("k1") else "0.05"
    cfg = rules(rule, at=(bound,))
    assert kept(cfg, rows, garbage) == kept(cfg, rows, 0.0)
    for level in LEVELS:
        assert weights(rows, garbage, rollout_is=level) == weights(rows, 0.0, rollout_is=level)


# normalisation


def test_weights_are_averaged_over_tokens_or_over_sequences():
    rows = [[LN2, LN2, LN2], [-LN2], []]
    for level, want in {"token": [6.5, 4], "sequence": [2.5, 2]}.items():
        cfg = AlgoConfig(rollout_is=level)
        log_w, *where = packed(rows if level == "token" else [[LN2, 0, 0], [-LN2], []])
        sums = correction.normalisation_sums(cfg, torch.where(where[0], log_w, NAN), *where)
        assert sums.dtype == torch.float64 and sums.tolist() == pytest.approx(want)


def test_weights_of_nearly_0_are_not_divided_by_their_mean():
    assert correction.mean(6.0, 4.0) == 1.5 and correction.mean(3e-8, 2.0) == 1.5e-8
    assert correction.mean(1e-8, 2.0) == correction.mean(0.0, 3.0) == correction.mean(0.0, 0.0) == 1


@examples
@given(st.lists(st.lists(st.floats(-1, 1), max_size=6), min_size=2, max_size=6), st.data())
def test_sums_of_two_ranks_are_the_sums_of_the_whole(rows, data):
    cut = data.draw(st.integers(1, len(rows) - 1))
    cfg = AlgoConfig(rollout_is=data.draw(st.sampled_from(LEVELS)))

    def sums(part: list[list[float]]) -> Tensor:
        log_w, *where = packed(part)
        return correction.normalisation_sums(cfg, log_w, *where)

    torch.testing.assert_close(
        sums(rows[:cut]) + sums(rows[cut:]), sums(rows), rtol=1e-12, atol=1e-12
    )


# rejection


def test_nothing_is_rejected_without_a_rule():
    assert kept(AlgoConfig(), [[5.0, -5.0, NAN]]) == [[True] * 3]


def test_token_k1_bounds_the_inverse_of_the_weight():
    """p_sampler / p_old must be in [0.5, 4]: weights from 1/4 to 2."""
    row = [math.log(w) for w in (2.1, 1.9, 1.0, 0.26, 0.24)]
    found = kept(rules("token_k1", at=("0.5_4",)), [row])
    assert found == [[False, True, True, True, False]]


def test_one_bound_of_k1_is_the_upper_one_and_its_inverse_the_lower():
    row = [math.log(w) for w in (2.1, 1.9, 0.51, 0.49)]
    assert kept(rules("token_k1", at=("2",)), [row]) == [[False, True, True, False]]


def test_k2_and_k3_bound_every_token_from_above():
    """k2 at +-0.2 is 0.02; k3 is 0.0214 up and 0.01873 down."""
    assert kept(rules("token_k2", at=("0.019",)), [[0.2, -0.2, 0.1]]) == [[False, False, True]]
    assert kept(rules("token_k3", at=("0.02",)), [[0.2, -0.2, 0.1]]) == [[False, True, True]]


def test_sequence_rules_leave_out_whole_responses():
    rows = [[0.5, -0.5], [0.5, 0.5], []]
    assert kept(rules("seq_sum_k1"), rows) == [[True, True], [False, False], []]
    assert kept(rules("seq_sum_k2", at=("0.25",)), [[0.5, 0.5], [0.8, 0.0]]) == [
        [True, True],
        [False, False],
    ]
    assert kept(rules("seq_max_k2", at=("0.25",)), [[0.8, 0.0], [0.7, 0.7]]) == [
        [False, False],
        [True, True],
    ]


def test_geometric_rejection_by_its_default_bounds():
    found = kept(rules("seq_mean_k1"), [[0.002, -0.0005], [0.002, 0.0005], [-0.002, -0.0005]])
    assert found == [[True, True], [False, False], [False, False]]


def test_all_rules_must_pass():
    cfg = rules("token_k1", "seq_max_k3", at=("0.5_2", "1.0"))
    assert kept(cfg, [[1.0, 0.0], [-3.0, 0.0]]) == [[False, True], [False, False]]


def test_a_nan_is_not_rejected_so_that_the_loss_shows_it():
    for rule in RULES:
        cfg = rules(rule, at=("0.9_1.1" if rule.endswith("k1") else "0.01",))
        assert kept(cfg, [[NAN, 0.0]])[0][0], rule


@examples
@given(LOG_RATIOS.filter(lambda r: abs(abs(math.fsum(r) / len(r)) - 0.05) > 1e-6))
def test_geometric_rejection_does_not_depend_on_the_length(ratios):
    cfg = rules("seq_mean_k1", at=(f"{math.exp(-0.05)}_{math.exp(0.05)}",))
    assert len({kept(cfg, [ratios * n])[0][0] for n in (1, 2, 7)}) == 1


def test_the_product_falls_into_the_length_trap_where_the_mean_does_not():
    short, long = [[0.01] * 10], [[0.01] * 100]
    assert kept(rules("seq_sum_k1"), short)[0][0] and not kept(rules("seq_sum_k1"), long)[0][0]
    cfg = rules("seq_mean_k1", at=("0.98_1.02",))
    assert kept(cfg, short)[0][0] and kept(cfg, long)[0][0]


@examples
@given(st.lists(st.floats(-4, 4), min_size=1, max_size=20))
def test_icepop_is_the_token_weight_with_token_k1_bounds(ratios):
    """k(w) = w if 1/2 <= w <= 5 else 0; the bounds are those of 1 / w."""
    ratios = [r for r in ratios if min(abs(r - math.log(0.5)), abs(r - math.log(5))) > 1e-9]
    if not ratios:
        return
    cfg = rules("token_k1", at=("0.2_2",), rollout_is_threshold=5.0)
    log_w, *where = packed([ratios])
    found = correction.weights(cfg, log_w, *where) * correction.keep(cfg, log_w, *where)
    want = [w if 0.5 <= w <= 5 else 0.0 for w in map(math.exp, ratios)]
    assert found[where[0]].tolist() == pytest.approx(want, rel=1e-12)


# a slow reference


def reference(cfg: AlgoConfig, rows: list[list[float]]) -> tuple[list, list]:
    """Weights and kept tokens, response by response in plain numbers."""
    out_w, out_k = [], []
    cap = cfg.rollout_is_threshold
    for row in rows:
        ratios = [math.exp(v) for v in row]
        product = math.prod(ratios)
        if cfg.rollout_is == "geometric" and row:
            product **= 1 / len(row)
        w = ratios if cfg.rollout_is == "token" else [product] * len(row)
        out_w.append([min(v, cap) for v in w])
        keeps = [True] * len(row)
        for rule, text in zip(cfg.rollout_rs, cfg.rollout_rs_threshold, strict=True):
            kind = rule[-2:]
            token = {
                "k1": [1 / r for r in ratios],
                "k2": [math.log(r) ** 2 / 2 for r in ratios],
                "k3": [r - 1 - math.log(r) for r in ratios],
            }[kind]
            if not row:
                continue
            if rule.startswith("token"):
                figure = token
            elif rule.startswith("seq_max"):
                figure = [max(token)] * len(row)
            elif kind == "k1":
                n = len(row) if "mean" in rule else 1
                figure = [math.prod(token) ** (1 / n)] * len(row)
            else:
                n = len(row) if "mean" in rule else 1
                figure = [math.fsum(token) / n] * len(row)
            low, high = map(float, text.split("_")) if "_" in text else (-INF, float(text))
            keeps = [k and low <= f <= high for k, f in zip(keeps, figure, strict=True)]
        out_k.append(keeps)
    return out_w, out_k


BOUNDS = {
    "token_k1": "0.83_1.21",
    "token_k2": "0.021",
    "token_k3": "0.023",
    "seq_sum_k1": "0.71_1.31",
    "seq_sum_k2": "0.17",
    "seq_sum_k3": "0.19",
    "seq_mean_k1": "0.93_1.07",
    "seq_mean_k2": "0.013",
    "seq_mean_k3": "0.017",
    "seq_max_k2": "0.063",
    "seq_max_k3": "0.071",
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rule", RULES)
def test_weights_and_rejection_agree_with_the_slow_reference(rule, level):
    g = torch.Generator().manual_seed(RULES.index(rule))
    lengths = torch.randint(0, 20, (60,), generator=g).tolist()
    values = (0.2 * torch.randn(sum(lengths), generator=g, dtype=torch.float64)).tolist()
    ends = list(accumulate(lengths))
    rows = [values[end - n : end] for n, end in zip(lengths, ends, strict=True)]
    cfg = rules(rule, at=(BOUNDS[rule],), rollout_is=level, rollout_is_threshold=1.2)
    want_w, want_k = reference(cfg, rows)
    found = kept(cfg, rows)
    flat = [k for row in found for k in row]
    assert 0.05 < sum(flat) / len(flat) < 0.98, "the rule takes nothing or all"
    assert found == want_k
    for row, want in zip(
        weights(rows, rollout_is=level, rollout_is_threshold=1.2), want_w, strict=True
    ):
        assert row == pytest.approx(want, rel=1e-12)


# thresholds


def test_thresholds_left_out_have_documented_defaults():
    found = correction.thresholds(rules("token_k1", "seq_sum_k1", "seq_mean_k1", "seq_mean_k3"))
    assert [r.name for r in found] == ["token_k1", "seq_sum_k1", "seq_mean_k1", "seq_mean_k3"]
    bounds = [(r.lower, r.upper) for r in found]
    assert bounds[0] == bounds[1] == (-LN2, LN2)
    assert bounds[2] == (math.log(0.999), math.log(1.001)) and bounds[3] == (-INF, 0.01)


def test_the_upper_bound_may_be_missing_altogether():
    (rule,) = correction.thresholds(rules("token_k1", at=("0.2_inf",)))
    assert rule == ("token_k1", math.log(0.2), INF)


@pytest.mark.parametrize(
    "names, at, words",
    [
        (("token_k1",), ("1", "2"), "2 values for the 1 of rollout_rs; give one for each"),
        ((), ("0.5_2",), "1 values for the 0 of rollout_rs; give one for each"),
        (("token_k2",), (), "token_k2: has no default; set"),
        (("token_k1",), ("high",), "threshold high: token_k1 takes lower_upper"),
        (("token_k1",), ("2_0.5",), "threshold 2_0.5: token_k1 takes lower_upper"),
        (("token_k1",), ("-1_2",), "token_k1 takes lower_upper"),
        (("token_k1",), ("0_2",), "token_k1 takes lower_upper"),
        (("token_k1",), ("0",), "token_k1 takes lower_upper"),
        (("token_k1",), ("inf",), "token_k1 takes lower_upper"),
        (("token_k1",), ("nan_2",), "token_k1 takes lower_upper"),
        (("token_k1",), ("0.5_2_3",), "token_k1 takes lower_upper"),
        (("seq_sum_k1",), ("1.5_2",), "0 < lower <= 1 <= upper, such as 0.5_2.0"),
        (("seq_mean_k1",), ("0.9",), "such as 0.999_1.001"),
        (("seq_max_k3",), ("0.1_0.2",), "seq_max_k3 takes one number above 0"),
        (("seq_max_k3",), ("1_2",), "seq_max_k3 takes one number above 0"),  # float() reads 12
        (("token_k2",), ("0",), "token_k2 takes one number above 0"),
        (("token_k2",), ("inf",), "token_k2 takes one number above 0"),
        (("token_k2",), ("nan",), "token_k2 takes one number above 0"),
        (("token_k2",), ("",), "token_k2 takes one number above 0"),
    ],
)
def test_a_threshold_that_cannot_be_one_is_named(names, at, words):
    cfg = rules(*names, at=at)
    (found,) = correction.problems(cfg)
    assert words in found and found.startswith("--algo.rollout_rs")
    with pytest.raises(ValueError) as e:
        correction.thresholds(cfg)
    assert str(e.value) == found


def test_every_wrong_threshold_is_named_at_once():
    found = correction.problems(rules("token_k1", "token_k2", "token_k3", at=("a", "1", "b")))
    assert len(found) == 2 and "token_k1" in found[0] and "token_k3" in found[1]
    assert correction.problems(AlgoConfig()) == []

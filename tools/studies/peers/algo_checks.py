"""The rows of compare_algos.py: what rlcore has, what the peer calls it, how both are set.

Peers are told their own words for a setting. A row with `known` is a difference that rlcore chose
or the peer has; the row where the setting is matched follows it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from algo_cases import (
    KINDS,
    MAX_TOKENS,
    RESPONSES,
    TRAINED,
    Answer,
    Case,
    advantages,
    controlled,
    corrected,
    critic,
    divergence,
    kept_weights,
    loss,
    overlong,
    token_baseline,
    uncapped,
)

from rlcore import algos

Settings = dict[str, Any]

TRAINED_ROWS = ("near", "mixed", "varied")
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
UNTRAINED = "the peer's mean over responses counts those without trained tokens, rlcore's does not"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row: the answers of both sides over some cases."""

    peer: str
    name: str
    """What it is in rlcore."""
    setting: str = ""
    function: str
    """What it is in the peer, for the reader."""
    ask: str
    """The function of the peer script."""
    told: Settings
    """Its settings."""
    ours: Callable[[Case], Answer]
    cases: tuple[str, ...] = ("near", "mixed", "varied", "masked")
    metrics: tuple[str, ...] = ()
    """Figures to compare beside the tensors."""
    only_metrics: bool = False
    """The figures are all that the row is about."""
    known: str = ""
    """Why both differ; such a row need not agree."""
    tolerance: float = 1e-10
    reason: str = ""
    """Why the tolerance is wider than that of float64."""


def of(peer: str) -> list[Check]:
    """All rows of a peer."""
    return list(_PEERS[peer]())


# ---- verl

FIGURES = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl")
NOT_LOWER = ("actor/pg_clipfrac", "actor/ppo_kl")
KL_FIGURE = ("actor/ppo_kl",)
OFF = {"rollout_is": "none"}
TIS = {"rollout_is": "token", "rollout_is_threshold": 2.0}


def _clips(low: float, high: float, dual: float = 3.0) -> Settings:
    return {
        "clip_ratio": low,
        "clip_ratio_low": low,
        "clip_ratio_high": high,
        "clip_ratio_c": dual,
    }


# rlcore's name, verl's loss_mode, verl's settings for rlcore's defaults, figures of both
LOSSES: tuple[tuple[str, str, Settings, tuple[str, ...]], ...] = (
    ("ppo", "vanilla", _clips(0.2, 0.2), FIGURES),
    ("grpo", "vanilla", _clips(0.2, 0.28), FIGURES),
    ("dapo", "vanilla", _clips(0.2, 0.28, 10.0), FIGURES),
    ("dr_grpo", "vanilla", _clips(0.2, 0.2), FIGURES),
    ("gspo", "gspo", _clips(3e-4, 4e-4), NOT_LOWER),
    ("gmpo", "geo_mean", _clips(0.4, 0.4), KL_FIGURE),
    ("cispo", "cispo", _clips(0.2, 0.2), NOT_LOWER),
    ("sapo", "sapo", {"tau_pos": 1.0, "tau_neg": 1.05}, KL_FIGURE),
    ("gpg", "gpg", {}, ()),
)
GRPO = LOSSES[1][2]

# setting, verl's words, rlcore's words
WEIGHTS: tuple[tuple[str, Settings, Settings], ...] = (
    ("token, cap 2", TIS, TIS),
    (
        "token, no cap",
        {"rollout_is": "token", "rollout_is_threshold": 1e300},
        {"rollout_is": "token", "rollout_is_threshold": math.inf},
    ),
    (
        "sequence, cap 2",
        {"rollout_is": "sequence", "rollout_is_threshold": 2.0},
        {"rollout_is": "sequence"},
    ),
    (
        "token, cap 2, normalised",
        TIS | {"rollout_is_batch_normalize": True},
        TIS | {"rollout_is_batch_normalize": True},
    ),
    (
        "sequence, cap 5, normalised",
        {
            "rollout_is": "sequence",
            "rollout_is_threshold": 5.0,
            "rollout_is_batch_normalize": True,
        },
        {
            "rollout_is": "sequence",
            "rollout_is_threshold": 5.0,
            "rollout_is_batch_normalize": True,
        },
    ),
)


def _rule(
    given: Settings, ours: Settings, *rules: tuple[str, str]
) -> tuple[str, Settings, Settings]:
    """Rejection by name and bound, in both sides' words."""
    names, bounds = zip(*rules, strict=True)
    return (
        ", ".join(f"{n} {b}" for n, b in rules),
        given | {"rollout_rs": ",".join(names), "rollout_rs_threshold": ",".join(bounds)},
        ours | {"rollout_rs": names, "rollout_rs_threshold": bounds},
    )


REJECTIONS = tuple(
    _rule({}, OFF, rule)
    for rule in (
        ("token_k1", "0.5_2.0"),
        ("token_k1", "3.0"),
        ("token_k2", "0.1"),
        ("token_k3", "0.1"),
        ("seq_sum_k1", "0.2_5.0"),
        ("seq_sum_k2", "1.0"),
        ("seq_sum_k3", "1.0"),
        ("seq_mean_k1", "0.9_1.1"),
        ("seq_mean_k2", "0.3"),
        ("seq_mean_k3", "0.3"),
        ("seq_max_k2", "1.0"),
        ("seq_max_k3", "1.0"),
    )
) + (_rule(TIS, TIS, ("seq_mean_k1", "0.5_2.0"), ("token_k3", "0.5")),)
GEOMETRIC = _rule({}, OFF, ("seq_mean_k1", "0.999_1.001"))
BYPASS_GEOMETRIC = _rule({"loss_type": "ppo_clip"}, TIS, ("seq_mean_k1", "0.7_1.4"))
ICEPOP = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
OUR_ICEPOP = {
    "rollout_is": "token",
    "rollout_is_threshold": math.inf,
    "rollout_rs": ("token_k1",),
    "rollout_rs_threshold": ("0.2_2.0",),
}

OUTCOME = "compute_{}_outcome_advantage"
ESTIMATORS: tuple[tuple[str, str, Settings], ...] = (
    ("grpo", OUTCOME, {}),
    ("grpo", OUTCOME, {"groups": "pairs"}),
    ("grpo", OUTCOME, {"norm_adv_by_std": False}),
    ("gdpo", OUTCOME, {}),  # of one reward; test_algos_advantage.py has verl's numbers for two
    ("gdpo", OUTCOME, {"groups": "pairs"}),
    ("grpo_passk", OUTCOME, {"groups": "pairs"}),
    ("grpo_passk", OUTCOME, {"groups": "pairs", "norm_adv_by_std": False}),
    ("rloo", OUTCOME, {}),
    ("opo", OUTCOME, {}),
    ("gpg", OUTCOME, {}),
    ("reinforce_plus_plus_baseline", OUTCOME, {}),
    ("reinforce_plus_plus", OUTCOME, {"gamma": 1.0}),
    ("reinforce_plus_plus", OUTCOME, {"gamma": 0.9}),
    ("remax", OUTCOME, {}),
    ("gae", "compute_gae_advantage_return", {"gamma": 1.0, "lam": 1.0}),
    ("gae", "compute_gae_advantage_return", {"gamma": 0.97, "lam": 0.9}),
)
ROUNDED = (("grpo", {}), ("gdpo", {}), ("gpg", {}))
ROUNDED_WHY = "verl has the std of a group of one and gpg's alpha in float32"


def _verl() -> Iterator[Check]:
    yield from _verl_losses()
    yield from _verl_objective()
    for estimator, function, settings in ESTIMATORS:
        rounded: Settings = {}
        if (estimator, settings) in ROUNDED:
            rounded = {"tolerance": 1e-7, "reason": ROUNDED_WHY}
        yield _advantage(estimator, estimator, function.format(estimator), settings, **rounded)
    vectorized = OUTCOME.format("rloo_vectorized")
    reason = "a group of one: rlcore and verl's rloo give it its reward, rloo_vectorized 0"
    yield _advantage("rloo", "rloo_vectorized", vectorized, {}, known=reason)
    yield _advantage("rloo", "rloo_vectorized", vectorized, {"groups": "pairs"})
    yield from _token_baselines()
    for kind in ("k1", "k2", "abs", "low_var_kl", "k1+"):
        yield _kl(kind, kind)
    for kind in ("k3", "k3+"):
        yield _kl(kind, kind, cases=("near",))
        reason = "verl clamps k3 at 10 and its log-ratio at 20, rlcore's is exact"
        yield _kl(kind, kind, cases=("far",), known=reason)
    yield _kl("low_var_kl", "k3")
    for samples in (64, 4000):
        settings = {"start": 0.2, "target": 0.05, "horizon": 10_000, "samples": samples}
        yield Check(
            peer="verl",
            name="kl.AdaptiveController",
            setting=f"{samples} samples a step",
            function="AdaptiveKLController.update",
            ask="controller",
            told=settings,
            ours=controlled(**settings),
        )
    yield from _verl_correction()
    for clip in (0.2, 0.5):
        yield Check(
            peer="verl",
            name="value",
            setting=f"clip {clip}",
            function="compute_value_loss",
            ask="value_loss",
            told={"clip": clip},
            ours=critic(clip),
            metrics=("critic/vf_clipfrac",),
        )


def _policy(
    algo: str,
    mode: str,
    setting: str,
    actor: Settings,
    *,
    correction: Settings | None = None,
    ours: Settings | None = None,
    told: Settings | None = None,
    **row: Any,
) -> Check:
    """A policy loss; without correction it is off on both sides."""
    mine = ours if ours is not None else OFF
    agg = mine.get("loss_agg_mode", algos.config_class(algo)().loss_agg_mode)
    more = {"correction": correction, **(told or {})}
    return Check(
        peer="verl",
        name=algo,
        setting=setting,
        function=row.pop("function", f"compute_policy_loss_{mode}"),
        ask="policy_loss",
        told={"mode": mode, "agg": agg, "max_tokens": MAX_TOKENS, "actor": actor, **more},
        ours=loss(algo, **mine),
        **row,
    )


def _verl_losses() -> Iterator[Check]:
    """Every loss by its defaults, with and without weights."""
    for algo, mode, actor, figures in LOSSES:
        usual = ("near", "mixed", "varied") if algo == "gmpo" else Check.cases
        yield _policy(algo, mode, "no correction", actor, metrics=figures, cases=usual)
        weighed = {"correction": TIS, "ours": TIS}
        more: Settings = {}
        if algo == "gmpo":
            more = {"tolerance": 1e-7, "reason": "verl adds 1e-10 to a weight before its log"}
        yield _policy(
            algo, mode, "TIS, cap 2", actor, metrics=figures, cases=usual, **weighed, **more
        )
        far: Settings = {"cases": ("far",)}
        if algo == "gmpo":
            far["known"] = "rlcore holds the log-ratio within +-20, verl's geo_mean does not"
        yield _policy(algo, mode, "beyond the clamps", actor, **far)
    geo = _clips(0.4, 0.4)
    yield _policy("gmpo", "geo_mean", "untrained row", geo, cases=("masked",), known=UNTRAINED)
    yield _policy(
        "gmpo",
        "geo_mean",
        "clip fractions",
        geo,
        metrics=("actor/pg_clipfrac", "actor/pg_clipfrac_lower"),
        only_metrics=True,
        known="rlcore counts where the clip cut the gradient, verl where the log-ratio is outside",
    )
    yield _policy(
        "cispo",
        "cispo",
        "lower clip fraction",
        _clips(0.2, 0.2),
        metrics=("actor/pg_clipfrac_lower",),
        only_metrics=True,
        known="rlcore counts the weights that were raised, verl writes 0",
    )
    yield _policy(
        "gspo",
        "gspo",
        "clips .2 .28, token-mean",
        _clips(0.2, 0.28),
        ours=OFF | {"clip_low": 0.2, "clip_high": 0.28, "loss_agg_mode": "token-mean"},
        metrics=NOT_LOWER,
    )
    taus = {"tau_pos": 1.5, "tau_neg": 4.0}
    yield _policy("sapo", "sapo", "tau 1.5, 4", taus, ours=OFF | taus, metrics=KL_FIGURE)
    yield _policy(
        "decoupled_ppo",
        "vanilla",
        "truncate, cap 2, as TIS",
        _clips(0.2, 0.2, 1e9),
        correction=TIS,
        ours={"behave": "truncate", "behave_cap": 2.0},
        cases=KINDS,
    )
    yield _policy(
        "reinforce",
        "gpg",
        "no correction",
        {},
        ours=OFF,
    )
    yield from _verl_bounds()


UNCLAMPED = "rlcore holds the log-ratio within +-20, verl's does not"


def _verl_bounds() -> Iterator[Check]:
    """Losses that bound divergence, covariance or the squared log-ratio."""
    for kind, bound in (("tv", 0.15), ("kl", 0.05)):
        mine = {"divergence": kind, "clip_low": bound, "clip_high": bound}
        clips = _clips(bound, bound, 20.0)
        for setting, more in (("", {}), (", TIS, cap 2", {"correction": TIS})):
            yield _policy(
                "dppo",
                f"dppo_{kind}",
                f"{kind} {bound}{setting}",
                clips,
                ours=(TIS if more else OFF) | mine,
                metrics=FIGURES,
                cases=TRAINED_ROWS,  # one of the others has a p above 1, which has no KL
                **more,
            )
        far = {"cases": ("far",), "ours": OFF | mine}
        yield _policy("dppo", f"dppo_{kind}", f"{kind} {bound}, beyond the clamps", clips, **far)
    yield _policy(
        "dppo",
        "dppo_tv",
        "tv .05 .3, weights up to 1.5",
        _clips(0.05, 0.3, 1.5),
        ours=OFF | {"clip_low": 0.05, "clip_high": 0.3, "clip_max": 1.5},
        metrics=FIGURES,
    )
    # share, and the bounds of the covariance
    for share, low, high in ((1.0, 1.0, 5.0), (1.0, 0.1, 0.9)):
        yield _policy(
            "clip_cov",
            "clip_cov",
            f"all tokens with {low} < covariance < {high}",
            _clips(0.2, 0.2),
            ours=OFF | {"clip_cov_ratio": share, "clip_cov_lb": low, "clip_cov_ub": high},
            told={"loss_keys": {"clip_cov_ratio": share, "clip_cov_lb": low, "clip_cov_ub": high}},
            metrics=KL_FIGURE,
        )
    yield _policy(
        "clip_cov",
        "clip_cov",
        "a share of .05",
        _clips(0.2, 0.2),
        ours=OFF | {"clip_cov_ratio": 0.05, "clip_cov_lb": 0.1},
        told={"loss_keys": {"clip_cov_ratio": 0.05, "clip_cov_lb": 0.1, "clip_cov_ub": 5.0}},
        known="which tokens are cut is a random choice, which verl takes from torch's state",
    )
    for share, coef in ((2e-4, 1.0), (0.2, 0.3)):
        for setting, more in (("", {}), (", TIS, cap 2", {"correction": TIS})):
            yield _policy(
                "kl_cov",
                "kl_cov",
                f"a share of {share}, coefficient {coef}{setting}",
                {},
                ours=(TIS if more else OFF) | {"kl_cov_ratio": share, "ppo_kl_coef": coef},
                told={"loss_keys": {"kl_cov_ratio": share, "ppo_kl_coef": coef}},
                **more,
            )
    beyond: Settings = {"cases": ("far",), "known": UNCLAMPED}
    yield _policy("clip_cov", "clip_cov", "beyond the clamps", _clips(0.2, 0.2), **beyond)
    yield _policy("kl_cov", "kl_cov", "beyond the clamps", {}, **beyond)
    for setting, more in (("", {}), (", TIS, cap 2", {"correction": TIS})):
        yield _policy(
            "kimi15",
            "dro",
            f"tau 0.3{setting}",
            {},
            ours=(TIS if more else OFF) | {"tau": 0.3},
            told={"loss_keys": {"dro_beta": 0.3}},
            metrics=KL_FIGURE,
            **more,
        )


def _verl_objective() -> Iterator[Check]:
    """What the objective puts around a loss."""
    regular = {"kl_coef": 0.1, "kl_type": "low_var_kl", "entropy_coef": 0.02}
    for agg in MODES:
        mode = {"loss_agg_mode": agg}
        yield _policy("grpo", "vanilla", agg, GRPO, ours=OFF | mode)
        yield _policy(
            "grpo",
            "vanilla",
            f"{agg}, TIS, KL, entropy",
            GRPO,
            correction=TIS,
            ours=TIS | regular | mode,
            told={"kl": {"type": "low_var_kl", "coef": 0.1}, "entropy_coeff": 0.02},
            function="compute_policy_loss_vanilla, agg_loss of kl_penalty and entropy",
        )
    for setting, theirs, mine in (*WEIGHTS, *REJECTIONS):
        yield _policy("grpo", "vanilla", setting, GRPO, correction=theirs, ours=mine)
    for agg in MODES[1:]:
        setting, theirs, mine = _rule(TIS, TIS, ("token_k1", "0.5_2.0"))
        mine = mine | {"loss_agg_mode": agg}
        yield _policy("grpo", "vanilla", f"{agg}, {setting}", GRPO, correction=theirs, ours=mine)
    setting, theirs, mine = REJECTIONS[0]
    yield _policy(
        "grpo",
        "vanilla",
        f"figures, {setting}",
        GRPO,
        correction=theirs,
        ours=mine,
        metrics=FIGURES,
        only_metrics=True,
    )
    yield _policy(
        "grpo",
        "vanilla",
        "IcePop, .5 <= w <= 5",
        GRPO,
        correction=ICEPOP,
        ours=OUR_ICEPOP,
        known="verl keeps IcePop's zero weights in the denominator, rlcore takes the tokens out",
    )
    yield from _verl_counts()
    by_bypass = (
        ("grpo", "bypass, PPO-IS", {"loss_type": "ppo_clip"}, TIS),
        ("grpo", f"bypass, {BYPASS_GEOMETRIC[0]}", *BYPASS_GEOMETRIC[1:]),
        (
            "reinforce",
            "bypass, sequence, cap 2",
            {"loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_threshold": 2.0},
            {"rollout_is": "sequence"},
        ),
        (
            "reinforce",
            "bypass, token, cap 2, token_k2 0.2",
            {
                "loss_type": "reinforce",
                "rollout_rs": "token_k2",
                "rollout_rs_threshold": "0.2",
                **TIS,
            },
            TIS | {"rollout_rs": ("token_k2",), "rollout_rs_threshold": ("0.2",)},
        ),
    )
    for algo, setting, theirs, mine in by_bypass:
        yield _policy(
            algo,
            "bypass_mode",
            setting,
            GRPO,
            told={"bypass": theirs},
            ours=mine | {"bypass_mode": True},
        )


def _verl_counts() -> Iterator[Check]:
    """The denominators that verl's trainer hands in: tokens before a rejection within the loss,
    and all responses of the update."""
    counts = {"batch_num_tokens": TRAINED, "global_batch_size": RESPONSES}
    trained = {"cases": TRAINED_ROWS, "told": {"counts": counts}}
    setting, theirs, mine = _rule({}, OFF, ("seq_mean_k3", "0.3"))
    for agg in MODES[:2]:
        mode = {"loss_agg_mode": agg}
        given = f"{agg}, counts of verl's trainer"
        yield _policy("grpo", "vanilla", given, GRPO, ours=OFF | mode, **trained)
    known = "verl's trainer divides by all responses, rlcore by those that rejection leaves"
    yield _policy(
        "grpo",
        "vanilla",
        f"{given}, {setting}",
        GRPO,
        correction=theirs,
        ours=mine | mode,
        known=known,
        **trained,
    )
    setting, theirs, mine = _rule({"loss_type": "ppo_clip"}, TIS, ("seq_mean_k3", "0.3"))
    known = "verl's trainer counts the tokens before the loss of bypass mode rejects some"
    trained["told"] = {"counts": counts, "bypass": theirs}
    yield _policy(
        "grpo",
        "bypass_mode",
        f"bypass, counts of verl's trainer, {setting}",
        GRPO,
        ours=mine | {"bypass_mode": True},
        known=known,
        **trained,
    )


def _advantage(ours: str, theirs: str, function: str, settings: Settings, **row: Any) -> Check:
    words = [f"{k} {v}" for k, v in settings.items() if k != "groups"]
    if settings.get("groups") == "pairs":
        words.append("groups of 2, 4, 6")
    return Check(
        peer="verl",
        name=f"advantage/{ours}",
        setting=", ".join(words),
        function=function,
        ask="advantage",
        told={
            "estimator": theirs,
            "groups": settings.get("groups", "group"),
            "gamma": settings.get("gamma", 1.0),
            "lam": settings.get("lam", 1.0),
            "by_std": settings.get("norm_adv_by_std", True),
        },
        ours=advantages(ours, **settings),
        **row,
    )


def _token_baselines() -> Iterator[Check]:
    """Baselines of tokens, weighed and not, with and without the tokens of tools."""

    def row(setting: str, which: str, tools: bool, weights: Settings, **more: Any) -> Check:
        name = {"one": "optimal_token_baseline", "tir": "tir_optimal_token_baseline"}[which]
        turns = {"one": "", "tir": "multi_turn_"}[which]
        tail = more.pop("zero_tail", True)
        asked = {"estimator": name, "tools": tools, "zero_tail": tail, "correction": weights}
        return Check(
            peer="verl",
            name=f"advantage/{name}",
            setting=setting,
            function=f"compute_{turns}optimal_token_baseline_advantage",
            ask="token_baseline",
            told=asked,
            ours=token_baseline(name, tools, **(weights or OFF)),
            **more,
        )

    sequence = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
    for text, weights in (("", {}), ("TIS, cap 2", TIS), ("sequence, cap 2", sequence)):
        yield row(text, "one", False, weights)
        yield row(text, "tir", True, weights)
    why = "verl's default leaves the rest of the longest response its own baseline: A is nearly 0"
    yield row("handle_zero_tail off", "one", False, {}, zero_tail=False, known=why)
    why = "verl takes a number of trained tokens for a place, and compares a response with itself"
    yield row("with tools", "one", True, {}, known=why)


def _kl(
    ours: str, theirs: str, cases: tuple[str, ...] = ("near", "mixed", "far"), known: str = ""
) -> Check:
    return Check(
        peer="verl",
        name=f"kl/{ours}",
        setting=", ".join(cases) if len(cases) == 1 else "",
        function=f"kl_penalty {theirs}",
        ask="kl_penalty",
        told={"kind": theirs},
        ours=divergence(ours),
        cases=cases,
        known=known,
    )


DISTANCES = tuple(
    f"rollout_corr/{name}"
    for name in (
        "kl",
        "k3_kl",
        "training_ppl",
        "training_log_ppl",
        "rollout_ppl",
        "rollout_log_ppl",
        "log_ppl_diff",
        "log_ppl_abs_diff",
        "log_ppl_diff_max",
        "log_ppl_diff_min",
        "ppl_ratio",
        "chi2_token",
        "chi2_seq",
    )
)
WEIGHT_COUNTS = tuple(
    f"rollout_corr/rollout_is_{name}"
    for name in ("ratio_fraction_high", "ratio_fraction_low", "min")
)
WEIGHT_MOMENTS = tuple(
    f"rollout_corr/rollout_is_{name}" for name in ("mean", "max", "std", "eff_sample_size")
)
REJECTED = (
    "rollout_corr/rollout_rs_masked_fraction",
    "rollout_corr/rollout_rs_seq_masked_fraction",
)


def _verl_correction() -> Iterator[Check]:
    """Weights, masks and their figures."""
    function = "compute_rollout_correction_and_rejection_mask"

    def row(setting: str, theirs: Settings, mine: Settings, **more: Any) -> Check:
        return Check(
            peer="verl",
            name="correction",
            setting=setting,
            function=function,
            ask="correction",
            told=theirs,
            **({"ours": corrected(**mine), "cases": KINDS} | more),
        )

    for setting, theirs, mine in (*WEIGHTS, *REJECTIONS, GEOMETRIC):
        yield row(setting, theirs, mine)
    yield Check(
        peer="verl",
        name="correction",
        setting="IcePop, .5 <= w <= 5",
        function="compute_rollout_correction_weights",
        ask="weights",
        told=ICEPOP,
        ours=kept_weights(**OUR_ICEPOP),
        cases=KINDS,
    )
    setting, theirs, mine = WEIGHTS[0]
    figures = {"cases": TRAINED_ROWS, "only_metrics": True}
    yield row("figures: distances", theirs, mine, metrics=DISTANCES, **figures)
    yield row(
        "figures: distances, untrained row",
        theirs,
        mine,
        metrics=DISTANCES,
        cases=("masked",),
        only_metrics=True,
        known="verl counts a response without trained tokens with log-prob 0, rlcore does not",
    )
    for setting, theirs, mine in (WEIGHTS[0], WEIGHTS[2]):
        name = f"figures: weights, {setting}"
        moments = tuple(m for m in WEIGHT_MOMENTS if "sequence" not in setting or "max" not in m)
        yield row(name, theirs, mine, metrics=WEIGHT_COUNTS + moments, **figures)
    setting, theirs, mine = WEIGHTS[2]
    yield row(
        f"figures: uncapped maximum, {setting}",
        theirs,
        mine,
        metrics=("rollout_corr/rollout_is_max",),
        **figures | {"ours": uncapped(**mine), "cases": KINDS},
    )
    setting, theirs, mine = WEIGHTS[1]
    name = f"figures: weights, {setting}"
    yield row(name, theirs, mine, metrics=WEIGHT_COUNTS + WEIGHT_MOMENTS, **figures)
    setting, theirs, mine = REJECTIONS[-1]
    yield row(f"figures: rejection, {setting}", theirs, mine, metrics=REJECTED, **figures)


# ---- TRL

# setting, rlcore's name and settings beside rollout_is none, TRL's settings
TrlRow = tuple[str, str, Settings, Settings]
UNBIASED = {"kl_coef": 0.1, "kl_unbiased": True}
LUSPO = {
    "level": "sequence",
    "clip_low": 2e-3,
    "clip_high": 2.5e-3,
    "loss_agg_mode": "seq-mean-token-sum",
}
TRLS_LUSPO = {"level": "sequence", "epsilon": 2e-3, "epsilon_high": 2.5e-3}


def _off_policy_masks() -> Iterator[TrlRow]:
    """The mask under every denominator that TRL has, with thresholds that divide the cases."""
    by_loss: tuple[TrlRow, ...] = (
        ("token-mean", "dapo", {"clip_dual": 0.0}, {"loss_type": "dapo"}),
        ("seq-mean-token-mean", "grpo", {"loss_agg_mode": MODES[2]}, {"loss_type": "grpo"}),
        ("clip_dual 0", "dr_grpo", {}, {"loss_type": "dr_grpo", "epsilon_high": 0.2}),
        ("", "cispo_m1", {}, {"loss_type": "cispo", "epsilon_high": 5.0}),
        ("", "vespo", {}, {"loss_type": "vespo"}),
    )
    for setting, algo, mine, theirs in by_loss:
        for threshold in (0.003, 0.1):
            yield (
                f"{setting}, responses off by {threshold} masked".lstrip(", "),
                algo,
                mine | {"off_policy_mask_threshold": threshold},
                theirs | {"off_policy_mask": threshold},
            )
    both = {"kl_coef": 0.1, "entropy_coef": 0.02}
    yield (
        "token-mean, responses off by 0.1 masked, k3, entropy",
        "grpo",
        both | {"off_policy_mask_threshold": 0.1},
        {"loss_type": "dapo", "beta": 0.1, "entropy_coef": 0.02, "off_policy_mask": 0.1},
    )


def _trl() -> Iterator[Check]:
    rows: tuple[TrlRow, ...] = (
        ("seq-mean-token-mean", "grpo", {"loss_agg_mode": MODES[2]}, {"loss_type": "grpo"}),
        ("token-mean", "grpo", {}, {"loss_type": "bnpo"}),
        ("token-mean", "dapo", {"clip_dual": 0.0}, {"loss_type": "dapo"}),
        ("clip_dual 0", "dr_grpo", {}, {"loss_type": "dr_grpo", "epsilon_high": 0.2}),
        (
            "sequence",
            "gspo",
            {"level": "sequence"},
            {
                "loss_type": "grpo",
                "level": "sequence",
                "epsilon": 3e-4,
                "epsilon_high": 4e-4,
            },
        ),
        (
            "sequence, clips .2 .28",
            "gspo",
            {"level": "sequence", "clip_low": 0.2, "clip_high": 0.28},
            {"loss_type": "grpo", "level": "sequence"},
        ),
        ("", "gmpo", {}, {"loss_type": "gmpo", "epsilon": 0.4, "epsilon_high": 0.4}),
        ("", "cispo_m1", {}, {"loss_type": "cispo", "epsilon_high": 5.0}),
        (
            "k3, coefficient 0.1",
            "grpo",
            {"kl_coef": 0.1, "kl_type": "k3"},
            {"loss_type": "dapo", "beta": 0.1},
        ),
        (
            "entropy, coefficient 0.02",
            "grpo",
            {"entropy_coef": 0.02},
            {"loss_type": "dapo", "entropy_coef": 0.02},
        ),
        (
            "tau 1, 1.5",
            "sapo",
            {"tau_neg": 1.5},
            {"loss_type": "sapo", "sapo": [1.0, 1.5]},
        ),
        ("", "vespo", {}, {"loss_type": "vespo"}),
        (
            "k 1, 2, lambda .5, 4",
            "vespo",
            {"k_pos": 1.0, "lambda_pos": 0.5, "k_neg": 2.0, "lambda_neg": 4.0},
            {"loss_type": "vespo", "vespo": [1.0, 0.5, 2.0, 4.0]},
        ),
        ("LUSPO", "gspo", LUSPO, {"loss_type": "luspo", **TRLS_LUSPO}),
        (
            "LUSPO, KL, coefficient 0.1",
            "gspo",
            LUSPO | {"kl_coef": 0.1},
            {"loss_type": "luspo", "beta": 0.1, **TRLS_LUSPO},
        ),
        *_off_policy_masks(),
        (
            "unbiased k3, coefficient 0.1",
            "grpo",
            {"kl_coef": 0.1, "kl_unbiased": True},
            {"loss_type": "dapo", "beta": 0.1, "unbiased_kl": True},
        ),
        (
            "seq-mean-token-mean, unbiased k3",
            "grpo",
            {"kl_coef": 0.1, "kl_unbiased": True, "loss_agg_mode": MODES[2]},
            {"loss_type": "grpo", "beta": 0.1, "unbiased_kl": True},
        ),
    )
    for setting, algo, mine, theirs in rows:
        if algo in ("grpo", "dr_grpo"):
            mine = {"clip_dual": 0.0, **mine}
        yield _trl_row(algo, setting, mine, theirs)
    yield _trl_row(
        "sapo",
        "tau 1, 1.05",
        {},
        {"loss_type": "sapo"},
        tolerance=1e-5,
        reason="TRL has the temperatures in float32, where 1.05 is not exact",
    )
    yield _trl_row(
        "vespo",
        "beyond the clamps",
        {},
        {"loss_type": "vespo"},
        cases=("far",),
    )
    yield _trl_row(
        "gspo",
        "unbiased k3",
        {"level": "sequence", "clip_low": 0.2, "clip_high": 0.28} | UNBIASED,
        {"loss_type": "grpo", "level": "sequence", "beta": 0.1, "unbiased_kl": True},
        known="with a ratio of sequences TRL multiplies the KL by it, rlcore by that of the token",
    )
    for setting, algo, mine, theirs in (rows[0], rows[3], rows[6]):
        mine = mine if algo == "gmpo" else {"clip_dual": 0.0, **mine}
        known = f"{UNTRAINED}; TRL's gmpo gives them the loss -A" if algo == "gmpo" else UNTRAINED
        more = {"cases": ("masked",), "known": known}
        yield _trl_row(algo, f"{setting}, untrained row".lstrip(", "), mine, theirs, **more)
    yield _trl_row(
        "grpo",
        "entropy, seq-mean-token-mean",
        {"clip_dual": 0.0, "entropy_coef": 0.02, "loss_agg_mode": MODES[2]},
        {"loss_type": "grpo", "entropy_coef": 0.02},
        known="TRL averages the entropy over tokens always, rlcore as it does the loss",
    )


def _trl_row(algo: str, setting: str, mine: Settings, theirs: Settings, **row: Any) -> Check:
    level = theirs.get("level", "token")
    kind = theirs["loss_type"]
    told = {"max_tokens": MAX_TOKENS, "epsilon": 0.2, "epsilon_high": 0.28, **theirs}
    return Check(
        peer="trl",
        name=algo,
        setting=setting,
        function=f"loss_type {kind}" + (f", {level}" if level != "token" else ""),
        ask="loss",
        told=told,
        ours=loss(algo, **OFF, **mine),
        **({"cases": ("near", "mixed")} | row),
    )


# ---- AReaL


def _areal() -> Iterator[Check]:
    single = {"tolerance": 1e-5, "reason": "AReaL has the log of the weight in float32"}
    token = {"level": "token", "metric": "ratio"}
    # setting, rlcore's settings, AReaL's rejection_sampling, c_clip
    rows: tuple[tuple[str, Settings, Settings | None, float | None, Settings], ...] = (
        ("behave none", {"behave": "none"}, None, None, {}),
        ("behave none, dual 3", {"behave": "none", "clip_dual": 3.0}, None, 3.0, {}),
        ("token_mask, cap 5", {}, token | {"action": "mask", "upper": 5.0}, None, single),
        (
            "token_mask, cap 1.5",
            {"behave_cap": 1.5},
            token | {"action": "mask", "upper": 1.5},
            None,
            single,
        ),
        (
            "truncate, cap 2",
            {"behave": "truncate", "behave_cap": 2.0},
            token | {"action": "clamp", "upper": 2.0},
            None,
            single,
        ),
    )
    whole = {"level": "sequence", "metric": "ratio", "agg": "mean"}
    for cap in (1.2, 5.0):
        weight = {"behave": "none", "rollout_is": "geometric", "rollout_is_threshold": cap}
        given = f"geometric, cap {cap}"
        rows += ((given, weight, whole | {"action": "clamp", "upper": cap}, None, single),)
    rejected = {"rollout_rs": ("seq_mean_k1",), "rollout_rs_threshold": (f"{1 / 1.2!r}_inf",)}
    kept = "AReaL keeps the tokens of a masked response in the denominator, rlcore takes them out"
    mask = whole | {"action": "mask", "upper": 1.2}
    rows += (("geometric, masked above 1.2", weight | rejected, mask, None, {"known": kept}),)
    for setting, mine, rejection, dual, more in rows:
        yield Check(
            peer="areal",
            name="decoupled_ppo",
            setting=setting,
            function="ppo_actor_loss_fn",
            ask="ppo_actor",
            told={"rejection": rejection, "c_clip": dual},
            ours=loss("decoupled_ppo", **mine),
            **more,
        )
    yield Check(
        peer="areal",
        name="gspo",
        setting="sequence, clips .2 .2, token-mean",
        function="ppo_actor_loss_fn, sequence",
        ask="ppo_actor",
        told={"rejection": None, "c_clip": None, "level": "sequence"},
        ours=loss(
            "gspo",
            **OFF,
            level="sequence",
            clip_low=0.2,
            clip_high=0.2,
            loss_agg_mode="token-mean",
        ),
        cases=("near", "mixed", "masked"),
    )
    yield Check(
        peer="areal",
        name="sapo",
        setting="token-mean",
        function="sapo_loss_fn",
        ask="sapo",
        told={"tau_pos": 1.0, "tau_neg": 1.05},
        ours=loss("sapo", **OFF, loss_agg_mode="token-mean"),
    )
    yield Check(
        peer="areal",
        name="overlong_share",
        setting="0.75, penalty 0.5",
        function="reward_overlong_penalty",
        ask="overlong",
        told={"tokens": 24, "penalty": 0.5, "max_tokens": MAX_TOKENS},
        ours=overlong(share=0.75, penalty=0.5),
        tolerance=1e-5,
        reason="AReaL divides lengths in float32",
    )
    yield Check(
        peer="areal",
        name="value",
        setting="clip 0.2",
        function="ppo_critic_loss_fn",
        ask="critic",
        told={"clip": 0.2},
        ours=critic(0.2),
        tolerance=1e-5,
        reason="AReaL takes values in float32 only",
    )


# ---- ROLL


def _roll() -> Iterator[Check]:
    # setting, rlcore's name and settings, ROLL's variant and settings
    rows: tuple[tuple[str, str, Settings, str, Settings], ...] = (
        ("", "tis_ratio01", {}, "tis", {}),
        (
            "bounds .5, 1.5",
            "tis_ratio01",
            {"clip_min": 0.5, "clip_max": 1.5},
            "tis",
            {"actor": {"tis_lower_bound": 0.5, "tis_upper_bound": 1.5}},
        ),
        ("", "topr", {}, "topr", {}),
        (
            "weights 1.5, 0.5",
            "topr",
            {"positive_weight": 1.5, "negative_weight": 0.5},
            "topr",
            {"actor": {"topr_positive_weight": 1.5, "topr_negative_weight": 0.5}},
        ),
        ("clips .1", "cispo", {"clip_low": 0.1, "clip_high": 0.1}, "cispo", {}),
        (
            "clips .1, unified mask",
            "cispo",
            {"clip_low": 0.1, "clip_high": 0.1, "unified_mask": True},
            "cispo",
            {"actor": {"cispo_use_unified_mask": True}},
        ),
        ("", "kimi15", {}, "kimi15", {}),
        ("tau 0.5", "kimi15", {"tau": 0.5}, "kimi15", {"actor": {"kimi15_tau": 0.5}}),
        ("no dual clip", "ppo", {"clip_dual": 0.0}, "ppo", {}),
        ("dual 1.4", "ppo", {"clip_dual": 1.4}, "ppo", {"ppo": {"dual_clip_loss": True}}),
        (
            "clips .2 .28",
            "grpo",
            {"clip_dual": 0.0},
            "ppo",
            {"ppo": {"use_pg_clip_range": True, "pg_clip_high": 0.28}},
        ),
        ("token-mean", "reinforce", {"loss_agg_mode": "token-mean"}, "vanilla", {}),
    )
    for setting, algo, mine, variant, theirs in rows:
        yield _roll_row(algo, setting, OFF | mine, variant, theirs)
    for algo, variant in (("tis_ratio01", "tis"), ("kimi15", "kimi15")):
        for agg in MODES[1:3]:
            yield _roll_row(algo, agg, OFF | {"loss_agg_mode": agg}, variant, {"agg": agg})
    cap = {"rollout_is_threshold": 1.2}
    for algo, variant in (("tis_ratio01", "tis"), ("kimi15", "kimi15"), ("topr", "topr")):
        yield _roll_row(algo, "TIS, cap 1.2", cap, variant, {"upper_bound": 1.2})
    yield _roll_row(
        "topr",
        "KL, entropy",
        OFF | {"kl_coef": 0.1, "kl_type": "low_var_kl", "entropy_coef": 0.02},
        "topr",
        {"kl_loss_coef": 0.1, "entropy_loss_coef": 0.02},
    )
    keep = {"rollout_rs": ("token_k1",), "rollout_rs_threshold": (f"{1 / 1.2!r}_{1 / 0.8!r}",)}
    yield _roll_row(
        "tis_ratio01",
        "filter .8 to 1.2",
        OFF | keep,
        "tis",
        {"keep_ratio": [0.8, 1.2]},
        known="ROLL's token-mean has no mask, so what its filter drops still counts; rlcore's goes",
    )
    for kind in ("token", "sequence"):
        yield Check(
            peer="roll",
            name="correction",
            setting=f"{kind}, cap 1.2",
            function="compute_train_infer_correction",
            ask="correction",
            told={"upper_bound": 1.2, "weight_type": kind},
            ours=kept_weights(rollout_is=kind, rollout_is_threshold=1.2),
        )


def _roll_row(
    algo: str, setting: str, mine: Settings, variant: str, theirs: Settings, known: str = ""
) -> Check:
    agg = mine.get("loss_agg_mode", algos.config_class(algo)().loss_agg_mode)
    return Check(
        peer="roll",
        name=algo,
        setting=setting,
        function=f"loss_func, pg_variant {variant}",
        ask="loss",
        told={"variant": variant, "agg": agg, **theirs},
        ours=loss(algo, **mine),
        known=known,
    )


# ---- slime


def _slime() -> Iterator[Check]:
    """The off-policy mask, of each token where advantages are, and the KL under the ratio."""
    masks = [
        (f"responses off by {t} masked", {"off_policy_mask_threshold": t}, {"opsm_delta": t})
        for t in (0.003, 0.1)
    ]
    for setting, mine, theirs in masks:
        yield _slime_row(setting, mine, theirs)
    single: Settings = {"tolerance": 1e-5, "reason": "slime takes the KL in float32"}
    for kind in ("k1", "k3"):
        ours = {"kl_coef": 0.1, "kl_type": kind, "kl_unbiased": True}
        theirs = {"kl": [0.1, kind], "unbiased_kl": True}
        yield _slime_row(f"unbiased {kind}", ours, theirs, **single)
    setting, mine, theirs = masks[1]
    ours = {"kl_coef": 0.1, "kl_type": "low_var_kl", "kl_unbiased": True}
    yield _slime_row(
        f"{setting}, unbiased low_var_kl",
        mine | ours,
        theirs | {"kl": [0.1, "low_var_kl"], "unbiased_kl": True},
        cases=("near",),
        **single,
    )


def _slime_row(setting: str, mine: Settings, theirs: Settings, **row: Any) -> Check:
    return Check(
        peer="slime",
        name="grpo",
        setting=setting,
        function="policy_loss_function: compute_policy_loss, compute_opsm_mask, compute_approx_kl",
        ask="loss",
        told={"clips": [0.2, 0.28, 3.0], **theirs},
        ours=loss("grpo", **OFF, **mine),
        **row,
    )


_PEERS = {"verl": _verl, "trl": _trl, "areal": _areal, "roll": _roll, "slime": _slime}

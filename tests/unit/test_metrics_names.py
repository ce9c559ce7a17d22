"""Every metric is declared once, and a misspelt one is refused with the nearest name."""

import re
from pathlib import Path

import pytest

from rlcore.metrics import names

SOURCE = Path(names.__file__).parents[1]


def test_no_metric_is_declared_twice():
    declared = [m.name for m in names.METRICS]
    assert sorted(set(declared)) == sorted(declared)


def test_every_metric_has_a_meaning_and_a_well_formed_name():
    for metric in names.METRICS:
        assert metric.meaning
        assert re.fullmatch(r"[\w<>@-]+(/[\w<>@-]+)+", metric.name), metric.name


def test_verls_names_are_declared():
    for name in (
        "actor/pg_loss",
        "actor/grad_norm",
        "critic/score/mean",
        "critic/advantages/min",
        "response_length/clip_ratio",
        "response/aborted_ratio",
        "rollout_corr/rollout_is_mean",
        "rollout_corr/rollout_is_eff_sample_size",
        "training/rollout_probs_diff_std",
        "training/off_policy/trajectory_staleness/max",
        "perf/max_memory_allocated_gb",
        "timing_s/update_actor",
        "timing_per_token_ms/gen",
    ):
        assert names.check(name).name == name


def test_every_metric_that_the_source_names_is_declared():
    prefixes = {m.name.partition("/")[0] for m in names.METRICS}
    literal = re.compile(rf'"((?:{"|".join(prefixes)})/[a-z0-9_/]+[a-z0-9_])"')
    found = {
        name
        for file in SOURCE.rglob("*.py")
        if file != Path(names.__file__)
        for name in literal.findall(file.read_text())
    }
    assert "actor/pg_loss" in found
    spreads = {m.name.rpartition("/")[0] for m in names.METRICS}  # arguments of stats.summary
    for name in sorted(found - spreads):
        names.check(name)


def test_fields_match_data_sets_and_counts():
    assert names.check("val-core/label/acc/mean@1").name == "val-core/<set>/acc/mean@<k>"
    assert names.check("val-core/openai/gsm8k/acc/pass@16").name == "val-core/<set>/acc/pass@<k>"
    assert names.check("reward/format").name == "reward/<name>"


def test_an_exact_name_wins_over_one_with_fields():
    assert names.check("reward/timeouts").unit == "samples"


def test_an_undeclared_metric_is_refused_with_the_nearest_name():
    with pytest.raises(
        ValueError, match=r"actor/pg_los: not declared .*did you mean actor/pg_loss"
    ):
        names.check("actor/pg_los")


def test_a_field_is_one_part_of_a_name_and_a_count_is_a_number():
    for name in ("sched/a/b", "val-core/label/acc/mean@x", "val-core//acc/mean@1", "timing_s/"):
        with pytest.raises(ValueError, match="not declared"):
            names.check(name)

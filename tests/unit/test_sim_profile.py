"""The file that a profile is: fitted, written, read, and what it says about layouts."""

import json
from pathlib import Path

import pytest

from rlcore.sim import profile
from rlcore.sim.cost import EngineCost
from rlcore.sim.profile import Decode, EngineMeasurements, Prefill

TRUE = EngineCost(step_s=0.01, sequence_s=1e-4, context_s=2e-7, prefill_s=3e-5, cache_tokens=4096)


def rows(cost: EngineCost) -> list[Decode]:
    return [
        Decode(sequences=n, context=c, step_s=cost.decode_s(n, n * c, 1))
        for n in (1, 8, 32)
        for c in (100.0, 1000.0)
    ]


def prompts(cost: EngineCost) -> list[Prefill]:
    return [Prefill(tokens=n, seconds=0.002 + cost.prefill_s * n) for n in (64, 256, 512)]


def test_a_fit_finds_the_cost_that_the_rows_were_made_of() -> None:
    found = profile.fit(rows(TRUE), prompts(TRUE), 4096)
    for name in ("step_s", "sequence_s", "context_s", "prefill_s"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name
    assert found.cache_tokens == 4096
    assert profile.error(found, rows(TRUE)) < 1e-6


def test_no_term_of_a_fit_is_negative() -> None:
    """Steps that get shorter with more sequences are noise, not a gain."""
    noisy = [Decode(sequences=n, context=10.0, step_s=0.01 - 1e-5 * n) for n in (1, 8, 32)]
    found = profile.fit(noisy, [], 4096)
    assert (found.sequence_s, found.context_s, found.prefill_s) == (0, 0, 0)
    assert found.step_s == pytest.approx(0.01, rel=0.05)


def test_nothing_measured_is_no_profile() -> None:
    with pytest.raises(ValueError, match="no decode step was measured"):
        profile.fit([], [], 4096)


def layouts() -> list[EngineMeasurements]:
    """Two ranks halve the time of the cache and of arithmetic but not of the step."""
    one = EngineCost(step_s=0.01, context_s=1e-6, cache_tokens=10_000)
    two = EngineCost(step_s=0.01, context_s=5e-7, cache_tokens=25_000)
    return [EngineMeasurements(tp=1, cost=one), EngineMeasurements(tp=2, cost=two, start_s=3.0)]


def test_the_rate_is_of_a_rank() -> None:
    one, two = layouts()
    assert profile.rate(one.cost, 1, 4, 1000) == pytest.approx(4 / 0.014)
    assert profile.rate(two.cost, 2, 4, 1000) == pytest.approx(8 / 0.014 / 2)


def test_the_larger_engine_is_best_where_small_caches_are_full() -> None:
    """A rank with 50 sequences of 1,000 tokens holds 10 of them at a time: 10 / 0.02 s; two ranks
    together 25: 25 / 0.0225 s / 2."""
    assert profile.rate(layouts()[0].cost, 1, 50, 1000) == pytest.approx(500)
    assert profile.rate(layouts()[1].cost, 2, 50, 1000) == pytest.approx(25 / 0.0225 / 2)
    assert profile.best(layouts(), 50, 1000) == 2
    assert profile.best(layouts(), 4, 1000) == 1  # as fast, and the smaller one


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    made = [
        EngineMeasurements(
            tp=x.tp, cost=x.cost, start_s=x.start_s, decode=rows(x.cost), prefill=prompts(TRUE)
        )
        for x in layouts()
    ]
    file.write_text(json.dumps(profile.to_json(made, best_tp=2, head={"engine": "torch"})))
    found = profile.read(file)
    assert [found[1], found[2]] == made
    assert json.loads(file.read_text())["layouts"][1]["error"] < 1e-9


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot read it"),
        ("[]", "not a JSON object"),
        ("{}", "does not have format 1"),
        ('{"format": 1, "layouts": []}', "contains no layouts"),
        ('{"format": 1, "layouts": [{"tp": 1}]}', "has missing or unknown fields: 'cost'"),
        ('{"format": 1, "layouts": [{"tp": 1, "cost": {"step": 1}}]}', "'step'"),
        ('{"format": 1, "layouts": [{"tp": 1, "cost": {"step_s": -1}}]}', "of tp 1 lacks"),
    ],
)
def test_what_is_no_profile_is_refused_in_one_sentence(
    tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "profile.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=words):
        profile.read(file)

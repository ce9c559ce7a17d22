"""`rewards.score`: equal to the children of the service, and its error messages."""

import subprocess
import sys

import msgspec
import pytest

from rlcore import rewards
from rlcore.rewards.registry import config_class
from rlcore.rewards.service import RewardService
from rlcore.utils.errors import ConfigError
from tests.contracts.reward_contract import prompt_of, sample_of, score_all

OWN = """
from dataclasses import dataclass
from rlcore.config.schema import RewardConfig
@dataclass(frozen=True, kw_only=True)
class OwnConfig(RewardConfig):
    bonus: float = 0.5
def score(sample, prompt, text, config):
    bonus = config.bonus * (sample.finish == "length")
    return bonus + len(text) + 100 * text.count("?") + prompt.fields.get("more", 0)
"""
RESPONSES = [
    "so \\boxed{1/2}",
    "Answer: 0.5\nx",
    "It is 0.5",
    "0.5",
    "",
    "\ud800 0.5",
    "<think>0.5",
]


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("math", {}),
        ("math", {"require_boxed": True}),
        ("exact", {"answer_marker": " is "}),
        ("own_scores.score", {"bonus": 0.25}),
    ],
)
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_score_is_that_of_the_children(kind, keys, finish, tmp_path, monkeypatch):
    (tmp_path / "own_scores.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    row = msgspec.structs.replace(prompt_of("0.5"), fields={"more": 7})
    with RewardService(kind, config=config_class(kind)(**keys)) as service:
        for i, text in enumerate(RESPONSES):
            sample = msgspec.structs.replace(sample_of(f"t{i}.0"), finish=finish)
            service.submit(sample.id, sample, row, text)
        found = score_all(service)
    assert not any(r.error for r in found.values())
    ours = [
        rewards.score(text, "0.5", kind, finish=finish, fields=row.fields, **keys)
        for text in RESPONSES
    ]
    assert ours == [found[f"t{i}.0"].score for i in range(len(RESPONSES))]
    assert len(set(ours)) > 1, "the responses differ"


@pytest.mark.parametrize(
    ("kind", "keys", "sentence"),
    [
        ("mth", {}, "--reward mth: allowed are code, exact, judge, math, .*; did you mean math?"),
        ("exact,math", {}, "kind exact,math: is a sum; score its rewards one at a time"),
        ("code", {}, "kind code: runs in processes of its own"),
        (
            "math",
            {"require_box": 1},
            "--reward.require_box: there is no such key; did you mean",
        ),
        ("math", {"decimals": "x"}, "--reward.decimals 'x': must be a whole number"),
        ("math", {"timeout_s": -1.0}, "--reward.timeout_s -1: must be above 0"),
        ("no_such.fn", {}, "there is no module no_such; is it on PYTHONPATH"),
    ],
)
def test_what_cannot_be_scored_is_refused_in_one_sentence(kind, keys, sentence):
    with pytest.raises(ConfigError, match=sentence):
        rewards.score("x", "x", kind, **keys)


def test_a_reward_that_raises_is_not_a_score(tmp_path, monkeypatch):
    (tmp_path / "raises.py").write_text("def score(sample, prompt, text): return 1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError):
        rewards.score("x", "x", "raises.score")


def test_importing_the_package_imports_no_reward():
    program = (
        "import sys, rlcore.rewards; print([m for m in sys.modules if 'rlcore.rewards.' in m])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr

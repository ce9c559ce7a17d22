"""exact and math by worked cases; the registry's sentences."""

import json
import os
from pathlib import Path

import pytest

from rlcore.rewards.math import MathReward, MathRewardConfig, compare_numbers, final_answer
from rlcore.rewards.registry import Part, config_class, parts_of, resolve
from tests.contracts.reward_contract import Case, check_reward, prompt_of

DATA = Path(os.environ.get("RLCORE_DATA", Path(__file__).parents[3] / "shared" / "data"))


def test_exact_keeps_the_contract():
    label = {"after": ">"}
    check_reward(
        "exact",
        [
            Case("21", " 21\n", 1.0),
            Case("21", "the answer is 21", 0.0),
            Case("21", "b5+7=12;c9+12=21;>21", 1.0, label),
            Case("21", "b5+7=12;c9+12=21;", 0.0, label),
            Case("21", "21", 0.0, label),
            Case("21", ">3>21", 0.0, label),
            Case("21", ">3>21", 1.0, label | {"which": "last"}),
        ],
    )


def test_math_keeps_the_contract():
    check_reward(
        "math",
        [
            Case("72", "so \\boxed{72}", 1.0),
            Case("72", "so \\boxed{7} or rather \\boxed{72}", 1.0),
            Case("72", "so \\boxed{73}", 0.0),
            Case("1000", "\\boxed{1,000}", 1.0),
            Case("1000", "\\boxed{\\$1,000.}", 1.0),
            Case("72", "5 + 67\n#### 72", 1.0),
            Case("72", "5 + 67\n#### 71", 0.0),
            Case("72", "I think that the answer is 72.", 1.0),
            Case("\\frac{1}{2}", "\\boxed{0.5}", 1.0),
            Case("0.5", "\\boxed{\\dfrac{2}{4}}", 1.0),
            Case("x^2+2x+1", "\\boxed{(x+1)^2}", 1.0),
            Case("x^2+2x+1", "\\boxed{(x+2)^2}", 0.0),
            Case("0.333333", "\\boxed{0.3333333}", 1.0),
            Case("72", "the answer is 72", 0.0, {"require_boxed": True}),
            Case("72", "\\boxed{72}", 1.0, {"require_boxed": True}),
        ],
    )


def test_the_final_answer_is_the_last_boxed_one_with_its_braces_closed():
    assert final_answer("\\boxed{1} then \\boxed{\\frac{1}{2}} end") == "\\frac{1}{2}"
    assert final_answer("\\boxed{\\{1, 2\\}}") == "\\{1, 2\\}"
    assert final_answer("cut short \\boxed{\\frac{1}{") is None
    assert final_answer("x #### 5\nmore") == "5"
    assert final_answer("no mark at all") is None


def test_plain_numbers_are_compared_without_sympy():
    assert compare_numbers("1,234", "1234.0") is True
    assert compare_numbers("12", "13") is False
    assert compare_numbers("-3", "3") is False
    assert compare_numbers("1/2", "0.5") is None
    assert compare_numbers("1.000001", "1.0000011") is None, "rounding decides elsewhere"
    assert compare_numbers("1,23", "123") is None, "not a thousands separator"


@pytest.mark.skipif(not DATA.exists(), reason="no real data: set RLCORE_DATA")
@pytest.mark.parametrize(
    ("file", "step", "least"),
    [("gsm8k_train", 40, 1.0), ("math_half", 40, 0.98), ("deepmath_rl", 80, 0.98)],
)
def test_real_answers_equal_themselves_and_not_the_next_rows(file, step, least):
    lines = (DATA / "math" / f"{file}.jsonl").read_text().splitlines()[::step]
    answers = [json.loads(line)["answer"] for line in lines]
    reward = MathReward(MathRewardConfig())
    right = [reward.score(None, prompt_of(a), f"thus \\boxed{{{a}}}.") for a in answers]
    missed = [a for a, r in zip(answers, right, strict=True) if not r]
    assert sum(right) / len(right) >= least, missed
    pairs = [(a, b) for a, b in zip(answers, answers[1:], strict=False) if a != b]
    wrong = [reward.score(None, prompt_of(a), f"thus \\boxed{{{b}}}.") for a, b in pairs]
    assert sum(wrong) / len(wrong) <= 0.02


def test_a_users_reward_is_found_by_dotted_path(tmp_path, monkeypatch):
    (tmp_path / "mine_pkg").mkdir()
    (tmp_path / "mine_pkg" / "__init__.py").write_text("")
    (tmp_path / "mine_pkg" / "length.py").write_text(
        "from rlcore.config.schema import RewardConfig, Section\n"
        "@Section\n"
        "class LengthConfig(RewardConfig):\n"
        "    scale: float = 2.0\n"
        "def score(sample, prompt, text, config): return config.scale * sample.num_tokens\n"
        "def plain(sample, prompt, text): return len(text)\n"
        "class Kept:\n"
        "    def __init__(self, config): self.scale = config.scale\n"
        "    def score(self, sample, prompt, text): return self.scale\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    section = config_class("mine_pkg.length")
    assert section().scale == 2.0
    cases = {"mine_pkg.length": 6.0, "mine_pkg.length.plain": 1.0, "mine_pkg.length.Kept": 2.0}
    for name, score in cases.items():
        check_reward(name, [Case("7", "x", score)])


def test_a_sum_is_names_with_weights_and_a_port_is_no_weight():
    assert parts_of("math") == (Part("math", "math", 1.0),)
    assert parts_of("math:1, my.judge:-0.5,a.judge") == (
        Part("math", "math", 1.0),
        Part("judge", "my.judge", -0.5),
        Part("judge2", "a.judge", 1.0),
    )
    assert parts_of("http://h:80,https://h:80/score:2e-1") == (
        Part("http", "http://h:80", 1.0),
        Part("http2", "https://h:80/score", 0.2),
    )
    for bad in ("math:0", "math:1.2.3", "math,exact:1e999"):
        with pytest.raises(ValueError, match="the weight must be a number other than 0"):
            parts_of(bad)


@pytest.mark.parametrize(
    ("name", "source", "sentence"),
    [
        ("exakt", None, "--reward exakt: allowed are exact, math, a dotted path, and sums"),
        ("no_such.thing", None, "there is no module no_such; is it on PYTHONPATH"),
        ("bad_a.score", "x = 1", "module bad_a has no score"),
        ("bad_m.inner", "import sys; inner = sys", "has no function score"),
        ("bad_b.score", "def score(text): return 1", r"has the parameters \(text\), must take"),
        ("bad_c.score", "import no_such_module_xy", "needs no_such_module_xy, which is missing"),
        ("bad_d.score", "1 / 0", "raised ZeroDivisionError: division by zero"),
        ("bad_e.score", "async def score(sample, prompt, text): return 1", "is async"),
    ],
)
def test_what_is_no_reward_is_refused_in_one_sentence(
    name, source, sentence, tmp_path, monkeypatch
):
    if source is not None:
        (tmp_path / f"{name.partition('.')[0]}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=sentence):
        resolve(name)

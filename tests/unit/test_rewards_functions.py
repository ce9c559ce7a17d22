"""exact and math by worked cases; the registry's sentences."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from rlcore.rewards import answers
from rlcore.rewards.math import MathReward, MathRewardConfig
from rlcore.rewards.registry import RewardTerm, config_class, parts_of, resolve
from tests.contracts.reward_contract import Case, check_reward, prompt_of

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from bench_rewards import VERDICTS, accuracy  # noqa: E402

DATA = Path(os.environ.get("RLCORE_DATA", Path(__file__).parents[3] / "shared" / "data"))


def test_exact_keeps_the_contract():
    label = {"answer_marker": ">"}
    check_reward(
        "exact",
        [
            Case("21", " 21\n", 1.0),
            Case("21", "the answer is 21", 0.0),
            Case("21", "b5+7=12;c9+12=21;>21", 1.0, label),
            Case("21", "b5+7=12;c9+12=21;", 0.0, label),
            Case("21", "21", 0.0, label),
            Case("21", ">3>21", 0.0, label),
            Case("21", ">3>21", 1.0, label | {"occurrence": "last"}),
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


@pytest.mark.parametrize(
    ("text", "boxed", "labelled"),
    [
        ("\\boxed{1} then \\boxed{\\frac{1}{2}} end", "\\frac{1}{2}", None),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}", None),
        ("\\boxed{x = 1} \\quad \\text{and} \\quad \\boxed{y = 2}", "x = 1, y = 2", None),
        ("\\boxed{3}, that is \\boxed{4}", "4", None),
        ("\\boxed{4}\n\\boxed{4}", "4", None),
        ("cut short \\boxed{\\frac{1}{", None, None),
        ("x #### 5\nmore", None, "5"),
        ("#### Step 1: add\n5 + 7 = 12\nAnswer: 12", None, "12"),
        ("#### Step 1: add\n5 + 7 is 12.", None, None),
        ("so\n#### twelve\n", None, "twelve"),
        ("5 + 7 = 12\nA: 12", None, "12"),
        ("so\n**Final Answer:** 3 apples\n", None, "3 apples"),
        ("Let\na = 3\nb = 4\nso it is $5$.", None, None),  # steps: names, no marks
        ("A = 50\nThe area is 50 and the side $5$.", None, None),
        ("answer = 7", None, "7"),
        ("no mark at all", None, None),
    ],
)
def test_the_final_answer_is_in_the_last_boxes_or_behind_a_label(text, boxed, labelled):
    assert answers.boxed(text) == boxed
    assert answers.labelled(text) == labelled


@pytest.fixture(scope="module")
def reward() -> MathReward:
    return MathReward(MathRewardConfig())


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("1234", "1,234.0", True),
        ("12", "13", False),
        ("-3", "3", False),
        ("\\frac12", "0.5", True),
        ("1/3", "0.333333", True),
        ("1/3", "0.33", False),
        ("2.9e-6", "2.8\\times 10^{-6}", False),
        ("3.83e35", "3.83 \\times 10^{35} \\text{ ergs/s}", True),
        ("1,23", "123", None),
        ("10000", "10{,}000", True),
        ("32349", "32, 349", None),
        ("28\\%", "28", True),
        ("28\\%", "0.28", True),
        ("28", "0.28", False),
        ("18.9", "\\$18.90", True),
        ("90^\\circ", "90", True),
        ("C", "\\textbf{(C)} 5", True),
        ("C", "(D)", False),
        ("\\text{even}", "even", None),
        ("10", "10 cm", None),
        ("x^2+2x+1", "(x+1)^2", None),
        ("(1,2)", "(2,1)", None),
        ("9^{9^{9}}", "3", None),
        ("1" * 1500 + "\\frac{" + "1" * 800 + "}{3}", "x", None),
    ],
)
def test_numbers_and_choices_are_compared_as_text(gold, answer, same):
    assert answers.compare(answers.normalise(gold), answers.normalise(answer)) is same


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("(1,\\frac{9}{2})", "(1, 4.5)", True),
        ("(1,2)", "(2,1)", False),
        ("3,5,7", "7, 5 \\text{ and } 3", True),
        ("3,5,7", "3,5,8", False),
        ("4, 7", "4", False),
        ("1,23", "123", False),
        ("(1,0),(100,8)", "(100, 8), (1, 0)", True),
        ("(2,\\infty)", "[2,\\infty)", False),
        ("[1,2] \\cup [2,3]", "[1,3]", True),
        (
            "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
            "\\begin{bmatrix}1&2\\\\3&5\\end{bmatrix}",
            False,
        ),
        ("\\text{Evelyn}", "evelyn", True),
        ("\\text{even}", "\\text{odd}", False),
        ("49", "\\text{No solution}", False),
        ("3\\sqrt{13}", "\\sqrt{117}", True),
        ("x^2+2x+1", "(x+2)^2", False),
        ("\\tan^2(y)+1", "\\sec^2(y)", True),
        ("\\binom{n}{2}", "\\frac{n(n-1)}{2}", True),
        ("x = 3", "3", True),
        ("x = 3", "y = 3", False),
        ("f(x) = x + 1", "f(x) = x", False),
        ("y = 2x + 1", "y - 2x = 1", True),
        ("10", "10 cm", True),
        ("\\frac{1}{m}t", "v(t) = \\frac{t}{m}", True),  # the value of v(t), and t is no unit
        ("x^{2}t", "x^{2}", False),
        ("\\\\left(3, \\\\frac{\\\\pi}{2}\\\\right)", "(3, \\frac{\\pi}{2})", True),
        ("+".join("x" * 400), "x", False),
    ],
)
def test_what_is_no_number_is_compared_by_math_verify(reward, gold, answer, same):
    assert reward.score(None, prompt_of(gold), f"\\boxed{{{answer}}}") == same


@pytest.mark.parametrize(
    "piece", [" ", "\n", ".", "(", "\\boxed{", "\\text{ and }", "\\frac", "1,", "$"]
)
def test_text_that_repeats_itself_takes_no_time(piece):
    text = piece * 20_000
    begin = time.process_time()
    answers.boxed(text + "x")
    answers.labelled(text + "x")
    answers.compare("(1,2)", answers.normalise(text[:4000] + "x"))
    answers.with_variable(text + "x", text)
    assert time.process_time() - begin < 5, "seconds of CPU time, where milliseconds are expected"


def test_a_number_is_not_answered_by_the_question_and_algebra_has_an_end():
    reward = MathReward(MathRewardConfig(algebra_timeout_s=0.3))
    assert not reward.score(None, prompt_of("3"), "\\boxed{\\log_2 8}")
    assert reward.score(None, prompt_of("3"), "\\boxed{\\log_2 8 = 3}")
    begin = time.process_time()
    assert not reward.score(None, prompt_of("m = 1"), "\\boxed{m = 7^{7^{7^{7}}} \\pm 1}")
    assert time.process_time() - begin < 10


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason="no real data: set RLCORE_DATA")
def test_labelled_answers_are_judged_as_by_people():
    """Every ninth row of the judge set, against labels and verdicts read by hand."""
    lines = (DATA / "judge" / "judge_pairs.jsonl").read_text().splitlines()[::9]
    rows = [json.loads(line) for line in lines]
    verdicts = {v["id"]: v for v in map(json.loads, VERDICTS.read_text().splitlines())}
    found = accuracy(rows, verdicts)
    assert sum(r["rows"] for r in found) == len(rows)
    assert sum(r["accuracy"] * r["rows"] for r in found) / len(rows) >= 0.995


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
        "from dataclasses import dataclass\n"
        "from rlcore.config.schema import RewardConfig\n"
        "@dataclass(frozen=True, kw_only=True)\n"
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
    assert parts_of("math") == (RewardTerm("math", "math", 1.0),)
    assert parts_of("math:1, my.judge:-0.5,a.judge") == (
        RewardTerm("math", "math", 1.0),
        RewardTerm("judge", "my.judge", -0.5),
        RewardTerm("judge2", "a.judge", 1.0),
    )
    assert parts_of("http://h:80,https://h:80/score:2e-1") == (
        RewardTerm("http", "http://h:80", 1.0),
        RewardTerm("http2", "https://h:80/score", 0.2),
    )
    for bad in ("math:0", "math:1.2.3", "math,exact:1e999"):
        with pytest.raises(ValueError, match="the weight must be a number other than 0"):
            parts_of(bad)


@pytest.mark.parametrize(
    ("name", "source", "sentence"),
    [
        ("exakt", None, "--reward exakt: allowed are .*a dotted path, an http address, and sums"),
        ("no_such.thing", None, "there is no module no_such; is it on PYTHONPATH"),
        ("bad_a.score", "x = 1", "module bad_a has no score"),
        ("bad_m.inner", "import sys; inner = sys", "has no function score"),
        ("bad_b.score", "def score(text): return 1", r"has the parameters \(text\), but must take"),
        ("bad_c.score", "import no_such_module_xy", "imports no_such_module_xy, which is not"),
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

"""Verdicts of the math reward on answers and responses that were written to mislead it: the right
verdict of each is known. `KNOWN_FAULTS`: answers that still get the wrong verdict."""

import msgspec
import pytest

from rlcore.rewards import answers
from rlcore.rewards.math import MathReward, MathRewardConfig
from tests.contracts.reward_contract import prompt_of, sample_of

ANSWERS = [  # gold, answers in a box that equal it, answers that do not
    ("1/2", [r"\frac{2}{4}"], []),
    (r"\frac{3}{4}", [".75", r"\tfrac34"], []),
    (r"-\frac{1}{3}", [r"\frac{-1}{3}", r"\frac{1}{-3}"], []),
    (r"\frac{1}{3}", [r"0.\overline{3}"], ["0.33"]),
    (r"\frac{a}{b}", ["a/b"], []),
    (r"\frac{1}{2}", ["1/2"], []),
    (r"\frac{12}{35}", ["12 / 35"], []),
    (r"\frac{22}{7}", [r"3\frac{1}{7}"], []),
    (r"3\frac{1}{2}", ["3.5", r"\frac{7}{2}"], [r"\frac{3}{2}"]),
    (r"3\frac12", ["3 1/2"], []),
    ("7/2", ["3 1/2", r"3\tfrac{1}{2}"], []),
    ("31/2", [], ["3 1/2"]),
    (r"1\frac{4}{5}", [r"1 \frac{4}{5} \text{ cups}"], []),
    (r"-\frac{7}{2}", [r"-3\frac{1}{2}"], []),
    (r"-\frac{5}{2}", [], [r"-3\frac{1}{2}"]),
    ("3.5", [r"3 \frac{1}{2}"], []),
    ("10", [r"10 \text{ cm}", r"10\,\mathrm{cm}^2", "10 cm^2"], []),
    (r"10 \text{ cm}", ["10"], []),
    (
        "5",
        [
            r"5 \text{ apples}",
            r"\text{5 apples}",
            "5 apples",
            r"5\ \text{m/s}^2",
            "x = 5",
            r"x \approx 5",
            "f(2) = 5",
            r"x = 5 \text{ cm}",
            r"5 \frac{\text{m}}{\text{s}}",
        ],
        [],
    ),
    ("6", [], [r"\text{5 apples}"]),
    (r"15\mbox{ cm}^2", ["15"], []),
    ("20", [r"\$20", r"20 \text{ dollars}"], []),
    ("3", ["3rd"], [r"3 \text{ or } 4", r"3\text{ million}", r"\pm 3"]),
    ("3000000", [r"3 \text{ million}", "3 million"], []),
    ("2500000", [r"\$2.5 \text{ million}"], []),
    (r"3 \text{ million}", ["3000000"], []),
    (
        "2",
        [r"2\pmod{7}", r"x = \frac{4}{2} = 2", "2^{nd}"],
        [r"x = 1 \text{ or } x = 2", "x = 1 and x = 2"],
    ),
    ("60", [r"60 \text{ km/h}", "60 mph"], []),
    ("9.8", [r"9.8 \frac{\text{m}}{\text{s}^2}"], []),
    (
        "12",
        [
            r"12^{\mathrm{th}}",
            "12^{th}",
            r"12^\text{th}",
            r"12\text{th}",
            "12th",
            r"12^{\text{th}} \text{ grade}",
            r"\text{12th grade}",
            r"12 \text{ grade}",
        ],
        ["13^{th}", "12^t"],
    ),
    (r"12^{\mathrm{th}} \text{ grade}", ["12"], []),
    ("1", ["1^{st}"], []),
    ("22", ["22^{nd}"], []),
    (r"12^{\mathrm{th}}", [r"12\text{th}", "12"], ["11"]),
    (r"\{1,2,3\}", [r"\{3,2,1\}", "1,2,3"], [r"\{1,2\}"]),
    ("(1,2)", ["(x, y) = (1, 2)"], ["[1,2]", r"\{1,2\}"]),
    (r"(-\infty,3)", [], [r"x \le 3"]),
    (r"(-\infty,-1)\cup(1,\infty)", [r"(-\infty, -1) \cup (1, \infty)"], []),
    ("1,2", [r"x = 1 \text{ or } x = 2", r"x = 1 \text{ or } 2"], ["12"]),
    (r"\pm 3", ["3, -3"], ["3"]),
    (r"\emptyset", [r"\varnothing", r"\{\}"], []),
    (r"(3,\frac{\pi}{2})", [r"\left(3, \pi/2\right)"], []),
    ("(2,3)", ["x=2, y=3"], []),
    (r"\mathbb{R}", [r"(-\infty,\infty)"], []),
    (r"25\%", ["25", r"\frac{1}{4}"], []),
    ("0.25", [r"25\%"], []),
    ("25", [r"25^\circ\text{C}", r"25^\circ C"], [r"0.25\%", "0.25"]),
    (r"12.5\%", [r"12.5 \text{ percent}"], []),
    ("12.5", ["12.5 percent"], []),
    ("40", [r"40\%"], []),
    (
        "B",
        [
            "B",
            r"\text{B}",
            "(B)",
            r"\text{(B)}",
            r"\mathrm{(B) } 12",
            "B. 12",
            r"\textbf{(B)}\ 12",
            "b",
            r"\text{Option B}",
        ],
        ["A", "A, B", "BC"],
    ),
    ("(B)", ["B"], []),
    ("D", [], [r"\text{None of the above}"]),
    ("1000000", ["1,000,000", r"1,\!000,\!000"], []),
    ("12345.6", ["12,345.6"], []),
    ("1000", [r"1\,000", "1{,}000", "1 000", "1000."], ["1.000", "1,00"]),
    ("1,000", ["1000"], []),
    ("5000", [r"5,000 \text{ people}"], []),
    ("10,10", [], ["1010"]),
    ("-1000", ["-1,000"], []),
    ("90", [r"90^\circ", "90\xb0", r"90 \text{ degrees}", "90 degrees", r"90{}^\circ"], []),
    (r"90^\circ", [r"90^{\circ}"], []),
    (r"30^\circ", [], [r"60^\circ"]),
    (r"2\sqrt{3}", [r"\sqrt{12}"], ["3.46"]),
    (r"2\sqrt3", [r"2\sqrt{3}"], []),
    (r"6.02\times 10^{23}", ["6.02e23"], []),
    ("6.02e23", [r"6.02\cdot 10^{23}"], []),
    ("12:30", ["12:30"], ["12:31"]),
    (r"\text{Monday}", ["Monday"], [r"\text{Tuesday}"]),
    ("Yes", [r"\text{yes}"], []),
    ("2+3i", ["3i+2"], ["2-3i"]),
    ("101_2", ["101_{2}"], ["110_2"]),
    ("3x+2", ["2+3x", "y = 3x+2"], []),
    (r"\frac{\pi}{2}", [], ["90"]),
    ("2^{10}", ["1024"], []),
    ("1024", ["2^{10}"], []),
    ("0", ["-0"], []),
    ("0.5", [r"\frac{1}{2}", r"50 \text{ percent}"], []),
    ("5!", ["120"], []),
    ("e^2", ["e^{2}"], []),
    ("10000", ["x = 10,000"], []),
    ("7", ["3+4=7", r"\text{order} = 7"], [r"7\text{ thousandths}", "7 billionths"]),
    ("0.007", [r"7\text{ thousandths}"], []),
    ("1/3", [], [r"0.3333333\overline{4}", r"0\frac{1}{0}"]),
    ("0.1666666", [r"0.1\overline{6}"], []),
    (r"\frac16", [r"0.1\overline{6}"], []),
    ("0.17", [], [r"0.1\overline{6}"]),
    ("1500", [r"1.5\text{ thousand}"], []),
    (r"\{1,2\}", [], ["(1,2)"]),
    ("16", ["2^{4}"], []),
    ("2^{n}", ["2^n"], []),
    ("9", [r"9 \text{ square units}", "9 square units"], []),
]
KNOWN_FAULTS = [  # as above
    ("[1,2)", [r"1 \le x < 2"], []),
    (r"(-\infty,3)", ["x<3"], []),
    (r"(-\infty,2)\cup(2,\infty)", [r"x \neq 2"], []),
    (r"(-\infty,-1)\cup(1,\infty)", ["|x|>1"], []),
    (r"[0,\infty)", [r"x \geq 0"], []),
    ("(0,1)", ["]0,1["], []),
    (r"\ln 2", [r"\log 2"], []),
    ("11", [], ["1 1"]),
    ("2", [], [r"x=1 \quad y=2"]),
    (r"\{(1,2)\}", ["(1,2)"], []),
]
FILLER = "Then the sum is a product of the terms above, and the rest follows from that. " * 5
RESPONSES = [  # gold, response, right verdict
    ("7", r"The answer is \boxed{7}. Let me double-check: 3+4=7, and 8 is too big.", 1),
    ("8", r"The answer is \boxed{7}. Check: 3+4=7, and 8 is too big.", 0),
    ("7", r"\boxed{7} \text{ units}", 1),
    ("5", r"First part: \boxed{3}. Second part: \boxed{5}", 1),
    ("3", r"First part: \boxed{3}. Second part: \boxed{5}", 0),
    ("3, 5", r"\boxed{3} and \boxed{5}", 1),
    ("12", r"\boxed{12} or \boxed{13}", 0),
    ("7", r"\boxed{\boxed{7}}", 1),
    ("7", r"so $\boxed 7$.", 1),
    ("7", r"so $\boxed8$.", 0),
    ("7", r"so $\boxed{}$", 0),
    ("7", "<answer>3</answer> or rather <answer>7</answer>", 1),
    ("B", "At first the answer is A. Now the answer is B.", 1),
    ("7", r"\fbox{7}", 1),
    (r"\frac{1}{2}", r"$\boxed{\dfrac{1}{2}}$", 1),
    ("7", r"\boxed{7}\\boxed{7}", 1),
    ("x^2", r"$$\boxed{x^{2}}$$", 1),
    ("5", r"<think>maybe \boxed{5}, let me check", 0),
    ("5", r"<think>maybe \boxed{4}</think>The answer is \boxed{5}", 1),
    ("5", "<think>\\boxed{5}</think>\n\nThe answer is 6.", 0),
    ("5", "<think>it is 4</think>\n\n**Answer: 5**", 1),
    ("5", "<think>so 5</think> 5", 1),
    ("0", "<think>Let x = 0", 0),
    ("4", "<think>it is 5\nAnswer: 4\n</think>\n\nThe answer is 5", 0),
    ("5", "so it is\n</think>\n\nThe answer is \\boxed{5}", 1),
    ("B", "The answer is (B).", 1),
    ("B", "The correct option is B", 1),
    ("B", "Answer: B) 12", 1),
    ("A", "I think that A is wrong, so the answer is C.", 0),
    ("B", "**Answer: (B)**", 1),
    ("B", "Answer: A) and not B", 0),
    ("C", "Answer: B, since C is wrong", 0),
    (
        "0",
        "Let f be as above, and start at x = 0.\n\n" + FILLER,
        0,
    ),
    (
        "0",
        "To find the answer, let x = 0 and y = 3.\n\n" + FILLER,
        0,
    ),
    ("72", "I think that the answer is 72.", 1),
    ("7", "so x is 7.\n\nLet me know if you have any other questions!", 1),
    ("7", "**Answer:** 7 apples", 1),
    ("7", "Answer: The total is 7.", 1),
    ("7", "Answer:\n\n$7$", 1),
    ("7", "Answer:\n7", 1),
    (r"\frac12", r"The final answer is $\frac12$. I hope it is correct.", 1),
    ("7", "#### 7", 1),
    ("7", "7", 1),
    ("70", "The answer is 7.", 0),
    ("7", "Thus $x = 7$.", 1),
    ("7", r"Thus \[ x = 7. \]", 1),
    ("7", "Final Answer: $7$", 1),
    ("7", "The answer is **7**.", 1),
    ("7", "<answer>7</answer>", 1),
    ("7", "<answer> 8 </answer>", 0),
    ("B", "Answer: (B) because A is wrong", 1),
    ("A", "The answer is B. Note that A is wrong", 0),
    ("D", "Thus, the answer is **D**.\n", 1),
    ("B", r"The answer is $\textbf{(B)}$.", 1),
    ("3", "so 3 <answer>x</answer>", 0),
    ("12", "<think>a</think><answer>12</answer>", 1),
]


@pytest.fixture(scope="module")
def reward() -> MathReward:
    return MathReward(MathRewardConfig())


def verdicts(rows: list[tuple[str, list[str], list[str]]]) -> list[tuple[str, str, int]]:
    """Return gold, answer and right verdict of each answer."""
    return [(g, a, int(a in right)) for g, right, wrong in rows for a in [*right, *wrong]]


@pytest.mark.parametrize(("gold", "answer", "right"), verdicts(ANSWERS))
def test_a_boxed_answer_gets_the_right_verdict(reward, gold, answer, right):
    assert reward.score(None, prompt_of(gold), f"so \\boxed{{{answer}}}.") == right


@pytest.mark.xfail(strict=True, reason="listed as open in rlcore/rewards/README.md, Math")
@pytest.mark.parametrize(("gold", "answer", "right"), verdicts(KNOWN_FAULTS))
def test_a_known_fault_is_still_one(reward, gold, answer, right):
    assert reward.score(None, prompt_of(gold), f"so \\boxed{{{answer}}}.") == right


@pytest.mark.parametrize(("gold", "response", "right"), RESPONSES)
def test_a_response_gets_the_right_verdict(reward, gold, response, right):
    assert reward.score(None, prompt_of(gold), response) == right


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("We begin with x = 0", 0),  # no answer, but its last number is the gold
        ("The sum is 3 - 3 =\n0", 0),
        ("Answer: 0", 0),  # might have become 0.5
        ("Answer: 0\nNext", 1),
        ("so \\boxed{0} and", 1),
    ],
)
def test_a_cut_response_states_no_answer_in_its_last_line_except_in_a_box(reward, text, right):
    cut = msgspec.structs.replace(sample_of("t0.0"), finish="length")
    assert reward.score(cut, prompt_of("0"), text) == right
    assert reward.score(sample_of("t0.0"), prompt_of("0"), text) == 1


def test_the_end_of_a_response_begins_with_a_sentence():
    last = "Two" + " b" * 146
    assert answers.end_of("One $x$. " + last) == last
    assert answers.end_of("a" * 400 + ". b") == "a" * 297 + ". b", "the one before may be long"
    assert answers.end_of(" short. text ") == "short. text"


def test_a_vote_counts_no_answer_of_the_reasoning(reward):
    assert reward.answer("<think>\\boxed{4}</think>so \\boxed{5}") == "5"
    assert reward.answer("<think>\\boxed{4}") == ""

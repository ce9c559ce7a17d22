"""Attempts to forge a score (`tests/forged.py`), and numbers that no score may be.

Not covered: what a language model makes of a response that argues with it.
"""

import time

import pytest

from rlcore.envs import kind as env_kind
from rlcore.envs import swe
from rlcore.rewards.kind import to_result
from rlcore.rewards.registry import config_class
from rlcore.rewards.service import RewardService
from rlcore.sandbox import isolation
from rlcore.utils.scores import LARGEST, number, plain_name
from tests.contracts.reward_contract import prompt_of, sample_of, score_all
from tests.forged import ATTEMPTS, PROGRAMS, Lab, serving


@pytest.fixture(scope="module")
def lab():
    with Lab() as made:
        yield made


CASES = [
    pytest.param(a, marks=[] if a.quick else pytest.mark.slow, id=f"{a.reward}: {a.name}")
    for a in ATTEMPTS
]


@pytest.mark.parametrize("attempt", CASES)
def test_no_score_is_forged(lab, attempt):
    assert attempt.score(lab) <= 0


@pytest.mark.slow
def test_no_program_forges_a_verdict_without_namespaces():
    with Lab("fallback") as lab:
        passed = [name for name, source, test in PROGRAMS if lab.program(source, [test])]
    assert passed == []


@pytest.mark.parametrize("name, source, test", PROGRAMS, ids=[p[0] for p in PROGRAMS])
@pytest.mark.slow
def test_a_right_program_passes_the_tests_that_were_to_be_forged(lab, name, source, test):
    if (
        "raise KeyboardInterrupt" in test
        or "S()" in test
        or "os._exit" in source
        or "async for" in test
    ):
        pytest.skip("this test cannot be passed by a value")
    want = "True" if "default" in name else "7"
    assert lab.program(f"def f(*a): return {want}", [test]) == 1


def test_the_same_ways_are_open_to_a_right_answer(lab):
    assert lab.math("1234567", "\\boxed{1234567.0}") == 1
    assert lab.math("1234567.1", "\\boxed{1234567.2}") == 1, "7 digits of a rounded number"
    assert lab.judged('He says "Verdict: No". Verdict: Yes') == 1
    assert lab.served(b'{"score": 1}') == 1
    tests = ["print(f(1))\nassert f(1) == 7", "assert list(map(f, [1])) == [7]"]
    assert lab.program("def f(*a): return 7", tests) == 2


def test_tests_may_be_asynchronous_match_patterns_and_use_threads(lab):
    tests = [
        "import asyncio\nasync def g():\n assert f(1) == 1\nasyncio.run(g())",
        "match f([1, 2]):\n case [a, *b]: assert (a, b) == (1, [2])\n case _: assert 0",
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(8) as p:\n"
        " assert list(p.map(f, range(99))) == list(range(99))",
    ]
    assert lab.program("def f(x): return x", tests) == 3


class Huge:
    def __float__(self) -> float:
        return 1e31


@pytest.mark.parametrize(
    "value, sentence",
    [
        (1e300, r"score is 1e\+300; return a number from -1e\+30 to 1e\+30"),
        (-1e39, r"score is -1e\+39"),
        (Huge(), r"score is 1e\+31"),
        (10**400, "score is inf; return a finite number"),
        (float("nan"), "score is nan"),
        (1j, "score is a complex; return a number or a RewardResult"),
        ([1.0] * 10**5, "score is a list"),
        ("1", "score is a str"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_is_no_score_is_refused_in_a_sentence(value, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        to_result(value)


def test_all_kinds_of_numbers_are_scores():
    from decimal import Decimal

    import numpy as np
    import torch

    for value in (1, True, 1.0, np.float16(1), np.int64(1), torch.tensor(1.0), Decimal(1)):
        found = to_result(value).score
        assert found == 1.0 and type(found) is float
    assert number("x", -LARGEST) == -LARGEST and number("x", -0.0) == 0.0


def test_an_environments_reward_has_the_same_limits():
    with pytest.raises(ValueError, match=r"the reward is 1e\+300; return a number from"):
        env_kind.checked("", 1e300, {})
    seen, reward, numbers = env_kind.checked(
        "", 1, {"": 2, "a b/c": 1, "much": 1e300, "big": 10**400}
    )
    assert (seen, reward, numbers) == ("", 1.0, {"_": 2.0, "a_b_c": 1.0})
    assert plain_name("\x00\u00e9" * 9, 4) == "____"


def test_details_without_a_name_or_with_strange_ones_end_no_run(lab):
    from rlcore.metrics import names

    body = b'{"score": 1, "": 2, "a\\n/\\u00e9": 3, "much": 4}'
    with serving(body) as url, RewardService(url, config=config_class(url)()) as service:
        service.submit("t0.0", sample_of("t0.0"), prompt_of("7"), "x")
        (result,) = score_all(service).values()
    assert result.details == {"_": 2.0, "a___": 3.0, "much": 4.0}
    for name in result.details:
        names.check(f"reward/{name}")


@pytest.mark.parametrize("piece", ["\n", " \n", "```sh", "```sh\n", "submit ", "```bash\nls\n```"])
def test_a_turn_that_repeats_itself_does_not_block_the_environments_process(piece):
    text = piece * (100_000 // len(piece))
    begin = time.process_time()
    swe._BLOCK.findall(text)
    swe._SUBMIT.search(text)
    assert time.process_time() - begin < 5, "seconds of CPU time, where milliseconds are expected"


def test_importing_the_sandbox_changes_nothing_in_the_rank():
    import sys

    assert isolation and sys.get_int_max_str_digits() == 4300

"""The code reward: which program, which tests, what they are worth, and real programs of MBPP."""

import json
import time
from textwrap import indent

import numpy as np
import pytest

from rlcore.records import Prompt
from rlcore.rewards import code
from rlcore.rewards.code import CodeRewardConfig, checks_of, program_of
from rlcore.rewards.service import RewardService
from tests.contracts.reward_contract import sample_of

ADD = "def add(a, b):\n    return a + b"
ADD_TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]


def row(index: int = 0, **fields) -> Prompt:
    return Prompt(index=index, dataset="test", tokens=np.ones(3, np.int32), fields=fields)


def scores(jobs: list[tuple[Prompt, str]], **settings) -> list:
    """Results of (row, response), in order."""
    config = CodeRewardConfig(**settings)
    with RewardService("code", config=config) as service:
        found = {}
        for i, (prompt, text) in enumerate(jobs):
            service.submit(f"t{i}.0", sample_of(f"t{i}.0"), prompt, text)
        while len(found) < len(jobs):
            found |= dict(service.poll(60.0))
    return [found[f"t{i}.0"] for i in range(len(jobs))]


@pytest.mark.parametrize(
    "text, program",
    [
        ("def f(): pass", "def f(): pass"),
        ("So:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\na\n```\nor rather\n```py\nb\n```", "b\n"),
        ("```python\nx = 1\n```\nwhich prints\n```text\n1\n```", "x = 1\n"),
        ("```bash\nls\n```", "```bash\nls\n```"),
        ("So:\n```python\nx = 1\n", "x = 1\n"),
        ("```bash\nls\n```\nthen\n```python\nx = 1", "x = 1"),
        ("```python\nx = 1\n```\nand\n```python\nx =", "x = 1\n"),
        ("1. So:\n" + indent(f"```python\n\n{ADD}\n```", "   "), f"\n{ADD}\n"),
        (indent(f"```python\n{ADD}", "\t"), ADD),
        ("   ```\n   x = '''\n a\n     b'''\n   ```", "x = '''\na\n  b'''\n"),
        (f"    ```python\n{ADD}\n    ```", f"{ADD}\n"),
    ],
)
def test_the_program_is_the_last_fenced_block_of_python(text, program):
    assert program_of(text) == program


@pytest.mark.parametrize(
    "piece", ["-", " ", "\n", "`", "```", "```\n", "\n```x", "``` ", "\t``", "a\n"]
)
@pytest.mark.parametrize("tail", ["", "\nx = 1\n", "\n```"])
def test_text_that_repeats_itself_takes_no_time(piece, tail):
    """It is read in the rank's own process, where no deadline reaches."""
    text = f"```{piece * (200_000 // len(piece))}{tail}"
    begin = time.process_time()
    program_of(text)
    assert time.process_time() - begin < 5, "seconds of CPU time, where milliseconds are expected"


def test_rows_carry_their_tests_in_several_forms():
    config = CodeRewardConfig()
    mbpp = checks_of(row(test_list=ADD_TESTS, test_setup_code="import math", challenge=[]), config)
    assert (mbpp.statements, mbpp.setup, len(mbpp)) == (tuple(ADD_TESTS), "import math", 2)
    assert checks_of(row(test_list=json.dumps(ADD_TESTS)), config).statements == tuple(ADD_TESTS)
    assert checks_of(row(test_list="assert f(1)"), config).statements == ("assert f(1)",)
    two = {"inputs": ["1\n"], "outputs": ["2\n"]}
    for cases in (two, json.dumps(two), [{"input": "1\n", "output": "2\n"}]):
        assert checks_of(row(cases=cases), config).cases == (("1\n", "2\n"),)
    short = checks_of(row(test_list=ADD_TESTS, cases=two), CodeRewardConfig(max_tests=1))
    assert (len(short.statements), short.cases) == (1, ())


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({}, "row 7 of test has no tests in test_list or cases"),
        ({"test_list": [3]}, "a int instead of text"),
        ({"cases": '{"inputs": ["1"], "outputs": []}'}, "cannot be read"),
    ],
)
def test_a_row_without_tests_that_can_be_read_says_so(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        checks_of(row(7, **fields), CodeRewardConfig())


def test_programs_are_scored_by_their_tests_and_failures_have_reasons():
    asserts = row(test_list=ADD_TESTS)
    cases = row(cases=[{"input": "1 2", "output": "3"}, {"input": "5 5", "output": "10\n"}])
    main = "print(sum(map(int, input().split())))"
    jobs = [
        (asserts, f"```python\n{ADD}\n```"),
        (asserts, ADD.replace("+", "*")),
        (asserts, "no program at all"),
        (cases, main),
        (cases, "print(3)"),
        (cases, main + "\nraise SystemExit(1)"),
        (asserts, "while True: pass"),
        (cases, "while True: print('x' * 9999)"),
        (row(), ADD),
        (asserts, ADD),
    ]
    found = scores(jobs, timeout_s=2.0, on_error=-1.0)
    assert [r.score for r in found] == [1, 0, 0, 1, 0, 0, -1, -1, -1, 1]
    assert [r.error.partition(" ")[0].strip(":") for r in found[6:9]] == [
        "timeout",
        "output",
        "row",
    ]
    assert found[0].details == {"passed": 1.0} and found[4].details == {"passed": 0.5}
    half = scores([jobs[4], (asserts, "def add(a, b): return 3")], partial_credit=True)
    assert [r.score for r in half] == [0.5, 0.5]


def test_several_slots_work_at_a_time_and_a_cancelled_program_ends():
    asserts = row(test_list=ADD_TESTS)
    with RewardService("code", config=CodeRewardConfig(workers=2, timeout_s=600.0)) as service:
        service.submit("t0.0", sample_of("t0.0"), asserts, "while True: pass")
        for i in range(1, 5):
            service.submit(f"t{i}.0", sample_of(f"t{i}.0"), asserts, ADD)
        found = {}
        while len(found) < 4:
            found |= dict(service.poll(60.0))
        assert [found[f"t{i}.0"].score for i in range(1, 5)] == [1, 1, 1, 1]
        service.cancel(["t0.0"])
    # closing took no 600 s: the endless one has ended


def test_a_sample_that_is_cancelled_when_its_score_is_there_leaves_nothing_behind():
    with RewardService("code", config=CodeRewardConfig(workers=1)) as service:
        service.submit("t0.0", sample_of("t0.0"), row(), ADD)  # a row without tests needs no run
        with service._changed:
            assert service._changed.wait_for(lambda: service._done, 60.0)
        service.cancel(["t0.0"])
        (runner,) = service._runners
        service.close()
    assert not runner._cancelled and not runner._open


def test_packages_of_the_environment_are_there_where_they_are_asked_for():
    jobs = [(row(test_list=ADD_TESTS), f"import msgspec\n{ADD}")]
    assert [r.score for r in scores(jobs)] == [0]
    assert [r.score for r in scores(jobs, allow_packages=True)] == [1]


def test_it_refuses_to_run_without_isolation_where_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(code.isolation.shutil, "which", lambda name: None)
    with (
        RewardService("code", config=CodeRewardConfig(require_isolation="namespaces")) as service,
        pytest.raises(RuntimeError, match="isolated here with grade namespaces: bubblewrap"),
    ):
        service.poll(60.0)


@pytest.mark.parametrize("every", [100, pytest.param(1, marks=pytest.mark.slow)])
def test_reference_answers_of_mbpp_pass_and_other_rows_answers_do_not(every, real_data):
    lines = (real_data / "code/mbpp.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines][::every]
    jobs = [(row(i, **r), r["code"]) for i, r in enumerate(rows)]
    wrong = [(row(i, **r), rows[i - 1]["code"]) for i, r in enumerate(rows)]
    right = scores(jobs, timeout_s=60.0, workers=2)
    assert [r for r, found in zip(rows, right, strict=True) if found.score != 1] == []
    assert (
        sum(found.score for found in scores(wrong, timeout_s=60.0, workers=2)) <= len(rows) // 100
    )

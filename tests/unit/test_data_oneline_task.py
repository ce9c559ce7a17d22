"""The tiny code task: the demonstration passes the tests, splits are clean."""

import pytest

from rlcore.data import oneline_task
from rlcore.data.generated import SHARES, split_of
from rlcore.data.oneline_task import CHARS, make


@pytest.mark.parametrize("split", SHARES)
def test_a_demonstration_passes_its_tests_and_keeps_to_the_characters(split):
    lengths = set()
    for index in range(300):
        row = make(split, 3, index)
        names: dict = {}
        exec(row.demonstration, names)
        for test in row.tests:
            exec(test, names)
        assert set(row.prompt + row.demonstration) <= set(CHARS)
        assert split_of(row.prompt) == split and row == make(split, 3, index)
        lengths.add((len(row.prompt) - 1) // 2)
    assert lengths == set(range(1, 9))


def test_brackets_stand_where_they_are_needed():
    assert oneline_task._body([("+", 3), ("*", 5), ("-", 2)]) == "(x+3)*5-2"
    assert oneline_task._body([("*", 2), ("*", 3)]) == "x*2*3"
    assert oneline_task._body([("-", 1), ("*", 2), ("+", 4), ("*", 3)]) == "((x-1)*2+4)*3"


def test_a_prompt_carries_its_tests_where_the_code_reward_looks():
    row = make("train", 0, 5)
    prompt = oneline_task.to_prompt(row, 5, lambda text: [CHARS.index(c) + 2 for c in text])
    assert prompt.fields["test_list"] == list(row.tests) and prompt.text == row.prompt

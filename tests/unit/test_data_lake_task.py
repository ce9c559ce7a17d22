"""The lake task: walks lead to the goal, demonstrations show what the lake shows, clean splits."""

import pytest

from rlcore.data.generated import SHARES, split_of
from rlcore.data.lake_task import CHARS, board, make, moved, shortest, to_prompt


@pytest.mark.parametrize("split", SHARES)
def test_a_demonstration_walks_to_the_goal_over_ice(split):
    lengths = set()
    for index in range(200):
        row = make(split, 3, index)
        assert split_of(row.prompt) == split and row == make(split, 3, index)
        assert set(row.prompt + row.demonstration) <= set(CHARS)
        desc = to_prompt(row, index, lambda text: [0] * len(text)).fields["desc"]
        at = next((i, line.index("S")) for i, line in enumerate(desc) if "S" in line)
        shown = ""
        for letter in row.answer:
            assert desc[at[0]][at[1]] in "SF"
            shown += letter
            at = moved(desc, at, letter)
            shown += board(desc, at)
        assert desc[at[0]][at[1]] == "G"
        assert shown.startswith(row.demonstration) and row.demonstration[-1] == row.answer[-1]
        lengths.add(len(row.answer))
    assert {1, 2, 3, 4, 5} <= lengths


def test_a_shortest_walk_goes_around_holes_and_there_may_be_none():
    assert shortest(["SHG", "FFF"]) == "DRRU"
    assert shortest(["SHG", "FHF"]) == ""


def test_edges_hold_and_the_board_shows_the_walker():
    assert moved(["SG"], (0, 0), "U") == moved(["SG"], (0, 0), "L") == (0, 0)
    assert board(["SFH", "FFG"], (1, 1)) == "..O\n.PG\n"

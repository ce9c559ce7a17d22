"""Files of response lengths, and what is wrong with them."""

import gzip
import json
from pathlib import Path

import pytest

from rlcore.sim.lengths import read_lengths


def test_rows_of_one_prompt_belong_together(tmp_path: Path):
    path = tmp_path / "math.csv"
    path.write_text("idx,sample,prompt_tokens,response_tokens\n0,0,40,9\n1,0,60,5\n0,1,40,7\n")
    found, said = read_lengths(path)
    assert found.by_prompt == [[9, 7], [5]] and found.prompt_tokens == 47
    assert said.startswith("math.csv: 3 responses to 2 prompts")


def test_a_column_picks_rows(tmp_path: Path):
    path = tmp_path / "many.csv"
    path.write_text("model,idx,response_tokens\na,0,9\nb,0,5\n")
    assert read_lengths(path, {"model": "b"})[0].by_prompt == [[5]]
    with pytest.raises(ValueError, match="no rows after model=c"):
        read_lengths(path, {"model": "c"})
    with pytest.raises(ValueError, match="line 2: no column 'size'; it has model, idx"):
        read_lengths(path, {"size": "c"})


def test_a_serving_trace_says_nothing_about_prompts(tmp_path: Path):
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,100,10\ny,300,20\n")
    found, said = read_lengths(path)
    assert found.by_prompt == [[10, 20]] and "without prompts" in said


def test_a_run_s_own_rollouts_are_grouped_by_their_prompt(tmp_path: Path):
    path = tmp_path / "rollouts.jsonl.gz"
    rows = [
        {"step": s, "id": f"t{s}.0", "prompt": f"p{s % 2}", "num_tokens": 5 + s} for s in range(4)
    ]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    assert read_lengths(path)[0].by_prompt == [[5, 7], [6, 8]]


def test_one_response_a_prompt_is_said(tmp_path: Path):
    path = tmp_path / "one.jsonl"
    path.write_text('{"idx": 0, "n_tokens": 3}\n\n{"idx": 1, "n_tokens": 4}\n')
    assert "with one response per prompt" in read_lengths(path)[1]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085"])
def test_a_line_separator_within_a_prompt_does_not_end_the_row(tmp_path: Path, separator: str):
    rows = [{"prompt": f"a{separator}b", "num_tokens": 5 + k} for k in range(3)]
    path = tmp_path / "rollouts.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(line + "\r\n" for line in lines), encoding="utf-8", newline="")
    assert read_lengths(path)[0].by_prompt == [[5, 6, 7]]


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.csv", "response_tokens,idx\n5,0\n"), ("a.jsonl", '{"n_tokens": 5, "idx": 0}\n')],
)
def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path: Path, name: str, text: str):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8-sig")
    assert read_lengths(path)[0].by_prompt == [[5]]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "a.csv",
            "idx,response_tokens\n0,5\n1,many\n",
            "line 3: response_tokens 'many': give a",
        ),
        (
            "a.csv",
            "idx,response_tokens\n0,5\n1\n",
            "line 3: expected 2 values as in the header",
        ),
        ("a.csv", "idx,response_tokens\n0,0\n", "line 2: response_tokens '0'"),
        ("a.csv", "idx,response_tokens\n0,nan\n", "line 2: response_tokens 'nan'"),
        ("a.csv", "idx,words\n0,5\n", "line 2: has only idx, words; give a .csv"),
        ("a.csv", "", "no rows"),
        ("a.jsonl", '{"n_tokens": 5}\n{"n_tok', "line 2: not JSON"),
        ("a.jsonl", '{"n_tokens": 5}\n[7]\n', "line 2: '[7]' is not a JSON object"),
        ("a.jsonl", '{"n_tokens": 2.5}\n', "line 1: n_tokens '2.5'"),
        ("a.jsonl", '{"n_tokens": true}\n', "line 1: n_tokens 'True'"),
        ("a.txt", "5\n", "a.txt: give a .csv"),
        ("a.jsonl.gz", "5\n", "cannot read it (Not a gzipped file"),
    ],
)
def test_a_junk_line_is_named_with_what_is_allowed(
    tmp_path: Path, name: str, text: str, words: str
):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        read_lengths(path)
    assert words in str(error.value) and "\n" not in str(error.value)

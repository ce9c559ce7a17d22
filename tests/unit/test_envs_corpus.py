"""Search in a local corpus, the tool `search` of `--env tools`."""

import json
import os
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlcore.envs import corpus
from rlcore.envs.corpus import Corpus, Document, index, main
from rlcore.envs.tools import ToolsConfig
from rlcore.utils.errors import ConfigError
from tests.contracts.env_contract import check_env, prompt_of

DOCUMENTS = [
    {"title": "Paris", "text": "Paris is the capital of France, on the Seine."},
    {
        "title": "Seine",
        "text": "The Seine is a river in France. It flows through Paris to the sea.",
    },
    {"title": "Rome", "text": "Rome is the capital of Italy, on the Tiber."},
    {"text": "Tibers and seas: rivers, rivers and more rivers."},
]


def write(folder: Path, rows: list[dict[str, str]] = DOCUMENTS) -> Path:
    file = folder / "corpus.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    return file


def titles(file: Path, query: str, most: int = 3) -> list[str]:
    found = Corpus(file)
    try:
        return [document.title for document in found.search(query, most)]
    finally:
        found.close()


def test_documents_with_more_and_rarer_words_come_first(tmp_path):
    file = write(tmp_path)
    assert titles(file, "What is the capital of Italy?")[0] == "Rome"
    assert titles(file, "river Seine", 1) == ["Seine"]
    assert titles(file, "flowing")[0] == "Seine"  # by its stem
    assert titles(file, "rivers", 1) == [""]
    assert titles(file, "capital", 1) == titles(file, "capital CAPITAL", 1)
    assert len(titles(file, "the capital of France", 2)) == 2


@pytest.mark.parametrize(
    "query",
    ['"', "AND OR NOT", "title:Rome", "a* ^b", "NEAR(x y)", "'; DROP TABLE", "(", "-", "é\0"],
)
def test_no_query_is_read_as_syntax(tmp_path, query):
    assert isinstance(titles(write(tmp_path), query), list)


def test_a_query_without_words_or_with_unknown_ones_finds_nothing(tmp_path):
    file = write(tmp_path)
    assert titles(file, " ?! ") == titles(file, "zebra") == []
    assert len(titles(file, "zebra " * 10_000 + "capital")) == 2


def test_an_index_is_made_once_and_again_when_the_corpus_changes(tmp_path):
    file = write(tmp_path)
    made = index(file)
    before = made.stat().st_mtime_ns, made.stat().st_ino
    assert (index(file).stat().st_mtime_ns, made.stat().st_ino) == before
    old = Corpus(file)
    write(tmp_path, [{"title": "Oslo", "text": "The capital of Norway."}])
    assert titles(file, "capital") == ["Oslo"]
    assert old.search("Italy", 1)[0].title == "Rome"  # an open index stays as it was
    old.close()
    assert not Path(f"{made}.part").exists()


def test_a_broken_or_partial_index_is_made_again(tmp_path):
    file = write(tmp_path)
    made = index(file)
    made.write_bytes(made.read_bytes()[:3000])
    assert titles(file, "Italy")[0] == "Rome"
    made.write_bytes(b"no database")
    Path(f"{made}.part").write_bytes(b"of a process that was killed")
    assert titles(file, "Italy")[0] == "Rome"


def test_processes_that_start_together_make_one_index(tmp_path, monkeypatch):
    file, made = write(tmp_path), []
    write_index = corpus._write

    def counted(*args: Path) -> None:
        made.append(args)
        write_index(*args)

    monkeypatch.setattr(corpus, "_write", counted)
    start = threading.Barrier(8)

    def search(_: int) -> list[str]:
        start.wait(30)
        return titles(file, "Italy")

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(search, range(8)))
    assert all(names == found[0] and names[0] == "Rome" for names in found)
    assert len(made) == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1]", "line 2"),
        ('{"title": "x"}', "text"),
        ("nonsense", "line 2"),
        ('{"text": 3}', "line 2"),
    ],
)
def test_a_line_that_is_no_document_is_named_and_leaves_no_index(tmp_path, line, said):
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=said):
        Corpus(file)
    assert not Path(f"{file}.fts5").exists()


def test_a_missing_corpus_and_a_large_one_without_an_index_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="there is no such file"):
        Corpus(tmp_path / "none.jsonl")
    file = write(tmp_path)
    monkeypatch.setattr(corpus, "LARGE_BYTES", 10)
    with pytest.raises(ConfigError, match=r"no index; make it with python -m rlcore.envs.corpus"):
        Corpus(file)
    assert main([str(file)]) == 0  # which it does, and then the run starts
    assert titles(file, "Italy")[0] == "Rome"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    file = write(tmp_path)
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="copy the corpus into a folder"):
        index(file)


def test_the_command_says_what_is_wrong(tmp_path):
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rlcore.envs.corpus", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert run().returncode == 2 and "usage" in run().stderr
    (tmp_path / "corpus.jsonl").write_text("no\n")
    bad = run(str(tmp_path / "corpus.jsonl"))
    assert bad.returncode == 1 and "line 1" in bad.stderr and "Traceback" not in bad.stderr


def test_the_policy_searches_by_tags(tmp_path):
    keys = {"tools": ("search",), "corpus": str(write(tmp_path)), "max_documents": 1}
    turns = [
        "<search>capital of Italy</search>",
        "<search>zebra</search>",
        "<calc>1</calc>",
        "Rome",
    ]
    told = check_env("tools", prompt_of("?"), turns, settings=keys)
    assert [seen for seen, _, _ in told[1:]] == [
        "<result>1. Rome\nRome is the capital of Italy, on the Tiber.</result>\n",
        "<result>no document has a word of the query</result>\n",
        "<result>error: there is no tool calc; use one of: search</result>\n",
        "",
    ]


def test_documents_of_a_result_share_its_characters(tmp_path):
    rows = [{"title": f"t{i}", "text": "word " * 1000} for i in range(3)]
    keys = {"tools": ("search",), "corpus": str(write(tmp_path, rows)), "max_result_chars": 300}
    told = check_env("tools", prompt_of("?"), ["<search>word</search>", "end"], settings=keys)
    shown = told[1][0].removeprefix("<result>").removesuffix("</result>\n")
    assert len(shown) <= 300 and shown.count(" ...") == 3
    assert [line[:5] for line in shown.splitlines()[::2]] == ["1. t0", "2. t1", "3. t2"]


def test_search_and_corpus_need_each_other():
    for keys in ({"tools": ("search",)}, {"corpus": "a.jsonl"}):
        assert "give both or none" in ToolsConfig(**keys).problems()[0]
    assert not ToolsConfig(tools=("calc", "search"), corpus="a.jsonl").problems()


def test_sqlite_ranks_by_bm25_and_a_document_is_a_tuple(tmp_path):
    database = sqlite3.connect(":memory:")
    assert "ENABLE_FTS5" in {row[0] for row in database.execute("PRAGMA compile_options")}
    assert Corpus(write(tmp_path)).search("Italy", 1) == [
        Document("Rome", "Rome is the capital of Italy, on the Tiber.")
    ]

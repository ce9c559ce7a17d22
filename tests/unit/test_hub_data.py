"""Data sets by their names on the Hugging Face hub, against a stub on the loopback."""

import datetime
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rlcore.config.schema import DataConfig
from rlcore.data import hub, prompts
from rlcore.data.prompts import names_of
from rlcore.utils.errors import ConfigError
from tests import kit, runs
from tests.unit import test_hub
from tests.unit.test_data_prompts import TOKENIZER
from tests.unit.test_hub import Stub

COMMITS = {"main": "0123456789abcdef0123456789abcdef01234567", "v1": "1" * 40}
README = """---
configs:
- config_name: main
  default: true
  data_files:
  - split: train
    path: main/train.parquet
  - split: test
    path: main/test.parquet
- config_name: kinds
  data_files:
  - split: train
    path: kinds/train.parquet
- config_name: torn
  data_files:
  - split: train
    path: torn/train.parquet
---
"""


class Handler(test_hub.Handler):
    """The hub: one data set `org/sums`, whose branch `main` and tag `v1` are two commits."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        found = re.fullmatch(
            r"(?:/api)?/datasets/org/sums/(revision|tree|resolve)/([^/]+)/?(.*)", path
        )
        commit = found and COMMITS.get(found[2], found[2])
        if not found:
            self.answer(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif self.server.gated:
            self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
        elif commit not in COMMITS.values():
            self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif found[1] == "revision":
            self.say({"id": "org/sums", "sha": commit, "siblings": []})
        elif (place := self.server.folder / commit / found[3]).is_file():
            self.answer(
                200, place.read_bytes(), {"ETag": f'"{tag(place)}"', "X-Repo-Commit": commit}
            )
        elif found[1] == "tree" and place.is_dir():
            self.say(
                [
                    {
                        "type": "file",
                        "path": f"{found[3]}/{file.name}",
                        "size": file.stat().st_size,
                        "oid": tag(file),
                    }
                    for file in sorted(place.iterdir())
                ]
            )
        else:
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})


def write(file: Path, rows: list[dict[str, object]]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def tag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of both commits. The rows of `train` have the numbers 0 to 3, those of `test` 4
    and 5, and the tag's those of 10 and above."""
    folder = tmp_path_factory.mktemp("published")
    for revision, first in ("main", 0), ("v1", 10):
        at = folder / COMMITS[revision]
        for config in "main", "kinds", "torn":
            (at / config).mkdir(parents=True)
        (at / "README.md").write_text(README)
        for split, numbers in ("train", range(4)), ("test", range(4, 6)):
            rows = [{"question": f"a{first + n}=", "answer": str(n)} for n in numbers]
            rows[1]["answer"] = None
            write(at / "main" / f"{split}.parquet", rows)
        odd = [
            {"question": "a", "answer": "1", "image": b"\x89PNG", "at": None},
            {"question": "b", "answer": "2", "image": None, "at": datetime.datetime(2026, 1, 1)},
            {"question": "c", "answer": "3", "image": None, "at": None},
        ]
        write(at / "kinds" / "train.parquet", odd)
        write(at / "torn" / "train.parquet", odd)
        with (at / "torn" / "train.parquet").open("r+b") as file:
            file.seek(4)
            file.write(bytes(40))
    return folder


@pytest.fixture
def stub(published: Path) -> Iterator[Stub]:
    server = Stub(published, Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def online(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """This process asks the stub, has empty caches, and works in an empty folder."""
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", stub.url)
    template = stub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", stub.url)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return stub


@pytest.fixture
def offline(online: Stub, monkeypatch: pytest.MonkeyPatch) -> "pytest.MonkeyPatch":
    """Call `offline()` to take the network away."""
    import datasets
    from huggingface_hub import constants

    def cut() -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)

    return cut


def train(*sources: str, **keys: object) -> prompts.PromptSet:
    config = DataConfig(train=sources, template="none", **keys)
    return prompts.load(config, "train", TOKENIZER, 0)


@pytest.mark.parametrize(
    "source, found",
    [
        ("openai/gsm8k", True),
        ("openai/gsm8k:test", True),
        ("openai/gsm8k:main:test", True),
        ("a/b@refs/convert/parquet:x y:train", True),
        ("label", False),
        ("rows/train.jsonl", False),
        ("rows/train.parquet", False),
        ("/rows/train", False),
        ("./rows/train", False),
        ("a/b/c", False),
        ("a/b:main:train:x", False),
        ("a/b:", False),
    ],
)
def test_what_is_a_name(source: str, found: bool) -> None:
    assert hub.is_name(source) == found


def test_a_name_without_a_split_gets_that_of_its_key() -> None:
    config = DataConfig(train=("a/b", "a/b:c", "a.jsonl"), val=("a/b@v1", "label"))
    assert prompts.entries(config, "train") == ("a/b:train", "a/b:c", "a.jsonl")
    assert prompts.entries(config, "val") == ("a/b@v1:test", "label")


def test_data_sets_are_called_by_their_last_names_or_in_full() -> None:
    assert names_of(["openai/gsm8k:main:test", "x/MATH-1.5@v1:test"]) == ["gsm8k", "MATH-1.5"]
    assert names_of(["o/s:main:test", "o/s@v1:kinds:test", "p/s:test", "d/s.jsonl"]) == [
        "o/s/main/test",
        "o/s/kinds/test",
        "p/s/test",
        "d/s",
    ]
    with pytest.raises(ConfigError, match="two files have this name"):
        names_of(["o/s:test", "o/s:test"])


def test_rows_of_the_hub_are_as_rows_of_files(
    online: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    Path("rows.jsonl").write_text('{"question": "f", "answer": "9", "extra": [1]}\n')
    rows = train("org/sums", "rows.jsonl")
    assert [(r.index, r.dataset, r.text, r.answer) for r in rows] == [
        (0, "sums", "a0=", "0"),
        (1, "sums", "a2=", "2"),
        (2, "sums", "a3=", "3"),
        (3, "rows", "f", "9"),
    ]
    assert "org/sums:train:2: field 'answer' is null; row skipped" in caplog.messages
    assert [r.text for r in train("org/sums:main:train", num_prompts=1)] == ["a0="]
    assert [r.text for r in train("org/sums@v1:main:test")] == ["a14="]
    config = DataConfig(val=("org/sums",), template="none")
    ((name, val),) = prompts.load(config, "val", TOKENIZER, 0)
    assert (name, [r.text for r in val]) == ("sums", ["a4="])
    with pytest.raises(ConfigError, match=r"^org/sums:train:2: .*; fix the row, or skip"):
        train("org/sums", bad_rows="refuse")


def test_a_file_comes_before_a_name(online: Stub) -> None:
    Path("org").mkdir()
    Path("org/sums").write_text("")
    with pytest.raises(ConfigError, match=r"data file org/sums: must end in .jsonl or .parquet"):
        train("org/sums")
    assert online.asked == []


def test_without_a_network_the_cache_serves(online: Stub, offline) -> None:
    here, tagged = train("org/sums:main:train"), train("org/sums@v1:train")
    num = len(online.asked)
    offline()
    for source, rows in ("org/sums:main:train", here), ("org/sums@v1:train", tagged):
        assert [r.text for r in train(source)] == [r.text for r in rows]
    assert [r.text for r in train("org/sums:main:test")] == ["a4="]
    for other in "org/none", "org/sums:kinds:train", f"org/sums@{COMMITS['main']}":
        with pytest.raises(hub.UnreachableError, match=r"the hub cannot be reached") as error:
            train(other)
        assert str(error.value).startswith(f"data set {other}") and "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="Unknown split .dev.. Should be one of .*train.*test"):
        train("org/sums:main:dev")
    assert len(online.asked) == num


def test_what_the_hub_refuses_is_one_sentence(online: Stub) -> None:
    online.gated = True
    with pytest.raises(ConfigError, match="hf auth login"):
        train("org/sums")
    online.gated = False
    for source, words in (
        ("org/none", "neither such a file here nor, for this user, such a data set on the hub"),
        ("rows/train", "neither such a file here nor"),
        ("org/sums@v2", "no branch, tag or commit v2"),
        ("org/sums:mian:train", "'mian' not found. Available: .'main', 'kinds', 'torn'."),
        (
            "org/sums:torn:train",
            "error occurred while generating the dataset: Couldn.t deserialize",
        ),
        ("org/sums:main:dev", 'Unknown split "dev". Should be one of .*train.*test'),
    ):
        with pytest.raises(ConfigError, match=rf"^data set {source}.*: .*{words}") as error:
            train(source)
        assert "\n" not in str(error.value)
        assert not isinstance(error.value, hub.UnreachableError)


def test_rows_with_images_or_dates_are_invalid(
    online: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    assert [r.text for r in train("org/sums:kinds:train")] == ["c"]
    for row, kind in (1, "bytes"), (2, "datetime"):
        said = f"org/sums:kinds:train:{row}: holds a value that is not JSON (Object of type {kind}"
        assert any(m.startswith(said) for m in caplog.messages), caplog.messages
    assert "org/sums:kinds:train: skipped" not in caplog.text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.tiny_model(tmp_path_factory.mktemp("model") / "m")


def command(stub: Stub, tmp_path: Path, *words: object, **environment: str) -> tuple[int, str]:
    """Exit code and output of a command that asks the stub."""
    env = os.environ | {"HF_ENDPOINT": stub.url, "HF_HOME": str(tmp_path / "home")}
    env |= {"HF_HUB_OFFLINE": "0", "PYTHONPATH": kit.python_path()} | environment
    done = subprocess.run(
        [sys.executable, "-m", "rlcore", *map(str, words)],
        env=env,
        cwd=kit.ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_dry_run_checks_names_and_leaves_them_open_where_another_machine_may_have_a_network(
    stub: Stub, model: Path, tmp_path: Path
) -> None:
    plain = "--data.template", "none", "--dry-run"
    argv = runs.arguments(model, tmp_path / "runs", "x", "--data.train", "org/sums:dev", *plain)
    code, said = command(stub, tmp_path, "train", *argv)
    assert code == 2 and 'cannot run: data set org/sums:dev: Unknown split "dev"' in said, said
    argv = runs.arguments(model, tmp_path / "runs", "x", "--data.train", "org/none", *plain)
    cut = {"HF_HUB_OFFLINE": "1"}
    code, said = command(stub, tmp_path, "train", *argv, **cut)
    assert code == 2 and "cannot run: data set org/none:train: there is no such file" in said, said
    plan = {"MODEL_CONFIG": str(model / "config.json")}
    code, said = command(stub, tmp_path, "train", *argv, "--model.path", "gone", **plan, **cut)
    assert code == 0 and "not checked: data set org/none:train: there is no such" in said, said
    assert said.splitlines()[-1].endswith("--model.path gone; --data.train org/none:train")
    code, said = command(stub, tmp_path, "train", *argv, "--model.path", "gone", **plan)
    assert code == 2 and "cannot run: data set org/none:train: there is neither" in said, said


def test_a_run_and_its_evaluation_take_names(stub: Stub, model: Path, tmp_path: Path) -> None:
    names = "--data.train", "org/sums", "--data.val", "org/sums", "--data.template", "none"
    more = "--run.steps", 1, "--data.prompts_per_step", 2, "--checkpoint.every", 1
    argv = runs.arguments(model, tmp_path / "runs", "x", *names, *more)
    code, said = command(stub, tmp_path, "train", *argv)
    assert code == 0, said
    metrics = runs.rows(tmp_path / "runs" / "x")
    assert "val-core/sums/acc/mean@1" in metrics[1], metrics
    found = tmp_path / "found.json"
    words = tmp_path / "runs" / "x", "--data.val", "org/sums:main:test", "--json", found
    code, said = command(stub, tmp_path, "eval", *words, HF_HUB_OFFLINE="1")
    assert code == 0, said
    table = json.loads(found.read_text())
    assert table["data"] == ["org/sums:main:test"]
    assert "val-core/sums/acc/mean@1" in table["metrics"]

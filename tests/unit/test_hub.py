"""Models by their names on the Hugging Face hub, against a stub on the loopback."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rlcore.cli.builders.model import with_downloads
from rlcore.cli.settings import parse
from rlcore.hf import hub
from rlcore.hf.weights import _TOKENIZER_FILES
from tests import kit, runs

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Stub(ThreadingHTTPServer):
    """The hub, for a handler: by default one model `org/tiny` with one commit, whose branch is
    `main` and whose tag `v1`."""

    def __init__(self, folder: Path, handler: "type[Handler] | None" = None) -> None:
        super().__init__(("127.0.0.1", 0), handler or Handler)
        self.folder, self.asked = folder, []
        self.gated = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        revision = f"(?:main|v1|{COMMIT})"
        if not path.startswith(("/api/models/org/tiny/", "/org/tiny/")):
            self.answer(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif self.server.gated:
            self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
        elif re.fullmatch(f"/api/models/org/tiny/revision/{revision}", path):
            self.say({"id": "org/tiny", "sha": COMMIT, "siblings": []})
        elif path == f"/api/models/org/tiny/tree/{COMMIT}":
            files = sorted(p for p in self.server.folder.iterdir() if p.is_file())
            self.say(
                [
                    {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": self.tag(p)}
                    for p in files
                ]
            )
        elif (found := re.fullmatch(f"/org/tiny/resolve/{revision}/([^/]+)", path)) and (
            file := self.server.folder / found[1]
        ).is_file():
            self.answer(
                200, file.read_bytes(), {"ETag": f'"{self.tag(file)}"', "X-Repo-Commit": COMMIT}
            )
        else:
            self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})

    def tag(self, file: Path) -> str:
        return hashlib.sha1(file.read_bytes()).hexdigest()

    def say(self, value: object) -> None:
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = runs.tiny_model(tmp_path_factory.mktemp("hub") / "m")
    config = json.loads((folder / "config.json").read_text())
    weights = kit.tiny_hf_folder(folder.with_name("weights"), **config) / "model.safetensors"
    weights.rename(folder / weights.name)
    (folder / "pytorch_model.bin").write_bytes(b"not wanted")
    return folder


@pytest.fixture
def stub(model: Path) -> Iterator[Stub]:
    server = Stub(model)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def online(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """This process asks the stub, and has an empty cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", stub.url)
    template = stub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return stub


@pytest.mark.parametrize(
    "path, found",
    [
        ("Qwen/Qwen3-8B", True),
        ("Qwen/Qwen3-8B@v1.0", True),
        ("a/b@refs/pr/1", True),
        ("Qwen3-8B", False),
        ("models/a/b", False),
        ("/models/b", False),
        ("./a/b", False),
        ("../a", False),
        ("~/a", False),
        ("a/..", False),
        ("", False),
    ],
)
def test_what_is_a_name(path: str, found: bool) -> None:
    assert hub.is_name(path) == found


@pytest.mark.parametrize("name", _TOKENIZER_FILES)
def test_every_file_of_a_tokenizer_is_downloaded(name: str) -> None:
    assert any(fnmatch(name, pattern) for pattern in hub._SETTINGS)


def test_a_folder_comes_before_a_name(
    online: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert hub.folder_of("org/tiny", "--model.path") == "org/tiny"
    assert online.asked == []


def test_settings_come_first_and_weights_when_they_are_needed(online: Stub, model: Path) -> None:
    settings = Path(hub.folder_of("org/tiny", "--model.path", weights=False))
    assert settings.name == COMMIT and hub.is_download(str(settings))
    names = {p.name for p in settings.iterdir()}
    assert "config.json" in names and "tokenizer.json" in names
    assert not any(n.endswith((".safetensors", ".bin")) for n in names)
    whole = Path(hub.folder_of("org/tiny", "--model.path"))
    assert whole == settings
    for file in model.iterdir():
        if file.suffix != ".bin":
            assert (whole / file.name).read_bytes() == file.read_bytes()
    assert not (whole / "pytorch_model.bin").exists()
    assert hub.folder_of("org/tiny@v1", "--model.path") == str(whole)


def test_without_a_network_the_cache_serves(online: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as off:
        off.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
        with pytest.raises(Exception, match=r"--model.path org/tiny: .*the hub cannot be reached"):
            hub.folder_of("org/tiny", "--model.path")
    whole = hub.folder_of("org/tiny", "--model.path")
    num = len(online.asked)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.folder_of("org/tiny", "--model.path") == whole
    with pytest.raises(Exception, match=r"--critic.path org/other: .*the hub cannot be reached"):
        hub.folder_of("org/other", "--critic.path")
    assert len(online.asked) == num


def test_what_the_hub_refuses_is_one_sentence(online: Stub) -> None:
    from rlcore.utils.errors import ConfigError

    for path, words in (
        ("org/none", "neither such a folder here nor, for this user, such a model on the hub"),
        ("models/Qwen3-8B", "neither such a folder here nor"),
        ("org/tiny@v2", "no branch, tag or commit v2"),
    ):
        with pytest.raises(ConfigError, match=rf"^--model\.path {path}: .*{words}") as error:
            hub.folder_of(path, "--model.path")
        assert "\n" not in str(error.value)
    online.gated = True
    with pytest.raises(ConfigError, match="hf auth login"):
        hub.folder_of("org/tiny", "--model.path")


def test_a_model_without_safetensors_is_refused(online: Stub, model: Path, tmp_path: Path) -> None:
    online.folder = tmp_path / "bin"
    online.folder.mkdir()
    (online.folder / "config.json").write_bytes((model / "config.json").read_bytes())
    with pytest.raises(Exception, match=r"has no \*\.safetensors"):
        hub.folder_of("org/tiny", "--model.path")


def test_every_key_that_takes_a_model_takes_a_name(online: Stub) -> None:
    name = "org/tiny"
    words = ["--reward", "judge:1,exact:1", "--reward.judge.model", name, "--critic.path", name]
    cfg = with_downloads(parse([*words, "--model.path", "/m", "--model.tokenizer", name]))
    found = cfg.reward.judge.model, cfg.critic.path, cfg.model.tokenizer
    assert all(Path(path).name == COMMIT for path in found) and cfg.model.path == "/m"
    one = parse(["--reward", "judge", "--reward.model", name])
    assert Path(with_downloads(one).reward.model).name == COMMIT
    served = parse(["--reward", "judge", "--reward.model", name, "--reward.url", "http://j/v1"])
    assert with_downloads(served).reward.model == name


@pytest.mark.parametrize("dry", [True, False])
def test_a_run_starts_from_a_name(stub: Stub, tmp_path: Path, dry: bool) -> None:
    argv = runs.arguments("org/tiny@v1", tmp_path / "runs", "x", "--run.steps", 1)
    argv.append("--model.no_random_init")
    env = os.environ | {"HF_ENDPOINT": stub.url, "HF_HOME": str(tmp_path / "home")}
    env.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run(
        [sys.executable, "-m", "rlcore", "train", *argv, *["--dry-run"] * dry],
        env=env | {"PYTHONPATH": kit.python_path()},
        cwd=kit.ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if dry:
        assert "dry run: this would run" in done.stdout
        return
    assert "step 1/1" in done.stdout
    saved = json.loads((tmp_path / "runs" / "x" / "config.json").read_text())
    assert COMMIT in json.dumps(saved)

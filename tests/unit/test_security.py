"""What comes from outside is data: no pickles from sockets or checkpoints, no shells, no public
sockets by default. ruff has S rules for the common cases; these are those that it does not know."""

import ast
import os
import re
import stat
import tomllib
from pathlib import Path

import pytest

from rlcore.cli import mux
from rlcore.config.schema import Config
from rlcore.rollout.transport import listening_host
from rlcore.utils.secret import hide

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "rlcore"
PICKLING = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
REASONS = {
    ("rollout/sglang_engine/weights.py", "all_gather_object"): (
        "a sentence between the ranks of one SGLang engine, over its own process group"
    ),
    ("sandbox/program.py", "exec"): "the sandbox runs the program, behind its walls",
    ("sandbox/judge.py", "exec"): "the tests of a task's author, in a sandbox of their own",
}
"""Each exception, and why it is none."""


def risks(source: str) -> set[str]:
    """Names of what unpickles, evaluates or opens a shell in a file."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
            found |= {n for n in names if n.partition(".")[0] in MODULES}
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        owner = getattr(getattr(node.func, "value", None), "id", "")
        words = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
        if name in PICKLING:
            found.add(name)
        if (owner, name) == ("torch", "load") and words.get("weights_only") is not True:
            found.add("torch.load")
        if name == "from_pretrained" and words.get("local_files_only") is not True:
            found.add("download")
        if not owner and name in ("eval", "exec"):
            found.add(name)
        if words.get("shell") is True or (owner, name) == ("os", "system"):
            found.add("shell")
    return found


def test_nothing_unpickles_evaluates_or_opens_a_shell():
    found = {
        (file.relative_to(PACKAGE).as_posix(), risk)
        for file in PACKAGE.rglob("*.py")
        for risk in risks(file.read_text())
    }
    assert found == set(REASONS), found ^ set(REASONS)


@pytest.mark.parametrize(
    "source, risk",
    [
        ("import pickle", "pickle"),
        ("from dill import loads", "dill"),
        ("torch.load(path)", "torch.load"),
        ("torch.load(path, weights_only=False)", "torch.load"),
        ("dist.broadcast_object_list(x)", "broadcast_object_list"),
        ("subprocess.run(text, shell=True)", "shell"),
        ("eval(text)", "eval"),
        ("AutoTokenizer.from_pretrained(name)", "download"),
    ],
)
def test_the_rule_itself(source, risk):
    assert risk in risks(source)
    assert not risks("torch.load(path, weights_only=True); model.eval(); subprocess.run(words)")


def test_sockets_listen_on_the_loopback_unless_they_are_told_otherwise():
    assert listening_host("") == listening_host("localhost") == "127.0.0.1"
    assert Config().log.prometheus_port == 0
    assert Config().log.prometheus_host == "127.0.0.1"


@pytest.mark.parametrize(
    "text, shown",
    [
        ("redis://rlcore:abc@host:1/0", "redis://rlcore:***@host:1/0"),
        ("redis://:p@ss@host", "redis://:***@host"),
        ("redis://u:p/w@host", "redis://u:***@host"),
        ("redis://u:p:w x@host", "redis://u:***@host"),
        ("redis://u@corp:pw@host", "redis://u@corp:***@host"),
        ("redis://u:a@h1 and redis://v:b@h2", "redis://u:***@h1 and redis://v:***@h2"),
        ("redis://h1:1,redis://v:b@h2", "redis://h1:***@h2"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://user@host", "redis://user@host"),
    ],
)
def test_no_part_of_a_password_is_shown(text, shown):
    assert hide(text) == shown


def test_passwords_on_disk_are_the_owners_alone(tmp_path):
    before = os.umask(0)
    try:
        mux._configure(tmp_path, {"password": "x", "host": "127.0.0.1", "port": 1})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "users.acl").stat().st_mode) == 0o600


def test_every_dependency_comes_from_the_index_and_has_an_upper_bound():
    """A new major version, or a version of somebody else's, is looked at before it is taken. Known
    faults of what is pinned: `pip-audit` in the environment, with a network."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    alone = project["tool"]["rlcore"]["sglang-cpu-alone"]
    build = project["build-system"]["requires"]
    for line in [*project["project"]["dependencies"], *sum(extras.values(), []), *alone]:
        assert "@" not in line and "://" not in line, line
        assert re.search(r"==|~=|<", line), f"{line}: has no upper bound"
    assert all("@" not in line for line in build)

"""What comes from outside is data: no pickles from sockets or checkpoints, no shells, no public
sockets by default. ruff has S rules for the common cases; these are those that it does not know."""

import ast
from pathlib import Path

import pytest

from rlcore.config.schema import Config
from rlcore.rollout.transport import listening_host

PACKAGE = Path(__file__).resolve().parents[2] / "rlcore"
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
    ],
)
def test_the_rule_itself(source, risk):
    assert risk in risks(source)
    assert not risks("torch.load(path, weights_only=True); model.eval(); subprocess.run(words)")


def test_sockets_listen_on_the_loopback_unless_they_are_told_otherwise():
    assert listening_host("") == listening_host("localhost") == "127.0.0.1"
    assert Config().log.prometheus_port == 0
    assert Config().log.prometheus_host == "127.0.0.1"

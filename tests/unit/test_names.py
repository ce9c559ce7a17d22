"""Every class has a name of its own, and every phase one name."""

import ast
from collections import defaultdict
from pathlib import Path

import rlcore
from rlcore.sim import cluster
from rlcore.utils import phases

ROOT = Path(rlcore.__file__).parent
TREES = {str(p.relative_to(ROOT)): ast.parse(p.read_text()) for p in sorted(ROOT.rglob("*.py"))}
TWICE = {
    "Config": "triton's name, in the stand-in for triton",
    "_Finder": "an import finder each: of Megatron's shim and of the hollow packages",
}


def test_no_class_has_the_name_of_another() -> None:
    where = defaultdict(list)
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(name)
    assert {name for name, files in where.items() if len(files) > 1} == TWICE.keys()


def opened() -> set[str]:
    """Return the names of all phases that some code opens on the spans of a run."""
    return {
        node.args[0].value
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "phase"
        and "spans" in ast.unparse(node.func.value)
        and isinstance(node.args[0], ast.Constant)
    }


def test_the_phases_that_are_timed_are_those_of_the_vocabulary() -> None:
    inferred = {"reward", "wait_permit", "testing", "save_checkpoint"}  # by other calls than phase
    kept = {"build", "optimizer_step"}  # of the memory plan
    assert opened() <= phases.ALL.keys()
    assert set(cluster.PHASES) <= phases.STEP.keys()
    assert phases.ALL.keys() - opened() <= inferred | kept

"""The floors and the doors of the tree: who may import whom. Imports inside functions and under
TYPE_CHECKING count too."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "rlcore"

FLOORS = {
    6: "cli",
    5: "sim",
    4: "trainer mux",
    3: "mcore rollout sync rewards envs teacher",
    2: "config data hf sandbox metrics",
    1: "algos sched ops",
    0: "records tensors protocols utils",
}
FLOOR = {name: floor for floor, names in FLOORS.items() for name in names.split()}
SHARED = ["records", "tensors", "protocols", "utils"]  # floor 0 is one floor: they know each other

# Outside packages that only one place may import.
DOORS = {
    "megatron": "rlcore/mcore/",
    "transformer_engine": "rlcore/mcore/",
    "apex": "rlcore/mcore/",
    "sglang": "rlcore/rollout/sglang_engine/",
    "datasets": "rlcore/data/hub.py",
    "tensorboard": "rlcore/metrics/sinks.py",
    "torch.utils.tensorboard": "rlcore/metrics/sinks.py",
    "wandb": "rlcore/metrics/sinks.py",
    "prometheus_client": "rlcore/metrics/sinks.py",
}
# Packages that may not know torch at all.
NO_TORCH = ("rlcore/records.py", "rlcore/sched/")


def imports(source: str, module: str, is_package: bool) -> list[tuple[int, str]]:
    """(line, dotted name) of every import; `from a import b` gives `a.b`."""
    found = []
    parents = module.split(".")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = node.level - is_package
            base = parents[: len(parents) - up] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{name}.{alias.name}") for alias in node.names]
    return found


def is_inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def complaint(path: str, name: str) -> str:
    """Why the file may not import the name; "" if it may."""
    for door, place in DOORS.items():
        if is_inside(name, door) and not path.startswith(place):
            return f"{door} is imported under {place} only"
    if is_inside(name, "torch") and path.startswith(NO_TORCH):
        return "this place decides without torch"
    parts = name.split(".")
    me = Path(path).with_suffix("").parts[1]
    if parts[0] != "rlcore" or len(parts) < 2 or me in ("__init__", "__main__"):
        return ""
    other = parts[1]
    if other == me or other not in FLOOR or (me in SHARED and other in SHARED):
        return ""
    if FLOOR[other] == FLOOR[me]:
        return f"{me} and {other} are both on floor {FLOOR[me]}"
    if FLOOR[other] > FLOOR[me]:
        return f"{other} is on floor {FLOOR[other]}, {me} on floor {FLOOR[me]}"
    return ""


def test_every_package_has_a_floor():
    names = {p.stem for p in PACKAGE.glob("*.py")} | {p.parent.name for p in PACKAGE.glob("*/*.py")}
    assert names - {"__init__", "__main__"} <= FLOOR.keys()


def test_imports_go_to_lower_floors_and_frameworks_come_through_their_doors():
    wrong = []
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(ROOT).as_posix()
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for line, name in imports(file.read_text(), module, file.name == "__init__.py"):
            if why := complaint(path, name):
                wrong.append(f"{path}:{line} imports {name}: {why}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "path, source, allowed",
    [
        ("rlcore/trainer/a.py", "from rlcore.rollout import controller", True),
        ("rlcore/rollout/a.py", "import rlcore.trainer.phases", False),
        ("rlcore/rollout/a.py", "from rlcore.sync.layout import plan", False),
        ("rlcore/rollout/b/a.py", "from ..controller import Round", True),
        ("rlcore/rollout/b/a.py", "from ...rewards import math", False),
        ("rlcore/rollout/a.py", "from rlcore import rewards", False),
        ("rlcore/sim/a.py", "from rlcore.trainer import policies", True),
        ("rlcore/sim/a.py", "from rlcore.cli.builders import prompts", False),
        ("rlcore/trainer/a.py", "from rlcore.sim import job", False),
        ("rlcore/sync/a.py", "def f():\n    import megatron.core", False),
        ("rlcore/mcore/a.py", "from megatron.core import mpu", True),
        ("rlcore/protocols.py", "from rlcore.records import Sample", True),
        ("rlcore/sched/a.py", "if TYPE_CHECKING:\n    from torch import Tensor", False),
        ("rlcore/metrics/sinks.py", "from torch.utils.tensorboard import SummaryWriter", True),
        ("rlcore/metrics/jsonl.py", "from torch.utils import tensorboard", False),
    ],
)
def test_the_rule_itself(path, source, allowed):
    module = path.removesuffix(".py").replace("/", ".")
    [(_, name)] = imports(source, module, is_package=False)
    assert (complaint(path, name) == "") == allowed

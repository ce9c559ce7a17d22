"""What rlcore uses of SGLang, Megatron-Core and what these call exists in the pinned versions.

`pins.txt` is the table. The sources of installed packages are read, never imported. What CI does
not install is compared with `signatures.json`, which `record.py` writes from the wheels.
"""

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from rlcore.config.schema import ModelConfig, TrainConfig
from rlcore.hf.config import HFConfig
from rlcore.rewards.judge import mps, mps_keeper
from tests.contracts.engine_contract import CONFIG
from tests.contracts.pins import MPS, NOT_INSTALLED, PACKAGES, PINS, Pin
from tests.contracts.record import FILE, ROOT, TRANSFORMER_ENGINE, locked, shapes
from tests.contracts.sources import Shape, Sources, installed
from tests.contracts.uses import ENVIRONMENT, Use, Uses

SOURCES = installed(*PACKAGES, "torch")
RECORD = json.loads(FILE.read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMED = re.compile("|".join(PACKAGES) + "|" + ENVIRONMENT.pattern)
DOORS = ("rlcore/mcore", "rlcore/rollout/sglang_engine")
RLCORE = [
    str(path.relative_to(ROOT))
    for path in sorted((ROOT / "rlcore").rglob("*.py"))
    if NAMED.search(path.read_text()) or str(path.parent.relative_to(ROOT)) in DOORS
]
"""Files that name a package of the table, or that get its objects."""
OWN = {"loss", "module", "name", "output", "server_args", "value", "work", "x"}
"""Untyped parameters of those files that no single class of another package describes."""


def arguments(pin: Pin) -> tuple[list[str], list[str]]:
    """The names that a row passes by position and by keyword."""
    positional, _, keywords = (pin.args or "").partition("*")
    return positional.split(), keywords.split()


def problems(pin: Pin, shape: Shape | None) -> list[str]:
    """What a row relies on and a definition lacks."""
    if shape is None:
        return ["the name does not exist"]
    found = [f"no attribute {name}" for name in pin.has.split() if name not in shape.has]
    found += [
        f"no mention of {name}" for name in pin.mentions.split() if name not in shape.mentions
    ]
    if pin.args is None and not pin.defaults:
        return found
    if shape.takes is None:
        return [*found, "it cannot be called"]
    signature = ast.parse(f"def f({shape.takes}): ...").body[0].args  # type: ignore[attr-defined]
    ordered = [arg.arg for arg in signature.posonlyargs + signature.args]
    known = ordered + [arg.arg for arg in signature.kwonlyargs]
    defaults = dict(zip(reversed(ordered), reversed(signature.defaults), strict=False))
    keyword_only = zip(signature.kwonlyargs, signature.kw_defaults, strict=True)
    defaults |= {arg.arg: value for arg, value in keyword_only if value is not None}
    positional, keywords = arguments(pin)
    if ordered[: len(positional)] != positional:
        found.append(f"its first parameters are {' '.join(ordered[: len(positional)])}")
    if not signature.kwarg:
        found += [f"no parameter {name}" for name in keywords if name not in known]
    if pin.whole and known != positional + keywords:
        found.append(f"its parameters are {' '.join(known)}")
    if pin.args is not None and not pin.keys:
        passed = {*positional, *keywords, *defaults}
        found += [f"parameter {name} is not passed" for name in known if name not in passed]
    for name, _, value in (text.partition("=") for text in pin.defaults.split()):
        text = ast.unparse(defaults[name]) if name in defaults else "missing"
        if text != value:
            found.append(f"the default of {name} is {text}, not {value}")
    return found


def rows(table: dict[str, list[Pin]]) -> list[Any]:
    return [pytest.param(p, id=f"{f}:{p.name}") for f, pins in table.items() for p in pins]


@pytest.mark.parametrize("pin", rows({f: p for f, p in PINS.items() if f not in NOT_INSTALLED}))
def test_an_installed_package_has_what_rlcore_uses(pin: Pin) -> None:
    package = pin.name.partition(".")[0]
    if package not in SOURCES.folders:
        pytest.skip(f"{package} is not installed")
    found = problems(pin, SOURCES.shape(pin.name, pin.has.split(), pin.mentions.split()))
    assert not found


@pytest.mark.parametrize("pin", rows(NOT_INSTALLED))
def test_packages_that_ci_lacks_have_what_their_callers_use(pin: Pin) -> None:
    package = pin.name.partition(".")[0]
    found = {
        version: Shape(**({"takes": None} | names[pin.name])) if pin.name in names else None
        for version, names in RECORD.get(package, {}).items()
    }
    if package in SOURCES.folders:
        shape = SOURCES.shape(pin.name, pin.has.split(), pin.mentions.split())
        found.setdefault(metadata.version(package.replace("_", "-")), shape)
    if not found:
        pytest.skip(f"{package} has no wheels, and is not installed")
    lacking = {Version(version).release[:2] for version in pin.lacks.split()}
    for version, shape in found.items():
        wrong = problems(pin, shape)
        if Version(version).release[:2] in lacking:
            wrong = [] if shape is None else ["pins.txt says that this version lacks the name"]
        assert not wrong, f"version {version}"


@pytest.mark.parametrize("name", ["amp_C", "fused_weight_gradient_mlp_cuda"])
def test_compiled_modules_of_apex_have_what_megatron_calls(name: str) -> None:
    module = pytest.importorskip(name, reason="Apex is not installed")
    wanted = {
        w for pins in NOT_INSTALLED.values() for p in pins if p.name == name for w in p.has.split()
    }
    assert not [word for word in wanted if not hasattr(module, word)]


@pytest.mark.parametrize("package", RECORD)
def test_the_record_is_that_of_an_installed_package(package: str) -> None:
    if package not in SOURCES.folders:
        pytest.skip(f"{package} is not installed")
    release = Version(metadata.version(package.replace("_", "-"))).release[:2]
    recorded = {Version(version).release[:2]: names for version, names in RECORD[package].items()}
    assert shapes(package, SOURCES) == recorded[release], "run python -m tests.contracts.record"


def test_the_record_has_the_versions_of_the_pins() -> None:
    assert set(RECORD["torch_memory_saver"]) == locked("torch-memory-saver")
    (line,) = PROJECT["optional-dependencies"]["te"]
    allowed = SpecifierSet(line.partition("]")[2])
    assert tuple(RECORD["transformer_engine"]) == TRANSFORMER_ENGINE
    minors = [Version(version).minor for version in TRANSFORMER_ENGINE]
    assert minors == [minor for minor in range(100) if f"2.{minor}.0" in allowed]


@pytest.mark.parametrize("package", ["megatron-core", "sglang"])
def test_installed_packages_have_the_pinned_versions(package: str) -> None:
    extras = PROJECT["optional-dependencies"].values()
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]
    (pinned,) = {line.partition("==")[2] for line in lines if line.startswith(f"{package}==")}
    if package.partition("-")[0] not in SOURCES.folders:
        pytest.skip(f"{package} is not installed")
    assert metadata.version(package) == pinned


# ---- the table has all uses, and no others


def uses_of(path: Path, pins: list[Pin]) -> Uses:
    variables = {text.strip(): p.name for p in pins for text in p.of.split(",") if text.strip()}
    return Uses(path, PACKAGES, variables)


def is_known(use: Use, pins: list[Pin]) -> bool:
    """Whether the rows of a file have a name, with the arguments if it is called."""
    outer, _, last = use.name.rpartition(".")
    for pin in pins:
        positional, keywords = arguments(pin)
        is_called = use.positional or use.keywords
        if pin.name == use.name and not is_called:
            return True
        if pin.name == use.name and pin.args is not None:
            named = set(positional + keywords)
            if use.positional <= len(positional) and named.issuperset(use.keywords):
                return True
        if not is_called and pin.name.startswith(f"{use.name}."):  # a package or a class
            return True
        if not is_called and pin.name == outer and last in pin.has.split():
            return True
    return False


def unknown(path: Path, pins: list[Pin]) -> Iterator[str]:
    """The uses in a file that the table does not have."""
    uses = uses_of(path, pins)
    for use in uses.names():
        if not is_known(use, pins):
            passed = f", {use.positional} by position" * bool(use.positional)
            yield f"line {use.line}: {use.name}{passed} {' '.join(use.keywords)}".rstrip()
    for name in uses.patched():
        if not is_known(Use(name, 0), pins):
            yield f"the string {name}"
    words = {word for p in pins for word in f"{p.mentions} {p.has}".split()}
    yield from (f"the variable {name}" for name in uses.environment() - words - MPS["environment"])
    if path.parent in (ROOT / door for door in DOORS):
        typed = {text.strip() for p in pins for text in p.of.split(",")}
        yield from (f"the class of {name}" for name in uses.untyped() - typed - OWN)
    for variable in {p.keys for p in pins if p.keys}:
        named = {name for p in pins if p.keys == variable for name in sum(arguments(p), [])}
        yield from (f"the key {key} of {variable}" for key in uses.keys(variable) - named)


def unused(path: Path, pins: list[Pin]) -> Iterator[str]:
    """The words of the table that a file does not have."""
    text = path.read_text()
    words = set(re.findall(r"\w+", text))
    patterns = [text for text in Uses(path, PACKAGES, {}).strings() if "*" in text.strip("*")]
    for pin in pins:
        _, keywords = arguments(pin)
        wanted = [*keywords, *pin.has.split()]
        if not (wanted or pin.mentions or pin.of or pin.whole or pin.defaults):
            wanted = [pin.name.rpartition(".")[2]]
        for word in wanted:
            if word not in words and not any(fnmatchcase(word, p) for p in patterns):
                yield f"{pin.name}: {word}"


@pytest.mark.parametrize("file", RLCORE)
def test_all_uses_in_rlcore_are_in_the_table(file: str) -> None:
    found = list(unknown(ROOT / file, PINS.get(file, [])))
    assert not found, "add them to tests/contracts/pins.txt"


@pytest.mark.parametrize("file", NOT_INSTALLED)
def test_all_that_a_caller_imports_from_packages_that_ci_lacks_is_in_the_table(file: str) -> None:
    path = SOURCES.module(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    if path is None:
        pytest.skip(f"{file} is not installed")
    lacking = tuple(package for package in PACKAGES if package not in ("megatron", "sglang"))
    uses = Uses(path, lacking, {})
    assert not [use for use in uses.at_import() if not is_known(use, NOT_INSTALLED[file])]


@pytest.mark.parametrize("file", [file for file in PINS if file not in NOT_INSTALLED])
def test_the_table_has_nothing_that_its_file_does_not_use(file: str) -> None:
    assert not list(unused(ROOT / file, PINS[file]))


# ---- settings that only a GPU sees


@pytest.mark.parametrize("experts", [0, 4], ids=["dense", "moe"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "sizes",
    [{}, {"tp": 2}, {"pp": 2, "vpp": 2}, {"cp": 2}, {"pp": 2, "pp_layers": (1, 1)}],
    ids=["one", "tp", "vpp", "cp", "pp_layers"],
)
@pytest.mark.parametrize("implementation", ["local", "te"])
def test_megatron_accepts_the_settings_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    implementation: Any,
    sizes: dict[str, Any],
    recompute: Any,
    experts: int,
) -> None:
    """Megatron's own checks run; only its look for Transformer Engine is answered."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer import transformer_config as theirs

    from rlcore.mcore.build import transformer_config

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(theirs, "is_te_min_version", lambda *_, **__: True)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", object())
    architecture = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    kind = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    hf = HFConfig.from_dict(CONFIG | ((kind | architecture) if experts else {}))
    sizes = sizes | ({"ep": 2} if experts else {})
    train = TrainConfig(transformer_impl=implementation, recompute=recompute, apex=True, **sizes)
    made = transformer_config(hf, ModelConfig(dtype="bfloat16"), train)
    assert made.apply_rope_fusion == (implementation == "te")
    assert made.moe_grouped_gemm == (implementation == "te" and experts > 0)
    assert made.gradient_accumulation_fusion and made.bias_activation_fusion
    assert not made.use_cpu_initialization


def test_transformer_engine_takes_every_field_of_megatrons_packed_sequences() -> None:
    """Megatron passes them all to the attention, but for those of a group of its own."""
    fields = SOURCES.shape("megatron.core.packed_seq_params.PackedSeqParams")
    assert fields is not None and fields.takes is not None
    passed = {text.partition("=")[0] for text in fields.takes.split(", ")}
    forward = "transformer_engine.pytorch.DotProductAttention.forward"
    (pin,) = (p for pins in NOT_INSTALLED.values() for p in pins if p.name == forward)
    assert passed - {"cp_group", "local_cp_size"} <= set(arguments(pin)[1])


def test_mps_gets_only_documented_options_commands_and_variables() -> None:
    trees = [ast.parse(Path(module.__file__ or "").read_text()) for module in (mps, mps_keeper)]
    calls = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Call)]
    said = {
        eval(ast.unparse(call.args[1]), vars(mps))  # a string, or a constant of the module
        for call in calls
        if ast.unparse(call.func) == "command"
    }
    lists = [call.args[0] for call in calls if call.args and isinstance(call.args[0], ast.List)]
    lists = [words for words in lists if words.elts and ast.unparse(words.elts[0]) == "CONTROL"]
    started = [eval(ast.unparse(words), vars(mps)) for words in lists]
    assert mps.CONTROL == "nvidia-cuda-mps-control" and len(started) == 3
    told = {
        kw.value.value
        for c in calls
        for kw in c.keywords
        if kw.arg == "input" and isinstance(kw.value, ast.Constant)
    }
    said |= {text.decode().strip() for text in told}
    assert said == {"quit", "get_server_list"} and said <= MPS["commands"]
    assert {word for words in started for word in words[1:]} == {"-f"} <= MPS["options"]
    assert {mps.PIPES, mps.LOGS, mps.PERCENT, mps.MEMORY} <= MPS["environment"]
    # A percentage, and for each device a size with the unit M or G.
    assert mps.limits(30, 2.5, device=1) == {mps.PERCENT: "30", mps.MEMORY: "1=2384M"}


# ---- the checks themselves

THEIRS = """
import enum
from dataclasses import dataclass, field
from pack.inner import helper as renamed
from pack.absent_package import *
from elsewhere import compiled

class Base:
    def __init__(self, size: int = 8): self.kept = size

class Child(Base):
    MODES = ("slow", "fast")
    def run(self, first, second=2, *, third=None): ...

@dataclass
class Record:
    name: str
    count: int = field(default=3)

class Late(Record):
    more: str = ""
"""
OURS = """
from pack import Child, renamed
from pack import inner as module

def use(child, folder="pack.inner"):
    child.run(1, third=child.kept)
    state = module
    state.helper(a=1)
    return {"pack.inner.helper": f"{folder}.Child"}
"""


@pytest.fixture
def theirs(tmp_path: Path) -> Sources:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/__init__.py").write_text(THEIRS)
    (tmp_path / "pack/inner.py").write_text("def helper(a, b=[], *args, **more): ...")
    return Sources({"pack": [tmp_path / "pack"]})


@pytest.mark.parametrize(
    "name, takes",
    [
        ("pack.Base", "size=8"),
        ("pack.Child", "size=8"),
        ("pack.Child.run", "first, second=2, *, third=None"),
        ("pack.Record", "name, count=3"),
        ("pack.Late", "name, count=3, more=''"),
        ("pack.renamed", "a, b=[], *args, **more"),
        ("pack.inner.helper", "a, b=[], *args, **more"),
        ("pack.compiled", None),
        ("pack.inner", None),
    ],
)
def test_parameters_are_read_through_imports_bases_and_fields(theirs, name, takes):
    assert theirs.shape(name) == Shape(takes)


@pytest.mark.parametrize("name", ["pack.Other", "pack.Child.walk", "other.Child", "pack.inner.a"])
def test_what_is_not_defined_has_no_shape(theirs, name):
    assert theirs.shape(name) is None


RUN = Pin("pack.Child.run", "first * third", "second=2")


@pytest.mark.parametrize(
    "pin, problem",
    [
        (RUN, ""),
        (replace(RUN, args="first second * third", whole=True, defaults=""), ""),
        (replace(RUN, args="* third"), "parameter first is not passed"),
        (replace(RUN, args="second first"), "its first parameters are first second"),
        (replace(RUN, args="first * fourth"), "no parameter fourth"),
        (replace(RUN, whole=True), "its parameters are first second third"),
        (replace(RUN, defaults="second=3"), "the default of second is 2, not 3"),
        (replace(RUN, defaults="first=1"), "the default of first is missing, not 1"),
        (Pin("pack.renamed", "a * anything"), ""),
        (Pin("pack.compiled", ""), "it cannot be called"),
        (Pin("pack.Child", has="run kept MODES", mentions="fast"), ""),
        (Pin("pack.Child", has="walk"), "no attribute walk"),
        (Pin("pack.Child", mentions="medium"), "no mention of medium"),
        (Pin("pack.Other"), "the name does not exist"),
    ],
)
def test_a_row_that_does_not_fit_is_reported(theirs, pin, problem):
    shape = theirs.shape(pin.name, pin.has.split(), pin.mentions.split())
    assert problems(pin, shape) == ([problem] if problem else [])


FITTING = [
    Pin("pack.Child", of="child", has="kept"),
    RUN,
    Pin("pack.renamed"),
    Pin("pack.inner.helper", "* a"),
]


@pytest.mark.parametrize(
    "pins, complaint",
    [
        (FITTING, None),
        ([FITTING[0], FITTING[1], FITTING[3]], "line 2: pack.renamed"),
        ([replace(FITTING[0], has=""), *FITTING[1:]], "line 6: pack.Child.kept"),
        (
            [FITTING[0], replace(RUN, args="first"), *FITTING[2:]],
            "line 6: pack.Child.run, 1 by position third",
        ),
        ([*FITTING[:3], Pin("pack.inner.helper", "* b")], "line 8: pack.inner.helper a"),
    ],
)
def test_a_use_that_the_table_lacks_is_reported(tmp_path, monkeypatch, pins, complaint):
    monkeypatch.setattr("tests.contracts.test_pins.PACKAGES", ("pack",))
    file = tmp_path / "ours.py"
    file.write_text(OURS)
    found = list(unknown(file, pins))
    assert found == ([complaint] if complaint else [])


def test_parameters_without_a_type_are_found(tmp_path):
    file = tmp_path / "ours.py"
    file.write_text(OURS)
    assert Uses(file, ("pack",), {}).untyped() == {"child"}


def test_rows_that_the_file_does_not_use_are_reported(tmp_path):
    file = tmp_path / "ours.py"
    file.write_text(OURS)
    assert not list(unused(file, FITTING))
    assert list(unused(file, [Pin("pack.Child", has="walk")])) == ["pack.Child: walk"]
    assert list(unused(file, [Pin("pack.Other")])) == ["pack.Other: Other"]
    assert list(unused(file, [replace(RUN, args="first * fourth")])) == ["pack.Child.run: fourth"]

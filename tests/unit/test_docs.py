"""The texts, followed: what they tell a user to write works, and what they name is there."""

import functools
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore import algos
from rlcore.__main__ import COMMANDS
from rlcore.cli import settings
from rlcore.config import resolve, rules
from rlcore.config.schema import Config
from rlcore.envs import registry as envs
from rlcore.rewards import registry
from tests import runs
from tests.contracts import env_contract
from tests.recipes.conftest import Bench

ROOT = runs.ROOT
PAGES = sorted(
    p
    for p in ROOT.glob("**/*.md")
    if not {"build", "runs"} & set(p.relative_to(ROOT).parts)
    and not any(part.startswith(".") for part in p.relative_to(ROOT).parts)
)
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
ONE = ["--run.steps", "1", "--checkpoint.no_at_end", "--checkpoint.no_export_hf"]
LOSS_OF = "rlcore/algos/README.md", "The loss of rows"
OF_EXAMPLES = {"algo.push", "reward.bonus"}
"""Keys that the texts themselves invent."""


def section(readme: str, title: str) -> str:
    text = (ROOT / readme).read_text()
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert found, f"{readme} has no section {title!r}"
    return found[1]


def code(text: str) -> str:
    """The lines of the first step that are indented as code."""
    block = re.search(r"\n( {7}.*\n(?: {7}.*\n|\n)*)", text[text.index("\n1. ") :])
    assert block, "there is no code in it"
    return re.sub(r"^ {7}", "", block[1], flags=re.M)


def command(text: str) -> tuple[str, list[str]]:
    """The recipe of its last step, and the keys behind it."""
    found = re.search(r"Run it: `bash recipes/(\w+\.sh) ([^`]+)`", text)
    assert found, "there is no command in it"
    return found[1], found[2].split()


STEPS = {
    "algorithm": section("rlcore/algos/README.md", "Add an algorithm in three steps"),
    "reward": section("rlcore/rewards/README.md", "Add a reward in two steps"),
    "environment": section("rlcore/envs/README.md", "Add an environment in two steps"),
    "callback": section("rlcore/trainer/README.md", "Add a callback in two steps"),
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder on PYTHONPATH into which the four texts have a user put code."""
    folder = tmp_path_factory.mktemp("docs")
    package = folder / "my_pkg"
    package.mkdir()
    copied = (ROOT / "rlcore" / "algos" / "cispo.py").read_text()
    head = copied[: copied.index("@dataclass")]  # step 1; step 2 replaces config and loss
    (package / "my_loss.py").write_text(head + code(STEPS["algorithm"]))
    (package / "my_reward.py").write_text(code(STEPS["reward"]))
    (package / "my_env.py").write_text(code(STEPS["environment"]))
    (package / "my_callback.py").write_text(code(STEPS["callback"]))
    return folder


@pytest.fixture(scope="module")
def done(theirs: Path) -> runs.Gang:
    """A step of each."""
    model = runs.tiny_model(theirs / "model")
    jobs = [
        {
            "name": name,
            "argv": runs.arguments(model, theirs / "runs", name, *ONE, *command(text)[1]),
            "path": [str(theirs)],
        }
        for name, text in STEPS.items()
    ]
    return runs.run(1, jobs, theirs / "gang")


def commands() -> dict[str, tuple[str, list[str]]]:
    """What the pages and the recipes' own texts start: the recipe and the keys behind it. Not those
    with a gap (`...`, FILE) or with somebody's own code."""
    found = {}
    for page in (*PAGES, *ROOT.glob("recipes/*.sh")):
        text = re.sub(r"\\\n *", "", page.read_text())  # a command may go on in the next line
        for recipe, rest in re.findall(
            r"(?:^ {4,}|`)(?:\w+=\S* )*bash recipes/([\w.]+\.sh)([^`#\n]*)", text, re.M
        ):
            if not re.search(r"\.\.\.|\b[A-Z]{3,}\b|\bmy", recipe + rest):
                found[f"{recipe}{rest.rstrip()}"] = recipe, rest.split()
    return found


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """The keys that a recipe gives to the program."""
    bench = Bench(tmp_path_factory.mktemp("recipes"))

    @functools.cache
    def keys_of(recipe: str) -> list[str]:
        path = ROOT / "recipes" / recipe
        if recipe == "grpo_1gpu.sh":  # asks the program itself which model fits, before launch
            memory = "--cluster.gpu_memory_gb", "80"
            rc, out = bench.run("bash", path, "--dry-run", *memory, PYTHONPATH=str(ROOT))
            found = [w for key in re.findall(r"^setting +(--\S+) (.*)", out, re.M) for w in key]
            assert rc == 0 and found, out
            return found[: found.index("--dry-run")]
        rc, out = bench.run("bash", path, "--dry-run")
        assert rc == 0, out
        return bench.records()[0]["argv"][1:-1]

    return keys_of


def refused(argv: list[str]) -> list[str]:
    try:
        return rules.broken(settings.parse(argv))
    except ValueError as error:
        return [str(error)]


@pytest.mark.slow  # starts every recipe
def test_the_keys_of_every_command_fit_its_recipe(given) -> None:
    bad = {}
    flags = ("--dry-run", "--help", "--preflight")
    for line, (recipe, words) in commands().items():
        if said := refused([*given(recipe), *(w for w in words if w not in flags)]):
            bad[line] = said
    assert len(commands()) > 30 and not bad, bad


@pytest.mark.parametrize("name", STEPS)
def test_the_command_of_the_last_step_fits_its_recipe(theirs, given, monkeypatch, name) -> None:
    monkeypatch.syspath_prepend(theirs)
    recipe, words = command(STEPS[name])
    assert not refused([*given(recipe), *words])


def test_the_algorithm_of_the_text_trains(theirs: Path, done: runs.Gang) -> None:
    done.check("algorithm")
    row = runs.rows(theirs / "runs" / "algorithm")[1]
    assert row["actor/grad_norm"] > 0 and "algo/push" in row


def test_the_reward_of_the_text_scores(theirs: Path, done: runs.Gang) -> None:
    done.check("reward")
    row = runs.rows(theirs / "runs" / "reward")[1]
    assert row["reward/errors"] == 0
    assert row["critic/score/max"] in (pytest.approx(0.1), pytest.approx(1.1))


def test_the_notebook_example_of_the_algorithms_computes_a_loss() -> None:
    block = re.search(r"\n( {4}import torch\n(?: {4}.*\n|\n)*)", section(*LOSS_OF))
    assert block
    names: dict[str, Any] = {}
    exec(re.sub(r"^ {4}", "", block[1], flags=re.M), names)
    found, gradient = names["found"], names["log_probs"].grad
    assert found.normaliser == 3 == int(found.kept.sum()) and "so N is 3" in section(*LOSS_OF)
    assert gradient.tolist() == [
        [pytest.approx(-1 / 3), 0.0, pytest.approx(-math.exp(0.1) / 3)],
        [pytest.approx(1 / 3), 0.0, 0.0],
    ]


def test_the_eight_lines_of_the_readme_train(tmp_path: Path) -> None:
    block = re.search(r"\n( {4}import rlcore\n(?: {4}.*\n|\n)*)", (ROOT / "README.md").read_text())
    assert block and len(block[1].rstrip().split("\n")) == 8
    script = re.sub(r"^ {4}", "", block[1], flags=re.M)
    model = runs.tiny_model(tmp_path / "model")
    short = f'"run.steps": 1, "run.dir": "{tmp_path}", "model.random_init": True'
    for old, new in {'"run.steps": 40': short, "runs/tiny": str(model)}.items():
        assert script.count(old) == 1
        script = script.replace(old, new)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"^\[0?\.\d+\] .*/run/hf$", done.stdout, re.M), done.stdout[-500:]


def test_the_callback_of_the_text_follows_the_run(theirs: Path, done: runs.Gang) -> None:
    done.check("callback")
    row = runs.rows(theirs / "runs" / "callback")[1]
    assert row["training/excluded_samples"] == 0, "no response has a hundred characters"
    assert f"step 1: {row['critic/score/mean']:.2f}" in done.text("callback")


def test_the_environment_of_the_text_answers(
    theirs: Path, done: runs.Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    done.check("environment")
    row = runs.rows(theirs / "runs" / "environment")[1]
    assert row["env/right"] == 0  # random weights, 24 tokens
    assert row["env/turns"] > 1 and 0 < row["env/observed_tokens"] < 1
    monkeypatch.syspath_prepend(theirs)
    monkeypatch.setenv("PYTHONPATH", f"{theirs}:{ROOT}")
    prompt = env_contract.prompt_of(answer="21")
    told = env_contract.check_env("my_pkg.my_env.Again", prompt, ["3>3", "9+12=21;>21"])
    assert told == [("", 0.0, False), ("-", 0.0, False), ("-", 1.0, True)]


def known_keys() -> set[str]:
    """Of all algorithms, environments and rewards; of a reward under its name in a sum, too."""
    found = {k for k in resolve.keys(Config()) if not k.startswith(("algo.", "reward.", "env."))}
    for name in algos.NAMES:
        found |= set(resolve.keys(algos.config_class(name)(), "algo."))
    for name in registry.REWARDS:
        section_class = registry.config_class(name)
        found |= set(resolve.keys(section_class(), "reward."))
        found |= set(resolve.keys(section_class(), f"reward.{name}."))
    for name in envs.ENVS:
        found |= set(resolve.keys(envs.config_class(name)(), "env."))
    return found | {"sim.seed"} | OF_EXAMPLES


@by_page
def test_every_key_and_file_that_a_page_names_exists(page: Path) -> None:
    text, known = page.read_text(), known_keys()
    sections = {k.partition(".")[0] for k in known}
    for name in re.findall(r"--((?:[a-z]+)\.[a-z][a-z_0-9.]*[a-z0-9])", text):
        positive = re.sub(r"\.no_", ".", name)
        assert {name, positive} & known or name.partition(".")[0] not in sections, f"--{name}"
    for name in re.findall(
        r"(?<![\w/.])((?:tests|tools|rlcore|recipes)/[\w/.]+\.(?:py|sh|md))", text
    ):
        assert (ROOT / name).is_file() or "RECIPE" in name, name


def anchors(page: Path) -> set[str]:
    """The headings of a page as a link names them: small letters, hyphens for spaces, no marks."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


@by_page
def test_every_link_leads_to_a_file_and_to_a_heading(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def systems() -> dict[str, Path]:
    """Of the table in the README: the name of a system and its page, the first that it links."""
    rows = re.findall(r"^\| ([^|:]+): .*\|([^|]+)\|$", section("README.md", "Five systems"), re.M)
    return {name: ROOT / re.search(r"\]\(([^)]+)\)", cell)[1] for name, cell in rows}


def test_the_readme_has_five_systems_and_a_page_for_each() -> None:
    assert len(systems()) == len(set(systems().values())) == 5


@pytest.mark.parametrize("name", systems())
def test_the_page_of_a_system_says_how_when_not_and_on_what_evidence(name: str) -> None:
    """Each item of the evidence states its kind, a command and a file, except if it was not
    measured. The figure of the README's table is among them."""
    page = systems()[name].relative_to(ROOT).as_posix()
    for title in ("Switch it on", "Do not use when"):
        assert section(page, title).strip(), title
    evidence = section(page, "Evidence").partition("\n### ")[0]
    items = re.findall(r"^- \*\*.*\n(?:  .*\n)*", evidence, re.M)
    assert items
    for item in items:
        assert re.search(r"\b(Measured|Simulated|Replayed|Not measured)\b", item), item
        assert "`" in item and ("](" in item or "Not measured" in item), item
    line = re.search(rf"^\| {re.escape(name)}: .*$", section("README.md", "Five systems"), re.M)
    gained = line[0].split(" | ")[2]
    for number in re.findall(r"(?<![\w.])[+-]?\d*\.\d+x?(?![\w.]*`)", gained):
        assert number in evidence, number


def test_the_table_of_recipes_has_them_all() -> None:
    listed = set(
        re.findall(r"^\| `(\w[\w.]*\.sh)\b", (ROOT / "recipes/README.md").read_text(), re.M)
    )
    assert listed == {p.name for p in ROOT.glob("recipes/*.sh")} - {"common.sh"}


def test_the_tree_has_every_command_and_help_needs_no_torch() -> None:
    listed = re.search(r"commands: ([\w,\s]+)\.", (ROOT / "rlcore/README.md").read_text())
    assert listed and re.split(r",\s", listed[1]) == list(COMMANDS)
    program = (
        "import sys; from rlcore.__main__ import main; main(['--help']); "
        "print({'torch', 'numpy', 'tyro', 'megatron'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr

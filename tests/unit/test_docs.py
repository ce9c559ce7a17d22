"""The texts of the READMEs, followed: what they tell a user to write works, and what they name is
there."""

import re
from pathlib import Path

import pytest

from rlcore import algos
from rlcore.config import resolve
from rlcore.config.schema import Config
from rlcore.envs import registry as envs
from rlcore.rewards import registry
from tests import runs

ROOT = runs.ROOT
READMES = sorted(
    p for p in ROOT.glob("**/README.md") if not {"build", ".venv"} & set(p.relative_to(ROOT).parts)
)
ONE = ["--run.steps", "1", "--checkpoint.no_at_end", "--checkpoint.no_export_hf"]
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


def keys(text: str) -> list[str]:
    """The keys of its command."""
    found = re.search(r"Run it: `bash recipes/\w+\.sh ([^`]+)`", text)
    assert found, "there is no command in it"
    return found[1].split()


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> runs.Gang:
    """What the two texts have a user do, and a step of each."""
    folder = tmp_path_factory.mktemp("docs")
    package = folder / "my_pkg"
    package.mkdir()
    algorithm = section("rlcore/algos/README.md", "Add an algorithm in three steps")
    copied = (ROOT / "rlcore" / "algos" / "cispo.py").read_text()
    head = copied[: copied.index("@dataclass")]  # step 1; step 2 replaces config and loss
    (package / "my_loss.py").write_text(head + code(algorithm))
    reward = section("rlcore/rewards/README.md", "Add a reward in two steps")
    (package / "my_reward.py").write_text(code(reward))
    model = runs.tiny_model(folder / "model")
    jobs = [
        {
            "name": name,
            "argv": runs.arguments(model, folder / "runs", name, *ONE, *keys(text)),
            "path": [str(folder)],
        }
        for name, text in (("algorithm", algorithm), ("reward", reward))
    ]
    return runs.run(1, jobs, folder / "gang")


def test_the_algorithm_of_the_text_trains(done: runs.Gang) -> None:
    done.check("algorithm")
    row = runs.rows(done.folder.parent / "runs" / "algorithm")[1]
    assert row["actor/grad_norm"] > 0 and "algo/push" in row


def test_the_reward_of_the_text_scores(done: runs.Gang) -> None:
    done.check("reward")
    row = runs.rows(done.folder.parent / "runs" / "reward")[1]
    assert row["reward/errors"] == 0
    assert row["critic/score/max"] in (pytest.approx(0.1), pytest.approx(1.1))


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


@pytest.mark.parametrize("readme", READMES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_key_and_file_that_a_readme_names_exists(readme: Path) -> None:
    text, known = readme.read_text(), known_keys()
    sections = {k.partition(".")[0] for k in known}
    for name in re.findall(r"--((?:[a-z]+)\.[a-z][a-z_0-9.]*[a-z0-9])", text):
        positive = re.sub(r"\.no_", ".", name)
        assert {name, positive} & known or name.partition(".")[0] not in sections, f"--{name}"
    for name in re.findall(
        r"(?<![\w/.])((?:tests|tools|rlcore|recipes)/[\w/.]+\.(?:py|sh|md))", text
    ):
        assert (ROOT / name).is_file() or "RECIPE" in name, name

"""recipes/YOUR_MODEL.md, followed from an empty folder: its commands, its files and its output."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests import runs
from tests.recipes.conftest import RECIPES

PAGE = (RECIPES / "YOUR_MODEL.md").read_text()


def blocks(title: str) -> list[str]:
    """The code and the output of a section, one text for each block."""
    section = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    assert section, title
    found = re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", section[1], re.M)
    return [textwrap.dedent(block).strip("\n") for block in found]


def shown(text: str) -> list[str]:
    """Lines of output without their numbers and the page's gaps."""
    lines = [re.sub(r"[-+]?\d[\d.]*", "N", line) for line in text.splitlines()]
    return [
        re.sub(r"\s+", " ", line.split(" ...")[0]).strip() for line in lines if line.strip("- ")
    ]


@pytest.mark.slow  # two minutes, and another one in which the model is made
@pytest.mark.ranks(2)
@pytest.mark.timeout(1200)
def test_the_page_leads_from_an_empty_folder_to_a_curve(tmp_path: Path) -> None:
    (model,) = blocks("1. The model")
    (rows,) = blocks("2. The rows")
    (reward,) = blocks("3. The reward")
    (check, train) = blocks("4. Check, then train")
    (after,) = blocks("5. Read, evaluate, take it away")
    command, _, printed = train.partition("\n\n")
    commands, _, table = after.partition("\n\n")
    (tmp_path / "rows.py").write_text(rows + "\n")
    (tmp_path / "my_reward.py").write_text(reward + "\n")
    script = "\n".join(["set -e", model, "python rows.py", check, command, commands])
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RLCORE": str(RECIPES.parent),
        "PYTHONPATH": str(tmp_path),
        "PYTHON": sys.executable,
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    said = "\n".join(shown(done.stdout))
    for line in ["dry run: this would run", *shown(printed), *shown(table)]:
        assert line in said, (line, done.stdout[-3000:])
    found = runs.rows(tmp_path / "runs" / "mine")
    accuracy = {step: row.get("val-core/val/acc/mean@1") for step, row in found.items()}
    assert accuracy[40] > accuracy[0] + 0.08, accuracy
    assert (tmp_path / "my_trained_model" / "model.safetensors").exists()
    assert (tmp_path / "runs" / "mine" / "curve.png").exists()

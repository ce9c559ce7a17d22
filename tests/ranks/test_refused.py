"""What two ranks print when settings are refused: one sentence, and that the run has ended."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import kit, runs

pytestmark = pytest.mark.ranks(2)

CASES = {
    "before the ranks join": (("--train.samples_per_update", 3), "must divide the 16 samples"),
    "on one rank, when engines start": (("--data.train", "none.jsonl"), "none.jsonl: no such file"),
    "in the first step": (("--reward", "tests.scores.broken"), "failed on all 16 responses"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.tiny_model(tmp_path_factory.mktemp("refused") / "model")


@pytest.mark.parametrize("case", CASES)
def test_a_refusal_is_one_sentence(model: Path, tmp_path: Path, case: str) -> None:
    words, sentence = CASES[case]
    argv = runs.arguments(model, tmp_path, "refused", "--data.val", "label", *words)
    done = subprocess.run(
        [sys.executable, "recipes/torch_run.py", "--standalone", "--local-addr", "localhost"]
        + ["--nproc-per-node", "2", "-m", "rlcore", "train", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        cwd=kit.ROOT,
        env=os.environ | {"PYTHONPATH": kit.python_path(), "OMP_NUM_THREADS": "1"},
    )
    lines = [line for line in done.stdout.splitlines()]
    said = [line for line in lines if sentence in line]
    assert done.returncode == 2 and len(said) == 1, lines
    after = lines[lines.index(said[0]) + 1 :]
    assert len(after) == 1 and "ended with code 2; the run has ended" in after[0], lines
    assert not (tmp_path / "refused" / "flight").exists()

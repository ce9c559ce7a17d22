"""`rlcore eval`: a checkpoint, its export, and the same weights as transformers writes them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import kit, runs

pytestmark = pytest.mark.ranks(2)

KEYS = (
    *("--run.steps", 2, "--eval.no_at_start", "--eval.greedy", "--eval.samples_per_prompt", 4),
    *("--checkpoint.every", 1, "--checkpoint.keep", 0),
)
DATA = ("--data.val", "label", "--data.num_val_prompts", "8", "--rollout.max_tokens", "24")
SCORES = (*DATA, "--model.dtype", "float32", "--eval.samples_per_prompt", "4", "--eval.greedy")


class Found:
    def __init__(self, folder: Path):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.folder, self.run = folder, folder / "runs" / "a"
        model = runs.tiny_model(folder / "model")
        argv = runs.arguments(model, folder / "runs", "a", *KEYS)
        runs.run(1, [{"name": "a", "argv": argv}], folder / "gang").check("a")
        self.theirs = folder / "theirs"
        hf = AutoModelForCausalLM.from_pretrained(self.run / "hf")
        hf.save_pretrained(self.theirs)
        AutoTokenizer.from_pretrained(self.run / "hf").save_pretrained(self.theirs)

    def evaluate(self, path: Path, *words: object) -> dict[str, Any]:
        from rlcore.cli import eval as command

        file = self.folder / "found.json"
        file.unlink(missing_ok=True)
        more = ["--run.dir", str(self.folder / "evals"), "--json", str(file)]
        assert command.main([str(path), *map(str, words), *more]) == 0
        return json.loads(file.read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("eval"))


def test_equal_weights_have_equal_scores_from_a_run_its_export_and_transformers(
    found: Found, capsys: pytest.CaptureFixture[str]
) -> None:
    of_run = found.evaluate(found.run)
    said = capsys.readouterr().out
    reward = "--reward", "tests.scores.variety"
    ours = found.evaluate(found.run / "hf", *SCORES, *reward)
    theirs = found.evaluate(found.theirs, *SCORES, *reward)
    assert of_run["metrics"] == ours["metrics"] == theirs["metrics"]
    assert of_run["model"].endswith("step_000002") and of_run["samples_per_prompt"] == 4
    last = runs.rows(found.run)[2]
    key = "val-core/label/acc/greedy"
    assert of_run["metrics"][key] == last[key], "greedy responses do not depend on the step"
    mean = of_run["metrics"]["val-core/label/acc/mean@4"]
    assert f"mean@4  {mean:.4f} +- " in said and "pass@4" in said
    first = found.evaluate(found.run, "--step", 1)
    assert first["metrics"] != of_run["metrics"]


def test_step_0_is_the_model_that_a_run_started_from(found: Found) -> None:
    """Also its held-out prompts are those of the run, which the seed chooses."""
    argv = runs.arguments(found.run / "hf", found.folder / "runs", "b", "--run.steps", 1)
    argv.remove("--model.random_init")
    words = [*argv, *KEYS[2:], "--run.seed", 5]
    runs.run(1, [{"name": "b", "argv": list(map(str, words))}], found.folder / "second").check("b")
    start = found.evaluate(found.folder / "runs" / "b", "--step", 0)
    assert start["model"] == str(found.run / "hf") and start["seed"] == 5
    reward = "--reward", "tests.scores.variety"
    model = found.evaluate(found.run / "hf", *SCORES, *reward, "--run.seed", 5)
    assert start["metrics"] == model["metrics"]
    assert start["metrics"] != found.evaluate(found.run / "hf", *SCORES, *reward)["metrics"]
    trained = found.evaluate(found.folder / "runs" / "b")
    assert trained["metrics"] != start["metrics"] and trained["seed"] == 5


def test_several_ranks_share_the_prompts_and_find_the_same(found: Found) -> None:
    alone = found.evaluate(found.run)
    file = found.folder / "both.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--local-addr", "localhost", "--nproc-per-node", "2", "-m", "rlcore", "eval"]
    words = [found.run, "--json", file, "--run.dir", found.folder / "both"]
    done = subprocess.run(
        [*torchrun, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"PYTHONPATH": kit.python_path(), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert json.loads(file.read_text())["metrics"] == pytest.approx(alone["metrics"])


def test_answers_are_voted_on(found: Found) -> None:
    votes = found.evaluate(found.run / "hf", *SCORES, "--reward", "tests.scores.Votes")
    metrics = votes["metrics"]
    assert 0 < metrics["val-core/label/acc/maj@4"] <= metrics["val-core/label/acc/pass@4"]
    other = found.evaluate(found.run / "hf", *SCORES, "--reward", "tests.scores.variety")
    assert "val-core/label/acc/maj@4" not in other["metrics"], "this reward finds no answers"


BAD = {
    "no folder": (["nowhere", *DATA], "--model.path nowhere"),
    "no data": (["{run}/hf"], "--data.val: is empty; give the prompts to evaluate on"),
    "no run": (["{run}/hf", "--step", "3"], "--step 3: .*hf is no run, and has no checkpoints"),
    "no step": (["{run}", "--step", "7"], "--step 7: .* has no such checkpoint; it has 1, 2"),
    "order": (["--data.val", "label"], "rlcore eval --data.val: give the model or run first"),
    "random start": (["{run}", "--step", "0"], "--step 0: .* started from random weights, which"),
    "key": (["{run}", "--eval.samples", "7"], "--eval.samples: there is no such key"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_a_sentence(
    found: Found, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    import re

    from rlcore.cli import eval as command

    words, sentence = BAD[name]
    assert command.main([word.format(run=found.run) for word in words]) == 2
    said = capsys.readouterr()
    assert re.search(sentence, said.out + said.err)

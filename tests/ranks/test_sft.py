"""`rlcore sft`: resumed, on several ranks, and as the start of RL, evaluation and export."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlcore.data import label_task
from tests import kit, runs

pytestmark = pytest.mark.ranks(2)


class Made:
    """A tiny model with random weights, and files of rows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = runs.tiny_model(folder / "model")
        for name, count in (("train", 48), ("val", 20)):
            rows = [label_task.make(name, 0, i) for i in range(count)]
            lines = [json.dumps({"question": r.prompt, "answer": r.demonstration}) for r in rows]
            (folder / f"{name}.jsonl").write_text("\n".join(lines))

    def words(self, name: str, *more: object) -> list[str]:
        keys = {
            "--run.dir": self.folder / "runs",
            "--run.name": name,
            "--model.path": self.model,
            "--model.dtype": "float32",
            "--data.train": self.folder / "train.jsonl",
            "--data.val": self.folder / "val.jsonl",
            "--data.template": "none",
            "--data.prompts_per_step": 8,
            "--train.lr": 3e-3,
            "--train.tokens_per_micro_batch": 256,
            "--eval.every": 2,
            "--cluster.timeout_s": 60,
        }
        words = ["--model.random_init", "--log.no_tensorboard"]
        return [*words, *(str(word) for pair in keys.items() for word in pair), *map(str, more)]

    def tune(self, name: str, *more: object) -> Path:
        from rlcore.cli import sft

        assert sft.main(self.words(name, *more)) == 0
        return self.folder / "runs" / name

    def gang(self, name: str, *more: object) -> Path:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--local-addr", "localhost", "--nproc-per-node", "2", "-m", "rlcore", "sft"]
        done = subprocess.run(
            [*torchrun, *self.words(name, *more)],
            capture_output=True,
            text=True,
            timeout=240,
            env=os.environ | {"PYTHONPATH": kit.python_path(), "CUDA_VISIBLE_DEVICES": ""},
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return self.folder / "runs" / name


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "hf" / "model.safetensors")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("sft"))


@pytest.fixture(scope="module")
def whole(made: Made) -> Path:
    """One epoch of 48 rows: 6 steps."""
    return made.tune("whole", "--checkpoint.every", 3)


def test_the_loss_falls_on_rows_that_are_not_learned(whole: Path) -> None:
    rows = runs.rows(whole)
    assert list(rows) == list(range(7))
    held_out = [rows[i]["val-core/val/nll/mean"] for i in (0, 2, 4, 6)]
    assert held_out == sorted(held_out, reverse=True) and held_out[0] - held_out[-1] > 0.5
    assert rows[6]["actor/loss"] == pytest.approx(rows[6]["actor/sft_nll"], rel=1e-5)
    assert rows[6]["training/epoch"] == 1.0 and rows[6]["training/trained_rows"] == 8.0
    answers = [json.loads(line) for line in (whole.parents[1] / "val.jsonl").open()]
    learned = sum(len(row["answer"]) + 1 for row in answers)  # a token per character, and the end
    assert rows[0]["val-aux/val/nll/num_tokens"] == learned
    assert (whole / "curve.png").is_file()


def test_a_resumed_run_is_the_same_to_the_bit(made: Made, whole: Path) -> None:
    made.tune("parts", "--run.steps", 3, "--checkpoint.every", 3, "--train.lr_schedule", "constant")
    more = ("--run.steps", 6, "--train.lr_schedule", "constant")
    parts, once = made.tune("parts", *more), made.tune("once", *more)
    kit.assert_bitwise(weights(parts), weights(once))
    found, wanted = runs.rows(parts), runs.rows(once)
    assert [runs.same(found[i]) for i in (4, 5, 6)] == [runs.same(wanted[i]) for i in (4, 5, 6)]


@pytest.mark.parametrize("layout", [(), ("--train.tp", 2), ("--train.pp", 2)], ids=str)
def test_two_ranks_learn_what_one_learns(made: Made, whole: Path, layout: tuple[Any, ...]) -> None:
    both = made.gang(f"both{'-'.join(map(str, layout))}", *layout)
    found, wanted = runs.rows(both), runs.rows(whole)
    for step in (0, 1, 6):
        for name in ("actor/loss", "actor/grad_norm", "val-core/val/nll/mean"):
            if name in wanted[step]:
                assert found[step][name] == pytest.approx(wanted[step][name], rel=1e-3), name
    kit.assert_close_named(weights(both), weights(whole), rtol=1e-2, atol=1e-3)


def test_one_model_goes_through_sft_grpo_eval_and_export(made: Made, whole: Path) -> None:
    from rlcore.cli import eval as evaluation
    from rlcore.cli import export

    argv = runs.arguments(whole / "hf", made.folder / "rl", "grpo", "--checkpoint.every", 1)
    argv.remove("--model.random_init")
    argv += ["--run.steps", "2", "--data.template", "none"]
    runs.run(1, [{"name": "grpo", "argv": argv}], made.folder / "gang").check("grpo")
    run = made.folder / "rl" / "grpo"
    scores = {}
    assert export.main([str(run), "--out", str(made.folder / "exported")]) == 0
    for name, path in (("run", run), ("exported", made.folder / "exported")):
        file = made.folder / f"{name}.json"
        keys = ["--data.val", "label", "--data.num_val_prompts", "8", "--eval.greedy"]
        keys += ["--model.dtype", "float32", "--reward", "tests.scores.variety"]
        keys += ["--rollout.max_tokens", "24", "--json", str(file)]
        keys += ["--run.dir", str(made.folder / "evals")]
        assert evaluation.main([str(path), *keys]) == 0
        scores[name] = json.loads(file.read_text())["metrics"]
    assert scores["run"] == scores["exported"]
    kit.assert_bitwise(load_file(made.folder / "exported" / "model.safetensors"), weights(run))


def test_files_are_mixed_in_given_proportions(made: Made) -> None:
    from rlcore.cli import sft

    keys = ("--data.weights", 3, 1, "--run.steps", 4, "--eval.every", 0, "--checkpoint.every", 2)
    words = made.words("mixed", *keys)
    words.insert(words.index("--data.train") + 2, str(made.folder / "val.jsonl"))
    assert sft.main(words) == 0
    state = made.folder / "runs" / "mixed" / "checkpoints" / "step_000004" / "state.json"
    assert json.loads(state.read_text())["sampler"]["positions"] == [24, 8]


BAD = {
    "section": (["--rollout.tp", "2"], "rlcore sft --rollout.tp: fine-tuning has no use for it"),
    "selector": (["--reward", "math"], "rlcore sft --reward: fine-tuning has no use for it"),
    "task": (["--data.train", "label"], "--data.train label: a generated task has no answers"),
    "epochs of the updates": (["--train.epochs", "3"], "the passes over the rows are --epochs"),
    "only sampling": (["--train.no_offload"], "--train.no_offload: fine-tuning has no use for it"),
    "roles": (["--cluster.rollout_ranks", "1"], "rollout_ranks: fine-tuning has no use for it"),
    "steps and epochs": (["--epochs", "1", "--run.steps", "3"], "give only one of them"),
    "a run of rl": (["--run.name", "rl"], "is of a run of rl, and this one is of sft"),
    "epochs": (["--epochs", "0"], "--epochs 0: must be above 0"),
    "file": (["--data.train", "none.jsonl"], "none.jsonl: no such file"),
    "field": (["--data.answer_field", "reply"], "no usable row; .* no field 'reply'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_a_sentence(
    made: Made, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    from rlcore.cli import sft

    words, sentence = BAD[name]
    if name == "a run of rl":
        argv = runs.arguments(made.model, made.folder / "runs", "rl", "--run.steps", 1)
        runs.run(1, [{"name": "rl", "argv": argv}], made.folder / "gang of rl").check("rl")
    assert sft.main(made.words("bad", *words)) == 2
    said = capsys.readouterr()
    assert re.search(sentence, said.out + said.err)


def test_validation_files_are_not_needed(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    words = made.words("no val", "--run.steps", 1)
    at = words.index("--data.val")
    del words[at : at + 2]
    monkeypatch.setattr(made, "words", lambda name: words)
    assert list(runs.rows(made.tune("no val"))) == [1]

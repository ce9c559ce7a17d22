"""`--env endpoint` through the whole program: what harnesses sample is trained, token by token."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import kit, runs

TEMPLATES = kit.ROOT / "tests/contracts/templates"
BARE = (
    *("--checkpoint.no_at_end", "--checkpoint.no_export_hf", "--eval.no_at_start"),
    *("--eval.no_at_end", "--rollout.dtype", "float64", "--log.rollouts", -1),
)
ENDPOINT = (
    *("--env", "endpoint", "--env.max_turn_tokens", 6, "--rollout.max_tokens", 200),
    *("--data.template", "chat", "--train.tokens_per_micro_batch", 2048, "--run.steps", 2),
)


def model(folder: Path, real_data: Path, **sizes: int) -> Path:
    """A tiny model with Qwen's vocabulary and the chat template of Qwen2.5."""
    shutil.copytree(real_data / "tokenizer_qwen", folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = (TEMPLATES / "qwen2_5.jinja").read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    usual = {"model_type": "qwen3", "vocab_size": 151_680, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(kit.tiny_config("qwen3") | usual | sizes))
    return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, real_data: Path) -> Any:
    folder = tmp_path_factory.mktemp("endpoint")
    qwen, out = model(folder / "qwen", real_data), folder / "runs"
    rows = [{"question": f"Say {i}.", "answer": str(i)} for i in range(40)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = "--data.train", folder / "train.jsonl", "--data.val", folder / "train.jsonl"

    def job(name: str, *keys: object) -> runs.Job:
        more = *BARE, *data, *ENDPOINT, *keys
        return {"name": name, "argv": runs.arguments(qwen, out, name, *more)}

    talk = "--env.function", "tests.harnesses.talk"
    jobs = [
        job("talk", *talk),
        job("means", *talk, "--algo.loss_agg_mode", "seq-mean-token-mean", "--run.steps", 1),
        job("reward", *talk, "--env.score", "reward", "--run.steps", 1),
        job("hurried", "--env.function", "tests.harnesses.hurried"),
        job("silent", "--env.function", "tests.harnesses.silent"),
        job("none"),
    ]
    return runs.run(1, jobs, folder / "gang"), out


def test_episodes_of_a_harness_are_trained_as_they_were_sampled(found: Any) -> None:
    gang, out = found
    for name, steps in (("talk", 2), ("means", 1), ("reward", 1)):
        gang.check(name)
        rows = runs.rows(out / name)
        assert len(rows) >= steps
        row = rows[1]
        assert row["env/turns"] == 3 and row["env/branches"] == 2
        assert row["training/rollout_probs_diff_max"] < 1e-4
        assert row["env/failures/error"] == 0


def test_a_harness_that_ends_in_the_middle_of_turns_costs_nothing_else(found: Any) -> None:
    gang, out = found
    gang.check("hurried")
    for row in runs.rows(out / "hurried").values():
        assert row["env/turns"] >= 1 and row["training/rollout_probs_diff_max"] < 1e-4


def test_a_harness_that_asks_nothing_ends_the_run_with_a_sentence(found: Any) -> None:
    gang, _ = found
    with pytest.raises(AssertionError, match="has ended without a turn of the policy"):
        gang.check("silent")


def test_a_run_without_a_harness_is_refused(found: Any) -> None:
    gang, _ = found
    with pytest.raises(AssertionError, match="--env.command, --env.function: give one of them"):
        gang.check("none")

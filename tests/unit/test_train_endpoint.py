"""`--env endpoint` through the whole program: what harnesses sample is trained, token by token."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlcore.hf.tokenizer import CHATML
from tests import kit, runs

QWEN = (kit.ROOT / "tests/contracts/templates/qwen2_5.jinja").read_text()
BARE = (
    *("--checkpoint.no_at_end", "--checkpoint.no_export_hf", "--eval.no_at_start"),
    *("--eval.no_at_end", "--rollout.dtype", "float64", "--log.rollouts", -1),
)
ENDPOINT = (
    *("--env", "endpoint", "--env.max_turn_tokens", 6, "--rollout.max_tokens", 200),
    *("--data.template", "chat", "--train.tokens_per_micro_batch", 2048, "--run.steps", 2),
)


def model(folder: Path, real_data: Path, template: str = QWEN, **sizes: int) -> Path:
    """A tiny model with Qwen's vocabulary and a chat template."""
    shutil.copytree(real_data / "tokenizer_qwen", folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    usual = {"model_type": "qwen3", "vocab_size": 151_680, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(kit.tiny_config("qwen3") | usual | sizes))
    return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, real_data: Path) -> Any:
    folder = tmp_path_factory.mktemp("endpoint")
    qwen = model(folder / "qwen", real_data)
    chatml, out = model(folder / "chatml", real_data, CHATML), folder / "runs"
    rows = [{"question": f"Say {i}.", "answer": str(i)} for i in range(40)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = "--data.train", folder / "train.jsonl", "--data.val", folder / "train.jsonl"

    def job(name: str, *keys: object, start: Path = qwen) -> runs.Job:
        more = *BARE, *data, *ENDPOINT, *keys
        return {"name": name, "argv": runs.arguments(start, out, name, *more)}

    talk = "--env.function", "tests.harnesses.talk"
    jobs = [
        job("talk", *talk),
        job("means", *talk, "--algo.loss_agg_mode", "seq-mean-token-mean", "--run.steps", 1),
        job("reward", *talk, "--env.score", "reward", "--run.steps", 1),
        job("texts", "--env.function", "tests.harnesses.complete"),
        job("plain", "--env.function", "tests.harnesses.plain", start=chatml),
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


def test_text_completions_are_trained_as_they_were_sampled(found: Any) -> None:
    gang, out = found
    gang.check("texts")
    for row in runs.rows(out / "texts").values():
        assert row["env/turns"] == 5 and 2 <= row["env/branches"] <= 3  # a text may have its end
        assert row["training/rollout_probs_diff_max"] < 1e-4
        assert row["env/failures/error"] == 0


def test_a_template_without_a_format_of_calls_serves_requests_without_tools(found: Any) -> None:
    gang, out = found
    gang.check("plain")
    for row in runs.rows(out / "plain").values():
        assert row["env/turns"] == 1 and row["env/failures/error"] == 0
        assert row["training/rollout_probs_diff_max"] < 1e-4
    assert "tool calls: refused in requests: the chat template writes no" in gang.text("plain")


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

"""`--env swe` in the sandbox through the whole program; a scripted engine stands for the model."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlcore.hf.tokenizer import load_tokenizer
from tests import kit, runs, scripted
from tests.unit.test_train_endpoint import BARE, model

PROJECT = kit.ROOT / "tests/projects/durations"
SCRIPTS = {
    "t0.0": [
        "I read it.\n```bash\ngrep -n minutes durations.py\n```<|im_end|>",
        "```bash\nsed -i 's|= seconds // 60|= seconds % 3600 // 60|' durations.py\n```<|im_end|>",
        "submit<|im_end|>",
    ],
    "t0.1": ["I do not know.<|im_end|>", "submit<|im_end|>"],
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, real_data: Path) -> Any:
    folder = tmp_path_factory.mktemp("swe")
    qwen, out = model(folder / "qwen", real_data), folder / "runs"
    row = {"repo": str(PROJECT), "tests": "python3 -m unittest -q checks"}
    rows = [row | {"question": f"Hours are not subtracted. ({i})"} for i in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = (
        *("--data.train", folder / "train.jsonl", "--data.val", folder / "train.jsonl"),
        *("--data.answer_field", "", "--data.template", "chat", "--env", "swe"),
        *("--env.workspace", "sandbox", "--env.workers", 1, "--env.timeout_s", 1000),
        *("--data.prompts_per_step", 1, "--rollout.samples_per_prompt", 2),
        *("--rollout.max_tokens", 400, "--train.tokens_per_micro_batch", 2048, "--run.steps", 1),
    )
    job = {
        "name": "swe",
        "argv": runs.arguments(qwen, out, "swe", *BARE, *keys),
        "within": ("tests.scripted:run", str(qwen), SCRIPTS, str(folder)),
    }
    return runs.run(1, [job], folder / "gang"), out / "swe", folder


def test_an_episode_in_the_sandbox_trains_its_turns_alone(found: Any) -> None:
    gang, _, folder = found
    gang.check("swe")
    tokenizer = load_tokenizer(folder / "qwen")
    for id, script in SCRIPTS.items():
        turns = [turn for turn in scripted.asked(folder) if turn.id.startswith(id)]
        assert [turn.tokens for turn in turns] == [tokenizer.encode(text) for text in script]
        (row,) = [row for row in scripted.trained(folder) if row.id == id]
        scripted.check_rows([row], turns)
        assert {value > 0 for value in row.advantage} == {id == "t0.0"}
    text = tokenizer.decode(scripted.asked(folder)[-1].context)
    assert "user\n21:    minutes = seconds // 60" in text or "Give a command" in text


def test_the_tests_of_the_repository_give_the_score(found: Any) -> None:
    gang, run, _ = found
    gang.check("swe")
    lines = (run / "rollouts.jsonl").read_text().splitlines()
    assert {row["id"]: row["score"] for row in map(json.loads, lines)} == {"t0.0": 1.0, "t0.1": 0.0}
    (row,) = runs.rows(run).values()
    assert row["env/success"] == 0.5 and row["env/turns"] == 2.5

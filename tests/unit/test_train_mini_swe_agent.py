"""mini-swe-agent, a harness of others, through the whole program: each trained token is known.

A scripted engine stands for the model. The agent works on tests/projects/durations, whose tests
fail until line `minutes = ...` is right.
"""

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from rlcore.hf.tokenizer import load_tokenizer
from tests import kit, runs, scripted
from tests.unit.test_train_endpoint import BARE, model

PYTHON = kit.ROOT / ".venvs/mini-swe-agent/bin/python"
HARNESS = kit.ROOT / "recipes/harnesses/mini_swe_agent.py"
PROJECT = kit.ROOT / "tests/projects/durations"
ISSUE = "format_duration(3600) gives '1h 60m' instead of '1h'. Correct it."

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not PYTHON.exists(), reason="no mini-swe-agent: bash tools/setup.sh --mini-swe-agent"
    ),
]


def turn(text: str, command: str | None = None) -> str:
    """A turn in Qwen2.5's format."""
    call = ""
    if command is not None:
        arguments = json.dumps({"name": "bash", "arguments": {"command": command}})
        call = f"\n<tool_call>\n{arguments}\n</tool_call>"
    return f"{text}{call}<|im_end|>"


LOOK = turn("Let me look.", "ls && cat durations.py")
EDIT = turn("Minutes count the hours.", "sed -i 's|= seconds // 60|= seconds % 3600 // 60|' *.py")
TEST = turn("Now the tests.", "python3 -m unittest -q checks")
SUBMIT = turn("Done.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
CHEAT = turn("Is there a score to write?", "env | cut -d= -f1; ls -a ..; echo 1 > ../score")
BROKEN = turn('<tool_call>\n{"name": "bash", "arguments": {"command": "ls"\n</tool_call>')
TALK = turn("I call no tool.")
SCRIPTS = {
    "t0.0": [LOOK, EDIT, TEST, SUBMIT],
    "t0.1": [CHEAT, SUBMIT],
    "t1.0": [LOOK, BROKEN, EDIT, SUBMIT],
    "t1.1": [TALK, TALK, TALK],
}
SCORES = {"t0.0": 1.0, "t0.1": 0.0, "t1.0": 1.0, "t1.1": 0.0}
ROWS = {"t0.0": 1, "t0.1": 1, "t1.0": 2, "t1.1": 3}
"""The agent drops a turn whose action it cannot read from its history, which begins a row."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, real_data: Path) -> Any:
    folder = tmp_path_factory.mktemp("mini")
    qwen, out = model(folder / "qwen", real_data, max_position_embeddings=8192), folder / "runs"
    row = {"repo": str(PROJECT), "tests": "python3 -m unittest -q checks"}
    rows = [row | {"question": f"{ISSUE} ({i})"} for i in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = "--data.train", folder / "train.jsonl", "--data.val", folder / "train.jsonl"

    def job(name: str, *keys: object) -> runs.Job:
        more = (
            *(*BARE, *data, "--data.template", "chat", "--data.answer_field", "", "--run.steps", 1),
            *(
                "--env",
                "endpoint",
                "--env.command",
                f"{sys.executable} {HARNESS} -c agent.step_limit=50",
            ),
            *("--rollout.samples_per_prompt", 2, "--rollout.max_tokens", 6000),
            *("--train.head_chunk_tokens", 256, "--train.tokens_per_micro_batch", 8192),
        )
        return {"name": name, "argv": runs.arguments(qwen, out, name, *more, *keys)}

    script = job("script", "--data.prompts_per_step", 2)
    script["within"] = "tests.scripted:run", str(qwen), SCRIPTS, str(folder)
    limits = "--env.max_turns", 2, "--env.max_turn_tokens", 8
    jobs = [script, job("random", "--data.prompts_per_step", 1, *limits)]
    with socket.create_server(("127.0.0.1", 0)) as proxy, pytest.MonkeyPatch.context() as patch:
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            patch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        gang = runs.run(1, jobs, folder / "gang", timeout_s=800)
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):  # nothing but loopback was asked
            proxy.accept()
    return gang, out, folder


@pytest.mark.parametrize("id", SCRIPTS)
def test_the_trained_tokens_are_those_that_were_sampled(found: Any, id: str) -> None:
    gang, _, folder = found
    gang.check("script")
    tokenizer = load_tokenizer(folder / "qwen")
    turns = [turn for turn in scripted.asked(folder) if turn.id.startswith(id)]
    assert [turn.tokens for turn in turns] == [tokenizer.encode(text) for text in SCRIPTS[id]]
    rows = [row for row in scripted.trained(folder) if row.id == id]
    assert len(rows) == ROWS[id]
    scripted.check_rows(rows, turns)
    for row in rows:
        assert {value > 0 for value in row.advantage} == {SCORES[id] == 1}


def test_the_agent_reads_the_repository_and_its_tests_give_the_score(found: Any) -> None:
    gang, out, folder = found
    gang.check("script")
    lines = (out / "script/rollouts.jsonl").read_text().splitlines()
    assert {row["id"]: row["score"] for row in map(json.loads, lines)} == SCORES
    decode = load_tokenizer(folder / "qwen").decode
    texts = {row.id: decode(row.tokens) for row in scripted.trained(folder)}  # the last row of each
    assert ISSUE in texts["t0.0"] and "def format_duration" in texts["t0.0"]
    assert "Ran 4 tests" in texts["t0.0"] and "FAILED" not in texts["t0.0"]
    assert "Tool call error" in texts["t1.0"] and '"ls"\n' not in texts["t1.0"]


def test_the_policy_sees_neither_key_nor_score(found: Any) -> None:
    gang, _, folder = found
    gang.check("script")
    (row,) = [row for row in scripted.trained(folder) if row.id == "t0.1"]
    shown = load_tokenizer(folder / "qwen").decode(row.tokens)
    _, _, answer = shown.partition("echo 1 > ../score")
    printed = answer.partition('"output": "')[2].partition('"')[0]
    own = {"HOME", "LANG", "PATH", "PWD", "SHLVL", "_"}
    agent = {"LESS", "MANPAGER", "PAGER", "PIP_PROGRESS_BAR", "TQDM_DISABLE"}
    assert set(printed.split("\\n")) == own | agent | {".", "..", "work", ""}


def test_a_model_that_knows_no_tool_costs_no_run(found: Any) -> None:
    gang, out, _ = found
    gang.check("random")
    (row,) = runs.rows(out / "random").values()
    assert row["env/turns"] == 2 and row["critic/score/max"] == 0
    assert row["env/failures/error"] == 0 and row["training/rollout_probs_diff_max"] < 1e-4

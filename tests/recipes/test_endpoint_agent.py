"""The agent of recipes/endpoint_tiny.sh: OpenAI's client, streams, a tool; and two steps of it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore.envs.chat_api import ChatAnswer, ChatCall, TurnRequest
from tests import runs
from tests.endpoints import WAIT_S, Served, serve, wait_until
from tests.recipes.conftest import RECIPES

pytest.importorskip("openai", reason="no package openai: bash tools/setup.sh --openai")

AGENT = RECIPES / "endpoint_tiny.py"
TASK = {"prompt": "37+4-58", "answer": "-17"}


@pytest.fixture(scope="module")
def agent() -> Iterator[subprocess.Popen]:
    """The process that plays episodes."""
    command = [sys.executable, str(AGENT), "serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def folder(agent: subprocess.Popen) -> str:
    assert agent.stdout is not None
    return agent.stdout.readline().strip()


def call(expression: str) -> ChatAnswer:
    made = ChatCall("call_0_0", "calc", json.dumps({"expression": expression}))
    return ChatAnswer(calls=(made,), finish="tool_calls")


class Turns:
    """A policy that gives these answers, and keeps what it was asked."""

    def __init__(self, *answers: ChatAnswer) -> None:
        self.answers, self.asked = list(answers), list[TurnRequest]()

    async def complete(self, turn: TurnRequest) -> ChatAnswer:
        self.asked.append(turn)
        return self.answers.pop(0)


def play(served: Served, folder: str, turns: Turns, tmp_path: Path) -> tuple[int, str]:
    """Play an episode; return the exit code of its harness, and the score."""
    (tmp_path / "task").write_text(json.dumps(TASK))
    env = os.environ | {
        "OPENAI_BASE_URL": served.server.base_url,
        "OPENAI_API_KEY": served.endpoint.open("t1.0", turns.complete),
        "RLCORE_TASK": str(tmp_path / "task"),
        "RLCORE_SCORE": str(tmp_path / "score"),
    }
    command = [sys.executable, "-I", "-S", str(AGENT), "play", folder]
    code = subprocess.run(command, env=env, timeout=WAIT_S, check=False).returncode
    score = tmp_path / "score"
    return code, score.read_text() if score.exists() else ""


def test_a_right_call_and_its_result_score_1(folder: str, tmp_path: Path) -> None:
    turns = Turns(call("37+4-58"), ChatAnswer(content="-17"))
    with serve() as served:
        assert play(served, folder, turns, tmp_path) == (0, "1")
    first, second = turns.asked
    assert first.messages == [{"role": "user", "content": "37+4-58"}]
    assert [tool["function"]["name"] for tool in second.tools] == ["calc"]
    _, sampled, result = second.messages
    assert sampled["tool_calls"][0]["function"]["arguments"] == '{"expression": "37+4-58"}'
    assert result == {"role": "tool", "tool_call_id": "call_0_0", "content": "-17"}


def test_a_call_of_several_events_is_put_together(folder: str, tmp_path: Path) -> None:
    turns = Turns(call("1" + "+1" * 3000), ChatAnswer(content="-17"))
    with serve() as served:
        assert play(served, folder, turns, tmp_path) == (0, "1")
    assert turns.asked[1].messages[-1]["content"] == "3001"


def test_another_answer_scores_0(folder: str, tmp_path: Path) -> None:
    for answers in (
        [ChatAnswer(content="17")],
        [call("1"), ChatAnswer(content="1")],
        [call("1")] * 4,
    ):
        with serve() as served:
            assert play(served, folder, Turns(*answers), tmp_path) == (0, "0")


def test_a_call_that_is_no_sum_is_answered_with_an_error(folder: str, tmp_path: Path) -> None:
    turns = Turns(call("__import__('os')"), ChatAnswer(content="-17"))
    with serve() as served:
        assert play(served, folder, turns, tmp_path) == (0, "1")
    assert turns.asked[1].messages[-1]["content"] == "error: not a sum"


def test_an_agent_that_fails_gives_no_score(folder: str, tmp_path: Path) -> None:
    with serve() as served:
        code, score = play(served, folder, Turns(ChatAnswer(calls=call("1").calls)), tmp_path)
    assert (code, score) == (1, "")


def test_the_agent_ends_with_the_recipe(tmp_path: Path) -> None:
    shell = 'read -r found < <(exec "$0" "$1" serve); echo "$found"'
    command = ["bash", "-c", shell, sys.executable, str(AGENT)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    folder = Path(found.stdout.strip())
    assert folder.name.startswith("rlcore-agent-")
    wait_until(lambda: not folder.exists())


@pytest.mark.ranks(1)
def test_two_steps_of_the_recipe_train_what_was_sampled(tmp_path: Path) -> None:
    model = runs.tiny_model(tmp_path / "model", "calc")
    command = [
        *("bash", str(RECIPES / "endpoint_tiny.sh"), "--run.dir", str(tmp_path / "runs")),
        *("--model.path", str(model), "--model.random_init", "--run.steps", "2"),
        *("--data.prompts_per_step", "2", "--rollout.samples_per_prompt", "2"),
        *("--data.num_val_prompts", "2", "--checkpoint.no_at_end", "--log.no_plot"),
        *("--algo.equal_reward_groups", "keep"),  # all are wrong
    ]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_", "LOCAL_"))}
    subprocess.run(command, env=env | {"PYTHON": sys.executable}, timeout=500, check=True)
    rows = runs.rows(tmp_path / "runs" / "endpoint_tiny")
    for step in (1, 2):
        assert rows[step]["env/turns"] >= 1 and rows[step]["env/failures/error"] == 0
        assert rows[step]["training/rollout_probs_diff_max"] < 1e-3

"""Tools called in the model's own format: a whole episode, its tokens, and what is refused."""

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rlcore.cli.builders.prompts import run_tokenizer
from rlcore.config.resolve import parse
from rlcore.envs import registry
from rlcore.envs.dialogue import Dialogue
from rlcore.envs.episode import EpisodeLimits, Transcript, play
from rlcore.envs.kind import ToolTurn, TurnCall
from rlcore.envs.pool import EnvError, EnvPool
from rlcore.envs.tools import Tools, ToolsConfig, tools_of
from rlcore.hf.tokenizer import Tokenizer, load_tokenizer
from rlcore.records import Prompt, Request, Sample, Sampling
from rlcore.utils.errors import ConfigError
from tests import kit

NATIVE = ToolsConfig(calls="native", tools=("calc",), workers=1)
END = "<|im_end|>"
TEMPLATES = kit.ROOT / "tests/contracts/templates"
SECTIONS = {"env": registry.config_class}


def call(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


def calc(expression: str) -> str:
    return call(f'{{"name": "calc", "arguments": {{"expression": "{expression}"}}}}')


TURNS = (
    f"I add.\n{calc('2 + 3')}\n{calc('1 / 0')}",
    call('{"name": "fly", "arguments": {}}'),
    call('{"name": "calc", "arguments": '),
    "It is 5.",
)


@pytest.fixture
def model(real_data: Path, tmp_path: Path) -> Path:
    """Qwen's tokenizer with the chat template of Qwen2.5."""
    folder = Path(shutil.copytree(real_data / "tokenizer_qwen", tmp_path / "qwen"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = (TEMPLATES / "qwen2_5.jinja").read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def tokenizer(model: Path) -> Tokenizer:
    found = load_tokenizer(model)
    found.show_tools(tools_of(NATIVE))
    return found


def dialogue(tokenizer: Tokenizer) -> Dialogue:
    return Dialogue(tokenizer, is_chat=True, tools=tools_of(NATIVE))


def episode(tokenizer: Tokenizer, turns: Sequence[str], most: int = 8) -> tuple[Transcript, str]:
    """Play an episode in which the policy takes these turns, with the environment in a process."""
    start = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": "2 + 3?"}]))
    so_far = Transcript("t0.0", np.array(start, np.int32))
    said = iter(turns)

    async def policy(request: Request) -> Sample:
        tokens = np.array(tokenizer.encode(next(said) + END), np.int32)
        return Sample(
            id=request.id,
            prompt=request.prompt,
            tokens=tokens,
            logps=np.full(len(tokens), -0.5, np.float32),
            versions=np.full(len(tokens), 3, np.int32),
            finish="stop",
        )

    async def run() -> str:
        pool = EnvPool("tools", NATIVE)
        try:
            return await play(
                so_far,
                await pool.open(),
                policy,
                dialogue(tokenizer),
                tokenizer.decode,
                Sampling(max_tokens=2000),
                EpisodeLimits(most, 0),
                prompt=Prompt(index=0, dataset="d", tokens=so_far.prompt),
                seed=0,
                name="t0.0",
            )
        finally:
            await pool.close()

    return so_far, asyncio.run(run())


def test_calls_are_made_and_answered_in_order_and_malformed_ones_with_their_reason(
    tokenizer: Tokenizer,
) -> None:
    so_far, finish = episode(tokenizer, TURNS)
    assert finish == "stop" and so_far.num_turns == 4 and so_far.text == "It is 5."
    assert so_far.num_malformed == 2
    assert so_far.numbers == {"calls": 2.0, "call_errors": 1.0}
    versions = np.array(so_far.versions)
    tokens = np.array(so_far.tokens)
    sampled = tokenizer.decode(tokens[versions == 3].tolist(), skip_special_tokens=False)
    assert sampled == "".join(turn + END for turn in TURNS)
    shown = tokenizer.decode(tokens[versions == -1].tolist(), skip_special_tokens=False)
    responses = shown.split("<tool_response>\n")[1:]
    assert [r.partition("\n</tool_response>")[0] for r in responses] == [
        "5",
        "error: float division by zero",
        "error: there is no tool fly; the tools are: calc",
        responses[3].partition("\n</tool_response>")[0],
    ]
    assert responses[3].startswith("error: ")


def test_an_episode_is_what_the_template_renders_at_once(tokenizer: Tokenizer) -> None:
    so_far, _ = episode(tokenizer, (TURNS[0], "It is 5."))
    calls = [
        {"type": "function", "function": {"name": "calc", "arguments": {"expression": e}}}
        for e in ("2 + 3", "1 / 0")
    ]
    chat = [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "I add.", "tool_calls": calls},
        {"role": "tool", "content": "5"},
        {"role": "tool", "content": "error: float division by zero"},
        {"role": "assistant", "content": "It is 5."},
    ]
    whole = tokenizer.encode(tokenizer.render_chat(chat, add_generation_prompt=False))
    tokens = [*so_far.prompt.tolist(), *so_far.tokens]
    assert tokens == whole[: len(tokens)] and len(whole) - len(tokens) <= 1  # a newline
    assert "calc" in tokenizer.decode(so_far.prompt.tolist())  # the template shows the tools


def test_a_turn_without_calls_ends_the_episode(tokenizer: Tokenizer) -> None:
    so_far, finish = episode(tokenizer, ("<think>\n\n</think>\n\n5",))
    assert (finish, so_far.num_turns, so_far.num_malformed) == ("stop", 1, 0)


def test_an_integer_beyond_64_bits_costs_its_call_alone(tokenizer: Tokenizer) -> None:
    huge = call(f'{{"name": "calc", "arguments": {{"expression": {2**64}}}}}')
    so_far, finish = episode(tokenizer, (huge + calc("2 + 3"), "It is 5."))
    assert (finish, so_far.num_malformed, so_far.numbers["calls"]) == ("stop", 1, 1.0)


def test_a_turn_that_cannot_be_sent_fails_its_episode() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]

    async def run() -> None:
        pool = EnvPool("tools", NATIVE)
        try:
            slot = await pool.open()
            await slot.reset(0, Prompt(index=0, dataset="d", tokens=np.ones(1, np.int32)), "t0.0")
            for value in (2**64, deep):
                turn = ToolTurn("", (TurnCall("calc", {"expression": value}),))
                with pytest.raises(EnvError, match="step cannot be sent: "):
                    await slot.step("", (), turn)
            assert (await slot.step("", (), ToolTurn("6", ()))).is_over
        finally:
            await pool.close()

    asyncio.run(run())


def test_the_environment_makes_all_calls_of_a_turn() -> None:
    env = Tools(NATIVE)
    env.reset()
    calls = tuple(TurnCall("calc", {"expression": e}) for e in ("2*3", "oops", "4^2"))
    results, _, is_over, _, info = env.step(ToolTurn("", (*calls, TurnCall("calc", {}))))
    assert (results[0], results[2], is_over) == ("6", "16", False)
    assert results[1].startswith("error: ") and results[3].startswith("error: ")
    assert info == {"calls": 4.0, "call_errors": 2.0}
    assert env.step(ToolTurn("", (), num_malformed=1))[:3] == ([], 0.0, False)
    assert env.step(ToolTurn("6", ()))[:3] == ("", 0.0, True)


@pytest.mark.parametrize(
    ("turn", "seen", "message"),
    [
        (TURNS[0], ["5"], "1 results for 2 calls: give one for each"),
        ("No call.", [], "no result for a turn without calls"),
    ],
)
def test_wrong_results_fail_the_episode(
    tokenizer: Tokenizer, turn: str, seen: list[str], message: str
) -> None:
    made = dialogue(tokenizer)
    tokens = tokenizer.encode(turn + END)
    parsed = made.parsed(tokens, np.zeros(1, np.int32))
    assert parsed is not None
    with pytest.raises(EnvError, match=message):
        made.answer(parsed, seen, tokens[-1])
    assert made.answer(parsed, "Go on.", tokens[-1]) == made.observation("Go on.", tokens[-1])


def test_a_run_shows_the_tools_or_says_why_it_cannot(model: Path, real_data: Path) -> None:
    def of(*keys: str, model: Path = model) -> Tokenizer:
        return run_tokenizer(parse(["--model.path", str(model), *keys], SECTIONS), ())

    native = "--env", "tools", "--env.calls", "native"
    shown = of(*native).render_chat([{"role": "user", "content": "?"}])
    assert "Evaluate an arithmetic expression." in shown and "Run a program" in shown
    assert "arithmetic" not in of("--env", "tools").render_chat([{"role": "user", "content": "?"}])
    with pytest.raises(ConfigError, match="--data.template none: --env tools shows tools by the"):
        of(*native, "--data.template", "none")
    with pytest.raises(ConfigError, match="writes no tool calls in a format that rlcore reads"):
        of(*native, model=real_data / "tokenizer_qwen")

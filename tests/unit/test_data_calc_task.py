"""The tiny tool task: a conversation is right, and its template is one that rlcore reads."""

import json
from pathlib import Path

import pytest

from rlcore.cli.tiny import write_tokenizer
from rlcore.config.schema import DataConfig
from rlcore.data import calc_task, conversations
from rlcore.data.calc_task import CHARS, END, WORDS, make
from rlcore.data.generated import SHARES, split_of
from rlcore.data.prompts import ChatTaskModule
from rlcore.envs.branches import Branches
from rlcore.envs.tools import ToolsConfig, calculate, tools_of
from rlcore.hf.tokenizer import Tokenizer, load_tokenizer
from rlcore.hf.tool_calls import family_of, parse

TOOLS = tools_of(ToolsConfig(calls="native", tools=("calc",)))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("calc")
    assert write_tokenizer("calc", folder) == len(CHARS) + len(WORDS) + 2
    found = load_tokenizer(folder)
    found.show_tools(TOOLS)
    return found


@pytest.mark.parametrize("split", SHARES)
def test_the_tool_gives_the_answer_and_splits_are_clean(split):
    counts, num_guesses = set(), 0
    for index in range(200):
        row = make(split, 3, index)
        assert int(calculate(row.prompt)) == int(row.answer)
        assert split_of(row.prompt) == split and row == make(split, 3, index)
        counts.add(sum(c in "+-" for c in row.prompt) + 1)
        asked, *turns = calc_task.conversation(row)
        assert asked == {"role": "user", "content": row.prompt}
        if len(turns) == 1:
            num_guesses += 1
            assert turns[0]["content"] != row.answer
            continue
        call, result, answer = turns
        arguments = json.loads(call["tool_calls"][0]["function"]["arguments"])
        assert arguments == {"expression": row.prompt}
        assert result["content"] == answer["content"] == row.answer
    assert counts == {2, 3} and 85 < num_guesses < 155


def test_characters_and_words_are_a_token_each(tokenizer):
    assert isinstance(calc_task, ChatTaskModule)
    ids = tokenizer.encode("<pad>" + END + CHARS + "".join(WORDS))
    assert ids == list(range(len(CHARS) + len(WORDS) + 2))
    assert tokenizer.eos_ids == (1,)
    assert tokenizer.defused("<|im_start|><tool_call>") == "< |im_start|><tool_call>"


def test_what_is_learned_is_what_the_endpoint_samples(tokenizer):
    rows = (make("train", 0, index) for index in range(99))
    row, chat = next((r, c) for r in rows if len(c := calc_task.conversation(r)) == 4)
    (made,) = conversations.demonstrations(
        {"question": chat}, DataConfig(template="chat"), tokenizer
    )
    text = tokenizer.decode(made.response, skip_special_tokens=False)
    call, _, answer = text.partition(END)
    (found,) = parse(family_of(tokenizer.chat_template), call, TOOLS).calls
    assert found.arguments == {"expression": row.prompt}
    branches = Branches(tokenizer, family="qwen", num_tokens=1 << 10, max_tokens=1 << 10)
    assert branches.begin(chat[:1], TOOLS).context.tolist() == made.prompt.tolist()
    assert answer.endswith(f"<tool_response>{row.answer}</tool_response>{END}\n"
                           f"<|im_start|>assistant\n{row.answer}{END}")  # fmt: skip
    learned = tokenizer.decode(made.response[made.learn], skip_special_tokens=False)
    assert learned == f"{call}{END}{row.answer}{END}"

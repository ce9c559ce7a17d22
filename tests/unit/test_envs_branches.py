"""Rows of the episodes of an outside harness: the trained tokens are the sampled ones."""

import copy
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from rlcore.envs.branches import Answer, Branches, EpisodeRow, Reuse, Turn
from rlcore.envs.chat_api import ApiError
from rlcore.envs.dialogue import Dialogue
from rlcore.envs.harness_env import sample_of
from rlcore.envs.turn_tree import EpisodeTurn, sampled_stretches, turns_of
from rlcore.hf.tokenizer import CHATML, Tokenizer, load_tokenizer, make_char_tokenizer
from rlcore.records import Finish, Sample
from rlcore.utils.errors import LimitError
from tests.contracts.record_tool_calls import wide
from tests.kit import ROOT
from tests.unit.test_hf_tool_calls import CALLS, TOOLS

TEMPLATES = ROOT / "tests" / "contracts" / "templates"


class Model(NamedTuple):
    """A chat template, its family, the tokens that end a turn, and reasoning as it is written."""

    template: str
    family: str
    ends: tuple[str, ...]
    thought: str = ""
    shows_tools: bool = True


QWEN, DEEPSEEK = ("<|im_end|>",), (wide("end of sentence"),)
QWEN_THOUGHT = "<think>\nhello ok\n</think>\n\n"
MODELS = [
    Model("qwen2_5", "qwen", QWEN),
    Model("qwen3", "qwen", QWEN, QWEN_THOUGHT),
    Model("qwen3_5_think", "qwen3_coder", QWEN, "hello ok\n</think>\n\n"),
    Model("glm4moe", "glm", ("<|user|>", "<|observation|>"), "\n<think>hello ok</think>\n"),
    Model("deepseekv3", "deepseek", DEEPSEEK, "hello ok\n</think>\n\n", shows_tools=False),
    Model("deepseek_v31_stand_in", "deepseek_v31", DEEPSEEK, shows_tools=False),
    Model("llama3_stand_in", "llama3", ("<|eot_id|>",)),
]
every_model = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.template)
SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"),
    *("[gMASK]", "<sop>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<bos>"),
    *map(wide, ("end of sentence", "User", "Assistant", "tool calls begin", "tool calls end")),
    *map(wide, ("tool call begin", "tool sep", "tool call end", "tool outputs begin")),
    *map(wide, ("tool outputs end", "tool output begin", "tool output end")),
]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
WORDS = ["hello", " ok", "grow", "name", "arguments", "assistant", "user", "tool", "\u010a\u010a"]


def make_tokenizer(folder: Path, source: str) -> Tokenizer:
    """Write a tokenizer of bytes and a few words, so that most texts have several spellings."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for word in WORDS:
        letters = word.replace(" ", "\u0120")
        for end in range(2, len(letters) + 1):
            if letters[:end] not in vocabulary:
                vocabulary[letters[:end]] = len(vocabulary)
                merges.append((letters[: end - 1], letters[end - 1]))
    backend = Backend(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, special=False) for token in ADDED])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings_ = {"bos_token": "<bos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    (folder / "chat_template.jinja").write_text(source)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    """Tokenizers with the templates; each has a child process, so they are made once."""
    made: dict[str, Tokenizer] = {}

    def of(template: str) -> Tokenizer:
        if template not in made:
            source = (TEMPLATES / f"{template}.jinja").read_text()
            made[template] = make_tokenizer(tmp_path_factory.mktemp(template), source)
        return made[template]

    return of


def make_branches(tokenizer: Tokenizer, family: str = "qwen", **changes: Any) -> Branches:
    return Branches(
        tokenizer, **{"family": family, "num_tokens": 1 << 20, "max_tokens": 1 << 20} | changes
    )


def make_sample(ids: Sequence[int], number: int, finish: Finish = "stop") -> Sample:
    """Return a sample whose log-probs and versions tell the request and the place."""
    return Sample(
        id="t0.0",
        prompt=np.zeros(0, np.int32),
        tokens=np.array(ids, np.int32),
        logps=-(number * 1024 + np.arange(len(ids), dtype=np.float32)) / 8 - 1,
        versions=np.full(len(ids), number, np.int32),
        finish=finish,
    )


# ---- the reference: all that was given to the engine, and all that it returned


@dataclass
class Call:
    """A request as the harness and the engine saw it."""

    turn: Turn
    context: list[int]
    tools: list[Any]
    asked: list[dict[str, Any]]
    conversation: list[tuple[dict[str, Any], bool]]
    """Plain messages, and whether each is a sampled answer; none of a text completion."""
    text: str | None = None
    """Text of context and answer, if text can continue it."""
    is_of_ids: bool = False
    kept: list[int] | None = None
    is_cancelled: bool = False


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return what of a message reaches a template."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    return {
        "role": message["role"],
        "content": content,
        "calls": calls,
        "reasoning": message.get("reasoning_content") or "",
    }


def clean(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with content as text, and without empty reasoning."""
    return [
        {k: v for k, v in m.items() if v or k != "reasoning_content"}
        | {"content": plain(m)["content"]}
        for m in messages
    ]


def is_answer(sent: dict[str, Any], sampled: dict[str, Any]) -> bool:
    values, theirs = (
        [(n, json.loads(a)) for n, a in message["calls"]] for message in (sent, sampled)
    )
    reasoning = sent["reasoning"].strip() in ("", sampled["reasoning"].strip())
    same = sent["role"] == "assistant" and sent["content"].strip() == sampled["content"].strip()
    return reasoning and same and values == theirs


def stands(call: Call, asked: list[dict[str, Any]]) -> bool:
    """Return whether a conversation that has ended is a beginning of the messages."""
    return len(call.conversation) <= len(asked) and all(
        is_answer(plain(sent), known) if sampled else plain(sent) == known
        for sent, (known, sampled) in zip(asked, call.conversation, strict=False)
    )


def check(rows: Sequence[EpisodeRow], calls: Sequence[Call]) -> None:
    """Compare the rows with the reference. The version of a token is the number of its request."""
    trained = set()
    for row in rows:
        assert row.tokens.dtype == row.versions.dtype == row.prompt.dtype == np.int32
        assert row.versions[0] >= 0 and row.versions[-1] >= 0
        ids = [*row.prompt.tolist(), *row.tokens.tolist()]
        at = len(row.prompt)
        for version, group in groupby(row.versions.tolist()):
            size = len(list(group))
            logps = row.logps[at - len(row.prompt) :][:size]
            if version < 0:
                assert not logps.any()
            else:
                call = calls[version]
                assert version not in trained  # once
                trained.add(version)
                assert ids[:at] == call.context and ids[at : at + size] == call.kept
                assert (logps == make_sample(ids[at : at + size], version).logps).all()
            at += size
    assert trained == {n for n, c in enumerate(calls) if c.kept is not None and not c.is_cancelled}


def defused(tokenizer: Tokenizer, value: Any) -> Any:
    text = tokenizer.defused(json.dumps(value, ensure_ascii=False))
    return json.loads(text)


class Harness:
    """A harness, the engine behind the endpoint, and the reference of both."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        reuse: Reuse,
        rng: random.Random,
        prompts: float = 0.2,
    ) -> None:
        """`prompts`: share of requests that are text completions."""
        self.prompts = prompts
        self.model, self.tokenizer, self.reuse, self.rng = model, tokenizer, reuse, rng
        self.branches = make_branches(tokenizer, model.family, reuse=reuse)
        self.calls: list[Call] = []
        self.seen: list[list[dict[str, Any]]] = [[{"role": "user", "content": "hello"}]]
        """Conversations that the harness may continue."""
        self.tools = TOOLS if model.shows_tools else []
        self.sends_reasoning = rng.random() < 0.5
        self.roles = self.draw(("user",), ("tool",), ("user", "tool"))

    def draw(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def is_rare(self, share: float = 0.15) -> bool:
        return self.rng.random() < share

    def pending(self) -> list[Call]:
        return [c for c in self.calls if c.kept is None and not c.is_cancelled]

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages of a request: a known conversation, continued or rewritten."""
        draw = self.draw
        base = copy.deepcopy(draw(*self.seen) if self.is_rare() else self.seen[-1])
        for _ in range(draw(0, 2) if self.is_rare() else 1):
            text = draw(
                "hello", " ok", "a tool ok", "\u4eac", "<|im_end|>" if self.is_rare() else ""
            )
            content = draw(text, text, [{"type": "text", "text": text}] * 2)
            base.append({"role": draw(*self.roles), "content": content})
        if not self.sends_reasoning:
            for message in base:
                message.pop("reasoning_content", None)
        if not self.is_rare(0.3):
            return base
        match draw("edit", "cut", "drop", "rewrite", "rewrite", "summary", "system"):
            case "edit":
                draw(*base)["content"] = draw("hello", "other")
            case "cut":
                del base[draw(*range(len(base))) :]
            case "drop":
                del base[draw(*range(len(base)))]
            case "summary":
                base = [{"role": "user", "content": f"summary of {len(base)}"}]
            case "system":
                base.insert(0, {"role": "system", "content": "ok"})
            case "rewrite":
                self.rewrite(base)
        return base

    def rewrite(self, messages: list[dict[str, Any]]) -> None:
        """Write messages as other programs do; only some changes are of meaning."""
        kind = self.draw("no reasoning", "other reasoning", "json", "none", "arguments", "strip")
        for message in messages:
            if kind == "no reasoning":
                message.pop("reasoning_content", None)
            elif kind == "other reasoning" and message.get("reasoning_content"):
                message["reasoning_content"] += "!"
            elif kind == "strip" and message["role"] == "assistant":
                message["content"] = plain(message)["content"].strip()
            elif kind == "none" and not message["content"]:
                message["content"] = None
            for call in message.get("tool_calls", ()):
                function = call["function"]
                values = json.loads(function["arguments"])
                if kind == "arguments":
                    values |= {"by": 7}
                if kind in ("json", "arguments"):
                    function["arguments"] = json.dumps(values, indent=1)

    def ended(self) -> list[Call]:
        return [c for c in self.calls if c.kept is not None and not c.is_cancelled]

    def begin(self) -> None:
        if self.is_rare(self.prompts):
            return self.begin_prompt()
        messages = self.messages()
        tools = self.draw(self.tools[:1], None) if self.is_rare(0.1) else self.tools
        before = self.branches.rows(), self.branches.counts
        try:
            turn = self.branches.begin(copy.deepcopy(messages), copy.deepcopy(tools))
        except ApiError as error:  # the template refuses the messages
            assert error.status == 400 and error.sentence
            assert len(self.branches.rows()) == len(before[0])
            assert self.branches.counts == before[1]
            return
        context = turn.context.tolist()
        asked = [plain(message) for message in messages]
        text = None
        if self.reuse == "keep":
            parent = self.expected(messages, tools or [], self.ended(), context)
            known = parent.conversation if parent else []
            asked_from = [(m, False) for m in asked[len(known) :]]
            conversation = [*known, *asked_from]
        else:
            conversation = [(m, False) for m in asked]
            text = self.whole(messages, tools)
            assert self.decode(context) == text
            assert context in self.continued(text, tools or [])
        self.calls.append(Call(turn, context, tools or [], messages, conversation, text))

    def begin_prompt(self) -> None:
        """Begin a text completion: a known text or known ids, continued, cut or whole."""
        draw, ended = self.draw, [c for c in self.ended() if not c.tools]
        more = draw("hello", "<|im_end|>ok", "\u4eac ok", "")
        cut = draw(None, None, None, -1)
        if draw(True, False):
            text = (draw("", *(c.text for c in ended if c.text)) + more)[:cut] or "a"
            turn = self.branches.begin(text)
            assert turn.context.tolist() in self.continued(text, [])
            self.calls.append(Call(turn, turn.context.tolist(), [], [], [], text))
            return
        known = [[*c.context, *(c.kept or [])] for c in ended if c.is_of_ids]
        ids = [*draw([], *known), *self.tokenizer.encode(more)][:cut] or [5]
        turn = self.branches.begin(tuple(ids))
        assert turn.context.tolist() == ids
        begun = len(turn.parent.context) + len(turn.parent.tokens) if turn.parent else 0
        assert begun == max((len(k) for k in known if ids[: len(k)] == k), default=0)
        self.calls.append(Call(turn, ids, [], [], [], is_of_ids=True))

    def continued(self, text: str, tools: list[Any]) -> list[list[int]]:
        """Return the contexts that a text may have."""
        fits = [
            (c.text, c)
            for c in self.ended()
            if c.tools == tools and c.text and text.startswith(c.text)
        ]
        longest = max((len(begun) for begun, _ in fits), default=0)
        rest = self.tokenizer.encode(text[longest:])
        best = [c for begun, c in fits if len(begun) == longest]
        return [[*c.context, *(c.kept or []), *rest] for c in best] or [rest]

    def expected(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any],
        ended: list[Call],
        context: list[int],
    ) -> Call | None:
        """Check the context of a request, and return the call that it continues."""
        fits = [c for c in ended if c.tools == tools and stands(c, messages)]
        most = max((len(c.conversation) for c in fits), default=0)
        if not most:
            assert context == self.tokenizer.encode(self.whole(messages, tools))
            return None
        dialogue, given = Dialogue(self.tokenizer, is_chat=True), defused(self.tokenizer, tools)
        new = defused(self.tokenizer, clean(messages[most:]))
        found = [
            c
            for c in fits
            if c.kept is not None
            and len(c.conversation) == most
            and context
            == [*c.context, *c.kept, *dialogue.appended(new, c.kept[-1], tools=given or None)]
        ]
        assert found
        return found[0]

    def whole(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        given = defused(self.tokenizer, tools or []) or None
        return self.tokenizer.render_chat(defused(self.tokenizer, clean(messages)), tools=given)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def end(self, call: Call) -> None:
        draw, number = self.draw, self.calls.index(call)
        made = CALLS[self.model.family]
        odd = draw("", "<think>\nhello ok\n</think>\n\n", "hello\n</think>\n\n", "<think>ok")
        odd_calls = draw(made * 2, made[:-3], "<tool_call>", made + " ok")
        pieces = [
            odd if self.is_rare() else draw(self.model.thought, ""),
            draw("hello", " ok ok", "\u4eac", "", "hello\n"),
            odd_calls if self.is_rare() else draw(made, ""),
        ]
        ids: list[int] = []
        for piece in pieces:
            ids += self.by_letters(piece) if self.is_rare(0.3) else self.tokenizer.encode(piece)
        if self.is_rare():
            ids += [self.rng.randrange(300) for _ in range(2)]
        end = "" if self.is_rare() else draw(*self.model.ends)
        ids += self.tokenizer.encode(end)
        ids = ids or self.tokenizer.encode("a")
        stops = draw(("ok",), ("o ok", "llo"), ("",)) if self.is_rare() else ()
        sample = make_sample(ids, number, "stop" if end else "length")
        answer = self.branches.end(call.turn, sample, stops)
        call.kept = ids[: answer.num_tokens]
        self.check_stop(ids, stops, answer.num_tokens)
        if call.text is not None:
            call.text += self.decode(call.kept)
        shown = copy.deepcopy(answer.message)
        if not call.asked:
            assert shown.keys() == {"role", "content"} and answer.finish_reason != "tool_calls"
            assert self.decode(call.kept).startswith(shown["content"])
            return
        call.conversation = [*call.conversation, (plain(shown), True)]
        self.seen.append([*call.asked, shown])

    def by_letters(self, text: str) -> list[int]:
        return [i for letter in text for i in self.tokenizer.encode(letter)]

    def check_stop(self, ids: list[int], stops: Sequence[str], size: int) -> None:
        ends = [
            n
            for n in range(1, len(ids) + 1)
            if any(stop and stop in self.decode(ids[:n]) for stop in stops)
        ]
        assert size == (ends[0] if ends else len(ids))

    def cancel(self, call: Call) -> None:
        used = any(c.turn.parent is call.turn for c in self.calls if not c.is_cancelled)
        self.branches.cancel(call.turn)
        call.is_cancelled = not used


@every_model
@pytest.mark.parametrize("reuse", ["keep", "template"])
@settings(max_examples=12)
@given(seed=st.integers(0, 1 << 32), num_steps=st.integers(10, 60))
def test_trained_tokens_are_the_sampled_ones_in_their_context_and_once(
    model: Model, reuse: Reuse, tokenizer: Callable[[str], Tokenizer], seed: int, num_steps: int
) -> None:
    harness = Harness(model, tokenizer(model.template), reuse, random.Random(seed))
    for _ in range(num_steps):
        pending = harness.pending()
        if harness.calls and harness.is_rare(0.05):
            harness.cancel(harness.draw(*harness.calls))
        elif pending and (len(pending) == 3 or not harness.is_rare()):
            harness.end(harness.draw(*pending))
        else:
            harness.begin()
        check(harness.branches.rows(), harness.calls)
    ended = [c.turn for c in harness.calls if c.kept is not None and not c.is_cancelled]
    continued = {id(turn.parent) for turn in ended if turn.parent is not None}
    assert len(harness.branches.rows()) == len(ended) - len(continued)
    for call in harness.pending():
        harness.branches.cancel(call.turn)
        call.is_cancelled = True
    counts = harness.branches.counts
    assert counts.branches == len(harness.branches.rows())
    assert counts.turns == sum(not c.is_cancelled for c in harness.calls)
    assert counts.reused_tokens + counts.new_tokens == sum(len(c.context) for c in harness.calls)


# ---- one behaviour each

USER = {"role": "user", "content": "hello"}
QWEN3 = MODELS[1]
THOUGHT = "<think>\nhm\n</think>\n\n"
CALL = CALLS["qwen"]


def say(
    branches: Branches,
    tokenizer: Tokenizer,
    turn: Turn,
    text: str,
    stop_texts: Sequence[str] = (),
    finish: Finish = "stop",
) -> Answer:
    """End a turn with a text."""
    sample = make_sample(tokenizer.encode(text), turn.number, finish)
    return branches.end(turn, sample, stop_texts)


@pytest.fixture
def qwen3(tokenizer: Callable[[str], Tokenizer]) -> Tokenizer:
    return tokenizer("qwen3")


@every_model
def test_a_loop_of_tools_is_one_row_and_its_ids_are_those_of_a_whole_rendering(
    model: Model, tokenizer: Callable[[str], Tokenizer]
) -> None:
    own, tools = tokenizer(model.template), TOOLS if model.shows_tools else []
    branches = make_branches(own, model.family)
    first = branches.begin([USER], tools)
    end = "<|observation|>" if model.family == "glm" else model.ends[0]
    text = CALLS[model.family] if model.shows_tools else "hello"
    answer = say(branches, own, first, f"{model.thought}{text}{end}")
    assert answer.finish_reason == ("tool_calls" if model.shows_tools else "stop")
    asked = [USER, answer.message, {"role": "tool", "content": "ok"}]
    second = branches.begin(asked, tools)
    # DeepSeek-V3 drops reasoning; the context keeps it
    assert (branches.changed_tokens(second, asked) > 0) == (model.template == "deepseekv3")
    say(branches, own, second, f"ok{end}")
    (row,) = branches.rows()
    assert row.prompt.tolist() == first.context.tolist()
    assert branches.counts.branches == 1
    assert branches.counts.reused_tokens == len(first.context) + len(first.tokens)


@pytest.mark.parametrize(("reuse", "num_rows"), [("keep", 1), ("template", 2)])
def test_a_harness_that_drops_reasoning_continues_its_row_or_begins_another(
    qwen3: Tokenizer, reuse: Reuse, num_rows: int
) -> None:
    branches = make_branches(qwen3, reuse=reuse)
    first = branches.begin([USER])
    answer = say(branches, qwen3, first, THOUGHT + "ok<|im_end|>")
    assert answer.message == {"role": "assistant", "content": "ok", "reasoning_content": "hm"}
    asked = [USER, {"role": "assistant", "content": "ok"}, USER]
    second = branches.begin(asked)
    say(branches, qwen3, second, "ok<|im_end|>")
    rows = branches.rows()
    assert len(rows) == num_rows
    assert (branches.changed_tokens(second, asked) > 0) == (reuse == "keep")
    assert ("hm" in qwen3.decode(second.context)) == (reuse == "keep")
    assert [sum(row.versions >= 0) for row in rows] == (
        [len(first.tokens) + len(second.tokens)] if num_rows == 1 else [len(first.tokens), 3]
    )


def test_reasoning_that_was_rewritten_begins_a_row(qwen3: Tokenizer) -> None:
    branches = make_branches(qwen3)
    answer = say(branches, qwen3, branches.begin([USER]), THOUGHT + "ok<|im_end|>")
    edited = answer.message | {"reasoning_content": "other"}
    assert branches.begin([USER, edited, USER]).parent is None
    spaced = answer.message | {"reasoning_content": " hm\n", "content": "ok "}
    assert branches.begin([USER, spaced, USER]).parent
    assert branches.begin([USER, answer.message | {"reasoning_content": ""}, USER]).parent


def test_parallel_and_repeated_requests_are_rows_with_one_beginning(qwen3: Tokenizer) -> None:
    branches = make_branches(qwen3)
    root = branches.begin([USER])
    answer = say(branches, qwen3, root, "ok<|im_end|>")
    asked = [USER, answer.message, USER]
    turns = [branches.begin(asked) for _ in range(3)]
    for turn in reversed(turns):
        say(branches, qwen3, turn, "hello<|im_end|>")
    assert all(turn.context.tolist() == turns[0].context.tolist() for turn in turns)
    assert branches.counts.new_tokens == len(turns[0].context) - len(root.tokens)  # once each
    rows = branches.rows()
    assert [row.prompt.tolist() for row in rows] == [
        root.context.tolist(),
        *[turns[0].context.tolist()] * 2,
    ]
    assert [set(row.versions.tolist()) for row in rows] == [{0, -1, 1}, {2}, {3}]


def test_a_cancelled_turn_leaves_no_trace(qwen3: Tokenizer) -> None:
    branches = make_branches(qwen3)
    answer = say(branches, qwen3, branches.begin([USER]), "ok<|im_end|>")
    asked = [USER, answer.message, USER]
    lost, unseen, kept = (branches.begin(asked) for _ in range(3))
    say(branches, qwen3, unseen, "hello<|im_end|>")
    for turn in (lost, unseen, lost):
        branches.cancel(turn)
    last = say(branches, qwen3, kept, "hello<|im_end|>")
    (row,) = branches.rows()
    assert set(row.versions.tolist()) == {0, -1, kept.number} and branches.counts.turns == 2
    branches.begin([*asked, last.message, USER])
    branches.cancel(kept)  # it is continued
    assert len(branches.rows()[0].tokens) == len(row.tokens)
    for turn in (lost, kept):
        with pytest.raises(ValueError, match="has ended or was cancelled"):
            say(branches, qwen3, turn, "ok")
    first = make_branches(qwen3)
    first.cancel(first.begin([USER], TOOLS))
    assert first.counts.branches == 0 and first.begin([USER], TOOLS).parent is None


def test_a_request_with_other_tools_is_rendered_whole(qwen3: Tokenizer) -> None:
    branches = make_branches(qwen3)
    answer = say(branches, qwen3, branches.begin([USER], TOOLS), "ok<|im_end|>")
    asked = [USER, answer.message, USER]
    other = branches.begin(asked, TOOLS[:1])
    assert other.parent is None and branches.changed_tokens(other, asked) == 0
    assert branches.begin(asked, copy.deepcopy(TOOLS)).parent is not None


def rewritten(**changes: Any) -> dict[str, Any]:
    function = {"name": "grow", "arguments": '{"some": 1.0, "by": 1}'} | changes
    return {"role": "assistant", "tool_calls": [{"id": "call_0_0", "function": function}]}


@pytest.mark.parametrize(
    ("message", "is_same"),
    [
        (rewritten(), True),
        (rewritten(arguments='{"by":1,"some":1}'), True),  # as JavaScript writes it
        (rewritten(arguments={"by": 1, "some": 1}), True),
        (rewritten() | {"content": "", "refusal": None}, True),
        (rewritten() | {"content": []}, True),
        (rewritten(arguments='{"by":1,"some":true}'), False),
        (rewritten(arguments='{"by":1}'), False),
        (rewritten(name="stop"), False),
        (rewritten() | {"content": "ok"}, False),
        (rewritten() | {"role": "user"}, False),
        ({"role": "assistant", "content": ""}, False),
    ],
)
def test_an_answer_is_known_by_its_visible_values(
    qwen3: Tokenizer, message: dict[str, Any], is_same: bool
) -> None:
    branches = make_branches(qwen3)
    text = CALL.replace('{"by": 1}', '{"by": 1, "some": 1.0}')
    answer = say(branches, qwen3, branches.begin([USER], TOOLS), text + "<|im_end|>")
    assert answer.finish_reason == "tool_calls"
    answer.message.clear()  # it is the caller's
    asked = [USER, message, {"role": "tool", "content": "ok"}]
    assert (branches.begin(asked, TOOLS).parent is not None) == is_same
    assert (branches.begin([USER, message], TOOLS).asked == []) == is_same  # to be continued


def test_ids_and_reasoning_decide_between_equal_answers(qwen3: Tokenizer) -> None:
    branches = make_branches(qwen3)
    turns = [branches.begin([USER], TOOLS) for _ in range(3)]
    thoughts = [THOUGHT, THOUGHT.replace("hm", "ok"), ""]
    said = [
        say(branches, qwen3, turn, thought + CALL + "<|im_end|>").message
        for turn, thought in zip(turns, thoughts, strict=True)
    ]
    for turn, message in reversed([*zip(turns, said, strict=True)]):
        assert branches.begin([USER, message, USER], TOOLS).parent is turn
    unnamed = copy.deepcopy(said[0])
    unnamed["tool_calls"][0]["id"] = unnamed["reasoning_content"] = ""
    assert branches.begin([USER, unnamed, USER], TOOLS).parent is turns[0]  # all are continued
    branches = make_branches(qwen3)
    turns = [branches.begin([USER]) for _ in range(2)]
    said = [say(branches, qwen3, turn, "ok<|im_end|>").message for turn in turns]
    parents = [branches.begin([USER, said[0], USER]).parent for _ in range(2)]
    assert parents == turns  # the second continues the one without a child


def test_the_longest_conversation_is_continued_and_of_equal_ones_that_of_the_ids(
    qwen3: Tokenizer,
) -> None:
    branches = make_branches(qwen3)
    said, children = [], []
    for turn in [branches.begin([USER], TOOLS) for _ in range(3)]:
        said.append(say(branches, qwen3, turn, CALL + "<|im_end|>").message)
    for message in said[:2]:
        children.append(branches.begin([USER, message, USER], TOOLS))
        say(branches, qwen3, children[-1], THOUGHT + "ok<|im_end|>")
    last = {"role": "assistant", "content": "ok"}
    assert branches.begin([USER, said[1], USER, last, USER], TOOLS).parent is children[1]
    longest = branches.begin([USER, said[2], USER, last, USER], TOOLS)
    assert longest.parent is children[0] and len(longest.asked) == 1


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_an_answer_ends_with_the_token_that_completes_a_stop_text(
    qwen3: Tokenizer, finish: Finish
) -> None:
    branches = make_branches(qwen3)
    turn = branches.begin([USER])
    answer = say(branches, qwen3, turn, "a hello ok ok", ("never", "lo o", ""), finish)
    assert answer.message["content"] == "a hel" and answer.finish_reason == "stop"
    assert qwen3.decode(turn.tokens) == "a hello ok"  # the token " ok" completes "lo o"
    assert answer.num_tokens == len(turn.tokens) == 4
    (row,) = branches.rows()
    assert row.tokens.tolist() == turn.tokens.tolist() and row.finish == "stop"
    following = branches.begin([USER, answer.message, USER])
    begun = [*turn.context, *turn.tokens, qwen3.token_id("<|im_end|>")]
    assert following.context[: len(begun)].tolist() == begun  # the template ends the turn
    whole = say(branches, qwen3, following, "a hello", ("lo",), finish)
    assert whole.finish_reason == "stop" and whole.message["content"] == "a hel"
    both = say(branches, qwen3, branches.begin([USER]), "a hello ok", ("o ok", "hello o"), finish)
    assert both.message["content"] == "a "  # one token completes both


def test_an_answer_at_the_limit_has_its_finish_reason(qwen3: Tokenizer) -> None:
    branches = make_branches(qwen3)
    turn = branches.begin([USER], TOOLS)
    assert say(branches, qwen3, turn, CALL, (), "length").finish_reason == "length"
    assert branches.rows()[0].finish == "length"
    branches = make_branches(qwen3)
    answer = say(branches, qwen3, branches.begin([USER]), "ok<|im_end|>")
    say(branches, qwen3, branches.begin([USER, answer.message, USER]), "ok", (), "length")
    assert [row.finish for row in branches.rows()] == ["length"]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("ok\n" + CALL[:-3], "ok" + CALL[:-3]),
        (CALL + " ok", " ok"),
        (THOUGHT[:-12] + CALL, ""),  # within reasoning
    ],
)
def test_a_harness_sees_text_that_is_no_call_and_can_continue_it(
    qwen3: Tokenizer, text: str, content: str
) -> None:
    branches = make_branches(qwen3)
    answer = say(branches, qwen3, branches.begin([USER], TOOLS), text + "<|im_end|>")
    assert answer.message["content"] == content
    assert branches.begin([USER, answer.message, USER], TOOLS).parent is not None


def test_reasoning_that_the_prompt_opens_is_no_content(
    tokenizer: Callable[[str], Tokenizer],
) -> None:
    own = tokenizer("qwen3_5_think")
    branches = make_branches(own, "qwen3_coder")
    answer = say(branches, own, branches.begin([USER]), "hm\n</think>\n\nok<|im_end|>")
    assert answer.message == {"role": "assistant", "content": "ok", "reasoning_content": "hm"}


def test_a_text_completion_is_continued_by_text_that_has_its_end_again(tmp_path: Path) -> None:
    own = make_char_tokenizer(tmp_path, "".join(map(chr, range(10, 127))))
    branches = make_branches(own)
    first = branches.begin("<eos>hello:")
    assert first.context.tolist() == [own.eos_ids[0], *own.encode("hello:")]
    answer = say(branches, own, first, CALL + "<eos>")
    assert answer.message == {"role": "assistant", "content": CALL}  # not parsed, without its end
    assert answer.finish_reason == "stop"
    begun = [*first.context, *first.tokens]
    second = branches.begin(f"<eos>hello:{CALL}<eos>ok")
    assert second.context.tolist() == [*begun, *own.encode("ok")]
    say(branches, own, second, "ok")
    other = branches.begin(f"<eos>hello:{CALL}ok")
    say(branches, own, other, "ok")
    assert [row.prompt.tolist() for row in branches.rows()] == [
        first.context.tolist(),
        other.context.tolist(),
    ]
    assert other.context.tolist() == own.encode(f"<eos>hello:{CALL}ok")


def test_ids_are_continued_by_ids_and_their_spelling_stands(qwen3: Tokenizer) -> None:
    branches = make_branches(qwen3)
    letters = [i for letter in "hello" for i in qwen3.encode(letter)]
    first = branches.begin(tuple(letters))
    say(branches, qwen3, first, " ok")
    begun = [*letters, *first.tokens.tolist()]
    second = branches.begin((*begun, 7))
    assert second.parent is first and second.context.tolist() == [*begun, 7]
    same = branches.begin(tuple(begun))
    assert same.parent is first and same.context.tolist() == begun  # nothing is between them
    assert branches.begin(tuple(qwen3.encode("hello ok"))).parent is None
    assert branches.begin("hello ok").parent is None
    assert branches.counts.new_tokens == len(letters) + 1 + 2 * 2
    answer = say(branches, qwen3, same, THOUGHT + "ok")
    assert answer.message == {"role": "assistant", "content": THOUGHT + "ok"}  # not parsed


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "the request has no tokens"),
        ((), "the request has no tokens"),
        ((3, -1), "the request has token -1, but the model has only 1048576"),
        ((1 << 20,), "the request has token 1048576"),
        ((5,) * (1 << 20), "maximum context length is 1048576 tokens, but the request has"),
    ],
    ids=["text", "ids", "negative", "unknown", "long"],
)
def test_a_prompt_that_cannot_be_continued_is_refused(
    qwen3: Tokenizer, prompt: Any, words: str
) -> None:
    branches = make_branches(qwen3)
    with pytest.raises(ApiError, match=words) as refused:
        branches.begin(prompt)
    assert refused.value.status == 400 and branches.counts == (0, 0, 0, 0)


@pytest.mark.parametrize(("reuse", "is_continued"), [("keep", False), ("template", True)])
def test_text_continues_a_chat_if_text_decides(
    qwen3: Tokenizer, reuse: Reuse, is_continued: bool
) -> None:
    branches = make_branches(qwen3, reuse=reuse)
    chat = branches.begin([USER])
    say(branches, qwen3, chat, CALL + "<|im_end|>")
    text = qwen3.decode([*chat.context, *chat.tokens], False) + "ok"
    assert (branches.begin(text).parent is chat) == is_continued


def test_without_a_format_of_calls_nothing_is_a_call_and_tools_are_refused(
    qwen3: Tokenizer, tmp_path: Path
) -> None:
    own = make_tokenizer(tmp_path, CHATML)
    branches = make_branches(own, "")
    answer = say(branches, own, branches.begin([USER]), "ok\n" + CALL + "<|im_end|>")
    assert answer.message["content"] == "ok\n" + CALL + "<|im_end|>"
    assert answer.finish_reason == "stop"
    assert branches.begin([USER, answer.message, USER]).parent is not None
    before = branches.counts
    with pytest.raises(ApiError, match="writes no tool calls in a format that rlcore reads") as no:
        branches.begin([USER], TOOLS)
    assert no.value.status == 400 and branches.counts == before


def test_a_token_that_ends_a_response_is_not_shown(tmp_path: Path) -> None:
    own = make_char_tokenizer(tmp_path, "".join(map(chr, range(10, 127))))
    branches = make_branches(own)
    turn = branches.begin([USER])
    ids = [*own.encode("ok"), own.eos_ids[0]]
    answer = branches.end(turn, make_sample(ids, 0))
    assert answer.message["content"] == "ok" and answer.num_tokens == 3
    assert branches.rows()[0].tokens.tolist() == ids


def test_an_answer_of_no_tokens_is_in_no_row(qwen3: Tokenizer) -> None:
    branches = make_branches(qwen3)
    turn = branches.begin([USER])
    answer = branches.end(turn, make_sample([], 0))
    assert not branches.rows() and answer.num_tokens == 0
    following = branches.begin([USER, answer.message, USER])
    say(branches, qwen3, following, "ok<|im_end|>")
    (row,) = branches.rows()
    assert row.prompt.tolist() == following.context.tolist()


def test_special_tokens_in_a_request_are_plain_words(qwen3: Tokenizer) -> None:
    branches = make_branches(qwen3)
    evil = "<|im_end|>"
    tool = {"name": evil, "parameters": {evil: [evil]}}
    plain_turn, odd = branches.begin([USER], [{"name": "a"}]), branches.begin([USER], [tool])
    end = qwen3.token_id(evil)
    assert plain_turn.context.tolist().count(end) == odd.context.tolist().count(end) == 2
    answer = say(branches, qwen3, odd, "ok" + evil)
    asked = [USER, answer.message, {"role": "tool", "content": evil}]
    assert branches.begin(asked, [tool]).context.tolist().count(end) == 4


def test_a_branch_or_token_too_many_is_refused(qwen3: Tokenizer) -> None:
    room = len(make_branches(qwen3).begin([USER]).context) + 1
    branches = make_branches(qwen3, max_branches=2, max_tokens=room)
    turn, other = branches.begin([USER]), branches.begin([USER])
    assert branches.room(turn) == 1
    with pytest.raises(ApiError, match="has 2 branches, the most it may have") as refused:
        branches.begin([USER])
    assert refused.value.status == 400 and refused.value.code is None
    branches.cancel(other)
    assert branches.begin([USER])
    answer = say(branches, qwen3, turn, "a")
    with pytest.raises(ApiError, match="maximum context length is") as refused:
        branches.begin([USER, answer.message, USER])
    assert refused.value.code == "context_length_exceeded" and branches.counts.turns == 2
    long = {"role": "user", "content": "ab" * 60_000}
    for asked in ([long], long["content"]):
        with pytest.raises(ApiError, match="maximum context length is"):
            branches.begin(asked)
    with pytest.raises(ApiError, match="maximum context length is"):
        make_branches(qwen3, max_tokens=room - 1).begin([USER])
    linear = make_branches(qwen3, max_branches=1)
    answer = say(linear, qwen3, linear.begin([USER]), "ok<|im_end|>")
    assert linear.begin([USER, answer.message, USER])  # it is of the same row
    assert linear.counts.branches == 1
    with pytest.raises(ApiError, match="has 1 branches"):
        linear.begin([USER, answer.message, USER])


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def called(call: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("messages", "tools", "words"),
    [
        ([], None, "messages: is empty"),
        (["hello"], None, r"messages\[0\]: must be an object with a role of system"),
        ([{"role": "bot"}], None, r"messages\[0\]: must be an object with a role of system"),
        ([USER, {"role": "user", "content": 3}], None, r"messages\[1\]: content must be text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], None, "content must be text"),
        ([called("grow")], None, "a tool call must have a function with a name"),
        ([{"role": "assistant", "tool_calls": 3}], None, "tool_calls must be a list"),
        ([called({"function": {"name": "f", "arguments": "{"}})], None, "are not JSON"),
        ([called({"function": {"name": "f", "arguments": [1]}})], None, "not a JSON object"),
        ([USER], [{"type": "function"}], "tools: tool .* has no name"),
        ([USER], ["grow"], "tools: "),
        ([{"role": "user", "content": "\ud800"}], None, "chat template"),
        pytest.param([USER], [{"name": "f", "parameters": nested(5000)}], "recursion", id="deep"),
    ],
)
def test_an_invalid_request_is_refused_and_changes_nothing(
    qwen3: Tokenizer, messages: Any, tools: Any, words: str
) -> None:
    branches = make_branches(qwen3)
    with pytest.raises(ApiError, match=words) as refused:
        branches.begin(messages, tools)
    assert refused.value.status == 400 and branches.counts == (0, 0, 0, 0)


def test_a_template_over_its_limits_is_no_error_of_the_request(
    qwen3: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def render_chat(*args: Any, **variables: Any) -> str:
        raise LimitError("too slow")

    monkeypatch.setattr(qwen3, "render_chat", render_chat)
    with pytest.raises(LimitError):
        make_branches(qwen3).begin([USER])


def test_names_and_ids_of_messages_reach_the_template(tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.name }}.{{ m.tool_call_id }}.{{ m.content }};{% endfor %}"
    own = make_tokenizer(tmp_path, source)
    branches = make_branches(own)
    named = USER | {"name": "a", "tool_call_id": "b", "other": "c"}
    turn = branches.begin([named])
    assert own.decode(turn.context) == "a.b.hello;"
    answer = say(branches, own, turn, "ok")
    assert branches.begin([named | {"other": "d"}, answer.message, USER]).parent is turn
    for key in ("name", "tool_call_id"):
        assert branches.begin([named | {key: "d"}, answer.message, USER]).parent is None


def test_arguments_may_be_missing_or_an_object(qwen3: Tokenizer) -> None:
    branches = make_branches(qwen3)
    for value, text in (({"name": "\u4eac"}, '{"name": "\u4eac"}'), (None, "{}")):
        context, same = (
            branches.begin([USER, called({"function": {"name": "grow", "arguments": a}}), USER])
            for a in (value, text)
        )
        assert context.context.tolist() == same.context.tolist()
        assert text in qwen3.decode(context.context)


def test_an_answer_whose_arguments_were_broken_is_refused(qwen3: Tokenizer) -> None:
    branches = make_branches(qwen3)
    say(branches, qwen3, branches.begin([USER], TOOLS), CALL + "<|im_end|>")
    with pytest.raises(ApiError, match="are not JSON"):
        branches.begin([USER, rewritten(arguments="{"), USER], TOOLS)


def test_new_messages_are_rendered_with_the_tools(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}{% if loop.last and tools %}[{{ tools[0].name }}]{% endif %}"
        "<|user|>{{ m.content }}{% endfor %}"
    )
    own = make_tokenizer(tmp_path, source)
    branches = make_branches(own)
    turn = branches.begin([USER], [{"name": "grow"}])
    answer = say(branches, own, turn, "ok")
    second = branches.begin([USER, answer.message, USER], [{"name": "grow"}])
    assert own.decode(second.context, False) == "[grow]<|user|>hellook[grow]<|user|>hello"


def test_tokens_that_the_model_does_not_have_are_refused(qwen3: Tokenizer) -> None:
    branches = make_branches(qwen3, num_tokens=qwen3.token_id("<|im_end|>"))
    with pytest.raises(ApiError, match="the request has token .* the model has only"):
        branches.begin([USER])


def test_other_spellings_are_found_by_a_whole_rendering(qwen3: Tokenizer) -> None:
    branches = make_branches(qwen3)
    turn = branches.begin([USER])
    ids = [*(i for letter in "hello" for i in qwen3.encode(letter)), *qwen3.encode("<|im_end|>")]
    answer = branches.end(turn, make_sample(ids, 0))
    asked = [USER, answer.message, USER]
    second = branches.begin(asked)
    shared = len(
        qwen3.encode("<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    )
    assert branches.changed_tokens(turn, [USER]) == 0
    assert branches.changed_tokens(second, asked) == 5 + shared


def test_variables_reach_the_template(qwen3: Tokenizer) -> None:
    for reuse in ("keep", "template"):
        branches = make_branches(qwen3, reuse=reuse, variables={"enable_thinking": False})
        turn = branches.begin([USER])
        answer = say(branches, qwen3, turn, "ok<|im_end|>")
        second = branches.begin([USER, answer.message, USER])
        for one in (turn, second):
            assert qwen3.decode(one.context).endswith("<think>\n\n</think>\n\n")


def test_rows_of_qwen_are_those_of_a_whole_rendering(real_data: Path) -> None:
    own = load_tokenizer(real_data / "tokenizer_qwen")
    branches = make_branches(own)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You walk."}, USER]
    for text in ("Left, then right.", "It is 3 \u00d7 4."):
        turn = branches.begin(messages)
        answer = say(branches, own, turn, text + "<|im_end|>")
        assert branches.changed_tokens(turn, messages) == 0
        messages = [*messages, answer.message, {"role": "user", "content": "Go on."}]
    (row,) = branches.rows()
    text = own.decode(row.tokens, skip_special_tokens=False)
    assert text.startswith("Left, then right.<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>")


# ---- the tree of turns, as the log of rollouts has it


def path_of(turns: Sequence[EpisodeTurn], number: int) -> list[EpisodeTurn]:
    """Return a turn and those before it, the first one first."""
    path = [turns[number]]
    while path[0].parent >= 0:
        path.insert(0, turns[path[0].parent])
    return path


def shown_context(turns: Sequence[EpisodeTurn], number: int) -> list[tuple[str, str]]:
    """Return every message that a turn's request showed. `turn.same` names an earlier turn and the
    number of messages that both begin with; `turn.context` has the messages after these."""
    turn = turns[number]
    like, count = turn.same
    return [*(shown_context(turns, like)[:count] if count else []), *turn.context]


@every_model
@settings(max_examples=12)
@given(seed=st.integers(0, 1 << 32))
def test_the_tree_has_every_turn_once_below_the_one_that_it_continues(
    model: Model, tokenizer: Callable[[str], Tokenizer], seed: int
) -> None:
    # A text completion may go on without a context in between, and the two turns are then one.
    rng = random.Random(seed)
    harness = Harness(model, tokenizer(model.template), "keep", rng, prompts=0.0)
    for _ in range(30):
        pending = harness.pending()
        if pending and not harness.is_rare():
            harness.end(harness.draw(*pending))
        else:
            harness.begin()
    rows, sample = harness.branches.rows(), sample_of(harness.branches, "t0.0")
    turns = turns_of(sample, harness.tokenizer, np.zeros(0, np.int32))
    numbers = [int(rows[row].versions[begin]) for row, begin, _ in sampled_stretches(sample)]
    assert sorted(numbers) == [n for n, c in enumerate(harness.calls) if c.kept is not None]
    for k, (turn, number) in enumerate(zip(turns, numbers, strict=True)):
        call, (*before, _) = harness.calls[number], path_of(turns, k)
        assert "".join(text for _, text in turn.sampled) == harness.decode(call.kept or [])
        assert turn.num_tokens == len(call.kept or [])
        sizes = sum(t.num_context + t.num_tokens for t in before) + turn.num_context
        assert sizes == len(call.context) and harness.calls[numbers[k]].turn is call.turn
        ended = [c for c in harness.calls if c.kept is not None]
        starts = [[*c.context, *c.kept] for c in ended if c.kept is not None]
        fits = [len(s) for s in starts if call.context[: len(s)] == s]
        assert sizes - turn.num_context == max(fits, default=0)
        begun = harness.decode(call.context[sizes - turn.num_context :])
        assert all(text in begun for _, text in shown_context(turns, k))


def test_equal_messages_of_parallel_requests_are_in_the_tree_once(
    tokenizer: Callable[[str], Tokenizer],
) -> None:
    qwen = tokenizer("qwen2_5")
    branches = make_branches(qwen)
    system = {"role": "system", "content": "Be brief."}
    answers = []
    for i, asked in enumerate(["hello", "hello", "ok"]):
        turn = branches.begin([system, {"role": "user", "content": asked}], TOOLS)
        text = CALLS["qwen"] if i else "hello"
        made = branches.end(turn, make_sample(qwen.encode(text + "<|im_end|>"), i))
        answers.append(made.message)
    more = [system, {"role": "user", "content": "hello"}, answers[0]]
    turn = branches.begin([*more, {"role": "tool", "content": "Noon."}], TOOLS)
    branches.end(turn, make_sample(qwen.encode("ok"), 3))
    sample = sample_of(branches, "t0.0")
    one, two, three, four = turns_of(sample, qwen, np.zeros(0, np.int32))
    assert [role for role, _ in one.context] == ["system", "user"]
    assert one.context[0][1].startswith("Be brief.") and one.context[1][1] == "hello"
    assert (two.row, two.parent) == (0, 0) and two.sampled == [(False, "ok")]
    assert two.context == [("tool", "<tool_response>\nNoon.\n</tool_response>")]
    assert (three.row, three.parent, three.same, three.context) == (1, -1, (0, 2), [])
    assert three.sampled == [(True, CALLS["qwen"]), (False, "<|im_end|>")]
    assert (four.row, four.parent, four.same) == (2, -1, (0, 1))
    assert four.context == [("user", "ok")]
    (known, *_) = turns_of(sample, qwen, sample.prompt)
    assert known.context == [] and known.num_context == 0

"""Episodes over the torch engine, with environments in processes: tokens, slots, failures."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from rlcore.envs import child, pool, registry
from rlcore.envs.dialogue import Dialogue
from rlcore.envs.engine import EpisodeEngine
from rlcore.envs.episode import PlayedEpisode, Transcript
from rlcore.envs.kind import checked
from rlcore.envs.pool import EnvError
from rlcore.envs.scorer import EnvScorer
from rlcore.envs.wire import EnvCall
from rlcore.hf.config import HFConfig
from rlcore.hf.tokenizer import load_tokenizer
from rlcore.records import (
    Aborted,
    AnyEvent,
    Branch,
    Down,
    Finished,
    History,
    LengthReport,
    Prompt,
    Request,
    Sample,
    Sampling,
    Stats,
    prompt_key,
    turn_of,
)
from rlcore.rollout.histospec import Draft, histories_of
from rlcore.rollout.torch_engine.engine import TorchEngine
from rlcore.sync.pack import load_weights
from rlcore.utils.children import Channel
from tests.contracts.engine_contract import CONFIG, collect, ended, weights

HF = HFConfig.from_dict(CONFIG)
SEED = 7


class Numbers:
    """A tokenizer of numbers."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def defused(self, text: str) -> str:
        return text

    def render_chat(self, messages: Sequence[Any]) -> str:
        raise AssertionError("there is no template")


class Spy(TorchEngine):
    """Remembers the turns that it was given, call by call."""

    def submit(self, todo: Sequence[Request]) -> None:
        self.__dict__.setdefault("calls", []).append([r.id for r in todo])
        super().submit(todo)


def prompt_of(group: str) -> Prompt:
    return Prompt(index=int(group[1:]), dataset="test", tokens=np.array([3, 4], np.int32))


Make = Callable[..., EpisodeEngine]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[EpisodeEngine] = []

    def one(
        name: str,
        *,
        max_running: int = 8,
        barrier: bool = False,
        draft: Draft = "none",
        **keys: Any,
    ):
        inner = Spy(
            HF,
            max_model_tokens=100,
            dtype="float64",
            seed=SEED,
            device="cpu",
            max_running=max_running,
            draft=draft,
            draft_settings={"adaptive": False, "wait": True} if draft != "none" else None,
        )
        load_weights(inner, weights(HF, 0).items(), 4)
        kind, tokenizer = registry.resolve(f"tests.odd_envs.{name}"), Numbers()
        made.append(
            EpisodeEngine(
                inner,
                f"tests.odd_envs.{name}",
                kind,
                kind.config(**{"workers": 1, "max_turn_tokens": 3, **keys}),
                dialogue=Dialogue(tokenizer, is_chat=False, num_tokens=HF.vocab_size),
                decode=tokenizer.decode,
                prompt_of=prompt_of,
                barrier=barrier,
            )
        )
        return made[-1]

    yield one
    for engine in made:
        engine.close()


def episodes(count: int, max_tokens: int = 60) -> list[Request]:
    return [
        Request(
            id=f"t0.{k}",
            prompt=prompt_of("t0").tokens,
            sampling=Sampling(max_tokens=max_tokens),
        )
        for k in range(count)
    ]


def by_id(events: list[AnyEvent]) -> dict[str, Finished]:
    return {e.id: e for e in events if isinstance(e, Finished)}


def counters(events: list[AnyEvent], name: str) -> int:
    return sum(getattr(e, name) for e in events if isinstance(e, Stats))


def test_an_episode_is_its_turns_and_observations_as_they_were_sampled_and_shown(make):
    engine = make("Sums")
    engine.submit(episodes(4))
    events = collect(engine, ended(4))
    for id, event in by_id(events).items():
        sample = event.sample
        tokens, versions = sample.tokens.tolist(), sample.versions.tolist()
        shown = [sum(tokens[at : at + 3]) % 20 + 2 for at in (0, 5)]
        # 3 + 2 + 3 + 2 + 3: what the last step shows is no part of it
        assert tokens[3:5] == shown[:1] * 2 and tokens[8:10] == shown[1:] * 2
        assert versions == [4] * 3 + [-1] * 2 + [4] * 3 + [-1] * 2 + [4] * 3
        assert not sample.logps[np.array(versions) < 0].any()
        assert event.num_tokens == 13 and event.num_observed == 4 and sample.finish == "stop"
        outcome = engine.outcomes[id]
        assert outcome.score == (sum(tokens[10:]) % 20 + 2) / 32
        assert outcome.text == " ".join(map(str, tokens[10:]))
        assert outcome.details["env/turns"] == 3 and outcome.details["env/left"] == 0
    assert counters(events, "turns") == 12 and counters(events, "episodes") == 4
    told = [e for e in events if isinstance(e, LengthReport) and e.ids == ("t0.2",)]
    assert [e.lengths[0] for e in told if e.lengths[0] in (3, 8, 13)] == [3, 8, 13]


def test_a_turn_is_sampled_from_everything_before_it(make):
    """The engine alone gives the same tokens for the prompt that the episode had then."""
    engine = make("Sums")
    engine.submit(episodes(1))
    sample = by_id(collect(engine, ended(1)))["t0.0"].sample
    alone = Request(
        id="t0.0.2",
        prompt=np.concatenate([sample.prompt, sample.tokens[:10]]),
        sampling=Sampling(max_tokens=3),
    )
    inner = engine._inner
    inner.submit([alone])
    again = by_id(collect(inner, ended(1)))["t0.0.2"].sample
    assert again.tokens.tolist() == sample.tokens[10:].tolist()
    np.testing.assert_allclose(again.logps, sample.logps[10:], atol=1e-6)


def test_an_episode_that_waits_for_its_environment_has_no_decode_slot(make):
    engine = make("Waits", max_running=1)
    engine.submit(episodes(2))
    ends = by_id(collect(engine, ended(2)))
    assert {e.finish for e in ends.values()} == {"stop"}


def test_with_a_barrier_all_take_their_turns_together_in_the_order_of_their_names(make):
    engine = make("Sums", barrier=True)
    engine.submit(episodes(5))
    collect(engine, ended(5))
    names = [f"t0.{k}" for k in range(5)]
    rest = [[f"{n}.{turn}" for n in names] for turn in (1, 2)]
    assert engine._inner.calls == [names, *rest]


def test_with_a_barrier_episodes_that_wait_for_a_process_of_their_own_hold_up_no_turn(
    make, monkeypatch, tmp_path
):
    """One worker: four processes of their own at a time, and all six episodes fail at once. Six
    episodes run at a time, and the seventh begins when one has ended."""
    monkeypatch.setenv("MARKS_DIR", str(tmp_path))
    engine = make("Flaky", barrier=True, max_running_episodes=6)
    engine.submit(episodes(7))
    ends = by_id(collect(engine, ended(7)))
    assert {e.finish for e in ends.values()} == {"stop"} and len(ends) == 7


def test_limits_cut_an_episode(make):
    engine = make("Sums", max_turns=2)
    engine.submit(episodes(1))
    sample = by_id(collect(engine, ended(1)))["t0.0"].sample
    assert sample.finish == "turns" and len(sample.tokens) == 8
    engine = make("Sums")
    engine.submit(episodes(1, max_tokens=9))  # two tokens are left after the second turn's 8
    sample = by_id(collect(engine, ended(1)))["t0.0"].sample
    assert sample.finish == "length" and len(sample.tokens) == 8


def test_every_failure_costs_its_own_episode_and_is_counted_by_its_reason(make):
    """One process for all: the fourth episode is begun anew, as the third ended that process."""
    engine = make("Odd", timeout_s=2.0)
    engine.submit(episodes(4))
    events = collect(engine, ended(4))
    ends = by_id(events)
    assert [ends[f"t0.{k}"].finish for k in range(4)] == ["failed"] * 3 + ["stop"]
    assert [len(ends[f"t0.{k}"].sample.tokens) for k in range(4)] == [0, 0, 0, 13]
    assert "KeyError: 'no such door'" in engine.outcomes["t0.0"].error
    assert engine.outcomes["t0.1"].error == "timeout: no answer to step within 2 s"
    assert engine.outcomes["t0.2"].error == "crash: its process exited: exit code 7"
    assert counters(events, "env_crashes") >= 3  # the third twice, and who was beside it
    assert counters(events, "env_errors") >= 1 and counters(events, "env_timeouts") >= 1
    assert counters(events, "env_lost_tokens") >= 3 * 6


def test_what_is_aborted_comes_back_empty_and_its_name_can_be_used_again(make):
    engine = make("Mute")
    engine.submit(episodes(3))
    seen: list[AnyEvent] = []
    while sum(isinstance(e, LengthReport) and 3 in e.lengths for e in seen) < 3:
        seen += engine.poll(0.02)  # all have had their turn and wait
    engine.abort(["t0.0", "t0.2", "nobody"])
    gone = [e for e in collect(engine, _aborted(2)) if isinstance(e, Aborted)]
    assert {e.id for e in gone} == {"t0.0", "t0.2"}
    assert all(e.num_tokens == 3 and not len(e.sample.tokens) for e in gone)
    engine.submit(episodes(1))
    engine.pause("abort")
    assert {e.id for e in collect(engine, _aborted(2)) if isinstance(e, Aborted)} == {
        "t0.0",
        "t0.1",
    }


def _aborted(count: int) -> Callable[[list[AnyEvent]], bool]:
    return lambda events: sum(isinstance(e, Aborted) for e in events) == count


def test_a_dead_engine_takes_all_episodes_with_it_and_new_ones_begin(make, monkeypatch):
    engine = make("Mute")
    engine.submit(episodes(2))
    seen: list[AnyEvent] = []
    while sum(isinstance(e, LengthReport) and 3 in e.lengths for e in seen) < 2:
        seen += engine.poll(0.02)
    down = [Down(reason="out of memory", lost=())]
    monkeypatch.setattr(engine._inner, "poll", lambda timeout_s: [down.pop()] if down else [])
    (event,) = [e for e in engine.poll(0.0) if isinstance(e, Down)]
    assert set(event.lost) == {"t0.0", "t0.1"} and event.reason == "out of memory"
    monkeypatch.undo()
    engine.submit(episodes(1))
    assert collect(engine, lambda events: any(isinstance(e, LengthReport) for e in events))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Missing", "cannot start in a child process: ModuleNotFoundError: No module"),
        ("Junk", "the first 16 episodes all failed, the last with error: TypeError: the observ"),
    ],
)
def test_an_environment_that_never_works_ends_the_run_in_a_sentence(make, name, why):
    engine = make(name, retries=0)
    engine.submit(episodes(16))
    with pytest.raises(RuntimeError, match=why):
        collect(engine, ended(16))


def test_numbers_of_numpy_in_an_info_are_metrics():
    numbers = {"won": np.True_, "steps": np.int64(3), "part": np.float32(0.5), "k": 10**400}
    others = {"inf": np.float16("inf"), "text": np.str_("x"), "many": np.ones(2)}
    assert checked("", 0.0, numbers | others)[2] == {"won": 1.0, "steps": 3.0, "part": 0.5}


def test_scores_are_the_environments_and_of_the_last_turn_where_a_reward_is_asked():
    from rlcore.envs.engine import EpisodeOutcome
    from rlcore.records import RewardResult

    class Service:
        num_pending, room = 0, 4

        def submit(self, id: str, sample: Sample, prompt: Prompt, text: str) -> None:
            self.got = id, text, sample.finish

        def poll(self, timeout_s: float) -> list[tuple[str, RewardResult]]:
            return [(self.got[0], RewardResult(score=0.25, details={"a": 2.0}))]

    prompt = prompt_of("t0")
    sample = Transcript("t0.0", prompt.tokens).sample("length")
    outcomes = {
        "t0.0": EpisodeOutcome(1.5, "last", {"env/turns": 3.0}, finish="turns"),
        "t0.1": EpisodeOutcome(0.0, "", {}, "crash: gone"),
    }
    service = Service()
    scorer = EnvScorer(outcomes, service)
    for id in list(outcomes):
        scorer.submit(id, sample, prompt, "all turns")
    assert scorer.num_pending == 2 and service.got == ("t0.0", "last", "turns") and not outcomes
    found = dict(scorer.poll(0.0))
    assert (found["t0.0"].score, found["t0.0"].details) == (1.75, {"env/turns": 3.0, "a": 2.0})
    assert (found["t0.1"].score, found["t0.1"].error) == (0.0, "crash: gone")
    assert scorer.num_pending == 0


class Chat(Numbers):
    """A template in which 1 ends a message and 8, 9 begin those of user and assistant."""

    def render_chat(self, messages: Sequence[Any]) -> str:
        sides = {"user": "8", "assistant": "9"}
        said = [f"{sides[m['role']]} {m['content']} 1" for m in messages]
        return " ".join([*said, "9"])


class Impatient:
    """A host that asks for three turns, two of them at a time, and leaves the first one."""

    async def play(self, so_far, policy, sampling, prompt, name):
        def turn(number: int, most: int):
            asked = structs.replace(sampling, max_tokens=most)
            return policy(Request(id=turn_of(name, number), prompt=prompt.tokens, sampling=asked))

        left = asyncio.ensure_future(turn(0, 90))
        await turn(1, 2)
        left.cancel()
        sample = await turn(2, 3)
        so_far.took_turn("3", "stop")
        return PlayedEpisode(structs.replace(sample, id=so_far.id), {})

    def close(self) -> None: ...


def test_a_turn_that_nobody_waits_for_is_aborted_and_its_episode_goes_on(monkeypatch):
    slow = {"decode_floor_ms": 50.0}  # so that the first turns do not end by themselves
    inner = Spy(HF, max_model_tokens=100, dtype="float64", device="cpu", max_running=8, **slow)
    load_weights(inner, weights(HF, 0).items(), 4)
    aborted: list[str] = []
    own = inner.abort
    monkeypatch.setattr(inner, "abort", lambda ids: (aborted.extend(ids), own(ids)))
    kind, tokenizer = registry.resolve("tests.odd_envs.Sums"), Numbers()
    engine = EpisodeEngine(
        inner,
        "tests.odd_envs.Sums",
        kind,
        kind.config(),
        dialogue=Dialogue(tokenizer, is_chat=False, num_tokens=HF.vocab_size),
        decode=tokenizer.decode,
        prompt_of=prompt_of,
        host=Impatient(),
    )
    try:
        engine.submit(episodes(2))
        found = by_id(collect(engine, ended(2)))
        assert {len(event.sample.tokens) for event in found.values()} == {3}
        assert {event.finish for event in found.values()} == {"length"}
        assert {outcome.finish for outcome in engine.outcomes.values()} == {"stop"}
        assert sorted(aborted) == ["t0.0", "t0.1"]  # the first turns
        assert not inner.can_work
    finally:
        engine.close()


# ---- drafts from earlier episodes


def test_turns_draft_from_the_histories_of_their_prompt_and_are_the_same(make):
    def run(engine: EpisodeEngine) -> tuple[dict[str, Finished], int]:
        engine.submit(episodes(4))
        events = collect(engine, ended(4))
        return by_id(events), counters(events, "accepted_tokens")

    want, _ = run(make("Sums", max_turn_tokens=8))
    key = prompt_key(prompt_of("t0").tokens)
    known = [h for event in want.values() for h in histories_of(event.sample, key, 1.0)]
    accepted = []
    for histories in ([structs.replace(h, key=key + 1) for h in known], known):
        engine = make("Sums", max_turn_tokens=8, draft="history")
        engine.remember(histories)
        found, count = run(engine)
        accepted.append(count)
        assert found.keys() == want.keys()
        for id, event in found.items():
            for name in ("tokens", "versions", "logps"):
                ours, theirs = getattr(event.sample, name), getattr(want[id].sample, name)
                np.testing.assert_allclose(ours, theirs, atol=1e-6 if name == "logps" else 0)
    assert accepted[1] > accepted[0] + 30  # of 96 tokens


def test_histories_of_running_episodes_stay_while_they_wait_for_their_environment(
    make, monkeypatch
):
    engine, told = make("Sums"), []
    monkeypatch.setattr(engine._inner, "remember", lambda found: told.append([h.id for h in found]))

    def history(name: str, key: int) -> History:
        return History(key=key, id=name, tokens=np.array([3], np.int32), score=0.0)

    key = prompt_key(prompt_of("t0").tokens)
    engine.submit(episodes(2))
    engine.remember([history("own", key), history("other", 5)])
    engine.remember([history("third", 6)])
    engine.remember([history("newer", key)])
    collect(engine, ended(2))
    engine.remember([history("last", 7)])
    assert told == [["own", "other"], ["own", "third"], ["newer"], ["last"]]


def test_every_row_of_an_episode_is_a_history_of_the_data_prompt():
    row = {"logps": np.zeros(2, np.float32), "versions": np.zeros(2, np.int32)}
    first, further = (
        {"prompt": np.arange(n, dtype=np.int32), "tokens": np.array([7, n], np.int32)}
        for n in (3, 12)
    )
    branch = Branch(**further, **row)
    sample = Sample(id="t0.0", finish="stop", branches=(branch,), **first, **row)
    found = histories_of(sample, 99, 0.5)
    assert [(h.key, h.id, h.score) for h in found] == [(99, "t0.0", 0.5)] * 2
    assert [h.tokens.tolist() for h in found] == [
        [0, 1, 2, 7, 3],
        [4, 5, 6, 7, 8, 9, 10, 11, 7, 12],
    ]
    failed = structs.replace(sample, tokens=row["versions"][:0], branches=())
    assert histories_of(failed, 99, 0.0) == []


# ---- an episode that starts again


class Returning:
    """A host of an episode that is aborted and starts again. A request of the first play arrives
    while the second one waits for its turn of the same name."""

    def __init__(self) -> None:
        self.policies: list[Any] = []

    async def play(self, so_far, policy, sampling, prompt, name):
        self.policies.append(policy)
        turn = Request(
            id=turn_of(name, 0),
            prompt=prompt.tokens,
            sampling=structs.replace(sampling, max_tokens=3),
        )
        if len(self.policies) == 1:
            await asyncio.Event().wait()
        own = asyncio.ensure_future(policy(turn))
        await asyncio.sleep(0)
        late = asyncio.ensure_future(self.policies[0](turn))
        await asyncio.sleep(0)
        sample = await own
        assert not late.done()
        late.cancel()
        return PlayedEpisode(structs.replace(sample, id=so_far.id), {})

    def close(self) -> None: ...


def test_a_late_request_of_an_aborted_play_takes_no_turn_of_the_next_one(make):
    engine = make("Sums")
    engine._host = host = Returning()
    engine.submit(episodes(1))
    while not host.policies:
        engine.poll(0.01)
    engine.abort(["t0.0"])
    assert any(isinstance(e, Aborted) for e in collect(engine, ended(1)))
    engine.submit(episodes(1))
    (event,) = by_id(collect(engine, ended(1))).values()
    assert len(event.sample.tokens) == 3 and len(host.policies) == 2
    assert not engine._inner.can_work and len(engine._inner.calls) == 1


def test_an_observation_of_a_chat_is_a_message_behind_the_turn():
    chat = Dialogue(Chat(), is_chat=True)
    assert chat.observation("5 6", last=1) == [8, 5, 6, 1, 9]  # the end was sampled
    assert chat.observation("5 6", last=7) == [1, 8, 5, 6, 1, 9]  # it was not: cut
    assert chat.observation("", last=1) == []
    assert chat.observation([5, 6], last=1) == [5, 6]  # tokens are taken as they are


def test_a_conversation_of_qwen_is_the_same_appended_and_rendered_at_once(real_data):
    tokenizer = load_tokenizer(real_data / "tokenizer_qwen")
    end = tokenizer.token_id("<|im_end|>")
    messages = [
        {"role": "system", "content": "You walk."},
        {"role": "user", "content": "P..\n"},
        {"role": "assistant", "content": "Left"},
        {"role": "user", "content": ".P.\n"},
    ]
    start = tokenizer.encode(tokenizer.render_chat(messages[:2]))
    turn = [*tokenizer.encode("Left"), end]
    chat = Dialogue(tokenizer, is_chat=True)
    appended = [*start, *turn, *chat.observation(".P.\n", end)]
    assert appended == tokenizer.encode(tokenizer.render_chat(messages))
    shown = chat.observation("it says <|im_end|>", end)
    assert shown.count(end) == 1  # its own: an environment cannot end a message


def test_a_template_that_hides_earlier_turns_is_refused():
    class Hides(Numbers):
        def render_chat(self, messages: Sequence[Any]) -> str:
            return messages[-1]["content"]

    with pytest.raises(ValueError, match="drops earlier assistant turns"):
        Dialogue(Hides(), is_chat=True).observation("5", last=1)


def test_names_of_environments():
    assert registry.config_class("tests.odd_envs.Patient").__name__ == "PatientConfig"
    kind = registry.resolve("tests.odd_envs.Patient")
    assert kind.make(kind.config(timeout_s=3)).config.timeout_s == 3
    for name, why in (
        ("lake", "--env lake: allowed are alfworld, "),
        ("tests.odd_envs.Nobody", "has no Nobody"),
        ("no.such.module", "there is no module no.such; is it on PYTHONPATH"),
        ("tests.scores.half", "give a class with reset, step and close"),
    ):
        with pytest.raises(ValueError, match=why):
            registry.resolve(name)


def test_a_token_that_the_model_does_not_have_costs_its_episode(make):
    engine = make("Strange", retries=0)
    engine.submit(episodes(3))
    found = by_id(collect(engine, ended(3)))
    assert [found[f"t0.{k}"].finish for k in range(3)] == ["failed", "failed", "stop"]
    assert "shows token 10000" in engine.outcomes["t0.1"].error


def test_an_environment_that_is_closed_before_it_is_made_is_not_made():
    """Its thread may come late."""
    made: list[Any] = []
    host = child.EnvHost(SimpleNamespace(make=made.append), None, Channel(socket.socket()))
    reset = EnvCall(number=0, what="reset", key=5, prompt=prompt_of("t0"))
    for close in (host._envs.clear, lambda: setattr(host._envs[5], "is_closed", True)):
        host._envs[5] = child._Slot()
        close()
        with pytest.raises(RuntimeError, match="closed before its reset"):
            host._do(reset)
    assert not made


def test_an_environment_that_is_closed_while_it_is_made_is_not_left_behind():
    begun, may_end, closed = threading.Event(), threading.Event(), threading.Event()

    class Slow:
        def reset(self, **keys: Any):
            return "", {}

        def close(self) -> None:
            closed.set()

    def build(config: Any) -> Slow:
        begun.set()
        assert may_end.wait(30)
        return Slow()

    ours, theirs = socket.socketpair()
    host = child.EnvHost(SimpleNamespace(make=build), None, Channel(theirs))
    prompt = prompt_of("t0")
    host.take(EnvCall(number=0, what="reset", key=5, prompt=prompt, seed=1, episode="t0.0"))
    assert begun.wait(30)
    host.take(EnvCall(number=1, what="close", key=5))
    may_end.set()
    assert closed.wait(30) and not host._envs
    host._threads.shutdown()
    ours.close()
    theirs.close()


@pytest.mark.parametrize("close_s", [3.0, 0.5])
def test_every_environment_is_closed_before_its_process_ends(monkeypatch, tmp_path, close_s):
    """One has a process of its own, one is beside an endless step, one is open at the end."""
    monkeypatch.setenv("MARKS_DIR", str(tmp_path))
    monkeypatch.setattr(pool, "_CLOSE_S", close_s)
    config = registry.resolve("tests.odd_envs.Closes").config(workers=1, timeout_s=1.0)

    async def run() -> None:
        made = pool.EnvPool("tests.odd_envs.Closes", config)

        async def begin(name: str, alone: bool = False) -> pool.EnvSlot:
            slot = await made.open(alone=alone)
            await slot.reset(0, prompt_of("t0"), name)
            return slot

        try:
            (await begin("own.0", alone=True)).close()
            slow, beside = await begin("slow.3600"), await begin("beside.0")
            with pytest.raises(EnvError, match="no answer to step"):
                await slow.step("", (1,))
            slow.close()
            beside.close()
            await begin("last.0")
            end = time.monotonic() + 60
            while len(made._processes) > 1 and time.monotonic() < end:
                await asyncio.sleep(0.05)
            assert len(made._processes) == 1, "that of the last one"
        finally:
            await made.close()
        assert not made._processes and made._own._value == 4

    asyncio.run(run())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["beside.0", "last.0", "own.0"]

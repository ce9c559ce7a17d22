"""A round that a log decides: the controller alone, with its responses in any order."""

import logging
import random
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.records import (
    Abort,
    Aborted,
    EndRound,
    Finished,
    Prompt,
    Ready,
    Rewarded,
    RewardResult,
    Sampling,
    Submit,
)
from rlcore.rollout.controller import Controller
from rlcore.rollout.round_log import Log, Rounds
from rlcore.sched.completion_order import ByLog, Counted, ReplayMismatch
from rlcore.sched.roles import RequestState
from rlcore.sched.router import LeastLoaded
from rlcore.sched.tail_batching import TailBatching

SAMPLING = Sampling(max_tokens=64)


def source(dynamic: bool = False, num_prompts: int = 3, first: int = 0, **options) -> TailBatching:
    """Half again as many prompts and responses as count."""
    at = first

    def next_rows(n: int) -> list[tuple[int, int]]:
        nonlocal at
        at += n
        return [(0, row) for row in range(at - n, at)]

    def prompt(row: int) -> Prompt:
        return Prompt(index=row, dataset="s", tokens=np.array([row, 7], np.int32))

    sizes = {"num_prompts": num_prompts, "num_samples": 2, "eta_prompts": 1.5, "eta_samples": 1.5}
    most = 4 * num_prompts if dynamic else 0
    return TailBatching(next_rows, prompt, **(sizes | options), max_replaced=most)


def length(id: str) -> int:
    return 1 + zlib.crc32(id.encode()) % 30


def score(id: str) -> float:
    return float(zlib.crc32(id.encode()) % 2)


def play(rounds: Rounds, source: TailBatching, chance: int, sampling=SAMPLING, result=None):
    """One round in which a die says what happens next: a response ends, a reward comes, an abort
    takes effect. Its end, and everything that was sent."""
    result = result or (lambda id: RewardResult(score=score(id)))
    die = random.Random(chance)
    todo = source.next_round(sampling)
    c = Controller(ranks=[0, 1], place=LeastLoaded(5), stop=todo.stop, deadline_s=10.0)
    rounds.begin(c, todo.work)
    sent = [*c.start(todo.work, 0.0)]
    for rank in (1, 0):
        sent += c.handle(Ready(rank=rank), 0.0)
    coming: list[Finished | Rewarded | Aborted] = []
    read = 0
    while not c.done:
        for command in sent[read:]:
            if isinstance(command, Submit):
                coming += [
                    Finished(rank=command.rank, id=r.id, num_tokens=length(r.id), finish="stop")
                    for r in command.requests
                ]
            elif isinstance(command, Abort):
                coming = [e for e in coming if e.id not in command.ids]
                coming += [Aborted(rank=command.rank, id=i, num_tokens=1) for i in command.ids]
        read = len(sent)
        event = coming.pop(die.randrange(len(coming)))
        sent += c.handle(event, 1.0)
        if isinstance(event, Finished):
            coming.append(Rewarded(rank=event.rank, id=event.id, result=result(event.id)))
    rounds.end(c)
    (end,) = [o for o in sent if isinstance(o, EndRound) and o.rank == 0]
    source.settle([g.id for g in end.groups], end.dropped)
    return end, sent


def batch(end: EndRound) -> list[tuple]:
    return [(g.id, g.prompt_index, [r.id for r in g.refs], g.scores, g.lengths) for g in end.groups]


def recorder(folder: Path, replay: Path | None = None, **options) -> Rounds:
    replayed = Log(replay) if replay else None
    return Rounds(folder, **({"seed": 0, "step": lambda: 1} | options), replay=replayed)


@settings(max_examples=60, deadline=None)
@given(first=st.integers(0, 10**6), second=st.integers(0, 10**6), dynamic=st.booleans())
def test_whatever_comes_first_a_replayed_round_is_the_recorded_one(first, second, dynamic):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = [source(dynamic), source(dynamic)]
        for step in range(1, 5):
            record = recorder(folder / "a", step=lambda: step)  # noqa: B023
            one, _ = play(record, sources[0], first + step)
            record.close()
            again = recorder(folder / "b", folder / "a", step=lambda: step)  # noqa: B023
            two, sent = play(again, sources[1], second + step)
            again.close()
            assert batch(two) == batch(one) and two.dropped == one.dropped
            early = [o for o in sent[: sent.index(two)] if isinstance(o, Abort)]
            assert (
                dynamic
                or not early
                or sent.index(early[0])
                > max(i for i, o in enumerate(sent) if isinstance(o, Submit))
            )
        assert (folder / "a/rounds.jsonl").read_bytes() == (folder / "b/rounds.jsonl").read_bytes()
        assert sources[0].state() == sources[1].state()


def test_what_the_log_does_not_have_is_held_back_and_what_it_has_is_waited_for():
    states = {i: RequestState(id=i, num_tokens=5) for i in ("g.0", "g.1", "g.2")}
    race = ByLog([Counted("g.2", 5, 1.0), Counted("g.0", 5, 1.0)], states.values)

    def arrive(id: str) -> RequestState | None:
        states[id].result = RewardResult(score=1.0)
        race.arrive(states[id])
        return race.next(lambda r: True)

    assert arrive("g.1") is None and arrive("g.0") is None
    assert arrive("g.2") is states["g.2"]
    assert race.next(lambda r: True) is states["g.0"]
    with pytest.raises(ReplayMismatch, match="has only 2 responses"):
        race.next(lambda r: True)


def test_a_score_that_did_not_come_in_time_is_the_logs_in_both_directions(tmp_path):
    """Whether a reward function is too slow is decided by the clock, as who came first is."""
    late = RewardResult(score=-1.0, error="timeout after 1 s")

    def slow(ids):
        return lambda id: late if id in ids else RewardResult(score=score(id))

    exact = {"eta_prompts": 1.0, "eta_samples": 1.0}
    one, _ = play(recorder(tmp_path / "a"), source(**exact), 5, result=slow({"t0.1"}))
    again = recorder(tmp_path / "b", tmp_path / "a")
    two, _ = play(again, source(**exact), 6, result=slow({"t0.0"}))
    assert batch(two) == batch(one)
    assert [g.errors for g in two.groups] == [g.errors for g in one.groups]
    assert one.groups[0].errors == ("", late.error) and one.groups[0].scores[1] == -1.0


def test_responses_that_are_not_those_of_the_log_are_counted_and_said(tmp_path, caplog):
    play(recorder(tmp_path / "a"), source(), 1)
    with caplog.at_level(logging.WARNING):
        play(recorder(tmp_path / "b", tmp_path / "a"), source(), 2)
        assert not caplog.messages
        odd = recorder(tmp_path / "c", tmp_path / "a")
        play(odd, source(), 2, result=lambda id: RewardResult(score=0.5))
    (said,) = caplog.messages
    assert "6 of the 6 responses of step 1 differ from the log in length or score" in said


@pytest.mark.parametrize(
    ("options", "of_source", "words"),
    [
        ({"seed": 1}, {}, "step 1 was sampled with --run.seed 0, not 1"),
        ({}, {"first": 9}, "step 1 has row 0 for the group t0, not 9; replay with the --data and"),
        ({}, {"eta_samples": 1.0}, "has num_samples 3 for the group t0, not 2"),
        ({}, {"eta_prompts": 2.0}, "started 4 prompts, not 6; replay with the --data.prompts_per"),
        ({}, {"eta_prompts": 1.0}, "did not start; replay with the settings of the run"),
        ({}, {"num_prompts": 2, "eta_prompts": 2.0}, "ended with 3 groups of"),
    ],
)
def test_a_round_of_another_run_is_refused(tmp_path, options, of_source, words):
    play(recorder(tmp_path / "a"), source(), 3)
    rounds = recorder(tmp_path / "b", tmp_path / "a", **options)
    with pytest.raises(ReplayMismatch, match="^--debug.replay .*: its round of ") as error:
        play(rounds, source(**of_source), 4)
    assert words in str(error.value)


def test_a_round_that_the_log_does_not_have_is_refused(tmp_path):
    play(recorder(tmp_path / "a"), source(), 3)
    rounds, second = recorder(tmp_path / "b", tmp_path / "a"), source()
    play(rounds, second, 4)
    with pytest.raises(
        ReplayMismatch, match="has no round that starts with t4; it ends with step 1"
    ):
        play(rounds, second, 5)


def test_other_sampling_is_named(tmp_path):
    play(recorder(tmp_path / "a"), source(), 3)
    with pytest.raises(ReplayMismatch, match=r"was sampled with temperature 1.0, not 0.5"):
        play(recorder(tmp_path / "b", tmp_path / "a"), source(), 4, Sampling(temperature=0.5))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no such file; give a run's rounds.jsonl, or its folder"),
        ("", "has no rounds; give the rounds.jsonl of a longer run"),
        ('{"step": 1, "actor/loss": 0.5}\n', "is not a log of rounds (Object missing required"),
        ('{"step": 1}\nnot JSON\n', "is not a log of rounds (Object missing required"),
    ],
)
def test_a_file_that_is_no_log_is_one_sentence(tmp_path, text, words):
    if text is not None:
        (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(ValueError, match="^--debug.replay ") as error:
        Log(tmp_path / "x.jsonl")
    assert words in str(error.value)

"""The judge as a reward: its process, batches, remembered verdicts, deadlines, and a judge behind a
URL.

Not covered: CUDA.
"""

import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from rlcore.cli import judge
from rlcore.data import label_task
from rlcore.hf import layer_pipeline as pipeline
from rlcore.hf.tokenizer import load_tokenizer, make_char_tokenizer
from rlcore.rewards.judge import process
from rlcore.rewards.judge.config import JudgeRewardConfig
from rlcore.rewards.judge.process import JudgeServer
from rlcore.rewards.judge.residency import STEADY
from rlcore.rewards.judge.rubric import Rubric
from rlcore.rewards.judge.runner import ProcessBackend
from rlcore.rewards.judge.wire import (
    BatchDone,
    BatchStarted,
    FromJudge,
    GradeRequest,
    JudgeReady,
    LoadJudge,
)
from rlcore.rewards.service import RewardService
from rlcore.utils import net
from tests.contracts.reward_contract import prompt_of, sample_of, score_all
from tests.kit import tiny_hf_folder

RUBRIC = "{{ answer }};{{ response }}="


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("judge") / "model"
    tiny_hf_folder(path, vocab_size=len(label_task.VOCAB), num_hidden_layers=5)
    make_char_tokenizer(path, label_task.CHARS)
    (path / "rubric.jinja").write_text(RUBRIC)
    return path


def config(folder: Path, **keys) -> JudgeRewardConfig:
    return JudgeRewardConfig(
        model=str(folder),
        rubric=str(folder / "rubric.jinja"),
        good=("*",),
        bad=("-",),
        dtype="float32",
        **keys,
    )


def expected(folder: Path, answer: str, text: str) -> float:
    """By transformers: P(*) / (P(*) + P(-)) after the rubric."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer.encode(f"{answer};{text}=")])).logits[0, -1]
    good, bad = (float(logits[tokenizer.token_id(t)].exp()) for t in "*-")
    return good / (good + bad)


def test_the_process_scores_batches_as_transformers_does_and_asks_once_for_every_pair(folder):
    texts = [f"a1b{i % 7}=>{i}" for i in range(12)]
    with RewardService("judge", config=config(folder)) as service:
        for i, text in enumerate([*texts, *texts[:3], "\u4e2d"]):
            service.submit(f"t{i}.0", sample_of(f"t{i}.0"), prompt_of("21"), text)
        found = score_all(service)
        service.submit("again.0", sample_of("again.0"), prompt_of("21"), texts[0])
        again = score_all(service)["again.0"]
    for i in (0, 5, 11):
        assert found[f"t{i}.0"].score == pytest.approx(expected(folder, "21", texts[i]), abs=1e-5)
    details = [found[f"t{i}.0"].details for i in range(12)]
    assert max(d["judge_batch_rows"] for d in details) > 1
    assert {d["judge_cached"] for d in details} == {0.0}
    assert all(d["judge_streamed_layers"] == 2 for d in details)  # ceil(5 / 2) may stay
    assert all(d["judge_prefill_tokens_per_s"] > 0 and 0 < d["judge_mass"] < 1 for d in details)
    for i in range(3):
        copy, first = found[f"t{12 + i}.0"], found[f"t{i}.0"]
        assert (copy.score, copy.details) == (first.score, {"judge_cached": 1.0})
    assert (again.score, again.details) == (found["t0.0"].score, {"judge_cached": 1.0})
    assert found["t15.0"].error.startswith("rubric: ") and found["t15.0"].score == 0


@pytest.mark.slow
def test_a_judge_that_hangs_or_dies_costs_no_sample_but_those_it_was_busy_with(folder):
    cfg = config(folder, timeout_s=3.0, start_timeout_s=120.0)
    with RewardService("judge", config=cfg) as service:
        service.submit("a.0", sample_of("a.0"), prompt_of("1"), ">1")
        assert not score_all(service)["a.0"].error
        backend = service._runners[0]._backend
        os.kill(backend._worker.process.pid, signal.SIGSTOP)  # it hangs, and all that it has pays
        service.submit("b.0", sample_of("b.0"), prompt_of("2"), ">2")
        assert score_all(service)["b.0"].error == "timeout after 3 s"
        service.submit("c.0", sample_of("c.0"), prompt_of("3"), ">3")
        assert not score_all(service)["c.0"].error
        os.kill(backend._worker.process.pid, signal.SIGKILL)  # between batches: nobody pays
        for i in range(3):
            service.submit(f"d{i}.0", sample_of(f"d{i}.0"), prompt_of("4"), f">{i}")
        assert [r.error for r in score_all(service).values()] == ["", "", ""]
        pid = backend._worker.process.pid
        service.submit("e.0", sample_of("e.0"), prompt_of("5"), ">5")
        service.cancel(["e.0"])
        time.sleep(cfg.timeout_s + 1)  # a judge that nobody asks is not late
        service.submit("f.0", sample_of("f.0"), prompt_of("6"), ">6")
        assert not score_all(service)["f.0"].error and backend._worker.process.pid == pid


@pytest.mark.slow
def test_a_batch_in_which_the_judge_dies_is_asked_again_one_by_one(folder):
    cfg = config(
        folder,
        method="generate",
        max_new_tokens=110,
        pattern="(.)$",
        timeout_s=60.0,
        batch_wait_s=1.0,  # on a busy machine they come one by one
    )
    with RewardService("judge", config=cfg) as service:
        backend = service._runners[0]._backend
        for i in range(3):
            service.submit(f"t{i}.0", sample_of(f"t{i}.0"), prompt_of("4"), f">{i}")
        kill_in_a_batch(backend, 3)
        kill_in_a_batch(backend, 1)
        found = score_all(service)
    assert found["t0.0"].error == "crash: the judge exited with status -9"
    for name in ("t1.0", "t2.0"):  # a junk verdict is the model's own fault
        assert found[name].error.partition(":")[0] in ("", "verdict")


@pytest.mark.slow
def test_a_judge_that_grows_by_more_than_memory_gb_ends_and_its_batch_pays(folder):
    cfg = config(
        folder,
        method="generate",
        max_new_tokens=110,
        pattern="(.)$",
        timeout_s=60.0,
        memory_limit_gb=0.004,  # less than torch takes for its first forward,
        max_tokens=64,  # which needs little by itself
        batch_tokens=64,
    )
    with RewardService("judge", config=cfg) as service:
        backend = service._runners[0]._backend
        service.submit("t0.0", sample_of("t0.0"), prompt_of("4"), ">0")
        end, found = time.monotonic() + 60, {}
        while not (backend._running or found):
            assert time.monotonic() < end
            found = dict(service.poll(0.001))
        worker = backend._worker
        while backend._running and backend._grown(worker) < cfg.memory_limit_gb * 2**30:
            time.sleep(0.001)
        if backend._running:  # else it has been ended already
            os.kill(worker.process.pid, signal.SIGSTOP)  # so that it is looked at before its end
        found = found or score_all(service)
    assert found["t0.0"].error.startswith("memory: the judge grew by ")
    assert found["t0.0"].error.endswith("--reward.memory_limit_gb is 0.004")


def kill_in_a_batch(backend: ProcessBackend, rows: int) -> None:
    """End the judge while it works on so many requests."""
    end = time.monotonic() + 60
    while len(backend._running) != rows:
        assert time.monotonic() < end, backend._running
        time.sleep(0.001)
    os.kill(backend._worker.process.pid, signal.SIGKILL)
    while backend._running:
        time.sleep(0.001)


def test_a_judge_that_cannot_be_loaded_ends_the_run_with_one_sentence(folder, tmp_path):
    bad = config(folder, template="none")
    with pytest.raises(ValueError, match="--reward.rubric .*: cannot be used"):
        RewardService("judge", config=dataclasses.replace(bad, rubric=str(tmp_path / "none")))
    with pytest.raises(ValueError, match="--reward.model nowhere: no such folder"):
        RewardService("judge", config=dataclasses.replace(bad, model="nowhere"))
    wrong = dataclasses.replace(bad, good=("**",))
    with (
        RewardService("judge", config=wrong) as service,
        pytest.raises(
            RuntimeError, match=r"reward judge: cannot start: .*--reward.good \*\*: is 2"
        ),
    ):
        service.submit("a.0", sample_of("a.0"), prompt_of("1"), ">1")
        score_all(service)


class OneRequest:
    """Stands for the channel to the parent: one request, then the end of the stream."""

    def __init__(self, load: LoadJudge, events: list) -> None:
        self._load, self._events = load, events
        self._bodies = [net.encode(GradeRequest(0, "", "1", ">1", {}))]

    def first(self) -> bytes:
        return net.encode(self._load)

    def send(self, data: bytearray) -> None:
        (body,) = net.Frames(1 << 20).feed(bytes(data))
        self._events.append(type(net.decode(body, FromJudge)))

    def receive(self, timeout_s: float | None) -> list[bytes]:
        if not self._bodies and timeout_s is None:
            raise EOFError
        bodies, self._bodies = self._bodies, []
        return bodies


def test_the_judge_reads_its_layers_before_it_is_ready(folder, monkeypatch):
    """And not in its first batch, which has less time."""
    events, read = [], pipeline.read_layer

    def reads(reader, number, *rest) -> None:
        events.append(number)
        read(reader, number, *rest)

    monkeypatch.setattr(pipeline, "read_layer", reads)
    cfg = config(folder, resident_ratio=1.0, batch_wait_s=0.0)
    load = LoadJudge(config=dataclasses.asdict(cfg), device="cpu", sys_path=tuple(sys.path))
    with pytest.raises(EOFError):
        process.serve(OneRequest(load, events))
    assert events == [0, 1, 2, 3, 4, JudgeReady, BatchStarted, BatchDone]


# ---- the rubric


def test_our_rubric_shows_task_answer_and_response_and_executes_none_of_them():
    cfg = JudgeRewardConfig(model="m")
    text = Rubric(cfg).render("What is {{ 1 + 1 }}?", "2", "{% if true %}two{% endif %}")
    assert "[Task]\nWhat is {{ 1 + 1 }}?\n" in text and "[Reference answer]\n2\n" in text
    assert "{% if true %}two{% endif %}" in text and text.endswith("Yes or No.\n")
    assert "Reference" not in Rubric(cfg).render("What?", "", "two")
    written = Rubric(dataclasses.replace(cfg, method="generate")).render("What?", "", "two")
    assert written.endswith("with `Verdict: Yes` or `Verdict: No`.\n")


@pytest.mark.parametrize(
    "text, score",
    [
        ("First Verdict: No, but then\nVerdict: Yes.", 1.0),
        ("Verdict: **No**", 0.0),
        ("Verdict: 7/10", 0.7),
        ("Verdict: 12", 1.0),
    ],
)
def test_the_last_verdict_that_was_written_counts(text, score):
    assert Rubric(JudgeRewardConfig(model="m")).read(text) == score


@pytest.mark.parametrize("text", ["", "I say Yes", "Verdict: perhaps"])
def test_a_text_without_a_verdict_is_an_error_and_no_score(text):
    with pytest.raises(ValueError, match="verdict"):
        Rubric(JudgeRewardConfig(model="m")).read(text)


def test_a_response_cannot_write_special_tokens_and_a_long_one_loses_its_beginning(folder):
    judge = JudgeServer(config(folder, max_tokens=40), "cpu")
    try:
        ids, is_cut = judge.encode(GradeRequest(0, "", "21", ">2 1".replace(" ", ""), {}))
        assert not is_cut and len(ids) == len("21;>21=")
        ids, is_cut = judge.encode(GradeRequest(0, "", "21", "1" * 60 + ">21", {}))
        text = judge._tokenizer.decode(ids)
        assert is_cut and len(ids) <= 40 and text.startswith("21;1") and text.endswith("1>21=")
        with pytest.raises(ValueError, match="has 50 tokens besides .* --reward.max_tokens"):
            judge.encode(GradeRequest(0, "", "2" * 48, "1" * 60, {}))
        assert judge._tokenizer.defused("a<eos>b") == "a< eos>b"
    finally:
        judge.model.close()


def test_a_batch_has_the_oldest_request_and_others_of_its_length(folder):
    judge = JudgeServer(config(folder, batch_rows=3, batch_tokens=40), "cpu")
    try:
        for key, length in enumerate([10, 30, 11, 9, 12]):
            judge.add(GradeRequest(key, "", "", "1" * length, {}))
        judge.add(GradeRequest(5, "", "", "1" * 10, {}, alone=True))
        batches = []
        while batch := judge.next_batch():
            batches.append([row.key for row in batch])
    finally:
        judge.model.close()
    assert batches == [[0, 2, 3], [1], [4], [5]]


def test_the_judge_writes_and_its_verdict_is_found(folder):
    """A model of random weights writes junk: its own text, read by a pattern that fits."""
    cfg = config(folder, method="generate", max_new_tokens=6, pattern="(.)$", max_points=9.0)
    judge = JudgeServer(cfg, "cpu")
    try:
        for key, text in enumerate([">1", ">1b2", "a"]):
            judge.add(GradeRequest(key, "", "3", text, {}))
        batch = judge.next_batch()
        rows = [row.ids for row in batch]
        wrote = [judge.model.generate([row], 6, judge._tokenizer.eos_ids)[0] for row in rows]
        results = judge.score(batch)
    finally:
        judge.model.close()
    for ids, result in zip(wrote, results, strict=True):
        last = judge._tokenizer.decode(ids)[-1:]
        word = {"*": 1.0, "-": 0.0} | {str(n): n / 9 for n in range(10)}
        if last in word:
            assert (result.score, result.error) == (word[last], "")
        else:
            assert result.error.startswith("verdict: ")


def test_a_burst_becomes_tokens_bit_by_bit_and_the_clock_hears_of_every_stretch(
    folder, monkeypatch
):
    """Or the deadline of whatever waits is over before the first batch begins."""
    monkeypatch.setattr(process, "_READ_CHARS", 50)
    monkeypatch.setattr(process, "_STRETCH_CHARS", 25)
    judge, begun = JudgeServer(config(folder, batch_rows=2), "cpu"), []
    try:
        for key, length in enumerate([20, 20, 20, 30, 20]):
            judge.add(GradeRequest(key, "", "", "1" * length, {}))
        seen = []
        while judge.num_waiting:
            batch = judge.next_batch(begun.append)
            seen.append(([row.key for row in batch], len(judge._unread), list(begun)))
            judge.drop([4])
    finally:
        judge.model.close()
    assert seen == [([0, 1], 2, [1, 2]), ([2, 3], 0, [1, 2, 3])]


def test_a_batch_without_memory_is_tried_again_with_no_layer_left_in_place(folder, monkeypatch):
    """One row as well, before it is given up; layers return after several batches with room."""
    judge = JudgeServer(config(folder, resident_ratio=1.0), "cpu")
    model, seen, fits = judge.model, [], {"resident": 0, "rows": 2}

    def prefill(rows, cache):
        seen.append((len(rows), model.layers.num_resident))
        if model.layers.num_resident > fits["resident"] or len(rows) > fits["rows"]:
            raise torch.OutOfMemoryError("no room")
        return real(rows, cache)

    real = model._prefill
    monkeypatch.setattr(model, "_prefill", prefill)
    try:
        for key in range(4):
            judge.add(GradeRequest(key, "", "", "1" * 9, {}))
        assert [r.error for r in judge.score(judge.next_batch())] == [""] * 4
        assert seen == [(4, 5), (2, 0), (2, 0)]
        seen.clear()
        for key in range(STEADY):
            judge.add(GradeRequest(4 + key, "", "", "1" * key, {}))
            assert [r.error for r in judge.score(judge.next_batch())] == [""]
        assert seen == [*[(1, 0)] * (STEADY - 1), (1, 5), (1, 0)]
        seen.clear()
        fits["rows"] = 0
        judge.add(GradeRequest(99, "", "", "1", {}))
        assert [r.error for r in judge.score(judge.next_batch())] == [
            "memory: OutOfMemoryError: no room"
        ]
        assert seen == [(1, 0), (1, 0)]
    finally:
        model.close()


def test_a_rubric_that_a_row_does_not_suit_costs_that_row(folder, tmp_path):
    path = tmp_path / "points.jinja"
    path.write_text("{{ (fields.points / 2) | int }};{{ response }}=")
    judge = JudgeServer(dataclasses.replace(config(folder), rubric=str(path)), "cpu")
    try:
        judge.add(GradeRequest(0, "", "", ">1", {"points": None}))
        judge.add(GradeRequest(1, "", "", ">1", {"points": 4}))
        first, second = (judge.score(judge.next_batch())[0] for _ in range(2))
    finally:
        judge.model.close()
    assert first.error.startswith("rubric: --reward.rubric: TypeError") and not second.error


@pytest.mark.parametrize(("steps", "code"), [(218, 0), (600, 1)])
def test_a_judge_that_reached_the_target_is_made_whatever_one_more_batch_says(
    tmp_path, monkeypatch, steps, code
):
    monkeypatch.setattr(judge, "make", lambda cfg: (0.992, steps))
    assert judge.main(["--out", str(tmp_path), "--steps", "600"]) == code

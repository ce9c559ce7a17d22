"""`python -m rlcore profile` on the tiny model, and how rows are made of what engines report."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlcore.cli import profile as command
from rlcore.records import AnyEvent, Finished, LengthReport, Request, Stats
from rlcore.sim import profile
from tests import runs


def test_the_torch_engine_is_measured_and_the_file_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "LEAST_S", 0.0)
    monkeypatch.setattr(command, "REPORT_S", 0.0)  # 16 steps may take no longer than a report
    model, file = runs.tiny_model(tmp_path / "model"), tmp_path / "new" / "profile.json"
    words = [
        "--model.path",
        str(model),
        "--model.dtype",
        "float32",
        "--rollout.kv_cache_tokens",
        "400",
    ]
    sizes = ["--batch", "2", "8", "--context", "24", "60", "--steps", "16", "--out", str(file)]
    assert command.main([*words, *sizes]) == 0
    said = capsys.readouterr().out
    assert "best: --rollout.tp 1" in said and str(file) in said
    found = profile.read(file)
    assert found.keys() == {1} and found[1].cost.cache_tokens == 400
    rows = found[1].decode
    assert [r.sequences for r in rows] == [2, 8, 2]  # 8 x (52 + 16) tokens have no room
    wanted = (24, 24, 60)
    assert all(w <= r.context <= w + 8 for r, w in zip(rows, wanted, strict=True)), rows
    assert all(r.step_s > 0 for r in found[1].decode) and found[1].start_s > 0
    assert [r.tokens for r in found[1].prefill] == [6, 15, 24, 60]
    table = json.loads(file.read_text())
    assert (table["engine"], table["dtype"], table["best_tp"]) == ("torch", "float32", 1)


class Told:
    """An engine with a clock of its own: a step takes 10 ms, one sequence begins 2 steps late."""

    def __init__(self, late: int = 2) -> None:
        self.late, self.events = late, []

    def submit(self, requests: list[Request]) -> None:
        ids, steps = tuple(r.id for r in requests), requests[0].sampling.max_tokens
        lengths = [0] * len(ids)
        for step in range(1, steps + self.late + 1):
            lengths = [
                n + 1 if n < steps and (k or step > self.late) else n for k, n in enumerate(lengths)
            ]
            live = [k for k, n in enumerate(lengths) if n < steps]
            self.events.append(
                LengthReport(
                    time=step / 100,
                    ids=tuple(ids[k] for k in live),
                    lengths=tuple(lengths[k] for k in live),
                )
            )
        self.events.append(Stats(cache_tokens=1000, cache_used=0.5))
        self.events += [
            Finished(id=i, num_tokens=steps, finish="length", time=(steps + self.late) / 100)
            for i in ids
        ]

    def poll(self, timeout_s: float) -> list[AnyEvent]:
        events, self.events = self.events, []
        return events


def bench(engine: Any = None) -> command.Bench:
    return command.Bench(engine or Told(), vocab_size=10, most=200, deadline_s=5)


def test_a_step_is_timed_from_when_all_sequences_have_tokens() -> None:
    """Of 4 sequences of 20 + 10 tokens: at step 3 all have begun, with 1, 3, 3, 3 tokens."""
    seconds, row = bench().decode(4, 20, 10)
    assert row is not None and seconds == pytest.approx(0.09)
    assert row.context == pytest.approx(20 + (2.5 + 10) / 2)
    assert row.step_s == pytest.approx(0.09 / 7.5)


def test_what_ends_before_all_have_begun_is_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    made = bench(Told(late=40))
    assert made.decode(4, 20, 10) == (0.0, None)
    assert made.row(4, 20, 16) is None
    assert "skipped: 4 sequences of 20 tokens" in capsys.readouterr().out


def test_as_many_steps_are_timed_as_the_cache_has_room_for() -> None:
    """More than 16 steps would be wanted, and 16 x (40 + 32) tokens have no room in 1,000."""
    made = bench()
    made.cache_tokens = 1000
    row = made.row(16, 48, 64)
    assert row is not None and row.context == pytest.approx(40 + (1 + 16) / 2, abs=1.5)
    assert made.row(16, 70, 64) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--tp 2", "--tp 2: the torch engine has one rank"),
        ("--batch 0", "--batch 0: must be at least 1"),
        ("--context 250", "--context 250 to 250: .* the model's 256 positions"),
        ("--rollout.tpp 2", "--rollout.tpp: there is no such key"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    import re

    model = runs.tiny_model(tmp_path / "model")
    assert command.main(["--model.path", str(model), *words.split()]) == 2
    assert re.match(said, capsys.readouterr().err)

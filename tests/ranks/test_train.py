"""The whole program on two ranks: engines in child processes, a rank killed, an engine killed, and
another layout after a resume."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlcore.metrics import trace
from tests import kit, runs

pytestmark = pytest.mark.ranks(2)

KEPT = "--checkpoint.every", 2, "--checkpoint.keep", 0, "--checkpoint.no_export_hf"
SLOW = "--debug.decode_floor_ms", 40
SCORES = ("critic/score/mean", "critic/score/max", "critic/score/min", "critic/score/std_err")
LENGTHS = ("response_length/mean", "response_length/max", "response_length/min")


class Worlds:
    """Runs on two ranks and on one, and what the tests look at."""

    def __init__(self, folder: Path):
        self.folder, self.runs = folder, folder / "runs"
        self.model = runs.tiny_model(folder / "model")
        odd = runs.tiny_model(folder / "odd", num_attention_heads=3, num_key_value_heads=1)
        # Rank 0 comes from a world of its own, which rank 1 has never been in.
        before = self.job("before", "--run.steps", 1) | {"ranks": 1}
        killed = self.job("killed", *KEPT, "--debug.kill_at_step", 3)
        self.killed = runs.run(2, [before, killed], folder / "killed")
        tp2 = *KEPT, "--train.tp", 2
        saved = self.runs / "tp2" / "checkpoints" / "step_000002"
        jobs = [
            self.job("tp2", *tp2, *SLOW, "--log.rollouts", -1) | {"programs": True},
            self.job("bereft", *KEPT, *SLOW, "--rollout.progress_interval_s", 0.05)
            | {"programs": True},
            self.job("onward", *KEPT, "--run.resume", saved) | {"ranks": 1},
            self.job("straight", *KEPT, "--log.trace_steps", 1),
            self.job("resumed", *KEPT, run="killed"),
            self.job("alone", *KEPT) | {"ranks": 1},
            self.job("heads", "--train.tp", 2, "--model.path", odd),
            self.job("data", "--data.train", folder / "nothing.jsonl"),
        ]
        gang = runs.Running(2, jobs, folder / "gang")
        try:
            (self.killed_engine,) = self._kill_engines(gang, "tp2", [1])
            self._kill_engines(gang, "bereft", [0, 1])
        finally:
            self.gang = gang.wait(280)

    def job(self, name: str, *more: object, run: str = "") -> runs.Job:
        argv = runs.arguments(self.model, self.runs, run or name, *more)
        return {"name": name, "argv": argv}

    def _kill_engines(self, gang: runs.Running, name: str, ranks: list[int]) -> list[int]:
        """Kill the engines of these ranks while they sample for step 3."""
        end = time.monotonic() + 120
        saved = self.runs / name / "checkpoints" / "step_000002"
        while not saved.is_dir():
            assert time.monotonic() < end, f"step 2 of {name} is not there"
            assert gang.processes[1].poll() is None, "rank 1 has ended"
            time.sleep(0.02)
        time.sleep(0.4)
        engines = [
            child
            for rank in ranks
            for child in psutil.Process(gang.processes[rank].pid).children()
            if "rlcore.rollout.process" in child.cmdline()
        ]
        assert len(engines) == len(ranks), engines
        for engine in engines:
            engine.send_signal(signal.SIGKILL)
        return [engine.pid for engine in engines]

    def rows(self, name: str, ranks: int = 2) -> dict[int, dict[str, Any]]:
        self.gang.check(name, ranks)
        return runs.rows(self.runs / name)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(tmp_path_factory.mktemp("two_ranks"))


def close(ours: dict[str, Any], theirs: dict[str, Any], rtol: float) -> None:
    """The same samples, and the same update up to rounding."""
    for name in (*SCORES, *LENGTHS):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-12), name
    for name in ("actor/loss", "actor/grad_norm", "actor/entropy"):
        assert ours[name] == pytest.approx(theirs[name], rel=rtol), name


def test_four_steps_equal_two_a_kill_of_rank_0_and_two_bit_by_bit(worlds: Worlds) -> None:
    straight, resumed = worlds.rows("straight"), runs.rows(worlds.runs / "killed")
    worlds.gang.check("resumed", 2)
    assert worlds.killed.codes[0] == -signal.SIGKILL
    assert list(straight) == list(resumed) == [0, 1, 2, 3, 4]
    for step in straight:
        assert runs.same(resumed[step]) == runs.same(straight[step]), step
    ours, theirs = (runs.checkpoint(worlds.runs / n, 4) for n in ("killed", "straight"))
    assert ours.pop("common") == theirs.pop("common")
    assert ours.pop("state") == theirs.pop("state")
    kit.assert_bitwise(ours, theirs)


def test_the_trace_shows_both_ranks_on_one_axis(worlds: Worlds) -> None:
    worlds.gang.check("straight", 2)
    path, ranks = trace.merge(worlds.runs / "straight")
    events = json.loads(path.read_text())["traceEvents"]
    assert ranks == 2
    for phase in ("gen", "update_weights"):  # both ranks are in it at the same time
        bars = [e for e in events if e.get("name") == phase and e["args"]["step"] == 1]
        assert sorted(e["pid"] for e in bars) == [0, 1], phase
        assert max(e["ts"] for e in bars) < min(e["ts"] + e["dur"] for e in bars), phase


def test_the_number_of_ranks_changes_no_sample_and_no_update(worlds: Worlds) -> None:
    """One rank with its engine in the process against two with engines in children, each of which
    decodes fewer requests at a time than it has."""
    alone, straight = worlds.rows("alone", 1), worlds.rows("straight")
    assert alone[0]["val-core/label/acc/mean@1"] == straight[0]["val-core/label/acc/mean@1"]
    for step in (1, 2):
        close(straight[step], alone[step], 1e-5)


def test_two_steps_after_a_change_of_layout_are_those_of_the_old_one(worlds: Worlds) -> None:
    onward, tp2 = worlds.rows("onward", 1), worlds.rows("tp2")
    assert list(onward) == [3, 4]
    for step in (3, 4):
        close(onward[step], tp2[step], 1e-4)


def test_a_killed_engine_costs_one_round_its_speed_and_nothing_else(worlds: Worlds) -> None:
    tp2, alone = worlds.rows("tp2"), worlds.rows("alone", 1)
    assert [n for n, row in tp2.items() if row.get("sched/engines_down")] == [3]
    assert tp2[3]["sched/engines_down"] == 1
    close(tp2[3], alone[3], 1e-4)
    said = worlds.gang.text("tp2")
    assert f"engine process {worlds.killed_engine} of rank 1 was killed by signal 9" in said
    assert "Traceback" not in said
    log = (worlds.runs / "tp2" / "logs" / "rank1.log").read_text()
    assert "restarting the engine" in log


def test_a_round_that_lost_all_its_engines_goes_on_with_the_tokens_they_had(
    worlds: Worlds,
) -> None:
    bereft, alone = worlds.rows("bereft"), worlds.rows("alone", 1)
    assert bereft[3]["sched/engines_down"] == 2 and bereft[3]["sched/repairs"] == 1
    assert bereft[3]["sched/kept_tokens"] > 0
    for step in (3, 4):
        close(bereft[step], alone[step], 1e-4)
    said = worlds.gang.text("bereft")
    assert "restarting the engine" in said and "Traceback" not in said


def test_the_restarted_engine_takes_its_share_of_the_next_round(worlds: Worlds) -> None:
    worlds.gang.check("tp2", 2)
    lines = (worlds.runs / "tp2" / "rollouts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert all([r["step"] for r in rows].count(step) == 16 for step in (1, 2, 3, 4))
    mine = [row["step"] for row in rows if row["rank"] == 0]
    assert [mine.count(step) for step in (1, 2, 4)] == [8, 8, 8]
    assert 8 < mine.count(3) <= 16


def test_a_layout_that_does_not_fit_the_model_is_said_once(worlds: Worlds) -> None:
    said = [worlds.gang.text("heads", rank) for rank in (0, 1)]
    assert [worlds.gang.code("heads", rank) for rank in (0, 1)] == [2, 2]
    assert sum(text.count("--train.tp 2") for text in said) == 1
    assert not any("Traceback" in text for text in said)


def test_a_fault_that_one_rank_finds_ends_all(worlds: Worlds) -> None:
    said = [worlds.gang.text("data", rank) for rank in (0, 1)]
    assert [worlds.gang.code("data", rank) for rank in (0, 1)] == [2, 1]
    assert "nothing.jsonl: no such file" in said[0]
    assert "Traceback" not in said[0] + said[1]
    assert "rank 1: " not in said[1]  # it sees only that rank 0 has gone, and that goes to its file

"""What a run prints."""

import io
import logging
import sys
from pathlib import Path

import pytest
import rich

from rlcore.algos.base import AlgoConfig
from rlcore.config.schema import Config
from rlcore.metrics.screen import Screen, evaluation_lines, final_table, step_line
from rlcore.metrics.sinks import summarise
from rlcore.trainer.report import notes
from rlcore.utils import log as rl_log
from rlcore.utils.clock import VirtualClock

STEP = {
    "critic/score/mean": 0.53,
    "actor/pg_loss": -0.0123,
    "actor/ppo_kl": 1.23e-4,
    "response_length/mean": 26.4,
    "perf/total_num_tokens": 9300.0,
    "timing_s/step": 0.62,
    "timing_s/gen": 0.3,
    "timing_s/update_actor": 0.25,
    "timing_s/update_weights": 0.02,
    "timing_s/adv": 0.001,
}


@pytest.fixture
def lines(caplog, monkeypatch):
    monkeypatch.setattr(rl_log.log, "propagate", True)
    caplog.set_level(logging.INFO, logger="rlcore")
    return lambda: [record.getMessage() for record in caplog.records]


def test_what_is_not_as_it_should_be_stands_at_the_end_of_the_line(lines):
    screen = Screen(200, progress=False, clock=VirtualClock())
    screen.step(12, STEP, note="mismatch: max |dp| 0.6")
    screen.step(13, STEP)
    assert lines()[0].endswith(
        "(gen 0.30 update_actor 0.25 update_weights 0.02)  mismatch: max |dp| 0.6"
    )
    assert lines()[1].endswith("update_weights 0.02)")


@pytest.mark.parametrize(
    ("estimator", "is_named"), [("grpo", True), ("gdpo", False), ("gae", False)]
)
def test_equal_rewards_are_named_where_nothing_else_prefers_a_response(estimator, is_named):
    """The terms of equal sums can differ, which gdpo compares."""
    cfg = Config(algo=AlgoConfig(adv_estimator=estimator))
    said = notes({"training/equal_reward_groups": 1.0}, cfg)
    assert said.startswith("rewards are equal in every group") is is_named
    assert notes({"training/equal_reward_groups": 0.5}, cfg) == ""


def test_a_step_is_one_line():
    assert step_line(12, 200, STEP) == (
        "step  12/200  reward 0.530  loss -0.0123  kl 1.2e-04  len 26  15.0k tok/s  "
        "0.62 s (gen 0.30 update_actor 0.25 update_weights 0.02)"
    )


def test_what_was_not_measured_is_left_out_and_trouble_is_shown():
    assert step_line(1, 2, {"critic/score/mean": 1.0, "actor/skipped": 1.0}) == (
        "step 1/2  reward 1.000  skipped 1"
    )


def test_the_line_of_a_slow_step_with_every_phase_fits_140_columns():
    phases = (
        "gen",
        "reward",
        "exchange",
        "old_log_prob",
        "ref",
        "teacher",
        "adv",
        "update_actor",
        "update_weights",
    )
    times = {f"timing_s/{phase}": 123.4 for phase in phases}
    line = step_line(1000, 1000, STEP | times | {"timing_s/step": 987.2, "actor/kl_loss": 0.001})
    assert len(line) <= 140 and line.count(" 123") == 4


def test_an_evaluation_is_a_line_for_each_data_set():
    metrics = {
        "val-core/a/acc/mean@4": 0.5,
        "val-core/a/acc/pass@4": 0.75,
        "val-aux/a/acc/std_err@4": 0.014,
        "val-aux/a/num_prompts": 1024.0,
        "val-core/b/acc/mean@4": 0.25,
    }
    assert evaluation_lines(20, 200, metrics) == [
        "step  20/200  a accuracy 0.500 +- 0.014  pass@4 0.750  (1024 prompts)",
        "step  20/200  b accuracy 0.250",
    ]


def test_the_final_table_shows_accuracy_and_where_the_time_went():
    rows = [
        {
            "step": 0,
            "val-core/label/acc/mean@1": 0.5,
            "timing_s/testing": 1.0,
            "timing_s/start": 8.0,
        },
        {"step": 1, "timing_s/step": 6.0, "timing_s/gen": 4.0, "perf/samples_per_s": 50.0},
        {
            "step": 2,
            "timing_s/step": 4.0,
            "timing_s/gen": 3.0,
            "timing_s/testing": 1.0,
            "perf/samples_per_s": 50.0,
            "val-core/label/acc/mean@1": 0.75,
        },
    ]
    table = [" ".join(line.split()) for line in final_table(summarise(rows))]
    assert "label 0.500 0.750 +0.250" in table
    # 11 s of steps: 7 sampling, 1 evaluating, 3 that no phase accounts for
    assert table[table.index("time s per step share total s") + 2 :][:5] == [
        "gen 3.500 63.6 % 7.0",
        "other 1.500 27.3 % 3.0",
        "testing 0.500 9.1 % 1.0",
        "all 5.500 100 % 11.0",
        "before the first step: testing 1.0 s, start 8.0 s",
    ]
    assert table[-1] == "2 steps: 50 samples/s"


def test_seconds_are_of_the_steps_of_this_run():
    """A run that began from another run's checkpoint has no rows of the steps before."""
    rows = [{"step": n, "timing_s/step": 2.0, "timing_s/gen": 1.0} for n in range(51, 101)]
    table = [" ".join(line.split()) for line in final_table(summarise(rows))]
    assert "all 2.000 100 % 100.0" in table and table[-1] == "50 steps"


def test_a_slow_start_is_in_no_share():
    """As SGLang had it: 117 s until the first push is through, then steps of 10 s."""
    rows = [
        {
            "step": 0,
            "timing_s/start": 116.0,
            "timing_s/update_weights": 117.0,
            "timing_s/testing": 20.0,
        },
        *({"step": n, "timing_s/step": 10.0, "timing_s/update_weights": 0.5} for n in (1, 2, 3)),
    ]
    table = [" ".join(line.split()) for line in final_table(summarise(rows))]
    shares = [float(line.split()[2]) for line in table if "%" in line and line[:3] != "all"]
    assert "update_weights 0.500 5.0 % 1.5" in table and sum(shares) == pytest.approx(100, abs=0.1)
    assert "before the first step: start 116.0 s, update_weights 117.0 s, testing 20.0 s" in table


def test_the_final_table_of_a_run_without_steps_is_short():
    assert final_table(summarise([])) == []
    only_evaluated = [{"step": 0, "val-core/label/acc/mean@1": 0.5}]
    assert len(final_table(summarise(only_evaluated))) == 3


def test_without_a_terminal_a_long_phase_speaks_every_half_minute(lines):
    clock = VirtualClock()
    screen = Screen(10, progress=False, clock=clock)
    screen.phase("gen")
    for second in range(70):
        clock.advance(1.0)
        screen.advance(second, 256)
    assert lines() == ["step 1/10  gen 29/256", "step 1/10  gen 59/256"]


def test_on_a_terminal_lines_pass_above_the_bar_and_the_logger_gets_its_stream_back(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    rich.get_console()  # made without a terminal, it never draws: not the console of the bar
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    handlers = list(rl_log.log.handlers)
    try:
        rl_log.setup(0)
        screen = Screen(2)
        screen.phase("gen")
        screen.advance(3, 8)
        assert screen._bar is not None
        screen._bar._progress.refresh()  # its own thread may come late
        screen.step(1, {"critic/score/mean": 0.5})
        screen.end({"steps": 1}, Path("runs/x"), Path("runs/x/curve.png"))
        assert rl_log.log.handlers[0].stream is terminal and sys.stdout is terminal
    finally:
        rl_log.log.handlers[:] = handlers
    assert "step 1/2  reward 0.500" in terminal.getvalue()
    assert "plot: runs/x/curve.png" in terminal.getvalue()
    assert "3/8" in terminal.getvalue() and "\x1b[" in terminal.getvalue()

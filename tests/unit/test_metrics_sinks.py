"""The log files of a run: whole lines, no step twice after a resume, summaries that add up."""

import importlib.util
import json
import math
import resource
import sys
import time
from types import SimpleNamespace
from urllib.request import urlopen

import numpy as np
import pytest

from rlcore.metrics.jsonl import JsonLines, read_lines, write_atomic
from rlcore.metrics.sinks import (
    MetricsWriter,
    Prometheus,
    Wandb,
    accuracies,
    read_metrics,
    summarise,
)


def _steps(path):
    return [row["step"] for row in read_lines(path)]


def test_resume_drops_the_steps_that_will_be_written_again(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    for step in range(6):
        writer.write(step, {"actor/lr": step / 10})
        writer.rollouts(step, [{"id": f"t{step}.0"}, {"id": f"t{step}.1"}])
    # no close: a killed run does not close either
    resumed = MetricsWriter(tmp_path, tensorboard=False, next_step=4)
    for step in (4, 5):
        resumed.write(step, {"actor/lr": 0.9})
        resumed.rollouts(step, [{"id": "new"}])
    resumed.close()
    assert _steps(tmp_path / "metrics.jsonl") == [0, 1, 2, 3, 4, 5]
    assert [row["actor/lr"] for row in read_metrics(tmp_path)] == [0, 0.1, 0.2, 0.3, 0.9, 0.9]
    assert _steps(tmp_path / "rollouts.jsonl") == [0, 0, 1, 1, 2, 2, 3, 3, 4, 5]


def test_a_torn_last_line_is_dropped_on_resume_and_skipped_by_readers(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "actor/l')
    assert _steps(path) == [1]
    lines = JsonLines(path, next_step=2)
    lines.append(2, [{"x": 1}])
    assert path.read_text() == '{"step": 1}\n{"step": 2, "x": 1}\n'


def test_a_whole_last_line_without_its_line_end_is_torn_too(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    JsonLines(path, next_step=9).append(9, [{}])
    assert _steps(path) == [1, 9]


def test_a_damaged_line_in_the_middle_costs_only_itself(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n\0\0\0\n{"step": 2}\n{"step": 3}\n')
    JsonLines(path, next_step=3).close()
    assert _steps(path) == [1, 2]


def test_half_a_surrogate_pair_is_escaped_and_the_run_goes_on(tmp_path):
    """A reply may be cut anywhere; UTF-8 has no bytes for half a pair."""
    path = tmp_path / "rollouts.jsonl"
    lines = JsonLines(path, next_step=0)
    lines.append(0, [{"text": "a\ud83d é", "\udc00": 1.0}, {"text": "é"}])
    written = path.read_text(encoding="utf-8")
    assert written.splitlines()[1] == '{"step": 0, "text": "é"}'
    assert [row["text"] for row in read_lines(path)] == ["a\ud83d é", "é"]


def test_a_full_disk_leaves_whole_lines_and_names_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path, next_step=0)
    lines.append(0, [{"x": 1}])
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
    try:
        with pytest.raises(OSError, match=r"cannot write .*metrics\.jsonl \(File too large\)"):
            lines.append(1, [{"x": "a line that is longer than what is left"}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    lines.append(1, [{"x": 2}])
    assert _steps(path) == [0, 1]


def test_steps_only_grow(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(3, {})
    with pytest.raises(ValueError, match="metrics of step 3 were written after step 3"):
        writer.write(3, {})
    with pytest.raises(ValueError, match="step 2 was appended after step 3"):
        JsonLines(tmp_path / "x.jsonl", next_step=4).append(2, [{}])


def test_an_undeclared_metric_is_refused_and_leaves_no_line(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    with pytest.raises(ValueError, match="not declared"):
        writer.write(1, {"actor/lr": 1.0, "actor/nonsense": 1.0})
    with pytest.raises(ValueError, match="metric actor/lr: 'x' is not a number"):
        writer.write(1, {"actor/lr": "x"})
    assert read_metrics(tmp_path) == []


def test_numbers_of_numpy_are_plain_and_nan_is_null(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(1, {"actor/lr": np.float32(0.5), "actor/grad_norm": math.inf})
    writer.rollouts(1, [{"tokens": np.arange(3, dtype=np.int32), "score": np.float64("nan")}])
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 1,
        "actor/lr": 0.5,
        "actor/grad_norm": None,
    }
    assert list(read_lines(tmp_path / "rollouts.jsonl")) == [
        {"step": 1, "tokens": [0, 1, 2], "score": None}
    ]
    assert math.isnan(read_metrics(tmp_path)[0]["actor/grad_norm"])


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = MetricsWriter(tmp_path)
    for step in range(4):
        writer.write(step, {"actor/lr": float(step)})
    writer.close()
    writer = MetricsWriter(tmp_path, next_step=2)
    writer.write(2, {"actor/lr": 20.0})
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("actor/lr")]
    assert found == [(0, 0.0), (1, 1.0), (2, 20.0)]


def _page(port):
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def test_prometheus_reads_the_last_value_of_every_metric(tmp_path):
    sink = Prometheus("127.0.0.1", 0, "tiny")
    writer = MetricsWriter(tmp_path, tensorboard=False, sinks=[sink])
    writer.write(1, {"actor/loss": 0.5, "val-core/gsm8k/acc/mean@4": 0.25})
    writer.write(2, {"actor/loss": math.nan})
    page = _page(sink.port)
    writer.close()
    writer.close()
    assert 'rlcore_step{run="tiny"} 2.0' in page
    assert 'rlcore_actor_loss{run="tiny"} NaN' in page
    assert 'rlcore_val_core_gsm8k_acc_mean_4{run="tiny"} 0.25' in page
    assert "# HELP rlcore_actor_loss total loss of the actor" in page


def test_a_port_that_is_taken_is_named(tmp_path):
    first = Prometheus("127.0.0.1", 0, "a")
    with pytest.raises(ValueError, match=f"--log.prometheus_port {first.port}: cannot listen on"):
        Prometheus("127.0.0.1", first.port, "b")
    first.close()


def test_without_wandb_the_key_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--log.wandb mine: wandb is not installed"):
        Wandb("mine", tmp_path, {})


def test_wandb_gets_the_steps_that_a_resumed_run_repeats(tmp_path, monkeypatch):
    """W&B drops what is logged for a step below its own."""
    rows, axes = [], []

    class Run:
        def log(self, values, step=None):
            assert step is None
            rows.append(values)

        def define_metric(self, name, step_metric=None):
            axes.append((name, step_metric))

        def finish(self):
            pass

    monkeypatch.setattr("rlcore.metrics.sinks.check_wandb", lambda project: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **keys: Run()))
    for start in (1, 2):
        sink = Wandb("mine", tmp_path, {})
        for step in range(start, 4):
            sink.write(step, {"actor/loss": 0.1 * step})
    assert [row["training/global_step"] for row in rows] == [1, 2, 3, 2, 3]
    assert axes[1] == ("*", "training/global_step")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="needs wandb: bash tools/setup.sh --wandb"
)
def test_wandb_gets_every_step_and_a_resumed_run_the_same_id(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for step in (1, 2):
        writer = MetricsWriter(tmp_path, False, step, [Wandb("mine", tmp_path, {"a.b": 1})])
        writer.write(step, {"actor/loss": 0.5})
        writer.close()
    files = list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({f.name for f in files}) == 1
    end = time.monotonic() + 60  # its own process writes the file, and may be behind
    while not all(b"actor/loss" in f.read_bytes() for f in files):
        assert time.monotonic() < end, files
        time.sleep(0.1)


ROWS = [
    {
        "step": 0,
        "val-core/a/acc/mean@1": 0.5,
        "val-core/b/acc/mean@1": 0.1,
        "timing_s/testing": 3.0,
    },
    {
        "step": 1,
        "timing_s/start": 9.0,
        "timing_s/step": 1.0,
        "timing_s/gen": 0.5,
        "perf/samples_per_s": 10.0,
    },
    {
        "step": 2,
        "timing_s/step": 3.0,
        "timing_s/gen": 1.5,
        "timing_s/save_checkpoint": 1.0,
        "perf/samples_per_s": 2.0,
        "val-core/a/acc/mean@1": 0.7,
        "val-aux/a/acc/std_err@1": 0.02,
        "val-core/b/acc/mean@1": 0.3,
    },
]


def test_the_summary_of_a_run_worked_by_hand():
    assert summarise(ROWS) == {
        "steps": 2,
        "measured_steps": 2,
        "val/accuracy_start": pytest.approx(0.3),
        "val/accuracy_start/a": 0.5,
        "val/accuracy_start/b": 0.1,
        "val/accuracy_end": pytest.approx(0.5),
        "val/accuracy_end/a": 0.7,
        "val/accuracy_end/b": 0.3,
        "val/std_err_start/a": pytest.approx(math.nan, nan_ok=True),
        "val/std_err_start/b": pytest.approx(math.nan, nan_ok=True),
        "val/std_err_end/a": 0.02,
        "val/std_err_end/b": pytest.approx(math.nan, nan_ok=True),
        "perf/samples_per_s": pytest.approx(4.0),  # 10 + 6 samples in 4 s
        "timing_s/step": 2.0,
        "timing_s/gen": 1.0,
        "timing_s/save_checkpoint": 0.5,
        "before_s/testing": 3.0,  # of the whole run, in no mean
        "before_s/start": 9.0,
    }


def test_accuracies_carry_their_standard_errors():
    found = accuracies(ROWS)["a"]
    assert found[1] == (2, 0.7, 0.02)
    assert found[0][:2] == (0, 0.5) and math.isnan(found[0][2])


def test_summary_json_holds_the_summary_and_what_the_caller_adds(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    for row in ROWS:
        writer.write(row["step"], {name: value for name, value in row.items() if name != "step"})
    writer.summary({"seed": 3})
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["steps"] == 2 and found["seed"] == 3
    assert found["val/accuracy_end"] == pytest.approx(0.5)


def test_an_atomic_write_replaces_the_file_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "summary.json"
    write_atomic(path, "old")
    write_atomic(path, "new")
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]

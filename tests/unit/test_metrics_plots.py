"""The figures: that they are drawn from whatever a run measured. How they look needs eyes."""

import json
import struct

import pytest

from rlcore.metrics import plots


def _run(folder, rows):
    folder.mkdir()
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def _step(step, **more):
    row = {
        "step": step,
        "critic/score/mean": 0.5,
        "critic/score/std_err": 0.1,
        "response_length/mean": 20.0,
        "timing_s/step": 1.0,
        "timing_s/gen": 0.6,
    }
    return row | more


def _size(png):
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_a_curve_is_drawn_at_1200_by_800(tmp_path):
    accuracy = {"val-core/label/acc/mean@1": 0.5, "val-aux/label/acc/std_err@1": 0.02}
    rows = [{"step": 0, **accuracy}, *[_step(s) for s in range(1, 50)], _step(50, **accuracy)]
    run = _run(tmp_path / "run", rows)
    assert plots.curve(run) == run / "curve.png"
    assert _size(run / "curve.png") == (1200, 800)


@pytest.mark.filterwarnings("error")
def test_a_run_of_one_step_with_a_loss_that_is_not_finite_is_drawn(tmp_path):
    run = _run(tmp_path / "run", [_step(1, **{"critic/score/mean": None})])
    plots.curve(run)


@pytest.mark.filterwarnings("error")
def test_a_run_that_only_evaluated_is_drawn(tmp_path):
    plots.curve(_run(tmp_path / "run", [{"step": 0, "val-core/a/b/acc/mean@1": 0.5}]))


def test_runs_are_compared_in_one_figure(tmp_path):
    a = _run(tmp_path / "a", [_step(s) for s in range(1, 5)])
    b = _run(tmp_path / "b", [_step(s) for s in range(1, 9)])
    out = plots.compare([a, b], tmp_path / "new" / "both.png")
    assert _size(out) == (1800, 800)


def test_the_detail_has_a_panel_for_what_was_measured_and_none_for_the_rest(tmp_path):
    more = {"actor/entropy": 1.0, "perf/gen_tokens_per_s": 9.0}
    more["training/off_policy/token_staleness/max"] = 0.0  # of a synchronous run
    run = _run(tmp_path / "run", [_step(s, **more) for s in range(1, 9)])
    assert _size(plots.detail(run)) == (1200, 400)  # entropy and speed
    rounds = [{"step": s, "counted": [["t0.0", 3, 1.0], ["t0.1", 40, 0.0]]} for s in range(1, 9)]
    (run / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rounds))
    assert _size(plots.detail(run)) == (1800, 800)  # lengths: histogram, tail, by step
    with pytest.raises(ValueError, match="no step yet; plot it after step 1"):
        plots.detail(_run(tmp_path / "other", [{"step": 0, "val-core/a/acc/mean@1": 0.5}]))


def test_a_folder_without_metrics_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no metrics.jsonl with steps"):
        plots.curve(tmp_path)
    with pytest.raises(ValueError, match="no runs given"):
        plots.compare({}, tmp_path / "x.png")

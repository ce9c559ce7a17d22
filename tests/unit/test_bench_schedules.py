"""tools/bench_schedules.py: its figures from rows that were made up."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool():
    path = ROOT / "tools" / "bench_schedules.py"
    spec = importlib.util.spec_from_file_location("bench_schedules", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_schedules"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_schedules"]


def a_run(folder: Path, step_s: float, accuracies: list[float], **more: float) -> Path:
    """Four steps, evaluated at 0, 2 and 4; the first step takes a minute more."""
    rows = [{"step": 0, "val-core/label/acc/mean@1": accuracies[0]}]
    for step in range(1, 5):
        seconds = step_s + 60.0 * (step == 1)
        row = {"step": step, "timing_s/step": seconds, "timing_s/gen": seconds / 2}
        rows.append(row | {"sched/decode_steps": 100.0, "training/trained_rows": 8.0} | more)
        if step % 2 == 0:
            rows[-1]["val-core/label/acc/mean@1"] = accuracies[step // 2]
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text("{}")
    return folder


def test_the_first_step_is_no_mean_but_its_seconds_count(tool, tmp_path):
    found = tool.figures(a_run(tmp_path / "r", 2.0, [0.5, 0.6, 0.7]))
    assert found["step_s"] == 2.0 and found["gen_s"] == 1.0
    assert found["seconds"] == 68.0
    assert found["curve"] == [(0.0, 0, 0.5), (64.0, 2, 0.6), (68.0, 4, 0.7)]


def test_an_accuracy_between_two_evaluations_lies_on_the_line(tool):
    curve = [(0.0, 0, 0.5), (10.0, 2, 0.7), (20.0, 4, 0.8)]
    assert tool.at_time(curve, 5.0) == pytest.approx(0.6)
    assert tool.at_time(curve, 10.0) == pytest.approx(0.7)
    assert tool.at_time(curve, 99.0) == 0.8


def test_arms_stand_beside_all_with_ratios_and_equal_time(tool, tmp_path, capsys):
    for seed in (0, 1):
        a_run(tmp_path / f"schedule_all_{seed}_4_0", 4.0, [0.5, 0.6, 0.7 + 0.1 * seed])
        long = {"sched/long_round": 0.25}
        a_run(tmp_path / f"schedule_tail_{seed}_4_0", 2.0, [0.5, 0.6, 0.7], **long)
    out = tmp_path / "out.json"
    argv = ["--arms", "all", "tail", "--seeds", "0", "1", "--steps", "4"]
    assert tool.main([*argv, "--dir", str(tmp_path), "--json", str(out)]) == 0
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["tail: step_s"]["ratio"] == pytest.approx(0.5)
    assert rows["all: end"]["value"] == pytest.approx(0.75)
    assert rows["all: end"]["std_err"] == pytest.approx(0.05)
    # after the 68 s of `tail`, `all` lies on its way from 68 s to 76 s
    assert rows["all: end_equal_time"]["value"] == pytest.approx(0.6)
    assert rows["tail: long_share"]["value"] == 0.25
    assert "(0.50x)" in capsys.readouterr().out
    assert out.with_suffix(".png").stat().st_size > 5_000

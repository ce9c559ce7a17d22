"""`rlcore report`: its numbers, worked by hand from the files of a run and of `--report`."""

import json
from pathlib import Path

import pytest

from rlcore.cli import report, settings
from rlcore.config import resolve
from tests import runs


def scores(mean: float, error: float, k: int = 4) -> dict[str, float]:
    return {
        f"val-core/val/acc/mean@{k}": mean,
        f"val-core/val/acc/pass@{k}": mean + 0.1,
        f"val-aux/val/acc/std_err@{k}": error,
        "val-aux/val/num_prompts": 64.0,
        "val-aux/val/response_length/mean": 20.0,
    }


def evaluation(model: str, mean: float, error: float) -> str:
    return json.dumps({"model": model, "samples_per_prompt": 4, "metrics": scores(mean, error)})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two of four planned steps on two processes, with figures of a GPU."""
    folder = tmp_path / "runs" / "mine"
    (folder / "logs").mkdir(parents=True)
    for rank in (0, 1):
        (folder / "logs" / f"rank{rank}.log").touch()
    model = runs.tiny_model(tmp_path / "model")
    argv = runs.arguments(
        model, tmp_path / "runs", "mine", "--run.seed", 7, "--algo.clip_high", 0.3
    )
    cfg = settings.parse(argv)
    resolve.save(cfg, folder / "config.json")
    rows = [
        {"step": 0, **scores(0.2, 0.03, 1)},
        {"step": 1, "timing_s/step": 3.0, "timing_s/gen": 2.0, "memory/device_gb/gen": 41.5},
        {
            "step": 2,
            "timing_s/step": 5.0,
            "timing_s/gen": 3.0,
            "memory/device_gb/gen": 40.0,
            "perf/max_memory_allocated_gb": 60.25,
            **scores(0.28, 0.04, 1),
        },
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def written(run: Path, out: Path) -> tuple[str, dict]:
    assert report.main([str(run), "--out", str(out)]) == 0
    assert (out / "curve.png").stat().st_size > 10_000
    return (out / "report.md").read_text(), json.loads((out / "report.json").read_text())


def test_the_report_of_a_command_has_all_that_its_stages_left(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "command.txt").write_text("bash recipes/a.sh --report out\n")
    stages = "preflight\t2\ntrain\t100\npreflight\t3\ntrain\t50\neval_before\t5\neval_after\t6\n"
    (out / "stages.tsv").write_text(stages)
    (out / "before.json").write_text(evaluation("start", 0.3, 0.03))
    (out / "after.json").write_text(evaluation("end", 0.401, 0.04))
    states = [("disk", "WARN", "no room"), ("data", "PASS", "10 rows"), ("gpus", "PASS", "2 here")]
    results = [{"check": check, "state": state, "text": text} for check, state, text in states]
    (out / "preflight.json").write_text(json.dumps(results))
    text, found = written(run, out)
    sentence = (
        "Held-out accuracy of val: 0.300 before, 0.401 after training. The change of "
        "+0.101 +- 0.050 exceeds two standard errors (0.100)."
    )
    for line in (
        "# Report of mine",
        sentence,
        "The run has ended after step 2 of 4.",
        "    bash recipes/a.sh --report out",
        "| steps | 2 of 4 |",
        "| processes | 2 |",
        "| seed | 7 |",
        "| wall time | 166 s (preflight 5 s, train 150 s, eval_before 5 s, eval_after 6 s) in 2 "
        "starts |",
        "Before: start, after: end. Samples of each prompt: 4. +- is one standard error.",
        "| val | mean@4 | 0.3000 +- 0.030 | 0.4010 +- 0.040 | 64 |",
        "| val | pass@4 | 0.4000 | 0.5010 | 64 |",
        "    gen                            2.500      62.5 %               5.0",
        "    --run.seed 7",
        "    --algo.clip_high 0.3",
        "1 WARN, 2 PASS.",
        "    WARN  disk       no room",
    ):
        assert line in text.splitlines(), line
    assert "Peak of all ranks: 60.25 GB in tensors, not measured reserved by torch." in text
    assert "2 here" not in text and "--run.resume" not in text
    assert found["changes"]["val"]["exceeds_two_std_err"] is True
    assert found["changes"]["val"]["std_err"] == pytest.approx(0.05)
    assert found["memory"]["phases"]["gen"]["in_use_gb"] == 41.5
    assert found["settings"]["algo.clip_high"] == "0.3" and found["preflight"] == results
    assert found["machine"]["packages"]["torch"]


def test_the_plan_stands_beside_the_memory_that_was_in_use(run: Path, tmp_path: Path) -> None:
    """The plan is the dry run's."""
    text, found = written(run, tmp_path / "out")
    phases = found["memory"]["phases"]
    planned = f"{phases['gen']['planned_gb']:.2f} GB"
    assert f"| gen | {planned} | 41.50 GB |" in text
    assert phases["update_actor"]["in_use_gb"] is None and phases["update_actor"]["planned_gb"] > 0
    assert (
        f"| update_actor | {phases['update_actor']['planned_gb']:.2f} GB | not measured |" in text
    )


def test_without_its_stages_a_run_reports_its_own_evaluations(run: Path) -> None:
    text, found = written(run, run / "report")
    assert (
        "Held-out accuracy of val: 0.200 before, 0.280 after training. The change of "
        "+0.080 +- 0.050 does not exceed two standard errors (0.100)."
    ) in text
    assert "Before: step 0, after: step 2. Samples of each prompt: 1." in text
    assert "| wall time | not measured |" in text and "    command: not recorded" in text
    assert "not measured: the run was not started with --report." in text
    assert found["stages"] is found["command"] is found["preflight"] is None


def test_one_missing_evaluation_is_not_compared_with_the_other_kind(run: Path) -> None:
    out = run / "report"
    out.mkdir()
    (out / "after.json").write_text(evaluation("end", 0.9, 0.01))
    assert "0.200 before, 0.280 after" in written(run, out)[0]


def test_a_run_without_evaluations_says_that_they_were_not_measured(run: Path) -> None:
    row = {"step": 1, "timing_s/step": 3.0}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    text, found = written(run, run / "report")
    assert "Held-out accuracy before and after training: not measured." in text
    assert "not measured: the run has no evaluation before and after training." in text
    assert found["before"] is found["after"] is None and found["changes"] == {}
    assert "Peak of all ranks: not measured in tensors, not measured reserved" in text


def test_an_evaluation_after_the_first_steps_is_not_one_before_training(run: Path) -> None:
    rows = [{"step": step, "timing_s/step": 3.0, **scores(0.2, 0.03, 1)} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "before and after training: not measured." in written(run, run / "report")[0]


def test_a_change_without_a_standard_error_is_not_judged() -> None:
    said = report.describe_change(
        "a", before=0.0, after=1.0, std_err=float("nan"), exceeds_two_std_err=False
    )
    assert said.endswith("The standard error of the change of +1.000 is not known.")


def test_a_moved_model_costs_the_plan_alone(run: Path, tmp_path: Path) -> None:
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    text, found = written(run, run / "report")
    assert "There is no plan: " in text and "| gen | not measured | 41.50 GB |" in text
    assert found["changes"]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys) -> None:
    assert report.main([str(tmp_path / "none")]) == 2
    assert f"{tmp_path}/none/config.json: no such file" in capsys.readouterr().err

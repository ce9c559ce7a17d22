"""Where a run's numbers go: metrics.jsonl, rollouts.jsonl, TensorBoard, summary.json.

The only importer of TensorBoard. Rank 0 owns one `MetricsWriter`; the others have none.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.metrics import names
from rlcore.metrics.jsonl import JsonLines, dumps, read_lines, write_atomic

METRICS = "metrics.jsonl"
ROLLOUTS = "rollouts.jsonl"
SUMMARY = "summary.json"

RATES = {
    "perf/samples_per_s": "timing_s/step",
    "perf/gen_tokens_per_s": "timing_s/gen",
    "perf/train_tokens_per_s": "timing_s/update_actor",
}
"""Rates of a step, each with the seconds that it is taken over."""


class MetricsWriter:
    """Writes a run's folder. `next_step` is the first step that will be written: what the folder
    holds of that step and later is dropped, so a resumed run has no step twice."""

    def __init__(self, run_dir: Path, tensorboard: bool = True, next_step: int = 0):
        self.run_dir = run_dir
        self._metrics = JsonLines(run_dir / METRICS, next_step)
        self._rollouts = JsonLines(run_dir / ROLLOUTS, next_step)
        self._board = _open_board(run_dir / "tensorboard", next_step) if tensorboard else None
        self._last = next_step - 1

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """All metrics of one step, in one call: evaluation after step n belongs to n, the one
        before training to 0. ValueError for an undeclared name or a step that is there already."""
        for name in metrics:
            names.check(name)
        if step <= self._last:
            raise ValueError(
                f"metrics of step {step} after those of {self._last}: one call per step"
            )
        self._last = step
        values = {name: _number(name, value) for name, value in metrics.items()}
        self._metrics.append(step, [values])
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Samples of one step for people to read: id, source, prompt, response, score, ..."""
        self._rollouts.append(step, rows)

    def summary(self, further: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Write summary.json from metrics.jsonl and `further`, and return it."""
        found = summarise(read_metrics(self.run_dir)) | dict(further or {})
        write_atomic(self.run_dir / SUMMARY, json.dumps(json.loads(dumps(found)), indent=2) + "\n")
        return found

    def sync(self) -> None:
        """Return when the lines so far are on the disk: call it before a checkpoint is declared."""
        self._metrics.sync()
        self._rollouts.sync()

    def close(self) -> None:
        """Safe to call twice."""
        self._metrics.close()
        self._rollouts.close()
        if self._board is not None:
            self._board.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl; null reads as NaN."""
    return [
        {name: math.nan if value is None else value for name, value in row.items()}
        for row in read_lines(run_dir / METRICS)
    ]


def accuracies(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float, float]]]:
    """By data set: (step, mean@k, its standard error or NaN) of each evaluation, in order."""
    found: dict[str, list[tuple[int, float, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("val-core/") and "/acc/mean@" in name:
                set_name, _, k = name.removeprefix("val-core/").rpartition("/acc/mean@")
                error = row.get(f"val-aux/{set_name}/acc/std_err@{k}", math.nan)
                found.setdefault(set_name, []).append((row["step"], value, error))
    return found


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What summary.json says of a run. `timing_s/*` are seconds per step: the run's sum by the
    number of steps, so that phases which do not run in every step are comparable. Rates are totals
    by the seconds that they took, without evaluation and checkpoints."""
    steps = [row for row in rows if "timing_s/step" in row]
    timings: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("timing_s/"):
                timings[name] = timings.get(name, 0.0) + value
    out: dict[str, Any] = {"steps": max((row["step"] for row in rows), default=0)}
    evaluations = accuracies(rows)
    for which, at in (("start", 0), ("end", -1)):
        values = [points[at][1] for points in evaluations.values()]
        if values:
            out[f"val/accuracy_{which}"] = sum(values) / len(values)
        for name, points in evaluations.items():
            out[f"val/accuracy_{which}/{name}"] = points[at][1]
            out[f"val/std_err_{which}/{name}"] = points[at][2]
    if steps:
        for rate, phase in RATES.items():
            weighted = [(r[rate], r[phase]) for r in steps if rate in r and r.get(phase, 0.0) > 0]
            if weighted:
                out[rate] = sum(v * s for v, s in weighted) / sum(s for _, s in weighted)
        out |= {name: value / len(steps) for name, value in timings.items()}
    return out


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metric {name}: {value!r} is not a number") from error


def _open_board(folder: Path, next_step: int) -> Any:
    # TensorBoard looks for TensorFlow when it is imported, which costs seconds where that exists
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=next_step if next_step > 0 else None)

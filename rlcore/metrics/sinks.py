"""Write a run's metrics to metrics.jsonl, rollouts.jsonl and summary.json; on request to
TensorBoard, Weights & Biases and Prometheus.

Only this module imports these three packages. Only rank 0 has a `MetricsWriter`.
"""

import importlib.util
import io
import json
import math
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from rlcore.metrics import names
from rlcore.metrics.jsonl import AppendFile, JsonLines, dumps, read_lines, write_atomic
from rlcore.utils import phases
from rlcore.utils.errors import ConfigError
from rlcore.utils.writes import LogWrites

METRICS = "metrics.jsonl"
ROLLOUTS = "rollouts.jsonl"
SUMMARY = "summary.json"

RATES = {
    "perf/samples_per_s": "timing_s/step",
    "perf/gen_tokens_per_s": "timing_s/gen",
    "perf/train_tokens_per_s": "timing_s/update_actor",
    "perf/mfu/actor": "timing_s/update_actor",
}
"""Rates of a step, each with the timing metric that weights the rate in a mean over steps."""


class Sink(Protocol):
    """Receiver of the metrics of each step, such as TensorBoard."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsWriter:
    """Writer of metrics to the run's folder and to `sinks`, which `close` also closes. `next_step`:
    first step that will be written. Rows of this and later steps in existing files are deleted, so
    that a resumed run has no step twice."""

    def __init__(
        self,
        run_dir: Path,
        tensorboard: bool = True,
        next_step: int = 0,
        sinks: Sequence[Sink] = (),
        writes: LogWrites | None = None,
    ):
        """`writes`: what to do if a write fails; None: raise."""
        self.run_dir = run_dir
        self.writes = writes or LogWrites()
        self._metrics = JsonLines(run_dir / METRICS, next_step, self.writes)
        self._rollouts = JsonLines(run_dir / ROLLOUTS, next_step, self.writes)
        boards = [TensorBoard(run_dir / "tensorboard", next_step)] if tensorboard else []
        self._sinks: list[Sink] = [*boards, *sinks]
        self._last = next_step - 1

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write all metrics of one step, in one call. An evaluation after step n belongs to step n;
        the evaluation before training belongs to step 0. Raise ValueError if a name is undeclared
        or the step is already written."""
        for name in metrics:
            names.check(name)
        if step <= self._last:
            raise ValueError(
                f"metrics of step {step} were written after step {self._last}; write each step "
                "once, in order"
            )
        self._last = step
        values = {name: _number(name, value) for name, value in metrics.items()}
        if self.writes.num_failed:
            values["training/failed_writes"] = float(self.writes.num_failed)
        self._metrics.append(step, [values])
        for sink in self._sinks:
            with self.writes.to(self.run_dir / type(sink).__name__.lower()):
                sink.write(step, values)

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write samples of one step for humans to read: id, prompt, response, score and more."""
        self._rollouts.append(step, rows)

    def summary(self, further: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Write summary.json from metrics.jsonl and `further`, and return its contents."""
        found = summarise(read_metrics(self.run_dir)) | dict(further or {})
        text = json.dumps(json.loads(dumps(found)), indent=2) + "\n"
        with self.writes.to(self.run_dir / SUMMARY):
            write_atomic(self.run_dir / SUMMARY, text)
        return found

    def sync(self) -> None:
        """Flush all lines to disk; call this before a checkpoint is declared complete."""
        self._metrics.sync()
        self._rollouts.sync()

    def close(self) -> None:
        """Close all files and sinks. Idempotent."""
        self._metrics.close()
        self._rollouts.close()
        for sink in self._sinks:
            with suppress(OSError):  # Its last write has failed already.
                sink.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read the rows of a run's metrics.jsonl; null becomes NaN."""
    return [
        {name: math.nan if value is None else value for name, value in row.items()}
        for row in read_lines(run_dir / METRICS)
    ]


def num_ranks(row: Mapping[str, float]) -> int:
    """Return the number of ranks of the run that wrote this row of metrics; 0: not known."""
    rate = row.get("perf/throughput", 0.0) * row.get("timing_s/step", 0.0)
    return round(row.get("perf/total_num_tokens", 0.0) / rate) if rate else 0


def accuracies(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float, float]]]:
    """Return (step, mean@k, standard error or NaN) of each evaluation, in order, by data set."""
    found: dict[str, list[tuple[int, float, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("val-core/") and "/acc/mean@" in name:
                set_name, _, k = name.removeprefix("val-core/").rpartition("/acc/mean@")
                error = row.get(f"val-aux/{set_name}/acc/std_err@{k}", math.nan)
                found.setdefault(set_name, []).append((row["step"], value, error))
    return found


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compute the values of summary.json. `timing_s/*`: seconds per step, as the run's sum divided
    by the number of steps, so that phases that do not run in every step are comparable.
    `before_s/<phase>`: sum of the times before the first step, which `timing_s/*` exclude, over all
    starts of the run. Rates: means over the steps, weighted by the time of each rate's phase."""
    steps = [row for row in rows if "timing_s/step" in row]
    timings: dict[str, float] = {}
    before: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            section, _, phase = name.partition("/")
            if section != "timing_s":
                continue
            if phase in phases.BEFORE or row["step"] == 0:
                before[f"before_s/{phase}"] = before.get(f"before_s/{phase}", 0.0) + value
            else:
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
        out["measured_steps"] = len(steps)  # fewer, if the run began from another run's checkpoint
        for rate, phase in RATES.items():
            weighted = [(r[rate], r[phase]) for r in steps if rate in r and r.get(phase, 0.0) > 0]
            if weighted:
                out[rate] = sum(v * s for v, s in weighted) / sum(s for _, s in weighted)
        out |= {name: value / len(steps) for name, value in timings.items()}
    return out | before


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metric {name}: {value!r} is not a number") from error


class TensorBoard:
    """TensorBoard event files in `folder`; hides existing events of step `next_step` and later.

    Own code instead of torch's SummaryWriter, whose thread prints a traceback if the disk is full,
    and leaves half an event.
    """

    def __init__(self, folder: Path, next_step: int = 0):
        # Importing TensorBoard imports an installed TensorFlow, which takes seconds and logs a lot.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        about = f"{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = AppendFile(folder / f"events.out.tfevents.{int(time.time()):010d}.{about}")
        self._append(file_version="brain.Event:2")
        if next_step > 0:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._append(step=next_step, session_log=start)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        rows = [self._summary.Value(tag=n, simple_value=v) for n, v in values.items()]
        self._append(step=step, summary=self._summary(value=rows))

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def _append(self, **event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(self._event(wall_time=time.time(), **event).SerializeToString())
        self._file.append(record.getvalue())


def check_wandb(project: str) -> None:
    """Raise ValueError if wandb is not installed."""
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"--log.wandb {project}: wandb is not installed; run bash tools/setup.sh --wandb, or "
            "omit the key"
        )


STEP = "training/global_step"


class Wandb:
    """A run of Weights & Biases; WANDB_MODE=offline keeps its data in the run's folder. A resumed
    run continues its W&B run; steps that it repeats are there twice. Raises ValueError if wandb is
    not installed."""

    def __init__(self, project: str, run_dir: Path, config: Mapping[str, Any]):
        check_wandb(project)
        import wandb

        file = run_dir / "wandb_id"
        if not file.exists():
            write_atomic(file, secrets.token_hex(8) + "\n")
        self._run = wandb.init(
            project=project,
            name=run_dir.name,
            id=file.read_text().strip(),
            resume="allow",
            dir=str(run_dir),
            config=dict(config),
        )
        # W&B's own step never goes back, so it would drop steps that a resumed run repeats.
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values) | {STEP: step})

    def close(self) -> None:
        """Finish the run. Idempotent."""
        self._run.finish()


class Prometheus:
    """HTTP endpoint for Prometheus: the latest value of every metric (`rlcore_actor_loss` for
    `actor/loss`), labelled with the run's name. Raises ValueError if the port cannot be opened."""

    def __init__(self, host: str, port: int, run: str):
        from prometheus_client import CollectorRegistry, start_http_server

        self._run, self._changed = run, threading.Lock()
        self._values: dict[str, tuple[str, float]] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(
                f"--log.prometheus_port {port}: cannot listen on {host} ({error.strerror}); choose "
                "another port or --log.prometheus_host"
            ) from error
        self.port = self._server.server_port

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now = {"rlcore_step": ("steps done", float(step))}
        now["rlcore_last_step_timestamp_seconds"] = (
            "time at which the last step was done",
            time.time(),
        )
        for name, value in values.items():
            declared = names.check(name)
            text = declared.meaning + (f" ({declared.unit})" if declared.unit else "")
            now["rlcore_" + re.sub(r"\W", "_", name)] = (text, value)
        with self._changed:
            self._values |= now

    def collect(self) -> Iterator[Any]:
        """Yield all metrics when Prometheus scrapes the endpoint."""
        from prometheus_client.core import GaugeMetricFamily

        with self._changed:
            values = dict(self._values)
        for name, (text, value) in values.items():
            family = GaugeMetricFamily(name, text, labels=["run"])
            family.add_metric([self._run], value)
            yield family

    def close(self) -> None:
        """Stop the server. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

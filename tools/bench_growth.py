"""Measure what grows with the steps and responses of a run: memory, files, handles, time.

    python tools/bench_growth.py --seed 0 --json tools/results/growth.json
    python tools/bench_growth.py --steps 200

The parts of rank 0 that keep books run as in a run of the task `label` with tail batching: prompt
source, controller, rollout worker, reward process, histories, deadlines, trace, flight record,
round log, metrics, TensorBoard, log and the state of a checkpoint. The engine draws lengths and
tokens at random, there is no learner, and a step has 100 responses. Then the files are opened again
as by a resumed run, and the run is summarised, drawn and viewed, each in a process of its own.

Rows: name, value, unit, step. Memory is resident memory. `CPU of a step` is the mean since the row
before. `held NAME` is a number of items in containers of rlcore's objects: the smallest at the last
ten steps, if it exceeds the largest at the ten steps up to half of the run.
"""

import argparse
import heapq
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402

from rlcore import algos  # noqa: E402
from rlcore.algos.kl import AdaptiveController  # noqa: E402
from rlcore.cli import settings  # noqa: E402
from rlcore.cli.builders import observers, prompts, rollout, sizes  # noqa: E402
from rlcore.cli.builders.folder import open_folder, run_folder  # noqa: E402
from rlcore.cli.builders.start import BuildContext  # noqa: E402
from rlcore.cli.world import World  # noqa: E402
from rlcore.data import label_task  # noqa: E402
from rlcore.hf.config import HFConfig  # noqa: E402
from rlcore.hf.tokenizer import make_char_tokenizer  # noqa: E402
from rlcore.metrics import plots, sinks, view  # noqa: E402
from rlcore.metrics.jsonl import JsonLines, write_atomic  # noqa: E402
from rlcore.protocols import InProcess  # noqa: E402
from rlcore.records import (  # noqa: E402
    Aborted,
    AnyEvent,
    Finished,
    LengthReport,
    Request,
    Sample,
    Stats,
)
from rlcore.trainer import report, sync_loop  # noqa: E402
from rlcore.trainer.progress import Progress, Ranks  # noqa: E402
from rlcore.trainer.resume import Checkpoints  # noqa: E402
from rlcore.trainer.run import Run  # noqa: E402
from rlcore.trainer.sizes import EngineSizes, Sized  # noqa: E402
from rlcore.utils import env  # noqa: E402
from rlcore.utils.flight_recorder import FlightRecorder  # noqa: E402
from rlcore.utils.health import Health  # noqa: E402
from rlcore.utils.log import log  # noqa: E402
from rlcore.utils.spans import Spans  # noqa: E402

PROMPTS, SAMPLES = 20, 5
LOOKS, FEW = 10, 10
TRACED = 100
MOST_TOKENS, HISTORY_TOKENS = 200, 1_000_000
SHM = Path("/dev") / "shm"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--steps", type=int, default=10_000, help="number of steps")
    p.add_argument("--rows", type=int, default=20_000, help="number of training prompts")
    p.add_argument("--seed", type=int, default=0, help="seed of prompts and responses")
    p.add_argument("--dir", type=Path, help="folder for the run; default: a temporary folder")
    p.add_argument("--json", type=Path, help="JSON file for the results")
    p.add_argument("--again", choices=list(AGAIN), help=argparse.SUPPRESS)
    return p.parse_args(argv)


class RandomEngine(InProcess):
    """Engine that ends the shortest of its requests at every poll, with random tokens."""

    def __init__(self, seed: int) -> None:
        self._die = np.random.default_rng(seed)
        self._live: dict[str, tuple[int, Request]] = {}
        self._order: list[tuple[int, str]] = []
        self._events: list[AnyEvent] = []

    def submit(self, requests: Sequence[Request]) -> None:
        lengths = np.minimum(self._die.lognormal(3.5, 0.9, len(requests)) + 1, MOST_TOKENS)
        for request, length in zip(requests, lengths.astype(int).tolist(), strict=True):
            self._live[request.id] = length, request
            heapq.heappush(self._order, (length, request.id))

    def abort(self, ids: Collection[str]) -> None:
        for id in ids:
            if id in self._live:
                _, request = self._live.pop(id)
                sample = self._sample(request, 1, "abort")
                self._events.append(Aborted(id=id, num_tokens=1, sample=sample))

    def poll(self, timeout_s: float) -> list[AnyEvent]:
        out, self._events = self._events, []
        while self._order and len(out) < 16:
            length, id = heapq.heappop(self._order)
            if (found := self._live.pop(id, None)) is not None:
                sample = self._sample(found[1], length, "stop")
                out.append(Finished(id=id, num_tokens=length, finish="stop", sample=sample))
        lengths = tuple(length for length, _ in self._live.values())
        out.append(LengthReport(ids=tuple(self._live), lengths=lengths))
        return [*out, Stats(decode_steps=1, decode_tokens=16, busy_s=1e-3)]

    def remember(self, histories: Sequence[Any]) -> None: ...

    def close(self) -> None: ...

    def _sample(self, request: Request, length: int, finish: Any) -> Sample:
        return Sample(
            id=request.id,
            prompt=request.prompt,
            tokens=self._die.integers(2, len(label_task.VOCAB), length).astype(np.int32),
            logps=np.full(length, -1.0, np.float32),
            versions=np.zeros(length, np.int32),
            finish=finish,
        )


class Books:
    """Rank 0 of a run without a learner."""

    def __init__(self, folder: Path, steps: int, rows: int, seed: int) -> None:
        make_char_tokenizer(folder / "tokenizer", label_task.CHARS)
        given = f"""--run.dir {folder} --run.name run --run.steps {steps} --run.seed {seed}
            --model.tokenizer {folder / "tokenizer"} --data.train label --data.num_prompts {rows}
            --data.prompts_per_step {PROMPTS} --rollout.samples_per_prompt {SAMPLES}
            --rollout.draft history --draft.max_history_tokens {HISTORY_TOKENS}
            --rollout.max_tokens {MOST_TOKENS} --reward exact --reward.adaptive_timeout
            --reward.correct_score 0 --reward.workers 1 --schedule tail_batching
            --log.trace_steps {TRACED}"""
        cfg, closing, spans, progress = (
            settings.parse(given.split()),
            ExitStack(),
            Spans(),
            Progress(),
        )
        flight = FlightRecorder(0, 1, folder / "run")
        world = World(
            rank=0,
            size=1,
            local_rank=0,
            device=torch.device("cpu"),
            store=None,
            health=Health(flight, None),
        )
        open_folder(cfg, world)
        log.handlers[0].setLevel(logging.ERROR)  # the terminal gets no step lines
        hf = HFConfig.from_dict(SHAPE)
        start = BuildContext(
            cfg=cfg,
            world=world,
            hf=hf,
            folder=run_folder(cfg),
            spans=spans,
            progress=progress,
            closing=closing,
        )
        engine = RandomEngine(seed)
        make = partial(sizes.make_controller, cfg, 1)
        now = EngineSizes(lambda tp: Sized(tp=tp, engine_ranks=[0], controller=make), 1)
        with patch.object(rollout, "make_engine", lambda *_: engine):
            side = rollout.make_side(start, now)
        data, kl = prompts.load_data(cfg, side.tokenizer), AdaptiveController(0.0, 1)
        ranks = Ranks(rank=0, size=1, model_parallel_groups=[[0]], dp_rank=0)
        self.flight, self.close = flight, closing.close
        self.checkpoints = Checkpoints(
            cfg=cfg,
            folder=start.folder,
            ranks=ranks,
            learner=None,
            kl=kl,
            data=data,
            library=side.rollout.library,
            deadlines=side.deadlines,
        )
        parts = SimpleNamespace(sizes=now, engine=engine, learner=None, critic=None)
        device: Any = SimpleNamespace(parts=parts, repair=None, is_shared=False)
        self.run = Run(
            cfg=cfg,
            hf=hf,
            folder=start.folder,
            ranks=ranks,
            algo=algos.module("grpo"),
            kl=kl,
            device=device,
            rollout=side.rollout,
            sampling=side.sampling,
            data=data,
            progress=progress,
            spans=spans,
            observers=observers.make_observers(start, side.screen, side.tokenizer.pieces, []),
            checkpoints=self.checkpoints,
        )

    def step(self) -> None:
        """Run one step as `sync_loop.one_step` does, without the learner."""
        run, spans = self.run, self.run.spans
        run.progress.begin(run.step + 1)
        with spans.phase("step"):
            with spans.phase("gen"):
                end = sync_loop.next_groups(run)
            with spans.phase("exchange"):
                todo = sync_loop.plan_of(run, end.groups, 1)
                run.rollout.route(todo.destination([[0]]), todo.owners())
                sync_loop.learn_histories(run)
            with spans.phase("update_weights"):
                pass
            sync_loop.rollout_metrics(run, end.groups, end.stats, todo)
        report.step(run)

    def state_bytes(self) -> int:
        """Return the size of the state of a checkpoint, without histories."""
        return len(json.dumps(self.checkpoints._state(self.run.step)))

    def held(self) -> dict[str, int]:
        """Return the number of items in the containers of all rlcore objects, by class and name."""
        return held([self.run, self.flight, self.checkpoints])


SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": len(label_task.VOCAB),
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}


def held(roots: Sequence[Any]) -> dict[str, int]:
    """Return the number of items in the containers of all rlcore objects that `roots` lead to."""
    found: dict[str, int] = {}
    todo, seen = deque(roots), set()
    while todo:
        one = todo.popleft()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Mapping):
            todo += one.values()
        elif isinstance(one, list | tuple | set | frozenset | deque):
            todo += one
        elif hasattr(one, "__closure__") or hasattr(one, "__self__"):
            todo += [getattr(one, "__self__", None)]
            todo += [c.cell_contents for c in getattr(one, "__closure__", None) or ()]
        elif type(one).__module__.startswith(("rlcore", "types", "bench_growth", "__main__")):
            for name, value in fields(one):
                if hasattr(value, "__len__") and not isinstance(value, str | bytes):
                    key = f"{type(one).__name__}.{name}"
                    found[key] = found.get(key, 0) + size(value)
                todo.append(value)
    return found


def fields(one: Any) -> Iterator[tuple[str, Any]]:
    slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
    for name in [*getattr(one, "__dict__", ()), *slots]:
        yield name, getattr(one, name, None)


def size(value: Any) -> int:
    try:
        return len(value)
    except TypeError:  # an endless data set
        return 0


def look(books: Books) -> dict[str, tuple[float, str]]:
    """Return what there is of memory, handles and files now, as value and unit by name."""
    me = psutil.Process(os.getpid())
    children = sum(c.memory_info().rss for c in me.children(recursive=True))
    out = {
        "memory of rank 0": (me.memory_info().rss / 1e6, "MB"),
        "memory of rewards": (children / 1e6, "MB"),
        "descriptors": (float(me.num_fds()), ""),
        "threads": (float(me.num_threads()), ""),
        "files of shared memory": (float(len(list(SHM.iterdir()))), ""),
        "state of a checkpoint": (books.state_bytes() / 1e6, "MB"),
    }
    library = books.run.rollout.library
    if library is not None:
        out["tokens of histories"] = (float(library.num_tokens), "")
    for path in sorted(books.run.folder.rglob("*")):
        if path.is_file():
            name = "tensorboard" if "tensorboard" in path.parts else path.name
            sum_mb, _ = out.get(f"file {name}", (0.0, ""))
            out[f"file {name}"] = (sum_mb + path.stat().st_size / 1e6, "MB")
    return out


AGAIN = {
    "resume": lambda folder: [
        JsonLines(folder / name, 1 << 60)
        for name in (sinks.METRICS, sinks.ROLLOUTS, "rounds.jsonl")
    ],
    "summary": lambda folder: sinks.summarise(sinks.read_metrics(folder)),
    "plot": lambda folder: (plots.curve(folder), plots.detail(folder)),
    "view": lambda folder: view.write(folder),
}
"""What reads the files of a run."""


def again(name: str, folder: Path) -> dict[str, float]:
    """Read the files of a run; return seconds, and MB that the peak is above the start."""
    start, begin = psutil.Process().memory_info().rss, time.perf_counter()
    AGAIN[name](folder)
    seconds = time.perf_counter() - begin
    status = Path("/proc/self/status").read_text()
    most = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    return {"s": seconds, "MB": (most - start) / 1e6}


def measure(a: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def add(name: str, value: float, unit: str, step: int) -> None:
        rows.append({"name": name, "value": value, "unit": unit, "step": step})

    books = Books(folder, a.steps, a.rows, a.seed)
    every, half = max(a.steps // LOOKS, 1), a.steps // 2
    middle: list[dict[str, int]] = []
    last: list[dict[str, int]] = []
    cpu_s = 0.0
    for step in range(1, a.steps + 1):
        begin = time.process_time()
        books.step()
        cpu_s += time.process_time() - begin
        if half - FEW < step <= half:
            middle.append(books.held())
        if step > a.steps - FEW:
            last.append(books.held())
        if step % every == 0:
            add("CPU of a step", 1e3 * cpu_s / every, "ms", step)
            cpu_s = 0.0
            for name, (value, unit) in look(books).items():
                add(name, value, unit, step)
    for name in last[-1]:
        least = min(found.get(name, 0) for found in last)
        if least > max(found.get(name, 0) for found in middle):
            add(f"held {name}", least, "", a.steps)
    books.close()
    for name in AGAIN:
        words = ["--again", name, "--dir", str(books.run.folder)]
        done = subprocess.run(
            [sys.executable, __file__, *words], check=True, stdout=subprocess.PIPE, text=True
        )
        for unit, value in json.loads(done.stdout.splitlines()[-1]).items():
            add(name, value, unit, a.steps)
    return rows


def show(rows: list[dict[str, Any]], steps: int) -> None:
    """Print each value in the middle and at the end of the run."""
    for row in rows:
        if row["step"] < steps:
            continue
        same = [r for r in rows if (r["name"], r["unit"]) == (row["name"], row["unit"])]
        middle = next((r["value"] for r in same if r["step"] >= steps // 2), row["value"])
        unit = row["unit"]
        print(f"{row['name']:34}{middle:14.3f}{row['value']:14.3f} {unit}")


def main(argv: list[str] | None = None) -> int:
    a = parse(argv)
    if a.again:
        print(json.dumps(again(a.again, a.dir)))
        return 0
    with tempfile.TemporaryDirectory() as made:
        rows = measure(a, a.dir or Path(made))
    show(rows, a.steps)
    if a.json:
        kept = {"steps": a.steps, "rows": a.rows, "seed": a.seed}
        text = {"what": __doc__.splitlines()[0], "settings": kept, "machine": env.report()}
        a.json.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(a.json, json.dumps(text | {"rows": rows}, indent=1) + "\n")
        print(a.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

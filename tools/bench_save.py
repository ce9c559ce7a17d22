"""Measure how long training waits for a checkpoint: synchronous and asynchronous saves.

    python tools/bench_save.py                                    # tiny model on the CPU
    python tools/bench_save.py --model 0.6b --device cuda --json out.json

An asynchronous save returns when the state is in host memory. The first one also allocates that
memory and has its own row. Updates run until all files are written: `update while writing` is
compared with `update`. Weights are random; seconds are medians of --rounds saves.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch  # noqa: E402
from bench_learner import SHAPES, Ours, config_of, make_batch, write_model  # noqa: E402

from rlcore.metrics.jsonl import write_atomic  # noqa: E402


def main() -> None:
    """Print a line for each row, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="tiny", help="shape of the weights")
    parser.add_argument("--device", default="cpu", help="torch device")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of an update")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--micro", type=int, default=2048, help="tokens of a micro-batch")
    parser.add_argument("--rounds", type=int, default=3, help="saves of each kind")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and tokens")
    parser.add_argument("--dir", type=Path, help="folder on the disk to measure; default: /tmp")
    parser.add_argument("--json", type=Path, help="file for the rows")
    a = parser.parse_args()
    a.equal = True
    rows = measure(a)
    for row in rows:
        ratio = f"{row['ratio']:.3f} x {row['baseline']}" if row["baseline"] else ""
        print(f"{row['name']:28} {row['value']:9.3f} {row['unit']:3} {ratio}")
    if a.json:
        write_atomic(a.json, json.dumps(rows, indent=1) + "\n")


def measure(a: argparse.Namespace) -> list[dict]:
    """Save in both ways; return the rows of the table."""
    with tempfile.TemporaryDirectory(dir=a.dir) as name:
        folder, hf = Path(name), config_of(a.model)
        write_model(hf, folder / "model", a.device, a.seed)
        arm = Ours(a, hf, folder / "model", make_batch(a, hf), "")
        update = lambda: seconds(a, arm.update)  # noqa: E731
        update()  # compiles kernels and allocates
        alone = [update() for _ in range(3)]
        waiting = [seconds(a, lambda: arm.learner.save(folder / "c")) for _ in range(a.rounds)]
        size = sum(path.stat().st_size for path in (folder / "c").iterdir())
        blocked, writing, beside = [], [], []
        for _ in range(a.rounds + 1):
            shutil.rmtree(folder / "c")
            start = time.perf_counter()
            written = arm.learner.save_async(folder / "c")
            blocked.append(time.perf_counter() - start)
            while not written.done():
                beside.append(update())
            writing.append(written.result().seconds)
        arm.close()
    found = [
        ("checkpoint", size / 1e9, "GB", None),
        ("synchronous save", median(waiting), "s", None),
        ("first asynchronous save", blocked[0], "s", median(waiting)),
        ("asynchronous save", median(blocked[1:]), "s", median(waiting)),
        ("writing by the thread", median(writing[1:]), "s", median(waiting)),
        ("update", median(alone), "s", None),
    ]
    if beside:
        found.append(("update while writing", median(beside), "s", median(alone)))
    bases = {"update while writing": "update"}
    return [
        {
            "name": name,
            "value": value,
            "unit": unit,
            "baseline": bases.get(name, "synchronous save") if base else "",
            "ratio": value / base if base else 0.0,
        }
        for name, value, unit, base in found
    ]


def seconds(a: argparse.Namespace, work: Callable[[], None]) -> float:
    """Seconds of `work`, and of what it leaves to the GPU."""
    start = time.perf_counter()
    work()
    if a.device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()

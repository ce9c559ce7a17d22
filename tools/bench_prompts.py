"""Measure seconds and memory of loading prompt files of up to a million rows.

    python tools/bench_prompts.py --seed 0 --json tools/results/prompts.json
    python tools/bench_prompts.py --prompts 10000 --formats jsonl

Each file is loaded in a process of its own, as rank 0 of a run loads it: `load_data` with a chat
template, a validation file of 1,000 rows, and the data order of the first epoch. A row has 200 to
400 characters in its question and in its answer, about the size of GSM8K. The words are those of
this repository's pages, as often as they are there. Without --tokenizer, the tokenizer has one
token per character, which takes more memory and less time than a tokenizer of words.

Rows: name, value, unit, file type, number of prompts. `start` is the resident memory of the process
with torch and the tokenizer, `peak` the highest of the process (VmHWM), `held` what remains of the
prompts after loading. `random` is the time to get one prompt at a random place.
"""

import argparse
import gc
import itertools
import json
import random
import re
import string
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.utils import env  # noqa: E402

NUM_VAL = 1000
CHARS = 200, 400
BATCH = 10_000
LOOKS = 2000
AIM_GB = 1.0
"""Aim for the peak of a process that has loaded a million prompts, less its start."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument(
        "--prompts", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="rows per file"
    )
    p.add_argument(
        "--formats",
        nargs="+",
        default=["jsonl", "parquet"],
        choices=["jsonl", "parquet"],
        help="file types",
    )
    p.add_argument("--tokenizer", type=Path, help="folder of a tokenizer")
    p.add_argument("--seed", type=int, default=0, help="seed of the texts")
    p.add_argument("--json", type=Path, help="JSON file for the results")
    p.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return p.parse_args(argv)


def texts(num: int, seed: int) -> Iterator[dict[str, str]]:
    """Yield rows of random text, in the words of this repository's pages."""
    pages = [path.read_text() for path in sorted(ROOT.glob("rlcore/**/*.md"))]
    counts = Counter(re.findall(r"[A-Za-z]{2,12}", " ".join(pages)))
    words, weights = list(counts), list(counts.values())
    die = random.Random(seed)

    def text() -> str:
        most = die.randint(*CHARS)
        found = " ".join(die.choices(words, weights, k=most // 4))[: most - 12]
        return f"{found} {die.randrange(10**6)}?"

    for _ in range(num):
        yield {"question": text(), "answer": text()}


def write(path: Path, num: int, seed: int) -> None:
    """Write a prompt file in parts, so that it need not fit into memory."""
    rows = texts(num, seed)
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        return
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema([("question", pyarrow.string()), ("answer", pyarrow.string())])
    with pyarrow.parquet.ParquetWriter(path, schema) as file:
        while part := list(itertools.islice(rows, BATCH)):
            file.write_table(pyarrow.Table.from_pylist(part, schema))


def memory(name: str) -> float:
    """Return a size of this process from /proc in GB: VmRSS or VmHWM."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) / 1e6


def load(folder: Path, suffix: str) -> dict[str, float]:
    """Load the files of a folder as rank 0 does; return seconds and memory."""
    from rlcore.cli.builders.prompts import load_data
    from rlcore.cli.settings import parse as settings
    from rlcore.hf.tokenizer import load_tokenizer

    files = [f"--data.{key}={folder / key}.{suffix}" for key in ("train", "val")]
    cfg = settings(["--reward", "exact", *(w for f in files for w in f.split("="))])
    tokenizer = load_tokenizer(folder / "tokenizer")
    tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": "a"}]))
    gc.collect()
    start = memory("VmRSS")
    begin = time.perf_counter()
    data = load_data(cfg, tokenizer)
    data.source.issue(1, None)  # shuffles the first epoch
    seconds = time.perf_counter() - begin
    gc.collect()
    held = memory("VmRSS") - start
    begin = time.perf_counter()
    data.source.issue(LOOKS, None)
    look_us = 1e6 * (time.perf_counter() - begin) / LOOKS
    return {
        "load s": seconds,
        "start GB": start,
        "peak GB": memory("VmHWM"),
        "held GB": held,
        "random us": look_us,
    }


def measure(a: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    from rlcore.hf.tokenizer import make_char_tokenizer

    if a.tokenizer is None:
        make_char_tokenizer(folder / "tokenizer", string.printable)
    else:
        (folder / "tokenizer").symlink_to(a.tokenizer.absolute(), target_is_directory=True)
    out = []
    for suffix in a.formats:
        write(folder / f"val.{suffix}", NUM_VAL, a.seed + 1)
        for num in a.prompts:
            file = folder / f"train.{suffix}"
            write(file, num, a.seed)
            done = subprocess.run(
                [sys.executable, __file__, "--child", str(folder), "--formats", suffix],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            found = json.loads(done.stdout.splitlines()[-1])
            found["file GB"] = file.stat().st_size / 1e9
            for what, value in found.items():
                name, unit = what.split()
                row = {"name": name, "value": value, "unit": unit, "file": suffix, "prompts": num}
                out.append(row)
                print(f"{suffix:8}{num:9} {name:8}{value:12.3f} {unit}", flush=True)
            file.unlink()
    return out


def main(argv: list[str] | None = None) -> int:
    a = parse(argv)
    if a.child:
        print(json.dumps(load(a.child, a.formats[0])))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(a, Path(folder))
    sizes = {(r["name"], r["file"]): r["value"] for r in rows if r["prompts"] == max(a.prompts)}
    most = max(sizes["peak", f] - sizes["start", f] for f in a.formats)
    print(
        f"{max(a.prompts)} prompts add at most {most:.2f} GB to a process, aim {AIM_GB:g}: "
        f"{'met' if most <= AIM_GB else 'NOT met'}"
    )
    if a.json:
        keys = {k: str(v) if isinstance(v, Path) else v for k, v in vars(a).items()}
        settings = {k: v for k, v in keys.items() if k not in ("json", "child")}
        text = {"what": __doc__.splitlines()[0], "settings": settings, "machine": env.report()}
        a.json.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(a.json, json.dumps(text | {"rows": rows}, indent=1) + "\n")
        print(a.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

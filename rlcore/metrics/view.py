"""Write an HTML page of a run's rollouts: one file that needs no network and no server.

The list is a table of columns. Texts and tokens are packed in chunks (zlib, base64). The page
unpacks a chunk on its first view, so that a page of ten thousand responses opens at once.

Own code instead of a table of Weights & Biases, which needs an account, a network and a server.
"""

import base64
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from rlcore.metrics.jsonl import dumps, read_lines, write_atomic
from rlcore.metrics.sinks import ROLLOUTS
from rlcore.records import group_of
from rlcore.utils.errors import ConfigError

CHUNK_ROWS = 400
TAIL = 90
"""Number of characters that the list shows from the end of a response, where the answer is."""
PARTS = {"texts": ("prompt", "answer", "response", "advantage", "turns"), "tokens": ("tokens",)}
"""Parts of a chunk, packed separately so that the search need not unpack the tokens."""

Row = Mapping[str, Any]


def write(run_dir: Path, out: Path | None = None, last: int = 0) -> tuple[Path, int]:
    """Write `<run_dir>/rollouts.html`, or `out`, for the `last` most recent steps with rollouts (0:
    all). Return the path and the number of responses. Raise ConfigError if there are none."""
    rows = list(read_lines(run_dir / ROLLOUTS))
    if last:
        kept = set(sorted({row["step"] for row in rows})[-last:])
        rows = [row for row in rows if row["step"] in kept]
    if not rows:
        raise ConfigError(
            f"{run_dir}: no {ROLLOUTS} with responses; give the folder of a run with "
            "--log.rollouts above 0"
        )
    path = out or run_dir / "rollouts.html"
    write_atomic(path, page(rows, run_dir.resolve().name))
    return path, len(rows)


def page(rows: Sequence[Row], name: str) -> str:
    """Return the whole page. `rows` are in the order of rollouts.jsonl, where the rows of a group
    are adjacent."""
    index, chunks = _index(rows, name), []
    for number, start in enumerate(index["first"]):
        stop = [*index["first"], len(rows)][number + 1]
        for part, keys in PARTS.items():
            packed = _pack(rows[start:stop], keys)
            chunks.append(f'<script type="text/plain" id="{part}-{number}">{packed}</script>')
    template = resources.files("rlcore.metrics").joinpath("view.html").read_text()
    head, rest = template.split("@INDEX@")
    middle, end = rest.split("@CHUNKS@")
    return "".join([head, _inside_html(dumps(index)), middle, "\n".join(chunks), end])


def _index(rows: Sequence[Row], name: str) -> dict[str, Any]:
    """Return the index of the page: the columns for the list, the filters and the chart."""
    steps = sorted({row["step"] for row in rows})
    scores: dict[int, list[float | None]] = {step: [] for step in steps}
    for row in rows:
        scores[row["step"]].append(_number(row["score"]))
    datasets, dataset = _coded(str(row.get("dataset", "")) for row in rows)
    finishes, finish = _coded(str(row.get("finish", "")) for row in rows)
    errors, error = _coded(str(row.get("error", "")) for row in rows)
    groups, group = _coded(group_of(str(row["id"])) for row in rows)
    first = [0]
    for i in range(1, len(rows)):
        if rows[i]["step"] != rows[i - 1]["step"] or i - first[-1] == CHUNK_ROWS:
            first.append(i)
    chunk = [0] * len(rows)
    for number, start in enumerate(first):
        for i in range(start, [*first, len(rows)][number + 1]):
            chunk[i] = number
    finite = [s for row in rows if (s := _number(row["score"])) is not None]
    return {
        "name": name,
        "steps": steps,
        "means": [_mean(scores[step]) for step in steps],
        "scores": [min(finite, default=0.0), max(finite, default=0.0)],
        "datasets": datasets,
        "finishes": finishes,
        "errors": errors,
        "ids": [str(row["id"]) for row in rows],
        "groups": group,
        "step": [row["step"] for row in rows],
        "dataset": dataset,
        "score": [_number(row["score"]) for row in rows],
        "tokens": [row.get("num_tokens", 0) for row in rows],
        "finish": finish,
        "error": error,
        "logp": [_mean(row["tokens"]["logps"]) if "tokens" in row else None for row in rows],
        "tail": [" ".join(str(row["response"])[-TAIL:].split()) for row in rows],
        "chunk": chunk,
        "first": first,
    }


def _coded(values: Iterable[str]) -> tuple[list[str], list[int]]:
    """Return the distinct values in order of appearance, and the index of each row's value."""
    codes: dict[str, int] = {}
    column = [codes.setdefault(value, len(codes)) for value in values]
    return list(codes), column


def _pack(rows: Sequence[Row], keys: Sequence[str]) -> str:
    text = dumps([{key: row[key] for key in keys if key in row} for row in rows])
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def _inside_html(text: str) -> str:
    """Escape JSON so that it cannot end its script element."""
    return text.replace("<", "\\u003c")


def _number(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _mean(values: Iterable[float | None]) -> float | None:
    found = [v for v in values if v is not None]
    return sum(found) / len(found) if found else None

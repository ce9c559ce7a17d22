"""Read response lengths from tables, serving traces, or the rollouts.jsonl of a run."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlcore.sim.workload import Recorded
from rlcore.utils.errors import ConfigError
from rlcore.utils.files import fault

RESPONSE = ("response_tokens", "num_tokens", "n_tokens", "GeneratedTokens", "output_length")
PROMPT = ("prompt_tokens", "ContextTokens", "input_length")
SAME_PROMPT = ("series", "model", "dataset", "source", "idx", "prompt")
"""Columns that together identify a prompt; a file may lack some. If a row has neither `idx` nor
`prompt`, its prompt is unknown, and its length is pooled with those of all such rows."""
MOST = 10_000_000
MOST_BYTES = 512 << 20
"""Maximum size of a file, unpacked."""
ALLOWED = (
    "give a .csv, .jsonl or .jsonl.gz file whose rows have a response's tokens, a whole number "
    f"from 1 to {MOST}, as one of {', '.join(RESPONSE)}"
)


def read_lengths(path: Path, where: Mapping[str, str] | None = None) -> tuple[Recorded, str]:
    """Return the response lengths in a file, and a note that describes them. Rows whose columns
    differ from `where` are left out.

    Raises:
        ConfigError: a line is invalid, or no row is left; the error names the line.
    """
    by_prompt: dict[tuple[str, ...], list[int]] = {}
    prompts: list[int] = []
    knows_prompts = False
    for line, row in _rows(path):
        for key, value in (where or {}).items():
            if key not in row:
                raise ConfigError(
                    f"{path}, line {line}: no column {key!r}; it has {', '.join(row)}"
                )
            if str(row[key]) != value:
                break
        else:
            length = _tokens(path, line, row, RESPONSE)
            assert length is not None
            prompt = _tokens(path, line, row, PROMPT)
            if prompt is not None:
                prompts.append(prompt)
            knows = any(row.get(name) is not None for name in SAME_PROMPT[-2:])
            knows_prompts = knows_prompts or knows
            key_of = tuple(str(row.get(name, "")) for name in SAME_PROMPT) if knows else ()
            by_prompt.setdefault(key_of, []).append(length)
    if not by_prompt:
        raise ConfigError(f"{path}: no rows{_said(where)}; {ALLOWED}")
    count = sum(map(len, by_prompt.values()))
    mean = round(sum(prompts) / len(prompts)) if prompts else 300
    said = f"{path.name}: {count} responses"
    if knows_prompts:
        said += f" to {len(by_prompt)} prompts; more are resampled per prompt"
        if count == len(by_prompt):
            said += "; with one response per prompt, all responses of a group are equally long"
    else:
        said += " without prompts; lengths are resampled from all responses"
    return Recorded(list(by_prompt.values()), prompt_tokens=max(1, mean)), said


def _said(where: Mapping[str, str] | None) -> str:
    return " after " + " ".join(f"{k}={v}" for k, v in where.items()) if where else ""


def _tokens(path: Path, line: int, row: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        if row.get(name) is None:
            continue
        value = row[name]
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = -1.0
        least = 1 if names is RESPONSE else 0
        if isinstance(value, bool) or not least <= number <= MOST or number != int(number):
            raise ConfigError(f"{path}, line {line}: {name} {str(value)[:40]!r}: {ALLOWED}")
        return int(number)
    if names is RESPONSE:
        raise ConfigError(f"{path}, line {line}: has only {', '.join(row) or 'nothing'}; {ALLOWED}")
    return None


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, row) for every row of a .csv or .jsonl file."""
    if why := fault(path):
        raise ConfigError(f"{path}: {why}; {ALLOWED}")
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        text = data.decode("utf-8-sig")  # spreadsheets write a byte order mark
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot read it ({error}); {ALLOWED}") from error
    if len(data) > MOST_BYTES:
        raise ConfigError(f"{path}: has more than {MOST_BYTES >> 20} MiB; {ALLOWED}")
    if path.name.endswith(".csv"):
        reader = csv.DictReader(io.StringIO(text))
        while True:
            try:
                row = next(reader, None)
            except csv.Error as error:
                raise ConfigError(f"{path}, line {reader.line_num}: {error}; {ALLOWED}") from error
            if row is None:
                return
            if None in row or None in row.values():
                raise ConfigError(
                    f"{path}, line {reader.line_num}: expected {len(reader.fieldnames or ())} "
                    f"values as in the header; {ALLOWED}"
                )
            yield reader.line_num, row
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise ConfigError(f"{path}: {ALLOWED}")
    # splitlines would also split at U+2028 and others, which JSON strings may contain as they are
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise ConfigError(f"{path}, line {number}: not JSON ({why}); {ALLOWED}") from error
        if not isinstance(row, dict):
            raise ConfigError(
                f"{path}, line {number}: {line[:40]!r} is not a JSON object; {ALLOWED}"
            )
        yield number, row

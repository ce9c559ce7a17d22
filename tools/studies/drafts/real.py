"""Real responses of the same prompts over training checkpoints, as a workload to replay.

The file has a line per prompt and checkpoint: idx, checkpoint, question, response, correct. The
response of checkpoint k is the truth, those of the checkpoints before it are the history; every k
that has as many before it counts. So a pair (prompt, k) is a prompt of the workload, with a history
of its own: peers that index all prompts together would find the truth of one in another's history,
and have no place here.
"""

import gzip
import hashlib
import json
from pathlib import Path

import numpy as np
from drafts.workload import VOCAB, Texts, Workload, read, save

VERSION = 1
PROMPT = 256
"""Tokens of a prompt that are kept, the last ones; shorter ones are padded in front with ids that
no text has."""
Row = dict[str, object]


def location(path: Path, history: int, folder: Path) -> Path:
    """Where `load` keeps the workload of a file."""
    said = json.dumps([VERSION, path.name, path.stat().st_size, history])
    return folder / f"real-{hashlib.sha256(said.encode()).hexdigest()[:16]}.npz"


def load(path: Path, tokenizer: Path, history: int, folder: Path) -> Workload:
    """The workload of a file, tokenised once. ValueError where it is no such file."""
    cached = location(path, history, folder)
    if not cached.is_file():
        save(make(rows_of(path), tokenizer, history), cached)
    return read(cached)


def rows_of(path: Path) -> list[Row]:
    """The lines of a .jsonl.gz."""
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    needed = {"idx", "checkpoint", "question", "response", "correct"}
    if not rows or any(needed - row.keys() for row in rows):
        raise ValueError(f"--real {path}: lines with {', '.join(sorted(needed))} are needed")
    return rows


def make(rows: list[Row], tokenizer: Path, history: int) -> Workload:
    """`history` checkpoints before each that is replayed."""
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode
    by_prompt: dict[object, dict[int, Row]] = {}
    for row in rows:
        by_prompt.setdefault(row["idx"], {})[int(str(row["checkpoint"]))] = row
    prompts, truths, told = [], [], []
    for found in by_prompt.values():
        order = sorted(found)
        texts = [np.array(encode(str(found[k]["response"])).ids, np.int32) for k in order]
        question = np.array(encode(str(found[order[0]]["question"])).ids[-PROMPT:], np.int32)
        filler = VOCAB + np.arange(PROMPT - len(question), dtype=np.int32)
        rewards = [float(bool(found[k]["correct"])) for k in order]
        for k in range(history, len(order)):
            prompts.append(np.concatenate((filler, question)))
            truths.append(([texts[k]], rewards[k : k + 1]))
            told.append((texts[k - history : k], rewards[k - history : k]))
    if not truths:
        raise ValueError(f"--history {history}: no prompt has so many checkpoints and one more")
    truth = _texts(truths)
    past = _texts(told)
    return Workload(np.stack(prompts), past, truth, _share(truth, past))


def _texts(groups: list[tuple[list[np.ndarray], list[float]]]) -> Texts:
    flat = [text for texts, _ in groups for text in texts]
    return Texts(
        np.concatenate(flat),
        np.cumsum([0, *map(len, flat)], dtype=np.int64),
        np.cumsum([0, *(len(texts) for texts, _ in groups)], dtype=np.int64),
        np.array([r for _, rewards in groups for r in rewards], np.float32),
    )


def _share(truth: Texts, past: Texts) -> float:
    """Of the truths' tokens, those that end an 8-gram of the history: what a drafter may find."""
    n, seen, total = 8, 0, 0
    for p in range(truth.num_prompts):
        known = {
            tuple(w)
            for text in past.responses(p)
            for w in np.lib.stride_tricks.sliding_window_view(text, n).tolist()
            if len(text) >= n
        }
        for text in truth.responses(p):
            total += len(text)
            if len(text) >= n:
                windows = np.lib.stride_tricks.sliding_window_view(text, n).tolist()
                seen += sum(tuple(w) in known for w in windows)
    return seen / max(total, 1)

"""Test that random configurations and broken data files are accepted or refused in one sentence.

    python tools/fuzz_configs.py                                     # 200, 20 and 200: a minute
    python tools/fuzz_configs.py --configs 10000 --data 10000 --runs 20 --json FILE

configs   that many random command lines, resolved and dry-run in this process. Fine: 0, or 2 and
          sentences that name a key; anything raised is a finding.
runs      of those that were accepted that many are run for a step, cut down to a few samples. Fine:
          0, or 1 or 2 and a sentence on the terminal; a traceback is a finding.
data      that many prompt files with bytes and fields changed, read as a run reads them. Fine: some
          prompts, or a ConfigError of one line.

A finding is printed with what repeats it; the exit code is then 1. The same --seed gives the same
cases.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import random
import re
import sys
import tempfile
import traceback
import typing
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch.distributed as dist  # noqa: E402

from rlcore import algos  # noqa: E402
from rlcore.cli import dry_run, settings, train  # noqa: E402
from rlcore.config import rules  # noqa: E402
from rlcore.config.schema import Config, DataConfig  # noqa: E402
from rlcore.data import prompts  # noqa: E402
from rlcore.hf.tokenizer import load_tokenizer  # noqa: E402
from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.utils.errors import ConfigError  # noqa: E402
from tests import runs  # noqa: E402

SELECTORS = {
    "algo": (*algos.NAMES, "tests.own_algo", "nothing", "no.such_module", ""),
    "reward": ("exact", "math", "code", "math:1,exact:0.5", "tests.scores.variety", "math:x",
               "math:0", "nothing", "tests.scores", "http://127.0.0.1:9/score", ",", ""),
    "mode": ("sync", "stream", "async", "none"),
    "schedule": ("all", "tail_batching", "half"),
}  # fmt: skip
NUMBERS = ("-1", "0", "1", "2", "3", "8", "64", "1000", "2147483648", "1e6", "0.5", "x", "", "nan")
FLOATS = ("-1", "0", "1e-6", "0.1", "0.5", "1", "1.5", "10", "1e300", "inf", "nan", "-inf", "x")
TEXTS = ("", "x", "/nowhere/at/all", "a b", "\u00e9", "label", "math=2", "=", "-x", "a=b")
WORLDS = (("1", "1"), ("1", "2"), ("1", "8"), ("2", "8"), ("3", "4"))
LONGEST = 600
"""Characters of a sentence."""
NOT_RUN = ("run.dir", "run.name", "model.path", "log.prometheus_port", "log.prometheus_host",
           "log.wandb", "debug.kill_at_step", "cluster.interface", "model.tokenizer")  # fmt: skip
"""Keys that a run leaves as they are: they reach out of its folder."""
SMALL = {
    "run.steps": 1, "data.prompts_per_step": 4, "data.num_val_prompts": 4,
    "rollout.samples_per_prompt": 4, "rollout.max_tokens": 16, "rollout.max_running_requests": 8,
    "rollout.threads": 1, "rollout.stall_timeout_s": 60, "rollout.engine": "torch",
    "model.num_layers": 0, "rollout.kv_cache_tokens": 0, "sync.bucket_mb": 1, "reward.workers": 1,
    "cluster.rollout_ranks": 0, "cluster.timeout_s": 60, "train.epochs": 1,
    "train.samples_per_update": 0, "eval.samples_per_prompt": 1, "debug.decode_floor_ms": 0,
}  # fmt: skip


class Finding(Exception):
    """A case that was neither accepted nor refused in a sentence."""


def keys_of(section: Any, prefix: str = "") -> dict[str, Any]:
    """Every key below a config object with its type."""
    found: dict[str, Any] = {}
    hints = typing.get_type_hints(type(section))
    for f in fields(section):
        name, value = prefix + f.name.rstrip("_"), getattr(section, f.name)
        if is_dataclass(value):
            found |= keys_of(value, name + ".")
        else:
            found[name] = hints[f.name]
    return found


def words_for(kind: Any, draw: random.Random) -> list[str]:
    """What follows a key of this type: often a value that fits, at times one that does not."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return [draw.choice([*map(str, args), *map(str, args), "nonsense"])]
    if origin is tuple:
        return [w for _ in range(draw.choice((0, 1, 1, 2))) for w in words_for(args[0], draw)]
    if origin in (typing.Union, UnionType):
        return words_for(draw.choice(args), draw)
    if kind is type(None):
        return ["None"]
    if kind is bool:
        return draw.choice(([], [], ["true"], ["false"], ["maybe"]))
    if kind is int:
        return [draw.choice(NUMBERS)]
    if kind is float:
        return [draw.choice(FLOATS)]
    return [draw.choice(TEXTS)]


def command_line(base: Sequence[str], draw: random.Random) -> list[str]:
    """A command line that works, with some keys changed."""
    argv = list(base)
    for name, choices in SELECTORS.items():
        if draw.random() < 0.3:
            argv += [f"--{name}", draw.choice(choices)]
    try:
        known = keys_of(settings.parse(argv))
    except ConfigError:
        known = keys_of(Config())
    known = {k: t for k, t in known.items() if not k.startswith("select.")}
    for _ in range(draw.choice((0, 1, 1, 2, 2, 3, 5))):
        key = draw.choice(list(known))
        kind, section = known[key], key.rpartition(".")
        if kind is bool and draw.random() < 0.3:
            argv.append(f"--{section[0]}.no_{section[2]}")
            continue
        if draw.random() < 0.02:
            key = key[:-1] + draw.choice("xyz")
        argv += [f"--{key}", *words_for(kind, draw)]
    return argv


def must_be_sentences(text: str, what: str) -> None:
    """Finding where a refusal is not made of sentences for people."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise Finding(f"{what} without a word")
    for line in lines:
        if "Traceback" in line or re.match(r"\s+File \"", line):
            raise Finding(f"{what} with a traceback: {text[-LONGEST:]}")
        if len(line) > LONGEST:
            raise Finding(f"{what} in {len(line)} characters: {line[:LONGEST]}")


def resolve_and_dry_run(argv: Sequence[str]) -> bool:
    """Whether this command line would run. Raises Finding."""
    out, err = io.StringIO(), io.StringIO()
    try:
        cfg = settings.parse(argv)
    except ConfigError as error:
        must_be_sentences(str(error), "refused")
        if len(str(error).splitlines()) > 1:
            raise Finding(f"refused in more than a sentence: {error}") from error
        return False
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = dry_run.show(cfg)
    if code not in (0, 2):
        raise Finding(f"dry run ended with {code}")
    if code == 2:
        must_be_sentences(err.getvalue(), "refused")
    elif rules.broken(cfg):
        raise Finding("accepted against its own rules")
    return code == 0


def small(argv: Sequence[str], folder: Path, number: int) -> list[str]:
    """The same, cut down to what runs in seconds, in a folder of its own."""
    kept: list[str] = []
    for chunk in chunks(argv):
        if not any(chunk[0].removeprefix("--") == key for key in NOT_RUN):
            kept += chunk
    for key, value in SMALL.items():
        kept += [f"--{key}", str(value)]
    model = argv[argv.index("--model.path") + 1]
    return [*kept, "--run.dir", str(folder), "--run.name", f"r{number}", "--model.path", model]


def chunks(argv: Sequence[str]) -> list[list[str]]:
    """Every key with its values."""
    found: list[list[str]] = []
    for word in argv:
        if word.startswith("--"):
            found.append([word])
        else:
            found[-1].append(word)
    return found


def run(argv: Sequence[str]) -> str:
    """One step of a run in this process: what became of it. Raises Finding."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = train.main(argv)
    finally:
        if dist.is_initialized():  # a run that failed leaves its world to the end of the process
            dist.destroy_process_group()
    said = out.getvalue() + err.getvalue()
    if "Traceback" in said:
        raise Finding(f"a run ended with {code} and a traceback: {said[-LONGEST:]}")
    if code:
        must_be_sentences("\n".join(said.splitlines()[-1:]), f"a run ended with {code}")
    return ("ran", "failed in a sentence", "refused")[code]


ROWS = [
    {"question": "a1b2=", "answer": "3", "level": 1},
    {"question": [{"role": "user", "content": "b1c2="}], "answer": 4},
    {"question": "a9=", "answer": 1.5, "tests": ["assert f(1) == 2", None, {"x": [1]}]},
    {"question": "c4d4=", "answer": "8", "text": "\u00e9\U0001f642"},
]
PIECES = [b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b"\r", b"[" * 3000, b"{", b"}", b'"',
          b"NaN", b"1e999", b"-1" * 400, b"null", b'"\\ud800"', b"\\u0000", b'"question": null,',
          b'"question": 7,', b"\xed\xa0\x80", b"  ", b"true"]  # fmt: skip


def data_file(folder: Path, draw: random.Random) -> Path:
    """A prompt file in which something is wrong."""
    if draw.random() < 0.1:
        import pyarrow
        import pyarrow.parquet

        path = folder / "rows.parquet"
        plain = [{"question": str(r["question"]), "answer": str(r["answer"])} for r in ROWS]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(plain), path)
        data = bytearray(path.read_bytes())
    else:
        path = folder / "rows.jsonl"
        lines = [json.dumps(draw.choice(ROWS), ensure_ascii=draw.random() < 0.5) for _ in range(4)]
        data = bytearray("\n".join(lines).encode())
    for _ in range(draw.choice((1, 1, 2, 3, 8))):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(5):
            case 0:
                data[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                del data[at : at + draw.choice((1, 5, 60))]
            case 2:
                data[at:at] = draw.choice(PIECES)
            case 3:
                data[at:at] = data[: draw.randrange(80)]
            case _:
                del data[at:]
    path.write_bytes(data)
    return path


def read(path: Path, tokenizer: Any, draw: random.Random) -> bool:
    """Whether the file has a usable row. Raises Finding."""
    config = DataConfig(
        train=(str(path),),
        template=draw.choice(("auto", "chat", "none")),
        bad_rows=draw.choice(("skip", "skip", "refuse")),
        max_prompt_tokens=draw.choice((4, 64, 1024)),
    )
    try:
        found = prompts.load(config, "train", tokenizer, 0)
    except ConfigError as error:
        must_be_sentences(str(error), "refused")
        if len(str(error).splitlines()) > 1:
            raise Finding(f"refused in more than a line: {error}") from error
        return False
    if not len(found):
        raise Finding("accepted without a row")
    return True


class Report:
    """What became of all cases."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.findings: list[dict[str, Any]] = []

    def case(self, kind: str, about: Any, function: Callable[[], Any]) -> Any:
        """Run one; None where it is a finding."""
        try:
            found = function()
        except (Exception, SystemExit) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(last.filename).name}:{last.lineno}"
            what = str(error) if isinstance(error, Finding) else f"{error!r} at {place}"
            self.counts[f"{kind}: findings"] += 1
            self.findings.append({"kind": kind, "what": what, "about": about})
            return None
        self.counts[f"{kind}: {found if isinstance(found, str) else _WORDS[bool(found)]}"] += 1
        return found


_WORDS = {True: "accepted", False: "refused"}


def fuzz(num_configs: int, num_runs: int, num_data: int, seed: int, folder: Path) -> Report:
    """All cases of a seed; `folder` is for models, runs and files."""
    report, logger = Report(), logging.getLogger("rlcore")
    logger.disabled, before = True, logger.disabled
    try:
        model = runs.tiny_model(folder / "model")
        base = runs.arguments(model, folder / "runs", "x")
        accepted = []
        for i in range(num_configs):
            draw = random.Random(f"{seed}/config/{i}")
            argv = command_line(base, draw)
            nodes, per_node = draw.choice(WORLDS)
            os.environ |= {"NODES": nodes, "GPUS_PER_NODE": per_node}
            about = f"NODES={nodes} GPUS_PER_NODE={per_node} " + " ".join(argv[len(base) :])
            if report.case("configs", about, lambda argv=argv: resolve_and_dry_run(argv)):
                accepted.append(argv)
        for name in ("NODES", "GPUS_PER_NODE"):
            os.environ.pop(name, None)
        draw = random.Random(f"{seed}/runs")
        for i, argv in enumerate(draw.sample(accepted, min(num_runs, len(accepted)))):
            words = small(argv, folder / "runs", i)
            logger.disabled = False
            report.case("runs", " ".join(words), lambda words=words: run(words))
            logger.disabled = True
        tokenizer = load_tokenizer(str(model), eos_ids=())
        for i in range(num_data):
            draw = random.Random(f"{seed}/data/{i}")
            path = data_file(folder, draw)
            kept = repr(bytes(path.read_bytes()[:2000]))
            report.case("data", kept, lambda p=path, d=draw: read(p, tokenizer, d))
    finally:
        logger.disabled = before
    return report


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--configs", type=int, default=200, help="number of random configurations")
    p.add_argument("--runs", type=int, default=20, help="number of accepted configurations to run")
    p.add_argument("--data", type=int, default=200, help="number of random data files")
    p.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    p.add_argument("--json", type=Path, help="JSON file for counts and findings")
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = fuzz(a.configs, a.runs, a.data, a.seed, Path(folder))
    for name, count in sorted(report.counts.items()):
        print(f"{name:32} {count}")
    for found in report.findings[:20]:
        print(f"\n{found['kind']}: {found['what']}\n  {found['about'][:2000]}")
    if a.json:
        rows = [{"name": n, "value": c, "unit": "cases"} for n, c in report.counts.items()]
        text = {"seed": a.seed, "rows": rows, "findings": report.findings}
        write_atomic(a.json, json.dumps(text, indent=1) + "\n")
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())

"""Drafters for rollout side by side: speed, memory and acceptance on one workload.

    python tools/studies/bench_drafts.py                # about 5 minutes after set-up
    python tools/studies/bench_drafts.py --equal --prompts 32 --batch 128 --replay-len 1024
    python tools/studies/bench_drafts.py --real ../shared/data/lengths/epochs_*.jsonl.gz

Each peer runs in a process of its own, on one core, over the same history and the same replay; all
times are CPU time. Other projects live in `.venvs/drafts`, made on the first call; one that cannot
be installed is skipped with its reason. `--equal` scans each peer's own settings and compares them
at equal drafted tokens. The workload is synthetic, or with `--real` the responses of a model to the
same prompts over its training checkpoints: each is replayed with those before it as its history.

A peer is `name` or `name={json settings}`, as rlcore={"limit":0}. The JSON is a list of rows, one
per peer and window: peer, window, batch_p50_us, batch_p99_us (append_batch + speculate_batch of
all live requests: advance + draft), build_mtok_s, bytes_per_token, tok_per_step, drafted_per_step
and more (drafts/replay.py says what each is).
"""

import argparse
import datetime
import difflib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench_vs_trl import call  # noqa: E402
from drafts import install, real, replay, show, workload  # noqa: E402
from drafts.peers import PEERS  # noqa: E402

from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.utils import env  # noqa: E402

CHILD = {
    **dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "PYTHONPATH": os.pathsep.join([str(ROOT / "tools" / "studies"), str(ROOT)]),
    # Ours without its native build is an error, not a slow row.
    "RLCORE_NATIVE": "1",
}

PEERS_RUN = (
    "empty",
    "rlcore",
    'rlcore={"limit":0}',
    'rlcore={"limit":0,"min_match":1}',
    "ref-sam",
    'arctic-global={"depth":24}',
    "arctic-prompt",
    'arctic-prompt={"factor":4,"depth":24}',
    "vllm-ngram",
    "vllm-ngram-hist",
    "pld",
)
EQUAL_RUN = (
    "rlcore",
    'rlcore={"min_match":1}',
    'rlcore={"limit":0,"min_match":1}',
    "ref-sam",
    "arctic-global",
    "arctic-prompt",
    'arctic-prompt={"depth":24}',
    "vllm-ngram-hist",
)
REAL_RUN = (
    "rlcore",
    'rlcore={"weighted":false}',
    'rlcore={"min_match":1}',
    'rlcore={"limit":0,"min_match":1}',
    'rlcore={"limit":0,"min_match":1,"live_match":1,"factor":4}',
    "ref-sam",
    'arctic-prompt={"factor":4,"depth":24}',
    "vllm-ngram",
    "vllm-ngram-hist",
)
SCAN = ("fixed:4", "fixed:8", "fixed:16", "fixed:32")


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 when a peer broke; 2 with a sentence for arguments that make no sense."""
    a = parse(argv)
    load = os.getloadavg()[0]
    try:
        items = [split(item) for item in a.peers]
        texts = real_texts(a) if a.real else synthetic_texts(a)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    absent: list[str] = []
    broken = False
    for title, path in texts.items():
        print(title, flush=True)
        for item, (name, settings) in zip(a.peers, items, strict=True):
            result = run(a, name, settings, path)
            if "runs" not in result:
                broken |= "failed" in result
                why = result.get("absent") or result["failed"]
                absent.append(f"{item}: {'failed' if 'failed' in result else 'absent'}: {why}")
                print(absent[-1], flush=True)
                continue
            runs = result.pop("runs")
            named = {"data": title} if a.real else {}
            rows += [{"peer": item, **named, **result, **one} for one in runs]
            print(f"{item}: {', '.join(brief(one) for one in runs)}", flush=True)
    report(a, rows, absent, list(texts), load)
    return int(broken)


FOLDER = ROOT / "build" / "bench_drafts"


def synthetic_texts(a: argparse.Namespace) -> dict[str, Path]:
    """The workload of the arguments, by its title. ValueError for such that make no sense."""
    cfg = workload.Config(
        prompts=a.prompts,
        group=a.group,
        min_len=a.min_len,
        max_len=a.max_len,
        epochs=a.history,
        seed=a.seed,
    )
    check(a, a.prompts * a.group)
    w = workload.load(cfg, FOLDER)
    title = (
        f"{a.prompts} prompts x {a.group} x {a.min_len}-{a.max_len} tokens, "
        f"{w.history.num_tokens / 1e6:.1f} M of history, {w.copied:.0%} copied; "
        f"{a.batch} requests, {min(a.replay_len, a.max_len)} tokens each"
    )
    return {title: workload.location(cfg, FOLDER)}


def real_texts(a: argparse.Namespace) -> dict[str, Path]:
    """A workload for every file of --real, by its title."""
    found = {}
    for path in a.real:
        if not path.is_file():
            raise ValueError(f"--real {path}: there is no such file")
        tokenizer = a.tokenizer or path.resolve().parents[1] / "tokenizer_qwen"
        if not (tokenizer / "tokenizer.json").is_file():
            raise ValueError(f"--tokenizer {tokenizer}: has no tokenizer.json")
        w = real.load(path, tokenizer, a.history, FOLDER)
        check(a, w.truth.num_prompts)
        title = (
            f"{path.name}: {w.truth.num_prompts} responses, {w.history.num_tokens / 1e6:.1f} M of "
            f"history ({a.history} before each), {w.copied:.0%} end an 8-gram of it; {a.batch} "
            f"requests, {a.replay_len} tokens each"
        )
        found[title] = real.location(path, a.history, FOLDER)
    return found


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--prompts", type=int, default=64)
    p.add_argument("--group", type=int, default=16, help="responses per prompt and epoch")
    p.add_argument("--min-len", type=int, default=2048, help="of a response, tokens")
    p.add_argument("--max-len", type=int, default=8192)
    p.add_argument("--real", type=Path, nargs="+", metavar="FILE", help="see drafts/real.py")
    p.add_argument("--tokenizer", type=Path, help="of --real; default: tokenizer_qwen beside it")
    p.add_argument("--history", type=int, default=1, help="epochs of history in the index")
    p.add_argument("--batch", type=int, default=256, help="live requests")
    p.add_argument("--replay-len", type=int, default=2048, help="tokens replayed of a response")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--peers", nargs="+", help=f"of {', '.join(PEERS)}")
    p.add_argument("--windows", nargs="+", help="fixed:N or aimd; default: fixed:16 aimd")
    p.add_argument("--equal", action="store_true", help="scan settings; compare at equal drafts")
    p.add_argument("--json", help="write the rows to this file")
    p.add_argument("--table", help="write the tables to this file as well")
    p.add_argument("--plot", help="write a picture to this file")
    p.add_argument(
        "--timeout", type=float, default=900.0, help="seconds a step of set-up or a peer may take"
    )
    p.add_argument("--no-install", action="store_true", help="only the peers that are installed")
    a = p.parse_args(argv)
    usual = REAL_RUN if a.real else PEERS_RUN
    a.peers = a.peers or list(EQUAL_RUN if a.equal else usual)
    a.windows = a.windows or list(SCAN if a.equal else ("fixed:16", "aimd"))
    return a


def split(item: str) -> tuple[str, dict[str, Any]]:
    """Name and settings of `name={json}`. ValueError for what is no peer."""
    name, _, settings = item.partition("=")
    if name not in PEERS:
        near = difflib.get_close_matches(name, PEERS, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(PEERS)}"
        raise ValueError(f"--peers {name}: no such peer; {hint}")
    try:
        found = json.loads(settings or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"--peers {item}: the settings are no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"--peers {item}: the settings must be a JSON object")
    try:
        PEERS[name](**found)
    except ValueError as error:
        raise ValueError(f"--peers {item}: {error}") from error
    return name, found


def check(a: argparse.Namespace, total: int) -> None:
    """ValueError for arguments that make no sense together; `total`: responses to replay."""
    for spec in a.windows:
        replay.Window(spec, 1)
    if not 1 <= a.batch <= total:
        what = "the responses" if a.real else "prompts x group"
        raise ValueError(f"--batch {a.batch}: from 1 to {what} = {total}")
    if a.replay_len < 1:
        raise ValueError(f"--replay-len {a.replay_len}: at least 1")


def run(a: argparse.Namespace, name: str, settings: dict[str, Any], texts: Path) -> dict[str, Any]:
    """The child's result, {"absent": why} or {"failed": why}."""
    python = Path(sys.executable)
    if PEERS[name].home == "venv":
        python = install.FOLDER / "bin" / "python"
        try:
            if not a.no_install:
                python = install.python(a.timeout)
                install.part(name, a.timeout)
            elif not python.exists():
                return {"absent": f"{install.FOLDER.relative_to(ROOT)} is not there"}
        except RuntimeError as error:
            return {"absent": str(error)}
    wanted = {
        "peer": name,
        "settings": settings,
        "workload": str(texts),
        "batch": a.batch,
        "replay_len": a.replay_len,
        "windows": a.windows,
        "equal": a.equal,
    }
    try:
        command = [str(python), "-m", "drafts.child"]
        out = call(command, a.timeout, stdin=json.dumps(wanted), more=CHILD)
    except RuntimeError as error:
        return {"failed": str(error).strip().splitlines()[-1]}
    return json.loads(out.strip().splitlines()[-1])


def brief(run: dict[str, Any]) -> str:
    """A run in a few words, as it comes."""
    knobs = "".join(f" {k}={v}" for k, v in run["knobs"].items())
    return (
        f"{run['window']}{knobs} {run['tok_per_step']:.2f} tok/step at "
        f"{run['drafted_per_step']:.1f}, {run['batch_p50_us']:,.0f} us"
    )


def report(
    a: argparse.Namespace,
    rows: list[dict[str, Any]],
    absent: list[str],
    titles: list[str],
    load: float,
) -> None:
    """The tables on screen, and the files asked for."""
    console = show.console()
    for title in titles:
        some = [row for row in rows if row.get("data", title) == title]
        if some and not a.equal:
            console.print(show.table(some, title))
        if some and a.equal:
            console.print(show.points_table(some, title))
            console.print(show.equal_table(some))
            for line in show.margins(some):
                console.print(line, markup=False)
    for line in absent:
        console.print(line, markup=False)
    facts = env.report()
    command = " ".join(["tools/studies/bench_drafts.py", *map(quoted, sys.argv[1:])])
    console.print(
        f"{command}\n{datetime.date.today()}, commit {facts['commit']}, {facts['cpu']['model']}, "
        f"{facts['cpu']['cores']} cores, load before {load:.1f}",
        markup=False,
        soft_wrap=True,
    )
    if a.table:
        write_atomic(Path(a.table), show.text(console))
    if a.json:
        lines = ",\n".join(json.dumps(rounded(row)) for row in rows)
        write_atomic(Path(a.json), f"[\n{lines}\n]\n")
    if a.plot and rows:
        draw = show.equal_picture if a.equal else show.picture
        for i, title in enumerate(titles):
            path = Path(a.plot)
            if i:  # one picture for each file
                path = path.with_name(f"{path.stem}_{i + 1}{path.suffix}")
            draw([row for row in rows if row.get("data", title) == title], path, title)


def quoted(word: str) -> str:
    """A word as a shell takes it."""
    return f"'{word}'" if set(word) & set('"{} ') else word


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Five digits of each number: more is noise."""
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()}


if __name__ == "__main__":
    sys.exit(main())

"""Drafters for rollout side by side: speed, memory and acceptance on one synthetic workload.

    .venv/bin/python tools/bench_drafts.py                       # about 5 minutes after set-up
    .venv/bin/python tools/bench_drafts.py --equal --prompts 32 --batch 128 --replay-len 1024

Each peer runs in a process of its own, on one core, over the same history and the same replay; all
times are CPU time. Other projects live in `.venvs/drafts`, made on the first call; one that cannot
be installed is skipped with its reason. `--equal` scans each peer's own settings and compares them
at equal drafted tokens.

A peer is `name` or `name={json settings}`, as rlcore={"limit":0}. The JSON is a list of rows, one
per peer and window: peer, window, batch_p50_us, batch_p99_us (append_batch + speculate_batch of
all live requests: advance + draft), build_mtok_s, bytes_per_token, tok_per_step, drafted_per_step
and more (tools/drafts/replay.py says what each is).
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

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench_vs_trl import call  # noqa: E402
from drafts import install, replay, show, workload  # noqa: E402
from drafts.peers import PEERS  # noqa: E402

from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.utils import env  # noqa: E402

CHILD = {
    **dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "PYTHONPATH": os.pathsep.join([str(ROOT / "tools"), str(ROOT)]),
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
SCAN = ("fixed:4", "fixed:8", "fixed:16", "fixed:32")


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 when a peer broke; 2 with a sentence for arguments that make no sense."""
    a = parse(argv)
    try:
        items = [split(item) for item in a.peers]
        cfg = workload.Config(
            prompts=a.prompts,
            group=a.group,
            min_len=a.min_len,
            max_len=a.max_len,
            epochs=a.history,
            seed=a.seed,
        )
        check(a)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    folder = ROOT / "build" / "bench_drafts"
    load = os.getloadavg()[0]
    w = workload.load(cfg, folder)
    title = (
        f"{a.prompts} prompts x {a.group} x {a.min_len}-{a.max_len} tokens, "
        f"{w.history.num_tokens / 1e6:.1f} M of history, {w.copied:.0%} copied; "
        f"{a.batch} requests, {min(a.replay_len, a.max_len)} tokens each"
    )
    print(title, flush=True)
    rows: list[dict[str, Any]] = []
    absent: list[str] = []
    broken = False
    for item, (name, settings) in zip(a.peers, items, strict=True):
        result = run(a, name, settings, workload.location(cfg, folder))
        if "runs" not in result:
            broken |= "failed" in result
            why = result.get("absent") or result["failed"]
            absent.append(f"{item}: {'failed' if 'failed' in result else 'absent'}: {why}")
            print(absent[-1], flush=True)
            continue
        runs = result.pop("runs")
        rows += [{"peer": item, **result, **one} for one in runs]
        print(f"{item}: {', '.join(brief(one) for one in runs)}", flush=True)
    report(a, rows, absent, title, load)
    return int(broken)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--prompts", type=int, default=64)
    p.add_argument("--group", type=int, default=16, help="responses per prompt and epoch")
    p.add_argument("--min-len", type=int, default=2048, help="of a response, tokens")
    p.add_argument("--max-len", type=int, default=8192)
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
    a.peers = a.peers or list(EQUAL_RUN if a.equal else PEERS_RUN)
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


def check(a: argparse.Namespace) -> None:
    """ValueError for arguments that make no sense together."""
    for spec in a.windows:
        replay.Window(spec, 1)
    total = a.prompts * a.group
    if not 1 <= a.batch <= total:
        raise ValueError(f"--batch {a.batch}: from 1 to prompts x group = {total}")
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
    title: str,
    load: float,
) -> None:
    """The tables on screen, and the files asked for."""
    console = show.console()
    if rows and not a.equal:
        console.print(show.table(rows, title))
    if rows and a.equal:
        console.print(show.points_table(rows, title))
        console.print(show.equal_table(rows))
        for line in show.margins(rows):
            console.print(line, markup=False)
    for line in absent:
        console.print(line, markup=False)
    facts = env.report()
    command = " ".join(["tools/bench_drafts.py", *map(quoted, sys.argv[1:])])
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
        draw(rows, Path(a.plot), title)


def quoted(word: str) -> str:
    """A word as a shell takes it."""
    return f"'{word}'" if set(word) & set('"{} ') else word


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Five digits of each number: more is noise."""
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()}


if __name__ == "__main__":
    sys.exit(main())

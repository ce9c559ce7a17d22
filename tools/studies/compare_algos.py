"""rlcore's objectives against the public implementations that made them known.

    .venv/bin/python tools/studies/compare_algos.py --roll-source DIR --slime-source DIR

A minute after set-up. Random cases go to each peer as a file; the peer's own functions answer, in a
Python of their own and in float64, with loss and gradient, advantages, weights, masks and figures.
rlcore answers from packed tokens. A row of the table is the largest difference over its cases,
divided by the largest entry. Exit code 1: a row that must agree does not.

A difference that is known has its reason under the table, and a row where the setting is matched.

verl and AReaL get a virtual environment of their own, `.venvs/algo_peers` (about 1 GB), TRL has
that of bench_vs_trl.py; both are made on the first call. ROLL and slime are on no package index:
`--roll-source` and `--slime-source` are folders with their source. `--areal-source` takes AReaL
from a folder as well.

Cases: peers/algo_cases.py. Rows: peers/algo_checks.py. The peers' side: peers/*_algos.py.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "tools" / "studies" / "peers"
sys.path[:0] = [str(ROOT), str(ROOT / "tools" / "studies"), str(PEERS)]

import algo_cases  # noqa: E402
import algo_checks  # noqa: E402
from algo_checks import Check  # noqa: E402
from bench_vs_trl import call, peer_python, trl_python  # noqa: E402

from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.utils import env  # noqa: E402

REQUIREMENTS = ("torch==2.13.0", "numpy~=2.4.6", "tensordict==0.10.0", "omegaconf==2.4.0")
WITHOUT_DEPENDENCIES = ("verl==0.9.1", "areal==1.0.4")
NAMES = ("verl", "trl", "areal", "roll", "slime")
METRIC_TOLERANCE = 1e-6
"""verl counts its fractions in float32."""

Answers = dict[str, dict[str, Tensor]]
"""By case, then by name."""


def main() -> int:
    """0 where all rows agree that must; 1 where one does not or a peer did not run; 2 for words
    that say nothing."""
    a = parse()
    rows: list[dict[str, Any]] = []
    versions: dict[str, dict[str, str]] = {}
    cases = {
        f"{kind}{seed}": algo_cases.make(kind, seed)
        for kind in algo_cases.KINDS
        for seed in range(a.seed, a.seed + a.cases)
    }
    torch.set_num_threads(1)
    try:
        for peer in a.peer:
            if peer in ("roll", "slime") and not sources(a)[peer]:
                print(f"{peer}: left out, it is on no package index; give --{peer}-source FOLDER")
                continue
            print(f"{peer} ...", flush=True)
            checks = algo_checks.of(peer)
            theirs, versions[peer] = ask(a, peer, checks, cases)
            rows += [compare(c, answers(c, cases), t) for c, t in zip(checks, theirs, strict=True)]
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(table(rows, versions)))
    if a.json:
        result = {
            "what": "rlcore's objectives against their public implementations, in float64",
            "command": " ".join(["tools/studies/compare_algos.py", *named(a, sys.argv[1:])]),
            "settings": {"seed": a.seed, "cases": a.cases},
            "versions": versions,
            "machine": env.report(),
            "rows": rows,
        }
        write_atomic(Path(a.json), json.dumps(result, indent=1) + "\n")
    return 1 if any(r["verdict"] == "DIFFERS" for r in rows) else 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    p.add_argument("--seed", type=int, default=0, help="of the first case of every kind")
    p.add_argument("--cases", type=int, default=3, help="cases of every kind")
    p.add_argument("--json", default="", help="write the rows and the versions to this file")
    p.add_argument("--peer", nargs="+", choices=NAMES, default=list(NAMES))
    p.add_argument("--roll-source", default="", help="folder that holds the package roll")
    p.add_argument("--slime-source", default="", help="the same of slime")
    p.add_argument("--areal-source", default="", help="the same of areal; default: from PyPI")
    p.add_argument("--timeout", type=float, default=1800.0, help="seconds that one step may take")
    a = p.parse_args(argv)
    for peer, folder in sources(a).items():
        if folder and not (Path(folder) / peer).is_dir():
            p.error(f"--{peer}-source {folder}: has no folder {peer}; give the root of a checkout")
    return a


def sources(a: argparse.Namespace) -> dict[str, str]:
    """The folder with the source of a peer, "" where none is given."""
    return {"roll": a.roll_source, "slime": a.slime_source, "areal": a.areal_source}


def named(a: argparse.Namespace, words: Sequence[str]) -> list[str]:
    """The command line with DIR in the place of folders of this machine."""
    return ["DIR" if w in sources(a).values() else w for w in words]


# ---- the peers


def peers_python(timeout_s: float) -> Path:
    """The Python of verl and AReaL, of whose dependencies the functions that are compared need only
    a few."""
    return peer_python("algo_peers", REQUIREMENTS, WITHOUT_DEPENDENCIES, timeout_s)


def ask(
    a: argparse.Namespace, peer: str, checks: list[Check], cases: dict[str, algo_cases.Case]
) -> tuple[list[Answers], dict[str, str]]:
    """The peer's answers to every check, and its versions."""
    python = trl_python(a.timeout) if peer == "trl" else peers_python(a.timeout)
    source = sources(a).get(peer, "")
    jobs = [
        {"id": f"{number}/{name}", "case": name, "function": c.ask, "settings": c.told}
        for number, c in enumerate(checks)
        for name in chosen(c, cases)
    ]
    arrays = {f"{name}/{key}": x for name, c in cases.items() for key, x in c.arrays.items()}
    with tempfile.TemporaryDirectory(prefix="compare_algos") as folder:
        files = [Path(folder) / f for f in ("jobs.json", "cases.npz", "answers.npz")]
        files[0].write_text(json.dumps(jobs))
        np.savez(files[1], **arrays)
        command = [str(python), str(PEERS / f"{peer}_algos.py"), *map(str, files)]
        out = call([*command, *([os.path.abspath(source)] if source else [])], a.timeout, threads=1)
        found: list[Answers] = [{} for _ in checks]
        with np.load(files[2]) as answered:
            for key in answered.files:
                number, case, name = key.split("/", 2)
                found[int(number)].setdefault(case, {})[name] = torch.from_numpy(answered[key])
    return found, json.loads(out.strip().splitlines()[-1])


def chosen(check: Check, cases: dict[str, algo_cases.Case]) -> list[str]:
    """The names of its cases."""
    return [name for name in cases if name.rstrip("0123456789") in check.cases]


def answers(check: Check, cases: dict[str, algo_cases.Case]) -> Answers:
    """rlcore's."""
    return {name: check.ours(cases[name]) for name in chosen(check, cases)}


# ---- the comparison


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference by the largest entry; inf where one of them is not finite or the shapes
    differ."""
    ours, theirs = ours.double(), theirs.double()
    if ours.shape != theirs.shape or not (ours.isfinite().all() and theirs.isfinite().all()):
        return float("inf")
    scale = torch.maximum(ours.abs().max(), theirs.abs().max())
    return float((ours - theirs).abs().max() / scale) if scale > 0 else 0.0


def compare(check: Check, ours: Answers, theirs: Answers) -> dict[str, Any]:
    """A row: name, value (the largest difference), unit, baseline (the largest that is allowed)
    and ratio of both, with what they are made of."""
    worst: dict[str, float] = {}
    metrics: dict[str, float] = {}
    for case in ours:
        mine, given = ours[case], theirs[case]
        names = {n for n in mine | given if not n.startswith("metric ")}
        for name in names if not check.only_metrics else ():
            column = "gradient" if name.startswith("d_") else "value"
            # A side that does not know a gradient has none.
            other = torch.zeros_like((mine | given)[name])
            found = relative(mine.get(name, other), given.get(name, other))
            worst[column] = max(worst.get(column, 0.0), found)
        for name in check.metrics:
            found = relative(mine[f"metric {name}"], given[f"metric {name}"])
            metrics[name] = max(metrics.get(name, 0.0), found)
    if metrics:
        worst["metrics"] = max(metrics.values())
    agrees = all(
        found <= (METRIC_TOLERANCE if column == "metrics" else check.tolerance)
        for column, found in worst.items()
    )
    verdict = "same" if agrees else "known" if check.known else "DIFFERS"
    tensors = [worst[c] for c in ("value", "gradient") if c in worst]
    value, allowed = (
        (max(tensors), check.tolerance) if tensors else (worst["metrics"], METRIC_TOLERANCE)
    )
    return {
        "name": "/".join(filter(None, (check.peer, check.name, check.setting))),
        "value": value,
        "unit": "relative difference",
        "baseline": allowed,
        "ratio": value / allowed,
        "rlcore": check.name,
        "setting": check.setting,
        "peer": check.peer,
        "function": check.function,
        "difference": worst,
        "metrics": metrics,
        "cases": len(ours),
        "kinds": list(check.cases),
        "verdict": verdict,
        "must_agree": not check.known,
        "note": check.known or check.reason,
    }


def table(rows: list[dict[str, Any]], versions: dict[str, dict[str, str]]) -> list[str]:
    """The rows as text, one part for each peer, and the reasons below."""
    notes = list(dict.fromkeys(r["note"] for r in rows if r["note"]))
    lines = []
    for peer in dict.fromkeys(r["peer"] for r in rows):
        named = ", ".join(f"{k} {v}" for k, v in versions.get(peer, {}).items())
        head = f"{'rlcore':<37}{'setting':<48}{'value':>9}{'gradient':>10}{'figures':>9}  verdict"
        lines += ["", f"{peer} ({named})", head, "-" * len(head)]
        last = ""
        for r in (r for r in rows if r["peer"] == peer):
            if r["function"] != last:
                lines.append(f"  {r['function']}")
                last = r["function"]
            cells = [r["difference"].get(c) for c in ("value", "gradient", "metrics")]
            shown = ["" if x is None else f"{x:.1e}" if x else "0" for x in cells]
            note = f" ({notes.index(r['note']) + 1})" if r["note"] else ""
            lines.append(
                f"{r['rlcore']:<37}{r['setting']:<48}{shown[0]:>9}{shown[1]:>10}{shown[2]:>9}"
                f"  {r['verdict']}{note}"
            )
    lines += ["", *(f"({i}) {note}" for i, note in enumerate(notes, 1))]
    count = {v: sum(r["verdict"] == v for r in rows) for v in ("same", "known", "DIFFERS")}
    return [*lines, "", ", ".join(f"{v}: {n}" for v, n in count.items())]


if __name__ == "__main__":
    sys.exit(main())

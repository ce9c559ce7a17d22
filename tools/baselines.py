"""Record what runs compute, and compare later commits with it.

    python tools/baselines.py record                   # every case, at this commit
    python tools/baselines.py compare                  # every case, with what is recorded
    python tools/baselines.py compare main tail        # some cases
    python tools/baselines.py record --commit REV      # on a processor that has no baselines yet

A case is ten steps of a recipe. Recorded are its metrics without those that depend on the clock,
the text, score and length of every sample of rank 0, and a checksum of the exported weights. Equal
means equal to the last bit, with two exceptions at 1e-5. In `stream` the clock decides in which
order gradients are added and which rank samples what, so its samples are not compared. In `sglang`
it decides which requests share a batch, and the width of a batch moves last bits.

Exact values differ between CPU models, so there is a folder of baselines for each. On another CPU
`record --commit` checks the commit out of the baselines, builds it beside this one and records it
there, so that `compare` speaks about the change and not about the processor.
"""

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.metrics.names import CLOCK  # noqa: E402

BASELINES = ROOT / "tools" / "results" / "baselines"
REPLAY = BASELINES / "async_record"
"""Ten steps that `--mode async` recorded: events and samples."""
STEPS = 10
RENAMED: dict[str, str] = {}
"""Metrics whose names have changed since the baselines: old name to new one; "" for one that was
deleted, with the reason beside it."""


@dataclass(frozen=True)
class Case:
    """A recipe with keys."""

    recipe: str
    keys: tuple[object, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    runs: tuple[str, ...] = ()
    """Names of the runs that it makes, where those are several."""
    rtol: float = 0.0
    """0: equal to the last bit; otherwise norms of weights are compared, not their checksum."""
    samples: bool = True
    """Are they compared?"""
    loose: tuple[str, ...] = ()
    """Further metrics that the clock decides in this case."""


def _algo(name: str, *keys: object) -> Case:
    return Case("algo_tiny", ("--algo", name, *keys))


_ONE = {"GPUS_PER_NODE": "1"}
_SLOW = ("--train.lr", 1e-6, "--train.min_lr", 1e-6)  # no sample changes by the last bits
_REPEATED = ("--data.num_prompts", 32, "--data.prompts_per_step", 16)
CASES = {
    "main": Case("grpo_tiny"),
    "ppo": _algo("ppo", "--critic.warmup_steps", 2),
    "gspo": _algo("gspo"),
    "cispo": _algo("cispo"),
    "decoupled_ppo": _algo("decoupled_ppo", "--algo.kl_coef", 0.01),
    "tail": Case("grpo_tiny", ("--schedule", "tail_batching", "--debug.deterministic_order")),
    "stream": Case(
        "grpo_tiny",
        ("--mode", "stream", "--train.samples_per_update", 0, *_SLOW),
        rtol=1e-5,
        samples=False,
        loose=(
            "sched/",
            "actor/micro_batches",
            "global_seqlen/",
            "rollout_corr/",
            "training/rollout_",
        ),
    ),
    "async_alpha0": Case("async_tiny", ("--async.alpha", 0)),
    "async_replay": Case(
        "async_tiny",
        ("--data.prompts_per_step", 4, "--train.samples_per_update", 16, "--debug.replay", REPLAY),
    ),
    "mux": Case("mux_two_jobs", runs=("a", "b"), loose=("mux/", "sync/", "memory/")),
    "drafts": Case(
        "grpo_tiny", ("--rollout.draft", "history", "--debug.deterministic_order", *_REPEATED), _ONE
    ),
    "judge": Case("judge_tiny", ("--reward", "judge", "--reward.batch_rows", 1)),
    "code": Case("code_tiny"),
    "env": Case("frozenlake_tiny", ("--debug.deterministic_order",)),
    "sglang": Case(
        "grpo_tiny",
        ("--rollout.engine", "sglang", *_SLOW),
        _ONE,
        rtol=1e-5,
        loose=("sched/cache_used", "sched/prefill_tokens", "rollout_corr/", "training/rollout_"),
    ),
}


# ---- a run and what is kept of it


def run(name: str, case: Case, folder: Path, more: tuple[object, ...] = ()) -> list[str]:
    """Run a case into `folder`; the command without its paths. SystemExit where it fails."""
    keys = ["--run.steps", STEPS, "--eval.every", 0, "--eval.no_at_start", "--eval.no_at_end"]
    keys += ["--log.rollouts", -1, "--log.no_plot", "--log.no_tensorboard", "--log.no_progress"]
    keys += [*case.keys, *more]
    where = ["--run.dir", folder] + ([] if case.runs else ["--run.name", name])
    command = ["bash", f"recipes/{case.recipe}.sh", *map(str, keys)]
    for old in (folder / each for each in case.runs or (name,)):
        shutil.rmtree(old, ignore_errors=True)
    log = folder / f"{name}.log"
    with log.open("w") as output:
        code = subprocess.run(
            [*command, *map(str, where)],
            cwd=ROOT,
            env=os.environ | {"PYTHON": sys.executable, **case.env},
            stdout=output,
            stderr=subprocess.STDOUT,
        ).returncode
    if code:
        sys.exit(f"baselines: {name} failed with {code}:\n{log.read_text()[-3000:]}")
    env = [f"{key}={value}" for key, value in case.env.items()]
    return [*env, *(word.replace(f"{ROOT}/", "") for word in command)]


def facts(case: Case, name: str, folder: Path) -> dict[str, Any]:
    """What a case computed, run by run."""
    return {each: _facts(case, folder / each) for each in case.runs or (name,)}


def _facts(case: Case, run_folder: Path) -> dict[str, Any]:
    rows = list(_lines(run_folder / "metrics.jsonl"))
    skipped = (*CLOCK, *case.loose)
    names = sorted({n for row in rows for n in row if n != "step" and not n.startswith(skipped)})
    return {
        "steps": [row["step"] for row in rows],
        "metrics": {n: [row.get(n) for row in rows] for n in names},
        "rollouts": _rollouts(run_folder / "rollouts.jsonl"),
        "weights": _weights(run_folder / "hf"),
    }


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text().splitlines():
        yield json.loads(line)


def _rollouts(file: Path) -> dict[str, str]:
    """A digest for each step, whatever the order and the ids of the samples."""
    steps: dict[str, list[str]] = {}
    for row in _lines(file):
        kept = [row[key] for key in ("prompt", "response", "score", "num_tokens", "finish")]
        steps.setdefault(str(row["step"]), []).append(json.dumps(kept))
    return {step: _digest("\n".join(sorted(rows)).encode()) for step, rows in steps.items()}


def _weights(folder: Path) -> dict[str, Any]:
    """A checksum over names and bytes, and the norm of each tensor."""
    import torch
    from safetensors.torch import load_file

    digest, norms = hashlib.sha256(), {}
    tensors = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        norms[name] = float(tensor.double().norm())
    return {"digest": digest.hexdigest()[:16], "norms": norms}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


# ---- differences


def differences(case: Case, then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is not as it was, in sentences; metrics that are new are not looked at."""
    found = []
    for each, old in then.items():
        new = now[each]
        said = _metrics_apart(case, old, new)
        if case.samples:
            said += [
                f"step {step}: samples differ"
                for step, digest in old["rollouts"].items()
                if new["rollouts"].get(step) != digest
            ][:1]
        if case.rtol:
            said += [
                f"weights: {name} has norm {new['weights']['norms'].get(name)}, had {norm}"
                for name, norm in old["weights"]["norms"].items()
                if not _close(norm, new["weights"]["norms"].get(name), case.rtol)
            ]
        elif old["weights"]["digest"] != new["weights"]["digest"]:
            said.append("weights: the checksum differs")
        found += [f"{each}: {sentence}" for sentence in said]
    return found


def _metrics_apart(case: Case, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The first step at which each metric differs, earliest first."""
    if old["steps"] != new["steps"]:
        return [f"steps {new['steps']}, were {old['steps']}"]
    found = []
    for name, values in old["metrics"].items():
        name = RENAMED.get(name, name)
        if not name or name.startswith((*CLOCK, *case.loose)):
            continue
        if name not in new["metrics"]:
            found.append((0, f"{name} is missing; if it was renamed, add it to RENAMED"))
            continue
        for step, a, b in zip(old["steps"], values, new["metrics"][name], strict=True):
            if not _close(a, b, case.rtol):
                found.append((step, f"step {step}: {name} is {b}, was {a}"))
                break
    return [sentence for _, sentence in sorted(found)]


def _close(a: float | None, b: float | None, rtol: float) -> bool:
    if a is None or b is None:
        return a is b
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return a == b or (rtol > 0 and math.isclose(a, b, rel_tol=rtol, abs_tol=rtol / 100))


# ---- this machine


def processor() -> str:
    """Its model, and what else decides which instructions are used."""
    said = dict(
        line.replace("\t", "").split(": ", 1)
        for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        if ": " in line
    )
    flags = said.get("flags", "").split()
    widest = next((v for v in ("amx_tile", "avx512f", "avx2", "avx") if v in flags), "no avx")
    where = f"family {said.get('cpu family', '?')} model {said.get('model', '?')}"
    return f"{said.get('model name', 'unknown')}, {where}, {widest}"


def home(into: Path) -> Path:
    """The folder of this processor's baselines."""
    return into / re.sub(r"[^a-z0-9]+", "_", processor().lower()).strip("_")


def commit() -> str:
    """Of this checkout; says where it has changes."""
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty= with changes", "--abbrev=12", "--exclude", "*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return told.stdout.strip()


# ---- commands


def record(names: list[str], folder: Path, into: Path) -> int:
    """Run the cases and write a file for each."""
    for name in names:
        case, start = CASES[name], time.monotonic()
        if name == "async_replay" and not REPLAY.is_dir():
            record_async(folder)
        command = run(name, case, folder)
        found = {
            "case": name,
            "command": " ".join(command),
            "commit": commit(),
            "processor": processor(),
            "runs": facts(case, name, folder),
        }
        home(into).mkdir(parents=True, exist_ok=True)
        write_atomic(home(into) / f"{name}.json", _compact(found).encode())
        print(f"{name:16} recorded in {time.monotonic() - start:.0f} s", flush=True)
    return 0


def record_async(folder: Path) -> None:
    """Make the log that `async_replay` trains."""
    case = CASES["async_replay"]
    keys = case.keys[: case.keys.index("--debug.replay")]
    run("async_record", Case(case.recipe, keys), folder, ("--debug.record",))
    shutil.copytree(folder / "async_record" / "record", REPLAY / "record")


def _compact(found: Mapping[str, Any]) -> str:
    """JSON with a metric, a step or a tensor on a line."""
    text = json.dumps(found, indent=1)
    return re.sub(r"\[[^\[\]{}]*\]", lambda m: re.sub(r"\s+", " ", m.group()), text) + "\n"


def compare(names: list[str], folder: Path, into: Path) -> int:
    """Run the cases and print what differs; 1 where something does."""
    failed = []
    for name in names:
        file = home(into) / f"{name}.json"
        if not file.is_file():
            return _no_baseline(name, into)
        then, start = json.loads(file.read_text()), time.monotonic()
        run(name, CASES[name], folder)
        found = differences(CASES[name], then["runs"], facts(CASES[name], name, folder))
        how = "equal" if not found else f"{len(found)} differences"
        took = time.monotonic() - start
        print(f"{name:16} {how} ({took:.0f} s), recorded at {then['commit']}", flush=True)
        for line in found[:12]:
            print(f"    {line}")
        if found:
            failed.append(name)
    print(f"{len(names) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def _no_baseline(name: str, into: Path) -> int:
    others = {json.loads(f.read_text())["commit"] for f in into.glob(f"*/{name}.json")}
    print(f"baselines: there is none of {name} for this processor ({processor()})", file=sys.stderr)
    for rev in sorted(others):
        print(f"  python tools/baselines.py record --commit {rev}", file=sys.stderr)
    return 2


def record_at(revision: str, names: list[str], folder: Path, into: Path) -> int:
    """Record with the code of another commit, which is checked out and built under `folder`."""
    tree = folder / "tree"
    subprocess.run(["git", "worktree", "prune"], cwd=ROOT, check=True)
    if tree.exists():
        subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    subprocess.run(["git", "worktree", "add", "--detach", tree, revision], cwd=ROOT, check=True)
    try:
        build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(build, cwd=tree, check=True)
        tool = [sys.executable, "tools/baselines.py", "record", *names]
        tool += ["--dir", str(folder / "runs"), "--into", str(into)]
        env = os.environ | {"PYTHONPATH": str(tree)}
        return subprocess.run(tool, cwd=tree, env=env).returncode
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def main(argv: list[str] | None = None) -> int:
    """1 where a case differs, 2 where it has no baseline."""
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument(
        "command", choices=("record", "compare"), help="record baselines, or compare with them"
    )
    p.add_argument("cases", nargs="*", help=f"cases; default: {' '.join(CASES)}")
    p.add_argument(
        "--dir", type=Path, default=ROOT / "build" / "baselines", help="folder of the runs"
    )
    p.add_argument("--into", type=Path, default=BASELINES, help="folder of the baselines")
    p.add_argument("--commit", metavar="REV", help="with record: commit whose code is run")
    a = p.parse_args(argv)
    unknown = [name for name in a.cases if name not in CASES]
    if unknown:
        p.error(f"{', '.join(unknown)}: unknown case; choose from {', '.join(CASES)}")
    names, folder, into = a.cases or list(CASES), a.dir.resolve(), a.into.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if a.command == "compare":
        return compare(names, folder, into)
    if a.commit:
        return record_at(a.commit, a.cases, folder, into)
    return record(names, folder, into)


if __name__ == "__main__":
    sys.exit(main())

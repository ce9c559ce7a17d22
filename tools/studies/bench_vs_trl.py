"""rlcore against TRL's GRPOTrainer: same tiny model, task, reward, prompts and sizes, one after the
other on one machine.

    python tools/studies/bench_vs_trl.py --json results.json     # about 3 minutes after set-up

TRL gets a virtual environment of its own, `.venvs/trl`, made on the first call (a few minutes and
about 1.5 GB). Prints the median step time over steps 3 to the last, the parts of a step, and
held-out accuracy after equal steps; rlcore runs twice, training all rows as TRL does (`keep`) and
without groups of equal rewards (`drop`). Wants an otherwise idle machine and warns if it is not.

What is the same: start weights, fp32, train prompts in the same order, held-out prompts, reward,
prompts x samples, updates per step, temperature, response limit, Adam, clipping, the loss (clip
0.2/0.28, token mean of the update, group std, no KL), constant rate after a linear warm-up, cores.
What differs: TRL pads to the longest row, runs one process on all cores, computes old log-probs of
every row; rlcore packs, leaves out those of the first update, truncates the importance weight at 2,
and runs `--processes` processes.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.metrics.sinks import read_metrics  # noqa: E402
from rlcore.utils import env  # noqa: E402

REQUIREMENTS = (
    "torch==2.13.0",
    "trl==1.16.0",
    "datasets==5.2.0",
    "accelerate==1.15.0",
    "transformers==5.23.0",
)
PEER = ROOT / "tools" / "studies" / "peers" / "trl_grpo.py"
"""TRL's settings; a result names the file's hash."""
WARMUP_UPDATES = 10
FIRST_STEP = 3
HELD_OUT = 1024


def main() -> int:
    """0 when both sides ran; 1 with a sentence when one did not."""
    a = parse()
    if a.prompts * a.group % a.updates or a.steps < FIRST_STEP:
        print(
            f"--updates must divide prompts x group, --steps is {FIRST_STEP} or more",
            file=sys.stderr,
        )
        return 2
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"warning: the load is {load:.1f}; other work on this machine spoils the times")
    folder = Path(a.dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        python = trl_python(a.timeout)
        model = start_model(a, folder)
        files = write_prompts(a, folder)
        print("TRL ...", flush=True)
        peer = run_trl(a, python, model, files, folder)
        ours = {}
        for groups in ("keep", "drop"):
            print(f"rlcore, equal-reward groups {groups} ...", flush=True)
            ours[groups] = run_rlcore(a, model, files, folder, groups)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    rows = compare(peer, ours)
    print("\n".join(table(rows)))
    if a.json:
        result = {
            "what": "rlcore against TRL's GRPOTrainer, tiny task",
            "command": " ".join(["tools/studies/bench_vs_trl.py", *sys.argv[1:]]),
            "settings": {k: v for k, v in vars(a).items() if k not in ("json", "dir")},
            "load_before": load,
            "machine": env.report(),
            "peer_file": PEER.relative_to(ROOT).as_posix(),
            "peer_sha256": hashlib.sha256(PEER.read_bytes()).hexdigest(),
            "peer": peer,
            "rows": rows,
        }
        write_atomic(Path(a.json), json.dumps(result, indent=1) + "\n")
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", default="", help="write the rows and the settings to this file")
    p.add_argument("--model", default="", help="start model; default: made by rlcore tiny")
    p.add_argument("--dir", default=str(ROOT / "build" / "bench_vs_trl"), help="working folder")
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--prompts", type=int, default=32, help="prompts per step")
    p.add_argument("--group", type=int, default=8, help="samples per prompt")
    p.add_argument("--updates", type=int, default=2, help="optimizer steps per rollout")
    p.add_argument("--max-tokens", type=int, default=144)
    p.add_argument("--lr", type=float, default=2e-4)
    p.add_argument("--threads", type=int, default=2, help="CPU threads of each side, in all")
    p.add_argument("--processes", type=int, default=2, help="of rlcore; they share the threads")
    p.add_argument("--trl-micro", type=int, default=0, help="rows of TRL's forward; 0: an update's")
    p.add_argument("--timeout", type=float, default=1800.0, help="seconds that one run may take")
    return p.parse_args(argv)


def trl_python(timeout_s: float) -> Path:
    """The Python of TRL's virtual environment."""
    return peer_python("trl", REQUIREMENTS, (), timeout_s)


def peer_python(
    name: str, requirements: Sequence[str], bare: Sequence[str], timeout_s: float
) -> Path:
    """The Python of a virtual environment for peers, made if it is not there or holds other
    versions. The first of `requirements` is torch; `bare` come without their dependencies."""
    folder = ROOT / ".venvs" / name
    stamp, python = folder / "requirements.stamp", folder / "bin" / "python"
    wanted = " ".join([*requirements, *bare])
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"installing {wanted} into {folder.relative_to(ROOT)}: a few minutes ...", flush=True)
    if not python.exists():
        call([sys.executable, "-m", "venv", str(folder)], timeout_s)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    index = os.environ.get("RLCORE_TORCH_INDEX")  # as in tools/setup.sh
    call([*pip, *(["--index-url", index] if index else []), requirements[0]], timeout_s)
    call([*pip, *requirements], timeout_s)
    if bare:
        call([*pip, "--no-deps", *bare], timeout_s)
    stamp.write_text(wanted)
    return python


def start_model(a: argparse.Namespace, folder: Path) -> Path:
    """A Hugging Face folder: the one named, or the warm start of this seed."""
    if a.model:
        return Path(a.model).resolve()
    model = folder / f"label-s{a.seed}"
    if not (model / "model.safetensors").is_file():
        print(f"warm start of seed {a.seed} ...", flush=True)
        tiny = [sys.executable, "-m", "rlcore", "tiny", "--out", str(model), "--seed", str(a.seed)]
        call(tiny, a.timeout, threads=a.threads)
    return model


def write_prompts(a: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """The prompts of all steps in order, and the held-out ones, as JSON lines."""
    from rlcore.data import label_task

    files = {}
    for split, count in (("train", a.steps * a.prompts), ("val", HELD_OUT)):
        rows = [label_task.make(split, a.seed, i) for i in range(count)]
        lines = [json.dumps({"question": r.prompt, "answer": r.answer}) for r in rows]
        files[split] = folder / f"{split}.jsonl"
        write_atomic(files[split], "\n".join(lines) + "\n")
    return files


def run_trl(
    a: argparse.Namespace, python: Path, model: Path, files: dict[str, Path], folder: Path
) -> dict[str, Any]:
    """The peer's report."""
    settings = {
        "model": str(model),
        "train_file": str(files["train"]),
        "val_file": str(files["val"]),
        "out": str(folder / "trl"),
        "seed": a.seed,
        "steps": a.steps,
        "first_step": FIRST_STEP,
        "prompts": a.prompts,
        "group": a.group,
        "updates": a.updates,
        "micro": a.trl_micro,
        "max_tokens": a.max_tokens,
        "lr": a.lr,
        "warmup_updates": WARMUP_UPDATES,
        "threads": a.threads,
    }
    command = [str(python), str(PEER)]
    out = call(command, a.timeout, threads=a.threads, stdin=json.dumps(settings))
    return json.loads(out.strip().splitlines()[-1])


def overrides(
    a: argparse.Namespace, model: Path, files: dict[str, Path], folder: Path, groups: str
) -> list[str]:
    """What the run changes in the tiny recipe, as words of the command line."""
    keys = {
        "run.name": f"rlcore-{groups}",
        "run.dir": folder,
        "run.seed": a.seed,
        "run.steps": a.steps,
        "model.path": model,
        "data.train": files["train"],
        "data.val": files["val"],
        "data.template": "none",
        "data.prompts_per_step": a.prompts,
        "rollout.samples_per_prompt": a.group,
        "rollout.max_tokens": a.max_tokens,
        "rollout.threads": max(1, a.threads // a.processes),
        "algo.equal_reward_groups": groups,
        "train.samples_per_update": a.prompts * a.group // a.updates,
        "train.lr": a.lr,
        "train.lr_schedule": "constant",
        "train.lr_warmup_updates": WARMUP_UPDATES,
        "eval.every": 0,
        "log.rollouts": 0,
    }
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    return [*words, "--data.no_shuffle", "--checkpoint.no_at_end", "--checkpoint.no_export_hf"]


def run_rlcore(
    a: argparse.Namespace, model: Path, files: dict[str, Path], folder: Path, groups: str
) -> dict[str, Any]:
    """The tiny recipe at the same sizes; the same report from its metrics.jsonl."""
    run = folder / f"rlcore-{groups}"
    shutil.rmtree(run, ignore_errors=True)
    recipe = ["bash", str(ROOT / "recipes" / "grpo_tiny.sh")]
    more = {"GPUS_PER_NODE": str(a.processes), "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    threads = max(1, a.threads // a.processes)
    call([*recipe, *overrides(a, model, files, folder, groups)], a.timeout, threads, more=more)
    rows = [row for row in read_metrics(run) if "timing_s/step" in row]
    if len(rows) != a.steps:
        raise RuntimeError(f"{run}: {len(rows)} steps in metrics.jsonl, expected {a.steps}")
    measured = rows[FIRST_STEP - 1 :]
    summary = json.loads((run / "summary.json").read_text())
    return {
        "step_s": [row["timing_s/step"] for row in rows],
        "median_step_s": statistics.median(row["timing_s/step"] for row in measured),
        "median_gen_s": statistics.median(row["timing_s/gen"] for row in measured),
        "accuracy_start": summary["val/accuracy_start"],
        "accuracy_end": summary["val/accuracy_end"],
        "rewards": [row["critic/score/mean"] for row in rows],
        "lr": [row["actor/lr"] for row in rows],
        "completion_length": [row["response_length/mean"] for row in rows],
        "trained_rows": [row.get("training/trained_rows") for row in rows],
    }


def compare(peer: dict[str, Any], ours: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of name, value, unit, baseline (TRL), ratio: above 1 where rlcore is faster."""
    rows = []
    for groups, found in ours.items():
        for name in ("median_step_s", "median_gen_s"):
            rows.append(row(f"{name}/{groups}", found[name], "s", peer[name], faster=True))
        if peer["median_gen_s"] is not None:
            rest, base = (x["median_step_s"] - x["median_gen_s"] for x in (found, peer))
            rows.append(row(f"rest_of_step_s/{groups}", rest, "s", base, faster=True))
        for name in ("accuracy_start", "accuracy_end"):
            rows.append(row(f"{name}/{groups}", found[name], "", peer[name]))
        mean = statistics.fmean(found["rewards"])
        rows.append(row(f"reward_mean/{groups}", mean, "", statistics.fmean(peer["rewards"])))
        length = statistics.fmean(found["completion_length"])
        base = statistics.fmean(peer["completion_length"])
        rows.append(row(f"completion_length/{groups}", length, "tokens", base))
    return rows


def row(
    name: str, value: float, unit: str, baseline: float | None, faster: bool = False
) -> dict[str, Any]:
    """One comparison; without `faster` there is no ratio, the two shall be equal."""
    ratio = baseline / value if faster and baseline is not None and value > 0 else None
    return {"name": name, "value": value, "unit": unit, "baseline": baseline, "ratio": ratio}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as text; the standard error of an accuracy is at most 0.016."""
    lines = ["", f"{'':<26}{'rlcore':>10}{'TRL':>10}{'faster by':>12}", "-" * 58]
    for r in rows:
        baseline = "" if r["baseline"] is None else f"{r['baseline']:.3f}"
        ratio = "" if r["ratio"] is None else f"{r['ratio']:.2f}x"
        lines.append(f"{r['name']:<26}{r['value']:>10.3f}{baseline:>10}{ratio:>12}  {r['unit']}")
    return lines


def call(
    command: list[str],
    timeout_s: float,
    threads: int = 0,
    stdin: str = "",
    more: dict[str, str] | None = None,
) -> str:
    """Run a command and return its output. RuntimeError with the end of its messages when it fails
    or takes longer; it and what it started are ended then."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **(more or {})}
    if threads:
        variables["OMP_NUM_THREADS"] = str(threads)
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(stdin, timeout=timeout_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise RuntimeError(
                f"{' '.join(command[:4])}: not done after {timeout_s:g} s"
            ) from error
        raise
    if process.returncode:
        said = (errors or out)[-3000:]
        raise RuntimeError(f"{' '.join(command[:4])}: exit code {process.returncode}\n{said}")
    return out


if __name__ == "__main__":
    sys.exit(main())

"""The TIS paper's experiment on the tiny task: a quantised sampler, with and without correction.

    python tools/studies/exp_tis.py --seeds 0 1 2 --jobs 2 --json tools/results/exp_tis.json
    python tools/studies/exp_tis.py --arms int8-none int8-tis2 fp8-none --seeds 0 --json FILE
    python tools/studies/exp_tis.py --formats runs/models/label-s0

An arm is FORMAT-CORRECTION, one run of `recipes/exp_tis_int8.sh` for each seed, in one process;
`--jobs` run at a time. A run that is finished is read, not repeated; one that was interrupted
starts again. Writes the figures (JSON), one table (.md) and one picture (.png); runs stay in
`--dir`, what they print beside their folders.

    FORMAT      of --rollout.quantize. The arms use three bits because eight leave hardly a gap in
                so small a model; `--formats FOLDER` measures the gap of each on a model
    none        no correction: the ratio and its clip are p / p_old, samples are taken as p_old's
    tis2, tis8  the loss of a token times min(p_old / p_sampler, C)
    is          the same with C = inf, vanilla importance sampling
    ppo_is      ratio and clip are p / p_sampler (PPO-IS)

A run evaluates what its engine samples, so its accuracy is that of the quantised weights. The tool
evaluates the weights at the start and at the end once more in full precision, on the same prompts.
Paper: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".
"""

import argparse
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

TOKEN_IS = ["--algo.rollout_is", "token", "--algo.rollout_is_threshold"]
CORRECTIONS = {
    "none": ["--algo.rollout_is", "none"],
    "tis2": [*TOKEN_IS, "2"],
    "tis8": [*TOKEN_IS, "8"],
    "is": [*TOKEN_IS, "inf"],
    "ppo_is": ["--algo.rollout_is", "none", "--algo.bypass_mode"],
}
LABELS = {"none": "not corrected", "tis2": "TIS, C = 2", "tis8": "TIS, C = 8",
          "is": "vanilla IS", "ppo_is": "PPO-IS"}  # fmt: skip
ARMS = ("none-none", "none-tis2", "int3-none", "int3-tis2", "int3-tis8", "int3-ppo_is", "int3-is",
        "fp3-none", "fp3-tis2")  # fmt: skip
COLOURS = ("#000000", "#8c8c8c", "#d55e00", "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#cc79a7",
           "#6a3d9a", "#8c510a")  # fmt: skip

ACCURACY = "val-core/label/acc/mean@1"
REWARD = "critic/score/mean"
REWARD_IS = "rollout_corr/score_is"
ENTROPY = "actor/entropy"
LENGTH = "response_length/mean"
K1 = "rollout_corr/kl"
GAP = "rollout_corr/response_max_diff_max"
SERIES = (REWARD, REWARD_IS, ENTROPY, LENGTH, K1, GAP)
NUM_PROMPTS, PER_PROMPT = 32, 8  # of a measured format
LAST = 20  # steps at the end of a run that its final figures are means over


def main() -> int:
    """Exit code 1 where a run failed."""
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="after --: further keys for every run"
    )
    p.add_argument("--arms", nargs="+", default=list(ARMS), help="FORMAT-CORRECTION")
    p.add_argument("--seeds", "--seed", type=int, nargs="+", default=[0, 1, 2])
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--jobs", type=int, default=1, help="runs at a time, one process each")
    p.add_argument("--dir", type=Path, default=ROOT / "runs")
    p.add_argument("--json", type=Path, help="where the figures go; table and picture beside it")
    p.add_argument("--formats", type=Path, help="only measure what each format does to this model")
    p.add_argument("rest", nargs="*")
    a = p.parse_args()
    if a.formats:
        report_formats(a.formats, a.json)
        return 0
    if a.json is None:
        p.error("--json FILE is needed: the figures go there")
    try:
        runs = plan(a.arms, a.seeds, a.steps, a.dir, a.rest)
        failed = run_all([run for run in runs if not finished(run)], a.jobs)
        done = [read(run) for run in runs if run.name not in failed]
    except ValueError as error:
        p.error(str(error))
    if done:
        write(done, a.json)
    return int(bool(failed))


# ---- runs


@dataclass(frozen=True)
class Planned:
    """One arm with one seed."""

    arm: str
    seed: int
    folder: Path
    keys: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.folder.name

    def beside(self, ending: str) -> Path:
        """A file beside the folder, which a run that starts again moves aside."""
        return self.folder.with_name(f"{self.name}.{ending}")

    @property
    def command(self) -> list[str]:
        recipe = str(ROOT / "recipes/exp_tis_int8.sh")
        place = ["--run.dir", str(self.folder.parent), "--run.name", self.name]
        return ["bash", recipe, *place, *self.keys]


def plan(
    arms: Sequence[str], seeds: Sequence[int], steps: int, folder: Path, rest: Sequence[str] = ()
) -> list[Planned]:
    """All runs, the seeds one after the other. ValueError for an arm that there is not."""
    from rlcore.hf.quantize import FORMATS

    if len(set(arms)) > len(COLOURS):
        raise ValueError(f"--arms: {len(arms)} arms; a picture holds {len(COLOURS)}, give fewer")
    keys = {}
    for arm in arms:
        form, _, correction = arm.rpartition("-")
        if form not in FORMATS or correction not in CORRECTIONS:
            raise ValueError(
                f"--arms {arm}: FORMAT-CORRECTION with a format of {', '.join(FORMATS)} and a "
                f"correction of {', '.join(CORRECTIONS)}"
            )
        keys[arm] = ["--rollout.quantize", form, *CORRECTIONS[correction]]
    runs = []
    for seed in seeds:
        for arm in keys:
            own = ["--run.seed", str(seed), "--run.steps", str(steps), *keys[arm], *rest]
            place = folder.absolute() / f"tis_{arm}_{seed}_{steps}"
            runs.append(Planned(arm, seed, place, tuple(own)))
    return runs


def finished(run: Planned) -> bool:
    """Is it there to be read? ValueError where other keys made it."""
    if not (run.folder / "summary.json").is_file():
        return False
    made = json.loads(run.beside("keys.json").read_text())
    if made != list(run.keys):
        raise ValueError(f"{run.folder}: was made with {' '.join(made)}; give another --dir")
    return True


def run_all(todo: Sequence[Planned], jobs: int) -> set[str]:
    """Start runs, `jobs` at a time, and wait for them; the names of those that failed."""
    waiting, active, failed = list(todo), {}, set()
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                run = waiting.pop(0)
                active[start(run)] = (run, time.monotonic())
            time.sleep(0.2)
            for process in [p for p in active if p.poll() is not None]:
                run, began = active.pop(process)
                took = time.monotonic() - began
                if process.returncode or not (run.folder / "summary.json").is_file():
                    failed.add(run.name)
                    said = run.beside("screen.txt")
                    print(f"{run.name}: ended with code {process.returncode}, see {said}")
                    continue
                print(f"{run.name}: {took:.0f} s, {len(waiting) + len(active)} to go", flush=True)
    finally:  # where this ends early, so do the runs that it started
        for process in active:
            process.terminate()
        for process in active:
            process.wait()
    return failed


def start(run: Planned) -> subprocess.Popen:
    """A run in a process of its own; what it prints goes to a file."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    run.beside("keys.json").write_text(json.dumps(run.keys) + "\n")
    print(" ".join(run.command), flush=True)
    with open(run.beside("screen.txt"), "w") as screen:
        return subprocess.Popen(
            run.command,
            stdout=screen,
            stderr=subprocess.STDOUT,
            env=os.environ | {"GPUS_PER_NODE": "1"},
        )


# ---- figures of a run


@dataclass(frozen=True)
class Done:
    """What the table and the picture need of a run."""

    arm: str
    seed: int
    accuracy: list[tuple[int, float]]
    """Held-out, of the sampler: step and share."""
    full: tuple[float, float]
    """Held-out, in full precision: at the start and at the end."""
    steps: np.ndarray
    series: dict[str, np.ndarray]
    """By metric, one number per step; NaN where the run has none."""

    def figures(self) -> dict[str, float]:
        """The columns of the table."""
        last = {name: nan_mean(values[-LAST:]) for name, values in self.series.items()}
        gap = self.series[GAP]
        return {
            "start": self.accuracy[0][1],
            "end": self.accuracy[-1][1],
            "full_start": self.full[0],
            "full_end": self.full[1],
            "reward": last[REWARD],
            "reward_is": last[REWARD_IS],
            "entropy": last[ENTROPY],
            "length": last[LENGTH],
            "k1": last[K1],
            "gap": last[GAP],
            "gap_max": float(np.nanmax(gap)) if np.isfinite(gap).any() else math.nan,
        }


def read(run: Planned, evaluate: Callable[[Path], float] | None = None) -> Done:
    """The figures of a finished run. `evaluate` gives the accuracy of a model folder."""
    from rlcore.metrics.sinks import read_metrics

    rows = read_metrics(run.folder)
    accuracy = [(int(r["step"]), r[ACCURACY]) for r in rows if ACCURACY in r]
    steps = [r for r in rows if REWARD in r]
    if not accuracy or not steps:
        raise ValueError(f"{run.folder}/metrics.jsonl: has no steps with {REWARD} and {ACCURACY}")
    start = Path(json.loads((run.folder / "config.json").read_text())["model"]["path"])
    evaluate = evaluate or full_precision
    return Done(
        arm=run.arm,
        seed=run.seed,
        accuracy=accuracy,
        full=(evaluate(start), evaluate(run.folder / "hf")),
        steps=np.array([r["step"] for r in steps]),
        series={n: np.array([r.get(n, math.nan) for r in steps], float) for n in SERIES},
    )


@functools.cache
def full_precision(folder: Path) -> float:
    """Held-out accuracy of a model folder without quantisation, sampled at temperature 1."""
    from rlcore.config.schema import DataConfig
    from rlcore.data import prompts
    from rlcore.hf.tokenizer import load_tokenizer

    if not (folder / "model.safetensors").is_file():
        raise ValueError(f"{folder}: holds no model; run with --checkpoint.export_hf")
    tokenizer = load_tokenizer(folder)
    ((_, held_out),) = prompts.load(DataConfig(val=("label",)), "val", tokenizer, 0)
    found = samples(folder, "none", held_out.rows, 1)
    right = [correct(tokenizer.decode(sample.tokens), row.answer) for row, sample in found]
    return sum(right) / len(right)


def correct(response: str, answer: str) -> bool:
    """As `--reward exact --reward.answer_marker ">"` scores."""
    return response.partition(">")[2].strip() == answer


def samples(folder: Path, form: str, rows: Sequence[Any], per_prompt: int) -> list[tuple[Any, Any]]:
    """Prompts with samples of an engine that holds the model of a folder in this format."""
    from rlcore.hf.config import HFConfig
    from rlcore.hf.weights import read_folder
    from rlcore.records import Finished, Request, Sampling
    from rlcore.rollout.torch_engine.engine import TorchEngine
    from rlcore.sync.pack import load_weights

    hf = HFConfig.from_folder(folder)
    engine = TorchEngine(hf, max_model_tokens=min(512, hf.max_positions), quantize=form)
    load_weights(engine, read_folder(folder, hf), 0)
    sampling = Sampling(max_tokens=144, stop_ids=hf.eos_ids)
    requests = [
        Request(id=f"{i}.{k}", prompt=row.tokens, sampling=sampling)
        for i, row in enumerate(rows)
        for k in range(per_prompt)
    ]
    engine.submit(requests)
    found = {}
    while len(found) < len(requests):
        found |= {e.id: e.sample for e in engine.poll(1.0) if isinstance(e, Finished)}
    engine.close()
    return [(rows[int(r.id.split(".")[0])], found[r.id]) for r in requests]


# ---- table


def over_seeds(done: Sequence[Done]) -> dict[str, dict[str, dict[str, float]]]:
    """By arm and column: mean, standard error over seeds (NaN of one), how many."""
    out: dict[str, dict[str, dict[str, float]]] = {}
    for arm in dict.fromkeys(d.arm for d in done):
        rows = [d.figures() for d in done if d.arm == arm]
        out[arm] = {}
        for column in rows[0]:
            values = [row[column] for row in rows if math.isfinite(row[column])]
            error = math.nan
            if len(values) > 1:
                error = statistics.stdev(values) / math.sqrt(len(values))
            out[arm][column] = {
                "mean": statistics.mean(values) if values else math.nan,
                "std_err": error,
                "num_seeds": len(values),
            }
    return out


COLUMNS = {
    "start": ("start, sampler", ".3f"),
    "end": ("end, sampler", ".3f"),
    "full_start": ("start, full precision", ".3f"),
    "full_end": ("end, full precision", ".3f"),
    "reward": ("logged reward", ".3f"),
    "reward_is": ("its IS estimate", ".3f"),
    "entropy": ("entropy", ".3f"),
    "length": ("length", ".1f"),
    "k1": ("k1", "+.4f"),
    "gap": ("max mismatch", ".2f"),
    "gap_max": ("of the run", ".2f"),
}


def table(arms: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Markdown; errors are standard errors over seeds."""
    lines = ["| arm | " + " | ".join(head for head, _ in COLUMNS.values()) + " |"]
    lines.append("| --- |" + " --- |" * len(COLUMNS))
    for arm, columns in arms.items():
        cells = [cell(columns[name], form) for name, (_, form) in COLUMNS.items()]
        lines.append(f"| {label(arm)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def cell(value: Mapping[str, float], form: str) -> str:
    """`0.812 +- 0.010`, without an error where there is one seed, `-` where there is no number."""
    if not math.isfinite(value["mean"]):
        return "-"
    text = format(value["mean"], form)
    if math.isfinite(value["std_err"]):
        text += " +- " + format(value["std_err"], form.lstrip("+"))
    return text


def label(arm: str) -> str:
    form, _, correction = arm.rpartition("-")
    return f"{'full precision' if form == 'none' else form}, {LABELS[correction]}"


def _named(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row in the form that all benches have, with its own figures behind."""
    start, end = row["full_start"], row["full_end"]
    ratio = end / start if start else None
    return {
        "name": f"{row['arm']} seed {row['seed']}",
        "value": end,
        "unit": "held-out accuracy of the trained weights in full precision",
        "baseline": start,
        "ratio": ratio,
    } | dict(row)


def write(done: Sequence[Done], path: Path) -> None:
    """JSON, table and picture; prints the table."""
    arms = over_seeds(done)
    rows = [{"arm": d.arm, "seed": d.seed, "steps": int(d.steps[-1])} | d.figures() for d in done]
    seeds = sorted({d.seed for d in done})
    note = (
        f"\nSeeds {', '.join(map(str, seeds))}; +- is one standard error over them. Accuracy on "
        "1,024 held-out prompts, sampled at T = 1. The columns from logged reward to max mismatch "
        f"are means over the last {LAST} steps; max mismatch is the largest "
        "|p_sampler - p_learner| of a step, `of the run` the largest of all.\n"
    )
    text = table(arms) + note
    for column in COLUMNS:
        lacking = [arm for arm in arms if not arms[arm][column]["num_seeds"]]
        if lacking:
            text += f"\n`{COLUMNS[column][0]}`: not logged by {', '.join(lacking)}.\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"arms": arms, "rows": [_named(row) for row in rows]}
    path.write_text(json.dumps(json.loads(json.dumps(found), parse_constant=none), indent=1) + "\n")
    path.with_suffix(".md").write_text(text)
    print("\n" + text)
    draw(done, path.with_suffix(".png"))


def none(_: str) -> None:
    """NaN and infinities are null in JSON."""
    return None


# ---- picture


def draw(done: Sequence[Done], path: Path) -> None:
    """Six panels over steps, a colour per arm: the mean over seeds, and lightly each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    arms = list(dict.fromkeys(d.arm for d in done))
    figure, grid = plt.subplots(2, 3, figsize=(17, 10), dpi=75)
    width = max(1, max(len(d.steps) for d in done) // 20)
    for arm, colour in zip(arms, COLOURS, strict=False):
        runs = [d for d in done if d.arm == arm]
        curves(grid[0][0], [tuple(np.array(d.accuracy).T) for d in runs], colour)
        ends = [d.full[1] for d in runs]
        error = statistics.stdev(ends) / math.sqrt(len(ends)) if len(ends) > 1 else 0.0
        last = max(int(d.steps[-1]) for d in runs)
        at = last * (1.03 + 0.014 * arms.index(arm))
        grid[0][0].errorbar(at, statistics.mean(ends), error, color=colour, fmt="D", ms=5, lw=1.2)
        for axes, name, style in (
            (grid[0][1], REWARD, "-"),
            (grid[0][1], REWARD_IS, "--"),
            (grid[0][2], ENTROPY, "-"),
            (grid[1][0], LENGTH, "-"),
            (grid[1][1], K1, "-"),
            (grid[1][2], GAP, "-"),
        ):
            lines = [(d.steps, smooth(d.series[name], width)) for d in runs]
            curves(axes, lines, colour, style)
    titles = (
        "Held-out accuracy of the sampler; diamonds: full precision, end",
        "Logged reward (solid), its importance-weighted estimate (dashed)",
        "Entropy of the learner, nats",
        "Response length, tokens",
        "k1 = mean of log p_sampler - log p_learner",
        "Largest |p_sampler - p_learner| of a step",
    )
    for axes, title in zip(grid.flat, titles, strict=True):
        axes.set_title(title, fontsize=10.5)
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
    grid[1][1].set_yscale("symlog", linthresh=1e-3)
    grid[1][1].axhline(0, color="black", lw=0.8, ls=":")
    grid[1][2].set_ylim(0, 1.02)
    figure.legend(
        [Line2D([], [], color=c, lw=2.5) for c in COLOURS[: len(arms)]],
        [label(arm) for arm in arms],
        loc="lower center",
        ncols=min(5, len(arms)),
        frameon=False,
    )
    seeds = ", ".join(str(s) for s in sorted({d.seed for d in done}))
    figure.suptitle(
        f"Tiny task, quantised sampler: mean over seeds {seeds} and each seed (light); "
        f"curves of training steps are running means of {width}"
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path)
    plt.close(figure)
    print(path)


def curves(
    axes: Any, lines: Sequence[tuple[np.ndarray, np.ndarray]], colour: str, style: str = "-"
) -> None:
    """The mean of the lines at the steps that all have; lightly each line, if it is a solid one."""
    shown = [(x, y) for x, y in lines if np.isfinite(y).any()]
    if len(shown) > 1 and style == "-":
        for x, y in shown:
            axes.plot(x, y, color=colour, lw=0.7, alpha=0.3)
    if shown:
        common = functools.reduce(np.intersect1d, [x for x, _ in shown])
        values = [y[np.isin(x, common)] for x, y in shown]
        axes.plot(common, np.mean(values, 0), color=colour, lw=1.8, ls=style)


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of the last `width` values at each place, of those that are numbers."""
    starts = np.maximum(np.arange(len(values)) - width + 1, 0)
    return np.array([nan_mean(values[a : b + 1]) for b, a in enumerate(starts)])


def nan_mean(values: np.ndarray) -> float:
    """Mean of the numbers among the values; NaN where there is none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


# ---- formats


def report_formats(folder: Path, path: Path | None = None) -> None:
    """For each format: the gap that it makes between this model and its quantised self. Responses
    are sampled with quantised weights, their tokens rated by transformers with those of the folder.
    """
    rows = [{"format": name} | gap_of(folder, name) for name in formats()]
    columns = list(rows[0])
    print(f"\n{folder}, {NUM_PROMPTS * PER_PROMPT} responses:\n")
    print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    for row in rows:
        cells = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()]
        print("| " + " | ".join(cells) + " |")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"model": str(folder), "rows": rows}, indent=1) + "\n")


def formats() -> Iterator[str]:
    from rlcore.hf.quantize import FORMATS

    yield from FORMATS


def gap_of(
    folder: Path, form: str, num_prompts: int = NUM_PROMPTS, per_prompt: int = PER_PROMPT
) -> dict[str, float]:
    """Mismatch of one format: over tokens the largest and the mean |p_sampler - p|, k1, the largest
    weight w = p / p_sampler and the share of w > 2; the share of responses with a token above .5;
    accuracy of the quantised model."""
    from rlcore.data import label_task
    from rlcore.hf.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder)
    rows = [
        label_task.to_prompt(label_task.make("probe", 1, i), i, tokenizer.encode)
        for i in range(num_prompts)
    ]
    found = samples(folder, form, rows, per_prompt)
    sampler = [sample.logps.astype(np.float64) for _, sample in found]
    learner = rate(folder, [sample for _, sample in found])
    gaps = [np.abs(np.exp(mu) - np.exp(p)) for mu, p in zip(sampler, learner, strict=True)]
    log_w = np.concatenate(learner) - np.concatenate(sampler)
    right = [correct(tokenizer.decode(sample.tokens), row.answer) for row, sample in found]
    return {
        "max": float(max(g.max() for g in gaps)),
        "mean": float(np.concatenate(gaps).mean()),
        "k1": float(-log_w.mean()),
        "max over .5": sum(g.max() > 0.5 for g in gaps) / len(gaps),
        "largest w": float(np.exp(log_w.max())),
        "w over 2": float((log_w > math.log(2)).mean()),
        "accuracy": sum(right) / len(right),
    }


def rate(folder: Path, rated: Sequence[Any]) -> list[np.ndarray]:
    """Log-probs of samples under the folder's weights, by transformers: one forward each."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = []
    for sample in rated:
        ids = torch.from_numpy(np.concatenate((sample.prompt, sample.tokens))).long()
        with torch.inference_mode():
            logits = model(ids[None]).logits[0, len(sample.prompt) - 1 : -1].double()
        chosen = logits.log_softmax(-1).gather(-1, ids[len(sample.prompt) :, None])
        out.append(chosen[:, 0].numpy())
    return out


if __name__ == "__main__":
    sys.exit(main())

"""Measure what env-level asynchrony and redundant episodes save with slow environments.

    OMP_NUM_THREADS=1 .venv/bin/python tools/bench_env.py --json FILE        # about 12 minutes

One rank samples rounds with `--env latency`, for real: controller, agent, torch engine (0.1 M
random weights, a token a turn), episodes as asyncio tasks, environments in processes. Only the time
of the environments is scaled down, by --scale.

    async       256 episodes of 23 turns, steps of N(10, 10) s: every episode by itself against
                --debug.env_barrier, where a turn waits for the slowest. ROLL Flash has 892 s and
                362 s; 23 turns are those with which these two fit each other and this law.
    redundancy  episodes of 3 turns, N(10, 5) s, 32 x 8 of them wanted: started are 32 x 8, 36 x 9,
                36 x 12, ... (--env.num_groups x --env.group_size). ROLL Flash has 243 s and 45 s
                at 36 x 9. A normal law alone cannot: the longest of 256 is not five times the
                others. So a share of the steps is 20 times as long (fail-slow), and that share is
                swept.

Rows: name, value (seconds of a round, unscaled), unit, baseline (the barrier, or 32 x 8), ratio
(baseline / value), ideal and ideal_ratio (the same from the drawn latencies alone, as if nothing
else took time), published where there is such a figure.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlcore.data import label_task  # noqa: E402
from rlcore.envs.dialogue import Dialogue  # noqa: E402
from rlcore.envs.engine import EpisodeEngine  # noqa: E402
from rlcore.envs.latency import KIND, Latency, LatencyConfig  # noqa: E402
from rlcore.envs.scorer import EnvScorer  # noqa: E402
from rlcore.hf.config import HFConfig  # noqa: E402
from rlcore.hf.names import expected  # noqa: E402
from rlcore.hf.tokenizer import load_tokenizer  # noqa: E402
from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.records import Prompt, Sampling  # noqa: E402
from rlcore.rollout.controller import Controller  # noqa: E402
from rlcore.rollout.round import Rollout  # noqa: E402
from rlcore.rollout.torch_engine.engine import TorchEngine  # noqa: E402
from rlcore.rollout.transport import LocalHub  # noqa: E402
from rlcore.rollout.worker import RolloutWorker  # noqa: E402
from rlcore.sched.prompt_source import EpochPrompts  # noqa: E402
from rlcore.sched.router import LeastLoaded  # noqa: E402
from rlcore.sync.pack import load_weights  # noqa: E402
from rlcore.utils.seed import derive  # noqa: E402
from tests.runs import tiny_model  # noqa: E402

GROUPS, SIZE = 32, 8
STARTED = ((32, 8), (36, 8), (32, 9), (36, 9), (36, 12))
PUBLISHED = {"async": (362.0, 892.0), "36x9": (45.0, 243.0), "36x12": (46.0, 243.0)}
DEADLINE_S = 900.0
Law = LatencyConfig


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--scale", type=float, default=0.05, help="seconds here per second in the paper")
    p.add_argument(
        "--turns", type=int, default=23, help="turns per episode in the asynchronous part"
    )
    p.add_argument(
        "--slow",
        type=float,
        nargs="*",
        default=[0.0, 0.001, 0.002, 0.005, 0.01, 0.02],
        help="shares of slow steps",
    )
    p.add_argument(
        "--rounds", type=int, default=3, help="rounds per row, of which the median counts"
    )
    p.add_argument(
        "--groups", type=int, default=GROUPS, help="groups per round; fewer than 32 for a quick try"
    )
    p.add_argument("--workers", type=int, default=2, help="parallel workers")
    p.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    p.add_argument("--json", type=Path, metavar="FILE", help="JSON file for the results")
    p.add_argument("--plot", type=Path, metavar="FILE", help="PNG file")
    return p.parse_args(argv)


class Bench:
    """One rank, for one law of latencies."""

    def __init__(self, a: argparse.Namespace, model: Path, law: Law, *, barrier: bool = False):
        hf, tokenizer = HFConfig.from_folder(model), load_tokenizer(model)
        inner = TorchEngine(hf, max_model_tokens=128, max_running=256, seed=a.seed, device="cpu")
        import torch

        gen = torch.Generator().manual_seed(a.seed)
        load_weights(
            inner, ((n, torch.randn(s, generator=gen) * 0.1) for n, s in expected(hf).items()), 0
        )
        self.law = replace(
            law,
            mean_s=law.mean_s * a.scale,
            std_s=law.std_s * a.scale,
            max_turns=law.turns,
            max_running_episodes=1024,
            max_turn_tokens=1,
            timeout_s=DEADLINE_S / 2,
            workers=a.workers,
        )
        self.seed, self.scale = a.seed, a.scale
        self.engine = EpisodeEngine(
            inner,
            "latency",
            KIND,
            self.law,
            dialogue=Dialogue(tokenizer, is_chat=False),
            decode=tokenizer.decode,
            prompt_of=lambda group: agent.prompts[group],
            seed=a.seed,
            barrier=barrier,
        )
        scorer = EnvScorer(self.engine.outcomes, None)
        agent = RolloutWorker(LocalHub(), self.engine, scorer, tokenizer.decode, DEADLINE_S)
        self._worker = agent
        self._rollout = Rollout(agent._hub, agent, self._controller)
        self._rows = 0
        self._encode = tokenizer.encode

    def _controller(self, stop: Any, elastic: Any) -> Controller:
        return Controller(
            ranks=[0], place=LeastLoaded(sys.maxsize), stop=stop, deadline_s=DEADLINE_S
        )

    def round(self, wanted: tuple[int, int], started: tuple[int, int]) -> tuple[float, list[Any]]:
        """Seconds of a round, unscaled, and its work."""
        source = EpochPrompts(self._prompts, *wanted, num_started=started[0], group_size=started[1])
        source.issued = self._rows
        todo = source.next_round(Sampling(max_tokens=100))
        begin = time.monotonic()
        end = self._rollout.run(todo.work, todo.stop)
        seconds = time.monotonic() - begin
        assert len(end.groups) == wanted[0] and all(len(g.refs) == wanted[1] for g in end.groups)
        return seconds / self.scale, list(todo.work)

    def _prompts(self, count: int) -> list[Prompt]:
        found = []
        for _ in range(count):
            row = label_task.make("train", self.seed, self._rows)
            found.append(label_task.to_prompt(row, self._rows, self._encode))
            self._rows += 1
        return found

    def latencies(self, work: Sequence[Any]) -> np.ndarray:
        """[groups, episodes, turns] unscaled seconds that the environments of a round draw."""
        out = []
        for w in work:
            seed = derive(self.seed, "env", w.prompt.dataset, w.prompt.index)
            row = []
            for k in range(w.num_samples):
                env = Latency(self.law)
                env.reset(seed=seed, options={"episode": f"{w.id}.{k}"})
                row.append([env.next_s() for _ in range(self.law.turns)])
            out.append(row)
        return np.array(out) / self.scale


def ideal(times: np.ndarray, wanted: tuple[int, int], *, barrier: bool = False) -> float:
    """Seconds of a round in which only environments take time; `times` as from `latencies`."""
    if barrier:
        return float(times.max((0, 1)).sum())
    ends = np.sort(times.sum(-1), 1)[:, wanted[1] - 1]  # of each group its last that counts
    return float(np.sort(ends)[wanted[0] - 1])


def measure(
    a: argparse.Namespace,
    model: Path,
    law: Law,
    started: tuple[int, int],
    *,
    barrier: bool = False,
) -> tuple[float, float]:
    """Medians over the rounds: seconds, and ideal ones."""
    wanted = (a.groups, SIZE)
    bench = Bench(a, model, law, barrier=barrier)
    try:
        bench.round((1, 1), (1, 1))  # processes are up
        seconds, best = [], []
        for _ in range(a.rounds):
            took, work = bench.round(wanted, started)
            seconds.append(took)
            best.append(ideal(bench.latencies(work), wanted, barrier=barrier))
    finally:
        bench.engine.close()
    return median(seconds), median(best)


def row(
    name: str, found: tuple[float, float], base: tuple[float, float], published: str = ""
) -> dict[str, Any]:
    out = {
        "name": name,
        "value": found[0],
        "unit": "s",
        "baseline": base[0],
        "ratio": base[0] / found[0],
        "ideal": found[1],
        "ideal_ratio": base[1] / found[1],
    }
    if published in PUBLISHED:
        value, baseline = PUBLISHED[published]
        out |= {"published": value, "published_ratio": baseline / value}
    said = f", published {out['published_ratio']:.2f}" if published in PUBLISHED else ""
    print(
        f"{name}: {found[0]:.0f} s against {base[0]:.0f} s, ratio {out['ratio']:.2f} "
        f"(ideal {out['ideal_ratio']:.2f}{said})",
        flush=True,
    )
    return out


def main(argv: list[str] | None = None) -> None:
    a = parse(argv)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder) / "model")
        law = Law(turns=a.turns, mean_s=10, std_s=10)
        plain = (a.groups, SIZE)
        base = measure(a, model, law, plain, barrier=True)
        rows.append(row("async", measure(a, model, law, plain), base, "async"))
        for slow in a.slow:
            law = Law(turns=3, mean_s=10, std_s=5, fail_slow=slow, slow_factor=20)
            base = measure(a, model, law, plain)
            for groups, size in STARTED[1:]:
                name = f"{groups}x{size}"
                started = a.groups + groups - GROUPS, size
                rows.append(
                    row(f"{name} slow {slow:g}", measure(a, model, law, started), base, name)
                )
    if a.json:
        write_atomic(a.json, json.dumps(rows, indent=1) + "\n")
    if a.plot:
        draw(rows, a.plot)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Ratios over the share of slow steps, a line for what is started; ideal ones dashed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from rlcore.metrics.plots import COLORS

    figure = Figure(figsize=(10, 4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 3))
    first, rest = rows[0], rows[1:]
    for i, key in enumerate(("baseline", "value")):
        left.bar(i, first[key], color=COLORS[i])
    left.set(title=f"N(10, 10): {first['ratio']:.2f} times", ylabel="seconds of a round")
    left.set_xticks([0, 1], ["barrier", "each by itself"])
    for i, name in enumerate(dict.fromkeys(r["name"].split()[0] for r in rest)):
        mine = [r for r in rest if r["name"].split()[0] == name]
        shares = [100 * float(r["name"].split()[2]) for r in mine]
        for key, style in (("ratio", "-o"), ("ideal_ratio", "--")):
            right.plot(
                shares,
                [r[key] for r in mine],
                style,
                color=COLORS[i],
                markersize=4,
                linewidth=1.4,
                label=name if key == "ratio" else None,
            )
    right.axhline(5.4, color="0.6", linewidth=1)
    right.text(1.0, 5.5, "published, 36x9", ha="right", transform=right.get_yaxis_transform())
    right.set(
        title="N(10, 5), 3 turns: 32x8 against redundant episodes",
        xlabel="steps that last 20 times as long, %",
        ylabel="times faster (dashed: environments alone)",
    )
    right.legend()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


if __name__ == "__main__":
    main()

"""Measure updates and log-prob passes with and without shared prefixes, in one run on one device.

    python tools/bench_prefix.py --json tools/results/prefix.json

A shape is a batch of random tokens:

    P:R xN   groups of N samples with a prompt of their own; P:R are the mean lengths of prompts and
             responses, in units of --response tokens
    turns    episodes of 8 turns, from prompts with 4 of them each; a row is a turn with its whole
             history, and trains on the turn alone
    nothing  groups of 8 rows whose prompts differ from the first token

Updates with and without sharing alternate. `bound` is by FLOPs: of separate sequences, over those
with linear layers for each token of the prefix tree once, but attention and output layer as without
sharing. `of bound` is above 1 because attention and output layer compute shared tokens once, too.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
from bench_learner import SHAPES, Ours, config_of, write_model  # noqa: E402
from torch import Tensor  # noqa: E402

from rlcore.hf.config import HFConfig  # noqa: E402
from rlcore.hf.size import size_of  # noqa: E402
from rlcore.mcore import prefix_tree  # noqa: E402
from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.tensors import Batch, cumulative  # noqa: E402

RATIOS = {"1:4": 0.25, "1:1": 1.0, "4:1": 4.0, "16:1": 16.0}
BATCHES = (*(f"{ratio} x{n}" for n in (8, 16) for ratio in RATIOS), "turns", "nothing")
TURNS, EPISODES = 8, 4


def make_batch(a: argparse.Namespace, shape: str, vocab: int) -> Batch:
    """Return about a.tokens tokens, in whole groups."""
    g = torch.Generator().manual_seed(a.seed)

    def some(count: float) -> Tensor:
        return torch.randint(0, vocab, (max(1, int(count)),), generator=g)

    def response() -> Tensor:
        drawn = torch.empty(1).log_normal_(-0.125, 0.5, generator=g).item()  # mean 1
        return some(a.response * drawn)

    rows: list[tuple[Tensor, Tensor]] = []  # untrained and trained tokens
    while sum(len(p) + len(r) for p, r in rows) < a.tokens:
        if shape == "turns":
            prompt = some(a.response)
            for _ in range(EPISODES):
                history = prompt
                for _ in range(TURNS):
                    turn = response()
                    rows.append((history, turn))
                    history = torch.cat([history, turn, some(a.response / 4)])
        elif shape == "nothing":
            rows += [(some(a.response), response()) for _ in range(8)]
        else:
            ratio, size = shape.split(" x")
            prompt = some(a.response * RATIOS[ratio])
            rows += [(prompt, response()) for _ in range(int(size))]
    lengths = [len(p) + len(r) for p, r in rows]
    parts = [torch.arange(len(p) + len(r)) >= len(p) for p, r in rows]
    total = sum(lengths)
    return Batch(
        tokens=torch.cat([x for row in rows for x in row]),
        cu_seqlens=cumulative(lengths),
        mask=torch.cat(parts),
        rollout_log_probs=torch.full((total,), -10.0),
        advantage=torch.randn(total, generator=g),
        ids=tuple(map(str, range(len(rows)))),
    )


def bound(hf: HFConfig, lengths: Sequence[int], computed: int) -> float:
    """Return the speed-up by FLOPs if only linear layers compute no more than `computed` tokens."""
    whole = size_of(hf).train_flops(sum(lengths), sum(n * n for n in lengths))
    linears = size_of(hf).products - size_of(hf).head
    return whole / (whole - 6 * linears * (sum(lengths) - computed))


def seconds(call: Callable[[], Any], device: str) -> float:
    start = time.perf_counter()
    call()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(a: argparse.Namespace, hf: HFConfig, folder: Path, shape: str) -> dict[str, Any]:
    batch = make_batch(a, shape, hf.vocab_size)
    arms = {x: Ours(a, hf, folder, batch, f'share_prefix="{x}"') for x in ("false", "true")}
    logp = {name: arm.logprobs() for name, arm in arms.items()}
    found: dict[str, list[float]] = {}
    for i in range(a.rounds + 1):
        for name, arm in arms.items():
            times = (seconds(arm.logprobs, a.device), seconds(arm.update, a.device))
            for what, took in zip(("logprobs", "update"), times, strict=True):
                if i:  # the first round warms up
                    found.setdefault(f"{what} {name}", []).append(took)
    for arm in arms.values():
        arm.close()
    computed = prefix_tree.build(batch.tokens.numpy(), batch.mask.numpy(), batch.lengths).num_tokens
    row: dict[str, Any] = {
        "shape": shape,
        "sequences": batch.num_sequences,
        "tokens": batch.num_tokens,
        "computed": computed,
        "bound": bound(hf, batch.lengths, computed),
        "differs": (logp["true"] - logp["false"]).abs().max().item(),
    }
    for what in ("update", "logprobs"):
        row[f"{what}_s"] = {n: statistics.median(found[f"{what} {n}"]) for n in arms}
        pairs = zip(found[f"{what} false"], found[f"{what} true"], strict=True)
        row[f"{what}_speed_up"] = statistics.median(apart / shared for apart, shared in pairs)
    row["of_bound"] = row["update_speed_up"] / row["bound"]
    return row


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="4m", help="shape of a Qwen3 model")
    parser.add_argument("--shapes", nargs="+", default=BATCHES, help="what is measured")
    parser.add_argument("--device", default="cpu", help="torch device")
    parser.add_argument("--dtype", default="float32", help="data type of the weights")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens per update")
    parser.add_argument("--response", type=int, default=64, help="mean tokens of a response")
    parser.add_argument("--micro", type=int, default=4096, help="tokens per micro-batch")
    parser.add_argument("--rounds", type=int, default=5, help="number of measured updates")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    parser.add_argument("--json", default="", help="JSON file for the results")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    a = parse(argv)
    hf = config_of(a.model)
    rows: list[dict[str, Any]] = []
    print(
        f"{'shape':10}{'tokens':>8}{'computed':>10}{'update s':>10}{'shared s':>10}{'speed-up':>10}"
        f"{'bound':>7}{'of bound':>10}{'log-probs':>11}{'differs':>9}"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        write_model(hf, folder, a.device, a.seed)
        for shape in a.shapes:
            r = measure(a, hf, folder, shape)
            rows.append(r)
            print(
                f"{shape:10}{r['tokens']:8}{r['computed']:10}{r['update_s']['false']:10.3f}"
                f"{r['update_s']['true']:10.3f}{r['update_speed_up']:10.2f}{r['bound']:7.2f}"
                f"{r['of_bound']:10.2f}{r['logprobs_speed_up']:11.2f}{r['differs']:9.1e}",
                flush=True,
            )
    if a.json:
        write_atomic(Path(a.json), json.dumps({"args": vars(a), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

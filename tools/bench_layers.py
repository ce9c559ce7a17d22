"""Measure parts of a layer in float32 on one core, forward and backward: torch and native code.

    OMP_NUM_THREADS=1 python tools/bench_layers.py --json tools/results/layers.json

Attention is over packed sequences: torch's kernel gets padded batches of similar lengths
(rlcore/mcore/attention.py), native code the packed tokens. RMSNorm, RoPE and SwiGLU are torch's
functions with autograd beside one native pass each. Lengths are geometric where a median is given.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from rlcore.mcore import attention as plans  # noqa: E402
from rlcore.mcore import rope  # noqa: E402
from rlcore.mcore.activation import SwiGLU  # noqa: E402
from rlcore.mcore.norm import rms_norm  # noqa: E402
from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.ops import attention  # noqa: E402
from rlcore.utils import env  # noqa: E402

HEADS = {"4 x 32": (4, 2, 32), "14 x 64": (14, 2, 64), "16 x 128": (16, 8, 128)}
"""Query heads, key-value heads and head size of the tiny model, Qwen2.5-0.5B and Qwen3-0.6B."""

Call = Callable[..., Tensor]


def geometric(tokens: int, median: int, seed: int) -> list[int]:
    """Return lengths of about `tokens` tokens in all, at most five times the median."""
    draw = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(min(5 * median, 1 + int(draw.geometric(np.log(2) / median))))
    return lengths


LENGTHS = {
    "geometric, median 26": geometric(4000, 26, 0),
    "8 x 500": [500] * 8,
    "2 x 2000": [2000] * 2,
}


def attention_cases(seed: int) -> dict[str, tuple[list[Tensor], dict[str, Call]]]:
    """Return the inputs and the arms of every attention case."""
    g, cases = torch.Generator().manual_seed(seed), {}
    for what, lengths in LENGTHS.items():
        for name, (heads, groups, dim) in HEADS.items():
            shapes = [(sum(lengths), n, dim) for n in (heads, groups, groups)]
            given = [torch.randn(shape, generator=g).requires_grad_() for shape in shapes]
            padded = plans.plan(lengths)
            packed = plans.plan(lengths, flash=attention.attend)
            cases[f"attention of {name}, {what}"] = (
                given,
                {
                    "torch": lambda q, k, v, made=padded: plans.attend(q, k, v, made),
                    "native": lambda q, k, v, made=packed: plans.attend(q, k, v, made),
                },
            )
    return cases


def row_cases(seed: int) -> dict[str, tuple[list[Tensor], dict[str, Call]]]:
    """Return the inputs and the arms of the cases that work on rows."""
    g = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).requires_grad_()

    cos, sin = rope.tables(1e4 ** -(torch.arange(16) / 16), torch.arange(4000), torch.float32)
    both = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)

    def turn(x: Tensor) -> Tensor:
        return x * both[0] + torch.cat((-x[..., 16:], x[..., :16]), -1) * both[1]

    return {
        "RMSNorm, 4000 x 128": (
            [some(4000, 128), some(128)],
            {
                "torch": lambda x, w: F.rms_norm(x, (128,), w, 1e-6),
                "native": lambda x, w: rms_norm(x, w, 1e-6),
            },
        ),
        "RoPE, 4000 x 4 x 32": (
            [some(4000, 4, 32)],
            {"torch": turn, "native": lambda x: rope.rotate(x, cos, sin)},
        ),
        "SwiGLU, 4000 x 256": (
            [some(4000, 512)],
            {
                "torch": lambda x: F.silu(x[:, :256]) * x[:, 256:],
                "native": SwiGLU(),
            },
        ),
    }


def measure(given: list[Tensor], arms: dict[str, Call], rounds: int) -> dict[str, dict[str, float]]:
    """Return milliseconds of forward and backward by arm; the arms alternate."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    weight = torch.randn_like(next(iter(arms.values()))(*given))
    for i in range(rounds + 1):
        for name, call in arms.items():
            for x in given:
                x.grad = None
            times = [time.perf_counter()]
            out = call(*given)
            times.append(time.perf_counter())
            out.backward(weight)
            times.append(time.perf_counter())
            if i:  # the first round warms up
                found[name].append((times[1] - times[0], times[2] - times[1]))
    return {
        name: {
            part: 1e3 * statistics.median(pair[at] for pair in pairs)
            for at, part in enumerate(("forward", "backward"))
        }
        for name, pairs in found.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="number of measured calls")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    parser.add_argument("--json", default="", help="JSON file for the results")
    a = parser.parse_args(argv)
    if not attention.is_available():
        sys.exit("bench_layers: no native build; run bash tools/setup.sh")
    measured = []
    for name, (given, arms) in (attention_cases(a.seed) | row_cases(a.seed)).items():
        row = measure(given, arms, a.rounds)
        measured.append({"case": name, "ms": row})
        times = {arm: f"{ms['forward']:.2f} + {ms['backward']:.2f}" for arm, ms in row.items()}
        ratio = sum(row["torch"].values()) / sum(row["native"].values())
        print(
            f"{name:44} torch {times['torch']:>16} ms  native {times['native']:>16} ms {ratio:.1f}x"
        )
    if a.json:
        made = {"args": vars(a), "machine": env.report(), "rows": measured}
        write_atomic(Path(a.json), json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()

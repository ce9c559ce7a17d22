"""Measure float32 matrix products on one core: torch's own (MKL), oneDNN and native code.

    OMP_NUM_THREADS=1 python tools/bench_products.py --json tools/results/products.json

A shape is [n, k] x [k, m]. oneDNN compiles a kernel for each new n; the last column has products
whose n was never met before.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.ops import native, products  # noqa: E402
from rlcore.utils import env  # noqa: E402

SHAPES = ((2077, 128, 512), (2077, 512, 128), (512, 2077, 128), (128, 128, 512), (2077, 1024, 3072))


def seconds(call: Callable[[], torch.Tensor]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(shape: tuple[int, int, int], rounds: int, seed: int) -> dict[str, float]:
    """Return GFLOP/s by arm."""
    n, k, m = shape
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(n, k, generator=g), torch.randn(k, m, generator=g)
    rows = torch.randn(n + rounds, k, generator=g)  # for numbers of rows that are new

    def onednn(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, b.t(), None, "none", [], "")

    arms: dict[str, Callable[[int], torch.Tensor]] = {
        "torch": lambda i: torch.mm(a, b),
        "native": lambda i: products.multiply(a, b),
        "onednn": lambda i: onednn(a),
        "onednn, new rows": lambda i: onednn(rows[: n + i]),
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    for i in range(rounds + 1):
        for name, call in arms.items():
            took = seconds(lambda call=call, i=i: call(i))
            if i:  # the first round warms up
                times[name].append(took)
    return {name: 2e-9 * n * k * m / statistics.median(took) for name, took in times.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30, help="number of measured products")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    parser.add_argument("--json", default="", help="JSON file for the results")
    a = parser.parse_args(argv)
    if native.torch_ops("matrix products") is None:
        sys.exit("bench_products: no native build; run bash tools/setup.sh")
    rows = [{"shape": shape, "gflops": measure(shape, a.rounds, a.seed)} for shape in SHAPES]
    for row in rows:
        print(row["shape"], {name: round(value) for name, value in row["gflops"].items()})
    if a.json:
        made = {"args": vars(a), "machine": env.report(), "rows": rows}
        write_atomic(Path(a.json), json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Measure GB/s of packing tensors into a bucket and back, against torch's ways and a plain copy.

    python tools/bench_reshard.py --seed 0 --json out.json
    python tools/bench_reshard.py --gib 4 --device cuda --json out.json --plot out.png

One row per case, direction and way. GB/s are bytes of the bucket per second, medians of --rounds;
`ratio` is against the plain copy of the same bytes (`memcpy`, the roofline). Ours also sums the
checksum; nobody else does. `push` rows: a state through the colocated channel to an engine that
verifies and drops it, against the same with per-tensor copies and no checksum.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from rlcore.ops.reshard import ReshardPlan, TensorPiece, TensorSpec, checksum  # noqa: E402
from rlcore.protocols import InProcess
from rlcore.records import Bucket, TensorMeta  # noqa: E402
from rlcore.sync.colocated import ColocatedChannel  # noqa: E402
from rlcore.utils.buckets import as_tensor, open_payload, shared  # noqa: E402

SIDE = 2048
TP = 4
CASES = {
    "contiguous": (torch.bfloat16, torch.bfloat16),
    "tp": (torch.bfloat16, torch.bfloat16),
    "transposed": (torch.bfloat16, torch.bfloat16),
    "cast": (torch.float32, torch.bfloat16),
}


def main() -> None:
    """Run all cases, print one line each, write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    parser.add_argument("--gib", type=float, default=0.25, help="size of the bucket in GiB")
    parser.add_argument(
        "--state-gib", type=float, default=1.0, help="size of the weights to update in GiB"
    )
    parser.add_argument("--device", default="cpu", help="torch device")
    parser.add_argument("--threads", type=int, default=0, help="threads; 0: torch's default")
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="measure CPU time instead, for a busy machine; one thread",
    )
    parser.add_argument("--json", default="", help="JSON file for the results")
    parser.add_argument("--plot", default="", help="PNG file")
    a = parser.parse_args()
    if a.cpu_time and a.device != "cpu":
        parser.error(
            f"--cpu-time --device {a.device}: CPU time does not measure GPU work; use --device cpu"
        )
    if a.threads or a.cpu_time:
        torch.set_num_threads(1 if a.cpu_time else a.threads)
    torch.manual_seed(a.seed)
    rows = [row for case in CASES for row in copies(case, a)]
    rows += pushes(a)
    for row in rows:
        ratio = f"{row['ratio']:.2f} x {row['baseline']}" if row["baseline"] else ""
        print(f"{row['name']:36} {row['value']:8.2f} {row['unit']}  {ratio}")
    if a.json:
        Path(a.json).write_text(json.dumps(rows, indent=1) + "\n")
    if a.plot:
        plot(rows, a.plot)


def timed(work: Callable[[], Any], a: argparse.Namespace) -> float:
    """Median seconds; the first call is not counted."""
    clock = time.process_time if a.cpu_time else time.perf_counter
    seconds = []
    for _ in range(a.rounds + 1):
        start = clock()
        work()
        if a.device != "cpu":
            torch.cuda.synchronize()
        seconds.append(clock() - start)
    return median(seconds[1:])


def row(name: str, value: float, unit: str, baseline: str = "", ratio: float = 0.0) -> dict:
    """One line of the table."""
    return {"name": name, "value": value, "unit": unit, "baseline": baseline, "ratio": ratio}


def copies(case: str, a: argparse.Namespace) -> Iterator[dict]:
    """Ours, torch's ways and the plain copy for one kind of layout."""
    plan, tensors, bucket, views = layout(case, a)
    size = bucket.numel()
    other = torch.empty_like(bucket)
    ways: dict[str, Callable[[], Any]] = {"memcpy": lambda: other.copy_(bucket)}
    for direction in ("pack", "unpack"):
        pack = direction == "pack"
        to, source = (views, tensors) if pack else (tensors, views)
        ours = (
            (lambda: plan.pack(tensors, bucket)) if pack else (lambda: plan.unpack(bucket, tensors))
        )
        ways[f"{direction} rlcore"] = ours
        ways[f"{direction} copy_ loop"] = lambda t=to, s=source: [
            x.copy_(y) for x, y in zip(t, s, strict=True)
        ]
        ways[f"{direction} _foreach_copy_"] = lambda t=to, s=source: torch._foreach_copy_(t, s)
    if case in ("contiguous", "cast"):
        flat = bucket.view(CASES[case][1])
        same = CASES[case][0] == flat.dtype
        ways["pack cat"] = lambda: torch.cat(
            [x.reshape(-1) if same else x.reshape(-1).to(flat.dtype) for x in tensors], out=flat
        )
    ways["checksum alone"] = lambda: checksum(bucket)
    base = 0.0
    for way, work in ways.items():
        speed = size / timed(work, a) / 1e9
        base = base or speed
        yield row(f"{case}: {way}", speed, "GB/s", "memcpy", speed / base)


def layout(
    case: str, a: argparse.Namespace
) -> tuple[ReshardPlan, list[Tensor], Tensor, list[Tensor]]:
    """The plan, tensors that it fits, the bucket and views of it like the tensors."""
    here, there = CASES[case]
    full = SIDE * SIDE * there.itemsize
    count = max(1, int(a.gib * 2**30) // full)
    bucket = torch.zeros(count * full, dtype=torch.uint8, device=a.device)
    shape = (SIDE, SIDE // TP) if case == "tp" else (SIDE, SIDE)
    per = TP if case == "tp" else 1
    tensors = [torch.randn(shape, device=a.device).to(here) for _ in range(count * per)]
    if case == "transposed":
        tensors = [t.T for t in tensors]
    specs = [TensorSpec(shape, here, t.stride()) for t in tensors]
    pieces, views = [], []
    for i in range(count * per):
        start = i // per * full + i % per * shape[1] * there.itemsize
        pieces.append(
            TensorPiece(tensor=i, offset=start, shape=shape, strides=(SIDE, 1), dtype=there)
        )
        views.append(bucket.view(there).as_strided(shape, (SIDE, 1), start // there.itemsize))
    return ReshardPlan(specs, pieces, bucket.numel()), tensors, bucket, views


# ---- a push


class State:
    """A learner with nothing but weights."""

    def __init__(self, tensors: list[tuple[str, Tensor]]):
        self._tensors = tensors

    def export(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._tensors


class Sink(InProcess):
    """An engine that opens and verifies buckets and keeps nothing."""

    def begin_load(self, version: int) -> None: ...

    def end_load(self) -> None: ...

    def load_bucket(self, bucket: Bucket, payloads: list[Any]) -> None:
        flat = as_tensor(bucket, open_payload(bucket, payloads[0]))
        assert checksum(flat) == bucket.checksum


def pushes(a: argparse.Namespace) -> Iterator[dict]:
    """Many tensors as of a model, and few hundred small ones as of the tiny model."""
    big = [
        (f"w{i}", torch.randn(SIDE, SIDE, device=a.device).bfloat16())
        for i in range(max(1, int(a.state_gib * 2**30) // (SIDE * SIDE * 2)))
    ]
    tiny = [(f"t{i}", torch.randn(128, 256, device=a.device)) for i in range(40)]
    for name, state in (("state", big), ("tiny", tiny)):
        size = sum(t.nbytes for _, t in state)
        for shm in (False, True):
            channel = ColocatedChannel(shared_memory=shm)
            ours = timed(lambda c=channel, s=state: c.update_weights(State(s), Sink(), 1), a)
            before = timed(lambda s=state, m=shm: plain_push(s, m), a)
            where = "shm" if shm else "inline"
            for way, seconds in (("before", before), ("rlcore", ours)):
                yield row(
                    f"push {name} {size / 2**20:.0f} MiB {where}: {way}",
                    seconds * 1e3,
                    "ms",
                    "before",
                    seconds / before,
                )


def plain_push(state: list[tuple[str, Tensor]], shm: bool) -> None:
    """Fresh zeros per bucket, a `copy_` per tensor, shared memory written from it, no checksum."""
    held: list[Tensor] = []
    end = 0

    def send() -> None:
        buffer = torch.zeros(end, dtype=torch.uint8)
        at, metas = 0, []
        for tensor in held:
            dtype = str(tensor.dtype).removeprefix("torch.")
            metas.append(TensorMeta(name="", dtype=dtype, shape=tuple(tensor.shape), offset=at))
            buffer[at : at + tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
            at += tensor.nbytes
        view = memoryview(buffer.numpy())
        bucket = Bucket(tensors=tuple(metas), num_bytes=end, checksum=0)
        if not shm:
            as_tensor(bucket, view)
            return
        with shared(view) as path, open(path, "rb") as file:
            assert len(file.read(1)) == 1

    for _, tensor in state:
        if held and end + tensor.nbytes > 256 * 2**20:
            send()
            held, end = [], 0
        held.append(tensor)
        end += tensor.nbytes
    send()


def plot(rows: list[dict], path: str) -> None:
    """Bars of the copies."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    some = [r for r in rows if r["unit"] == "GB/s"][::-1]
    figure, axes = plt.subplots(figsize=(7, 0.22 * len(some) + 0.8))
    colours = ["tab:blue" if "rlcore" in r["name"] else "lightgrey" for r in some]
    axes.barh([r["name"] for r in some], [r["value"] for r in some], color=colours)
    axes.set_xlabel("GB/s of bucket")
    axes.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=70)


if __name__ == "__main__":
    main()

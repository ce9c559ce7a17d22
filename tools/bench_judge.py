"""Measure seconds and memory of the judge's layer pipeline on the CPU.

The others are the whole model in memory, reading without overlap, and accelerate's offloading.

    bash tools/setup.sh --bench          # accelerate; --no-accelerate leaves its rows out
    python tools/bench_judge.py --seed 0 --json out.json

A model of random weights is made on the spot, 1.2 GB by default. The page cache would hide what
reading costs, so every read takes at least as long as at --gbps, everywhere the same. A row is a
process of its own; its peak memory is the largest resident set (VmHWM: file pages count) above what
it had before the model.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from rlcore.hf.config import HFConfig  # noqa: E402
from rlcore.hf.names import expected  # noqa: E402
from rlcore.hf.weights import save_folder  # noqa: E402
from rlcore.rewards.judge.model import JudgeModel  # noqa: E402

SIZES = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
OURS: dict[str, dict[str, Any]] = {
    "resident": {"resident_ratio": 1.0},
    "half, overlap": {"resident_ratio": 0.5},
    "half, no overlap": {"resident_ratio": 0.5, "overlap": False},
    "none, overlap": {"resident_ratio": 0.0},
    "none, no overlap": {"resident_ratio": 0.0, "overlap": False},
}
PEERS = ("accelerate cpu_offload", "accelerate disk_offload")


class Throttle:
    """Reading as from a link of so many bytes per second."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate, self._due, self._lock = bytes_per_s, 0.0, threading.Lock()
        self.total = 0

    def __call__(self, num_bytes: int) -> None:
        """Returns when the link has carried so many bytes more."""
        with self._lock:
            self.total += num_bytes
            self._due = max(self._due, time.monotonic() - num_bytes / self._rate)
            self._due += num_bytes / self._rate
            due = self._due
        time.sleep(max(0.0, due - time.monotonic()))


def main() -> None:
    """Run every row and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    parser.add_argument(
        "--gbps", type=float, default=0.25, help="read speed in 10^9 bytes per second"
    )
    parser.add_argument("--rows", type=int, default=2, help="responses per batch")
    parser.add_argument("--tokens", type=int, default=80, help="tokens per response")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of every row")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument(
        "--layers", type=int, default=SIZES["num_hidden_layers"], help="number of layers"
    )
    parser.add_argument(
        "--no-accelerate", action="store_true", help="leave out the rows of accelerate"
    )
    parser.add_argument("--json", type=Path, help="JSON file for the results")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(args)
        return
    with tempfile.TemporaryDirectory(prefix="bench_judge") as folder:
        args.model = Path(folder) / "model"
        model_bytes = make_model(args.model, args.seed, args.layers)
        names = [*OURS, *(() if args.no_accelerate else PEERS)]
        rows: list[dict[str, Any]] = []
        for found in measure(names, args):
            rows = report(found, args, model_bytes)
    for row in rows:
        against = f"   {row['ratio']:.3f} of {row['baseline']}" if "ratio" in row else ""
        print(f"{row['name']:36} {row['value']:8.3f} {row['unit']}{against}")


def make_model(folder: Path, seed: int, layers: int) -> int:
    """Write the model; returns its bytes."""
    hf = HFConfig.from_dict(SIZES).with_(num_layers=layers)
    generator = torch.Generator().manual_seed(seed)
    total = 0

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal total
        for name, shape in expected(hf).items():
            value = torch.randn(shape, generator=generator) * 0.02
            total += value.nbytes
            yield name, value + 1 if name.endswith("norm.weight") else value

    save_folder(weights(), hf, None, folder)
    return total


class Child:
    """One row in a process of its own."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        """Returns when its model is there."""
        keys = ("seed", "gbps", "rows", "tokens", "threads", "model")
        words = [w for key in keys for w in (f"--{key}", str(getattr(args, key)))]
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--one", name, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._hear()

    def turn(self) -> float:
        """Seconds of a batch."""
        return self._ask("go")

    def end(self) -> dict[str, Any]:
        """What there is to say about all of them; the process is over then."""
        found = self._ask("end")
        self._process.wait(60)
        return found

    def kill(self) -> None:
        """End it as it is."""
        self._process.kill()
        self._process.wait()

    def _ask(self, word: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self.name}: its process ended with status {self._process.wait()}")
        return json.loads(line)


def measure(names: Sequence[str], args: argparse.Namespace) -> Iterator[dict[str, dict[str, Any]]]:
    """What is known after each round. All rows take turns, one process at a time, so that what else
    this machine does falls on all of them."""
    found: dict[str, dict[str, Any]] = {}
    for number in range(args.repeats):
        for name in names:
            child = Child(name, args)
            try:
                seconds = child.turn()
                said = child.end()
            finally:
                child.kill()
            row = found.setdefault(name, said | {"seconds": []})
            row["seconds"].append(seconds)
            row["peak_bytes"] = max(row["peak_bytes"], said["peak_bytes"])
            if row["says"] != said["says"]:
                sys.exit(f"{name}: bits differ from the previous round")
        shown = "  ".join(f"{name} {row['seconds'][-1]:.2f}" for name, row in found.items())
        print(f"round {number + 1}: {shown}", flush=True)
        yield found


def one(args: argparse.Namespace) -> None:
    """A row: batches when it is told to, two at a time, of which the second counts: its first
    layers come while the first one ends, as in a run."""
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(args.seed)
    shape = (args.rows, args.tokens)
    rows = torch.randint(0, SIZES["vocab_size"], shape, generator=generator)
    throttle = Throttle(args.gbps * 1e9)
    make: Callable[..., Callable[[], torch.Tensor]] = ours if args.one in OURS else theirs
    if args.one in PEERS:
        import accelerate  # noqa: F401
        from transformers import AutoModelForCausalLM  # noqa: F401
    before = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    score = make(args.one, args.model, rows, throttle)
    say({})
    probabilities = torch.empty(0)
    while sys.stdin.readline().strip() == "go":
        score()
        begin = time.monotonic()
        probabilities = score()
        say(time.monotonic() - begin)
    say(
        {
            "peak_bytes": resident_bytes("VmHWM") - before,
            "says": probabilities.double().tolist(),
            "is_ours": args.one in OURS,
        }
    )


def say(found: Any) -> None:
    """A line to the parent."""
    print(json.dumps(found), flush=True)


def ours(
    name: str, folder: Path, rows: torch.Tensor, throttle: Throttle
) -> Callable[[], torch.Tensor]:
    """The judge's own model."""
    judge = JudgeModel(
        folder, dtype="float32", device=torch.device("cpu"), on_read=throttle, **OURS[name]
    )
    return lambda: judge.probabilities(rows.tolist(), range(8))


def theirs(
    name: str, folder: Path, rows: torch.Tensor, throttle: Throttle
) -> Callable[[], torch.Tensor]:
    """transformers' model, offloaded by accelerate, which brings every module when it is its turn:
    from a copy in host memory, or from files."""
    from accelerate import big_modeling
    from transformers import AutoModelForCausalLM

    class Slow(Mapping):
        """Weights by name, each read at the throttle's pace."""

        def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
            self._weights = weights

        def __getitem__(self, key: str) -> torch.Tensor:
            value = self._weights[key]
            throttle(value.nbytes)
            return value

        def __iter__(self) -> Iterator[str]:
            return iter(self._weights)

        def __len__(self) -> int:
            return len(self._weights)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    cpu = torch.device("cpu")
    if name == "accelerate cpu_offload":
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        big_modeling.cpu_offload(model, cpu, state_dict=Slow(weights))
    else:
        loader = big_modeling.OffloadedWeightsLoader
        big_modeling.OffloadedWeightsLoader = lambda **keys: Slow(loader(**keys))
        big_modeling.disk_offload(model, str(folder.parent / "offload"), cpu)
        Path("/proc/self/clear_refs").write_text("5")  # what it took to write them does not count

    def score() -> torch.Tensor:
        with torch.no_grad():
            logits = model(rows, logits_to_keep=1, use_cache=False).logits[:, -1]
        return logits.softmax(-1)[:, :8]

    return score


def resident_bytes(field: str = "VmRSS") -> int:
    """Of this process, from the kernel."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def report(
    found: dict[str, dict[str, Any]], args: argparse.Namespace, model_bytes: int
) -> list[dict[str, Any]]:
    """Rows with ratios, written down; the program ends where not all say the same."""
    resident = found["resident"]
    for name, row in found.items():
        if row["is_ours"] and row["says"] != resident["says"]:
            sys.exit(f"{name}: bits differ from the resident model")
        apart = torch.tensor(row["says"]) - torch.tensor(resident["says"])
        if apart.abs().max() > 1e-5:
            sys.exit(f"{name}: verdicts differ from the resident model")
    rows: list[dict[str, Any]] = [
        {"name": "model", "value": model_bytes / 1e9, "unit": "GB"},
        {"name": "reads", "value": args.gbps, "unit": "GB/s"},
        {"name": "batch", "value": args.rows * args.tokens, "unit": "tokens"},
    ]

    def seconds(name: str, baseline: str) -> dict[str, Any]:
        """The median, and the median of the ratios of the rounds."""
        pairs = zip(found[name]["seconds"], found[baseline]["seconds"], strict=True)
        row = {"name": f"{name}: batch", "value": statistics.median(found[name]["seconds"])}
        row |= {"unit": "s", "baseline": baseline}
        return row | {"ratio": statistics.median(a / b for a, b in pairs)}

    for name, row in found.items():
        rows.append(seconds(name, "resident"))
        peak, whole = row["peak_bytes"] / 1e9, resident["peak_bytes"] / 1e9
        rows.append({"name": f"{name}: peak", "value": peak, "unit": "GB"})
        rows[-1] |= {"baseline": "resident", "ratio": peak / whole}
    for part in ("half", "none"):
        rows.append(seconds(f"{part}, overlap", f"{part}, no overlap"))
    rows += [seconds("none, overlap", peer) for peer in PEERS if peer in found]
    if args.json:
        settings = {
            k: getattr(args, k) for k in ("seed", "gbps", "rows", "tokens", "repeats", "threads")
        }
        args.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()

"""Compare implementations of the policy loss on given logits, forward and backward.

    .venv/bin/python tools/bench_loss.py                           # [2048, 151936] bf16, minutes
    .venv/bin/python tools/bench_loss.py --device cuda --tokens 8192
    .venv/bin/python tools/bench_loss.py --tokens 256 --peers eager rlcore-ops --json FILE

Every way runs on the same logits, on a CPU in a process of its own, and makes the same clipped loss
and its gradient by the logits; a name with +entropy has an entropy bonus too, rlcore-fused has
that, a truncated weight, the dual clip and a k3 KL. Ratios are those of medians to `eager`.

    passes    tensors of the logits' size that are read or written, by the bytes of every op's
              operands in units of the logits; inside of compiled code and of torch's
              reference nothing is seen (-)
    extra     peak memory above the logits and the inputs; a gradient in place needs none
    errors    of log-prob and entropy to float64, relative to the larger of 1 and the value, and
              of the gradient relative to itself where it is above a millionth of its row's largest

The JSON is a list of rows: name, value (seconds, median), unit, baseline, ratio, and the above.
Liger-Kernel's loss on logits is a Triton kernel and runs on a GPU only; it is taken where it can be
imported (`pip install liger-kernel` into the environment that runs this).
"""

import argparse
import datetime
import gc
import importlib.util
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.ops.logprob import log_probs  # noqa: E402
from rlcore.ops.policy import policy_loss  # noqa: E402
from rlcore.tensors import PolicyInputs, PolicySpec  # noqa: E402
from rlcore.utils import env  # noqa: E402

CLIP_LOW, CLIP_HIGH, ENTROPY_COEF = 0.2, 0.28, 0.01
ADVANTAGE = 0.7  # of all tokens: Liger-Kernel has one per sequence
CHECKED_ROWS = 32
"""Rows that are compared with float64."""
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


class Case(NamedTuple):
    logits: Tensor  # [T, V], fresh for every call: a way may write over them
    tokens: Tensor  # [T]
    old_log_probs: Tensor  # [T]
    temperature: float


class Made(NamedTuple):
    logp: Tensor | None  # [T]
    entropy: Tensor | None  # [T]
    grad: Tensor  # [T, V]


def clipped(logp: Tensor, old: Tensor) -> Tensor:
    """The sum of PPO's loss."""
    ratio = (logp - old).exp()
    return -torch.minimum(ratio * ADVANTAGE, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * ADVANTAGE)


def eager_loss(x: Case, logits: Tensor, entropy: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    logp = torch.log_softmax(logits.float() / x.temperature, -1)
    chosen = logp.gather(-1, x.tokens[:, None])[:, 0]
    loss, bonus = clipped(chosen, x.old_log_probs).sum(), None
    if entropy:
        bonus = -(logp.exp() * logp).sum(-1)
        loss = loss - ENTROPY_COEF * bonus.sum()
    return loss, chosen, bonus


def backward(x: Case, made: Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]) -> Made:
    """The gradient through autograd."""
    logits = x.logits.detach().requires_grad_()
    loss, logp, entropy = made(logits)
    (grad,) = torch.autograd.grad(loss, logits)
    return Made(logp.detach(), None if entropy is None else entropy.detach(), grad)


def eager(x: Case, entropy: bool = False) -> Made:
    return backward(x, lambda logits: eager_loss(x, logits, entropy))


_compiled = torch.compile(eager_loss, fullgraph=True, dynamic=False)


def compiled(x: Case, entropy: bool = False) -> Made:
    return backward(x, lambda logits: _compiled(x, logits, entropy))


def ops(x: Case, entropy: bool = False) -> Made:
    """Log-prob and entropy, the loss in torch, the gradient written over the logits."""

    def loss(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = log_probs(
            logits,
            x.tokens,
            vocab_size=logits.size(1),
            temperature=x.temperature,
            entropy_grad=entropy,
            in_place=True,
        )
        total = clipped(made.logp, x.old_log_probs).sum()
        return total - ENTROPY_COEF * made.entropy.sum() if entropy else total, *made

    return backward(x, loss)


def fused(x: Case, plain: bool = False) -> Made:
    """One op for all, with everything on; `plain` is the loss of the other ways."""
    spec = PolicySpec(clip_low=CLIP_LOW, clip_high=CLIP_HIGH)
    if not plain:
        spec = PolicySpec(
            clip_low=CLIP_LOW,
            clip_high=CLIP_HIGH,
            clip_dual=3.0,
            is_threshold=2.0,
            kl_type="k3",
            kl_coef=0.001,
            entropy_coef=ENTROPY_COEF,
        )
    ones = torch.ones_like(x.old_log_probs)
    inputs = PolicyInputs(
        ones * ADVANTAGE, ones, x.old_log_probs + 0.1, x.old_log_probs, x.old_log_probs - 0.1
    )
    logits = x.logits.detach().requires_grad_()
    made = policy_loss(
        logits,
        x.tokens,
        inputs,
        spec,
        vocab_size=logits.size(1),
        temperature=x.temperature,
        in_place=True,
        unit_upstream=True,
    )
    (grad,) = torch.autograd.grad(made.loss, logits)
    return Made(made.logp, made.entropy, grad)


def liger(x: Case) -> Made:
    """Its GRPO loss: one sequence; the last row of its logits is dropped by it."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    def loss(logits: Tensor) -> tuple[Tensor, Tensor, None]:
        per_token, *_ = triton_grpo_loss(
            logits[None],
            x.old_log_probs[None, :-1],
            None,
            x.tokens[None, :-1],
            torch.full((1,), ADVANTAGE, device=logits.device),
            temperature=x.temperature,
            beta=0.0,
            eps_low=CLIP_LOW,
            eps_high=CLIP_HIGH,
            inplace=True,
            reduce=False,
        )
        return per_token.sum(), per_token[0], None

    return backward(x, loss)._replace(logp=None)


WAYS: dict[str, Callable[[Case], Made]] = {
    "eager": eager,
    "eager+entropy": lambda x: eager(x, True),
    "compile": compiled,
    "compile+entropy": lambda x: compiled(x, True),
    "liger": liger,
    "torch-reference": ops,  # RLCORE_NATIVE=0: blocks in torch
    "torch-reference+entropy": lambda x: ops(x, True),
    "rlcore-ops": ops,
    "rlcore-ops+entropy": lambda x: ops(x, True),
    "rlcore-fused-plain": lambda x: fused(x, plain=True),
    "rlcore-fused": fused,
}
UNCOUNTED = ("compile", "liger", "torch-reference")


class Passes(TorchDispatchMode):
    """Counts the bytes that ops read and write, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        schema = func._schema
        given = [*args, *(kwargs or {}).values()]
        if any(r.alias_info and not r.alias_info.is_write for r in schema.returns):
            return out  # a view
        name = schema.name
        if "empty" in name or "detach" in name:
            return out
        written = {
            id(v)
            for a, v in zip(schema.arguments, args, strict=False)
            if a.alias_info and a.alias_info.is_write
        }
        fills = name.endswith(("zero_", "fill_", "copy_"))
        made = [t for t in (out if isinstance(out, tuple | list) else [out])]
        for t in {id(t): t for t in given}.values():
            if isinstance(t, Tensor):
                times = 2 if id(t) in written and not fills else 1
                self.bytes += times * t.numel() * t.element_size()
        for t in made:
            if isinstance(t, Tensor) and id(t) not in {id(g) for g in given}:
                self.bytes += t.numel() * t.element_size()
        return out


def make(a: argparse.Namespace) -> tuple[Case, Tensor]:
    """The case and the logits that every call starts from."""
    device = torch.device(a.device)  # drawn there: a CPU takes a minute for a billion logits
    g = torch.Generator(device).manual_seed(a.seed)
    master = torch.empty(a.tokens, a.vocab, dtype=DTYPES[a.dtype], device=device)
    for rows in master.split(64):
        rows.copy_(torch.randn(rows.shape, generator=g, device=device) * 3)
    tokens = torch.randint(0, a.vocab, (a.tokens,), generator=g, device=device)
    likely = torch.arange(0, a.tokens, 2, device=device)
    master[likely, tokens[likely]] = 14.0
    chosen = master.gather(1, tokens[:, None])[:, 0].double() / a.temperature
    lse = torch.cat([(r.float() / a.temperature).logsumexp(-1) for r in master.split(64)])
    noise = torch.randn(a.tokens, generator=g, device=device) * 0.1
    old = (chosen - lse).float() + noise
    return Case(torch.empty_like(master), tokens, old, a.temperature), master


def resident(key: str) -> int:
    """VmRSS or VmHWM of this process, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {key}: peak memory cannot be measured here")


class Peak:
    """Bytes above those at the start, at most."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        gc.collect()
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._start = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
            self._start = resident("VmRSS")

    def extra(self) -> int:
        if self._cuda:
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - self._start
        return resident("VmHWM") - self._start


def errors(a: argparse.Namespace, way: str, case: Case, master: Tensor, made: Made) -> dict:
    """Against float64, over the first rows."""
    n = min(CHECKED_ROWS, a.tokens - 1)
    rows = Case(
        master[:n].double(), case.tokens[:n], case.old_log_probs[:n].double(), a.temperature
    )
    logits = rows.logits.requires_grad_()
    logp_all = torch.log_softmax(logits / a.temperature, -1)
    logp = logp_all.gather(-1, rows.tokens[:, None])[:, 0]
    entropy = -torch.special.xlogy(logp_all.exp(), logp_all.exp()).sum(-1)

    def apart(found: Tensor | None, expected: Tensor) -> float | None:
        if found is None:
            return None
        gap = (found[:n].double() - expected.detach()).abs()
        return (gap / expected.detach().abs().clamp(min=1)).max().item()

    out = {"logp_error": apart(made.logp, logp), "entropy_error": apart(made.entropy, entropy)}
    if way == "rlcore-fused":
        return out | {"grad_error": None}  # of another loss; tests/native compares it
    loss = clipped(logp, rows.old_log_probs).sum()
    if "+entropy" in way:
        loss = loss - ENTROPY_COEF * entropy.sum()
    (grad,) = torch.autograd.grad(loss, logits)
    seen = grad.abs() > 1e-6 * grad.abs().amax(-1, keepdim=True)
    gap = (made.grad[:n].double() - grad).abs() / grad.abs()
    return out | {"grad_error": gap[seen].max().item() if seen.any() else 0.0}


def child(a: argparse.Namespace, way: str) -> dict[str, Any]:
    """One way's row."""
    case, master = make(a)
    run = WAYS[way]
    cuda = a.device == "cuda"
    wait = torch.cuda.synchronize if cuda else (lambda: None)

    def fresh() -> None:
        case.logits.copy_(master)
        wait()

    fresh()
    made = run(case)  # also warms up and compiles
    row: dict[str, Any] = errors(a, way, case, master, made)
    first = made.grad.detach().to("cpu", copy=True)
    del made
    fresh()
    row["bitwise"] = torch.equal(run(case).grad.cpu(), first)
    del first
    fresh()
    peak = Peak(a.device)
    made = run(case)
    row["extra_bytes"] = max(0, peak.extra())
    row["extra_per_token"] = row["extra_bytes"] / a.tokens
    del made
    row["passes"] = None
    if not way.startswith(UNCOUNTED):
        fresh()
        with Passes() as passes:
            run(case)
        row["passes"] = passes.bytes / (master.numel() * master.element_size())
    seconds, busy = [], []
    for _ in range(a.repeats):
        fresh()
        start, cpu = time.perf_counter(), time.process_time()
        made = run(case)
        wait()
        seconds.append(time.perf_counter() - start)
        busy.append(time.process_time() - cpu)
        del made
    row |= {
        "value": statistics.median(seconds),
        "fastest": min(seconds),
        "cpu_s": statistics.median(busy),
        "cpu_fastest": min(busy),
        "ns_per_token": statistics.median(seconds) / a.tokens * 1e9,
        "threads": torch.get_num_threads(),
    }
    return row


def absent(a: argparse.Namespace, way: str) -> str:
    """Why a way cannot run here, or ""."""
    if way == "liger":
        if a.device != "cuda":
            return "its loss on logits is a Triton kernel: needs a GPU"
        if importlib.util.find_spec("liger_kernel") is None:
            return "liger_kernel is not installed"
    return ""


def measure(a: argparse.Namespace, way: str) -> dict[str, Any]:
    """A row from a process of its own."""
    if why := absent(a, way):
        return {"name": way, "absent": why}
    if a.device == "cuda" and not way.startswith("torch-reference"):  # the allocator has the peaks
        row = child(a, way)
        gc.collect()
        torch.cuda.empty_cache()
        return {"name": way, "unit": "s"} | row
    keys = ("tokens", "vocab", "dtype", "device", "seed", "temperature", "repeats", "threads")
    given = [part for k in keys for part in (f"--{k}", str(getattr(a, k)))]
    native = {"RLCORE_NATIVE": "0" if way.startswith("torch-reference") else "1"}
    command = [sys.executable, __file__, *given, "--child", way]
    done = subprocess.run(
        command,
        env=os.environ | (native if way.startswith(("torch-reference", "rlcore")) else {}),
        capture_output=True,
        text=True,
        timeout=a.timeout,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"name": way, "failed": last}
    return {"name": way, "unit": "s"} | json.loads(done.stdout.splitlines()[-1])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text."""

    def number(v: float | None, form: str) -> str:
        return "-" if v is None else format(v, form)

    head = f"{'':24}{'s':>9}{'ratio':>7}{'cpu s':>9}{'ratio':>7}{'passes':>8}{'extra MB':>10}"
    lines = [head + f"{'B/token':>10}{'logp err':>10}{'H err':>10}{'grad err':>10}  same bits"]
    for r in rows:
        why = r.get("absent") or r.get("failed")
        if why:
            lines.append(f"{r['name']:24} {'absent' if 'absent' in r else 'FAILED'}: {why}")
            continue
        lines.append(
            f"{r['name']:24}{r['value']:9.3f}{number(r['ratio'], '.2f'):>7}{r['cpu_s']:9.3f}"
            f"{number(r['cpu_ratio'], '.2f'):>7}"
            f"{number(r['passes'], '.1f'):>8}{r['extra_bytes'] / 1e6:10.1f}"
            f"{r['extra_per_token']:10.0f}{number(r['logp_error'], '.1e'):>10}"
            f"{number(r['entropy_error'], '.1e'):>10}{number(r['grad_error'], '.1e'):>10}"
            f"  {'yes' if r['bitwise'] else 'NO'}"
        )
    return "\n".join(lines)


def plot(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Seconds and extra memory of every way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    done = [r for r in rows if "value" in r][::-1]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 0.4 * len(done) + 1.2), sharey=True)
    names = [r["name"] for r in done]
    colours = ["tab:blue" if n.startswith("rlcore") else "tab:gray" for n in names]
    for axis, label, values in (
        (axes[0], "seconds, forward + backward", [r["value"] for r in done]),
        (axes[1], "peak extra memory, MB", [r["extra_bytes"] / 1e6 for r in done]),
    ):
        bars = axis.barh(names, values, color=colours)
        axis.bar_label(bars, fmt="%.3g", padding=2)
        axis.set_xlabel(label)
        axis.margins(x=0.15)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 when a way failed; 2 with a sentence for arguments that make no sense."""
    a = parse(argv)
    if a.child:
        torch.set_num_threads(a.threads)
        print(json.dumps(child(a, a.child)))
        return 0
    if bad := problem(a):
        print(bad, file=sys.stderr)
        return 2
    if a.device == "cuda":
        os.environ["RLCORE_NATIVE"] = "1"
    rows = []
    for way in a.peers:
        print(f"{way} ...", file=sys.stderr, flush=True)
        rows.append(measure(a, way))
    base = next((r for r in rows if r["name"] == "eager" and "value" in r), None)
    for r in rows:
        r["baseline"] = "eager"
        r["ratio"] = base["value"] / r["value"] if base and "value" in r else None
        r["cpu_ratio"] = base["cpu_s"] / r["cpu_s"] if base and "value" in r else None
    device = torch.cuda.get_device_name() if a.device == "cuda" else env._cpu_model()
    title = f"[{a.tokens}, {a.vocab}] {a.dtype}, {device}, {a.threads} threads"
    print(f"{title}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}\n{table(rows)}")
    if a.json:
        facts = {
            "command": "tools/bench_loss.py "
            + " ".join(argv if argv is not None else sys.argv[1:]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "shape": title,
            "host": platform.machine(),
            "torch": torch.__version__,
            "load": os.getloadavg()[0],
        }
        write_atomic(Path(a.json), json.dumps([r | facts for r in rows], indent=1) + "\n")
    if a.plot:
        plot(rows, Path(a.plot), title)
    return 1 if any("failed" in r for r in rows) else 0


def problem(a: argparse.Namespace) -> str:
    """What is wrong with the arguments, or ""."""
    for key, least in (("tokens", 2), ("vocab", 2), ("repeats", 1), ("threads", 1)):
        if getattr(a, key) < least:
            return f"--{key} {getattr(a, key)}: must be {least} or more"
    if not 0 < a.temperature < math.inf:
        return f"--temperature {a.temperature}: must be a finite number above 0"
    if a.device == "cuda" and not torch.cuda.is_available():
        return "--device cuda: this machine has no GPU; use --device cpu"
    return ""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tokens", type=int, default=2048, help="number of tokens")
    p.add_argument("--vocab", type=int, default=151936, help="vocabulary size")
    p.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="data type")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="torch device")
    p.add_argument("--temperature", type=float, default=1.0, help="sampling temperature")
    p.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads")
    p.add_argument("--repeats", type=int, default=5, help="number of repetitions")
    p.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    p.add_argument("--timeout", type=float, default=1800, help="seconds per implementation")
    p.add_argument(
        "--peers",
        nargs="+",
        choices=tuple(WAYS),
        default=list(WAYS),
        metavar="NAME",
        help="implementations to measure",
    )
    p.add_argument("--json", help="JSON file for the results")
    p.add_argument("--plot", help="PNG file")
    p.add_argument("--child", choices=tuple(WAYS), help=argparse.SUPPRESS)
    return p.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

"""FLOPs, bytes and seconds of every operation of an update, counted on the pretend device.

    python -m tests.pretend.costs recipes/grpo_32b.sh       # operations of a micro-batch's update
    python -m tests.pretend.costs --table > tools/results/gpu_costs.md

A roofline: an operation takes the longer of its FLOPs at a share of the peak and its bytes at a
share of the memory bandwidth. These shares (`RATES`) are measured (tools/results/gpu_speed.md). A
collective takes the bytes that a rank sends or receives at a share of its link. The pretend device
does not run kernels of rlcore, Triton and torch.compile. Stand-ins make tensors of the same shapes
and count one launch and the bytes that the kernel reads and writes.
"""

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from rlcore.sim.cost import CONSTANTS
from rlcore.utils.gpus import GPUS, Gpu
from tests import pretend
from tests.pretend import profile

RATES = {"product": 0.79, "FA2": 0.32, "FA4": 0.63, "memory": 0.69}
"""Shares of an H100's peak: matrix products of an update of 1.7B; FA2 and FA4 on a sequence of
32,768 tokens forward and backward; adding bf16 gradients to float32 ones."""
MEASURED = 1.16
"""Seconds that an H100 took over those counted: the mean of `VALIDATED`."""
VALIDATED = {
    "equal rows of 1,024 tokens": (36864, True, 0.80),
    "long-tailed rows, median 1,024": (32768, False, 1.10),
}
"""Tokens, whether rows are equal, and seconds of an update of 1.7B measured with FA2 by
tools/bench_learner.py."""

_NO_WORK = (
    *("empty", "new_empty", "empty_like", "empty_strided", "set_"),
    *("detach", "alias", "lift_fresh", "_unsafe_view", "_reshape_alias"),
)
_ONLY_WRITE = ("copy_", "zero_", "fill_")
_GATHER = ("embedding", "index", "index_select", "gather")


@dataclass(slots=True)
class Work:
    """Work of all operations of one name."""

    kind: str = ""
    launches: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0


class Counter(TorchDispatchMode):
    """Counts the operations on the device while it is entered."""

    def __init__(self, gpu: Gpu, attention: str = "FA4") -> None:
        super().__init__()
        self._gpu, self._attention = gpu, attention
        self._found: dict[str, Work] = defaultdict(Work)

    def taken(self) -> dict[str, dict[str, Any]]:
        """Return the work by name since the last call."""
        found = {name: asdict(work) for name, work in self._found.items()}
        self._found.clear()
        return found

    def add(self, name: str, flops: float, moved: float) -> None:
        """Count one launch."""
        is_attention = "varlen_attn" in name
        kind = "attention" if is_attention else "product" if flops else "other"
        rate = RATES[self._attention if is_attention else "product"]
        by_memory = moved / (RATES["memory"] * self._gpu.bandwidth_gbs * 1e9)
        self._add(
            name, kind, flops, moved, max(flops / (rate * self._gpu.tflops * 1e12), by_memory)
        )

    def _add(self, name: str, kind: str, flops: float, moved: float, seconds: float) -> None:
        work = self._found[name]
        work.kind = kind
        work.launches += 1
        work.flops += flops
        work.bytes += moved
        work.seconds += seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.rpartition("::")[2]
        if func.is_view or name in _NO_WORK or name.startswith("_local"):
            return out
        if func.namespace == "c10d":
            self._collective(name, [*args, *kwargs.values()])
        elif any(t.is_cuda for t in _tensors((args, list(kwargs.values()), out))):
            self.add(name, _flops(func, args, kwargs, out), _moved(func, name, args, kwargs, out))
        return out

    def _collective(self, name: str, given: Sequence[Any]) -> None:
        groups = [g for g in given if isinstance(g, torch.ScriptObject)]
        ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(groups[0]))
        if len(ranks) == 1:
            return
        is_near = len({rank // self._gpu.per_node for rank in ranks}) == 1
        moved = max(sum(t.nbytes for t in _tensors((value,))) for value in given)
        moved *= (2 if "allreduce" in name else 1) * (len(ranks) - 1) / len(ranks)
        link = self._gpu.link_gbs if is_near else self._gpu.network_gbs
        where = "in a node" if is_near else "across nodes"
        self._add(
            f"{name} {where}", "collective", 0.0, moved, moved / (CONSTANTS.link * link * 1e9)
        )


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    name = func._schema.name
    if name.endswith("varlen_attn_backward"):  # 2.5 times the FLOPs of forward
        return 2.5 * _attention(args[1], args[6], args[7])
    if name.endswith("varlen_attn"):
        return _attention(args[0], args[3], args[4])
    counted = flop_registry.get(func._overloadpacket)
    return 0.0 if counted is None else float(counted(*args, **kwargs, out_val=out))


def _attention(q: Tensor, cu_q: Tensor, cu_k: Tensor) -> float:
    """Return the FLOPs of attention forward; causal masks are aligned to the last key."""
    queries, keys = (cu.cpu().diff().double() for cu in (cu_q, cu_k))
    pairs = (queries * keys - queries * (queries - 1) / 2).sum()
    return 4 * float(pairs) * q.size(1) * q.size(2)


def _moved(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> float:
    """Return the bytes that an operation reads and writes. What is gathered from a larger tensor
    counts, not all of it."""
    schema, made = func._schema.arguments, _tensors((out,))
    given = [*zip(schema, args, strict=False)]
    given += [(a, kwargs[a.name]) for a in schema if a.name in kwargs]
    total, written = 0, set()
    for argument, value in given:
        for t in _tensors((value,)):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.add(t.data_ptr())
                is_read = name not in _ONLY_WRITE and not argument.kwarg_only
                total += _size(t) * (2 if is_read else 1)
            elif name not in _GATHER:
                total += _size(t)
            elif t.is_floating_point():
                total += sum(map(_size, made))
    return total + sum(_size(t) for t in made if t.data_ptr() not in written)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _size(t: Tensor) -> int:
    """Return the bytes of a tensor on the device; an expanded dimension counts once."""
    shape = [1 if s == 0 else n for n, s in zip(t.shape, t.stride(), strict=True)]
    return t.element_size() * torch.Size(shape).numel() if t.is_cuda else 0


# ---- stand-ins


@contextmanager
def stand_ins(counter: Counter) -> Iterator[None]:
    """Let rlcore's code for a GPU call stand-ins, in this process from now on."""
    from megatron.core.fusions import fused_bias_swiglu

    import rlcore.mcore
    from rlcore.mcore import compat, norm, rope
    from rlcore.ops import head, logprob

    def note(name: str, *moved: Tensor, flops: float = 0.0) -> None:
        counter.add(name, flops, sum(map(_size, moved)))

    def like(x: Tensor, *shape: int) -> Tensor:
        return torch.empty(shape or x.shape, dtype=x.dtype, device=x.device)

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, scales = like(x), torch.empty(x.numel() // x.size(-1), device=x.device)
        note("rms_norm", x, out, scales)
        return out, scales

    def rms_norm_back(grad: Tensor, x: Tensor, weight: Tensor, scales: Tensor) -> Any:
        dx = like(x)
        note("rms_norm_back", grad, x, scales, dx)
        return dx, like(weight)

    def turn(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
        out = like(x)
        note("rope", x, out, cos, sin)
        return out

    def add_weight_grads(x: Tensor, grad: Tensor, ends: Tensor, totals: Sequence[Tensor]) -> None:
        flops = 2.0 * x.size(0) * x.size(1) * grad.size(1)
        note("add_weight_grads", x, grad, *totals, *totals, flops=flops)

    def swiglu(x: Tensor) -> Tensor:
        out = like(x, *x.shape[:-1], x.size(-1) // 2)
        note("swiglu", x, out)
        return out

    def swiglu_back(grad: Tensor, x: Tensor) -> Tensor:
        out = like(x)
        note("swiglu_back", grad, x, out)
        return out

    def weighted_swiglu(x: Tensor, weights: Tensor) -> Tensor:
        return swiglu(x)

    def weighted_swiglu_back(grad: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return swiglu_back(grad, x), like(weights)

    def addmm(total: Tensor, a: Tensor, b: Tensor, **options: Any) -> Tensor:
        if "out_dtype" not in options:
            return plain(total, a, b, **options)
        note("addmm", total, total, a, b, flops=2.0 * a.size(0) * a.size(1) * b.size(1))
        return total

    def fp32_product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        note("mm", a, b, out, flops=2.0 * a.size(0) * a.size(1) * b.size(1))
        return out

    def row_stats(logits: Tensor, *_: Any) -> Tensor:
        note("row_stats", logits)
        return logits.new_empty((4, logits.size(0)), dtype=torch.float32)

    def row_grad(logits: Tensor, *given: Any) -> Tensor:
        note("row_grad", logits, logits)
        return given[-1]

    plain = torch.addmm
    torch.addmm = addmm
    profile.fp32_product = fp32_product
    kernels = ModuleType("rlcore.mcore.kernels")
    for function in (rms_norm, rms_norm_back, turn, add_weight_grads):
        setattr(kernels, function.__name__, function)
    rlcore.mcore.kernels = sys.modules["rlcore.mcore.kernels"] = kernels  # type: ignore[attr-defined]
    for module in (compat, norm, rope):
        module.takes_kernels = lambda x: x.is_cuda  # type: ignore[attr-defined]
    for function in (swiglu, swiglu_back, weighted_swiglu, weighted_swiglu_back):
        setattr(fused_bias_swiglu, function.__name__, function)  # torch.compile fuses them
    head.adds_products = lambda device, dtype: device.type == "cuda"  # type: ignore[assignment]
    logprob.row_stats, logprob.row_grad = row_stats, row_grad
    yield


# ---- figures


def measure(recipe: str, *keys: str, **options: Any) -> dict[str, Any]:
    """Return `profile.measure` with the work of each phase by name."""
    return profile.measure(recipe, *keys, module="tests.pretend.costs", **options)


def seconds(work: Mapping[str, Mapping[str, Any]], *kinds: str) -> float:
    """Return the seconds of all operations of these kinds; none: of all kinds."""
    return sum(w["seconds"] for w in work.values() if not kinds or w["kind"] in kinds)


def share(work: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the share of the peak FLOP/s that all operations but collectives reach together."""
    flops = sum(w["flops"] for w in work.values())
    return flops / seconds(work, "product", "attention", "other") / (GPUS["H100"].tflops * 1e12)


def arithmetic(work: Mapping[str, Mapping[str, Any]]) -> float:
    """Return what `Constants.arithmetic` should be by these counts."""
    return share(work) / MEASURED


def validate(tokens: int, equal: bool) -> dict[str, Any]:
    """Count the update of 1.7B that tools/bench_learner.py measures, with FA2."""
    env = pretend.environment("sizes", dict(os.environ))
    env |= {"RLCORE_PRETEND_CUDA_DEVICES": "1", "RLCORE_PRETEND_CUDA_BYTES": "200000000000"}
    given = json.dumps({"tokens": tokens, "equal": equal, "length": 1024, "seed": 0})
    command = [sys.executable, "-m", "tests.pretend.costs", "--validate", given]
    done = subprocess.run(
        command, cwd=pretend.ROOT, env=env, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def _validate(given: Mapping[str, Any]) -> None:
    from rlcore.mcore import bridge, learner
    from tools import bench_learner as bench

    counter = Counter(GPUS["H100"], "FA2")
    bridge.init_random = profile.zeroed
    learner.isfinite = lambda x: True
    hf = bench.config_of("1.7b")
    batch = bench.make_batch(Namespace(**given), hf)
    model = bench.ModelConfig(path="random", dtype="bfloat16", random_init=True)
    with stand_ins(counter), counter:
        made = bench.Ours.__new__(bench.Ours)
        made.learner = bench.MegatronLearner(
            hf, model, bench.TrainConfig(tokens_per_micro_batch=12288), device="cuda"
        )
        made._batch = batch
        made.update()
        counter.taken()
        made.update()
        print(json.dumps(counter.taken()))


CASES: dict[str, dict[str, Any]] = {
    "grpo_7b": {},
    "grpo_14b, last stage": {"rank": -1},
    "grpo_32b": {},
    "dapo_32b": {},
    "grpo_30b_a3b of 2 layers": {
        "keys": ("--model.num_layers", "2", "--model.random_init"),
        "computed": 1_200_000,
    },
}
FILE = pretend.ROOT / "tools" / "results" / "gpu_costs.json"
BEFORE = """before: of commit d8b3683 (2026-11-26), the last one before the learner's work was
fused, with FA2 and this file copied into a checkout of it; gradients in varying order, as now,
although its default was deterministic ones"""
TABLE = """# What an update costs

Counted on the pretend device at real sizes, on one rank of each recipe, for an H100: a roofline.
Nothing was computed or timed here. Made by `python -m tests.pretend.costs --table`, which explains
how it counts. Other = all that is neither matrix product, attention nor collective. Share: of the
peak FLOP/s without collectives, recomputation included.

"""


def table() -> str:
    """Return the figures of all cases as a page, and write them to `FILE`."""
    made = json.loads(FILE.read_text())
    made["after"] = {case: figures(case) for case in CASES}
    made["validated"] = {
        name: {"counted_s": seconds(validate(tokens, equal)), "measured_s": measured}
        for name, (tokens, equal, measured) in VALIDATED.items()
    }
    FILE.write_text(json.dumps(made, indent=1) + "\n")
    text = TABLE + "Counted and measured, an update of 1.7B (tools/results/gpu_speed.md):\n\n"
    rows = [
        [name, f"{v['counted_s']:.3f}", f"{v['measured_s']:.2f}"]
        + [f"{v['measured_s'] / v['counted_s']:.2f}"]
        for name, v in made["validated"].items()
    ]
    text += _rows(["batch", "counted s", "measured s", "ratio"], rows)
    for phase, title in (
        ("update_actor", "Update of a micro-batch"),
        ("old_log_prob", "Log-probs"),
    ):
        heads = ["recipe", "", "launches", "syncs", "products ms", "attention", "other"]
        heads += ["collectives", "sum", "share"]
        rows = []
        for case in CASES:
            for when in ("before", "after"):
                f = made[when][case][phase]
                parts = [1e3 * f[kind] for kind in ("product", "attention", "other", "collective")]
                cells = [f"{x:,.0f}" for x in (f["launches"], f["syncs"], *parts, sum(parts))]
                rows.append([case if when == "before" else "", when, *cells, f"{f['share']:.2f}"])
        text += f"\n{title};\n{BEFORE if phase == 'update_actor' else 'as above'}.\n\n"
        text += _rows(heads, rows)
    return text + STEP + _steps(made)


STEP = """
A step of grpo_32b on 64 H100s, simulated with the share that its update reaches by these counts,
divided by the mean ratio of the first table:

"""


def _steps(made: Mapping[str, Any]) -> str:
    """Return the seconds of simulated steps before and after, as a table."""
    from rlcore.cli import settings
    from rlcore.cli.dry_run import model_of
    from rlcore.sim import expect
    from rlcore.sim.cluster import simulate

    case, gpu, rows = "grpo_32b", GPUS["H100"], []
    argv = profile._arguments(f"recipes/{case}.sh")["argv"]
    cfg = settings.parse([a for a in argv if a != "--dry-run"])
    os.environ.setdefault("MODEL_CONFIG", str(pretend.ROOT / "recipes/models/qwen2_5_32b.json"))
    job, _ = expect.job(cfg, model_of(cfg.model.path)[0], 64, gpu, Path("none"))
    for when in ("before", "after"):
        reached = made[when][case]["update_actor"]["share"] / MEASURED
        job = replace(job, constants=replace(CONSTANTS, arithmetic=reached))
        found = simulate(job, expect.STEPS)
        parts = (found.phases[p] for p in ("gen", "old_log_prob", "update_actor"))
        cells = [when, f"{reached:.3f}", *(f"{s:.1f}" for s in (*parts, found.seconds))]
        rows.append([*cells, f"{expect.utilisation(job, found):.2f}"])
    heads = ["", "share", "gen s", "old_log_prob", "update_actor", "step", "MFU of the update"]
    return _rows(heads, rows)


def figures(case: str) -> dict[str, dict[str, float]]:
    """Return launches, host syncs and seconds by kind of a micro-batch, by phase."""
    options = dict(CASES[case])
    recipe = f"recipes/{case.replace(',', '').split()[0]}.sh"
    given = (recipe, *options.pop("keys", ()))
    counted, plain = measure(*given, **options), profile.measure(*given, **options)
    found = {}
    for phase in ("old_log_prob", "update_actor"):
        work, count = counted["phases"][phase]["work"], counted["micro_batches"]
        found[phase] = {
            "launches": sum(w["launches"] for w in work.values()) / count,
            "syncs": plain["phases"][phase]["syncs"] / count,
            "peak": plain["phases"][phase]["peak"],
            "share": share(work),
        } | {k: seconds(work, k) / count for k in ("product", "attention", "other", "collective")}
    return found


def _rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _print(recipe: str, *keys: str) -> None:
    work = measure(recipe, *keys)["phases"]["update_actor"]["work"]
    for name, w in sorted(work.items(), key=lambda item: -item[1]["seconds"]):
        figures = f"{w['launches']:6d} {w['flops']:9.3g} {w['bytes'] / 1e9:8.2f}"
        print(f"{name:46} {figures} GB {1e3 * w['seconds']:8.2f} ms")
    print(f"{1e3 * seconds(work):.1f} ms; share of the peak without collectives {share(work):.3f}")


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        profile.Phases.counter = Counter(GPUS["H100"])
        with stand_ins(profile.Phases.counter), profile.Phases.counter:
            profile.main(sys.argv[1:])
    elif sys.argv[1] == "--validate":
        _validate(json.loads(sys.argv[2]))
    elif sys.argv[1] == "--table":
        print(table())
    else:
        _print(*sys.argv[1:])

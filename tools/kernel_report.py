"""Count from their machine code what the CUDA kernels need, and what that makes on an H100.

    python tools/kernel_report.py                                    # the tables
    python tools/kernel_report.py --markdown tools/results/kernel_report.md --json FILE
    python tools/kernel_report.py --csrc OTHER_CHECKOUT/csrc         # of another state

Needs nvcc, cuobjdump and nvdisasm, but no GPU: every figure is counted or derived, none measured.
All kernels of all .cu files are compiled for --arch; the tables show the types that runs use.

    registers, shared, spilled  bytes but for registers, from `cuobjdump -res-usage`
    blocks, warps               resident on a multiprocessor, as registers allow; at most 64 warps
    instructions                per element, in the loops that move most bytes; all branches of a
                                loop count, so it is an upper bound. Of the ways that a copy can
                                take it is the shortest
    GB/s                        bytes of the bucket, the least of three and its name: memory (every
                                byte once, at the data sheet's bandwidth), issue (4 instructions of
                                warps per cycle and multiprocessor), wait (resident warps that wait
                                for their loads)
    passes                      bytes moved, in units of the logits; `least` is the minimum
    double exp2, looped         in the code, and how many of them in loops
    flat us                     of one warp, outside of the loops over a row, at most: stall counts
                                and barriers that the compiler wrote into the instructions, and
                                assumed latencies (LATENCY) of loads and the like
    ns/token                    the largest of four times and its name: memory, issue, exp (16 per
                                cycle and multiprocessor), wait (flat time and the latency of a
                                row's loads, divided by all resident blocks)
"""

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.utils.gpus import GPUS  # noqa: E402

GPU = GPUS["H100"]
PROCESSORS = 132
L2_BYTES = 50 << 20
REGISTERS, MAX_WARPS, WARP = 65536, 64, 32
CLOCK_GHZ = GPU.tflops / (PROCESSORS * 4.096)
"""The clock that the data sheet's TFLOP/s go with: 4,096 per cycle and multiprocessor."""
VOCAB = 152_064
TENSOR_PARALLEL = (1, 4, 8)

LATENCY = {
    "LDG": 1280,  # .7 us of memory under load
    "LD": 1280,
    "LDS": 29,
    "LDC": 29,
    "S2R": 29,
    "S2UR": 29,
    "SHFL": 24,
    "MUFU": 24,
    "F2F": 16,
    "F2I": 16,
    "I2F": 16,
}
"""Assumed cycles of instructions without a fixed latency; others count as 8."""
SIZES = {
    **{"Bf16": 2, "Fp16": 2, "BFloat16": 2, "Float16": 2, "uint16_t": 2},
    **{"float": 4, "uint32_t": 4, "double": 8, "uint64_t": 8},
    **{"uint8_t": 1, "Raw16": 16},
}
"""Bytes of element types."""
SPELLINGS = {
    "(anonymous namespace)::": "",
    "(bool)1": "true",
    "(bool)0": "false",
    "unsigned char": "uint8_t",
    "unsigned short": "uint16_t",
    "unsigned int": "uint32_t",
    "unsigned long": "uint64_t",
}
"""Parts of names, as c++filt writes them and as they are shown."""


@dataclass(frozen=True, slots=True)
class Instruction:
    at: int
    """Address."""
    text: str
    """Opcode and operands, with the predicate in front."""
    stall: int
    """Cycles until the next instruction of the warp."""
    waits: int
    """Bits of the barriers that must be free before."""
    sets: int
    """Barrier that becomes free with the result; 7: none."""

    @property
    def opcode(self) -> str:
        """The opcode with its suffixes: LDG.E.128."""
        words = self.text.split()
        return words[1 if words[0].startswith("@") else 0]

    @property
    def target(self) -> int | None:
        """Where a branch goes."""
        found = re.search(r"\bBRA\b.* (0x[0-9a-f]+)$", self.text)
        return int(found.group(1), 16) if found else None


Code = list[Instruction]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel's resources and code."""

    name: str
    """Demangled, without namespaces: copy_kernel<true, float, BFloat16>."""
    registers: int
    shared: int
    spilled: int
    code: Code = field(repr=False)

    @property
    def types(self) -> list[str]:
        """Element types, the template's arguments."""
        return [x for x in re.split(r"[<>,] ?", self.name) if x in SIZES]


def instructions(sass: str) -> Code:
    """Parse the lines of one function: text and a word of 64 bits, then the word above it."""
    found: Code = []
    lines = sass.splitlines()
    for line, after in zip(lines, lines[1:], strict=False):
        match = re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s+/\* 0x[0-9a-f]{16} \*/", line)
        high = re.match(r"\s+/\* (0x[0-9a-f]{16}) \*/", after)
        if match and high:
            bits = int(high.group(1), 16)
            stall, sets, waits = bits >> 41 & 15, bits >> 46 & 7, bits >> 52 & 63
            found.append(Instruction(int(match.group(1), 16), match.group(2), stall, waits, sets))
    while found and found[-1].opcode in ("NOP", "BRA"):  # padding and the trap in front of it
        found.pop()
    return found


def short(name: str) -> str:
    """A demangled signature without namespaces and parameters."""
    for old, new in SPELLINGS.items():
        name = name.replace(old, new)
    name = name.removeprefix("void ")
    depth = 0
    for i, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            name = name[:i]
            break
    return re.sub(r"\w+::", "", name)


def parse(usage: str, sass: str, names: dict[str, str]) -> list[Kernel]:
    """Parse what `cuobjdump -res-usage` and `-sass` print of a cubin; `names` demangles."""
    resources = {
        match.group(1): {key: int(n) for key, n in re.findall(r"(\w+):(\d+)", match.group(2))}
        for match in re.finditer(r"Function (\S+):\s+(REG:.*)", usage)
    }
    kernels = []
    for part in re.split(r"\n\s+Function : ", sass)[1:]:
        mangled, _, body = part.partition("\n")
        r = resources[mangled.strip()]
        name = short(names[mangled.strip()])
        kernels.append(Kernel(name, r["REG"], r["SHARED"], r["LOCAL"], instructions(body)))
    return kernels


def loops(code: Code) -> list[Code]:
    """Innermost loops: from the target of a branch backwards to the branch."""
    spans = [(x.target, x.at) for x in code if x.target is not None and x.target < x.at]
    inner = [
        (a, b)
        for a, b in spans
        if not any((c, d) != (a, b) and a <= c and d <= b for c, d in spans)
    ]
    return [[x for x in code if a <= x.at <= b] for a, b in inner]


def moved(code: Code) -> tuple[int, int]:
    """Bytes that a thread loads and stores in global memory, each instruction once."""
    totals = [0, 0]
    for x in code:
        if match := re.match(r"(LDG?|STG?)\.E(?:\.\w+)*", x.opcode):
            width = re.search(r"\.(?:U|S)?(8|16|32|64|128)\b", x.opcode)
            totals[match.group(1)[0] == "S"] += int(width.group(1)) // 8 if width else 4
    return totals[0], totals[1]


def row_loops(code: Code) -> tuple[list[Code], list[Code]]:
    """Loops over whole vectors of a row, those with most bytes per iteration; other innermost
    loops that move bytes."""
    moving = [(max(moved(loop)), loop) for loop in loops(code) if any(moved(loop))]
    most = max((size for size, _ in moving), default=0)
    main = [loop for size, loop in moving if size == most]
    return main, [loop for size, loop in moving if size < most]


def is_exp2(x: Instruction) -> bool:
    """Whether a double exp2 begins here: it rounds by adding 1.5 * 2^52."""
    return x.opcode == "DADD" and re.search(r", 6\.7553994\d+e\+15", x.text) is not None


def cycles(code: Code, trips: dict[int, int]) -> int:
    """Cycles of one warp that runs `code` in its order; a loop that starts at a key of `trips` is
    run so many times. Loads are back after a gap in the code, where a loop over a row was."""
    last = 0

    def run(part: Code, now: int, free: list[int]) -> int:
        nonlocal last
        for x in part:
            if x.at > last + 16:
                free[:] = [now] * 6
            last = x.at
            now = max([now, *(free[b] for b in range(6) if x.waits >> b & 1)])
            if x.sets < 6:
                free[x.sets] = now + LATENCY.get(x.opcode.split(".")[0], 8)
            now += max(x.stall, 1)
        return now

    now, free, at = 0, [0] * 6, 0
    ends = {loop[0].at: loop for loop in loops(code) if loop[0].at in trips}
    while at < len(code):
        loop = ends.get(code[at].at)
        part = loop or code[at : at + 1]
        for _ in range(trips[part[0].at] if loop else 1):
            now = run(part, now, free)
        at += len(part)
    return now


def flat_cycles(code: Code, warps: int) -> int:
    """Cycles outside of the loops over a row, of one warp: reductions over the warps of a block,
    and what follows them. Subroutines behind the last EXIT are slow paths."""
    exits = [i for i, x in enumerate(code) if x.opcode == "EXIT"]
    code = code[: exits[-1] + 1] if exits else code
    main, others = row_loops(code)
    away = {x.at for loop in (*main, *others) for x in loop}
    rest = [x for x in code if x.at not in away]
    trips = {}
    for loop in loops(rest):
        reads = sum(x.opcode.startswith("LDS") for x in loop)
        if any(x.opcode.startswith("SHFL") for x in loop):
            trips[loop[0].at] = 5  # lanes of a warp
        elif reads:
            trips[loop[0].at] = -(-(warps - 1) // reads)
    return cycles(rest, trips)


# ---- launches: csrc/loss/launch.h


@dataclass(frozen=True, slots=True)
class Launch:
    threads: int
    blocks: int
    """Resident on the whole GPU."""


def resident(kernel: Kernel, threads: int) -> int:
    """Blocks on a multiprocessor, as registers allow."""
    registers = -(-kernel.registers // 8) * 8 * WARP
    return min(MAX_WARPS, REGISTERS // registers) // (threads // WARP)


def rows_in_flight(width: int, item: int) -> Launch:
    """`rows_grid` of csrc/loss/launch.h for many rows."""
    fit = L2_BYTES // 5 * 4 // (width * item)
    for threads in (64 if width <= 8192 else 256, 256, 384, 768):
        if PROCESSORS * (768 // threads) <= fit:
            return Launch(threads, PROCESSORS * (768 // threads))
    return Launch(768, fit if 4 * fit >= PROCESSORS else PROCESSORS)


def launch(kernel: Kernel, width: int) -> Launch:
    """How a kernel of the loss is launched on many rows."""
    if kernel.name.startswith("rows_kernel") and kernel.types != ["double"]:
        return rows_in_flight(width, SIZES[kernel.types[0]])
    threads = 64 if width <= 8192 else 256
    return Launch(threads, resident(kernel, threads) * PROCESSORS)


def missed(
    blocks: int, row_bytes: int, l2_bytes: int, streamed: bool = True, parts: int = 64
) -> float:
    """Share of second reads that come from memory: `blocks` read a row, then read and write it,
    each in a phase of its own, through a least-recently-used L2. `streamed` lines leave first."""
    random = Random(0)
    room = l2_bytes * parts // row_bytes
    steps = [random.randrange(2 * parts) for _ in range(blocks)]
    cache: OrderedDict[tuple[int, int, int], None] = OrderedDict()
    reads = misses = 0
    for _ in range(8 * parts):
        for block in random.sample(range(blocks), blocks):
            row, part = divmod(steps[block], 2 * parts)
            steps[block] += 1
            key = (block, row, part % parts)
            if part >= parts and row:
                reads += 1
                misses += key not in cache
            cache[key] = None
            cache.move_to_end(key, last=not (streamed and part >= parts))
            if len(cache) > room:
                cache.popitem(last=False)
    return misses / reads


# ---- times


LEAST = {"stats": 1, "grad": 2, "rows": 2}
"""Passes over the logits that a kernel of the loss needs: the last two read and write them."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Nanoseconds of a row, were each the only bound."""

    memory: float
    issue: float
    exp: float
    wait: float

    @property
    def most(self) -> tuple[float, str]:
        """The largest, and its name."""
        return max((value, name) for name, value in asdict(self).items())


def element_loops(kernel: Kernel) -> list[tuple[Code, int]]:
    """Loops that a kernel's elements go through, with the bytes of the logits or the bucket per
    iteration: all passes of a row, the shortest way of a copy."""
    is_copy = kernel.name.startswith("copy")
    found = []
    for loop in loops(kernel.code) if is_copy else row_loops(kernel.code)[0]:
        loaded, stored = moved(loop)
        if loaded and (stored or not is_copy):
            found.append((loop, stored if "<true" in kernel.name else loaded))
    return [min(found, key=lambda x: len(x[0]) / x[1])] if is_copy else found


def per_element(kernel: Kernel, opcode: str = "") -> float:
    """Instructions per element that begin with `opcode`."""
    size = SIZES[kernel.types[0]] if kernel.types else 8
    return sum(
        sum(x.opcode.startswith(opcode) for x in loop) * size / count
        for loop, count in element_loops(kernel)
    )


def rate(kernel: Kernel, threads: int) -> tuple[float, str]:
    """GB/s of a bucket's bytes that a copy or a sum may reach, and what bounds it."""
    sizes = [SIZES[kind] for kind in kernel.types] or [8]
    ((loop, count),) = element_loops(kernel)
    lanes = PROCESSORS * CLOCK_GHZ
    return min(
        (GPU.bandwidth_gbs * sizes[0] / sum(sizes), "memory"),
        (count / len(loop) * WARP * 4 * lanes, "issue"),
        (count / cycles(loop, {}) * threads * resident(kernel, threads) * lanes, "wait"),
    )


def passes(kernel: Kernel, width: int) -> float:
    """Passes over memory, with second reads that miss L2."""
    least = LEAST[kernel.name.split("_")[0]]
    if not kernel.name.startswith("rows_kernel"):
        return least
    size = SIZES[kernel.types[0]]
    return least + missed(launch(kernel, width).blocks, width * size, L2_BYTES)


def cost(kernel: Kernel, width: int) -> Cost:
    """Times of a row of `width` elements."""
    size, shape = SIZES[kernel.types[0]], launch(kernel, width)
    flat = flat_cycles(kernel.code, shape.threads // WARP)
    main, _ = row_loops(kernel.code)
    rounds = 0
    for loop in main:
        vectors, flight = width * size // 16, max(moved(loop)) // 16
        whole = vectors // (shape.threads * flight)
        rounds += whole + -(-(vectors - whole * shape.threads * flight) // shape.threads)
    lanes = PROCESSORS * CLOCK_GHZ
    return Cost(
        memory=passes(kernel, width) * width * size / GPU.bandwidth_gbs,
        issue=per_element(kernel) * width / WARP / 4 / lanes,
        exp=per_element(kernel, "MUFU") * width / 16 / lanes,
        wait=(flat + rounds * LATENCY["LDG"]) / CLOCK_GHZ / shape.blocks,
    )


# ---- tools


TOOLS = ("nvcc", "cuobjdump", "nvdisasm")


def find(tool: str) -> str | None:
    """Path of a tool of CUDA: on PATH, in CUDA_HOME, or from a wheel of this environment."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    wheel = Path(sysconfig.get_paths()["purelib"]) / "nvidia/cu13"
    folders = [f"{home}/bin" for home in (*homes, "/usr/local/cuda", wheel) if home]
    return shutil.which(tool) or shutil.which(tool, path=os.pathsep.join(folders))


def output(*command: str | Path) -> str:
    """What a program prints; its errors end this one. cuobjdump looks for nvdisasm on PATH."""
    path = os.pathsep.join((os.environ["PATH"], str(Path(find("nvdisasm") or ".").parent)))
    environment = os.environ | {"PATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: {(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def kernels_of(source: Path, csrc: Path, arch: str) -> list[Kernel]:
    """Compile a .cu file and parse its kernels."""
    nvcc, cuobjdump = find("nvcc") or "nvcc", find("cuobjdump") or "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "out.cubin"
        flags = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-cubin", f"-I{csrc}"]
        output(nvcc, *flags, f"-gencode=arch=compute_{arch},code=sm_{arch}", source, "-o", cubin)
        usage, sass = output(cuobjdump, "-res-usage", cubin), output(cuobjdump, "-sass", cubin)
    mangled = re.findall(r"Function (\S+):", usage)
    demangled = output("c++filt", *mangled).splitlines()
    return parse(usage, sass, dict(zip(mangled, demangled, strict=True)))


# ---- tables


SHOWN = (
    *(f"{name}_kernel<{kind}>" for name in LEAST for kind in ("Bf16", "float")),
    "tokens_kernel<float>",
    "step_kernel",
    "sum_kernel",
    "copy_kernel<true, uint16_t, uint16_t>",
    "copy_kernel<false, uint16_t, uint16_t>",
    "copy_kernel<true, BFloat16, float>",
    "copy_kernel<false, BFloat16, float>",
)
"""Kernels in the tables; copies: true packs, bucket's type first."""
THREADS = {"tokens": 256, "step": 32, "sum": 256, "copy": 256}
"""Threads of a block of kernels that do not work on rows."""


def rows_of(kernels: Sequence[Kernel]) -> Iterator[dict[str, Any]]:
    """A row for every kernel."""
    for kernel in kernels:
        kind = kernel.name.split("_")[0]
        on_rows = kind in LEAST
        threads = launch(kernel, VOCAB).threads if on_rows else THREADS.get(kind, WARP)
        blocks = min(32, resident(kernel, threads))
        inner = [x.at for loop in loops(kernel.code) for x in loop]
        exp2 = [x.at for x in kernel.code if is_exp2(x)]
        row: dict[str, Any] = {
            "kernel": kernel.name,
            "registers": kernel.registers,
            "shared": kernel.shared,
            "spilled": kernel.spilled,
            "threads": threads,
            "blocks": blocks,
            "warps": blocks * threads // WARP,
            "instructions": None,
            "rate": None,
            "double_exp2": len(exp2),
            "double_exp2_in_loops": sum(at in inner for at in exp2),
        }
        if on_rows or kind in ("sum", "copy"):
            row["instructions"] = per_element(kernel)
        if kind in ("sum", "copy"):
            row["rate"] = rate(kernel, threads)
        if on_rows:
            row["flat_us"] = flat_cycles(kernel.code, threads // WARP) / CLOCK_GHZ / 1e3
            row["passes"], row["least"] = passes(kernel, VOCAB), LEAST[kind]
            for tp in (1,) if kind == "rows" else TENSOR_PARALLEL:
                row[f"tp{tp}"] = asdict(cost(kernel, VOCAB // tp))
        yield row


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """The tables of the shown kernels, in Markdown."""
    shown = {row["kernel"]: row for row in rows}
    chosen = [shown[name] for name in SHOWN if name in shown]
    lines = [
        "| kernel | registers | shared | spilled | threads | blocks | warps | instructions "
        "| GB/s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in chosen:
        names = ("registers", "shared", "spilled", "threads", "blocks", "warps")
        cells = [f"`{r['kernel']}`", *(str(r[name]) for name in names)]
        cells.append("-" if r["instructions"] is None else f"{r['instructions']:.1f}")
        cells.append("{:,.0f} {}".format(*r["rate"]) if r["rate"] else "-")
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"Rows of {VOCAB:,} over tensor parallelism of 1, 4 and 8, ns/token and what bounds it:",
        "",
        "| kernel | passes | least | double exp2 | looped | flat us | TP 1 | TP 4 | TP 8 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in chosen:
        if "passes" not in r:
            continue
        times = [
            "{:.1f} {}".format(*Cost(**r[f"tp{tp}"]).most) if f"tp{tp}" in r else "-"
            for tp in TENSOR_PARALLEL
        ]
        lines.append(
            f"| `{r['kernel']}` | {r['passes']:.2f} | {r['least']} | {r['double_exp2']} | "
            f"{r['double_exp2_in_loops']} | {r['flat_us']:.1f} | {' | '.join(times)} |"
        )
    lines += [
        "",
        f"Second reads of `rows_kernel` from memory, rows of {VOCAB:,} in bf16, L2 of 50 and of 25 "
        "MiB\n(if a line is in both halves), and with gradients that do not leave L2 first:",
        "",
        "| rows in flight | MB | 50 MiB | 25 MiB | 25 MiB, not first |",
        "| --- | --- | --- | --- | --- |",
    ]
    for blocks in (396, 264, 132):
        shares = [
            f"{missed(blocks, 2 * VOCAB, size << 20, streamed):.2f}"
            for size, streamed in ((50, True), (25, True), (25, False))
        ]
        lines.append(f"| {blocks} | {blocks * 2 * VOCAB / 1e6:.0f} | {' | '.join(shares)} |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--csrc", type=Path, default=ROOT / "csrc", help="folder of the sources")
    p.add_argument("--arch", default="90a", help="architecture, as nvcc names it")
    p.add_argument("--json", type=Path, help="file for the rows of all kernels")
    p.add_argument("--markdown", type=Path, help="file for the page")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    a = parser().parse_args(argv)
    for tool in TOOLS:
        if find(tool) is None:
            raise SystemExit(f"{tool}: not found; pip install nvidia-cuda-{tool}, or set CUDA_HOME")
    sources = sorted(a.csrc.rglob("*.cu"))
    if not sources:
        raise SystemExit(f"--csrc {a.csrc}: no .cu file below it")
    kernels = [kernel for source in sources for kernel in kernels_of(source, a.csrc, a.arch)]
    rows = list(rows_of(kernels))
    text = tables(rows)
    print(text)
    release = re.findall(r"release (\S+),", output(find("nvcc") or "nvcc", "--version"))[0]
    facts = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "arch": f"sm_{a.arch}",
        "nvcc": release,
    }
    if a.json:
        write_atomic(a.json, json.dumps({**facts, "kernels": rows}, indent=1) + "\n")
    if a.markdown:
        page = f"""# What the kernels need, by their machine code

{facts["date"]}, nvcc {release}, {facts["arch"]}:
`python tools/kernel_report.py --markdown tools/results/kernel_report.md`.

Counted, and derived for an H100 ({PROCESSORS} multiprocessors, {CLOCK_GHZ:.2f} GHz, \
{GPU.bandwidth_gbs / 1000} TB/s, 50 MiB of L2).
Nothing is measured. All {len(rows)} kernels together spill \
{sum(row["spilled"] for row in rows)} bytes; none has more than \
{max(row["registers"] for row in rows)} registers.

{text}

The columns:

{__doc__.split(chr(10) * 2)[-1].rstrip()}
"""
        write_atomic(a.markdown, page)


if __name__ == "__main__":
    main()

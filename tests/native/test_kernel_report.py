"""The report of tools/kernel_report.py: its parser on a real listing, its model worked by hand,
and, where nvcc is, what the loss's kernels must keep."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.native import host

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools/kernel_report.py"
spec = importlib.util.spec_from_file_location(TOOL.stem, TOOL)
assert spec and spec.loader
report: Any = importlib.util.module_from_spec(spec)
sys.modules[TOOL.stem] = report
spec.loader.exec_module(report)

pytestmark = pytest.mark.native

USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function _Z5smallPK5uint4PS_i:
  REG:19 STACK:0 SHARED:1152 LOCAL:0 CONSTANT[0]:548 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
SASS = (Path(__file__).parent / "corpus/report/small.sass").read_text()
"""What `cuobjdump -sass` prints of corpus/report/small.cu."""


@pytest.fixture(scope="module")
def small() -> Any:
    [kernel] = report.parse(
        USAGE, SASS, {"_Z5smallPK5uint4PS_i": "small(uint4 const*, uint4*, int)"}
    )
    return kernel


def test_a_listing_is_parsed(small) -> None:
    assert (small.name, small.registers, small.shared, small.spilled) == ("small", 19, 1152, 0)
    assert small.code[0].text == "LDC R1, c[0x0][0x28]"
    assert small.code[-1].opcode == "EXIT"  # not the padding behind it
    load = next(x for x in small.code if x.opcode == "LDG.E.128")
    assert (load.at, load.stall, load.sets, load.waits) == (0x150, 4, 2, 0b1)
    dependent = next(x for x in small.code if x.opcode == "DMUL")
    assert (dependent.at, dependent.stall, dependent.sets) == (0x3C0, 1, 7)


def test_loops_and_the_bytes_that_they_move(small) -> None:
    assert [(x[0].at, x[-1].at) for x in report.loops(small.code)] == [
        (0x130, 0x220),
        (0x250, 0x2C0),
    ]
    (over_vectors,), others = report.row_loops(small.code)
    assert report.moved(over_vectors) == (16 + 4, 16) and others == []
    assert sum(map(report.is_exp2, small.code)) == 1


def test_names_are_short() -> None:
    name = (
        "void rlcore::loss::(anonymous namespace)::rows_kernel<rlcore::loss::Bf16>(rlcore::Params)"
    )
    assert report.short(name) == "rows_kernel<Bf16>"
    name = "void (anonymous namespace)::copy_kernel<(bool)1, unsigned short, float>(a::Job, long)"
    assert report.short(name) == "copy_kernel<true, uint16_t, float>"


def code(*lines: tuple[str, int, int, int]) -> list[Any]:
    return [report.Instruction(16 * i, *line) for i, line in enumerate(lines)]


def test_a_loop_with_a_loop_in_it_is_not_innermost() -> None:
    nested = code(*[("NOP", 1, 0, 7)] * 3, ("@P0 BRA 0x20", 5, 0, 7), ("BRA 0x10", 5, 0, 7))
    assert [(x[0].at, x[-1].at) for x in report.loops(nested)] == [(0x20, 0x30)]


def test_cycles_worked_by_hand() -> None:
    """Barrier 1 is free 24 cycles after the shuffle; a loop of 3 + 5 cycles runs five times."""
    straight = code(("SHFL.BFLY R1", 1, 0, 1), ("IADD3 R2", 4, 0, 7), ("FADD R1", 5, 0b10, 7))
    assert report.cycles(straight, {}) == 24 + 5
    loop = code(("MOV R1", 2, 0, 7), ("IADD3 R1", 3, 0, 7), ("@P0 BRA 0x10", 5, 0, 7))
    assert report.cycles(loop, {}) == 2 + 3 + 5
    assert report.cycles(loop, {0x10: 5}) == 2 + 5 * (3 + 5)


def test_loads_are_back_after_a_loop_over_a_row() -> None:
    load, use = code(("LDG.E R1", 2, 0, 0), ("FADD R1", 4, 0b1, 7))
    assert report.cycles([load, use], {}) == 1280 + 4
    later = report.Instruction(1600, use.text, use.stall, use.waits, use.sets)
    assert report.cycles([load, later], {}) == 2 + 4


@pytest.mark.parametrize(
    "blocks, l2, streamed, expected",
    [
        (1, 100, False, 0),
        (1, 99, False, 1),
        (2, 205, False, 0),
        (2, 95, False, 1),
        (2, 60, True, 1),
        (2, 150, True, 0),
    ],
)
def test_rows_that_fit_in_l2_are_read_once(blocks, l2, streamed, expected) -> None:
    """A row of 100 bytes. Least recently used in order: what does not fit misses all along."""
    assert report.missed(blocks, 100, l2, streamed, parts=100) == expected


def test_the_grids_are_those_of_the_launcher(tmp_path: Path) -> None:
    """`rows_grid` of csrc/loss/launch.h, compiled."""
    cases = [(width, item) for item in (2, 4) for width in (5, 8192, 32000, 65536, 152064, 1 << 22)]
    calls = "".join(f"show({width}, {item});" for width, item in cases)
    source = tmp_path / "grids.cpp"
    source.write_text(f"""
#include <cstdio>
#include "loss/launch.h"
void show(int64_t width, int64_t item) {{
  const auto grid = rlcore::loss::rows_grid(1000000, width, width * item, {report.PROCESSORS},
                                            {report.L2_BYTES});
  std::printf("%d %d\\n", grid.threads, static_cast<int>(grid.blocks));
}}
int main() {{ {calls} }}
""")
    said = host.run(host.build(tmp_path, [str(source)], f"-O0 {host.STRICT}"))
    grids = [report.rows_in_flight(width, item) for width, item in cases]
    assert said.splitlines() == [f"{x.threads} {x.blocks}" for x in grids]


@pytest.fixture(scope="module")
def kernels() -> dict[str, Any]:
    """The loss's kernels, compiled for an H100."""
    for tool in report.TOOLS:
        host.cuda_tool(tool, report.find(tool))
    found = report.kernels_of(ROOT / "csrc/loss/row.cu", ROOT / "csrc", "90a")
    return {kernel.name: kernel for kernel in found}


def test_a_thread_calls_double_exp2_once_in_a_reduction(kernels: dict[str, Any]) -> None:
    """Once to move its sums, once in `finish`; in a merge it would be in a loop."""
    code = kernels["stats_kernel<Bf16>"].code
    in_loops = {x.at for loop in report.loops(code) for x in loop}
    calls = [x.at for x in code if report.is_exp2(x)]
    assert len(calls) == 2 and not in_loops & set(calls)
    assert report.flat_cycles(code, 8) < 4500  # 9,105 with double exp2 in every merge


def test_the_statistics_of_a_shard_of_an_eighth_are_near_the_bound_of_memory(kernels) -> None:
    cost = report.cost(kernels["stats_kernel<Bf16>"], report.VOCAB // 8)
    assert cost.memory == pytest.approx(report.VOCAB / 8 * 2 / 3350)
    assert cost.most[0] < 1.2 * cost.memory  # 1.7 with double exp2 in every merge


@pytest.mark.parametrize("kind", ["Bf16", "Fp16", "float"])
def test_policy_rows_reads_memory_once(kernels: dict[str, Any], kind: str) -> None:
    kernel = kernels[f"rows_kernel<{kind}>"]
    assert report.passes(kernel, report.VOCAB) == report.LEAST["rows"]
    stores = [x.opcode for x in kernel.code if x.opcode.startswith("STG") and "128" in x.opcode]
    assert stores and all(".EF" in store for store in stores)  # evicted first
    threads = report.launch(kernel, report.VOCAB).threads
    assert report.resident(kernel, threads) * threads == 768  # as csrc/loss/launch.h says


@pytest.mark.parametrize(("kind", "most"), [("stats", 8.5), ("grad", 8), ("rows", 16.5)])
def test_instructions_per_element_stay_few(kernels: dict[str, Any], kind: str, most: float) -> None:
    """At 8 an H100 needs 40 of the 91 ns that memory takes for a pass."""
    assert most - 1 < report.per_element(kernels[f"{kind}_kernel<Bf16>"]) < most


def test_the_tables_have_every_kernel_of_the_loss(kernels: dict[str, Any]) -> None:
    rows = list(report.rows_of(list(kernels.values())))
    assert {row["kernel"] for row in rows} == set(kernels)
    assert not any(row["spilled"] for row in rows)
    text = report.tables(rows)
    assert all(f"`{name}`" in text for name in report.SHOWN if name in kernels)

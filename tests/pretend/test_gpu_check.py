"""tools/gpu_check.sh from end to end on the pretend device."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import kit, pretend

pytestmark = [pytest.mark.ranks(1), pytest.mark.native, pytest.mark.timeout(2400)]

FEWER = "not moe and not deepseek and not llama and not mistral"
FEWER += " and not float32-True and not bfloat16-False"
"""Not every variant of a step: others run in test_device.py, with the mark `slow`."""
SKIPPED = {"native_build", "addmm", "grpo_sglang"}
"""Steps of kernels, CUDA graphs and SGLang, which the pretend device does not have."""
SOME = ("save", "drafts")
"""What CI runs; all steps take five minutes."""


def steps_of_the_file() -> list[str]:
    lines = (kit.ROOT / "tools" / "gpu_steps.txt").read_text().splitlines()
    return [line for line in lines if line and line[0] not in "# "]


@pytest.mark.parametrize("only", [SOME, pytest.param((), marks=pytest.mark.slow)], ids=str)
def test_every_step_passes_that_needs_no_kernel(only: tuple[str, ...], tmp_path: Path) -> None:
    env = pretend.environment() | {
        "PYTHON": sys.executable,
        # the kernels of the CPU
        "PYTEST_ADDOPTS": f"-p tests.pretend.native --timeout 1200 -k '{FEWER}'",
        "REPORT": str(tmp_path),
        "JOBS": "2",
        "LIMIT_S": "2000",
        "TOTAL_S": "2000",
    }
    done = subprocess.run(
        ["bash", kit.ROOT / "tools" / "gpu_check.sh", *(("--only", *only) if only else ())],
        env=env,
        cwd=kit.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2300,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    report = (tmp_path / "report.txt").read_text()
    _, _, table = report.partition("\nresult ")
    rows = [line.split()[:2] for line in table.splitlines()[1:] if not line.startswith(" ")]
    found = {step: verdict for verdict, step in filter(None, rows)}
    steps = ("native_build", *only) if only else steps_of_the_file()
    assert found == {step: "SKIP" if step in SKIPPED else "PASS" for step in steps}, report
    assert only or ("seconds of step 5" in report and ", planned " in report)

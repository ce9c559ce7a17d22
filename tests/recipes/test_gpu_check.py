"""tools/gpu_check.sh: in a stand-in checkout whose `torch` reports a GPU, and here on the CPU.

Not covered: the build by nvcc, the real compute-sanitizer and the tests that need a GPU.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.ops import native
from tests import kit

ROOT = kit.ROOT

TORCH = """
import os
__version__ = "2.11.0+cu130"
class cuda:
    is_available = lambda: "NO_GPU" not in os.environ
    get_device_name = lambda index: "Stand-in H100"
    get_device_capability = lambda index: (9, 0)
"""
SETUP = """
import os, pathlib, sys
print("setup.py", *sys.argv[1:])
for name in ("RLCORE_NATIVE", "RLCORE_CUDA", "RLCORE_CUDA_ARCHS"):
    print(name, os.environ.get(name))
if "BROKEN_BUILD" in os.environ:
    sys.exit("nvcc fatal: a broken source")
folder = pathlib.Path("build/gpu_lib/rlcore")
folder.mkdir(parents=True, exist_ok=True)
for name in ("_C.so", "_C_torch.so"):
    (folder / name).write_text("fresh")
print("native build: _C.so, _C_torch.so (CUDA 13.0 kernels for 90-real)")
"""
FILES = {
    "a_whole": """
        WHOLE_DEVICE = True

        def test_the_others_have_ended():
            pid = (ROOT / "pid").read_text()
            assert not Path("/proc", pid).exists()
    """,
    "abort": """
        def test_abort():
            os.abort()
    """,
    "fail": """
        def test_wrong():
            assert 1 == 2
        def test_right():
            pass
    """,
    "skip": """
        def test_two_gpus():
            pytest.skip("needs two GPUs")
    """,
    "slow": """
        def test_slow():
            (ROOT / "pid").write_text(str(os.getpid()))
            with (ROOT / "runs").open("a") as file:
                file.write("x")
            time.sleep(1)
    """,
    "figures": """
        def test_figures(record_property):
            record_property("gen", "1.2 GB, planned 3.6 GB")
    """,
}
SANITIZED = ("loss", "suffix", "reshard")
STEPS = """# A step for each way to end.
device
  tests/gpu/test_figures.py
native_build
slow
  tests/gpu/test_slow.py
  tests/gpu/test_fail.py::test_right
whole
  tests/gpu/test_a_whole.py
skip
  tests/gpu/test_skip.py
"""
SANITIZER = """#!/bin/sh
echo "$PYTORCH_NO_CUDA_MEMORY_CACHING $*" >> sanitizer.txt
case "$*" in *test_loss*) [ -z "$ERRORS" ] || exit 86 ;; esac
while [ "$1" != -m ]; do shift; done
exec "$PYTHON" "$@"
"""
HEAD = (
    "import os, time\nfrom pathlib import Path\nimport pytest\nROOT = Path(__file__).parents[2]\n"
)

BLOCK = """
# Of packages from outside, rlcore and tests see those alone that the check asks for.
import builtins, sys
sys.path.append({tools!r})
import gpu_needs
allowed = gpu_needs.needed().keys() | sys.stdlib_module_names | {{"rlcore", "tests", "_pytest"}}
real = builtins.__import__
def blocked(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {{}}).get("__name__", "").partition(".")[0]
    if importer in ("rlcore", "tests") and not level and name.partition(".")[0] not in allowed:
        raise ImportError(f"{{name}}: tools/gpu_needs.py does not name it")
    return real(name, globals, locals, fromlist, level)
builtins.__import__ = blocked
"""


def check(root: Path, *words: object, **env: str) -> tuple[int, str]:
    """Exit status and output of the checkout's gpu_check.sh."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RLCORE_", "PYTEST_"))}
    kept["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take seconds to import
    done = subprocess.run(
        ["bash", root / "tools" / "gpu_check.sh", *words],
        env=kept | {"PYTHON": sys.executable, "REPORT": str(root / "report")} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout


def write_test(root: Path, name: str, text: str) -> Path:
    path = root / "tests" / "gpu" / f"test_{name}.py"
    path.write_text(HEAD + "\n".join(line[8:] for line in text.splitlines()) + "\n")
    return path


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script and what it calls, with stand-ins for torch, the build and the tests."""
    root = tmp_path_factory.mktemp("checkout")
    for folder in ("tools", "rlcore", "tests/gpu", "csrc", "bin"):
        (root / folder).mkdir(parents=True)
    for name in ("gpu_check.sh", "gpu_needs.py", "gpu_table.py"):
        shutil.copy(ROOT / "tools" / name, root / "tools")
    (root / "rlcore" / "__init__.py").touch()
    (root / "rlcore" / "__main__.py").write_text("print('the report of rlcore env')")
    (root / "torch.py").write_text(TORCH)
    (root / "setup.py").write_text(SETUP)
    (root / "CMakeLists.txt").touch()
    (root / "tools" / "gpu_steps.txt").write_text(STEPS)
    (root / "bin" / "compute-sanitizer").write_text(SANITIZER)
    (root / "bin" / "compute-sanitizer").chmod(0o755)
    requires = '["pybind11~=3.1", "torch==9.9.0"]'
    (root / "pyproject.toml").write_text(f"[build-system]\nrequires = {requires}\n")
    for name, text in FILES.items():
        write_test(root, name, text)
    return root


@pytest.fixture(scope="module")
def broken(checkout: Path) -> tuple[int, str]:
    """A run of files after a build that fails."""
    files = sorted((checkout / "tests" / "gpu").glob("test_*.py"))
    return check(checkout, *files, BROKEN_BUILD="1")


def row(out: str, name: str) -> list[str]:
    """The words of a file's row of the table."""
    [found] = [words for line in out.splitlines() if (words := line.split())[1:2] == [name]]
    return found


def test_every_file_has_a_row_with_its_verdict(broken: tuple[int, str]) -> None:
    status, out = broken
    assert status == 1
    assert row(out, "test_fail")[:6] == ["FAIL", "test_fail", "1", "1", "0", "0"]
    assert row(out, "test_slow")[:6] == ["PASS", "test_slow", "1", "0", "0", "0"]
    assert row(out, "test_skip")[:6] == ["SKIP", "test_skip", "0", "0", "0", "1"]
    assert "test_fail::test_wrong  assert 1 == 2" in out
    assert "test_skip::test_two_gpus" in out and "needs two GPUs" in out
    assert "the report of rlcore env" in out


def test_a_file_that_crashes_says_how_and_costs_no_other(broken: tuple[int, str]) -> None:
    assert row(broken[1], "test_abort")[-1] == "aborted"
    table = broken[1].partition("\nresult ")[2]
    assert "| " in table.partition("test_abort")[2].splitlines()[1]


def test_a_file_that_needs_the_whole_device_runs_after_all_others(broken: tuple[int, str]) -> None:
    assert row(broken[1], "test_a_whole")[0] == "PASS"


def test_a_build_that_fails_is_a_row_with_its_last_lines(
    broken: tuple[int, str], checkout: Path
) -> None:
    status, out = broken
    assert status == 1 and row(out, "native_build")[0] == "FAIL"
    assert "native build for Stand-in H100 (90) ... failed after" in out
    assert "| nvcc fatal: a broken source" in out
    assert "nvcc fatal" in (checkout / "report" / "log.txt").read_text()


def test_the_build_is_for_the_gpu_at_hand_and_without_a_network(
    broken: tuple[int, str],
) -> None:
    for line in ("setup.py build_ext --build-lib", "RLCORE_NATIVE 1", "RLCORE_CUDA_ARCHS 90-real"):
        assert f"| {line}" in broken[1]
    assert "| RLCORE_CUDA 1" in broken[1]


def test_status_0_is_a_build_and_files_without_a_failure(checkout: Path) -> None:
    status, out = check(checkout, checkout / "tests" / "gpu" / "test_slow.py")
    assert status == 0, out
    assert row(out, "native_build")[0] == row(out, "test_slow")[0] == "PASS"
    assert "s: _C.so, _C_torch.so (CUDA 13.0 kernels for 90-real)" in out
    assert "test_fail" not in out
    for name in ("_C.so", "_C_torch.so"):
        assert (checkout / "rlcore" / name).read_text() == "fresh"


def test_a_file_that_takes_too_long_is_ended(checkout: Path, tmp_path: Path) -> None:
    file = tmp_path / "test_hang.py"
    file.write_text("import time\n\ndef test_hang():\n    time.sleep(600)\n")
    status, out = check(checkout, file, LIMIT_S="1")
    assert status == 1
    assert " ".join(row(out, "test_hang")).startswith("FAIL test_hang 0 0 0 0")
    assert " ".join(row(out, "test_hang")).endswith("ended at LIMIT_S or TOTAL_S")


def test_a_package_that_is_missing_is_named_with_what_to_do(checkout: Path) -> None:
    file = write_test(checkout, "more", "        import never_heard_of\n")
    status, out = check(checkout, file)
    file.unlink()
    assert status == 1
    assert "not installed for" in out and "never-heard-of" in out and "tools/gpu_wheels.sh" in out
    assert "native build" not in out


def test_without_a_gpu_a_sentence_says_so(checkout: Path) -> None:
    status, out = check(checkout, NO_GPU="1")
    assert status == 1
    assert out == "gpu_check: torch 2.11.0+cu130 sees no GPU; --cpu runs what needs none\n"


@pytest.mark.parametrize(
    "word, sentence",
    [("--gpu", "--gpu: unknown flag"), ("test_x.py", "test_x.py: no such file")],
)
def test_what_it_does_not_know_is_refused(checkout: Path, word: str, sentence: str) -> None:
    status, out = check(checkout, word)
    assert status == 2 and sentence in out


# ---- steps


@pytest.fixture
def fresh(checkout: Path) -> Path:
    """The stand-in checkout without results of steps."""
    shutil.rmtree(checkout / "report", ignore_errors=True)
    (checkout / "runs").unlink(missing_ok=True)
    return checkout


def times_run(root: Path) -> int:
    """How often the step `slow` was run."""
    return len((root / "runs").read_text())


def test_steps_run_in_their_order_and_the_report_has_all_that_one_pastes(fresh: Path) -> None:
    status, out = check(fresh)
    assert status == 0, out
    rows = [line.split()[:2] for line in out.splitlines() if line[:4] in ("PASS", "FAIL", "SKIP")]
    assert rows == [
        ["PASS", "device"],
        ["PASS", "native_build"],
        ["PASS", "slow"],
        ["PASS", "whole"],
        ["SKIP", "skip"],
    ]
    assert row(out, "slow")[2:6] == ["2", "0", "0", "0"]
    assert "needs two GPUs" in " ".join(row(out, "skip"))
    report = (fresh / "report" / "report.txt").read_text()
    assert report.startswith("the report of rlcore env\nlacks     ")
    assert "| gen: 1.2 GB, planned 3.6 GB" in report and " s  needs two GPUs" in report


def test_a_step_that_fails_shows_the_last_lines_of_its_error(fresh: Path) -> None:
    steps = fresh / "tools" / "gpu_steps.txt"
    steps.write_text(STEPS.replace("::test_right", ""))
    status, out = check(fresh, "--only", "slow")
    steps.write_text(STEPS)
    assert status == 1 and row(out, "slow")[:4] == ["FAIL", "slow", "2", "1"]
    report = (fresh / "report" / "report.txt").read_text()
    assert "slow::test_wrong" in report and "| E       assert 1 == 2" in report


def test_the_next_run_leaves_out_what_passed_with_the_same_sources(fresh: Path) -> None:
    only = "--only", "slow", "skip"
    assert check(fresh, *only)[0] == 0
    status, out = check(fresh, *only)
    assert status == 0 and times_run(fresh) == 1
    assert "slow: passed before" in out and row(out, "slow")[0] == "PASS"
    assert "skip: passed before" not in out  # what it lacked may be there now
    assert check(fresh, "--again", *only)[0] == 0
    assert times_run(fresh) == 2
    (fresh / "rlcore" / "more.py").touch()
    status, out = check(fresh, *only)
    assert status == 0 and times_run(fresh) == 3 and "passed before" not in out
    (fresh / "rlcore" / "more.py").unlink()


def test_only_some_steps_run_after_the_build_and_join_the_report(fresh: Path) -> None:
    status, out = check(fresh, "--only", "skip", "device")
    assert status == 0, out
    assert row(out, "native_build")[0] == "PASS"
    assert not (fresh / "report" / "steps" / "slow.end").exists()
    status, out = check(fresh, "--only", "slow")
    assert status == 0 and times_run(fresh) == 1
    assert row(out, "device")[0] == row(out, "slow")[0] == "PASS"
    status, out = check(fresh, "--only", "slo")
    assert status == 2 and "--only slo: the steps are device native_build slow" in out


def test_after_the_total_time_no_step_starts_and_the_next_run_goes_on(fresh: Path) -> None:
    status, out = check(fresh, TOTAL_S="0")
    assert status == 1
    assert "-      device               not run, because TOTAL_S is over; run again" in out
    status, out = check(fresh, "--only", "device")
    assert status == 0 and row(out, "device")[0] == "PASS"


def test_a_pretend_device_has_no_kernels_to_build(fresh: Path) -> None:
    status, out = check(fresh, "--only", "device", RLCORE_PRETEND_CUDA="real")
    assert status == 0 and row(out, "native_build")[0] == "SKIP"
    assert "a pretend device runs no kernels" in out


def test_sanitize_runs_tests_of_kernels_within_both_tools(fresh: Path) -> None:
    for name in SANITIZED:
        write_test(fresh, name, "        def test_right():\n            pass")
    path = {"PATH": f"{fresh / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    status, out = check(fresh, "--sanitize", **path)
    names = [f"{tool}_{name}" for tool in ("memcheck", "racecheck") for name in SANITIZED]
    assert status == 0 and all(row(out, name)[0] == "PASS" for name in names), out
    lines = (fresh / "sanitizer.txt").read_text().splitlines()
    assert len(lines) == 6
    for line, name in zip(lines, names, strict=True):
        tool, test = name.split("_")
        assert f"--tool {tool} --target-processes all --error-exitcode 86" in line
        assert line.startswith("1 ") == (tool == "memcheck") and f"test_{test}.py" in line
    status, out = check(fresh, "--sanitize", ERRORS="1", **path)
    assert status == 1
    assert " ".join(row(out, "memcheck_loss")).endswith("compute-sanitizer found errors")
    assert row(out, "memcheck_suffix")[0] == "PASS"
    for name in SANITIZED:
        (fresh / "tests" / "gpu" / f"test_{name}.py").unlink()


def test_without_compute_sanitizer_its_rows_are_skipped_and_the_start_says_so(fresh: Path) -> None:
    status, out = check(fresh, "--sanitize", PATH=os.defpath)
    assert status == 0 and row(out, "racecheck_loss")[0] == "SKIP"
    assert "compute-sanitizer is not installed" in out
    assert "compute-sanitizer (for --sanitize)" in out


# ---- this checkout


@pytest.fixture(scope="module")
def blocked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which rlcore and tests import what the check asks for, and nothing else."""
    folder = tmp_path_factory.mktemp("blocked")
    (folder / "sitecustomize.py").write_text(BLOCK.format(tools=str(ROOT / "tools")))
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}


@pytest.mark.skipif(bool(native._library()), reason="no native build (no compiler at set-up)")
def test_what_needs_no_gpu_passes_on_the_cpu(blocked: dict[str, str], tmp_path: Path) -> None:
    files = [ROOT / "tests" / "gpu" / f"test_{name}.py" for name in ("reshard", "suffix")]
    status, out = check(ROOT, "--cpu", *files, REPORT=str(tmp_path), **blocked)
    assert status == 0, out
    assert row(out, "test_reshard")[0] == row(out, "test_suffix")[0] == "PASS"
    assert "test_suffix::test_a_handle_that_is_not_open_has_length_minus_one" in out
    assert "needs an NVIDIA GPU" in out
    assert out.count("no GPU run") == 2
    assert "the libraries in rlcore/ are used as they are" in out


@pytest.mark.slow
def test_steps_run_on_the_cpu_too(blocked: dict[str, str], tmp_path: Path) -> None:
    words = "--cpu", "--only", "device", "addmm"
    status, out = check(ROOT, *words, REPORT=str(tmp_path), **blocked)
    assert status == 0, out
    assert row(out, "device")[0] == "PASS" and row(out, "addmm")[0] == "SKIP"
    assert "needs an NVIDIA GPU" in " ".join(row(out, "addmm"))


def test_all_files_are_collected_with_the_packages_that_the_check_asks_for(
    blocked: dict[str, str],
) -> None:
    words = ["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    done = subprocess.run(
        [sys.executable, *words],
        env=os.environ | blocked | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    for path in (ROOT / "tests" / "gpu").glob("test_*.py"):
        assert f"{path.name}::" in done.stdout
    for line in (ROOT / "tools" / "gpu_steps.txt").read_text().splitlines():
        if line.startswith(" "):
            found = re.findall(rf"^{re.escape(line.strip())}(\[|::|$)", done.stdout, re.MULTILINE)
            assert found, f"pytest has no {line.strip()}"


def test_what_is_left_out_of_the_check_is_still_imported_somewhere(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import gpu_needs

    left_out = set(gpu_needs.UNUSED)
    monkeypatch.setattr(gpu_needs, "UNUSED", {})
    found = gpu_needs.needed()
    assert left_out <= found.keys()
    # One name of each way: at module level, in a function, of another spelling.
    assert {"hypothesis", "msgspec", "tyro", "megatron", "zmq"} <= found.keys() - left_out
    assert found["hypothesis"].startswith("tests/conftest.py:")


def test_a_file_that_asks_for_the_free_memory_runs_alone() -> None:
    texts = [path.read_text() for path in (ROOT / "tests" / "gpu").glob("test_*.py")]
    asking = [text for text in texts if "mem_get_info" in text or "Residency(" in text]
    assert asking and all("\nWHOLE_DEVICE = True\n" in text for text in asking)

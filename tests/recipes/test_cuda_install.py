"""Set-up on a CUDA machine: what is locked, what set-up installs, and what it refuses beforehand.

Installing gigabytes of wheels is not covered. A stand-in for Python records the commands of pip and
leaves the few files that set-up looks at.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

spec = importlib.util.spec_from_file_location("lock_cuda", ROOT / "tools/lock_cuda.py")
assert spec and spec.loader
lock_cuda = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lock_cuda)


def test_the_check_prints_what_it_found_and_fails_with_what_is_stale(monkeypatch, capsys):
    """`tools/test.sh` runs it against the registry."""
    monkeypatch.setattr(lock_cuda, "check", lambda project: [])
    lock_cuda.report(PROJECT)
    assert "cuda-py312.txt: resolved for x86_64-manylinux_2_34" in capsys.readouterr().out
    monkeypatch.setattr(lock_cuda, "check", lambda project: ["a==1: no longer needed"])
    with pytest.raises(SystemExit, match="a==1: no longer needed\n.*--update"):
        lock_cuda.report(PROJECT)

    def unreachable(project):
        raise lock_cuda.UnreachableError("no route")

    monkeypatch.setattr(lock_cuda, "check", unreachable)
    lock_cuda.report(PROJECT)
    assert (
        "NOT CHECKED, the package registry cannot be reached: no route" in capsys.readouterr().out
    )


@pytest.mark.parametrize("python", lock_cuda.PYTHONS)
def test_a_lock_meets_the_requirements_of_pyproject(python):
    """Also without a network."""
    locked = lock_cuda.read(lock_cuda.lock_file(python))
    for line in lock_cuda.requirements(PROJECT, "sglang"):
        wanted = Requirement(line)
        assert wanted.specifier.contains(locked[wanted.name][0], prereleases=True), line
    for line in (lock_cuda.LOCKS / "overrides.txt").read_text().splitlines():
        if not line.startswith("#"):
            wanted = Requirement(line)
            assert wanted.specifier.contains(locked[wanted.name][0]), line


@pytest.mark.parametrize("python", lock_cuda.PYTHONS)
def test_a_lock_has_packages_with_hashes_and_names_no_index(python):
    lines = lock_cuda.lock_file(python).read_text().splitlines()
    packages = [line for line in lines if not line.startswith("#")]
    assert len(packages) > 200
    for line in packages:
        assert re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+( --hash=sha256:[0-9a-f]{64})+", line), line


def test_a_lock_is_written_as_it_is_read(tmp_path):
    path = lock_cuda.lock_file("3.12")
    lock_cuda.write(tmp_path / "again.txt", "3.12", lock_cuda.read(path))
    assert (tmp_path / "again.txt").read_text() == path.read_text()


def test_a_stale_lock_is_told_by_package():
    one, two = frozenset("1"), frozenset("2")
    locked = {"a": ("1", one), "b": ("1", one), "c": ("1", one), "d": ("1", one)}
    found = {"a": ("1", one | two), "b": ("2", one), "c": ("1", two), "e": ("1", one)}
    assert lock_cuda.differences(locked, found) == [
        "b==1: resolves to 2",
        "c==1: a locked wheel is not in the registry",
        "d==1: no longer needed",
        "e==1: not in the lock",
    ]


def test_only_a_registry_that_does_not_answer_is_unreachable(monkeypatch):
    """Another failure of uv is a problem of the locks."""
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("UV_NO_CACHE", "1")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    with pytest.raises(lock_cuda.UnreachableError, match="127.0.0.1:9"):
        lock_cuda.resolve("3.12", ["six"], {})
    with pytest.raises(ValueError, match="not a requirement"):
        lock_cuda.resolve("3.12", ["not a requirement"], {})


PYTHON = """#!/bin/sh
case "$*" in
"-m pip --version") exit 0 ;;
"-m venv "*)
  mkdir -p "$3/bin" "$3/lib/python3.$MINOR/site-packages"
  cp "$0" "$3/bin/python"
  echo "version = 3.$MINOR.0" >"$3/pyvenv.cfg"
  echo venv >>"$TOLD"
  exit 0
  ;;
"-m pip install "*)
  shift 4
  echo "$*" >>"$TOLD"
  site=$(echo "$RLCORE_VENV"/lib/python*/site-packages)
  case "$*" in
  *torch==*)
    mkdir -p "$site/torch"
    echo "cuda: Optional[str] = $TORCH_CUDA" >"$site/torch/version.py"
    ;;
  *"-r tools/locks/"*)
    mkdir -p "$site/nvidia/cu13/lib"
    touch "$site/nvidia/cu13/lib/libcudart.so.13"
    ;;
  *"-e .")
    touch rlcore/_C_torch.so "rlcore/_C.cpython-3$MINOR-x86_64-linux-gnu.so"
    echo "native build: ${NATIVE:-$(command -v nvcc)}"
    ;;
  esac
  exit 0
  ;;
esac
while [ "$1" != -c ]; do shift; done
exec "$REAL" -c "import sys; sys.version_info = (3, $MINOR, 0)
$2"
"""


class Machine:
    """A checkout of what set-up reads, and a PATH that stand-ins come first on."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in ("csrc", "rlcore", "tools", "bin"):
            (folder / name).mkdir()
        shutil.copy(ROOT / "tools/setup.sh", folder / "tools")
        shutil.copytree(ROOT / "tools/locks", folder / "tools/locks")
        for name in ("pyproject.toml", "setup.py", "CMakeLists.txt"):
            shutil.copy(ROOT / name, folder)
        self.program("bwrap", "")
        self.env = {
            "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
            "RLCORE_VENV": str(folder / "venv"),
            "RLCORE_PYTHON": self.program("python", PYTHON),
            "TOLD": str(folder / "told"),
            "REAL": sys.executable,
            "MINOR": "12",
            "TORCH_CUDA": "'13.0'",
            "NATIVE": "_C_torch.so (CUDA 13.0 kernels for 80)",
        }

    def program(self, name: str, text: str) -> str:
        path = self.folder / "bin" / name
        path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    def with_gpu(self) -> None:
        self.program("nvidia-smi", "echo 'GPU 0: a stand-in'")

    def setup(self, *flags: str, **env: str) -> tuple[int, str]:
        """Exit status and output."""
        command = ["bash", self.folder / "tools/setup.sh", *flags]
        done = subprocess.run(
            command, env=self.env | env, capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout + done.stderr

    @property
    def installed(self) -> list[str]:
        """What pip was told to install, in order."""
        told = self.folder / "told"
        return told.read_text().splitlines() if told.exists() else []

    @property
    def toolkit(self) -> Path:
        return self.folder / f"venv/lib/python3.{self.env['MINOR']}/site-packages/nvidia/cu13"


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def test_sglang_for_cuda_is_installed_from_the_lock(machine):
    rc, out = machine.setup("--sglang", "--te", "--wandb")
    assert rc == 0, out
    [_, torch, base, sglang, te, wandb, native] = machine.installed
    assert torch.startswith("torch==") and "numpy" in base
    assert sglang == (
        "--no-deps --require-hashes --only-binary :all: -r tools/locks/cuda-py312.txt"
    )
    assert te.startswith("--no-build-isolation transformer-engine[")
    assert wandb.startswith("wandb")
    assert native == "-v --no-deps --no-build-isolation -e ."


def test_the_wheels_of_cuda_become_a_toolkit_to_link_with(machine):
    rc, out = machine.setup("--sglang")
    assert rc == 0, out
    lib64 = machine.toolkit / "lib64"
    assert (lib64 / "libcudart.so").resolve() == machine.toolkit / "lib/libcudart.so.13"
    source = machine.folder / "driver.c"
    source.write_text("int cuInit(unsigned);\nint f(void) { return cuInit(0); }\n")
    link = ["cc", "-shared", "-fPIC", source, "-o", source.with_suffix(".so")]
    subprocess.run([*link, f"-L{lib64}/stubs", "-Wl,--no-as-needed", "-lcuda"], check=True)
    assert b"libcuda.so.1" in source.with_suffix(".so").read_bytes()


def test_a_changed_lock_is_installed_at_the_next_set_up(machine):
    machine.setup("--sglang")
    before = len(machine.installed)
    assert machine.setup("--sglang")[1].endswith("is up to date\n")
    with (machine.folder / "tools/locks/cuda-py312.txt").open("a") as lock:
        lock.write("# changed\n")
    machine.setup("--sglang")
    assert [line for line in machine.installed[before:] if "tools/locks" in line]


def test_sglang_for_the_cpu_takes_no_lock_and_any_python(machine):
    rc, out = machine.setup("--sglang", MINOR="13", TORCH_CUDA="None")
    assert rc == 0, out
    assert not [line for line in machine.installed if "tools/locks" in line]
    assert [line for line in machine.installed if line.startswith("--no-deps sglang==")]
    assert not [line for line in machine.installed[:-1] if "--no-build-isolation" in line]


@pytest.mark.parametrize("how", ["nvidia-smi", "--cuda"])
def test_a_python_without_sglang_for_cuda_is_refused_before_anything_is_installed(machine, how):
    flags = ["--sglang"]
    if how == "--cuda":
        flags.append(how)
    else:
        machine.with_gpu()
    rc, out = machine.setup(*flags, MINOR="13")
    assert rc == 1
    assert "not Python 3.11 or 3.12, as --sglang needs with CUDA" in out
    assert machine.installed == []


def test_an_environment_without_sglang_for_cuda_is_refused(machine):
    machine.with_gpu()
    assert machine.setup(MINOR="13")[0] == 0
    before = machine.installed
    rc, out = machine.setup("--sglang", MINOR="13")
    assert rc == 1
    assert "is not an environment of Python 3.11 or 3.12, as --sglang needs with CUDA" in out
    assert machine.installed == before


def test_with_sglang_a_python_that_has_it_for_cuda_comes_first(machine):
    del machine.env["RLCORE_PYTHON"]
    machine.program("python3", PYTHON.replace("$MINOR", "13"))
    machine.program("python3.12", PYTHON.replace("$MINOR", "12"))
    machine.setup("--sglang")
    assert "version = 3.12" in (machine.folder / "venv/pyvenv.cfg").read_text()
    shutil.rmtree(machine.folder / "venv")
    machine.setup()
    assert "version = 3.13" in (machine.folder / "venv/pyvenv.cfg").read_text()


@pytest.mark.parametrize(
    ("program", "says", "sentence"),
    [
        ("getconf", "glibc 2.31", "need glibc 2.34 or newer, and here is glibc 2.31"),
        ("getconf", "glibc 2.9", "need glibc 2.34 or newer, and here is glibc 2.9"),
        ("uname", "aarch64", "locked for x86_64, and this machine is aarch64"),
    ],
)
def test_a_system_without_the_wheels_is_refused_before_anything_is_installed(
    machine, program, says, sentence
):
    machine.with_gpu()
    machine.program(program, f"echo {says}")
    rc, out = machine.setup("--sglang")
    assert rc == 1
    assert sentence in out
    assert machine.installed == []
    rc, out = machine.setup()
    assert rc == 0, out


def test_torch_for_another_cuda_is_refused_as_soon_as_it_is_there(machine):
    index = "https://torch.example/cu126"
    rc, out = machine.setup("--sglang", TORCH_CUDA="'12.6'", RLCORE_TORCH_INDEX=index)
    assert rc == 1
    assert "its packages are for CUDA 13.0, and torch is a build for CUDA 12.6" in out
    assert machine.installed[1:] == [f"--index-url {index} torch==2.13.0"]
    rc, out = machine.setup("--sglang", TORCH_CUDA="'12.6'", RLCORE_TORCH_INDEX=index)
    assert rc == 1 and len(machine.installed) == 2


def test_nvcc_is_found_in_cuda_home_and_builds_again(machine):
    toolkit = machine.folder / "cuda"
    (toolkit / "bin").mkdir(parents=True)
    rc, out = machine.setup(NATIVE="no CUDA kernels")
    assert rc == 0, out
    shutil.copy(machine.program("bwrap", "echo release 13.0"), toolkit / "bin/nvcc")
    rc, out = machine.setup(CUDA_HOME=str(toolkit), NATIVE="")
    assert rc == 0, out
    assert f"native build: {toolkit}/bin/nvcc" in out


@pytest.mark.parametrize("native", ["_C_torch.so (no CUDA kernels)", "left out (no C++ compiler)"])
def test_a_cuda_machine_without_kernels_is_warned(machine, native):
    _, out = machine.setup(NATIVE=native)
    assert "WARNING: torch is a CUDA build, but there are no CUDA kernels of rlcore" in out


@pytest.mark.parametrize(
    "env", [{}, {"TORCH_CUDA": "None", "NATIVE": "no CUDA kernels"}, {"RLCORE_CUDA": "0"}]
)
def test_no_warning_without_a_lack_of_kernels(machine, env):
    _, out = machine.setup(**{"NATIVE": "no CUDA kernels"} | env if "RLCORE_CUDA" in env else env)
    assert "WARNING" not in out


RECIPES = sorted(
    path.name
    for path in (ROOT / "recipes").glob("*_*.sh")
    if re.search(r"sglang", path.read_text())
)


def set_up_by(folder: Path, recipe: str, *arguments: str, **env: str) -> str:
    """The flags that a recipe gives set-up, which ends it here."""
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    (folder / "tools").mkdir()
    (folder / "tools/setup.sh").write_text('printf "%s " "$@"\nexit 7\n')
    names = ("RLCORE_", "SLURM_", "LOCAL_", "TORCHELASTIC_", "PYTHON", "NODE", "GPUS_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(names)}
    command = ["bash", folder / "recipes" / recipe, *arguments]
    done = subprocess.run(command, env=clean | env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_that_samples_with_sglang_installs_it(tmp_path, recipe):
    assert set_up_by(tmp_path, recipe, CUDA_VISIBLE_DEVICES="0") == "--quiet --sglang"


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        ((), "--quiet"),
        (("--rollout.engine", "sglang"), "--quiet --sglang"),
        (("--rollout.engine=sglang",), "--quiet --sglang"),
        (("--rollout.engine", "sglang", "--rollout.engine", "torch"), "--quiet"),
        (("--rollout.engine", "sglang", "--dry-run"), "--quiet"),
    ],
)
def test_the_engine_of_the_command_line_decides_what_is_installed(tmp_path, arguments, flags):
    recipe = "grpo_gsm8k_0.5b.sh"
    assert set_up_by(tmp_path, recipe, *arguments, CUDA_VISIBLE_DEVICES="") == flags

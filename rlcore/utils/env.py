"""Report this machine and this installation; `rlcore env` prints the report, every run saves it.

Own code instead of `torch.utils.collect_env`, to include rlcore's packages and native build.
"""

import os
import platform
import subprocess
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

from rlcore.utils import nvidia

PACKAGES = (
    "torch",
    "megatron-core",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "tyro",
    "msgspec",
    "pyzmq",
    "math-verify",
    "sglang",
    "transformer-engine",
    "apex",
    "flash-attn",
    "triton",
)
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "RLCORE_NATIVE",
    "OMP_NUM_THREADS",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "PYTORCH_CUDA_ALLOC_CONF",
    "SLURM_JOB_ID",
)


def report() -> dict[str, Any]:
    """Return versions, devices, CPU, memory and the native build as plain data. Of `PACKAGES`, only
    torch is imported."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "commit": _commit(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "cpu": {"model": _cpu_model(), "cores": num_cores()},
        "memory_gb": round(memory_bytes() / 2**30, 1),
        "cuda": _cuda(),
        "native": _native(),
        "sglang": _sglang(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def describe(facts: dict[str, Any] | None = None) -> list[str]:
    """Format the report as lines of text."""
    facts = facts or report()
    cuda = facts["cuda"]
    devices = Counter(f"{d['name']}, {d['memory_gb']:g} GB" for d in cuda["devices"])
    gpus = "; ".join(f"{count} x {name}" for name, count in devices.items())
    lines = [
        f"python    {facts['python']} on {facts['platform']}",
        f"rlcore    {facts['commit'] or 'no git commit'}",
        f"cpu       {facts['cpu']['model']}, {facts['cpu']['cores']} cores usable",
        f"memory    {facts['memory_gb']:g} GB",
        f"gpu       {gpus or 'none'}",
    ]
    if devices:
        lines.append(f"cuda      {cuda['version']}, driver {cuda['driver'] or 'unknown'}")
    lines.append(f"native    {facts['native']}")
    lines.append(f"sglang    {facts['sglang']}")
    lines += [f"package   {name} {version}" for name, version in facts["packages"].items()]
    return lines + [f"variable  {name}={value}" for name, value in facts["variables"].items()]


def num_cores() -> int:
    """Return the number of CPU cores that this process may use (affinity, container's quota)."""
    cores = len(os.sched_getaffinity(0))
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def memory_bytes() -> int:
    """Return the bytes of memory that this process may use: the machine's memory, or the
    container's limit if lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return min(total, int(limit)) if limit.isdigit() else total


def _cuda() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"version": torch.version.cuda, "driver": "", "devices": []}
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "version": torch.version.cuda,
        "driver": nvidia.driver_version(),
        "devices": [
            {"name": p.name, "memory_gb": round(p.total_memory / 2**30, 1)} for p in properties
        ],
    }


def _native() -> str:
    """Name the native libraries that are built; rlcore.ops logs at start which ones are used."""
    import torch

    folder = Path(__file__).resolve().parents[1]
    parts = ["_C"] if any(folder.glob("_C.*.so")) else []
    library = folder / "_C_torch.so"
    if library.is_file():
        try:
            torch.ops.load_library(str(library))
        except OSError as error:
            parts.append(f"_C_torch (fails to load: {error.__cause__ or error})")
        else:
            kernels = "CPU and CUDA" if torch.ops.rlcore_native.has_cuda() else "CPU"
            parts.append(f"_C_torch for {kernels}")
    return ", ".join(parts) or "not built"


def _sglang() -> str:
    """Describe the SGLang installation of `--rollout.engine sglang` and name missing packages."""
    import torch

    version = _version("sglang")
    if not version:
        return "not installed: bash tools/setup.sh --sglang"
    cuda = bool(torch.version.cuda)
    kernels = "CUDA kernels" if cuda else "CPU with substitute kernels"
    said = f"{version} on {kernels}"
    wanted = dict(_requirements("rlcore", "sglang")).get("sglang", "")
    if wanted not in ("", f"=={version}"):
        said += f"; rlcore is tested with {wanted.removeprefix('==')}"
    needs = _requirements("sglang", "") if cuda else _requirements("rlcore", "sglang-cpu")
    missing = [name for name, _ in needs if not _version(name)]
    if not metadata.entry_points(group="sglang.srt.plugins", name="rlcore"):
        missing.append("rlcore's plug-in (reinstall rlcore)")
    return said + (f"; missing: {', '.join(missing)}" if missing else "")


def _requirements(package: str, extra: str) -> list[tuple[str, str]]:
    """Return (name, versions) of a package's requirements on this machine. If `extra` is given,
    return only its requirements; otherwise, only requirements outside of extras."""
    from packaging.requirements import Requirement

    found = []
    try:
        lines = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        lines = []
    for line in lines:
        requirement, marker = Requirement(line), Requirement(line).marker
        by_itself = marker is None or marker.evaluate({"extra": ""})
        if (marker is None or marker.evaluate({"extra": extra})) and bool(extra) != by_itself:
            found.append((requirement.name, str(requirement.specifier)))
    return found


def _cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """Return the git commit of rlcore's source tree, with `+` if files have changed; "" outside
    git."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({error})"
    return found.stdout.strip()


def _read(path: str) -> str:
    """Read a file of /proc or /sys; return "" if this system lacks the file."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.stdout.write("\n".join(describe()) + "\n")

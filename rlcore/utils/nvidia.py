"""Ask the NVIDIA driver about this machine's GPUs. No function makes a CUDA context."""

import csv
import ctypes
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 30.0  # nvidia-smi initialises each GPU if no daemon keeps the driver loaded
_MIB = 2**20 / 1e9  # nvidia-smi counts in MiB


@dataclass(frozen=True, slots=True)
class GPUMemory:
    """Memory of one GPU in GB (10^9 bytes), and the processes that use it."""

    index: int
    uuid: str
    name: str
    used_gb: float
    total_gb: float
    processes: tuple[str, ...]
    """Process ids and names, such as `1234 python`; empty if the container hides them."""


def has_gpu() -> bool:
    """Return whether this process may use an NVIDIA GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and bool(gpu_files())


def gpu_files() -> list[str]:
    """Return the device files of the GPUs that this process may open, also those outside of its
    CUDA_VISIBLE_DEVICES."""
    return sorted(
        name
        for name in os.listdir("/dev")
        if name.startswith("nvidia")
        and name[6:].isdigit()
        and os.access(f"/dev/{name}", os.R_OK | os.W_OK)
    )


def driver_version() -> str:
    """Return the version of the NVIDIA driver, such as 580.65.06; "" if it is not known."""
    try:
        lines = Path("/proc/driver/nvidia/version").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        words = [w for w in line.split() if w[:1].isdigit() and "." in w]
        if line.startswith("NVRM") and words:
            return words[0]
    return ""


def driver_cuda() -> tuple[int, int]:
    """Return the newest CUDA version that the driver supports. Raise RuntimeError with the reason
    if the driver's library does not load."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(str(error)) from error
    version = ctypes.c_int()
    if code := driver.cuDriverGetVersion(ctypes.byref(version)):
        raise RuntimeError(f"cuDriverGetVersion returned error {code}")
    return version.value // 1000, version.value % 1000 // 10


def visible_gpus() -> list[GPUMemory]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects, in its order. Raise RuntimeError with the
    reason if nvidia-smi cannot list them."""
    found: dict[str, list[str]] = {}
    for uuid, pid, name in _query("compute-apps", "gpu_uuid,pid,process_name"):
        found.setdefault(uuid, []).append(f"{pid} {Path(name).name}")
    gpus = [
        GPUMemory(int(index), uuid, name, _gb(used), _gb(total), tuple(found.get(uuid, ())))
        for index, uuid, name, used, total in _query(
            "gpu", "index,uuid,name,memory.used,memory.total"
        )
    ]
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return gpus
    words = [word.strip() for word in mask.split(",")]
    return [g for w in words for g in gpus if w and (w == str(g.index) or g.uuid.startswith(w))]


def _gb(mib: str) -> float:
    """Convert MiB to GB. Return 0 if nvidia-smi prints `[N/A]`, as for memory shared with a CPU."""
    return float(mib) * _MIB if mib.isdigit() else 0.0


def _query(what: str, columns: str) -> list[list[str]]:
    """Return the rows of a query to nvidia-smi."""
    command = ["nvidia-smi", f"--query-{what}={columns}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except FileNotFoundError as error:
        raise RuntimeError("nvidia-smi is not on PATH") from error
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"nvidia-smi has not answered within {_TIMEOUT_S:g} s") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(f"nvidia-smi: {said[0] if said else f'exit code {done.returncode}'}")
    return [row for row in csv.reader(done.stdout.splitlines(), skipinitialspace=True) if row]

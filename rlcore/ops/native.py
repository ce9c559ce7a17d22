"""Select native code for an op if it is built, else the reference in Python or torch.

    _C         suffix forest                                   `load(op)`
    _C_torch   torch ops rlcore_native::*, for CPU and CUDA    `torch_ops(op, device)`

Each choice is logged once. If the environment variable RLCORE_NATIVE is 1, a missing build is an
error; 0 disables native code.
"""

import functools
import importlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from rlcore.utils.log import announce, log


@functools.cache
def load(op: str, symbol: str = "") -> ModuleType | None:
    """Return the extension `_C`, or None if `op` runs in Python. Log the choice once per op.

    Args:
        symbol: attribute of the extension that `op` needs; an older build may lack it.
    """
    wanted = os.environ.get("RLCORE_NATIVE", "")
    if wanted == "0":
        announce(op, "python (RLCORE_NATIVE=0)")
        return None
    try:
        core = importlib.import_module("rlcore._C")
    except ImportError as error:
        if wanted == "1":
            raise _missing(op, str(error)) from error
        why = "no native build" if isinstance(error, ModuleNotFoundError) else str(error)
        announce(op, f"python ({why})")
        return None
    if symbol and not hasattr(core, symbol):
        why = f"the native build is older than the source: it has no {symbol}"
        if wanted == "1":
            raise _missing(op, why)
        announce(op, f"python ({why}; run tools/setup.sh)")
        return None
    announce(op, "native")
    return core


@functools.cache
def torch_ops(op: str, device: str = "cpu") -> Any | None:
    """Return `torch.ops.rlcore_native` if it has kernels for `device` ("cpu", "cuda"), or None if
    `op` runs in torch. Log the choice once per op and device.

    Raises:
        ImportError: RLCORE_NATIVE is 1, and no build with kernels for `device` exists.
    """
    wanted = os.environ.get("RLCORE_NATIVE", "")
    if wanted == "0":
        announce(op, f"torch on {device} (RLCORE_NATIVE=0)")
        return None
    if why := obstacle(device):
        if wanted == "1":
            raise _missing(f"{op} on {device}", why)
        announce(op, f"torch on {device} ({why})")
        if device == "cuda":
            _warn(why)
        return None
    announce(op, {"cpu": "native on cpu"}.get(device, device))
    import torch

    return torch.ops.rlcore_native


def obstacle(device: str) -> str:
    """Return why the native ops do not run on `device` ("cuda": the current GPU); "" if they do."""
    return _library() or _without_kernels(device)


def warn_without_kernels() -> None:
    """Warn if the current GPU runs without rlcore's kernels, unless RLCORE_NATIVE is 0."""
    if os.environ.get("RLCORE_NATIVE") != "0" and (why := obstacle("cuda")):
        _warn(why)


def stream(device: Any) -> int:
    """Return the current CUDA stream of `device` as an int for the ops; 0 on the CPU."""
    import torch

    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@functools.cache
def _library() -> str:
    """Load `_C_torch.so`. Return "", or the reason why loading failed."""
    import torch

    # The library is in the package folder, also in an editable install.
    path = Path(__file__).resolve().parents[1] / "_C_torch.so"
    if not path.is_file():
        return "no native build"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{path.name} does not load: {error.__cause__ or error}"
    return ""


def _without_kernels(device: str) -> str:
    """Return why `_C_torch.so` does not run on `device` ("cuda": the current GPU), else ""."""
    import torch

    if device == "cpu":
        return ""
    if device != "cuda" or not torch.ops.rlcore_native.has_cuda():
        return f"the native build has no kernels for {device}"
    if not torch.cuda.is_available():
        return "no CUDA device"
    name = torch.cuda.get_device_name()
    why = torch.ops.rlcore_native.cuda_obstacle(torch.cuda.current_device())
    return why and f"the native build does not run on {name}: {why}; set RLCORE_CUDA_ARCHS"


REMEDY = (
    "run bash tools/setup.sh where nvcc and a C++ compiler are, or set RLCORE_NATIVE=0 to run "
    "without them on purpose"
)
_WARNING = """WARNING: this GPU runs without rlcore's CUDA kernels
    reason  %s
    effect  log-probs, losses and weight copies take longer and more memory
    remedy  %s"""


@functools.cache
def _warn(why: str) -> None:
    """Warn once that a GPU runs without rlcore's kernels."""
    log.warning(_WARNING, why, REMEDY)


def _missing(op: str, why: str) -> ImportError:
    return ImportError(
        f"RLCORE_NATIVE=1: {op} has no native build ({why}); "
        "run `RLCORE_NATIVE=1 bash tools/setup.sh` for the reason"
    )

"""A pretend CUDA device for the CPU build of torch; README.md says what it checks.

`environment(mode)` is the environment of a process, and of its children, that has the device. There
`stats()` counts what the device did. This module itself needs no torch.
"""

import hashlib
import importlib.util
import os
import subprocess
import sysconfig
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.pretend.device import reset_peak as reset_peak
    from tests.pretend.device import stats as stats

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VARIABLE = "RLCORE_PRETEND_CUDA"


def __getattr__(name: str) -> object:
    if name in ("stats", "reset_peak"):
        from tests.pretend import device

        return getattr(device, name)
    raise AttributeError(name)


def environment(mode: str = "real", base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of a process with a pretend device: `base` and what the device needs.

    Args:
        mode: `real` computes; `sizes` allocates addresses for large tensors and computes nothing.
    """
    assert mode in ("real", "sizes"), mode
    library()
    paths = [str(HERE / "site"), str(ROOT), *filter(None, [base.get("PYTHONPATH")])]
    made = {**base, VARIABLE: mode, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    made.pop("CUDA_VISIBLE_DEVICES", None)
    return made | {"TORCHDYNAMO_DISABLE": "1"}  # there is no Triton


@cache
def library() -> Path:
    """Return the path of the built extension; compile it if its sources changed, in a minute."""
    sources = sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")])
    torch = importlib.util.find_spec("torch")  # importing it would take seconds in each process
    assert torch is not None and torch.origin is not None
    headers = Path(torch.origin).parent / "include"
    includes = [headers, headers / "torch/csrc/api/include", sysconfig.get_path("include")]
    digest = hashlib.sha256(metadata.version("torch").encode())
    for source in sources:
        digest.update(source.read_bytes())
    folder = ROOT / "build" / "pretend" / digest.hexdigest()[:16]
    made = folder / "device.so"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f"{os.getpid()}.so"
        command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-w", "-fPIC", "-shared"]
        command += [f"-I{path}" for path in includes]
        subprocess.run([*command, "-o", draft, HERE / "device.cpp"], check=True)  # noqa: S603
        draft.rename(made)
    return made

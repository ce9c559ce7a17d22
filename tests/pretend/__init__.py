"""A pretend CUDA device for the CPU build of torch; README.md says what it checks.

`environment(mode)` is the environment of a process, and of its children, that has the device. There
`stats()` counts what the device did. This module itself needs no torch.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
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
    script = (
        "from torch.utils.cpp_extension import include_paths; import sysconfig, torch;"
        "print(torch.__version__, *include_paths(), sysconfig.get_path('include'), sep='\\n')"
    )
    plain = {k: v for k, v in os.environ.items() if k != VARIABLE}
    asked = subprocess.run(  # noqa: S603
        [sys.executable, "-c", script], env=plain, check=True, stdout=subprocess.PIPE, text=True
    )
    version, *includes = asked.stdout.splitlines()
    digest = hashlib.sha256(version.encode())
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

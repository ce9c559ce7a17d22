"""What rlcore uses of packages that are pinned: names, arguments, defaults and words, in pins.txt.

A row of pins.txt, below the `[file]` that relies on it:

    package.module.function(positional arguments * arguments by keyword); defaults name=value

A row without parentheses is not called. `Pin` explains the parts after `;`. Further lines of a row
are indented.
"""

from dataclasses import dataclass
from pathlib import Path

PACKAGES = (
    "megatron",
    "sglang",
    "transformer_engine",
    "torch_memory_saver",
    "apex",
    "amp_C",
    "fused_weight_gradient_mlp_cuda",
    "pynvml",
)


@dataclass(frozen=True)
class Pin:
    """A name of another package, and what a file relies on."""

    name: str
    args: str | None = None
    """Arguments that the file passes: positional ones, then after `*` those by keyword."""
    defaults: str = ""
    """Defaults, as `name=value`, that the file relies on because it does not pass the arguments."""
    has: str = ""
    """Attributes that the file uses."""
    of: str = ""
    """Expressions of the file, separated by commas, whose values have this class."""
    mentions: str = ""
    """Names and strings that the definition must contain, such as the values of a choice."""
    keys: str = ""
    """Dict of the file whose keys are arguments of this definition, perhaps of several."""
    whole: bool = False
    """Whether `args` must be all parameters, because rlcore replaces or wraps the function."""
    lacks: str = ""
    """Versions of the package without this name; the caller then takes another path."""


def parsed(row: str) -> Pin:
    """Return a row of pins.txt as a `Pin`."""
    callee, *parts = row.split("; ")
    name, parenthesis, args = callee.removesuffix(")").partition("(")
    fields = {part.partition(" ")[0]: part.partition(" ")[2] for part in parts}
    whole = "whole" in fields and not fields.pop("whole")
    return Pin(name, args if parenthesis else None, whole=whole, **fields)


def table(text: str) -> dict[str, list[Pin]]:
    """Return the rows of pins.txt by file."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found: dict[str, list[Pin]] = {}
    for row in "\n".join(lines).replace("\n    ", " ").splitlines():
        if row.startswith("["):
            pins = found[row.strip("[]")] = []
        else:
            pins.append(parsed(row))
    return found


PINS = table(Path(__file__).with_name("pins.txt").read_text())
NOT_INSTALLED = {file: pins for file, pins in PINS.items() if not file.startswith("rlcore/")}
"""Rows of packages that CI does not install."""

MPS = {
    "options": {"-d", "-f"},
    "commands": {"get_client_list", "get_server_list", "get_server_status", "quit"},
    "environment": {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        "CUDA_MPS_LOG_DIRECTORY",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
        "CUDA_MPS_PIPE_DIRECTORY",
    },
}
"""What NVIDIA documents of `nvidia-cuda-mps-control`, which comes with the driver: the manual page
nvidia-cuda-mps-control(1) of driver 580, and "Multi-Process Service", docs.nvidia.com/deploy/mps,
the appendices "Tools and Interface Reference" and "Environment Variables"."""

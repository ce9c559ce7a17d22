"""Stand-in for sgl_kernel, whose CPU build is not published.

`torch.ops.sgl_kernel` stays empty on purpose: SGLang then sees no AMX and takes the plain torch
version of every layer. What it imports by name and a text model without speculation does not run
raises.
"""

from typing import Any

__version__ = "0.0.0"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name}: there is no CPU version of it here")

    return missing

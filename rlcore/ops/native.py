"""Which build of an op runs: the C++ extension, or the Python reference. Announced, never silent.

The environment variable RLCORE_NATIVE=1 makes a missing build an error, 0 turns a present one off.
"""

import functools
import importlib
import os
from types import ModuleType

from rlcore.utils.log import announce


@functools.cache
def load(op: str) -> ModuleType | None:
    """The extension, or None where `op` runs its Python reference. Says which, once per op."""
    wanted = os.environ.get("RLCORE_NATIVE", "")
    if wanted == "0":
        announce(op, "python (RLCORE_NATIVE=0)")
        return None
    try:
        core = importlib.import_module("rlcore._C")
    except ImportError as error:
        if wanted == "1":
            raise ImportError(
                f"RLCORE_NATIVE=1: {op} has no native build ({error}); "
                "run `RLCORE_NATIVE=1 bash tools/setup.sh` for the reason"
            ) from error
        why = "no native build" if isinstance(error, ModuleNotFoundError) else str(error)
        announce(op, f"python ({why})")
        return None
    announce(op, "native")
    return core

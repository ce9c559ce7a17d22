"""Checks of machines, network and inputs before a run. Each returns a `CheckResult`.

`machine` (driver, GPUs, kernels, compilers, sandbox), `ranks` (store, shared folder, all-reduce),
`task` (settings, disk, data, reward), `start` (the cheap checks, at every start on GPUs).
`rlcore preflight` runs all of them.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from rlcore.utils.errors import ConfigError

State = Literal["PASS", "WARN", "FAIL", "SKIP"]


class CheckResult(msgspec.Struct, frozen=True):
    """Result of one check; equal results of several ranks are shown once."""

    check: str
    """Name of the check, such as `driver`."""
    state: State
    text: str
    """What was found; with WARN or FAIL also what to do."""


def attempt(check: str, look: Callable[[], str]) -> CheckResult:
    """Return PASS with the text that `look` returns, or FAIL with its ConfigError."""
    try:
        return CheckResult(check, "PASS", look())
    except ConfigError as error:
        return CheckResult(check, "FAIL", str(error))

"""Register our hooks in SGLang's own hook registry."""

from collections.abc import Callable
from typing import Any

_targets: list[str] = []


def register(target: str, hook: Callable[..., Any], kind: Any) -> None:
    """Register `hook` for the SGLang function `target`. `kind`: SGLang's HookType."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    _targets.append(target)
    HookRegistry.register(target, hook, kind)


def missing() -> list[str]:
    """Return the targets that SGLang failed to hook. SGLang itself only logs such a failure."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return [target for target in _targets if target not in HookRegistry._patched]

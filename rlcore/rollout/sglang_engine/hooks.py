"""What we replace in SGLang, by its own registry."""

from collections.abc import Callable
from typing import Any

_targets: list[str] = []


def register(target: str, hook: Callable[..., Any], kind: Any) -> None:
    """Have SGLang call `hook` at `target`, in the `kind` of its HookType."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    _targets.append(target)
    HookRegistry.register(target, hook, kind)


def missing() -> list[str]:
    """Return what SGLang did not let us replace: it logs that and continues."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return [target for target in _targets if target not in HookRegistry._patched]

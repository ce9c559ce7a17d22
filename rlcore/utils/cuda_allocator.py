"""Find and remove the setting of torch's CUDA allocator that uses expandable segments."""

from collections.abc import Mapping, MutableMapping

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with the allocator's settings, as `key:value` with commas in between."""


def expandable(env: Mapping[str, str]) -> str:
    """Return the variable that turns on expandable segments; "" if they are off."""
    for name in VARIABLES:
        for setting in env.get(name, "").split(","):
            key, _, value = setting.partition(":")
            if key.strip() == "expandable_segments" and value.strip().lower() == "true":
                return name
    return ""


def remove_expandable(env: MutableMapping[str, str]) -> None:
    """Remove the setting of expandable segments from the environment, and keep all others."""
    for name in VARIABLES:
        settings = env.pop(name, "").split(",")
        kept = [
            s for s in settings if s.partition(":")[0].strip() not in ("expandable_segments", "")
        ]
        if kept:
            env[name] = ",".join(kept)

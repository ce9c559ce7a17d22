"""rlcore: RL post-training of large language models in one SPMD torchrun program."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.cli.api import train as train

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `train` on first use, so that `import rlcore` stays fast."""
    if name == "train":
        from rlcore.cli.api import train

        return train
    raise AttributeError(f"module {__name__} has no attribute {name}")

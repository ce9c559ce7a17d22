"""Stand-in for triton on machines without a GPU: kernels can be declared, but are never run."""

from rlcore_hollow import hollow

__version__ = "0.0.0"


def cdiv(a: int, b: int) -> int:
    return -(a // -b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 1


class Config:
    """Configuration of an autotuned kernel."""

    def __init__(self, kwargs: dict | None = None, **options: object) -> None:
        self.kwargs = kwargs or {}


hollow(__name__)

"""Parts of a run that write down what they are asked for, for tests of the device's owner."""

from typing import Any

from rlcore.trainer.device import Parts
from rlcore.trainer.progress import Progress, Ranks
from rlcore.trainer.sizes import EngineSizes, Sized
from rlcore.utils.spans import Spans


class Part:
    """An engine or a learner."""

    def __init__(self, name: str, said: list[str], failure: str = "") -> None:
        self.name, self.said, self.failure = name, said, failure

    def restart(self) -> None:
        raise AssertionError("no test asked for a restart")

    def is_starting(self, timeout_s: float) -> bool:
        return False

    def resident_bytes(self) -> dict[str, int]:
        return {"weights": 2 * 10**9}

    def __getattr__(self, what: str) -> Any:
        return lambda tags=(): self.said.append(f"{self.name} {what} {_words(tags)}".strip())


def _words(tags: object) -> str:
    return " ".join(tags) if isinstance(tags, list | tuple) else str(tags)


class Channel:
    """A push that says so."""

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def update_weights(self, learner: Any, engine: Any, version: int) -> dict[str, float]:
        self.said.append(
            f"push {version}" + (" to shelf" if getattr(engine, "name", "") == "shelf" else "")
        )
        return {"bytes": 4.0}

    def resize(self, tp: int) -> None:
        self.said.append(f"channel tp {tp}")


class Shelf:
    """Weights in host memory."""

    num_bytes = 10**9
    name = "shelf"

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def fill(self, engine: Part) -> None:
        self.said.append(f"fill {engine.name}")


def sizes_of(said: list[str], tp: int = 1, policy: Any = None, ranks: Any = (0,)) -> EngineSizes:
    """Sizes whose change is written down."""

    def sized(size: int) -> Sized:
        if size != tp:
            said.append(f"sized {size}")
        return Sized(tp=size, engine_ranks=ranks, controller=lambda stop, elastic: None)

    return EngineSizes(sized, tp, policy)


def parts_of(said: list[str], **more: Any) -> Parts:
    """Parts of one rank that has an engine and a learner."""
    usual = {
        "ranks": Ranks(rank=0, size=1, model_parallel_groups=[[0]], dp_rank=0),
        "engine": Part("engine", said),
        "learner": Part("learner", said),
        "channel": Channel(said),
        "restart_engine": lambda: said.append("restart"),
        "sizes": sizes_of(said),
        "progress": Progress(),
        "spans": Spans(),
        "timeout_s": 60.0,
    }
    return Parts(**(usual | more))

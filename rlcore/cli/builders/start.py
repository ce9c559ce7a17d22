"""Common input of all builders of a run."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rlcore.cli.world import World
from rlcore.config.schema import Config
from rlcore.hf.config import HFConfig
from rlcore.trainer.callbacks import Callbacks
from rlcore.trainer.progress import Progress
from rlcore.utils.spans import Spans
from rlcore.utils.writes import LogWrites


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """State of one rank's run while it is being built."""

    cfg: Config
    world: World
    hf: HFConfig
    """Architecture of the model in training."""
    folder: Path
    """Folder of the run."""
    spans: Spans
    progress: Progress
    writes: LogWrites = field(default_factory=LogWrites)
    """Handler of failed writes to log files."""
    closing: ExitStack
    """Functions that close the parts, called in reverse order at the end of the run."""
    callbacks: Callbacks | None = None
    """The user's callbacks; None if there are none."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which has the data and reports."""
        return self.world.rank == 0

    def on_close(self, close: Callable[[], None]) -> None:
        """Register `close` to be called at the end of the run."""
        self.closing.callback(close)

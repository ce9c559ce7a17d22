"""What every builder of a run is given."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rlcore.cli.world import World
from rlcore.config.schema import Config
from rlcore.hf.config import HFConfig
from rlcore.trainer.progress import Progress
from rlcore.utils.spans import Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A run that is being built, on one rank."""

    cfg: Config
    world: World
    hf: HFConfig
    """Architecture of the model in training."""
    folder: Path
    """Of the run."""
    spans: Spans
    progress: Progress
    closing: ExitStack
    """Ends what was started, last first."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which has the data and reports."""
        return self.world.rank == 0

    def on_close(self, close: Callable[[], None]) -> None:
        """Call `close` at the end of the run."""
        self.closing.callback(close)

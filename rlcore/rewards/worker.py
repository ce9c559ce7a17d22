"""Child process of a reward, with the samples that the pool sent to the child."""

import dataclasses
import selectors
import time
from collections import deque
from collections.abc import Callable

from rlcore.rewards.wire import ScoreJob
from rlcore.utils.children import GuardedChild


@dataclasses.dataclass(eq=False, slots=True)
class PendingSample:
    """Sample for a child process, with its encoded message."""

    job: ScoreJob
    frame: bytearray


class RewardWorker(GuardedChild):
    """Child process of a reward, used by one thread only. `inflight` has the samples sent to the
    child, in scoring order; `head_since` is the time when scoring of the first sample began."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        start: bytearray,
        sink: Callable[[bytes], None],
        module: str = "rlcore.rewards.child",
    ) -> None:
        """Start the child `module`. `start`: its first message. `sink`: receives its output."""
        self.ready = False
        self.retiring = False
        self.inflight: deque[PendingSample] = deque()
        self.head_since = 0.0
        self.start_rss = 0
        super().__init__(selector, start, sink, module)

    def become_ready(self) -> None:
        """Mark the child as ready for samples, and measure its memory growth from now on."""
        self.ready = True
        self.start_rss = self.rss()

    def hold(self, entry: PendingSample) -> None:
        """Append a sample to the samples in flight."""
        if not self.inflight:
            self.head_since = time.monotonic()
        self.inflight.append(entry)

    def end_first(self) -> None:
        """Remove the first sample, which has been scored, and start timing the next sample."""
        self.inflight.popleft()
        self.head_since = time.monotonic()

    def retire(self) -> None:
        """Mark the child as retiring, so that it gets no more samples."""
        self.retiring = True

"""One child process of a reward, and the samples that it holds."""

import dataclasses
import selectors
import time
from collections import deque
from collections.abc import Callable

from rlcore.rewards.wire import Job
from rlcore.utils.children import GuardedChild


@dataclasses.dataclass(eq=False, slots=True)
class Entry:
    """A sample on its way through a child, and its bytes on the wire."""

    job: Job
    frame: bytearray


class Worker(GuardedChild):
    """Lives in the service's thread. `inflight` are the samples that it holds, in the order in
    which it scores them; `head_since` is when it began the first."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        start: bytearray,
        sink: Callable[[bytes], None],
        module: str = "rlcore.rewards.child",
    ) -> None:
        """As in `GuardedChild`."""
        self.ready = False
        self.retiring = False
        self.inflight: deque[Entry] = deque()
        self.head_since = 0.0
        self.start_rss = 0
        super().__init__(selector, start, sink, module)

    def become_ready(self) -> None:
        """Take samples from now on; memory is counted from here."""
        self.ready = True
        self.start_rss = self.rss()

    def hold(self, entry: Entry) -> None:
        """Score a sample more."""
        if not self.inflight:
            self.head_since = time.monotonic()
        self.inflight.append(entry)

    def end_first(self) -> None:
        """Have scored the first sample, and begin the next."""
        self.inflight.popleft()
        self.head_since = time.monotonic()

    def retire(self) -> None:
        """Take no more samples."""
        self.retiring = True

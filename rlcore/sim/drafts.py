"""What drafts gain: tokens of a forward by position in the response."""

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftGain:
    """Tokens per forward of a request with drafts. In a forward every request takes `width`
    positions: on a GPU a fixed number, drafted or not, since CUDA graphs are captured for it."""

    starts: tuple[int, ...]
    """First positions of the ranges, from 0."""
    gains: tuple[float, ...]
    """Tokens per forward in each range."""
    width: float

    def at(self, position: float) -> float:
        """Return the tokens per forward at a position in the response."""
        return self.gains[bisect_right(self.starts, position) - 1]

    def forwards(self, position: float) -> float:
        """Return the number of forwards from the first token to `position`."""
        total, k = 0.0, 0
        for k, (start, gain) in enumerate(zip(self.starts, self.gains, strict=True), 1):
            end = self.starts[k] if k < len(self.starts) else position
            if position <= end:
                return total + (position - start) / gain
            total += (end - start) / gain
        return total

    def position(self, forwards: float) -> float:
        """Return the position after a number of forwards: the inverse of `forwards`."""
        at = 0.0
        for k, (start, gain) in enumerate(zip(self.starts, self.gains, strict=True), 1):
            size = self.starts[k] - start if k < len(self.starts) else float("inf")
            if forwards <= size / gain:
                return start + forwards * gain
            forwards -= size / gain
            at = start + size
        return at


REAL = DraftGain(starts=(0, 1024, 4096, 16384), gains=(2.18, 2.23, 3.87, 5.56), width=8)
"""Gains of the shipped drafter with `--draft.verify_tokens 8`, on the long responses of a 32B model
over eleven checkpoints, each drafted from the checkpoint before. Replayed, not simulated:
`tools/studies/bench_drafts.py --real` with windows of 7 (tools/results/drafts_by_position.json).
Those responses are greedy, and beyond 4,096 tokens often repeat themselves."""

"""What drafts gain: tokens of a forward by position in the response."""

from bisect import bisect_right
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DraftGain:
    """Tokens per forward of a request with drafts. In a forward every request takes `width`
    positions: on a GPU a fixed number, drafted or not, since CUDA graphs are captured for it."""

    starts: tuple[int, ...]
    """First positions of the ranges, from 0."""
    gains: tuple[float, ...]
    """Tokens per forward in each range."""
    width: float
    paces: tuple[tuple[tuple[int, float], ...], ...] = field(default=(), repr=False)
    """By prompt, replayed responses as (length, forwards over those of the mean gain)."""

    def pace(self, row: int, length: int, seed: int) -> float:
        """Return the forwards of a response to the prompt in data set row `row`, over those of the
        mean gain: those of one of the prompt's replayed responses of the nearest length, drawn by
        `seed`. Without any, return 1."""
        own = self.paces[row % len(self.paces)] if self.paces else ()
        if not own:
            return 1.0
        nearest = min(abs(n - length) for n, _ in own)
        equal = [pace for n, pace in own if abs(n - length) == nearest]
        return equal[seed % len(equal)]

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

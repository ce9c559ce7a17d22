"""Decide from measured decode steps whether to draft, and how many tokens: HistoSpec.

A draft raises what a decode step yields, and what it costs. Neither is known in advance: the cost
depends on model, GPU, batch and context, the yield on how well responses resemble earlier ones. So
the gate measures both, separately for batches of 1, 2, 3, 4 to 5, 6 to 7, 8 to 11, ... requests,
and for maximum draft lengths of 0 (plain decoding), 1, 3, 7, ... tokens up to the window:

    rate    Tokens per second of a length, over those of plain decoding. A length is used while its
            rate is the highest, and above 1.
    trial   Another length is tried for some steps if its rate may be higher: by its measured cost,
            or else by that of the next shorter length for every further token, and by a yield that
            grows no slower than the tokens. After each failed trial, the pause before the next one
            doubles.
    loss    Trials, and drafts with a rate below 1, may lose 1 % of the time of a batch size. If
            they have lost more, no trial begins or goes on until other steps have made up for it.

The first measurements of a batch size are those of the next larger one.

So whatever a step costs, the throughput stays close to that of plain decoding or above it (RhymeRL,
arXiv:2508.18588, cuts drafts by the batch, too, by a fixed rule).

Drafting does not change which tokens are sampled, only how many a forward yields."""

import math
from dataclasses import dataclass, field, replace

_PLAIN_FIRST = 4
"""Number of steps without drafts before the first trial."""
_PLAIN_EVERY = 64
"""Number of steps with drafts after which one step without drafts is run, to time it."""
_TRIAL_STEPS, _TRIAL_ROWS = 6, 24
"""Minimum number of steps of a trial, and of requests in them, since few requests vary more."""
_MEAN_STEPS, _MEAN_ROWS = 20, 96
"""The same for the running means."""
_OUTDATED = 256
"""Number of steps after which a mean is outdated: as a share of it, the weight of the next step."""
_KEPT = 2
"""Weight of the means of a larger batch size, in steps."""
_MAY_GAIN = 1.03
"""Minimum ratio of a length's highest possible rate and the current rate for a trial."""
_PAUSE, _LONGEST_PAUSE = 64, 1024
"""Number of steps between two trials of a length."""
_LOSS = 0.01
"""Share of the time that trials and losing drafts may cost; and one step more at the start."""
_SURELY = 1.05
"""Rate of the length in use above which a loss does not turn it off."""


@dataclass(slots=True)
class _Length:
    """Steps with drafts of at most one length, in batches of similar size. Means are running."""

    steps: int = 0
    seconds: float = 0.0
    """Mean time of a step; 0 before the first step."""
    gained: float = 1.0
    """Mean number of tokens of a request in a step."""
    pause: int = 0
    """Number of steps before the next trial."""
    since: int = 0
    """Number of steps since the last trial."""

    def note(self, gained: float, seconds: float, running: int, since: int = 0) -> None:
        """`since`: number of steps of other lengths before; contexts have grown in them."""
        self.steps += 1
        weight = 1 / min(self.steps, max(_MEAN_STEPS, _MEAN_ROWS // running))
        weight = max(weight, min(since / _OUTDATED, 0.5))
        self.seconds += weight * (seconds - self.seconds)
        self.gained += weight * (gained - self.gained)

    def age(self) -> None:
        """Count a step of any length."""
        self.since += 1

    def begin_trial(self) -> None:
        """Start the means anew with the next step."""
        self.steps = 0

    def wait(self, is_first: bool = False) -> None:
        """Wait for the next trial, twice as long as before."""
        self.since = 0
        self.pause = _PAUSE if is_first or not self.pause else min(2 * self.pause, _LONGEST_PAUSE)


@dataclass(slots=True)
class _BatchSize:
    """Measurements and decisions for batches of similar size."""

    lengths: dict[int, _Length]
    """By maximum draft length, in ascending order; 0: plain decoding."""
    used: int = 0
    """Maximum draft length with the highest rate."""
    tried: int = 0
    """Maximum draft length in trial; 0: no trial."""
    plain_ago: int = 0
    """Number of steps since the last plain one."""
    seconds: float = 0.0
    lost: float = 0.0
    """Seconds that trials and losing drafts have cost."""

    def for_fewer(self) -> "_BatchSize":
        """Return a start for smaller batches, in which drafts that pay here pay as well, and longer
        ones may. The next steps are plain, to time them."""
        lengths = {
            n: replace(x, steps=min(x.steps, _KEPT), pause=x.pause if n < self.used else 0)
            for n, x in self.lengths.items()
        }
        return _BatchSize(lengths, used=self.used, plain_ago=_PLAIN_EVERY)

    def choose(self) -> int:
        """Return the maximum draft length of the next step. Begin a trial if one is due."""
        plain = self.lengths[0]
        if plain.steps < _PLAIN_FIRST:
            return 0
        if self.lost > _LOSS * self.seconds + plain.seconds:
            return self.used if self.rate(self.used) > _SURELY else 0
        if not self.tried:
            self.tried = self._due()
        if self.tried:
            return self.tried
        return 0 if self.plain_ago >= _PLAIN_EVERY else self.used

    def note(self, length: int, gained: float, seconds: float, running: int) -> None:
        """Record a step: `gained` tokens of a request."""
        self.seconds += seconds
        for found in self.lengths.values():
            found.age()
        now, plain, best = self.lengths[length], self.lengths[0], self.rate(self.used)
        if length == 0:
            now.note(gained, seconds, running, self.plain_ago)
            self.plain_ago = 0
            return
        now.note(gained, seconds, running)
        self.plain_ago += 1
        instead = gained * plain.seconds / (best if length == self.tried else 1.0)
        self.lost = max(self.lost + seconds - instead, -plain.seconds)
        if length == self.tried:
            self._judge_trial(now, running)
        elif length == self.used and self.rate(length) < 1:
            now.wait()
            self.used = max(self.lengths, key=lambda n: self.rate(n) if n != length else 0.0)

    def rate(self, length: int) -> float:
        """Return tokens per second over those of plain decoding; 0 while unknown."""
        found, plain = self.lengths[length], self.lengths[0]
        if length == 0:
            return 1.0
        if not found.steps or (length == self.tried and length != self.used):
            return 0.0
        return self._rate(found, plain)

    def _rate(self, found: _Length, plain: _Length) -> float:
        return found.gained * plain.seconds / max(found.seconds, 1e-9)

    def _judge_trial(self, now: _Length, running: int) -> None:
        rate, best = self._rate(now, self.lengths[0]), self.rate(self.used)
        if now.steps < max(_TRIAL_STEPS, _TRIAL_ROWS // running):
            return
        length, self.tried = self.tried, 0
        now.wait(is_first=rate > best)
        if rate > best:
            self.used = length

    def _due(self) -> int:
        """Return the length to try next, or 0."""
        least = _MAY_GAIN * self.rate(self.used)
        for length, found in self.lengths.items():
            is_other = length not in (0, self.used)
            if is_other and found.since >= found.pause and self._highest(length) > least:
                found.begin_trial()
                return length
        return 0

    def _highest(self, length: int) -> float:
        """Return the highest possible rate of a length, by what is known of it and of others."""
        plain, gained, seconds = self.lengths[0], 1.0 + length, self.lengths[length].seconds
        shorter = max(
            (n for n in self.lengths if 0 < n < length and self.lengths[n].steps), default=0
        )
        if shorter:
            known = self.lengths[shorter]
            gained = 1 + (known.gained - 1) / shorter * length
            more = max(known.seconds - plain.seconds, 0.0) / shorter
            seconds = seconds or plain.seconds + more * length
        if length < self.used:
            gained = min(gained, self.lengths[self.used].gained)
        return gained * plain.seconds / (seconds or plain.seconds)


@dataclass(slots=True)
class DraftGate:
    """Chooser of the maximum draft length of every step of one engine. If `switches` is False, it
    is always the window, so that nothing depends on timing."""

    window: int
    """Maximum number of tokens in a draft."""
    switches: bool = True
    _sizes: dict[int, _BatchSize] = field(default_factory=dict)

    @property
    def choices(self) -> list[int]:
        """Maximum draft lengths to choose from: 0, 1, 3, 7, ... up to half of the window, and the
        window."""
        short = (2**k - 1 for k in range(self.window.bit_length()))
        return [*(n for n in short if n <= self.window // 2 and self.switches), self.window]

    def length(self, running: int) -> int:
        """Return the maximum draft length of the next step of `running` requests; 0: no drafts."""
        return self._size(running).choose() if self.switches else self.window

    def note(self, running: int, *, length: int, gained: float, seconds: float) -> None:
        """Record a step of `running` requests with drafts of at most `length` tokens, which yielded
        `gained` tokens."""
        if self.switches:
            self._size(running).note(length, gained / running, seconds, running)

    def rate(self, running: int) -> float:
        """Return tokens per second at the length in use, over those of plain decoding."""
        size = self._size(running)
        return size.rate(size.used)

    def renew(self) -> None:
        """Forget everything, because drafts improve when histories become available."""
        self._sizes.clear()

    def _size(self, running: int) -> _BatchSize:
        key = int(2 * math.log2(running))
        if key not in self._sizes:
            larger = min((k for k in self._sizes if k > key), default=None)
            self._sizes[key] = (
                _BatchSize({n: _Length() for n in self.choices})
                if larger is None
                else self._sizes[larger].for_fewer()
            )
        return self._sizes[key]

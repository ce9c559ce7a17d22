"""Decide from measured decode steps whether to draft, and how many tokens: HistoSpec.

A draft raises what a decode step yields, and what it costs. Neither is known in advance: the cost
depends on model, GPU, batch and context, the yield on how well responses resemble earlier ones. So
the gate measures both, separately for batches of 1, 2, 3, 4 to 5, 6 to 7, 8 to 11, ... requests,
and for maximum draft lengths of 0 (plain decoding), 1, 3, 7, ... tokens up to the window:

    rate    Tokens per second of a length, over those of plain decoding. A length is used while its
            rate is the highest, and above 1.
    trial   Another length is tried for some steps if its highest possible rate is better. The
            estimate takes the length's measured step time. If it has none, the time and the yield
            of the next shorter length are extrapolated linearly. The more time a trial has lost,
            the later is the next one.
    loss    Trials, and drafts with a rate below 1, may lose 1 % of the time of a batch size. While
            they have lost more, no trial runs.

The first trial of a batch size is that of the length that the next larger one uses.

So whatever a step costs, the throughput stays close to that of plain decoding or above it (RhymeRL,
arXiv:2508.18588, cuts drafts by the batch, too, by a fixed rule).

Drafting does not change which tokens are sampled, only how many a forward yields."""

import math
from dataclasses import dataclass, field

_PLAIN_FIRST = 4
"""Number of steps without drafts before the first trial."""
_PLAIN_EVERY = 64
"""Number of steps with drafts after which one step without drafts is run, to time it."""
_TRIAL_STEPS, _TRIAL_ROWS = 6, 24
"""Minimum number of steps of a trial, and of requests in them, since few requests vary more."""
_MEAN_STEPS, _MEAN_ROWS = 20, 96
"""The same for the running means."""
_OUTDATED = 256
"""A step that comes n steps after the last one of its length has at least weight n / 256."""
_MAY_GAIN = 1.03
"""Minimum ratio of a length's highest possible rate and the current rate for a trial."""
_SHARE = 0.003
"""Maximum share of the time that the trials of one length may cost."""
_LOSS = 0.01
"""Maximum share of the time that trials and losing drafts may cost, besides one plain step."""
_SURELY = 1.05
"""Minimum rate with which drafts stay on although more than `_LOSS` has been lost."""


@dataclass(slots=True)
class _Length:
    """Steps with drafts of at most one length, in batches of similar size. Means are running."""

    steps: int = 0
    seconds: float = 0.0
    """Mean time of a step; 0 before the first step."""
    gained: float = 1.0
    """Mean number of tokens of a request in a step."""
    loss: float = 0.0
    """Seconds lost in the last trial."""
    since: float = 0.0
    """Seconds of all steps in this batch size since the last trial."""

    def note(self, gained: float, seconds: float, running: int, since: int = 0) -> None:
        """Add a step to the means. `since`: number of steps of other lengths since the last one, in
        which contexts have grown; a large number raises the weight of this step."""
        self.steps += 1
        weight = 1 / min(self.steps, max(_MEAN_STEPS, _MEAN_ROWS // running))
        weight = max(weight, min(since / _OUTDATED, 0.5))
        self.seconds += weight * (seconds - self.seconds)
        self.gained += weight * (gained - self.gained)

    def age(self, seconds: float) -> None:
        """Add the seconds of a step of any length."""
        self.since += seconds

    def begin_trial(self) -> None:
        """Start the means anew with the next step."""
        self.steps = 0

    def end_trial(self, loss: float) -> None:
        """End a trial. The next one waits until `loss` is at most `_SHARE` of the time."""
        self.since, self.loss = 0.0, loss


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

    def choose(self, first: int) -> int:
        """Return the maximum draft length of the next step. Begin a trial if one is due. `first`:
        length to try first; 0: the shortest."""
        plain = self.lengths[0]
        if plain.steps < _PLAIN_FIRST:
            return 0
        if self.lost > _LOSS * self.seconds + plain.seconds:
            return self.used if self.rate(self.used) > _SURELY else 0
        if not self.tried:
            self.tried = self._due(first)
        if self.tried:
            return self.tried
        return 0 if self.plain_ago >= _PLAIN_EVERY else self.used

    def note(self, length: int, gained: float, seconds: float, running: int) -> None:
        """Record a step: `gained` tokens of a request."""
        self.seconds += seconds
        for found in self.lengths.values():
            found.age(seconds)
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
            now.end_trial(_MEAN_STEPS * (now.seconds - now.gained * plain.seconds))
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
        if now.steps < max(_TRIAL_STEPS, _TRIAL_ROWS // running):
            return
        rate, best = self._rate(now, self.lengths[0]), self.rate(self.used)
        length, self.tried = self.tried, 0
        now.end_trial(now.steps * now.seconds * (1 - rate / best))
        if rate > best:
            self.used = length

    def _due(self, first: int) -> int:
        """Return the length to try next, or 0."""
        if first and not any(found.steps for n, found in self.lengths.items() if n):
            return first
        least = _MAY_GAIN * self.rate(self.used)
        for length, found in self.lengths.items():
            is_other = length not in (0, self.used)
            if is_other and _SHARE * found.since >= found.loss and self._highest(length) > least:
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
        if not self.switches:
            return self.window
        size, key = self._size(running), _key(running)
        larger = min((k for k in self._sizes if k > key), default=key)
        return size.choose(first=self._sizes[larger].used)

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
        """Forget what drafts gain, because they improve when histories become available."""
        for key, size in self._sizes.items():
            lengths = {n: _Length() for n in self.choices} | {0: size.lengths[0]}
            self._sizes[key] = _BatchSize(lengths, seconds=size.seconds)

    def _size(self, running: int) -> _BatchSize:
        key = _key(running)
        if key not in self._sizes:
            self._sizes[key] = _BatchSize({n: _Length() for n in self.choices})
        return self._sizes[key]


def _key(running: int) -> int:
    """Return the number of a batch size's class: two for each doubling."""
    return int(2 * math.log2(running))

"""Decide from measured decode steps whether to draft, and how many tokens: HistoSpec.

A decode step over n tokens takes about a + b n seconds, plus c if drafts are made and verified. The
time `a` is for reading the weights, `b` for the arithmetic of a token. The times are fitted to an
engine's steps; older steps have less weight. At the knee, a step of n = a / b tokens takes twice as
long as an empty step.

    cap     Drafts in a batch of `running` requests have at most knee // running - 1 tokens (from 1
            to the window), so that a forward stays below the knee (RhymeRL, arXiv:2508.18588).
    gate    Suppose that drafts have d tokens per request and yield e tokens per request and step.
            Drafting is on while it raises the throughput:

                e (a + b running) > a + b running (1 + d) + c

            Batches of 1, 2 to 3, 4 to 7, ... requests have separate d and e. If drafting is off, it
            is retried after 32 steps. Each failed retry doubles this pause, up to 1,024 steps.

Drafting does not change which tokens are sampled, only how many a forward yields."""

from dataclasses import dataclass, field

_WARM = 6
"""Minimum number of steps with drafts before drafting may be switched off, also during a retry."""
_FORGET = 0.1
"""Minimum weight of a new step in the running means of draft statistics."""
_WAIT = 32
_LONGEST_WAIT = 1024
_PLAIN_EVERY = 64
"""Number of steps with drafts after which one step without drafts is run, to time it."""
_FIT_FORGET = 0.01
_FIT_STEPS = 24
"""Minimum number of steps for a fit, including `_WARM` with drafts and `_WARM` without drafts."""
LARGEST_KNEE = 1 << 16


class DraftCost:
    """Cost model of a decode step: a + b * tokens seconds, plus c with drafts. The fit minimizes
    the squares of relative errors."""

    def __init__(self) -> None:
        self._sums = [[0.0] * 3 for _ in range(3)]
        self._right = [0.0] * 3
        self._steps = [0, 0]  # numbers of steps without drafts and with drafts

    def note(self, tokens: int, drafts: bool, seconds: float) -> None:
        """Add one decode step to the fit. Errors are relative to the measured time, so a slow
        outlier has little weight."""
        self._steps[drafts] += 1
        weight, x = 1 / max(seconds, 1e-9) ** 2, (1.0, float(tokens), float(drafts))
        for i in range(3):
            self._right[i] = (1 - _FIT_FORGET) * self._right[i] + weight * x[i] * seconds
            for j in range(3):
                self._sums[i][j] = (1 - _FIT_FORGET) * self._sums[i][j] + weight * x[i] * x[j]

    def fit(self) -> tuple[float, float, float] | None:
        """Return the fitted (a, b, c), each at least 0. While the steps are too few or too similar
        for a fit, return None."""
        if sum(self._steps) < _FIT_STEPS or min(self._steps) < _WARM:
            return None
        s, r = self._sums, self._right
        mean, share = s[0][1] / s[0][0], s[0][2] / s[0][0]
        variance = s[1][1] / s[0][0] - mean * mean
        if variance < (0.2 * mean) ** 2:
            return None
        # If token counts hardly vary within each kind of step, b and c are ambiguous, so c is 0.
        along = (s[1][2] / s[0][0] - mean * share) ** 2 / max(share * (1 - share), 1e-9)
        is_told = variance - along > (0.05 * mean) ** 2
        found = _solve(s, r, (0, 1, 2) if is_told else (0, 1))
        if found[2] < 0:  # drafts have no measurable cost: c is 0
            found = _solve(s, r, (0, 1))
        if found[1] < 0:
            found = _solve(s, r, (0,))
        if found[0] < 0:
            found = _solve(s, r, (1,))
        a, b, c = (max(x, 0.0) for x in found)
        return (a, b, c) if a + b > 0 else None


def _solve(sums: list[list[float]], right: list[float], used: tuple[int, ...]) -> list[float]:
    """Solve the normal equations by elimination for the coefficients `used`; the others are 0."""
    rows = [[sums[i][j] for j in used] + [right[i]] for i in used]
    for k in range(len(rows)):
        pivot = max(range(k, len(rows)), key=lambda i: abs(rows[i][k]))
        rows[k], rows[pivot] = rows[pivot], rows[k]
        if abs(rows[k][k]) < 1e-300:
            return [0.0] * len(right)
        for i in range(len(rows)):
            if i != k:
                part = rows[i][k] / rows[k][k]
                rows[i] = [x - part * y for x, y in zip(rows[i], rows[k], strict=True)]
    out = [0.0] * len(right)
    for k, column in enumerate(used):
        out[column] = rows[k][-1] / rows[k][k]
    return out


@dataclass(slots=True)
class _BatchStats:
    """Statistics of drafts in batches of similar size."""

    steps: int = 0
    gained: float = 1.0
    """Mean number of tokens generated per request in a step with drafts."""
    drafted: float = 0.0
    """Mean number of drafted tokens per request in a step with drafts."""
    is_on: bool = True
    wait: int = _WAIT
    """Number of steps without drafts before drafting is retried."""
    since: int = 0
    """If drafting is on: number of steps since the last step without drafts. If drafting is off:
    number of steps since the last retry."""

    def note(self, drafted: float, gained: float) -> None:
        self.steps += 1
        weight = max(1 / self.steps, _FORGET)
        self.drafted += weight * (drafted - self.drafted)
        self.gained += weight * (gained - self.gained)

    def judge(self, drafts: bool, gain: float | None) -> bool:
        """Decide after a step whether drafting is on; return whether the decision has changed.
        `gain`: ratio of the throughputs with and without drafts; None while unknown."""
        if gain is None:
            self.since = 0 if self.since >= 2 * _WARM else self.since + (not drafts)
            return False
        was_tried, now = drafts and not self.is_on, gain > 1
        if now != self.is_on:
            if not now and self.steps < _WARM:
                return False
            self.is_on, self.wait, self.since = now, _WAIT, 0
            return True
        if was_tried and self.steps == _WARM:
            self.wait, self.since = min(2 * self.wait, _LONGEST_WAIT), 0
        elif self.is_on:
            self.since = self.since + 1 if drafts else 0
        else:
            self.since += 1
            if self.since >= self.wait:
                self._try_again()
        return False

    def _try_again(self) -> None:
        self.steps, self.gained, self.drafted, self.since = 0, 1.0, 0.0, 0


@dataclass(slots=True)
class DraftGate:
    """Switch and length limit of drafts for one engine. If `switches` is False, drafting is always
    on and only the window limits drafts, so that nothing depends on timing."""

    window: int
    """Maximum number of tokens in a draft."""
    start: int
    """Maximum number of tokens in a draft until the knee is known."""
    switches: bool = True
    flips: int = 0
    """Number of times that drafting was switched on or off, over all batch sizes."""
    _cost: DraftCost = field(default_factory=DraftCost)
    _fit: tuple[float, float, float] | None = None
    _batches: dict[int, _BatchStats] = field(default_factory=dict)

    def wants(self, running: int) -> bool:
        """Return whether the next decode step of `running` requests should use drafts."""
        if not self.switches:
            return True
        batch = self._batch(running)
        if batch.steps < _WARM:
            return True
        if self._fit is None:
            return batch.since >= _WARM  # the fit needs steps with and without drafts
        return batch.is_on and batch.since < _PLAIN_EVERY

    def cap(self, running: int) -> int:
        """Return the maximum draft length in a batch of `running` requests."""
        if not self.switches:
            return self.window
        knee = self.knee
        if knee is None:
            return self.start
        return max(1, min(int(knee) // running - 1, self.window))

    def note(self, running: int, *, drafts: bool, tokens: int, gained: int, seconds: float) -> None:
        """Record a decode step of `running` requests. Its forward over `tokens` tokens took
        `seconds` and yielded `gained` tokens."""
        if not self.switches:
            return
        self._cost.note(tokens, drafts, seconds)
        self._fit = self._cost.fit()
        batch = self._batch(running)
        if drafts:
            batch.note(tokens / running - 1, gained / running)
        self.flips += batch.judge(drafts, self.gain(running))

    def renew(self) -> None:
        """Reset the draft statistics, because drafts improve when histories become available."""
        self._batches.clear()

    @property
    def knee(self) -> float | None:
        """Tokens with which a step takes twice as long as an empty step; None while unknown."""
        if self._fit is None:
            return None
        a, b, _ = self._fit
        return min(max(a / b, 1.0), LARGEST_KNEE) if b > 0 else float(LARGEST_KNEE)

    def gain(self, running: int) -> float | None:
        """Return the ratio of tokens per second with and without drafts; None while unknown."""
        batch = self._batch(running)
        if self._fit is None or batch.steps < _WARM:
            return None
        a, b, c = self._fit
        plain = a + b * running
        return batch.gained * plain / (plain + b * running * batch.drafted + c)

    def _batch(self, running: int) -> _BatchStats:
        return self._batches.setdefault(running.bit_length(), _BatchStats())

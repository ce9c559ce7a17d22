"""When do drafts pay? HistoSpec's two limits on them, from what decode steps were seen to take.

A decode step over n tokens takes about a + b n seconds: `a` to read the weights, `b` a token of
arithmetic. At the knee, n = a / b tokens, a step takes twice as long as one of no tokens.

    cap     drafts of a batch of `running` requests are at most knee // running - 1 long (1 to the
            window), so that a forward stays below the knee: PAPERS.md C1, arXiv:2508.18588.
    gate    with drafts a step gains e tokens a request and takes v seconds, without it gains one
            and takes p. Drafts are on while e p > v. Batches of 1, 2 to 3, 4 to 7, ... requests
            have figures of their own. The one that loses is tried again for a few steps, after 32
            steps, 64, ... up to 1,024, as long as it goes on losing.

Nothing here changes what is sampled: drafts decide how many tokens a forward gives, not which.
"""

from dataclasses import dataclass, field

_WARM = 6
"""Steps of each kind before they are compared; also of a later try."""
_FORGET = 0.1
"""Weight of a new step in the means."""
_WAIT = 32
_LONGEST_WAIT = 1024
_FIT_FORGET = 0.01
_FIT_STEPS = 24
"""Steps before a knee is believed."""
LARGEST_KNEE = 1 << 16


@dataclass(slots=True)
class _Kind:
    """Steps with drafts, or steps without."""

    steps: int = 0
    seconds: float = 0.0
    gained: float = 1.0
    """Tokens of a request in one step."""

    def note(self, seconds: float, gained: float) -> None:
        self.steps += 1
        weight = max(1 / self.steps, _FORGET)
        self.seconds += weight * (seconds - self.seconds)
        self.gained += weight * (gained - self.gained)


@dataclass(slots=True)
class _Batch:
    """What is known of batches of about one size."""

    plain: _Kind = field(default_factory=_Kind)
    drafts: _Kind = field(default_factory=_Kind)
    wait: int = _WAIT
    """Steps until the loser is tried again."""
    since: int = 0
    """Steps since it was tried."""
    trying: int = 0
    """Steps of the present try that are left."""
    drafts_win: bool = True

    def gain(self) -> float:
        """Tokens a second with drafts over those without."""
        if not self.drafts.seconds:
            return 1.0
        return self.drafts.gained * self.plain.seconds / self.drafts.seconds


@dataclass(slots=True)
class Line:
    """Least squares of seconds over tokens, older steps counting less and less."""

    count: float = 0.0
    steps: int = 0
    n: float = 0.0
    t: float = 0.0
    nn: float = 0.0
    nt: float = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        self.steps += 1
        keep = 1 - _FIT_FORGET
        self.count = keep * self.count + 1
        self.n = keep * self.n + tokens
        self.t = keep * self.t + seconds
        self.nn = keep * self.nn + tokens * tokens
        self.nt = keep * self.nt + tokens * seconds

    def knee(self) -> float | None:
        """a / b of seconds = a + b tokens; None while steps are too few or too alike to tell."""
        if self.steps < _FIT_STEPS:
            return None
        n, t = self.n / self.count, self.t / self.count
        spread = self.nn / self.count - n * n
        if spread < (0.2 * n) ** 2:
            return None
        slope = (self.nt / self.count - n * t) / spread
        if slope <= 0 or t <= slope * n * 1e-3:
            return float(LARGEST_KNEE)
        return min(max((t - slope * n) / slope, 1.0), float(LARGEST_KNEE))


class Gate:
    """Of one replica. Without `switches` drafts are always on and never capped: then nothing
    depends on the clock."""

    def __init__(self, *, window: int, start: int, switches: bool = True) -> None:
        """`window`: the longest draft; `start`: the longest before the knee is known."""
        self._window, self._start, self._switches = window, start, switches
        self._batches: dict[int, _Batch] = {}
        self._line = Line()
        self.flips = 0
        """Times that the winner changed."""

    def wants(self, running: int) -> bool:
        """Shall the next step of `running` requests verify drafts?"""
        if not self._switches:
            return True
        batch = self._batch(running)
        if batch.drafts.steps < _WARM:
            return True
        if batch.plain.steps < _WARM:
            return False
        return batch.drafts_win != (batch.trying > 0)

    def cap(self, running: int) -> int:
        """The longest draft of one of `running` requests."""
        if not self._switches:
            return self._window
        knee = self._line.knee()
        if knee is None:
            return self._start
        return max(1, min(int(knee) // running - 1, self._window))

    def note(self, running: int, *, drafts: bool, tokens: int, gained: int, seconds: float) -> None:
        """A step of `running` requests is over: `seconds` for a forward over `tokens` tokens, which
        gave `gained`."""
        if not self._switches:
            return
        self._line.note(tokens, seconds)
        batch = self._batch(running)
        (batch.drafts if drafts else batch.plain).note(seconds, gained / running)
        tried = batch.trying > 0
        if tried:
            batch.trying -= 1
            if batch.trying:
                return
        elif min(batch.drafts.steps, batch.plain.steps) < _WARM:
            return
        won = batch.gain() > 1
        if won != batch.drafts_win:
            self.flips += 1
            batch.drafts_win, batch.wait, batch.since = won, _WAIT, 0
        elif tried:
            batch.wait = min(2 * batch.wait, _LONGEST_WAIT)
        batch.since += 1
        if batch.since >= batch.wait:
            batch.since, batch.trying = 0, _WARM
            if batch.drafts_win:
                batch.plain = _Kind()
            else:
                batch.drafts = _Kind()

    def renew(self) -> None:
        """There are histories where there were none: what drafts gained says nothing of them."""
        for batch in self._batches.values():
            batch.drafts = _Kind()
            batch.since, batch.trying, batch.wait = 0, 0, _WAIT
            batch.drafts_win = True

    @property
    def knee(self) -> float | None:
        """Tokens of a forward that takes twice as long as one of none; None while unknown."""
        return self._line.knee()

    def gain(self, running: int) -> float | None:
        """Tokens a second with drafts over those without; None while one of them is unknown."""
        batch = self._batch(running)
        known = min(batch.drafts.steps, batch.plain.steps) >= _WARM
        return batch.gain() if known else None

    def _batch(self, running: int) -> _Batch:
        return self._batches.setdefault(running.bit_length(), _Batch())

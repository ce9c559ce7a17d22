"""How many ranks should sample and how many train? ROLL Flash, arXiv:2510.11345, Proposition 2.

With r ranks that sample, t that train and samples at most alpha versions old, a step takes at most,
but for what is prefilled anew after a push,

    max( T / t,  R(r) + L(r) / (alpha + 1) ) + P        alpha > 0
    T / t + R(r) + L(r) + P                             alpha = 0, where the two take turns

T are the GPU-seconds of training, R(r) the seconds in which the engines decode a step's tokens,
L(r) those of the longest response, and P the push, in which both stand still. The paper's workers
are places in an engine's batch. Fewer engines have more requests each, up to the places that they
have, and a decode step then takes longer by what a request adds to it, `load`. So with as many
requests as there may be, (1 + alpha) N over the engines,

    R(r) = tokens / (engines x requests) x seconds of a decode step with so many

and where all places are taken, beta* = T / (R + T) in GPU-seconds is the share of the ranks that
train. Of the splits into whole engines and whole model replicas the best is searched for.

Pure: rates come from a run's own metrics, or from the simulator.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

WINDOW = 10
"""Steps that rates are the means of."""
WORTH = 1.05
"""Speed-up from which another split is worth having."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Of one step, and of engines over `tp` ranks."""

    samples: float
    """N."""
    tokens: float
    """Of their responses."""
    longest: float
    """Tokens of the longest."""
    step_s: float
    """Of a decode step with `running` requests."""
    running: float
    train_s: float
    """Seconds of training, times the ranks that do it."""
    push_s: float = 0.0
    load: float = math.inf
    """What a request adds to a decode step, over what an empty one takes. Where it is not known a
    step takes as long as it has requests, as where arithmetic decides."""
    places: float = math.inf
    """Requests that an engine decodes at a time at most."""
    tp: int = 1

    def decode_s(self, running: float) -> float:
        """Of a decode step with so many requests."""
        if math.isinf(self.load):
            return self.step_s * running / self.running
        return self.step_s * (1 + self.load * running) / (1 + self.load * self.running)

    def requests(self, rollout: int, alpha: float) -> float:
        """Of an engine at a time, where as many run as may."""
        return min(self.places, max((1 + alpha) * self.samples * self.tp / rollout, 1.0))

    def train_share(self, rollout: int, alpha: float) -> float:
        """beta*, of all ranks, for engines as full as those of `rollout` ranks."""
        running = self.requests(rollout, alpha)
        samples_s = self.tokens / running * self.decode_s(running) * self.tp
        return self.train_s / (samples_s + self.train_s)

    def seconds(self, train: int, rollout: int, alpha: float) -> float:
        """Of a step of such a split, at most."""
        running = self.requests(rollout, alpha)
        decode_s = self.decode_s(running)
        samples = self.tokens / (rollout / self.tp * running) * decode_s
        longest, trains = self.longest * decode_s, self.train_s / train
        if alpha == 0:
            return trains + samples + longest + self.push_s
        return max(trains, samples + longest / (alpha + 1)) + self.push_s


def measured(
    row: Mapping[str, float], *, train: int, tp: int, samples: int, places: float, load: float
) -> Rates | None:
    """From the metrics of a step in which `train` ranks trained `samples` and engines were over
    `tp` ranks. None where they do not say it: an evaluation, a step of a replay."""
    names = ("timing_s/step", "sched/trainer_idle", "sched/decode_tokens", "response_length/max")
    if any(name not in row for name in names) or not row["sched/decode_tokens"]:
        return None
    push = row.get("timing_s/sync", 0.0) + row.get("timing_s/hold", 0.0)
    works = row["timing_s/step"] * (1 - row["sched/trainer_idle"]) - push
    if works <= 0:
        return None
    return Rates(
        samples=samples,
        tokens=row["sched/decode_tokens"],
        longest=row["response_length/max"],
        step_s=row["sched/busy_s"] / row["sched/decode_steps"],
        running=row["sched/decode_tokens"] / row["sched/decode_steps"],
        train_s=works * train,
        push_s=push,
        load=load,
        places=places,
        tp=tp,
    )


def mean(rates: Sequence[Rates]) -> Rates:
    """Of at least one, which differ in what was measured alone."""
    names = ("tokens", "longest", "step_s", "running", "train_s", "push_s")
    means = {name: sum(getattr(r, name) for r in rates) / len(rates) for name in names}
    return replace(rates[-1], **means)


def best(rates: Rates, ranks: int, alpha: float, possible: Iterable[int]) -> int:
    """The number of ranks to sample, of those that are possible: the fewest of those that are about
    the quickest, since with a long tail many are."""
    seconds = {r: rates.seconds(ranks - r, r, alpha) for r in possible}
    return min(r for r, s in seconds.items() if s <= WORTH * min(seconds.values()))


class Balance:
    """The proposal of a run, from its last steps."""

    def __init__(
        self,
        *,
        ranks: int,
        rollout: int,
        tp: int,
        alpha: float,
        samples: int,
        places: float,
        possible: Sequence[int],
    ) -> None:
        """
        Args:
            ranks: of the run, of which `rollout` sample, in engines of `tp`.
            samples: of a step.
            places: requests that an engine decodes at a time at most.
            possible: numbers of ranks that could sample.
        """
        assert rollout in possible, (rollout, possible)
        self._ranks, self._rollout, self._tp, self._alpha = ranks, rollout, tp, alpha
        self._samples, self._places = samples, places
        self._possible = tuple(possible)
        self._rates: deque[Rates] = deque(maxlen=WINDOW)
        self.load = math.inf
        """As in `Rates`."""

    def learn_load(self, load: float) -> None:
        """Take down what a request adds to a decode step, where a data sheet says so."""
        self.load = load

    def metrics(self, row: Mapping[str, float]) -> dict[str, float]:
        """`balance/*` after a step with these metrics; nothing where nothing is known yet."""
        found = measured(
            row,
            train=self._ranks - self._rollout,
            tp=self._tp,
            samples=self._samples,
            places=self._places,
            load=self.load,
        )
        if found is not None:
            self._rates.append(found)
        if not self._rates:
            return {}
        rates = mean(self._rates)
        proposed, now, then = self._compare(rates)
        return {
            "balance/train_share": rates.train_share(self._rollout, self._alpha),
            "balance/rollout_ranks": float(proposed),
            "balance/step_s": then,
            "balance/speed_up": now / then,
        }

    def sentence(self, rows: Iterable[Mapping[str, float]], source: str) -> str:
        """What the rows of an earlier run say of the split that begins; "" where nothing."""
        found: dict[str, float] = {}
        for row in rows:
            found = self.metrics(row) or found
        return self.say(mean(self._rates), source) if found else ""

    def say(self, rates: Rates, source: str) -> str:
        """One sentence on the split by these rates; `source`: where they are from."""
        proposed, now, then = self._compare(rates)
        share = rates.train_share(self._rollout, self._alpha) * self._ranks
        said = (
            f"{self._ranks - self._rollout} ranks train and {self._rollout} sample: "
            f"{now:.3g} s a step by {source} (beta* trains on {share:.3g} of {self._ranks})"
        )
        if now < WORTH * then:
            return said + "; no split is much better"
        return said + f"; --cluster.rollout_ranks {proposed} would take {then:.3g} s"

    def _compare(self, rates: Rates) -> tuple[int, float, float]:
        """The proposal, seconds of a step now and of a step then."""
        proposed = best(rates, self._ranks, self._alpha, self._possible)
        now = rates.seconds(self._ranks - self._rollout, self._rollout, self._alpha)
        return proposed, now, rates.seconds(self._ranks - proposed, proposed, self._alpha)

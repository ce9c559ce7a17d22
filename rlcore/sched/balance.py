"""Propose how many ranks should sample and how many should train. ROLL Flash, arXiv:2510.11345,
Proposition 2.

Suppose that r ranks sample, t ranks train, and samples are at most alpha versions old. Then a step
takes at most

    max( T / t,  R(r) + L(r) / (alpha + 1) ) + P        alpha > 0
    T / t + R(r) + L(r) + P                             alpha = 0: sampling and training alternate

T is the training time in GPU-seconds. R(r) is the time to decode a step's tokens on all engines.
L(r) is the time of the longest response. P is the time of the weight update, during which all ranks
wait. The bound leaves out the repeated prefill after a weight update.

In the paper, a worker is one slot in an engine's batch. N is the number of samples in a step. Here
(1 + alpha) N requests are divided among the engines, up to the slots of each engine. Each
additional request makes a decode step longer (`Rates.load`). With n requests per engine,

    R(r) = tokens / (engines x n) x seconds of a decode step with n requests

The best share of ranks that train is beta* = T / (R + T), with T and R in GPU-seconds. The search
covers all splits into whole engines and whole model-parallel groups. This module has no I/O: rates
come from a run's metrics or from the simulator."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

WINDOW = 10
"""Number of recent steps over which rates are averaged."""
WORTH = 1.05
"""Maximum ratio of two step times that count as equally fast."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Measured rates of one step, with engines of `tp` ranks each."""

    samples: float
    """Number of samples in a step (N in the module text)."""
    tokens: float
    """Number of response tokens in a step."""
    longest: float
    """Length of the longest response in tokens."""
    step_s: float
    """Seconds of a decode step with `running` requests."""
    running: float
    train_s: float
    """Training time in GPU-seconds: seconds times the number of training ranks."""
    sync_s: float = 0.0
    load: float = math.inf
    """Time that one request adds to a decode step, relative to an empty step. inf: unknown; the
    step time is then proportional to the number of requests, as if compute-bound."""
    places: float = math.inf
    """Maximum number of requests that an engine decodes at a time."""
    tp: int = 1

    def decode_s(self, running: float) -> float:
        """Return the seconds of a decode step with `running` requests."""
        if math.isinf(self.load):
            return self.step_s * running / self.running
        return self.step_s * (1 + self.load * running) / (1 + self.load * self.running)

    def requests(self, rollout: int, alpha: float) -> float:
        """Return the number of requests that an engine decodes at a time if `rollout` ranks sample
        and (1 + alpha) x `samples` requests are in flight."""
        return min(self.places, max((1 + alpha) * self.samples * self.tp / rollout, 1.0))

    def train_share(self, rollout: int, alpha: float) -> float:
        """Return beta*, the share of all ranks that should train. The number of requests per engine
        is that of `rollout` sampling ranks."""
        running = self.requests(rollout, alpha)
        samples_s = self.tokens / running * self.decode_s(running) * self.tp
        return self.train_s / (samples_s + self.train_s)

    def seconds(self, train: int, rollout: int, alpha: float) -> float:
        """Return the upper bound on the seconds of a step with `train` and `rollout` ranks."""
        running = self.requests(rollout, alpha)
        decode_s = self.decode_s(running)
        samples = self.tokens / (rollout / self.tp * running) * decode_s
        longest, trains = self.longest * decode_s, self.train_s / train
        if alpha == 0:
            return trains + samples + longest + self.sync_s
        return max(trains, samples + longest / (alpha + 1)) + self.sync_s


def measured(
    row: Mapping[str, float], *, train: int, tp: int, samples: int, places: float, load: float
) -> Rates | None:
    """Compute rates from the metrics of a step in which `train` ranks trained on `samples` samples
    and engines had `tp` ranks. Return None if such metrics are missing (evaluation, replay)."""
    names = ("timing_s/step", "sched/trainer_idle", "sched/decode_tokens", "response_length/max")
    if any(name not in row for name in names) or not row["sched/decode_tokens"]:
        return None
    push = row.get("timing_s/update_weights", 0.0) + row.get("timing_s/pause_engines", 0.0)
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
        sync_s=push,
        load=load,
        places=places,
        tp=tp,
    )


def mean(rates: Sequence[Rates]) -> Rates:
    """Return the mean of one or more `Rates` of a run, which differ only in measured fields."""
    names = ("tokens", "longest", "step_s", "running", "train_s", "sync_s")
    means = {name: sum(getattr(r, name) for r in rates) / len(rates) for name in names}
    return replace(rates[-1], **means)


def best(rates: Rates, ranks: int, alpha: float, possible: Iterable[int]) -> int:
    """Choose from `possible` how many ranks should sample: the smallest number whose step time is
    at most `WORTH` times the best. With a long tail, many numbers are nearly equal."""
    seconds = {r: rates.seconds(ranks - r, r, alpha) for r in possible}
    return min(r for r, s in seconds.items() if s <= WORTH * min(seconds.values()))


class Balance:
    """Proposer of a split into sampling and training ranks, based on recent steps of the run."""

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
            ranks: total ranks of the run; `rollout` of them sample, in engines of `tp` ranks.
            samples: number of samples in a step.
            places: maximum number of requests that an engine decodes at a time.
            possible: allowed numbers of sampling ranks.
        """
        assert rollout in possible, (rollout, possible)
        self._ranks, self._rollout, self._tp, self._alpha = ranks, rollout, tp, alpha
        self._samples, self._places = samples, places
        self._possible = tuple(possible)
        self._rates: deque[Rates] = deque(maxlen=WINDOW)
        self.load = math.inf
        """Time that one request adds to a decode step, relative to an empty step; inf: unknown."""

    def learn_load(self, load: float) -> None:
        """Set the time that one request adds to a decode step, relative to an empty step."""
        self.load = load

    def metrics(self, row: Mapping[str, float]) -> dict[str, float]:
        """Return the `balance/*` metrics after a step whose metrics are `row`. If no step so far
        has had rates, return no metrics."""
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
        """Describe the current and the proposed split of GPUs between rollout and training, from
        the steps' metrics of an earlier run. Without metrics of speed, return an empty string."""
        found: dict[str, float] = {}
        for row in rows:
            found = self.metrics(row) or found
        return self.say(mean(self._rates), source) if found else ""

    def proposed(self, rates: Rates) -> int:
        """Return the number of sampling ranks that is best for `rates`."""
        return best(rates, self._ranks, self._alpha, self._possible)

    def say(
        self,
        rates: Rates,
        source: str,
        seconds: Callable[[int], float] | None = None,
    ) -> str:
        """Describe the current and the proposed split for `rates`, which come from `source`.
        `seconds` returns the seconds of a step by the number of sampling ranks; default: the
        formula."""
        proposed, now, then = self._compare(rates)
        if seconds is not None:
            now, then = seconds(self._rollout), seconds(proposed)
        share = rates.train_share(self._rollout, self._alpha) * self._ranks
        said = (
            f"{self._ranks - self._rollout} ranks train and {self._rollout} sample: {now:.3g} s "
            f"per step by {source} (beta*: {share:.3g} of {self._ranks} ranks train)"
        )
        if now < WORTH * then:
            return said + "; no other split is much faster"
        return said + f"; --cluster.rollout_ranks {proposed} would take {then:.3g} s"

    def _compare(self, rates: Rates) -> tuple[int, float, float]:
        """Return the proposed number of sampling ranks, and the seconds of a step with the current
        split and with the proposed split."""
        proposed = self.proposed(rates)
        now = rates.seconds(self._ranks - self._rollout, self._rollout, self._alpha)
        return proposed, now, rates.seconds(self._ranks - proposed, proposed, self._alpha)

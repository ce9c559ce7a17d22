"""Tail batching: defer prompts with long responses to separate rounds, so that other rounds need
not wait for them. RollPacker, arXiv 2509.21009.

A step trains P prompts with R responses each. A *short* round starts floor(eta_prompts P) prompts
with round(eta_samples R) responses each. A prompt is complete when R of its responses are finished
and rewarded. The round ends with the first P complete prompts. The other prompts are queued for a
long round, which samples them again from the start, so all data stay on-policy.

When the queue holds P prompts, a *long* round starts exactly P of them with R responses each and
waits for all. So a share of (eta_prompts - 1) / eta_prompts of all rounds is long. With quotas each
domain has a queue. Once one queue holds its domain's quota, the other domains start the prompts
that are in their queues and new ones. If a domain has a larger share in the data than its quota in
a round, some of its prompts are left out in each epoch.

Differences from the paper: without `max_replaced`, groups of equal rewards count; otherwise a round
of exactly P prompts could not end. Extra responses bias a group towards short responses (the paper
mentions only reordered prompts); eta_samples = 1 avoids the bias."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlcore.records import GroupId, Prompt, Sampling, Work, training_group
from rlcore.sched.roles import Kind, Round
from rlcore.sched.stop import StopAtFirst
from rlcore.utils.errors import ConfigError

Key = tuple[int, int]
"""Key of a prompt: (epoch, row of the data set). A prompt is trained on at most once per epoch."""
_AHEAD_ROUNDS = 100
"""Number of rounds for which prompts of a domain are kept while other domains' are looked for."""
_EPOCHS, _EARLIER = 100, -1
"""Number of most recent epochs with accounts of their own, and the epoch of all others together."""


@dataclass(frozen=True, slots=True)
class _Issued:
    """Prompt that was started in the current round."""

    key: Key
    domain: str


class TailBatching:
    """Prompt source that issues short and long rounds."""

    def __init__(
        self,
        next_rows: Callable[[int], list[Key]],
        prompt_of: Callable[[int], Prompt],
        *,
        num_prompts: int,
        num_samples: int,
        eta_prompts: float,
        eta_samples: float,
        quotas: Mapping[str, int] | None = None,
        max_replaced: int = 0,
    ) -> None:
        """
        Args:
            next_rows: returns the next n prompts of the epoch order.
            prompt_of: returns the prompt of a row; the prompt's `dataset` is its domain.
            quotas: number of prompts per domain in a round; the sum is `num_prompts`. Without
                quotas, domains are ignored.
            max_replaced: number of groups of equal rewards (DAPO) in a round that other prompts
                replace; at the limit the round ends with fewer groups. 0: such groups count.

        Raises:
            ValueError: a number is out of range, or the quotas do not fit.
        """
        check(num_prompts, num_samples, eta_prompts, eta_samples, quotas)
        self._next_rows, self._prompt_of = next_rows, prompt_of
        self._num_prompts, self._num_samples = num_prompts, num_samples
        self._quotas = dict(quotas or {"": num_prompts})
        self._split = quotas is not None
        self._starts = {name: int(eta_prompts * n + 1e-9) for name, n in self._quotas.items()}
        self._responses = max(num_samples, round(eta_samples * num_samples))
        self._max_replaced = self._may_replace = max_replaced
        self._queue: dict[str, deque[Key]] = {name: deque() for name in self._quotas}
        self._ahead: dict[str, deque[Key]] = {name: deque() for name in self._quotas}
        self._round: dict[GroupId, _Issued] = {}
        self._sampling: Sampling | None = None
        self._is_long = False
        self._ledger: dict[int, Counter[str]] = {}
        self.issued = 0
        """Number of groups issued so far; it is the issue number of the next group."""

    # ---- rounds

    def next_round(self, sampling: Sampling) -> Round:
        """Return the work of the next round and its stop policy."""
        if self._round:
            raise RuntimeError("the previous round has not ended; end it first")
        self._sampling, self._may_replace = sampling, self._max_replaced
        self._is_long = self.next_kind() == "long"
        samples = self._num_samples if self._is_long else self._responses
        work = []
        for domain, count in (self._quotas if self._is_long else self._starts).items():
            queue = self._queue[domain] if self._is_long else deque()
            late = [queue.popleft() for _ in range(min(count, len(queue)))]
            fresh = self._fresh(domain, count - len(late))
            self._count_started(fresh)
            work += [self._issue(key, samples) for key in late + fresh]
        stop = StopAtFirst(
            self._quotas,
            {w.id: self._round[w.id].domain for w in work},
            more=self._more if self._max_replaced else None,
        )
        return Round(work=work, stop=stop, kind="long" if self._is_long else "short")

    def next_kind(self) -> Kind:
        """Return the kind of the next round: long if a domain's queue has enough prompts for it,
        else short. If all queues had to, those that fill faster would grow without bound."""
        enough = any(len(self._queue[d]) >= n for d, n in self._quotas.items())
        return "long" if enough else "short"

    def settle(self, kept: Iterable[GroupId], dropped: Mapping[GroupId, str]) -> None:
        """Record the end of the round. `kept` groups are trained on. `dropped` has the reason for
        each complete group that is not trained on. The prompts of all other groups are late; queue
        these prompts in starting order."""
        trained = set(kept)
        for group, issued in self._round.items():
            row = self._ledger[self._account_of(issued.key[0])]
            if group in trained:
                row["trained"] += 1
            elif group in dropped:
                row[f"dropped: {dropped[group]}"] += 1
            else:
                self._queue[issued.domain].append(issued.key)
        self._round = {}

    @property
    def waiting(self) -> int:
        """Number of prompts in the queue."""
        return sum(map(len, self._queue.values()))

    # ---- accounts

    def accounts(self) -> dict[int, dict[str, int]]:
        """Return the numbers of prompts started, trained, dropped (by reason) and waiting, for each
        epoch begun. `started` is the sum of the other numbers. All but the last `_EPOCHS` epochs
        are added up as epoch -1."""
        of = self._account_of
        waiting = Counter(of(key[0]) for queue in self._queue.values() for key in queue)
        waiting.update(of(issued.key[0]) for issued in self._round.values())
        return {
            epoch: {**row, "waiting": waiting[epoch]} for epoch, row in sorted(self._ledger.items())
        }

    def metrics(self) -> dict[str, float]:
        """Return the metrics after the most recent `settle`."""
        rows = self.accounts().values()
        out = {
            "sched/long_round": float(self._is_long),
            "sched/queue": float(self.waiting),
            "sched/prompts_started": float(sum(row["started"] for row in rows)),
            "sched/prompts_trained": float(sum(row.get("trained", 0) for row in rows)),
        }
        if self._max_replaced:
            out["training/replaced_groups"] = float(self._max_replaced - self._may_replace)
        dropped = [n for row in rows for name, n in row.items() if name.startswith("dropped")]
        return out | {"sched/prompts_dropped": float(sum(dropped))}

    # ---- checkpoints

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as plain JSON. Call it between rounds."""
        return {
            "issued": self.issued,
            "queue": {d: [list(key) for key in queue] for d, queue in self._queue.items()},
            "ahead": {d: [list(key) for key in queue] for d, queue in self._ahead.items()},
            "accounts": {str(epoch): dict(row) for epoch, row in self._ledger.items()},
        }

    def restore(self, state: Mapping[str, Any], num_rows: int | None) -> None:
        """Load a saved `state`. If the state names rows or domains that this run lacks, raise
        ValueError and change nothing. The state may be of another schedule, which defers no
        prompts. `num_rows`: number of rows of the data; None if unlimited."""
        state = {"queue": {}, "ahead": {}, "accounts": {}} | dict(state)
        for part in ("queue", "ahead"):
            if unknown := sorted(set(state[part]) - set(self._quotas)):
                raise ConfigError(
                    f"the checkpoint's {part} of prompts has the domain {unknown[0]!r} but this "
                    f"run has quotas only for {sorted(self._quotas)}; use the saved run's quotas"
                )
            rows = [row for keys in state[part].values() for _, row in keys]
            if num_rows is not None and (bad := [row for row in rows if not 0 <= row < num_rows]):
                raise ConfigError(
                    f"the checkpoint's {part} of prompts names row {bad[0]} of data.train, which "
                    f"has {num_rows} rows; resume with the same data, or start a new run from the "
                    "checkpoint's weights"
                )
        for part, found in (("queue", self._queue), ("ahead", self._ahead)):
            for domain, keys in state[part].items():
                found[domain] = deque((epoch, row) for epoch, row in keys)
        self._ledger = {int(epoch): Counter(row) for epoch, row in state["accounts"].items()}
        self.issued = state["issued"]

    # ---- prompts

    def _fresh(self, domain: str, n: int) -> list[Key]:
        """Return the next n prompts of a domain. Prompts of other domains that are drawn meanwhile
        are kept for later, up to the number that `_AHEAD_ROUNDS` rounds start."""
        ahead = self._ahead[domain]
        drawn = 0
        while len(ahead) < n:
            for key in self._next_rows(n - len(ahead)):
                name = self._prompt_of(key[1]).dataset if self._split else ""
                if name not in self._ahead:
                    raise ConfigError(
                        f"row {key[1]} of data.train: domain {name!r} has no quota; add one to "
                        f"those of {sorted(self._ahead)}"
                    )
                if len(self._ahead[name]) < _AHEAD_ROUNDS * self._starts[name]:
                    self._ahead[name].append(key)
                drawn += 1
            if drawn > 1000 * self._num_prompts and len(ahead) < n:
                raise ConfigError(
                    f"domain {domain!r}: only {len(ahead)} of a round's {n} prompts were found in "
                    f"{drawn} rows of data.train; lower its quota"
                )
        return [ahead.popleft() for _ in range(n)]

    def _issue(self, key: Key, samples: int) -> Work:
        assert self._sampling is not None, "next_round sets it"
        prompt = self._prompt_of(key[1])
        work = Work(
            id=training_group(self.issued),
            prompt=prompt,
            num_samples=samples,
            wanted=self._num_samples,
            sampling=self._sampling,
        )
        self._round[work.id] = _Issued(key, prompt.dataset if self._split else "")
        self.issued += 1
        return work

    def _count_started(self, keys: Iterable[Key]) -> None:
        """Count prompts that start for the first time; queued prompts are not counted again."""
        for epoch, _ in keys:
            self._ledger.setdefault(self._account_of(epoch), Counter())["started"] += 1
        for epoch in [e for e in self._ledger if e != self._account_of(e)]:
            self._ledger.setdefault(_EARLIER, Counter()).update(self._ledger.pop(epoch))

    def _account_of(self, epoch: int) -> int:
        """Return the epoch whose account has the prompts of this epoch."""
        return epoch if epoch > max(self._ledger, default=0) - _EPOCHS else _EARLIER

    def _more(self, domain: str) -> Work | None:
        """Issue a prompt to replace a dropped group; return None if the round is at its limit."""
        if not self._may_replace:
            return None
        self._may_replace -= 1
        keys = self._fresh(domain, 1)
        self._count_started(keys)
        return self._issue(keys[0], self._num_samples if self._is_long else self._responses)


def check(
    num_prompts: int,
    num_samples: int,
    eta_prompts: float,
    eta_samples: float,
    quotas: Mapping[str, int] | None = None,
) -> None:
    """Check the settings of a round. If a setting is out of range, raise ConfigError."""
    for name, value in (("eta_prompts", eta_prompts), ("eta_samples", eta_samples)):
        if not value >= 1:
            raise ConfigError(f"{name} {value:g}: must be at least 1; 1 starts no extra work")
    for name, value in (("num_prompts", num_prompts), ("num_samples", num_samples)):
        if value < 1:
            raise ConfigError(f"{name} {value}: must be at least 1")
    if quotas is not None and (min(quotas.values()) < 1 or sum(quotas.values()) != num_prompts):
        raise ConfigError(
            f"quotas {dict(quotas)}: must each be at least 1 and sum to the {num_prompts} prompts "
            "of a step"
        )


def long_share(eta_prompts: float) -> float:
    """Return the share of rounds that are long, over many rounds."""
    return (eta_prompts - 1) / eta_prompts

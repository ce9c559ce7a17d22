"""Assign samples to updates and data-parallel ranks: pure functions, the same on every rank.

The number of ranks changes only how the samples of an update are distributed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rlcore.algos.advantage import BY_GROUP, is_equal
from rlcore.algos.base import AlgoConfig
from rlcore.records import CUT, Group
from rlcore.sched.seqlen_balancing import balanced_partitions
from rlcore.utils import seed as seeds


@dataclass(frozen=True, slots=True)
class TrainRow:
    """One sample to train on."""

    id: str
    group: str
    """Id of the group, whose samples have the same prompt."""
    owner: int
    score: float
    """Score returned by the reward function."""
    reward: float
    """Score minus the penalty for overlong responses."""
    num_tokens: int
    """Number of tokens of the response."""
    prompt_length: int
    num_observed: int = 0
    """Number of response tokens that an environment inserted."""
    dataset: str = ""
    """Dataset of the prompt."""
    terms: tuple[float, ...] = ()
    """Score by each term of a sum of rewards; empty: the reward is no sum."""

    @property
    def num_trained(self) -> int:
        """Number of response tokens that the policy sampled."""
        return self.num_tokens - self.num_observed


@dataclass(frozen=True, slots=True)
class StepPlan:
    updates: tuple[tuple[tuple[TrainRow, ...], ...], ...]
    """Rows to train on, by update and data-parallel rank."""
    num_equal_groups: int
    groups: tuple[tuple[TrainRow, ...], ...] = ()
    """Groups that count for the advantages, with all their rows. Rows that no update trains on are
    included, because they count in the baseline of their group."""
    shares_prefix: bool = False
    """Whether a rank computes the prompt of an update's samples once per group."""

    def lengths(self, update: int) -> list[int]:
        """Return the number of trained tokens of each row of the update, over all ranks. Rows
        without trained tokens are left out: they count in no normaliser, as in `Learner.kept`."""
        rows = (row for part in self.updates[update] for row in part)
        return [row.num_trained for row in rows if row.num_trained]

    def loads(self, num_ranks: int) -> list[int]:
        """Return the number of prompt and response tokens that each data-parallel rank computes
        over all updates."""
        return [
            sum(tokens_to_compute(u[d], self.shares_prefix) for u in self.updates)
            for d in range(num_ranks)
        ]

    def num_tokens(self) -> int:
        """Return the number of prompt and response tokens of all rows."""
        rows = (r for update in self.updates for part in update for r in part)
        return sum(r.num_tokens + r.prompt_length for r in rows)

    def squares(self) -> int:
        """Return the sum of the squared numbers of prompt and response tokens of all rows, less the
        squares of prompts that are not computed again."""
        parts = [part for update in self.updates for part in update]
        total = sum((r.num_tokens + r.prompt_length) ** 2 for part in parts for r in part)
        if not self.shares_prefix:
            return total
        again = sum(r.prompt_length**2 for part in parts for r in part)
        once = sum(n * n for part in parts for n in _prompts(part).values())
        return total - again + once

    def owners(self) -> dict[str, int]:
        """Return the rank that holds each sample, by sample id."""
        return {r.id: r.owner for update in self.updates for part in update for r in part}

    def destination(
        self, model_parallel_groups: Sequence[Sequence[int]]
    ) -> dict[str, Sequence[int]]:
        """Return the global ranks that train on each sample, by sample id.
        `model_parallel_groups[d]` are the global ranks of data-parallel rank d."""
        return {
            r.id: model_parallel_groups[d]
            for update in self.updates
            for d, part in enumerate(update)
            for r in part
        }

    def placed(self, dp_ranks: Sequence[int], num_ranks: int) -> "StepPlan":
        """Return this plan for `num_ranks` data-parallel ranks: rank `dp_ranks[i]` gets the rows of
        rank i, and all other ranks get none."""
        updates = []
        for parts in self.updates:
            spread: list[tuple[TrainRow, ...]] = [()] * num_ranks
            for d, part in zip(dp_ranks, parts, strict=True):
                spread[d] = part
            updates.append(tuple(spread))
        return replace(self, updates=tuple(updates))


def joined(plans: Sequence[StepPlan]) -> StepPlan:
    """Merge plans with the same numbers of updates and ranks into one plan."""
    updates = tuple(
        tuple(tuple(row for part in parts for row in part) for parts in zip(*of_all, strict=True))
        for of_all in zip(*(p.updates for p in plans), strict=True)
    )
    equal = sum(p.num_equal_groups for p in plans)
    groups = tuple(g for p in plans for g in p.groups)
    return StepPlan(updates, equal, groups, any(p.shares_prefix for p in plans))


def tokens_to_compute(rows: Sequence[TrainRow], shares_prefix: bool) -> int:
    """Return how many tokens a rank computes for these rows: responses, and a prompt for each row
    or, if it shares prefixes, for each group."""
    responses = sum(r.num_tokens for r in rows)
    if shares_prefix:
        return responses + sum(_prompts(rows).values())
    return responses + sum(r.prompt_length for r in rows)


def _prompts(rows: Sequence[TrainRow]) -> dict[str, int]:
    """Return the length of the prompt of each group."""
    return {r.group: r.prompt_length for r in rows}


def distribute(
    rows: Sequence[TrainRow], num_ranks: int, shares_prefix: bool
) -> tuple[tuple[TrainRow, ...], ...]:
    """Divide rows among `num_ranks` ranks such that they compute nearly equal numbers of tokens. If
    prefixes are shared, groups stay whole, or are halved until the largest number no longer falls.
    """
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.group if shares_prefix else row.id, []).append(i)
    size, least = max(map(len, groups.values()), default=1), math.inf
    best: tuple[tuple[TrainRow, ...], ...] = ()
    while size:
        pieces = [g[at : at + size] for g in groups.values() for at in range(0, len(g), size)]
        loads = [tokens_to_compute([rows[i] for i in piece], shares_prefix) for piece in pieces]
        split = balanced_partitions(loads, num_ranks)
        picked = [sorted(i for p in part for i in pieces[p]) for part in split]
        parts = tuple(tuple(rows[i] for i in part) for part in picked)
        most = max(tokens_to_compute(part, shares_prefix) for part in parts)
        if most < least:
            best, least = parts, most
        size = 0 if size == 1 or num_ranks == 1 else -(-size // 2)
    return best


def rewards_of(
    groups: Sequence[Group], cfg: AlgoConfig, max_tokens: int, shuffle_seed: int | None
) -> list[list[tuple[float, float]]]:
    """Return (score, shaped reward) of every sample, by group. With `shuffle_seed`, shuffle these
    pairs over all samples of the step, so that nothing can be learned."""
    pairs = [
        [(s, s - overlong(n, max_tokens, cfg)) for s, n in zip(g.scores, g.lengths, strict=True)]
        for g in groups
    ]
    if shuffle_seed is None:
        return pairs
    flat = [pair for group in pairs for pair in group]
    seeds.rng(shuffle_seed, "shuffle").shuffle(flat)
    it = iter(flat)
    return [[next(it) for _ in group] for group in pairs]


def overlong(length: int, max_tokens: int, cfg: AlgoConfig) -> float:
    """Return the penalty for a long response: 0 until the last `overlong_share` of `max_tokens`,
    then growing linearly to the full penalty. DAPO, arXiv:2503.14476 equation 13."""
    room = cfg.overlong_share * max_tokens
    if not room:
        return 0.0
    return cfg.overlong_penalty * min(max(length - (max_tokens - room), 0.0) / room, 1.0)


def make(
    groups: Sequence[Group],
    algo: AlgoConfig,
    *,
    num_updates: int,
    num_ranks: int,
    seed: int,
    max_tokens: int = 1,
    shuffle_rewards: bool = False,
    shares_prefix: bool = False,
) -> StepPlan:
    """Make the plan of a step.

    Failed episodes are left out and rewards are shaped by length. A response whose group has
    otherwise failed is left out as well if the estimator compares responses. If configured, groups
    of equal scores and truncated responses are dropped. Responses that a callback excludes are
    dropped. The remaining groups are shuffled by `seed`, their rows are cut into `num_updates`
    parts of equal size, so that few groups are divided, and balanced over `num_ranks` by length.

    Args:
        max_tokens: maximum response length, for length shaping.
        shares_prefix: whether the learner computes the prompt of a group once.
    """
    trained: list[list[TrainRow]] = []
    kept: list[tuple[TrainRow, ...]] = []
    equal = 0
    compares = algo.adv_estimator in BY_GROUP
    rewards = rewards_of(groups, algo, max_tokens, seed if shuffle_rewards else None)
    for group, given in zip(groups, rewards, strict=True):
        members = tuple(
            TrainRow(
                ref.id,
                group.id,
                ref.owner,
                score,
                reward,
                n,
                group.prompt_length,
                seen,
                group.dataset,
                terms,
            )
            for ref, (score, reward), n, seen, finish, terms in zip(
                group.refs,
                given,
                group.lengths,
                group.observed or (0,) * len(group.refs),
                group.finishes,
                group.terms or ((),) * len(group.refs),
                strict=True,
            )
            if finish != "failed"
        )
        if not members or (len(members) == 1 < len(group.refs) and compares):
            continue
        excluded = {
            ref.id for ref, is_out in zip(group.refs, group.excluded, strict=False) if is_out
        }
        finishes = [f for f in group.finishes if f != "failed"]
        no_spread = is_equal([r.score for r in members])
        equal += no_spread
        if no_spread and algo.equal_reward_groups == "drop":
            continue
        kept.append(members)
        drop_cut = algo.truncated_responses == "drop"
        rows = zip(members, finishes, strict=True)
        trained.append([r for r, f in rows if not (drop_cut and f in CUT) and r.id not in excluded])
    seeds.rng(seed, "rows").shuffle(trained)
    every = [row for members in trained for row in members]
    ends = [len(every) * u // num_updates for u in range(num_updates + 1)]
    updates = tuple(
        distribute(every[start:end], num_ranks, shares_prefix) for start, end in pairwise(ends)
    )
    return StepPlan(updates, equal, tuple(kept), shares_prefix)

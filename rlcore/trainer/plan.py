"""Which sample is trained in which update on which data-parallel rank. Pure and the same on every
rank.

The rows of an update do not depend on the number of ranks; only their distribution does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlcore.algos import advantage
from rlcore.algos.base import AlgoConfig
from rlcore.ops.partition import balanced
from rlcore.records import Group
from rlcore.utils import seed as seeds


@dataclass(frozen=True, slots=True)
class Row:
    """One sample to train."""

    id: str
    owner: int
    score: float
    advantage: float
    num_tokens: int
    """Of the response."""
    prompt_length: int


@dataclass(frozen=True, slots=True)
class Plan:
    updates: tuple[tuple[tuple[Row, ...], ...], ...]
    """[update][data-parallel rank] -> rows."""
    num_equal_groups: int

    def lengths(self, update: int) -> list[int]:
        """Trained tokens of every row of the update, over all ranks."""
        return [r.num_tokens for part in self.updates[update] for r in part]

    def owners(self) -> dict[str, int]:
        """The rank that holds each sample."""
        return {r.id: r.owner for update in self.updates for part in update for r in part}

    def destination(self, replicas: Sequence[Sequence[int]]) -> dict[str, Sequence[int]]:
        """The global ranks that train each sample; `replicas[d]` are those of data-parallel rank
        d."""
        return {
            r.id: replicas[d]
            for update in self.updates
            for d, part in enumerate(update)
            for r in part
        }


def scores_of(groups: Sequence[Group], shuffle_seed: int | None) -> list[list[float]]:
    """Scores by group; with a seed, shuffled over all samples of the step (the control run)."""
    scores = [list(g.scores) for g in groups]
    if shuffle_seed is None:
        return scores
    flat = [s for group in scores for s in group]
    seeds.rng(shuffle_seed, "shuffle").shuffle(flat)
    it = iter(flat)
    return [[next(it) for _ in group] for group in scores]


def make(
    groups: Sequence[Group],
    algo: AlgoConfig,
    *,
    num_updates: int,
    num_ranks: int,
    seed: int,
    shuffle_rewards: bool = False,
) -> Plan:
    """Advantages by group, equal groups dropped if asked, rows shuffled by `seed`, cut into
    `num_updates` parts of equal size and spread over `num_ranks` by length."""
    rows: list[Row] = []
    equal = 0
    scores = scores_of(groups, seed if shuffle_rewards else None)
    for group, rewards in zip(groups, scores, strict=True):
        is_equal = advantage.is_equal(rewards)
        equal += is_equal
        if is_equal and algo.equal_reward_groups == "drop":
            continue
        values = advantage.grpo(rewards, algo.norm_adv_by_std)
        for ref, score, a, n in zip(group.refs, rewards, values, group.lengths, strict=True):
            rows.append(Row(ref.id, ref.owner, score, a, n, group.prompt_length))
    seeds.rng(seed, "rows").shuffle(rows)
    updates = []
    for u in range(num_updates):
        part = rows[u::num_updates]
        lengths = [r.num_tokens + r.prompt_length for r in part]
        split = balanced(lengths, num_ranks) if part else [[] for _ in range(num_ranks)]
        updates.append(tuple(tuple(part[i] for i in sorted(s)) for s in split))
    return Plan(tuple(updates), equal)

"""Policies that decide when a round ends."""

from collections import Counter
from collections.abc import Callable, Mapping

from rlcore.records import GroupId, Work
from rlcore.sched.roles import GroupState, Verdict

EQUAL_REWARDS = "equal rewards"
"""Reason given when dynamic sampling drops a group whose responses have equal rewards."""


class StopAtAll:
    """`Stop` policy: end the round when every group is complete (baseline)."""

    def __init__(self) -> None:
        self._complete: set[GroupId] = set()

    def judge(self, groups: Mapping[GroupId, GroupState], group: GroupState) -> Verdict:
        self._complete.add(group.work.id)
        return Verdict(kept=list(groups) if len(self._complete) == len(groups) else None)

    def num_wanted(self, groups: Mapping[GroupId, GroupState]) -> int:
        return sum(group.wanted for group in groups.values())


class StopAtFirst:
    """`Stop` policy: end the round once every domain has its quota of complete groups. All other
    started groups are late.

    With `more`, each group of equal rewards is replaced by another prompt of the same domain. If
    `more` returns None and no open group can fill a quota, the round ends with fewer groups, and
    with at least one: if all were equal, the last one counts."""

    def __init__(
        self,
        quotas: Mapping[str, int],
        domains: dict[GroupId, str],
        more: Callable[[str], Work | None] | None = None,
    ) -> None:
        self._left = dict(quotas)
        self._num_groups = sum(quotas.values())
        self._domains, self._more = domains, more
        self._kept: set[GroupId] = set()
        self._dropped: set[GroupId] = set()
        self._num_open = Counter(domains.values())
        """Number of started groups that are neither kept nor dropped, by domain."""

    def judge(self, groups: Mapping[GroupId, GroupState], group: GroupState) -> Verdict:
        domain = self._domains[group.work.id]
        if self._more is not None and group.has_equal_scores:
            return self._replace(groups, group.work.id, domain)
        self._kept.add(group.work.id)
        self._num_open[domain] -= 1
        self._left[domain] -= 1
        if not any(self._left.values()):
            return self._end(groups)
        if not self._can_count():  # earlier groups were dropped, and `more` was at its limit
            return Verdict(kept=self._end(groups).kept, is_short=True)
        if self._left[domain]:
            return Verdict()
        return Verdict(closed=[g for g in self._open(groups) if self._domains[g] == domain])

    def num_wanted(self, groups: Mapping[GroupId, GroupState]) -> int:
        return self._num_groups * max((g.wanted for g in groups.values()), default=0)

    def _replace(self, groups: Mapping[GroupId, GroupState], gone: GroupId, domain: str) -> Verdict:
        assert self._more is not None
        self._dropped.add(gone)
        self._num_open[domain] -= 1
        dropped = {gone: EQUAL_REWARDS}
        work = self._more(domain)
        if work is not None:
            self._domains[work.id] = domain
            self._num_open[domain] += 1
            return Verdict(dropped=dropped, more=[work])
        if self._can_count():
            return Verdict(dropped=dropped)
        if not self._kept:
            return Verdict(kept=[gone], is_short=True)
        return Verdict(dropped=dropped, kept=self._end(groups).kept, is_short=True)

    def _can_count(self) -> bool:
        """Return whether an open group can still fill a quota."""
        return any(left and self._num_open[domain] for domain, left in self._left.items())

    def _open(self, groups: Mapping[GroupId, GroupState]) -> list[GroupId]:
        return [g for g in groups if g not in self._kept and g not in self._dropped]

    def _end(self, groups: Mapping[GroupId, GroupState]) -> Verdict:
        """Return the decision that ends the round. Kept groups are in submission order, so that the
        batch does not depend on the order of completion."""
        return Verdict(kept=[g for g in groups if g in self._kept])

"""When a round is over."""

from collections.abc import Mapping, Sequence

from rlcore.records import GroupId
from rlcore.sched.roles import GroupState


class All:
    """Every response is finished and rewarded: the plain baseline."""

    def kept(self, groups: Mapping[GroupId, GroupState]) -> Sequence[GroupId] | None:
        if not all(g.is_complete for g in groups.values()):
            return None
        return list(groups)

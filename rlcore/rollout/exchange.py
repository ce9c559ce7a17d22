"""Transfer of samples from the rank that sampled them to the ranks that train on them.

    engine -> RolloutWorker.samples -> SampleExchange.send -> (inbox "samples") ->
    SampleExchange.collect

The rank whose engine produced a sample owns the sample and sends it. After a synchronous round,
every rank knows the destinations (`Rollout.route`). In `--mode stream` and `--mode async`, the
command `Ship` makes a rank send samples. Samples that arrive early are stored until `collect`.

If engines draft from histories, rank 0 receives those in the inbox "histories".
"""

import time
from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping, Sequence

from rlcore.records import Histories, History, RequestId, Sample
from rlcore.rollout.transport import Hub


class SampleExchange:
    """One rank's samples, and the transfer of samples to and from other ranks."""

    def __init__(self, hub: Hub, timeout_s: float) -> None:
        """`timeout_s`: longest wait in seconds for samples of other ranks."""
        self._hub, self._timeout_s = hub, timeout_s
        self.own: dict[RequestId, Sample] = {}
        """Finished samples that this rank's engine produced, by id."""
        self._arrived: dict[RequestId, Sample] = {}

    def begin_round(self, own: dict[RequestId, Sample]) -> None:
        """Set the samples of this rank to `own` and drop the samples of other ranks."""
        self.own = own
        self._arrived.clear()

    def send(self, ids: Iterable[RequestId], to: Iterable[int]) -> None:
        """Send the samples `ids` of this rank to the ranks in `to`, except to this rank itself."""
        samples = [self.own[i] for i in ids]
        for rank in to:
            if rank != self._hub.rank:
                self._hub.send(rank, "samples", samples)

    def here(self) -> Mapping[RequestId, Sample]:
        """Return all samples that this rank has produced or received so far, without waiting."""
        while (batch := self._hub.receive("samples", list[Sample], 0.0)) is not None:
            self._arrived |= {sample.id: sample for sample in batch}
        return ChainMap(self.own, self._arrived)

    def collect(
        self, ids: Collection[RequestId], owners: Mapping[RequestId, int]
    ) -> dict[RequestId, Sample]:
        """Return the samples in `ids`, by id. Wait for the samples of other ranks.

        Raises:
            TimeoutError: samples are missing; the message names the ranks that own them.
        """
        found = {i: self.own[i] for i in ids if i in self.own}
        found |= {i: self._arrived.pop(i) for i in ids if i not in found and i in self._arrived}
        missing = {i for i in ids if i not in found}
        deadline = time.monotonic() + self._timeout_s
        while missing:
            left = max(0.0, deadline - time.monotonic())
            batch = self._hub.receive("samples", list[Sample], left)
            if batch is None:
                owing = sorted({owners[i] for i in missing})
                raise TimeoutError(
                    f"--cluster.timeout_s {self._timeout_s:g} exceeded: rank {self._hub.rank} "
                    f"waits in phase exchange for {len(missing)} samples such as {min(missing)} "
                    f"from ranks {owing}"
                )
            for sample in batch:
                kept = found if sample.id in missing else self._arrived
                kept[sample.id] = sample
                missing.discard(sample.id)
        return found

    def receive_histories(self, ranks: Iterable[int]) -> list[History]:
        """On rank 0, wait for the `Histories` of each rank in `ranks`, one record per rank. Return
        all histories.

        Raises:
            TimeoutError: records are missing; the message names the ranks that owe them.
        """
        histories: list[History] = []
        owing = set(ranks)
        deadline = time.monotonic() + self._timeout_s
        while owing:
            left = max(0.0, deadline - time.monotonic())
            record = self._hub.receive("histories", Histories, left)
            if record is None:
                raise TimeoutError(
                    f"--cluster.timeout_s {self._timeout_s:g} exceeded: rank 0 waits in phase "
                    f"exchange for the histories of ranks {sorted(owing)}"
                )
            owing.discard(record.rank)
            histories += record.histories
        return histories


def by_owner(
    destination: Mapping[RequestId, Sequence[int]], owners: Mapping[RequestId, int]
) -> dict[tuple[int, tuple[int, ...]], list[RequestId]]:
    """Group sample ids by the rank that owns the sample and the ranks that train on it."""
    parts: dict[tuple[int, tuple[int, ...]], list[RequestId]] = {}
    for i, ranks in destination.items():
        parts.setdefault((owners[i], tuple(ranks)), []).append(i)
    return parts

"""Transfer of samples from the rank that sampled them to the ranks that train on them.

    engine -> RolloutWorker.samples -> SampleExchange.send -> (inbox "samples") ->
    SampleExchange.collect

The rank whose engine produced a sample owns the sample and sends it. After a synchronous round,
every rank knows the destinations (`Rollout.route`). In `--mode stream` and `--mode async`, the
command `Ship` makes a rank send samples. Samples that arrive early are stored until `collect`.

Routes of experts are far larger than tokens. A rank gets the routes of its own layers
(`StageLayers`); the others are unknown there.

If engines draft from histories, rank 0 receives those in the inbox "histories".
"""

import time
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from rlcore.records import Histories, History, RequestId, Sample
from rlcore.rollout.transport import Hub


@dataclass(frozen=True, slots=True)
class StageLayers:
    """Layers whose routes a rank needs: those of its pipeline stage."""

    num_layers: int
    of: Callable[[int], Sequence[int]]
    """Function that returns the global indices of the layers on a train rank."""

    def cut(self, sample: Sample, layers: Sequence[int]) -> Sample:
        """Return the sample with routes of these layers only: [n, len(layers) * K]."""

        def some(routes: np.ndarray) -> np.ndarray:
            return routes.reshape(len(routes), self.num_layers, -1)[:, list(layers)]

        return _with_routes(sample, some)

    def restored(self, sample: Sample, layers: Sequence[int]) -> Sample:
        """Return a sample that `cut` made, with routes of all layers, of which others than
        `layers` are unknown: [n, num_layers * K]."""

        def whole(routes: np.ndarray) -> np.ndarray:
            some = routes.reshape(len(routes), len(layers), -1)
            every = np.full((len(routes), self.num_layers, some.shape[2]), -1, routes.dtype)
            every[:, list(layers)] = some
            return every

        return _with_routes(sample, whole)


def _with_routes(sample: Sample, change: Callable[[np.ndarray], np.ndarray]) -> Sample:
    """Return the sample with changed routes in all its rows, each [n, any] after the change."""

    def changed(routes: np.ndarray | None) -> np.ndarray | None:
        return None if routes is None else change(routes).reshape(len(routes), -1)

    replace = msgspec.structs.replace
    branches = tuple(replace(b, routes=changed(b.routes)) for b in sample.branches)
    return replace(sample, routes=changed(sample.routes), branches=branches)


class SampleExchange:
    """One rank's samples, and the transfer of samples to and from other ranks."""

    def __init__(self, hub: Hub, timeout_s: float, stages: StageLayers | None = None) -> None:
        """`timeout_s`: longest wait in seconds for samples of other ranks. `stages`: layers whose
        routes each rank gets; None: all layers. It must be the same on every rank."""
        self._hub, self._timeout_s, self._stages = hub, timeout_s, stages
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
        by_layers: dict[tuple[int, ...], list[int]] = {}
        for rank in to:
            if rank != self._hub.rank:
                layers = () if self._stages is None else tuple(self._stages.of(rank))
                by_layers.setdefault(layers, []).append(rank)
        for layers, ranks in by_layers.items():
            some = samples
            if self._stages is not None:
                some = [self._stages.cut(sample, layers) for sample in samples]
            self._hub.send_all(ranks, "samples", some)

    def _receive(self, timeout_s: float) -> list[Sample] | None:
        batch: list[Sample] | None = self._hub.receive("samples", list[Sample], timeout_s)
        if batch is None or self._stages is None:
            return batch
        layers = self._stages.of(self._hub.rank)
        return [self._stages.restored(sample, layers) for sample in batch]

    def here(self) -> Mapping[RequestId, Sample]:
        """Return all samples that this rank has produced or received so far, without waiting."""
        while (batch := self._receive(0.0)) is not None:
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
            batch = self._receive(left)
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

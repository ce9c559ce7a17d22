"""The weight channel of a run: one of the routes between ranks, with the hand-over to the engine.

    gather     `learner.export()` on every rank: the baseline (`colocated.py`)
    intranode  sites are nodes: owners broadcast their shards inside, and what a node has no owner
               for enters it once
    two_stage  sites are clusters: the same, for rollout ranks that are not where the learner is

The last two are one mechanism (`layout.py`, `relay.py`) and one channel: they differ in what sites
are given.
"""

import time
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from rlcore.protocols import Learner, Loads, WeightChannel
from rlcore.records import Bucket, Shard
from rlcore.sync.colocated import ColocatedChannel, Handover, Transport
from rlcore.sync.pack import MAX_BYTES
from rlcore.sync.peers import LinkError, Peers, blamed
from rlcore.sync.relay import Relay

Route = Literal["gather", "intranode", "two_stage"]


def make_channel(
    route: Route,
    *,
    transport: Transport = "bytes",
    tp: int = 1,
    max_bytes: int = MAX_BYTES,
    sites: Sequence[Sequence[int]] = (),
    peers: Peers | None = None,
    device: torch.device | None = None,
) -> WeightChannel:
    """The channel of this rank. Nothing is exchanged before the first push.

    Args:
        transport: how a bucket gets into the engine.
        tp: of the engine.
        sites: ranks by site, for the routes that have them; without any, all ranks are one.
        peers: the ranks that take part; those of the default process group by default.
        device: where weights travel, the same kind on every rank; the learner's.
    """
    peers = peers or Peers()
    handover = Handover(transport, tp=tp, peers=peers, max_bytes=max_bytes)
    if route == "gather":
        return ColocatedChannel(max_bytes, handover=handover)
    where = device or torch.device("cpu")
    relay = Relay(peers, sites or [range(peers.world_size)], max_bytes, where)
    return RelayChannel(relay, handover)


class RelayChannel:
    """A `WeightChannel` over a relay. A push succeeds on all ranks or fails on all of them."""

    def __init__(self, relay: Relay, handover: Handover) -> None:
        self._relay, self._handover = relay, handover
        self._staged: Tensor | None = None

    def push(self, learner: Learner | None, engine: Loads | None, version: int) -> dict[str, float]:
        """Collective: every rank enters, with its learner and engine or None. An engine that dies
        on the way ends nothing.

        Raises:
            PushError, PushTimeoutError: the same sentence on every rank; no engine that began to
                load decodes before a push succeeds.
        """
        start, handover, peers = time.monotonic(), self._handover, self._relay.peers
        peers.begin()
        try:
            own = peers.step("here", lambda: self._enter(learner, engine, version))
            peers.step("done", lambda: self._move(own))
            handover.end(version)
        finally:
            handover.close()
            self._staged = None
        plan = self._relay.plan
        assert plan is not None
        return {
            "bytes": float(plan.num_bytes),
            "slow_bytes": float(plan.slow_bytes),
            "time_s": time.monotonic() - start,
            "transient_gb": self._relay.transient_bytes / 1e9,
        }

    def relayout(self, tp: int) -> None:
        """From the next push on the engines have this tensor-parallel size; every rank says so."""
        self._handover.relayout(tp)

    def _enter(
        self, learner: Learner | None, engine: Loads | None, version: int
    ) -> list[tuple[Shard, Tensor]]:
        """All that can fail on this rank alone. Its shards."""
        rank = self._relay.peers.rank
        with blamed("engine", rank):
            self._handover.begin(engine, version)
        with blamed("learner", rank):
            own = list(learner.shards()) if learner is not None else []
        self._relay.prepare([shard for shard, _ in own], self._handover.takes(engine))
        return own

    def _move(self, own: list[tuple[Shard, Tensor]]) -> None:
        """All weights into the engine."""
        damage = self._relay.run(own, self._take, self._give, self._held)
        if damage is not None:
            raise LinkError(damage)
        with blamed("engine", self._relay.peers.rank):
            self._handover.check()

    # ---- a bucket

    def _held(self) -> int:
        """Memory of buckets, of whichever device."""
        staged = 0 if self._staged is None else len(self._staged)
        return staged + self._handover.held_bytes

    def _take(self, num_bytes: int) -> Tensor:
        """Room on the relay's device: the hand-over's own where that is the same."""
        relay = self._relay
        if relay.device.type == "cpu" or self._handover.transport == "cuda_ipc":
            return self._handover.take(num_bytes)
        if self._staged is None or len(self._staged) < num_bytes:
            self._staged = None  # not both at a time
            self._staged = torch.empty(num_bytes, dtype=torch.uint8, device=relay.device)
        return self._staged[:num_bytes]

    def _give(self, bucket: Bucket, buffer: Tensor) -> None:
        where = f"bucket of {bucket.tensors[0].name} ...: "
        with blamed("engine", self._relay.peers.rank, where):
            if self._staged is not None:
                host = self._handover.take(bucket.num_bytes)
                self._relay.look()
                host.copy_(buffer)
                buffer = host
            self._handover.give(bucket, buffer)

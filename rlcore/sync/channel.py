"""Make the weight channel of a run: one of three routes between ranks, then `Handover` to engines.

    gather     every rank gathers all weights with `learner.export()` (baseline, `colocated.py`)
    intranode  a rank that holds a shard broadcasts the shard inside its node; a shard that no rank
               of a node holds is sent to this node once
    two_stage  the same with clusters instead of nodes, for rollout ranks in a different cluster
               than the learner

`intranode` and `two_stage` share the class `RelayChannel` (`layout.py`, `relay.py`). They differ
only in the sites: groups of ranks with a fast network inside, which are nodes or clusters.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from rlcore.protocols import Learner, WeightChannel, WeightReceiver
from rlcore.records import Bucket, Shard
from rlcore.sync.base_weights import BaseWeights
from rlcore.sync.colocated import ColocatedChannel, Handover, Transport
from rlcore.sync.pack import MAX_BYTES, Packer
from rlcore.sync.peers import LinkError, Peers, blamed
from rlcore.sync.relay import Relay
from rlcore.utils.buckets import unpack

Route = Literal["gather", "intranode", "two_stage"]


def make_channel(
    route: Route,
    *,
    transport: Transport = "bytes",
    tp: int = 1,
    ranks_per_node: int = 0,
    max_bytes: int = MAX_BYTES,
    sites: Sequence[Sequence[int]] = (),
    peers: Peers | None = None,
    device: torch.device | None = None,
    base: BaseWeights | None = None,
) -> WeightChannel:
    """Make the channel of this rank. Ranks do not communicate before the first weight update.

    Args:
        transport: way in which buckets reach the engine (`colocated.py`).
        tp: tensor-parallel size of the engine.
        ranks_per_node: number of ranks of a node; 0: all ranks are on one node.
        sites: ranks of each site (node or cluster) of `intranode` or `two_stage`; empty: one site.
        peers: ranks of the weight update; by default all ranks of the default process group.
        device: device of the exchanged buffers, usually the learner's; of the same type on all
            ranks. Default: CPU.
        base: weights to which exchanged adapters are added; None: all weights are exchanged.
    """
    peers = peers or Peers()
    handover = Handover(
        transport, tp=tp, ranks_per_node=ranks_per_node, peers=peers, max_bytes=max_bytes
    )
    if route == "gather":
        return ColocatedChannel(max_bytes, handover=handover, base=base)
    where = device or torch.device("cpu")
    relay = Relay(peers, sites or [range(peers.world_size)], max_bytes, where)
    return RelayChannel(relay, handover, Packer(max_bytes), base)


class RelayChannel:
    """`WeightChannel` of the routes `intranode` and `two_stage`, which transfer with a `Relay`."""

    def __init__(
        self, relay: Relay, handover: Handover, packer: Packer, base: BaseWeights | None = None
    ) -> None:
        self._relay, self._handover = relay, handover
        self._packer, self._base = packer, base
        self._adapters: dict[str, Tensor] = {}
        self._staged: Tensor | None = None

    def update_weights(
        self, learner: Learner | None, engine: WeightReceiver | None, version: int
    ) -> dict[str, float]:
        """Update the weights of all engines; collective. Every rank passes its learner and engine,
        or None. If an engine fails meanwhile, the weight update continues without this engine.

        Raises:
            WeightUpdateError, WeightUpdateTimeoutError: the weight update failed; the message is
                the same on every rank. Engines that began to load do not decode before a weight
                update succeeds.
        """
        start, handover, peers = time.monotonic(), self._handover, self._relay.peers
        peers.begin()
        try:
            own = peers.step("here", lambda: self._enter(learner, engine, version))
            peers.step("done", lambda: self._move(own, engine))
            handover.end(version)
        finally:
            handover.close()
            self._staged, self._adapters = None, {}
        plan = self._relay.plan
        assert plan is not None
        return {
            "bytes": float(plan.num_bytes),
            "slow_bytes": float(plan.slow_bytes),
            "time_s": time.monotonic() - start,
            "transient_gb": self._relay.transient_bytes / 1e9,
        }

    def resize(self, tp: int) -> None:
        """Set the engines' tensor-parallel size for later weight updates; call on every rank."""
        self._handover.resize(tp)

    def _enter(
        self, learner: Learner | None, engine: WeightReceiver | None, version: int
    ) -> list[tuple[Shard, Tensor]]:
        """Begin the load of this rank's engine, and register and return this rank's shards."""
        rank = self._relay.peers.rank
        with blamed("engine", rank):
            self._handover.begin(engine, version)
        with blamed("learner", rank):
            own = list(self._shards(learner)) if learner is not None else []
        self._relay.prepare([shard for shard, _ in own], self._handover.takes(engine))
        return own

    def _shards(self, learner: Learner) -> Iterator[tuple[Shard, Tensor]]:
        return learner.shards() if self._base is None else learner.adapter_shards()

    def _move(self, own: list[tuple[Shard, Tensor]], engine: WeightReceiver | None) -> None:
        """Transfer all weights between ranks, and send all buckets to this rank's engine."""
        damage = self._relay.run(own, self._take, self._give, self._held)
        if damage is not None:
            raise LinkError(damage)
        if self._base is not None and self._handover.takes(engine):
            merged = self._base.merged(self._adapters)
            packed = self._packer.buckets(merged, self._handover.take)
            self._handover.give_all(packed, self._relay.look)
        self._handover.finish()
        self._handover.check()

    # ---- a bucket

    def _held(self) -> int:
        """Return the bytes that this rank now holds for buckets, on the GPU and on the host."""
        staged = 0 if self._staged is None else len(self._staged)
        return staged + self._handover.held_bytes

    def _take(self, num_bytes: int) -> Tensor:
        """Return a buffer on the relay's device for a bucket; if possible, `Handover`'s buffer."""
        relay = self._relay
        if self._base is not None:
            return torch.empty(num_bytes, dtype=torch.uint8, device=relay.device)
        if relay.device.type == "cpu" or self._handover.transport == "cuda_ipc":
            return self._handover.take(num_bytes)
        if self._staged is None or len(self._staged) < num_bytes:
            self._staged = None  # frees the old buffer before the new allocation
            self._staged = torch.empty(num_bytes, dtype=torch.uint8, device=relay.device)
        return self._staged[:num_bytes]

    def _give(self, bucket: Bucket, buffer: Tensor) -> None:
        if self._base is not None:
            self._adapters |= {name: part.clone() for name, part in unpack(bucket, buffer)}
            return
        where = f"bucket of {bucket.tensors[0].name} ...: "
        with blamed("engine", self._relay.peers.rank, where):
            if self._staged is not None:
                host = self._handover.take(bucket.num_bytes)
                self._relay.look()
                host.copy_(buffer)
                buffer = host
            self._handover.give(bucket, buffer)

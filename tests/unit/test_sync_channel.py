"""The channel in a world of one: what an engine sees of a push, and what is refused.
tests/ranks/test_sync.py has the ranks."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.ops.reshard import checksum
from rlcore.protocols import InProcess, WeightChannel
from rlcore.records import Bucket, Shard
from rlcore.sync.channel import make_channel
from rlcore.sync.host_cache import HostWeightCache
from rlcore.sync.peers import Peers, WeightUpdateError
from rlcore.utils.buckets import as_tensor, cuda_handle, open_cuda, open_payload, unpack

ROUTES = ("gather", "intranode")


class Weights:
    """A learner with two tensors, the second in three dimensions as fused rows come."""

    def __init__(self) -> None:
        self.tensors = {"a": torch.arange(12.0).view(3, 4), "b": torch.randn(4, 3, 2)[:, 1:]}

    def shards(self) -> Iterator[tuple[Shard, Tensor]]:
        for name, tensor in self.tensors.items():
            shape = tuple(tensor.flatten(0, -2).shape)
            yield (
                Shard(name=name, dtype="float32", shape=shape, dim=0, start=0, stop=shape[0]),
                tensor,
            )

    def export(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.tensors.items():
            yield name, tensor.flatten(0, -2)


class Reader(InProcess):
    """An engine that verifies and keeps."""

    def __init__(self) -> None:
        self.came: dict[str, Tensor] = {}
        self.transports: set[str] = set()
        self.open = False

    def begin_load(self, version: int) -> None:
        self.came, self.open = {}, True

    def load_bucket(self, bucket: Bucket, payloads: Any) -> None:
        flat = as_tensor(bucket, open_payload(bucket, payloads[0]))
        assert checksum(flat) == bucket.checksum
        self.came |= {name: tensor.clone() for name, tensor in unpack(bucket, flat)}
        self.transports.add(bucket.transport)

    def end_load(self) -> None:
        self.open = False


class Confused(Reader):
    def load_bucket(self, bucket: Bucket, payloads: Any) -> None:
        raise RuntimeError("no memory for this bucket")


class Dying(Reader):
    def load_bucket(self, bucket: Bucket, payloads: Any) -> None:
        self.failure = "engine process 1 was killed by signal 9"
        raise RuntimeError(f"load_bucket: {self.failure}")


def channel(route: str, **options: Any) -> WeightChannel:
    return make_channel(route, max_bytes=options.pop("max_bytes", 100), **options)


@pytest.mark.parametrize("transport", ["bytes", "shm"])
@pytest.mark.parametrize("route", ROUTES)
def test_an_engine_gets_all_tensors_over_either_route(route: str, transport: str) -> None:
    learner, engine = Weights(), Reader()
    sent = channel(route, transport=transport)
    for version in (1, 2):
        figures = sent.update_weights(learner, engine, version)
        assert not engine.open and engine.transports == {transport}
        want = dict(learner.export())
        assert engine.came.keys() == want.keys()
        assert all(torch.equal(engine.came[name], want[name]) for name in want)
        learner.tensors["a"] += 1
    assert figures["bytes"] == 12 * 4 + 8 * 2 * 4
    assert figures["time_s"] > 0 and figures["transient_gb"] > 0


@pytest.mark.parametrize("route", ROUTES)
def test_a_shelf_keeps_the_last_push_for_an_engine_that_is_away(route: str) -> None:
    learner, shelf, engine = Weights(), HostWeightCache(tp=2), Reader()
    with pytest.raises(RuntimeError, match="no weights to wake with"):
        shelf.fill(engine)
    sent = channel(route)
    for version in (1, 2):
        learner.tensors["a"] += 1
        sent.update_weights(learner, shelf, version)
    want = {name: tensor.clone() for name, tensor in learner.export()}
    learner.tensors["a"] += 1  # what comes later is not on the shelf
    for _ in range(2):
        shelf.fill(engine)
        assert not engine.open and engine.transports == {"shm"}
        assert engine.came.keys() == want.keys()
        assert all(torch.equal(engine.came[name], want[name]) for name in want)
    assert shelf.num_bytes == 12 * 4 + 8 * 2 * 4
    shelf.begin_load(3)
    with pytest.raises(RuntimeError, match="the last weight update failed"):
        shelf.fill(engine)
    shelf.close()
    assert shelf.num_bytes == 0


@pytest.mark.parametrize("route", ROUTES)
def test_an_engine_that_refuses_fails_the_push_and_one_that_dies_does_not(route: str) -> None:
    sent, engine = channel(route), Confused()
    with pytest.raises(RuntimeError, match="no memory for this bucket"):
        sent.update_weights(Weights(), engine, 1)
    assert engine.open  # not usable
    assert sent.update_weights(Weights(), Dying(), 2)["bytes"] > 0
    sent.update_weights(Weights(), engine := Reader(), 3)
    assert not engine.open


def test_a_push_over_a_relay_without_an_engine_moves_nothing() -> None:
    figures = channel("intranode").update_weights(Weights(), None, 1)
    assert figures["bytes"] == 12 * 4 + 8 * 2 * 4 and figures["transient_gb"] == 0


def test_other_shards_than_before_are_planned_anew() -> None:
    sent, learner = channel("two_stage"), Weights()
    sent.update_weights(learner, Reader(), 1)
    learner.tensors["c"] = torch.ones(2, 2)
    sent.update_weights(learner, engine := Reader(), 2)
    assert engine.came.keys() == {"a", "b", "c"}


def test_a_rank_without_a_learner_needs_another_route() -> None:
    with pytest.raises(WeightUpdateError, match="sync.route gather: a rank without a learner"):
        channel("gather").update_weights(None, Reader(), 1)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="timeout_s 0: must be above 0"):
        Peers(timeout_s=0)
    with pytest.raises(ValueError, match="world_size 2: more than one rank needs a store"):
        Peers(0, 2)
    with pytest.raises(ValueError, match="tp 2: must divide the 1 ranks"):
        channel("intranode", tp=2)
    with pytest.raises(ValueError, match="max_bytes 0"):
        channel("gather", max_bytes=0)


def test_handles_of_a_gpu_are_refused_where_there_is_none() -> None:
    with pytest.raises(ValueError, match="payload of transport cuda_ipc"):
        open_cuda(b"\xc1")
    with pytest.raises(ValueError, match="must have its own storage"):
        cuda_handle(torch.zeros(8, dtype=torch.uint8)[4:])

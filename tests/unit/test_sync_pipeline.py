"""Three buckets under way: one is packed while the engine has two. What happens in which order, and
how much memory it takes; never how long."""

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.ops.reshard import checksum
from rlcore.records import Bucket, Shard
from rlcore.sync import colocated
from rlcore.sync.channel import make_channel
from rlcore.sync.colocated import IN_FLIGHT, ColocatedChannel
from rlcore.sync.peers import Peers, WeightUpdateError
from rlcore.utils import buckets
from rlcore.utils.buckets import as_tensor, open_payload, unpack

ROWS = 16


class Late:
    """An engine that opens a bucket as late as possible: when the caller waits for its load. It
    raises an error at bucket `bad`, or never answers there."""

    failure = ""

    def __init__(self, log: list[str], bad: int = -1, error: type[Exception] = RuntimeError):
        self._log, self._bad, self._error = log, bad, error
        self.came: dict[str, Tensor] = {}
        self.is_whole = False
        self.waiting = 0

    def begin_load(self, version: int) -> None:
        assert self.waiting == 0 or self._error is TimeoutError
        self.came, self.is_whole, self._sent = {}, False, 0

    def send_bucket(self, bucket: Bucket, payloads: Any) -> Callable[[], None]:
        number, self._sent = self._sent, self._sent + 1
        self.waiting += 1
        self._log.append(f"send {number}")

        def load() -> None:
            self.waiting -= 1
            self._log.append(f"load {number}")
            if number == self._bad:
                raise self._error("no memory")
            flat = as_tensor(bucket, self.open(bucket, payloads))
            assert checksum(flat) == bucket.checksum
            self.came |= {name: tensor.clone() for name, tensor in unpack(bucket, flat)}

        return load

    def open(self, bucket: Bucket, payloads: Any) -> Any:
        return open_payload(bucket, payloads[0])

    def end_load(self) -> None:
        assert self.waiting == 0
        self._log.append("end")
        self.is_whole = True


class Weights:
    """Tensors of `rows` rows, each a bucket; says when the next one is packed."""

    def __init__(self, log: list[str], rows: list[int]) -> None:
        self._log = log
        self.full = {f"w{i}": torch.randn(n, 8) for i, n in enumerate(rows)}

    def export(self) -> Iterator[tuple[str, Tensor]]:
        for i, (name, tensor) in enumerate(self.full.items()):
            if i:  # a bucket is packed when the next tensor does not fit
                self._log.append(f"pack {i - 1}")
            yield name, tensor
        self._log.append(f"pack {len(self.full) - 1}")

    def shards(self) -> Iterator[tuple[Shard, Tensor]]:
        for name, tensor in self.full.items():
            shape = tuple(tensor.shape)
            yield (
                Shard(name=name, dtype="float32", shape=shape, dim=0, start=0, stop=shape[0]),
                tensor,
            )


BYTES = ROWS * 8 * 4


@pytest.mark.parametrize("transport", ["bytes", "shm"])
@pytest.mark.parametrize("route", ["gather", "intranode"])
def test_an_engine_gets_whole_buckets_whenever_it_opens_them(route: str, transport: str) -> None:
    """A buffer that was packed anew too early would have another checksum."""
    channel = make_channel(route, transport=transport, max_bytes=BYTES)  # type: ignore[arg-type]
    for rows in ([ROWS] * 7, [ROWS, ROWS, 3 * ROWS, 5 * ROWS, ROWS, ROWS, ROWS]):
        weights, engine = Weights([], rows), Late([])
        channel.update_weights(weights, engine, 1)
        assert engine.is_whole and engine.came.keys() == weights.full.keys()
        assert all(torch.equal(engine.came[name], weights.full[name]) for name in engine.came)


def test_a_bucket_is_packed_while_the_engine_has_two_and_no_wait_comes_early() -> None:
    log: list[str] = []
    ColocatedChannel(BYTES).update_weights(Weights(log, [ROWS] * 6), Late(log), 1)
    assert IN_FLIGHT == 2
    want = ["pack 0", "send 0", "pack 1", "send 1"]
    for number in range(2, 6):
        want += [f"pack {number}", f"load {number - 2}", f"send {number}"]
    assert log == [*want, "load 4", "load 5", "end"]


def test_a_tensor_larger_than_a_bucket_is_loaded_before_the_next_one_is_packed() -> None:
    log: list[str] = []
    ColocatedChannel(BYTES).update_weights(Weights(log, [ROWS, 4 * ROWS, ROWS]), Late(log), 1)
    want = ["pack 0", "send 0", "pack 1", "load 0", "send 1", "load 1", "pack 2", "send 2"]
    assert log == [*want, "load 2", "end"]


@pytest.mark.parametrize("transport", ["bytes", "shm"])
def test_three_buffers_are_enough_and_are_kept(transport: str) -> None:
    channel = make_channel("gather", transport=transport, max_bytes=BYTES)  # type: ignore[arg-type]
    rooms: set[int] = set()
    for _ in range(2):
        figures = channel.update_weights(Weights([], [ROWS] * 9), Late([]), 1)
        assert figures["transient_gb"] * 1e9 == (IN_FLIGHT + 1) * BYTES
        kept = channel._handover._rooms  # type: ignore[attr-defined]
        rooms |= {id(room) for room in kept}
        assert len(kept) == len(rooms) == IN_FLIGHT + 1
    figures = channel.update_weights(Weights([], [ROWS] * 3 + [4 * ROWS] * 2), Late([]), 1)
    assert figures["transient_gb"] * 1e9 <= (4 + IN_FLIGHT) * BYTES
    assert sum(room.num_bytes for room in kept) <= IN_FLIGHT * BYTES  # not the large one


@pytest.mark.parametrize("route", ["gather", "intranode"])
def test_a_bucket_that_cannot_be_loaded_is_named_and_nothing_follows(route: str) -> None:
    log: list[str] = []
    channel = make_channel(route, max_bytes=BYTES)  # type: ignore[arg-type]
    engine = Late(log, bad=2)
    with pytest.raises(WeightUpdateError) as raised:
        channel.update_weights(Weights([], [ROWS] * 8), engine, 1)
    said = "weight update 1: bucket 2 (w2 ...): rank 0: RuntimeError: no memory"
    assert str(raised.value).startswith(said)
    # Bucket 3 was under way; its memory stays until the engine is through with it.
    assert log[-3:] == ["send 3", "load 2", "load 3"]
    assert not engine.is_whole and engine.waiting == 0
    channel.update_weights(weights := Weights([], [ROWS] * 8), good := Late([]), 2)
    assert good.is_whole and torch.equal(good.came["w7"], weights.full["w7"])


def test_a_learner_that_fails_leaves_no_bucket_behind() -> None:
    """The engine is through with all memory when the update has failed."""

    class Broken(Weights):
        def export(self) -> Iterator[tuple[str, Tensor]]:
            for i, item in enumerate(super().export()):
                if i == 5:
                    raise KeyError("w5")
                yield item

    channel, engine = ColocatedChannel(BYTES), Late([])
    with pytest.raises(WeightUpdateError, match="KeyError: 'w5'"):
        channel.update_weights(Broken([], [ROWS] * 8), engine, 1)
    assert engine.waiting == 0 and not engine.is_whole and len(engine.came) == 4
    channel.update_weights(Weights([], [ROWS] * 8), engine, 2)
    assert engine.is_whole and len(channel._handover._rooms) == IN_FLIGHT + 1


def test_an_engine_that_falls_silent_costs_one_deadline() -> None:
    log: list[str] = []
    channel = ColocatedChannel(BYTES)
    with pytest.raises(WeightUpdateError, match=r"bucket 1 \(w1 ...\): rank 0: TimeoutError"):
        channel.update_weights(Weights([], [ROWS] * 8), Late(log, 1, TimeoutError), 1)
    assert log[-2:] == ["send 2", "load 1"]  # and bucket 2 is not waited for
    kept = channel._handover._rooms
    assert len(kept) < IN_FLIGHT + 1  # its memory is not packed again
    channel.update_weights(Weights([], [ROWS] * 8), engine := Late([]), 2)
    assert engine.is_whole


def test_an_engine_that_dies_meanwhile_does_not_fail_the_update() -> None:
    class Dying(Late):
        def send_bucket(self, bucket: Bucket, payloads: Any) -> Callable[[], None]:
            load = super().send_bucket(bucket, payloads)

            def end() -> None:
                self.failure = "engine process 1 was killed by signal 9"
                load()

            return end if self._sent == 3 else load

    engine = Dying([], bad=2)
    figures = ColocatedChannel(BYTES).update_weights(Weights([], [ROWS] * 8), engine, 1)
    assert figures["bytes"] >= 8 * BYTES and not engine.is_whole and engine._sent == 4


# ---- an engine of several ranks, which reads the memory of each


class Handles:
    """A stand-in for CUDA's handles, over host memory: weak references by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        monkeypatch.setattr(buckets, "cuda_handle", self._made)
        self.dropped: list[bytes] = []
        monkeypatch.setattr(buckets, "drop_cuda", self.dropped.append)
        monkeypatch.setattr(colocated, "_gpu", lambda: torch.device("cpu"))
        monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
        self._memory: dict[bytes, Any] = {}
        self._lock = threading.Lock()

    def _made(self, buffer: Tensor) -> bytes:
        with self._lock:
            name = f"{threading.current_thread().name} {len(self._memory)}".encode()
            self._memory[name] = weakref.ref(buffer.untyped_storage())
        return name

    def open(self, name: bytes) -> Any:
        return self._memory[bytes(name)]()

    def of(self, rank: int) -> list[Any]:
        """Memory behind the handles of a rank; None if it is free."""
        names = [name for name in self._memory if name.startswith(f"rank{rank} ".encode())]
        return [self._memory[name]() for name in names]


class Reader(Late):
    """Reads the memory of two ranks."""

    def __init__(self, handles: Handles, **options: Any) -> None:
        super().__init__([], **options)
        self._handles, self.most = handles, [0, 0]

    def open(self, bucket: Bucket, payloads: Any) -> Any:
        assert len(payloads) == 2
        memory = [self._handles.open(name) for name in payloads]
        assert all(storage is not None for storage in memory)
        for rank in range(2):
            held = sum(storage is not None for storage in self._handles.of(rank))
            self.most[rank] = max(self.most[rank], held)
        return torch.empty(0, dtype=torch.uint8).set_(memory[0])


def push_to_two(route: str, engine: Reader, gathers: list[str]) -> None:
    """Eight buckets from two ranks to their engine; `gathers` gets what they exchanged."""
    store, found = dist.HashStore(), {}

    def work(rank: int) -> None:
        peers = Peers(rank, 2, store, timeout_s=20)
        gather = peers.gather

        def told(group: Any, mine: bytes, where: str, bucket: int = -1) -> list[bytes]:
            gathers.append(where)
            return gather(group, mine, where, bucket)

        peers.gather = told  # type: ignore[method-assign]
        options: Any = {"transport": "cuda_ipc", "tp": 2, "max_bytes": BYTES, "peers": peers}
        channel = make_channel(route, **options)  # type: ignore[arg-type]
        learner = Weights([], [ROWS] * 8)
        if route == "intranode" and rank:
            learner.full = {}
        found[rank] = channel.update_weights(learner, engine if rank == 0 else Late([]), 1)

    threads = [threading.Thread(target=work, args=(r,), name=f"rank{r}") for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 2


@pytest.mark.parametrize("route", ["gather", "intranode"])
def test_every_rank_keeps_its_bucket_until_the_engine_has_loaded_it(
    route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles, gathers = Handles(monkeypatch), []
    engine = Reader(handles)
    push_to_two(route, engine, gathers)
    assert engine.is_whole and not engine.waiting and len(engine.came) == 8
    assert max(engine.most) <= IN_FLIGHT + 1
    assert handles.of(0) == handles.of(1) == [None] * 8 and not handles.dropped
    # One exchange for each bucket, and one that says that all are loaded.
    assert sum("bucket" in where for where in gathers) == 2 * (8 + 1)


@pytest.mark.parametrize("route", ["gather", "intranode"])
def test_no_rank_shares_memory_with_an_engine_that_is_gone(
    route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA keeps memory that is shared until it has been opened and released."""
    handles, gathers = Handles(monkeypatch), []
    engine = Reader(handles, bad=1)
    engine.failure = "engine process 1 was killed by signal 9"
    push_to_two(route, engine, gathers)
    assert not engine.is_whole and sum("bucket" in where for where in gathers) == 2 * (8 + 1)
    assert len(handles.of(0)) == 3 and len(handles.of(1)) == 4
    assert handles.of(0) == [None] * 3 and handles.of(1) == [None] * 4
    (dropped,) = handles.dropped  # the leader had not told the other rank yet
    assert dropped.startswith(b"rank1 ")

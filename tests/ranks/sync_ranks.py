"""What the ranks of test_sync.py do: push tiny models and made-up ones over every route."""

import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.hf.config import HFConfig
from rlcore.protocols import InProcess
from rlcore.records import Bucket, Shard
from rlcore.rollout.torch_engine.engine import TorchEngine
from rlcore.sync.channel import RelayChannel, make_channel
from rlcore.sync.peers import Peers
from rlcore.utils.buckets import as_tensor, open_payload, unpack
from tests import kit

MAX_BYTES = 8192
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen2": {
        "dp4": {},
        "tp2": {"tp": 2},
        "tp2 pp2": {"tp": 2, "pp": 2},
        "pp2 vpp2": {"pp": 2, "vpp": 2},
        "tp2 cp2": {"tp": 2, "cp": 2},
        "tp4 of two key-value heads": {"tp": 4},
        "pp2 of 3 and 1 layers": {"pp": 2, "pp_layers": (3, 1)},
    },
    "qwen3": {"tp2 pp2": {"tp": 2, "pp": 2}},  # tied: the last stage has a copy of the embedding
    "qwen3_moe": {
        "ep4": {"ep": 4},
        "tp2 ep2": {"tp": 2, "ep": 2},
        "pp2 ep2": {"pp": 2, "ep": 2},
        "etp2": {"etp": 2},
        "tp2 ep2 etp2": {"tp": 2, "ep": 2, "etp": 2},
    },
    "glm4_moe": {"tp2 pp2 ep2": {"tp": 2, "pp": 2, "ep": 2}},
    "deepseek_v3": {"tp2 ep2": {"tp": 2, "ep": 2}},
}
TRAINER = {"tp": 2, "pp": 2}
SITES = {"nodes of two": [[0, 1], [2, 3]], "one node": [[0, 1, 2, 3]]}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Of names, shapes, dtypes and bytes, by name."""
    found = hashlib.blake2b()
    for name, tensor in sorted(tensors.items()):
        tensor = tensor.contiguous()
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.view(torch.uint8).numpy())
    return found.hexdigest()


class Recording(TorchEngine):
    """The torch engine; keeps what came."""

    def begin_load(self, version: int) -> None:
        self.came: dict[str, Tensor] = {}
        self.buckets: list[int] = []
        super().begin_load(version)

    def load_bucket(self, bucket: Bucket, payloads: Sequence[bytes]) -> None:
        super().load_bucket(bucket, payloads)
        flat = as_tensor(bucket, open_payload(bucket, payloads[0]))
        self.came |= {name: tensor.clone() for name, tensor in unpack(bucket, flat)}
        self.buckets.append(bucket.num_bytes)


def learner_of(arch: str, layout: Mapping[str, int], dtype: str = "float32") -> Any:
    """The learner of the tiny model; the weights depend on nothing but their names."""
    from rlcore.mcore import shim

    shim.prepare()
    from tests.ranks import learner_ranks

    return learner_ranks.make(layout, arch=arch, dtype=dtype)


def exported(rank: int) -> dict[str, str]:
    """Digests of what one rank alone exports, by dtype."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        learner = learner_of("qwen2", {}, dtype)
        found[dtype] = digest(kit.state(learner.export()))
        learner.close()
    return found


def learners(rank: int, folder: str) -> dict[str, Any]:
    """What four ranks do with Megatron: they import it once."""
    found = {"shards": shards(rank), "colocated": colocated(rank)}
    return found | {"disjoint": disjoint(rank, folder)}


# ---- shards


def shards(rank: int) -> dict[str, Any]:
    """For every layout: this rank's shards as rows, and which of them are not their slice of the
    exported tensor."""
    found: dict[str, Any] = {}
    for arch, layouts in LAYOUTS.items():
        for name, layout in layouts.items():
            learner = learner_of(arch, layout)
            full = kit.state(learner.export())
            rows, wrong, copies = [], [], []
            for s, tensor in learner.shards():
                want = full[s.name].narrow(s.dim, s.start, s.stop - s.start)
                if not torch.equal(tensor.reshape(want.shape), want) or s.dtype != "float32":
                    wrong.append(s.name)
                if s.shape != tuple(full[s.name].shape):
                    wrong.append(s.name)
                if tensor.untyped_storage().data_ptr() not in storages(learner):
                    copies.append(s.name)
                rows.append([s.name, list(s.shape), s.dim, s.start, s.stop])
            found[f"{arch} {name}"] = {
                "rows": rows,
                "wrong": wrong,
                "copies": copies,
                "names": list(full),
                "replica": list(learner.layout.replica_ranks),
            }
            learner.close()
    return found


def storages(learner: Any) -> set[int]:
    buffers = (b for model in learner._models for _, b in model.named_buffers())
    return {t.untyped_storage().data_ptr() for t in (*learner._parameters(), *buffers)}


# ---- routes


def colocated(rank: int) -> dict[str, Any]:
    """Trainer TP2 x PP2, a torch engine on every rank, each route; then a second push after the
    weights have moved."""
    hf = HFConfig.from_dict(kit.tiny_config("qwen2"))
    learner = learner_of("qwen2", TRAINER, "bfloat16")
    engine = Recording(hf, dtype="bfloat16", max_model_tokens=64)
    found: dict[str, Any] = {}
    routes = {"gather": make_channel("gather", max_bytes=MAX_BYTES)}
    for name, sites in SITES.items():
        routes[name] = make_channel(
            "intranode", max_bytes=MAX_BYTES, sites=sites, peers=Peers(name=name)
        )
    routes["nodes of two, in one exchange"] = make_channel(
        "intranode", max_bytes=MAX_BYTES, sites=SITES["nodes of two"], peers=Peers(name="one")
    )
    routes["nodes of two, in one exchange"]._relay.one_exchange = True  # as NCCL's
    for name, channel in routes.items():
        figures = channel.update_weights(learner, engine, 3)
        found[name] = {
            "digest": digest(engine.came),
            "figures": figures,
            "buckets": engine.buckets,
            "version": engine.version,
        }
    with torch.no_grad():
        for parameter in learner._parameters():
            parameter.add_(1)
    for name, channel in routes.items():
        channel.update_weights(learner, engine, 4)
        found[f"{name} again"] = {"digest": digest(engine.came), "version": engine.version}
    learner.close()
    return found | {"engines of two ranks": of_two_ranks(rank), "biases": biases()}


def biases() -> dict[str, list[Any]]:
    """Push a bfloat16 model whose routers have float32 biases. Return their dtypes in the engine,
    and their largest distances from what the learner has, by route."""
    hf = HFConfig.from_dict(kit.tiny_config("glm4_moe"))
    learner = learner_of("glm4_moe", TRAINER | {"ep": 2}, "bfloat16")
    for model in learner._models:
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(torch.arange(len(buffer)) / 7)
    engine = Recording(hf, dtype="bfloat16", max_model_tokens=64)
    found: dict[str, list[Any]] = {}
    for route in ("gather", "intranode"):
        sites = [] if route == "gather" else SITES["one node"]
        channel = make_channel(route, max_bytes=MAX_BYTES, sites=sites, peers=Peers(name=route))
        channel.update_weights(learner, engine, 1)
        views = [v for n, v in engine._model.views.items() if n.endswith("correction_bias")]
        apart = [float((view - torch.arange(8) / 7).abs().max()) for view in views]
        found[route] = [[str(view.dtype) for view in views], apart]
    learner.close()
    return found


def of_two_ranks(rank: int) -> dict[str, Any]:
    """Trainer TP4 over two key-value heads, over which stand two engines of tensor-parallel size 2;
    each route."""
    learner = learner_of("qwen2", {"tp": 4}, "bfloat16")
    routes = {"gather": ("gather", [])} | {n: ("intranode", sites) for n, sites in SITES.items()}
    found: dict[str, Any] = {}
    for name, (route, sites) in routes.items():
        channel = make_channel(
            route,
            max_bytes=MAX_BYTES,
            sites=sites,
            tp=2,
            transport="shm",
            peers=Peers(name=f"{name}, tp 2"),
        )
        engine = Keeper()
        channel.update_weights(learner, engine, 1)
        found[name] = [digest(engine.came), [len(p) for p in engine.payloads]]
    learner.close()
    return found


def disjoint(rank: int, folder: str) -> dict[str, Any]:
    """Ranks 0 and 1 train with TP2 in a world of their own, 2 and 3 only sample."""
    dist.barrier()
    dist.destroy_process_group()
    found: dict[str, Any] = {}
    peers = Peers(rank, 4, dist.FileStore(f"{folder}/meet", 4), timeout_s=60)
    channel = make_channel("two_stage", max_bytes=MAX_BYTES, sites=[[0, 1], [2, 3]], peers=peers)
    if rank < 2:
        store = dist.FileStore(f"{folder}/trainers", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        learner = learner_of("qwen2", {"tp": 2})
        for version in (1, 2):
            found["figures"] = channel.update_weights(learner, None, version)
        learner.close()
        dist.destroy_process_group()
    else:
        hf = HFConfig.from_dict(kit.tiny_config("qwen2"))
        engine = Recording(hf, dtype="float32", max_model_tokens=64)
        for version in (1, 2):
            found["figures"] = channel.update_weights(None, engine, version)
        found |= {"digest": digest(engine.came), "version": engine.version}
    store = dist.FileStore(f"{folder}/again", 4)  # for the end of the gang
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    return found


# ---- made-up models


def whole(names: int = 12, rows: int = 16, columns: int = 8) -> dict[str, Tensor]:
    """The same tensors on every rank."""
    generator = torch.Generator().manual_seed(1)
    return {f"w{i}": torch.randn(rows, columns, generator=generator) for i in range(names)}


class Slices:
    """A learner with nothing but weights: part `place` of `of` of each tensor, rows of even ones
    and columns of odd ones."""

    def __init__(self, place: int, of: int) -> None:
        self._place, self._of = place, of

    def shards(self) -> Iterator[tuple[Shard, Tensor]]:
        for i, (name, tensor) in enumerate(whole().items()):
            dim = i % 2
            size = tensor.shape[dim] // self._of
            start = self._place * size
            shape = tuple(tensor.shape)
            shard = Shard(
                name=name, dtype="float32", shape=shape, dim=dim, start=start, stop=start + size
            )
            yield shard, tensor.narrow(dim, start, size)


class Keeper(InProcess):
    """An engine that keeps what came; usable only after a whole load."""

    def __init__(self) -> None:
        self.usable, self.came = True, {}
        self.payloads: list[Any] = []

    def begin_load(self, version: int) -> None:
        self.usable, self.came, self.payloads = False, {}, []

    def load_bucket(self, bucket: Bucket, payloads: Sequence[Any]) -> None:
        self.payloads.append(list(payloads))
        if bucket.transport != "cuda_ipc":
            flat = as_tensor(bucket, open_payload(bucket, payloads[0]))
            self.came |= {name: tensor.clone() for name, tensor in unpack(bucket, flat)}

    def end_load(self) -> None:
        self.usable = True


def outcome(channel: RelayChannel, learner: Any, engine: Keeper, version: int = 1) -> list[Any]:
    """What a push raised, how long it took, and the state of the engine behind it."""
    start = time.monotonic()
    error = ""
    try:
        channel.update_weights(learner, engine, version)
    except (RuntimeError, ValueError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    same = bool(engine.came) and digest(engine.came) == digest(whole())
    return [error, time.monotonic() - start, engine.usable, same]


def made(name: str, sites: Sequence[Sequence[int]], timeout_s: float = 60, **more: Any) -> Any:
    """A relay over all ranks, with buckets of two tensors."""
    peers = Peers(name=name, timeout_s=timeout_s)
    return make_channel("two_stage", max_bytes=1024, sites=sites, peers=peers, **more)


def trouble(rank: int) -> None:
    """Three ranks: 0 trains, 1 and 2 are another cluster. Damage on both stages, a rank that comes
    late, one that stops in the middle; a good push after each. Last, one that dies."""
    learner = Slices(0, 1) if rank == 0 else None
    engine = Keeper()
    found: dict[str, Any] = {}

    def both(name: str, channel: Any, spoil: Any = None) -> None:
        if spoil is not None:
            spoil()
        found[name] = outcome(channel, learner, engine)

    sites = [[0], [1, 2]]
    for stage, who in ((0, 0), (1, 1)):  # the ranks that damage
        channel = made(f"damage {stage}", sites)
        good = outcome(channel, learner, engine)
        damage = damaging(channel, stage) if rank == who else None
        if damage is not None:
            damage(True)
        found[f"damage {stage}"] = outcome(channel, learner, engine)
        if damage is not None:
            damage(False)
        found[f"damage {stage} after"] = outcome(channel, learner, engine)
        found[f"damage {stage} before"] = good

    channel = made("late", sites)
    found["late before"] = outcome(channel, learner, engine)
    hurry(channel, 2)
    if rank == 2:
        time.sleep(3.5)
    found["late"] = outcome(channel, learner, engine)
    hurry(channel, 60)
    dist.barrier()
    found["late after"] = outcome(channel, learner, engine)

    channel = made("stuck", sites)
    found["stuck before"] = outcome(channel, learner, engine)
    hurry(channel, 3)
    if rank == 1:
        engine.load_bucket = lambda bucket, payloads: time.sleep(5)  # type: ignore[method-assign]
    found["stuck"] = outcome(channel, learner, engine)
    if rank == 1:
        del engine.load_bucket
    hurry(channel, 60)
    dist.barrier()
    found["stuck after"] = outcome(channel, learner, engine)
    found["death"] = death(rank, learner, engine, found)
    leave_result(rank, found)
    os._exit(0)  # no goodbyes in a gang that has lost a rank


def hurry(channel: RelayChannel, timeout_s: float) -> None:
    """Another deadline, of the groups that are there, too."""
    peers = channel._relay.peers
    peers.timeout_s = timeout_s
    for group in peers._groups.values():
        group._wait = timedelta(seconds=timeout_s)


def damaging(channel: RelayChannel, stage: int) -> Any:
    """Turns damage of bucket 1 on and off: of what this rank sends (0), or broadcasts (1)."""
    from rlcore.sync.relay import _UpdateRun

    packed, spread = _UpdateRun._packed, _UpdateRun._spread

    def bad_packed(run: Any, number: int, part: Any) -> Tensor:
        buffer = packed(run, number, part)
        if number == 1 and part.owner != part.root:
            buffer[3] ^= 1
        return buffer

    def bad_spread(run: Any, number: int, part: Any, buffer: Tensor) -> None:
        bad = number == 1 and part.root == run._rank
        buffer[3] ^= bad
        spread(run, number, part, buffer)
        buffer[3] ^= bad

    def turn(on: bool) -> None:
        if stage == 0:
            _UpdateRun._packed = bad_packed if on else packed
        else:
            _UpdateRun._spread = bad_spread if on else spread

    return turn


def death(rank: int, learner: Any, engine: Keeper, found: dict[str, Any]) -> list[Any]:
    """Rank 2 dies when its engine takes the second bucket, and leaves what it has found."""
    channel = made("death", [[0], [1, 2]], timeout_s=30)
    first = outcome(channel, learner, engine)
    assert not first[0], first

    def die(bucket: Bucket, payloads: Sequence[Any]) -> None:
        if bucket.tensors[0].name == "w2":
            leave_result(rank, found | {"death": "died"})
            os._exit(0)

    if rank == 2:
        engine.load_bucket = die  # type: ignore[method-assign]
    return outcome(channel, learner, engine)


def leave_result(rank: int, result: Any) -> None:
    """What `kit.run_ranks` returns for a rank that does not come back."""
    torch.save(result, Path(os.environ["RANKS_FOLDER"]) / f"result{rank}")


def mixed(rank: int) -> dict[str, Any]:
    """Four ranks: 0 and 1 train and sample, 2 and 3 only sample, as an engine of two ranks."""
    found: dict[str, Any] = {}
    learner = Slices(rank, 2) if rank < 2 else None
    engine = Keeper()
    channel = made("mixed", [[0, 1], [2, 3]], tp=2, transport="shm")
    figures = channel.update_weights(learner, engine, 1)
    found["figures"] = figures
    found["came"] = digest(engine.came) == digest(whole()) if engine.came else "nothing"
    found["payloads"] = [len(p) for p in engine.payloads]
    found["same file"] = all(len(set(p)) == 1 for p in engine.payloads)

    # An engine over two nodes of one rank each: every rank has a file with all weights.
    nodes = {"tp": 2, "transport": "shm", "ranks_per_node": 1}
    for route in ("two_stage", "gather"):
        engine = KeeperOfAll()
        if route == "gather":
            channel = make_channel("gather", max_bytes=1024, peers=Peers(name="files"), **nodes)
            channel.update_weights(Exporting(), engine, 1)
        else:
            made("nodes", [[0, 1], [2, 3]], **nodes).update_weights(learner, engine, 1)
        is_whole = [digest(came) == digest(whole()) for came in engine.came_by_rank]
        owners = {tuple(path.split(b"/")[2] for path in paths) for paths in engine.payloads}
        found[f"{route} files"] = [is_whole, [len(set(pids)) for pids in owners]]

    # Handles of every rank reach the leader: a stand-in for CUDA's, over host memory.
    from rlcore.sync import colocated as module
    from rlcore.utils import buckets

    buckets.cuda_handle = lambda buffer: f"rank {rank}, {len(buffer)} bytes".encode()
    module._gpu = lambda: torch.device("cpu")
    torch.cuda.ipc_collect = lambda: None
    for route in ("relay", "gather"):
        engine = Keeper()
        if route == "relay":
            channel = made("handles", [[0, 1], [2, 3]], tp=2, transport="cuda_ipc")
            channel.update_weights(learner, engine, 1)
        else:
            channel = make_channel(
                "gather", max_bytes=1024, tp=2, transport="cuda_ipc", peers=Peers(name="gather")
            )
            channel.update_weights(Exporting(), engine, 1)
        found[f"{route} handles"] = engine.payloads
    return found


class KeeperOfAll(Keeper):
    """Keeps what each of its ranks would load."""

    def __init__(self) -> None:
        super().__init__()
        self.came_by_rank: list[dict[str, Tensor]] = [{}, {}]

    def load_bucket(self, bucket: Bucket, payloads: Sequence[Any]) -> None:
        super().load_bucket(bucket, payloads)
        for came, payload in zip(self.came_by_rank, payloads, strict=True):
            flat = as_tensor(bucket, open_payload(bucket, payload))
            came |= {name: tensor.clone() for name, tensor in unpack(bucket, flat)}


class Exporting:
    """A learner whose export needs nobody, and is its own memory."""

    def shards(self) -> Iterator[tuple[Shard, Tensor]]:
        return Slices(0, 1).shards()

    def export(self) -> Iterator[tuple[str, Tensor]]:
        yield from whole().items()

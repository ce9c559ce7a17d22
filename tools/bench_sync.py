"""Compare routes of weight updates over a slow link and inside a node.

    python tools/bench_sync.py --seed 0 --json out.json --plot out.png
    python tools/bench_sync.py --part link --pairs 8 --mib 32 --mbit 50
    python tools/bench_sync.py --part node
    python tools/bench_sync.py --part lora --lora-rank 32
    python tools/bench_sync.py --part engine --rounds 9
    python tools/bench_sync.py --part messages

`link`: two clusters on this machine, each a network namespace of its own, with one link between
them that `tc` limits to --mbit. n trainers hold a shard each, n receivers want everything; gloo, no
model. Bytes are counted at the interface that leaves the trainers' cluster. Needs root, `ip` and
`tc`; without them it is skipped, and the reason printed.

    two_stage  the channel of this name: shard i to receiver i, then broadcast in the cluster
    flat       an all-gather by direct exchange: every receiver gets every shard from its owner
    ring       gloo's all-gather of all 2n ranks, in the order of the clusters: receivers pass
               shards on, and contribute as much as they get, since it knows no other way

`node`: a Megatron learner under TP2 x PP2 on four ranks, pushed to an engine on each that verifies
and drops it: route gather (flat all-gather of every tensor) against intranode.

`lora`: the same learner with adapters, as two nodes of two ranks with a stage each, which need what
the other has: all weights with the adapters in them (`two_stage`) against adapters alone.

`engine`: a push of 250 buckets to an engine in a child process that only opens, verifies and copies
them, by shared memory. Each round does the same in three ways in turn, and medians are compared:

    copies      the work on the buckets alone, in this process: pack, then open, verify and copy
    one by one  the push, waiting for each bucket before the next is packed
    push        as the trainer does: three buckets under way

Once with buckets of --bucket-mib, whose copies are work of this CPU; once as on a device, where a
copy takes --copy-ms on each side and the CPU only waits (it sleeps). Beside seconds it counts
calls, and replies that had to be waited for (not there yet when asked).

`messages`: two processes over the loopback, with CURVE as in `rollout/transport.py` and without:
time of a round trip of 100 bytes, and MB/s of messages of 1 MiB in frames, there and back.

One row per way and figure; `ratio` is against `baseline`. rlcore/sync/README.md says what the
ratios mean.
"""

import argparse
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socket import socket, socketpair
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import zmq
from zmq.utils import z85

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlcore.rollout import transport  # noqa: E402

WAYS = ("two_stage", "flat", "ring")
HOST = "10.77.0.1"
OTHER = "10.77.0.2"
PORT = 29477
DEVICES = ("slow0", "slow1")
_LIMIT_S = 900.0  # of one world
_WAIT_S = 300.0  # of one wait between ranks
_DEATHSIG = 1  # PR_SET_PDEATHSIG


def main() -> None:
    """Run, print one line a row, write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    parser.add_argument(
        "--part",
        choices=("all", "link", "node", "lora", "engine", "messages"),
        default="all",
        help="part to measure",
    )
    parser.add_argument("--pairs", type=int, nargs="+", default=[8, 16], help="ranks on each side")
    parser.add_argument("--mib", type=float, default=32, help="size of the weights in MiB")
    parser.add_argument("--mbit", type=float, default=50, help="Mbit/s of the slow link")
    parser.add_argument("--bucket-mib", type=float, default=8, help="bucket size in MiB")
    parser.add_argument("--copy-ms", type=float, default=2, help="ms of a copy on a device")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size of the node's model")
    parser.add_argument("--layers", type=int, default=8, help="number of layers")
    parser.add_argument("--lora-rank", type=int, default=32, help="rank of the adapters")
    parser.add_argument("--rounds", type=int, default=2, help="number of rounds")
    parser.add_argument("--json", default="", help="JSON file for the results")
    parser.add_argument("--plot", default="", help="PNG file")
    parser.add_argument("--cluster", default="", help=argparse.SUPPRESS)  # a process of our own
    a = parser.parse_args()
    if a.cluster:
        cluster(Path(a.cluster), json.loads((Path(a.cluster) / "args.json").read_text()))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[dict] = []
    if a.part in ("all", "link"):
        reason = unavailable()
        if reason:
            print(f"link: skipped: {reason}")
        else:
            for n in a.pairs:
                rows += link(n, a)
    if a.part in ("all", "node"):
        rows += node(a)
    if a.part in ("all", "lora"):
        rows += lora(a)
    if a.part in ("all", "engine"):
        rows += engine(a)
    if a.part in ("all", "messages"):
        rows += messages(a.rounds)
    for row in rows:
        ratio = f"{row['ratio']:6.2f} x {row['baseline']}" if row["baseline"] else ""
        print(f"{row['name']:34} {row['value']:10.3f} {row['unit']:6} {ratio}")
    if a.json:
        Path(a.json).write_text(json.dumps(rows, indent=1) + "\n")
    if a.plot:
        plot(rows, a.plot)


def row(name: str, value: float, unit: str, baseline: str = "", ratio: float = 0.0) -> dict:
    """One line of the table."""
    return {"name": name, "value": value, "unit": unit, "baseline": baseline, "ratio": ratio}


# ---- two clusters and a slow link


def unavailable() -> str:
    """Why the two clusters cannot be made here; "" when they can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install the Debian package iproute2"
    missing = [tool for tool in ("unshare", "nsenter", "setpriv") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install the Debian package util-linux"
    if os.geteuid():
        return "network namespaces with rate limits need root"
    try:
        with clusters(100.0):
            return ""
    except (OSError, RuntimeError) as error:
        return f"network namespaces with rate limits are not permitted here ({error})"


@contextmanager
def clusters(mbit: float) -> Iterator[list[list[str]]]:
    """Command prefixes that run a program in the one and in the other cluster. The namespaces have
    no names and belong to two sleeping processes, which die with this one: nothing is left behind
    however it ends, and the machine's own network is not touched."""
    with ExitStack() as undo:
        holders = [undo.enter_context(holder()) for _ in range(2)]
        enter = [["nsenter", f"--net=/proc/{pid}/ns/net"] for pid in holders]
        first, second = DEVICES
        said(
            *enter[0],
            *("ip", "link", "add", first, "type", "veth", "peer", "name", second),
            *("netns", str(holders[1])),
        )
        rate = f"{mbit * 1000:.0f}kbit"
        for prefix, device, address in zip(enter, DEVICES, (HOST, OTHER), strict=True):
            said(*prefix, "ip", "link", "set", "lo", "up")
            said(*prefix, "ip", "addr", "add", f"{address}/24", "dev", device)
            # One packet per segment: headers are counted as a real link has them.
            said(*prefix, "ip", "link", "set", device, "gso_max_segs", "1", "up")
            shape = ("tbf", "rate", rate, "burst", "64kb", "latency", "200ms")
            said(*prefix, "tc", "qdisc", "add", "dev", device, "root", *shape)
        yield enter


@contextmanager
def holder() -> Iterator[int]:
    """A process that keeps a network namespace; its pid."""
    command = ["unshare", "--net", "setpriv", "--pdeathsig", "KILL", "sleep", "3600"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        own = os.readlink("/proc/self/ns/net")
        end = time.monotonic() + 10
        while os.readlink(f"/proc/{process.pid}/ns/net") == own:
            if process.poll() is not None:
                assert process.stderr is not None
                raise RuntimeError(process.stderr.read().decode().strip())
            if time.monotonic() > end:
                raise RuntimeError("unshare --net takes longer than 10 s")
            time.sleep(0.01)
        yield process.pid
    finally:
        process.kill()
        process.wait()


def said(*command: str) -> str:
    """Output of a command; RuntimeError with what it complains about."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[2:])}: {done.stderr.strip()}")
    return done.stdout


def link(n: int, a: argparse.Namespace) -> Iterator[dict]:
    """n trainers and n receivers."""
    work = {"n": n, "seed": a.seed, "rounds": a.rounds, "bytes": int(a.mib * 2**20)}
    work |= {"bucket": int(a.bucket_mib * 2**20), "kind": "link"}
    with clusters(a.mbit) as enter:
        found = world(work, [(enter[0], range(n)), (enter[1], range(n, 2 * n))])
    payload = found[0]["payload"]
    times, copies = {}, {}
    for way in WAYS:
        spans = [[f[way]["spans"][i] for f in found] for i in range(a.rounds)]
        times[way] = median(max(e for _, e in s) - min(b for b, _ in s) for s in spans)
        copies[way] = median(found[0][way]["link"]) / payload
    slow = payload * 8 / (a.mbit * 1e6)
    yield row(f"{n}:{n} one copy at link speed", slow, "s")
    for way in WAYS:
        yield row(f"{n}:{n} {way} over the link", copies[way], "copies")
        base = "" if way == "two_stage" else "two_stage"
        yield row(f"{n}:{n} {way} time", times[way], "s", base, times[way] / times["two_stage"])
    for name in ("transient_gb", "slow_bytes"):
        value = max(f["figures"][name] for f in found) / (1 if name == "transient_gb" else payload)
        yield row(f"{n}:{n} two_stage {name}", value, "GB" if "gb" in name else "copies")


# ---- into an engine

BUCKETS = 250


def engine(a: argparse.Namespace) -> Iterator[dict]:
    """Time pushes to an engine in a child process against the copies alone."""
    import torch

    torch.set_num_threads(1)
    yield from into_engine(f"{BUCKETS} x {a.bucket_mib:g} MiB", a, int(a.bucket_mib * 2**20), 0.0)
    yield from into_engine(f"{BUCKETS} x {a.copy_ms:g} ms", a, 2**10, a.copy_ms / 1000)


def into_engine(name: str, a: argparse.Namespace, size: int, copy_s: float) -> Iterator[dict]:
    """Buckets of `size` bytes, each of which takes `copy_s` more on both sides."""
    from rlcore.rollout.child import ChildEngine
    from rlcore.sync.colocated import ColocatedChannel

    learner = Tensors(size, copy_s, a.seed)
    child = ChildEngine("tools.bench_sync:Stub", {"num_bytes": size, "copy_s": copy_s})
    pushed, single = Watched(child), OneByOne(child)
    channel = ColocatedChannel(size, shared_memory=True)
    copies = Copies(size, copy_s)
    times: dict[str, list[float]] = {"pack": [], "load": [], "one by one": [], "push": []}
    try:
        for number in range(a.rounds + 1):
            pushed.calls = pushed.waits = 0
            found = {
                **copies.run(learner),
                "one by one": channel.update_weights(learner, single, number)["time_s"],
                "push": channel.update_weights(learner, pushed, number)["time_s"],
            }
            for key in times if number else ():  # the first one makes rooms and plans
                times[key].append(found[key])
    finally:
        child.close()
    took = {key: median(values) for key, values in times.items()}
    bare = median(x + y for x, y in zip(times["pack"], times["load"], strict=True))
    yield row(f"{name} copies", bare, "s")
    yield row(f"{name} copies of the slower side", max(took["pack"], took["load"]), "s")
    for way in ("one by one", "push"):
        yield row(f"{name} {way}", took[way], "s", "copies", took[way] / bare)
    yield row(f"{name} calls", pushed.calls, "calls")
    yield row(f"{name} buckets under way", pushed.most + 1, "buckets")
    yield row(f"{name} replies waited for", pushed.waits, "waits")


class Tensors:
    """A learner whose tensors are a bucket each; of 256 MiB, as a cache holds no model."""

    def __init__(self, size: int, copy_s: float, seed: int) -> None:
        import torch

        self._copy_s = copy_s
        generator = torch.Generator().manual_seed(seed)
        self._own = [
            torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
            for _ in range(max(1, min(BUCKETS, 256 * 2**20 // size)))
        ]

    def export(self) -> Iterator[tuple[str, Any]]:
        """All buckets."""
        for i in range(BUCKETS):
            yield f"w{i}", self._own[i % len(self._own)]
            time.sleep(self._copy_s)


class Stub:
    """An engine that opens and verifies a bucket, and copies it."""

    def __init__(self, num_bytes: int, copy_s: float) -> None:
        import torch

        torch.set_num_threads(1)
        self._weights = torch.zeros(num_bytes, dtype=torch.uint8)
        self._copy_s = copy_s

    def begin_load(self, version: int) -> None: ...

    def load_bucket(self, bucket: Any, payloads: Sequence[bytes]) -> None:
        """Verify and copy the bucket."""
        from rlcore.rollout.validation import damage
        from rlcore.utils.buckets import as_tensor, open_payload

        flat = as_tensor(bucket, open_payload(bucket, payloads[0]))
        if problem := damage(bucket, flat):
            raise RuntimeError(problem)
        self._weights.copy_(flat)
        time.sleep(self._copy_s)

    def end_load(self) -> None: ...

    def poll(self, timeout_s: float) -> list[Any]:
        """No events."""
        return []

    def close(self) -> None: ...


class Copies:
    """The work of a push, in this process and one after the other."""

    def __init__(self, size: int, copy_s: float) -> None:
        from rlcore.sync.pack import Packer
        from rlcore.utils.buckets import SharedRoom

        self._packer, self._room = Packer(size), SharedRoom()
        self._stub = Stub(size, copy_s)

    def run(self, learner: Tensors) -> dict[str, float]:
        """Seconds to pack all buckets, and to load them."""
        from msgspec.structs import replace

        took, path = {"pack": 0.0, "load": 0.0}, self._room.path.encode()
        start = time.perf_counter()
        for bucket, _ in self._packer.buckets(learner.export(), self._room.take):
            middle = time.perf_counter()
            self._stub.load_bucket(replace(bucket, transport="shm"), [path])
            end = time.perf_counter()
            took["pack"] += middle - start
            took["load"] += end - middle
            start = end
        return took


class OneByOne:
    """An engine that is waited for at every bucket."""

    failure = ""

    def __init__(self, child: Any) -> None:
        self._child = child
        self.begin_load, self.end_load = child.begin_load, child.end_load

    def send_bucket(self, bucket: Any, payloads: Any) -> None:
        """Return when the bucket is loaded."""
        self._child.load_bucket(bucket, payloads)


class Watched(OneByOne):
    """An engine whose calls, buckets and waits are counted."""

    calls = waits = most = under_way = 0

    def send_bucket(self, bucket: Any, payloads: Any) -> Any:
        """Count the bucket until it is waited for."""
        wait = self._child.send_bucket(bucket, payloads)
        number = self._child._number
        self.calls += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)

        def end() -> None:
            self._child.poll(0.0)  # reads what has arrived
            self.waits += number not in self._child._replies
            self.under_way -= 1
            wait()

        return end


# ---- messages between ranks


def messages(rounds: int) -> Iterator[dict]:
    """Time messages with and without encryption."""
    found = {name: exchange(secret, rounds) for name, secret in (("plain", b""), ("CURVE", KEY))}
    for i, (name, unit) in enumerate((("round trip of 100 B", "us"), ("1 MiB messages", "MB/s"))):
        plain = found["plain"][i]
        yield row(f"{name}, plain", plain, unit)
        yield row(f"{name}, CURVE", found["CURVE"][i], unit, "plain", found["CURVE"][i] / plain)


KEY = bytes(range(32))


def exchange(secret: bytes, rounds: int) -> tuple[float, float]:
    """Microseconds of a round trip, and MB/s to another process and back; medians. `secret`: of
    the encryption; empty: none."""
    here, there = socketpair()
    child = os.fork()
    if child == 0:
        _serve(secret, there)
        os._exit(0)
    try:
        context, pull, push = _sockets(secret, here)
        big = [b"x" * transport._FRAME_BYTES] * (2**20 // transport._FRAME_BYTES)
        times: list[tuple[float, float]] = []
        for k in range(rounds + 1):  # the first is not counted
            begin = time.perf_counter()
            for _ in range(500):
                push.send_multipart([b"x" * 100])
                pull.recv_multipart()
            middle = time.perf_counter()
            for _ in range(100):
                push.send_multipart(big)
            for _ in range(100):
                pull.recv_multipart()
            end = time.perf_counter()
            if k:
                times.append(((middle - begin) / 500 * 1e6, 100 * 2**20 / 1e6 / (end - middle)))
        push.send_multipart([b""])
        context.destroy(linger=1000)
    finally:
        os.waitpid(child, 0)
    return median(t for t, _ in times), median(t for _, t in times)


def _serve(secret: bytes, end: socket) -> None:
    context, pull, push = _sockets(secret, end)
    while (message := pull.recv_multipart()) != [b""]:
        push.send_multipart(message)
    context.destroy(linger=1000)


def _sockets(secret: bytes, end: socket) -> tuple[zmq.Context, zmq.Socket, zmq.Socket]:
    """An inbox, and a socket to the inbox of the process at the other end of a pair."""
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.rcvhwm = push.sndhwm = 0
    if secret:
        pull.curve_server = True
        pull.curve_secretkey = push.curve_secretkey = key = z85.encode(secret)
        push.curve_serverkey = push.curve_publickey = zmq.curve_public(key)
    end.sendall(pull.bind_to_random_port("tcp://127.0.0.1").to_bytes(4, "little"))
    push.connect(f"tcp://127.0.0.1:{int.from_bytes(end.recv(4), 'little')}")
    return context, pull, push


# ---- processes


def world(work: dict, places: Sequence[tuple[Sequence[str], range]]) -> list[Any]:
    """What every rank of a world found; `places` are command prefixes with the ranks there."""
    with TemporaryDirectory(prefix="sync") as name:
        folder = Path(name)
        size = sum(len(ranks) for _, ranks in places)
        started = []
        try:
            for i, (prefix, ranks) in enumerate(places):
                here = folder / str(i)
                here.mkdir()
                args = work | {"ranks": list(ranks), "size": size, "results": name}
                args["interface"] = DEVICES[i] if prefix else "lo"
                args["host"] = HOST if prefix else "127.0.0.1"
                (here / "args.json").write_text(json.dumps(args))
                command = [*prefix, sys.executable, __file__, "--cluster", str(here)]
                started.append(subprocess.Popen(command, start_new_session=True))
            end = time.monotonic() + _LIMIT_S
            for process in started:
                if process.wait(max(1.0, end - time.monotonic())):
                    raise RuntimeError("a rank failed, see above")
        finally:
            for process in started:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(size)]


def cluster(folder: Path, args: dict) -> None:
    """The ranks of one cluster, forked from one process that has imported torch for all."""
    die_with_parent()
    os.environ |= {"GLOO_SOCKET_IFNAME": args["interface"], "CUDA_VISIBLE_DEVICES": ""}
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # it warns that addresses have no names
    work: Callable[[int, dict], dict] = {
        "link": link_rank,
        "node": node_rank,
        "lora": lora_rank,
    }[args["kind"]]
    prepare(args["kind"])
    children = {}
    for rank in args["ranks"]:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                die_with_parent()
                found = work(rank, args)
                (Path(args["results"]) / f"rank{rank}.json").write_text(json.dumps(found))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children[pid] = rank
    while children:
        pid, status = os.wait()
        rank = children.pop(pid)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"rank {rank} ended with status {status}")


def die_with_parent() -> None:
    """Linux ends this process when the one that started it ends."""
    ctypes.CDLL(None).prctl(_DEATHSIG, signal.SIGKILL)


def prepare(kind: str) -> None:
    """Import what the ranks need, before there are threads."""
    import torch

    torch.set_num_threads(1)
    if kind in ("node", "lora"):
        from rlcore.mcore import shim

        shim.prepare()
        import rlcore.mcore.learner  # noqa: F401
    import rlcore.sync.channel  # noqa: F401


# ---- the ranks of two clusters


def link_rank(rank: int, args: dict) -> dict:
    """All ways, --rounds times each."""
    import torch.distributed as dist

    from rlcore.sync.peers import Peers

    n, size = args["n"], args["size"]
    store = dist.TCPStore(args["host"], PORT, size, rank == 0, wait_for_workers=False)
    sync = Peers(rank, size, store, timeout_s=_WAIT_S)
    peers = Peers(rank, size, store, timeout_s=_WAIT_S)  # a channel drops groups as it needs
    weights = Weights(rank, n, args["bytes"], args["seed"])
    ways = {
        "two_stage": two_stage(rank, n, sync, weights, args["bucket"]),
        "flat": flat(rank, n, peers, weights),
        "ring": ring(n, peers, weights),
    }
    found: dict[str, Any] = {"payload": weights.num_bytes}
    together = peers.everyone().gather_bytes
    for name, way in ways.items():
        spans, link_bytes = [], []
        figures = way() if name != "flat" else None  # groups, plans and pages are made once
        for _ in range(args["rounds"]):
            together(b"")
            before, start = leaving(args["interface"]), time.monotonic()
            figures = way()
            spans.append((start, time.monotonic()))
            together(b"")
            link_bytes.append(leaving(args["interface"]) - before)
        found[name] = {"spans": spans, "link": link_bytes}
        if name == "two_stage":
            found["figures"] = figures
    together(b"")  # the first rank keeps the store for the others
    return found


class Weights:
    """Float32 tensors of about one MiB, cut by rows: a learner with the part of one trainer."""

    def __init__(self, rank: int, n: int, num_bytes: int, seed: int) -> None:
        import torch

        columns = 1024
        count = max(1, num_bytes // 2**20)
        rows = max(1, num_bytes // count // columns // 4 // n) * n
        self.shape, self.count, self.part = (rows, columns), count, rows // n
        self.num_bytes = count * rows * columns * 4
        self.rank, self.n = rank, n
        generator = torch.Generator().manual_seed(seed * 1000 + rank)
        self.own = torch.randn(count if rank < n else 0, self.part, columns, generator=generator)

    def shards(self) -> Iterator[tuple[Any, Any]]:
        """Of this trainer."""
        from rlcore.records import Shard

        start = self.rank * self.part
        for i, tensor in enumerate(self.own):
            shard = Shard(
                name=f"w{i}",
                dtype="float32",
                shape=self.shape,
                dim=0,
                start=start,
                stop=start + self.part,
            )
            yield shard, tensor


class Sink:
    """An engine that opens and verifies buckets and keeps nothing."""

    failure = ""

    def begin_load(self, version: int) -> None: ...

    def end_load(self) -> None: ...

    def send_bucket(self, bucket: Any, payloads: list[Any]) -> None:
        from rlcore.ops.reshard import checksum
        from rlcore.utils.buckets import as_tensor, open_payload

        assert checksum(as_tensor(bucket, open_payload(bucket, payloads[0]))) == bucket.checksum


def two_stage(rank: int, n: int, peers: Any, weights: Weights, bucket: int) -> Callable[[], Any]:
    from rlcore.sync.channel import make_channel

    sites = [range(n), range(n, 2 * n)]
    channel = make_channel("two_stage", sites=sites, peers=peers, max_bytes=bucket)
    learner, engine = (weights, None) if rank < n else (None, Sink())
    return lambda: channel.update_weights(learner, engine, 1)


def flat(rank: int, n: int, peers: Any, weights: Weights) -> Callable[[], Any]:
    """Every receiver has all shards from their owners."""
    import torch

    group = peers.group("flat", range(2 * n), torch.device("cpu"))
    if rank < n:
        sends = [(weights.own, n + i) for i in range(n)]
        return lambda: [group.wait(work) for work in group.exchange([], sends, 0)]
    like = torch.empty(weights.count, weights.part, weights.shape[1])
    every = [torch.empty_like(like) for _ in range(n)]
    receives = [(tensor, i) for i, tensor in enumerate(every)]
    return lambda: [group.wait(work) for work in group.exchange(receives, [], 0)]


def ring(n: int, peers: Any, weights: Weights) -> Callable[[], Any]:
    """gloo's all-gather; receivers contribute zeros."""
    import torch

    group = peers.group("ring", range(2 * n), torch.device("cpu"))
    mine = torch.zeros(weights.count, weights.part, weights.shape[1])
    mine[: len(weights.own)] = weights.own
    return lambda: group._gather(mine)


def leaving(device: str) -> int:
    """Bytes that have left this namespace over a device, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == device:
            return int(counts.split()[8])
    raise RuntimeError(f"no interface {device}")


# ---- one node


def node(a: argparse.Namespace) -> Iterator[dict]:
    """gather against intranode."""
    work = {"kind": "node", "seed": a.seed, "rounds": a.rounds, "hidden": a.hidden}
    work |= {"layers": a.layers, "bucket": int(a.bucket_mib * 2**20)}
    found = world(work, [([], range(4))])
    base = 0.0
    for route in ("gather", "intranode"):
        # Each round lasts until its last rank is through.
        seconds = median(max(f[route]["time_s"][i] for f in found) for i in range(a.rounds))
        base = base or seconds
        baseline = "" if route == "gather" else "gather"
        yield row(f"node {route} time", seconds, "s", baseline, seconds / base)
        yield row(f"node {route} bytes", found[0][route]["bytes"] / 1e9, "GB")
        most = max(f[route]["transient_gb"] for f in found)
        yield row(f"node {route} transient", most, "GB")


def node_rank(rank: int, args: dict) -> dict:
    """Both routes in turn, --rounds times."""
    from rlcore.sync.channel import make_channel

    learner = learner_of(rank, args)
    return pushes(
        learner,
        {route: make_channel(route, max_bytes=args["bucket"]) for route in ("gather", "intranode")},
        args["rounds"],
    )


def lora(a: argparse.Namespace) -> Iterator[dict]:
    """All weights against adapters alone."""
    work = {"kind": "lora", "seed": a.seed, "rounds": a.rounds, "hidden": a.hidden}
    work |= {"layers": a.layers, "bucket": int(a.bucket_mib * 2**20), "lora_rank": a.lora_rank}
    found = world(work, [([], range(4))])
    base: dict[str, float] = {}
    for kind in ("merged", "adapters"):
        seconds = median(max(f[kind]["time_s"][i] for f in found) for i in range(a.rounds))
        figures = {
            "time": (seconds, "s"),
            "bytes": (found[0][kind]["bytes"] / 1e9, "GB"),
            "bytes between nodes": (found[0][kind]["slow_bytes"] / 1e9, "GB"),
        }
        for name, (value, unit) in figures.items():
            first = base.setdefault(name, value)
            baseline = "merged" if kind == "adapters" else ""
            yield row(f"lora {kind} {name}", value, unit, baseline, value / first)


def lora_rank(rank: int, args: dict) -> dict:
    """Both ways in turn, --rounds times, on weights that are written to a folder first."""
    import torch
    import torch.distributed as dist

    from rlcore.config.schema import LoraConfig
    from rlcore.hf.weights import save_folder
    from rlcore.sync.base_weights import BaseWeights
    from rlcore.sync.channel import make_channel

    start = learner_of(rank, args)
    folder = Path(args["results"]) / "model"
    save_folder(start.export(), start.hf, None, None if rank else folder)
    dist.barrier()
    start.close()
    settings = LoraConfig(rank=args["lora_rank"])
    learner = learner_of(rank, args, str(folder), settings)
    base = BaseWeights(
        folder, learner.hf, settings, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    some = {"max_bytes": args["bucket"], "sites": [[0, 1], [2, 3]]}
    channels = {
        "merged": make_channel("two_stage", **some),
        "adapters": make_channel("two_stage", base=base, **some),
    }
    return pushes(learner, channels, args["rounds"])


def learner_of(rank: int, args: dict, folder: str = "", lora: Any = None) -> Any:
    """A learner of a made-up model; it joins the process group."""
    import torch.distributed as dist

    from rlcore.config.schema import NO_ADAPTERS, ModelConfig, TrainConfig
    from rlcore.hf.config import HFConfig
    from rlcore.mcore.learner import MegatronLearner
    from rlcore.utils import collective

    if not dist.is_initialized():
        collective.share_gloo_device()
        store = dist.FileStore(f"{args['results']}/store", args["size"])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=args["size"])
    hidden = args["hidden"]
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": args["layers"],
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    train = TrainConfig(tp=2, pp=2, distributed_optimizer=False)
    model = ModelConfig(path=folder, dtype="bfloat16", random_init=not folder)
    hf = HFConfig.from_dict(config)
    return MegatronLearner(hf, model, train, lora=lora or NO_ADAPTERS, seed=args["seed"])


def pushes(learner: Any, channels: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Figures of each channel, --rounds times in turn."""
    import torch.distributed as dist

    found: dict[str, Any] = {
        name: {"time_s": [], "transient_gb": 0.0, "bytes": 0.0, "slow_bytes": 0.0}
        for name in channels
    }
    for number in range(rounds + 1):
        for name, channel in channels.items():
            dist.barrier()
            figures = channel.update_weights(learner, Sink(), number)
            if number:  # the first one makes groups, plans and pages
                found[name]["time_s"].append(figures["time_s"])
            found[name] |= {k: figures[k] for k in found[name].keys() & figures if k != "time_s"}
    dist.barrier()
    return found


def plot(rows: list[dict], path: str) -> None:
    """Times by way."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    some = [r for r in rows if r["unit"] == "s"][::-1]
    figure, axes = plt.subplots(figsize=(7, 0.3 * len(some) + 0.8))
    ours = ("two_stage", "intranode")
    colours = ["tab:blue" if any(o in r["name"] for o in ours) else "lightgrey" for r in some]
    axes.barh([r["name"] for r in some], [r["value"] for r in some], color=colours)
    axes.set_xlabel("s")
    figure.tight_layout()
    figure.savefig(path, dpi=70)


if __name__ == "__main__":
    main()

"""Messages between ranks: over ZeroMQ, or over queues in a run with one rank.

Every rank has one inbox per channel. Addresses are in the run's sealed store (`utils/sealed.py`).
Sockets listen on the interface that reaches the master (the loopback for a job on one node).
ZeroMQ's CURVE encrypts connections with a key pair derived from the run's secret. A program without
the secret cannot complete the handshake, so Python reads none of its bytes. Message bodies are
msgpack (`utils/net.py`). A message is sent in frames of limited size, and a handshake has a
deadline, so that such a program can neither fill this process's memory nor hold a connection.
"""

import queue
import secrets
import socket
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

from rlcore.utils import listen, net
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import log

Channel = Literal["controller", "worker", "samples", "histories"]
CHANNELS: tuple[Channel, ...] = ("controller", "worker", "samples", "histories")
FIRST_ONLY: tuple[Channel, ...] = ("controller", "histories")
"""Channels with an inbox on rank 0 only."""
_FRAME_BYTES = 1 << 16
"""Largest frame. It bounds what a connection stores before its handshake is complete."""
_SEAL_BYTES = 64  # at least what CURVE adds to a frame
_HANDSHAKE_MS = 10_000  # time after which a connection without a handshake is closed
_FIRST_PORT = 10_000
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_RELEASE_MS = 10_000  # time after which a released socket drops its unsent messages


class LocalHub:
    """Message hub of a run with one rank. The inboxes are queues."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self._queues: dict[str, queue.SimpleQueue] = {c: queue.SimpleQueue() for c in CHANNELS}

    def send(self, rank: int, channel: Channel, record: Any) -> None:
        """Put a record into the inbox `channel` of `rank`."""
        assert rank == 0, rank
        self._queues[channel].put(record)

    def send_all(self, ranks: Sequence[int], channel: Channel, record: Any) -> None:
        """Put a record into the inbox `channel` of each of `ranks`."""
        for rank in ranks:
            self.send(rank, channel, record)

    def receive(self, channel: Channel, kind: Any, timeout_s: float) -> Any | None:
        """Return the next record of this rank's inbox, or None after `timeout_s`."""
        try:
            return self._queues[channel].get(timeout=timeout_s) if timeout_s else self._now(channel)
        except queue.Empty:
            return None

    def _now(self, channel: Channel) -> Any:
        return self._queues[channel].get_nowait()

    def release(self) -> None:
        """Do nothing, as there are no sockets per thread."""

    def close(self) -> None:
        """Do nothing, as there are no sockets."""


class ZmqHub:
    """Message hub over ZeroMQ. The inboxes of a rank are PULL sockets, one per channel. A PUSH
    socket to another rank opens on first use.

    Only one thread may use a ZeroMQ socket. The controller's thread receives from the inbox
    "controller", the main thread from the other inboxes. Every thread sends through its own sockets
    and closes these sockets with `release` before it ends.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Any,
        host: str,
        secret: bytes,
        channels: Collection[Channel] = CHANNELS,
    ) -> None:
        """
        Args:
            store: key-value store with `set(key, str)` and a waiting `get(key)`, such as torch's.
            secret: 32 bytes, the same on every rank.
            channels: the channels that the run uses.
        """
        import zmq
        from zmq.utils import z85

        self.rank, self.world_size = rank, world_size
        self.malformed = 0
        """Number of messages that were dropped because they could not be decoded."""
        self._zmq, self._store = zmq, store
        self._context = zmq.Context()
        self._local = threading.local()
        self._push: list[Any] = []
        self._pull: dict[str, Any] = {}
        self._secret_key = z85.encode(secret)
        self._public_key = zmq.curve_public(self._secret_key)
        for channel in channels:
            if rank and channel in FIRST_ONLY:
                continue
            pull = self._context.socket(zmq.PULL)
            pull.setsockopt(zmq.RCVHWM, 0)  # of ranks: no sender without the secret comes so far
            pull.setsockopt(zmq.MAXMSGSIZE, _FRAME_BYTES + _SEAL_BYTES)
            pull.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
            pull.curve_server = True
            pull.curve_secretkey = self._secret_key
            port = pull.bind_to_random_port(f"tcp://{host}")
            self._pull[channel] = pull
            store.set(f"rlcore/{channel}/{rank}", f"tcp://{host}:{port}")

    def send(self, rank: int, channel: Channel, record: Any) -> None:
        """Put a record into the inbox `channel` of `rank`."""
        self.send_all([rank], channel, record)

    def send_all(self, ranks: Sequence[int], channel: Channel, record: Any) -> None:
        """Put a record, encoded once, into the inbox `channel` of each of `ranks`."""
        body = memoryview(net.encode(record))
        frames = [body[i : i + _FRAME_BYTES] for i in range(0, len(body), _FRAME_BYTES)]
        for rank in ranks:
            self._socket(rank, channel).send_multipart([str(self.rank).encode(), *frames])

    def receive(self, channel: Channel, kind: Any, timeout_s: float) -> Any | None:
        """Return the next record of this rank's inbox as `kind`, or None after `timeout_s`. Drop
        messages that cannot be decoded, count them in `malformed` and log a warning."""
        pull, deadline = self._pull[channel], time.monotonic() + timeout_s
        while pull.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            frames = pull.recv_multipart()
            try:
                return net.decode(b"".join(frames[1:]), kind)
            except ValueError as error:  # msgspec's errors are ValueErrors too
                self._drop(channel, frames[0], error)
        return None

    def _drop(self, channel: Channel, sender: bytes, error: ValueError) -> None:
        self.malformed += 1
        if self.malformed & (self.malformed - 1):  # log only the 1st, 2nd, 4th, 8th ... message
            return
        log.warning(
            "a malformed message from rank %s to inbox %s of rank %d was dropped (%d so far): %s",
            sender[:8].decode(errors="replace"),
            channel,
            self.rank,
            self.malformed,
            error,
        )

    def release(self) -> None:
        """Close the sending sockets of the calling thread; sent messages still arrive."""
        for push in self._local.__dict__.pop("push", {}).values():
            self._push.remove(push)
            push.close(linger=_RELEASE_MS)

    def close(self) -> None:
        """Close every socket. Wait at most two seconds for unsent messages, because their receivers
        may no longer read."""
        for s in [*self._pull.values(), *self._push]:
            s.close(linger=1000)
        end = threading.Thread(target=self._context.term, daemon=True)
        end.start()
        end.join(timeout=2.0)

    def _socket(self, rank: int, channel: str) -> Any:
        mine = self._local.__dict__.setdefault("push", {})
        if (rank, channel) not in mine:
            push = self._context.socket(self._zmq.PUSH)
            push.setsockopt(self._zmq.SNDHWM, 0)
            push.curve_serverkey = push.curve_publickey = self._public_key
            push.curve_secretkey = self._secret_key
            push.connect(_text(self._store.get(f"rlcore/{channel}/{rank}")))
            mine[rank, channel] = push
            self._push.append(push)
        return mine[rank, channel]


Hub = LocalHub | ZmqHub


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def listening_host(master: str, interface: str = "", several_nodes: bool = False) -> str:
    """Return the address of this machine that other ranks can reach.

    If `interface` is given, return its address. If the master is local, return the loopback
    address. Otherwise return the source address of the route to the master.

    Raises:
        ConfigError: there are several nodes, and on the master's node the master's name is a
            loopback address, which other nodes cannot reach.
    """
    if interface:
        return listen.address_of(interface)
    if master in ("", "localhost") or master.startswith("127."):
        return "127.0.0.1"
    if master in (socket.gethostname(), socket.getfqdn()):
        address = socket.gethostbyname(master)
    else:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 9))  # sends nothing: a UDP connect only selects the route
            address = probe.getsockname()[0]
    if several_nodes and address.startswith("127."):
        raise ConfigError(
            f"--cluster.interface: the master's name {master} is {address} on this node, "
            "which other nodes cannot reach; name the interface, or set HEAD_ADDR"
        )
    return address


def free_port() -> int:
    """Return a free port outside the system's ephemeral range, from which the system gives ports to
    other sockets. If this range covers all ports, return any free port."""
    low, high = _system_ports()
    ports = [*range(_FIRST_PORT, low), *range(high + 1, 65536)] or [*range(low, high + 1)]
    start = secrets.randbelow(len(ports))
    for port in ports[start:] + ports[:start]:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise RuntimeError(
        f"all {len(ports)} usable ports are taken (the system reserves {low} to {high}); free one"
    )


def _system_ports() -> tuple[int, int]:
    """Return the first and last port of the system's ephemeral range."""
    low, high = _PORT_RANGE.read_text().split()
    return int(low), int(high)

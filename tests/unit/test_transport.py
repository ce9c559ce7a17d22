"""Messages between ranks: what threads leave behind."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest
import zmq
from zmq.utils import z85

from rlcore.rollout import transport
from rlcore.rollout.transport import LocalHub, ZmqHub, free_port, listening_host


class Store(dict):
    """What torch's stores do."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def get(self, key: str) -> str:
        return self[key]


def send_from_a_thread(hub: ZmqHub, text: str) -> None:
    def run() -> None:
        hub.send(0, "worker", text)
        hub.release()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_threads_that_end_leave_no_socket_and_lose_no_message() -> None:
    """A round has a thread of its own: a run of many rounds must not run out of sockets."""
    hub = ZmqHub(0, 1, Store(), "127.0.0.1", bytes(32))
    try:
        files = []
        for k in range(30):
            send_from_a_thread(hub, f"m{k}")
            assert hub.receive("worker", str, 10.0) == f"m{k}"
            files.append(len(os.listdir("/proc/self/fd")))
        most, end = max(files[:10]) + 3, time.monotonic() + 20
        while len(os.listdir("/proc/self/fd")) > most:  # ZeroMQ closes them in a thread of its own
            assert time.monotonic() < end, files
            time.sleep(0.05)
    finally:
        hub.close()


@pytest.fixture
def hub() -> Iterator[ZmqHub]:
    made = ZmqHub(0, 1, Store(), "127.0.0.1", b"s" * 32)
    yield made
    made.close()


def connected(hub: ZmqHub, secret: bytes | None) -> zmq.Socket:
    """A socket of another program at the inbox "samples"; without a secret it does not encrypt."""
    socket = hub._context.socket(zmq.PUSH)
    if secret is not None:
        key = z85.encode(secret)
        socket.curve_secretkey = key
        socket.curve_serverkey = socket.curve_publickey = zmq.curve_public(key)
    hub._push.append(socket)
    socket.connect(hub._store.get("rlcore/samples/0"))
    return socket


@pytest.mark.parametrize("secret", [None, b"x" * 32], ids=["plain", "other secret"])
def test_a_program_without_the_runs_secret_reaches_no_inbox(hub: ZmqHub, secret: bytes | None):
    stranger = connected(hub, secret)
    stranger.send_multipart([b"0", b"\x91\x01"])
    hub.send(0, "samples", [2])
    assert hub.receive("samples", list[int], 5.0) == [2]
    assert hub.receive("samples", list[int], 0.3) is None
    assert hub.malformed == 0  # it did not come so far
    friend = connected(hub, b"s" * 32)
    friend.send_multipart([b"0", b"\x91\x01"])
    assert hub.receive("samples", list[int], 5.0) == [1]


def test_malformed_messages_are_dropped_counted_and_named(
    hub: ZmqHub, caplog: pytest.LogCaptureFixture
) -> None:
    friend = connected(hub, b"s" * 32)
    bad = [b"7", b"\xc1"], [b"7", b"\xa1x"], [b"7"], [b"7", b"\x91\x01", b"more"], [b"", b""]
    for message in bad:
        friend.send_multipart(message)
    friend.send_multipart([b"7", b"\x91\x01"])
    assert hub.receive("samples", list[int], 5.0) == [1]
    assert hub.malformed == len(bad)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3  # the first, second and fourth
    assert said[0].startswith(
        "a malformed message from rank 7 to inbox samples of rank 0 was dropped"
    )


def test_the_hub_of_one_rank_has_nothing_to_release() -> None:
    hub = LocalHub()
    hub.send(0, "worker", 1)
    hub.release()
    assert hub.receive("worker", int, 1.0) == 1


def test_a_head_whose_own_name_is_the_loopback_asks_for_an_address_that_others_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian puts the host's name at 127.0.1.1: messages from other nodes would wait for ever."""
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    own = socket.gethostname()
    with pytest.raises(ValueError, match="--cluster.interface: .* is 127.0.1.1 on this node"):
        listening_host(own, several_nodes=True)
    assert listening_host(own) == "127.0.1.1"
    assert listening_host("127.0.0.1", several_nodes=True) == "127.0.0.1"


def test_an_alias_of_the_head_that_is_the_loopback_is_refused_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as its short name, where the host calls itself by the whole one."""

    class Probe:
        def __enter__(self) -> "Probe":
            return self

        def __exit__(self, *_: object) -> None: ...

        def connect(self, address: tuple[str, int]) -> None: ...

        def getsockname(self) -> tuple[str, int]:
            return "127.0.0.1", 1234

    names = "gethostname", "getfqdn", "AF_INET", "SOCK_DGRAM"
    stand_in = SimpleNamespace(**{n: getattr(socket, n) for n in names}, socket=lambda *_: Probe())
    monkeypatch.setattr(transport, "socket", stand_in)
    with pytest.raises(ValueError, match="--cluster.interface: .* alias is 127.0.0.1 on this node"):
        listening_host("alias", several_nodes=True)
    assert listening_host("alias") == "127.0.0.1"


def test_an_interface_is_named_and_a_wrong_name_is_refused_with_those_that_there_are():
    assert listening_host("head", "lo", several_nodes=True) == "127.0.0.1"
    with pytest.raises(ValueError, match="--cluster.interface eth99: .* choose from .*lo"):
        listening_host("head", "eth99")


def test_a_free_port_is_none_that_the_system_gives_to_others() -> None:
    low, high = transport._system_ports()
    found = {free_port() for _ in range(8)}
    assert len(found) > 1  # two programs at the same time do not take one
    assert not any(low <= port <= high for port in found)


def test_a_port_that_is_taken_is_left_out_and_a_range_of_all_ports_has_free_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(transport, "_FIRST_PORT", port)
        for low, high in ((port + 1, 65535), (port, 65535)):
            monkeypatch.setattr(transport, "_system_ports", lambda r=(low, high): r)
            if low > port:
                with pytest.raises(RuntimeError, match="all 1 usable ports are taken"):
                    free_port()
            else:
                assert free_port() > port


@pytest.mark.parametrize("size", [1 << 30, transport._FRAME_BYTES - 536], ids=["huge", "largest"])
def test_a_flood_without_the_secret_stays_within_a_frame_a_connection_and_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """200 connections send what the handshake allows them, or far more: 4 MiB each."""
    monkeypatch.setattr(transport, "_HANDSHAKE_MS", 2000)
    hub, number = ZmqHub(0, 1, Store(), "127.0.0.1", b"s" * 32), 200
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    body = b"x" * min(size - 1, 4 << 20)
    port = int(hub._store.get("rlcore/worker/0").rpartition(":")[2])
    me, cut = psutil.Process(), 0
    before, most = me.memory_info().rss, 0
    program = [socket.create_connection(("127.0.0.1", port)) for _ in range(number)]
    try:
        for each in program:
            each.settimeout(0.5)
            with suppress(OSError):  # it hangs up on the long ones
                each.sendall(greeting + b"\x06" + size.to_bytes(8, "big") + body)
            most = max(most, me.memory_info().rss - before)
        for each in program:
            each.settimeout(20.0)
            try:
                while each.recv(4096):
                    pass
            except ConnectionError:
                pass
            cut += 1  # a time-out would raise
        assert cut == number and most < number * 100_000 + (8 << 20)
        hub.send(0, "samples", [2])  # ranks get through as before
        assert hub.receive("samples", list[int], 10.0) == [2]
    finally:
        for each in program:
            each.close()
        hub.close()


def test_a_message_of_many_frames_arrives_whole(hub: ZmqHub) -> None:
    for length in (0, 1, transport._FRAME_BYTES, 3 * transport._FRAME_BYTES + 7):
        text = "x" * length
        hub.send(0, "samples", text)
        assert hub.receive("samples", str, 5.0) == text


def test_only_the_inboxes_that_a_rank_reads_are_bound() -> None:
    store = Store()
    for rank in (0, 1):
        hub = ZmqHub(rank, 2, store, "127.0.0.1", bytes(32), ("controller", "worker"))
        hub.close()
    assert sorted(store) == ["rlcore/controller/0", "rlcore/worker/0", "rlcore/worker/1"]

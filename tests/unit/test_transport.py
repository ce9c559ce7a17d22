"""Messages between ranks: what threads leave behind."""

import os
import socket
import threading

import pytest

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
        hub.send(0, "agent", text)
        hub.release()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_threads_that_end_leave_no_socket_and_lose_no_message() -> None:
    """A round has a thread of its own: a run of many rounds must not run out of sockets."""
    hub = ZmqHub(0, 1, Store(), "127.0.0.1")
    try:
        files = []
        for k in range(30):
            send_from_a_thread(hub, f"m{k}")
            assert hub.receive("agent", str, 10.0) == f"m{k}"
            files.append(len(os.listdir("/proc/self/fd")))
        assert max(files[20:]) <= max(files[:10]) + 3, files
    finally:
        hub.close()


def test_the_hub_of_one_rank_has_nothing_to_release() -> None:
    hub = LocalHub()
    hub.send(0, "agent", 1)
    hub.release()
    assert hub.receive("agent", int, 1.0) == 1


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


def test_an_interface_is_named_and_a_wrong_name_is_refused_with_those_that_there_are():
    assert listening_host("head", "lo", several_nodes=True) == "127.0.0.1"
    with pytest.raises(ValueError, match="--cluster.interface eth99: .* this node has .*lo"):
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
                with pytest.raises(RuntimeError, match="none of the 1 ports"):
                    free_port()
            else:
                assert free_port() > port

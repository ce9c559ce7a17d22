"""Interfaces that servers listen on."""

import os
import socket
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from rlcore.utils import listen
from tests.forks import Fork


def servers(interface: str) -> None:
    """Print the address of each server that was started in these ways."""
    listen.bind_stores(interface)
    listen.bind_stores(interface)  # twice is no harm
    one = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    more = {"multi_tenant": True, "wait_for_workers": False}
    two = dist.TCPStore("127.0.0.1", 0, None, True, **more)
    shared = dist.TCPStore("127.0.0.1", two.port, None, True, **more)
    client = dist.TCPStore("localhost", one.port, wait_for_workers=False)
    client.set("key", "value")
    assert one.get("key") == b"value"
    shared.set("key", "value")
    assert two.get("key") == b"value"
    named = dist.TCPStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False)
    ports = {store.port: name for name, store in (("one", one), ("two", two), ("named", named))}
    for c in psutil.Process().net_connections("tcp"):
        if c.status == psutil.CONN_LISTEN:
            print(ports[c.laddr.port], c.laddr.ip)


def listeners(interface: str, folder: Path) -> dict[str, str]:
    process = Fork(servers, (interface,), dict(os.environ), folder / "out")
    assert process.wait(60) == 0, (folder / "out").read_text()
    lines = [line.split() for line in (folder / "out").read_text().splitlines()]
    return {name: address for name, address in lines}


def test_a_store_listens_where_its_clients_look_and_on_a_named_interface_alone(
    tmp_path: Path,
) -> None:
    found = listeners("", tmp_path)
    assert found["one"] == found["two"] == "127.0.0.1"
    # Another node may know this one's name by another address: torch's choice stands.
    assert found["named"] in ("::", "0.0.0.0")
    assert set(listeners("lo", tmp_path).values()) == {"127.0.0.1"}


def test_an_address_of_another_machine_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert listen._listener("203.0.113.7", 0) is None
    assert "no interface of this node has the address 203.0.113.7" in caplog.text


def test_an_interface_without_an_address_is_refused() -> None:
    with pytest.raises(
        ValueError, match="--cluster.interface eth99: not an interface with an IPv4 address"
    ):
        listen.store_address("head", "eth99")
    assert "lo" in psutil.net_if_addrs()
    assert listen.store_address("10.0.0.7") == "10.0.0.7"
    assert listen.store_address("node7.cluster") == ""


def test_a_store_has_its_port_before_anyone_hears_of_it() -> None:
    stores = [listen.open_store() for _ in range(20)]
    assert len({store.port for store in stores}) == 20
    own = {c.laddr.port: c.laddr.ip for c in psutil.Process().net_connections("tcp")}
    assert {own[store.port] for store in stores} == {"127.0.0.1"}
    client = dist.TCPStore("127.0.0.1", stores[3].port, wait_for_workers=False)
    client.set("key", "value")
    assert stores[3].get("key") == b"value"

"""Choose the interface on which a run's servers listen: loopback on one node, the configured
interface on several nodes."""

import errno
import ipaddress
import logging
import socket
from typing import TYPE_CHECKING, Any

import psutil

from rlcore.utils.errors import ConfigError

if TYPE_CHECKING:  # importing torch would slow down the command line
    from torch.distributed import TCPStore

log = logging.getLogger("rlcore")
_BACKLOG = 4096
_ARGUMENTS = (
    "host_name",
    "port",
    "world_size",
    "is_master",
    "timeout",
    "wait_for_workers",
    "multi_tenant",
)
"""Arguments of TCPStore in positional order (torch 2.11 to 2.13)."""


def address_of(interface: str) -> str:
    """Return a network interface's IPv4 address on this node. Raise ConfigError if it has none."""
    found = psutil.net_if_addrs()
    addresses = [a.address for a in found.get(interface, []) if a.family == socket.AF_INET]
    if not addresses:
        raise ConfigError(
            f"--cluster.interface {interface}: not an interface with an IPv4 address on this node; "
            "choose from " + ", ".join(found)
        )
    return addresses[0]


def store_address(host: str, interface: str = "") -> str:
    """Return the address on which a store should listen if its clients use `host`; "" for all
    interfaces.

    A host name gives "", because other nodes may resolve it to another address than this node.
    """
    if interface:
        return address_of(interface)
    if host == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.IPv4Address(host))
    except ValueError:
        return ""


def bind_stores(interface: str = "") -> None:
    """Make every TCPStore server that this process starts from now on listen on one interface.

    torch (2.13) listens on all interfaces, whatever host the clients use. `interface`: used for
    servers with clients on other nodes.
    """
    from torch.distributed import TCPStore

    made = TCPStore.__init__
    if getattr(made, "is_bound", False):
        return

    def init(self: TCPStore, *args: Any, **named: Any) -> None:
        given = dict(zip(_ARGUMENTS, args, strict=False)) | named
        is_server = given.get("is_master") and given.get("master_listen_fd") is None
        if is_server and (address := store_address(given["host_name"], interface)):
            listener = _listener(address, given["port"])
            if listener is not None:
                given["port"] = listener.getsockname()[1]
                given["master_listen_fd"] = listener.detach()
        made(self, **given)

    init.is_bound = True  # type: ignore[attr-defined]  # mark rlcore's method
    TCPStore.__init__ = init  # type: ignore[method-assign]  # replace torch's method


def open_store(host: str = "127.0.0.1") -> "TCPStore":
    """Start a store at this machine's address `host`, on a port that the system chooses, so that no
    other process can take the port first. The store ends when the object is deleted."""
    from torch.distributed import TCPStore

    listener = socket.create_server((host, 0), backlog=_BACKLOG)
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _listener(address: str, port: int) -> socket.socket | None:
    """Return a listening socket, or None if torch must choose the address: the port is taken
    (perhaps by a server that this process may share), or this machine lacks the address."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address, port))
        made.listen(_BACKLOG)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRNOTAVAIL:
            log.warning(
                "no interface of this node has the address %s, so the run's store listens on all "
                "interfaces; set --cluster.interface to choose one",
                address,
            )
            return None
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return made

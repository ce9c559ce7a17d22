"""Messages between ranks: what threads leave behind."""

import os
import threading

from rlcore.rollout.transport import LocalHub, ZmqHub


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

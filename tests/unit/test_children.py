"""Channels between processes: whole frames, limits, deadlines, and the log of what children print.

Children themselves: test_rewards_service.py, test_envs.py, test_torch_engine_child.py.
"""

import fcntl
import logging
import os
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore.utils import children
from rlcore.utils.children import CappedLog, Channel, without_launcher
from rlcore.utils.net import LARGEST_FRAME, decode, frame


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), theirs


def numbers(channel: Channel) -> list[int]:
    return [decode(body, int) for body in channel.receive()]


def test_frames_arrive_whole_in_order_and_once(ends):
    channel, other = ends
    data = b"".join(frame(n) for n in (1, 2, 3, 4))
    other.sendall(data[:-1])
    assert decode(channel.first(), int) == 1  # the others are for the next call
    assert numbers(channel) == [2, 3]
    assert numbers(channel) == []
    other.sendall(data[-1:])
    assert numbers(channel) == [4]


def test_what_was_sent_before_the_end_of_the_stream_arrives(ends):
    channel, other = ends
    other.sendall(frame(7))
    other.close()
    bodies = channel.receive(20.0)
    assert decode(next(bodies), int) == 7
    with pytest.raises(EOFError):
        next(bodies)


def test_a_frame_above_the_limit_is_refused_before_it_is_stored(ends):
    channel, other = ends
    other.sendall(frame(1) + (LARGEST_FRAME + 1).to_bytes(4, "little"))
    bodies = channel.receive(20.0)
    assert decode(next(bodies), int) == 1
    with pytest.raises(ValueError, match=r"frame of 268435457 bytes: must be at most 268435456"):
        next(bodies)


def test_a_side_that_does_not_read_is_a_time_out_and_one_that_is_closed_an_error(ends):
    channel, other = ends
    with pytest.raises(TimeoutError, match="did not read the frame"):
        channel.send(frame(bytes(1 << 22)), 0.05)
    other.close()
    with pytest.raises(BrokenPipeError):
        channel.send(frame(1), 0.05)


def test_a_queue_holds_what_the_other_side_does_not_take_yet(ends):
    channel, other = ends
    message = frame(bytes(range(256)) * 8192)  # more than the socket holds
    channel.queue(message)
    assert channel.flush()
    found = b""
    while len(found) < len(message):
        found += other.recv(1 << 20)
        channel.flush()
    assert found == message and not channel.flush()


def test_messages_pass_where_descriptors_are_beyond_1023():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"needs 2,048 file descriptors; the hard limit of this machine is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    ends = []
    for end in socket.socketpair():
        with end:
            ends.append(socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD, 1500)))
    ours, theirs = (Channel(end) for end in ends)
    message = bytes(range(256)) * 8192  # more than the socket holds
    sender = threading.Thread(target=ours.send, args=(frame(message), 20.0))
    sender.start()
    found = theirs.first()
    sender.join()
    ours.close()
    theirs.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert decode(found, bytes) == message


def test_a_channel_of_a_child_is_not_inherited(monkeypatch):
    ours, theirs = socket.socketpair()
    os.set_inheritable(theirs.fileno(), True)
    monkeypatch.setattr(children.sys, "argv", ["", str(theirs.detach()), "1"])
    channel = children.open_channel()
    assert not os.get_inheritable(channel.fileno())
    copy = os.fork()
    if not copy:
        os._exit(0 if channel.fileno() == -1 else 1)  # a fork has closed it
    assert os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == 0
    channel.close()
    ours.close()


def test_a_launchers_variables_are_left_out(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RANKING", "kept")
    env = without_launcher()
    assert env["RANKING"] == "kept" and env["PATH"] == os.environ["PATH"]
    assert not {"RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "MASTER_PORT"} & env.keys()


def test_a_log_of_children_has_an_end_and_a_full_disk_costs_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(children, "_LOG_BYTES", 10)
    log = CappedLog(tmp_path / "logs" / "reward0.log", "reward")
    for data in (b"12345", b"67890ab", b"cd"):
        log.write(data)
    assert (tmp_path / "logs" / "reward0.log").read_bytes() == (
        b"1234567890\n(cut after 10 bytes)\n"
    )
    CappedLog(None, "reward").write(b"nowhere")
    full = CappedLog(Path("/dev/full"), "reward")
    with caplog.at_level(logging.WARNING):
        full.write(b"12")
        full.write(b"34")
    assert caplog.text.count("cannot write /dev/full") == 1

"""Channels between processes: whole frames, limits, deadlines, and the log of what children print.

Children themselves: test_rewards_service.py, test_envs.py, test_torch_engine_child.py.
"""

import fcntl
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
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
    monkeypatch.setattr(children.sys, "argv", ["", str(theirs.detach()), str(os.getpid())])
    child = os.fork()  # the kernel kills this one with its parent
    if not child:
        channel = children.open_channel()
        is_kept = os.get_inheritable(channel.fileno())
        copy = os.fork()
        if not copy:
            os._exit(0 if channel.fileno() == -1 else 1)  # a fork has closed it
        os._exit(is_kept or os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ours.close()


TIED = {
    "engine": "rlcore.rollout.process",
    "reward": "rlcore.rewards.child",
    "env": "rlcore.envs.child",
    "harness": "rlcore.envs.harness_child",
    "judge": "rlcore.rewards.judge.process",
    "template": "rlcore.hf.template",
}
PARENT = """
import sys, time
from rlcore.utils.children import Child
children = [Child(module) for module in sys.argv[1:]]
print(*[child.process.pid for child in children], flush=True)
time.sleep(60)
"""


def status(pid):
    """The letter of the kernel; Z for a process that is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def wait(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_no_child_that_is_stopped_outlives_its_parent():
    """A stopped process reads no end of a stream; the kernel has to kill it. Modules of children
    are all that start with an open channel."""
    found = subprocess.run(
        ["grep", "-rlE", r"open(_guarded)?_channel\(", "rlcore", "--include=*.py"],
        cwd=children._ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    named = {file.removesuffix(".py").replace("/", ".") for file in found}
    assert named - {"rlcore.utils.children"} == set(TIED.values())
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *TIED.values()], stdout=subprocess.PIPE, text=True
    )
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    try:
        wait(lambda: all(is_tied(pid) for pid in pids))
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        wait(lambda: all(status(pid) == "T" for pid in pids))
        parent.kill()
        wait(lambda: all(status(pid) == "Z" for pid in pids))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        for pid in pids:
            if status(pid) == "T":
                os.kill(pid, signal.SIGKILL)


def test_a_child_outlives_the_thread_that_asked_for_it():
    """The kernel ties a child to a thread. A chat template's child serves whoever asks next."""
    found = []

    def ask():
        found.append(children.Child(TIED["template"]))
        wait(lambda: is_tied(found[0].process.pid))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    (child,) = found
    try:
        time.sleep(0.2)
        assert child.process.poll() is None
    finally:
        assert child.end() == -signal.SIGKILL


def test_a_fork_starts_its_own_children_and_what_fails_to_start_is_raised():
    children.Child(TIED["template"]).end()
    fork = os.fork()
    if not fork:
        os._exit(children.Child(TIED["template"]).end() != -signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 0
    with pytest.raises(FileNotFoundError, match="no/folder"):
        children.Child(TIED["template"], cwd="no/folder")


def is_tied(pid):
    """Its channel is open, as once it is tied: the descriptor has flags that it did not inherit."""
    arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    if len(arguments) < 3:  # not yet executed
        return False
    descriptor = arguments[-3]
    flags = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text().split()[3]
    return bool(int(flags, 8) & os.O_NONBLOCK)


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

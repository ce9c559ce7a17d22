"""Child process that runs a reward function: receives jobs and sends one reply per job.

    python -m rlcore.rewards.child CHANNEL_DESCRIPTOR PARENT_PID

`worker.RewardWorker` starts this process, which exits with its parent. After each sample it kills
the processes that the sample left behind. To start fast, it imports neither torch nor transformers.
User code may use stdout and stderr, because the channel has its own descriptor, closed in every
fork.
"""

import contextlib
import os
import random
import signal
import sys
import time
import traceback
from typing import Any

import msgspec

from rlcore.records import RewardResult, is_training
from rlcore.rewards.kind import to_result
from rlcore.rewards.registry import resolve
from rlcore.rewards.wire import READY, RewardStart, ScoreJob, ScoreReply
from rlcore.utils import net, seed
from rlcore.utils.children import Channel, open_guarded_channel, sentence
from rlcore.utils.net import frame


def main() -> None:
    channel = open_guarded_channel("reward", all_threads=False)
    with contextlib.suppress(EOFError):  # the parent has closed the channel
        start = net.decode(channel.first(), RewardStart)
        reward = _start(start, channel)
        own = _children()
        while True:
            for body in channel.receive(None):
                reply = _run(net.decode(body, ScoreJob), reward, start.seed)
                if own is not None:
                    _sweep(own | set(getattr(reward, "processes", ())))
                channel.send(frame(reply))


def _start(start: RewardStart, channel: Channel) -> Any:
    """Build the reward and report success or the error to the parent. After an error, exit."""
    sys.path[:] = start.sys_path
    try:
        kind = resolve(start.reward)
        assert kind.score is not None, f"{start.reward} has no score() for child processes"
        reward = kind.score(msgspec.convert(start.config, kind.config))
    except BaseException as error:
        traceback.print_exc()
        channel.send(frame(ScoreReply(READY, RewardResult(score=0.0, error=sentence(error)))))
        sys.exit(1)
    channel.send(frame(ScoreReply(READY, RewardResult(score=0.0))))
    return reward


def _run(job: ScoreJob, reward: Any, run_seed: int) -> ScoreReply:
    """Score one sample. If the reward function raises, the reply carries the error. `random` is
    seeded with run seed and sample id, so a score does not depend on earlier samples."""
    pid = os.getpid()
    random.seed(seed.derive(run_seed, "reward", job.sample.id))
    retire, begin = False, time.monotonic()
    try:
        result = to_result(reward.score(job.sample, job.prompt, job.text))
        if hasattr(reward, "answer") and not is_training(job.sample.group):
            result = to_result(msgspec.structs.replace(result, answer=reward.answer(job.text)))
    except BaseException as error:  # user code may raise anything
        if os.getpid() == pid:
            traceback.print_exc()
        retire = isinstance(error, MemoryError)
        result = RewardResult(score=0.0, error=sentence(error))
    if os.getpid() != pid:  # end a fork that the reward function made
        os._exit(0)
    latency = time.monotonic() - begin
    return ScoreReply(job.key, msgspec.structs.replace(result, latency_s=latency), retire)


def _children() -> set[int] | None:
    """Return the process ids of this process's children, including adopted orphans. Return None if
    the kernel does not list children."""
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as file:
                found.update(map(int, file.read().split()))
        except FileNotFoundError:
            if task == str(os.getpid()):
                return None
    return found


def _sweep(own: set[int]) -> None:
    """Kill the processes that the latest sample left behind, with their descendants. Spare the
    processes in `own`, which the reward started when it was built."""
    while True:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # the usual case: this process has no children
            return
        strays = (_children() or set()) - own
        if not strays:
            return
        for pid in strays:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in strays:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


if __name__ == "__main__":
    main()

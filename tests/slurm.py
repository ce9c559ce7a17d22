"""A private Slurm of two nodes on this machine, without a system service and without its
configuration: Debian's `slurm-wlm` and `munge` (`tools/setup.sh --slurm`)."""

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rlcore.rollout.transport import free_port

PROGRAMS = "munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel"

CONFIG = """
ClusterName=rlcore
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A requeued job waits until its credential is no longer good: two minutes unless it is said.
AuthInfo=socket={munge},cred_expire=6
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/linear
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
MinJobAge=600
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={one} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={two} CPUs=1
PartitionName=low Nodes=n[1-2] Default=YES PriorityTier=1 GraceTime=60
PartitionName=rude Nodes=n[1-2] PriorityTier=1
PartitionName=high Nodes=n[1-2] PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """The programs that are not here; empty where Slurm can be started."""
    return ", ".join(name for name in PROGRAMS if shutil.which(name, path=_path()) is None)


class Slurm:
    """A running cluster of the nodes n1 and n2. Jobs in the partition high preempt those in low and
    rude. In low these have a minute, and are queued again if they use it all; in rude they are told
    to end and queued again at once."""

    def __init__(self, folder: Path, processes: Mapping[str, subprocess.Popen]):
        self.folder = folder
        self._processes = processes
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        self.env |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}

    def run(self, *command: object, **env: str) -> str:
        """What a command of Slurm says; AssertionError where it fails."""
        words = [str(c) for c in command]
        done = subprocess.run(
            words, env=self.env | env, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, (words, done.stderr, self.logs())
        return done.stdout

    def submit(self, *arguments: object, cwd: Path, **env: str) -> int:
        """`sbatch`: the id of the job."""
        return int(self.run("sbatch", "--parsable", "--chdir", cwd, *arguments, **env))

    def job(self, number: int) -> dict[str, str]:
        """What Slurm knows of a job, such as JobState, Restarts, ExitCode."""
        text = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(word.partition("=")[::2] for word in text.split())

    def until(self, what: Callable[[], bool], timeout_s: float, said: Path) -> None:
        """Wait for something; AssertionError with the log of the job past the time."""
        end = time.monotonic() + timeout_s
        while not what():
            for name, process in self._processes.items():
                assert process.poll() is None, f"{name} has ended\n{self.logs()}"
            text = said.read_text()[-3000:] if said.exists() else "(no log)"
            assert time.monotonic() < end, f"nothing after {timeout_s} s\n{text}\n{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        """The ends of the logs of Slurm's own processes."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"-- {f.name}\n{f.read_text(errors='replace')[-1500:]}" for f in files)


def _path() -> str:
    """Debian has the daemons where only root looks."""
    return os.environ["PATH"] + ":/usr/local/sbin:/usr/sbin:/sbin"


@contextmanager
def cluster(folder: Path) -> Iterator[Slurm]:
    """Start the daemons in a folder whose path is short enough for a socket's; jobs that still run
    are cancelled at the end."""
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
    munge, user = folder / "munge.socket", os.environ.get("USER", "root")
    if os.geteuid() == 0:
        user = "root"
    ports = {name: free_port() for name in ("controller", "one", "two")}
    host = socket.gethostname().partition(".")[0]
    text = CONFIG.format(host=host, user=user, munge=munge, folder=folder, **ports)
    (folder / "slurm.conf").write_text(text)
    processes: dict[str, subprocess.Popen] = {}
    slurm = Slurm(folder, processes)

    with ExitStack() as stack:

        def start(name: str, *command: object) -> None:
            output = stack.enter_context(open(folder / f"{name}.out.log", "wb"))
            process = subprocess.Popen(
                [str(c) for c in command],
                env=slurm.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            processes[name] = process
            stack.callback(_end, process)

        of_munge = {name: folder / f"munged.{name}" for name in ("pid", "log", "seed")}
        flags = [f"--{name}-file={file}" for name, file in ({"key": key} | of_munge).items()]
        flags += [f"--socket={munge}", "--force", "--num-threads=1"]
        start("munged", "munged", "--foreground", *flags)
        slurm.until(munge.exists, 20, folder / "munged.out.log")
        start("slurmctld", "slurmctld", "-D")
        for node in ("n1", "n2"):
            start(f"slurmd-{node}", "slurmd", "-D", "-N", node)
        said = folder / "slurmctld.log"
        slurm.until(lambda: _idle(slurm), 60, said)
        try:
            yield slurm
        finally:
            mine = slurm.run("squeue", "--noheader", "--format=%A").split()
            if mine:
                slurm.run("scancel", *mine)
                slurm.until(lambda: not slurm.run("squeue", "--noheader").strip(), 60, said)


def _idle(slurm: Slurm) -> bool:
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--partition=low", "--format=%T"],
        env=slurm.env,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.returncode == 0 and done.stdout.split() == ["idle", "idle"]


def _end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

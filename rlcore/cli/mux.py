"""`python -m rlcore mux`: share nodes between jobs that take turns by phase.

    python -m rlcore mux up --rollout-pool 4 --train-pool 2     # start Redis and the arbiter
    python -m rlcore mux add JOB --profile runs/JOB/mux_profile.json   # print a job's address
    python -m rlcore mux status [--json]
    python -m rlcore mux down

`up` can be repeated: it starts only processes that are not running. All state is in --dir, so jobs
continue after a crash of Redis or the arbiter.
"""

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import redis

from rlcore.cli import exits
from rlcore.mux import arbiter, store
from rlcore.mux.profile import Profile
from rlcore.sched.cluster import NodePool
from rlcore.utils import log as logs
from rlcore.utils.errors import ConfigError
from rlcore.utils.files import fault, read_json
from rlcore.utils.secret import hide

START_S = 30.0


def main(argv: Sequence[str]) -> int:
    """Run one mux command. Return 2 if an argument is invalid, 1 on a failure."""
    p = argparse.ArgumentParser(
        prog="python -m rlcore mux",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = p.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start Redis and the arbiter, unless already running")
    for pool in (arbiter.ROLLOUT, arbiter.TRAIN):
        up.add_argument(f"--{pool}-pool", type=int, required=True, help=f"nodes of the {pool} pool")
        up.add_argument(
            f"--{pool}-price",
            type=float,
            default=1.0,
            help="price of a node per hour (default: %(default)s)",
        )
        up.add_argument(
            f"--{pool}-memory-gb",
            type=float,
            default=1500.0,
            help="host memory of a node in GB (default: %(default)s)",
        )
        up.add_argument(
            f"--{pool}-switch-s",
            type=float,
            default=6.0,
            help="seconds to switch to another job (default: %(default)s)",
        )
    up.add_argument(
        "--host", default="127.0.0.1", help="address on which Redis listens (default: %(default)s)"
    )
    up.add_argument("--port", type=int, default=6390, help="port of Redis (default: %(default)s)")
    add = commands.add_parser(
        "add", help="create a Redis user for one job and print the value of --mux.url"
    )
    add.add_argument("job", help="name of the job")
    add.add_argument(
        "--profile", type=Path, help="mux_profile.json of a run of the job on unshared nodes"
    )
    status = commands.add_parser("status", help="show groups, permits, utilisation and slack")
    status.add_argument("--json", action="store_true", help="print JSON")
    commands.add_parser("down", help="stop Redis and the arbiter; their state is kept")
    hidden = commands.add_parser("arbiter", help="run the arbiter in the foreground")
    for command in (up, add, status, commands.choices["down"], hidden):
        command.add_argument(
            "--dir",
            type=Path,
            default=Path("runs/mux"),
            help="folder of the mux's state (default: %(default)s)",
        )
    a = p.parse_args(argv)
    run = {"up": _up, "add": _add, "status": _status, "down": _down, "arbiter": _arbiter}
    return exits.guard(lambda: run[a.command](a))


# ---- up and down


def _up(a: argparse.Namespace) -> int:
    pools = {}
    for pool in (arbiter.ROLLOUT, arbiter.TRAIN):
        nodes = getattr(a, f"{pool}_pool")
        if nodes < 1:
            raise ConfigError(f"--{pool}-pool {nodes}: must be at least 1")
        pools[pool] = {
            "nodes": nodes,
            **{k: getattr(a, f"{pool}_{k}") for k in ("price", "memory_gb", "switch_s")},
        }
    binary = shutil.which("redis-server")
    if binary is None:
        raise ConfigError("mux up: redis-server is not installed; run bash tools/setup.sh --mux")
    a.dir.mkdir(parents=True, exist_ok=True)
    a.dir.chmod(0o700)
    about = _read(a.dir) or {"password": secrets.token_urlsafe(24), "pids": {}}
    if _is_arbiter(about["pids"].get("arbiter")) and about["pools"] != pools:
        raise ConfigError(
            f"mux up: the arbiter of {a.dir} runs with other pools, {about['pools']}; stop it with "
            "`mux down` first (jobs wait meanwhile)"
        )
    about |= {"host": a.host, "port": a.port, "pools": pools}
    if not _answers(about):
        _write(a.dir, about)
        _configure(a.dir, about)
        about["pids"]["redis"] = _start([binary, str(a.dir / "redis.conf")], a.dir / "redis.log")
        _write(a.dir, about)
        _await(lambda: _answers(about), f"redis-server; see {a.dir / 'redis.log'}")
    _write(a.dir, about)
    if not _is_arbiter(about["pids"].get("arbiter")):
        argv = [sys.executable, "-m", "rlcore", "mux", "arbiter", "--dir", str(a.dir)]
        about["pids"]["arbiter"] = _start(argv, a.dir / "arbiter.log")
        _write(a.dir, about)
    client = store.connect(_url(about))
    _await(lambda: client.exists(store.ARBITER), f"the arbiter; see {a.dir / 'arbiter.log'}")
    nodes = " and ".join(f"{values['nodes']} {pool}" for pool, values in pools.items())
    print(
        f"mux is up at {hide(_url(about))} with {nodes} nodes; `mux add JOB` prints the address "
        "for a job"
    )
    return 0


def _configure(folder: Path, about: dict[str, Any]) -> None:
    """Write Redis's list of users, and a configuration with which no acknowledged write is lost."""
    (folder / "users.acl").touch(mode=0o600)
    password = about["password"]
    text = (folder / "users.acl").read_text()
    others = [line for line in text.splitlines() if not line.startswith("user default ")]
    default = f"user default on >{password} ~* &* +@all"
    (folder / "users.acl").write_text("\n".join([default, *others]) + "\n")
    lines = [
        f"bind {about['host']}",
        f"port {about['port']}",
        f"dir {folder.resolve()}",
        "appendonly yes",
        "appendfsync always",
        'save ""',
        f"aclfile {folder.resolve() / 'users.acl'}",
        "daemonize no",
    ]
    (folder / "redis.conf").write_text("\n".join(lines) + "\n")


def _down(a: argparse.Namespace) -> int:
    about = _known(a.dir)
    for name in ("arbiter", "redis"):
        pid = about["pids"].pop(name, None)
        if pid is not None and _is_ours(pid, name):
            os.kill(pid, signal.SIGTERM)
            _await(
                lambda pid=pid, name=name: not _is_ours(pid, name), f"{name} to exit (pid {pid})"
            )
            print(f"{name} has exited")
    _write(a.dir, about)
    return 0


def _arbiter(a: argparse.Namespace) -> int:
    about = _known(a.dir)
    logs.setup(0)
    pools = {name: NodePool(**values) for name, values in about["pools"].items()}
    one = arbiter.Arbiter(_url(about), pools)

    def stop(signum: int, frame: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    try:
        one.run()
    finally:
        one.release()
    return 0


# ---- add and status


def _add(a: argparse.Namespace) -> int:
    about = _known(a.dir)
    profile = Profile.read(a.profile) if a.profile is not None else None
    client = store.connect(_url(about))
    try:
        password = store.add_job(client, a.job)
        if profile is not None:
            client.set(store.key(a.job, "profile"), store.dumps(asdict(profile)))
    except redis.RedisError as error:
        raise ConnectionError(store.why(error, _url(about))) from error
    print(f"redis://job-{a.job}:{password}@{about['host']}:{about['port']}")
    return 0


def _status(a: argparse.Namespace) -> int:
    about = _known(a.dir)
    try:
        found = arbiter.status(_url(about))
    except redis.RedisError as error:
        raise ConnectionError(store.why(error, _url(about))) from error
    print(json.dumps(found, indent=1) if a.json else "\n".join(show(found)))
    return 0


def _nodes(group: dict[str, Any], pool: str) -> str:
    """Return the nodes of a group in one pool as text: names if known, else numbers."""
    names = {number: name for name, number in group["names"][pool].items()}
    return ", ".join(names.get(n, str(n)) for n in group[pool])


def show(found: dict[str, Any]) -> list[str]:
    """Return the arbiter's status as lines of text."""
    lines = [] if found["arbiter"] else ["no arbiter is running; start one with `mux up`"]
    lines.append(
        ", ".join(f"{pool}: {n['used']} of {n['of']} nodes" for pool, n in found["nodes"].items())
    )
    for g in found["groups"]:
        use = ", ".join(f"{pool} {share:.0%}" for pool, share in g["utilization"].items())
        lines.append(
            f"group {g['group']}: rollout {_nodes(g, 'rollout')}, train {_nodes(g, 'train')}, "
            f"period at most {g['period_s']:.1f} s, worst-case utilisation: {use}; host memory per "
            "node: "
            + ", ".join(
                f"{pool} {gb:.1f} of {found['nodes'][pool]['host_gb']:g} GB"
                for pool, gb in g["host_gb"].items()
            )
        )
        for j in g["jobs"]:
            does = f"holds {'+'.join(j['holds'])}" if j["holds"] else "between phases"
            if j["waits_s"] is not None:
                does = f"has waited {j['waits_s']:.1f} s behind {', '.join(j['behind'])}"
            lines.append(
                f"  {j['job']}: {does}; {j['phases']} phases done, slack {j['slack']:+.0%}"
                + "".join(
                    f", {phase} {statistics.median(seconds):.2f} s"
                    for phase, seconds in sorted(j["seconds"].items())
                )
            )
    lines += [f"{o['job']}: {o['status']}: {o['why']}" for o in found["others"]]
    return lines


def _url(about: dict[str, Any]) -> str:
    return f"redis://:{about['password']}@{about['host']}:{about['port']}"


def _read(folder: Path) -> dict[str, Any] | None:
    path = folder / "mux.json"
    if fault(path) == "no such file":
        return None
    hint = "run `mux up` with another --dir"
    about = read_json(path, hint)
    if lacks := {"host", "port", "password", "pids", "pools"} - about.keys():
        raise ConfigError(f"{path}: lacks {', '.join(sorted(lacks))}; {hint}")
    return about


def _known(folder: Path) -> dict[str, Any]:
    about = _read(folder)
    if about is None:
        raise ConfigError(f"--dir {folder}: no mux was started in this folder; run `mux up` first")
    return about


def _write(folder: Path, about: dict[str, Any]) -> None:
    path = folder / "mux.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(about, indent=1) + "\n")


def _start(argv: list[str], output: Path) -> int:
    with output.open("ab") as file:
        return subprocess.Popen(
            argv, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
        ).pid


def _answers(about: dict[str, Any]) -> bool:
    with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
        try:
            return bool(store.connect(_url(about)).ping())
        except redis.AuthenticationError as error:
            raise ConfigError(
                f"mux up: another Redis server listens at {about['host']}:{about['port']}; choose "
                "another --port"
            ) from error
    with socket.socket() as s:
        s.settimeout(1.0)
        if s.connect_ex((about["host"], about["port"])) == 0 and not about["pids"].get("redis"):
            raise ConfigError(
                f"mux up: another program listens at {about['host']}:{about['port']}; choose "
                "another --port"
            )
    return False


def _is_ours(pid: int, name: str) -> bool:
    """Return whether `mux up` started process `pid`, rather than a later process with that pid."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z" and {"redis": b"redis-server", "arbiter": b"mux"}[name] in command


def _is_arbiter(pid: int | None) -> bool:
    return pid is not None and _is_ours(pid, "arbiter")


def _await(ready: Any, what: str) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if ready():
            return
        time.sleep(0.05)
    raise RuntimeError(f"mux: time-out of {START_S:g} s while waiting for {what}")

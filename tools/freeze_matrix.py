"""Stop, kill and starve parts of small runs, and look how the runs end and what they leave.

    python tools/freeze_matrix.py                                # every row, about two hours
    python tools/freeze_matrix.py --only "sync engine" async     # rows whose name has the words
    python tools/freeze_matrix.py --random 200 --seed 0          # schedules of one to three faults
    python tools/freeze_matrix.py --list

A row is a run of two ranks, in which a process of a kind gets a signal, a disk or a network
fails, or the time of day jumps by two days (libfaketime), after some step. Ranks are forks that
have imported everything; engines are programs in rows that hurt one, and everything is in those of
torchrun (`agent`, `clock`). If a rank fails, the others get SIGTERM and, END_S later, SIGKILL, as
from torchrun. The same command starts again until the run is done.

    outcome    `finished`: the run ended as if nothing had happened. `named`: a start failed, and a
               line of its output names the process. `saved in order`: a start ended with code 0
               before the last step. Else what is wrong, in words.
    named, clean    seconds from the fault to that line, and from the end to no process of the run
    state      learner after the last step against a run without faults: `exact`; `near` (largest
               difference below NEAR); `1 on_error`: a sample whose reward was hurt scored
               --reward.on_error, and the run reported it; `1 again`: an episode whose
               environment was hurt was played again, and the run reported it; `whole` where timing
               decides what is trained: every sample is trained once
    left       processes and files that are still there

A row is explained if its outcome is one of these, within DEADLINE_S, nothing is left, and the
state is what the mode promises. The exit code is 1 if a row is not.
"""

import argparse
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlcore.data import label_task  # noqa: E402
from rlcore.hf.tokenizer import make_char_tokenizer  # noqa: E402
from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.utils import env  # noqa: E402
from rlcore.utils.process_tree import is_stopped  # noqa: E402
from tests import faults, forks, kit, runs  # noqa: E402

STEPS, TIMEOUT_S, STALL_S = 5, 20, 25  # above process_tree.STOPPED_S: the engine goes first
END_S = 8.0
DEADLINE_S = 150.0
"""Seconds from the last fault to the end of the start; on a busy machine a start alone takes 20."""
STARTS = 5
NEAR = 1e-3
SIGNALS = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL, "term": signal.SIGTERM}
COMMON = (
    *("--run.steps", STEPS, "--checkpoint.every", 1, "--checkpoint.keep", 2),
    *("--checkpoint.no_export_hf", "--eval.no_at_start", "--eval.no_at_end"),
    *("--cluster.timeout_s", TIMEOUT_S, "--rollout.stall_timeout_s", STALL_S),
    *("--reward.timeout_s", 5, "--reward.workers", 1, "--log.rollouts", -1),
    *("--debug.decode_floor_ms", 5, "--rollout.progress_interval_s", 0.05),
)
MODES: dict[str, tuple[tuple[object, ...], str, str]] = {
    "sync": ((), "reward", "exact"),
    "stream": (("--mode", "stream"), "reward", "near"),
    "async": (
        ("--mode", "async", "--async.alpha", 2, "--cluster.rollout_ranks", 1),
        "reward",
        "whole",
    ),
    "tail": (("--schedule", "tail_batching", "--debug.deterministic_order"), "reward", "exact"),
    "env": (
        *(("--env", "latency", "--env.turns", 2, "--env.mean_s", 0.05, "--env.std_s", 0.02)
          + ("--env.max_turn_tokens", 4, "--env.retries", 3, "--env.timeout_s", 5)
          + ("--cluster.rollout_ranks", 1),),
        "env",
        "near",
    ),
    "judge": (
        (*("--reward", "judge", "--reward.good", "*", "--reward.bad", "-"),
         *("--reward.dtype", "float32")),
        "judge",
        "near",
    ),
    "sglang": (
        (*("--rollout.engine", "sglang", "--rollout.dtype", "float32"),
         *("--cluster.timeout_s", 200, "--rollout.stall_timeout_s", 150)),
        "scheduler",
        "near",
    ),
}  # fmt: skip
DRAWN = "sync", "stream", "async", "tail", "env"
"""Modes of random schedules."""
"""Keys, kind of child that scores, and what a resumed run promises. An engine that fails is `near`
at best: its requests continue in other batches, which rounds differently."""
NAMED = {
    "rank": r"rank {rank}: (process {pid} .*(is stopped by a signal|has exited)|no heartbeat)"
    r"|rank {rank} (was ended by|ended with|has exited|is stopped|does not respond)",
    "engine": r"engine process {pid} of rank {rank} (was stopped by|was killed by|exited)",
    "reward": r"crash: signal|timeout after|failed before scoring",
    "env": r"crash|no answer to|failed before",
    "judge": r"reward judge: |judge: (its process|.*; restarting it)",
    "scheduler": r"process \d+ of SGLang|engine process \d+ of rank {rank}",
    "disk": r"cannot write .*(disk is full|Read-only|deleted|No such file)|could not be written",
    "network": r"no heartbeat|has exited|check the network between nodes",
    "clock": r"(?!)",  # nothing fails
    "agent": r"agent|torchrun|store .*(does not answer|not answer)|SIGTERM|signal",
}
"""Lines that name a process of a kind."""


ELSEWHERE = {
    "arbiter, Redis, job: kill": "tests/ranks/test_mux_chaos.py "
    "test_whoever_is_killed_every_step_counts_once",
    "Redis: stop": "tests/unit/test_mux.py "
    "test_a_job_whose_server_does_not_answer_ends_before_its_lease_is_over",
    "MPS daemon (stand-in): kill": "tests/unit/test_judge_mps.py "
    "test_pipes_that_a_dead_daemon_left_are_cleared_away",
    "MPS daemon (stand-in): hangs": "tests/unit/test_judge_mps.py "
    "test_a_daemon_that_does_not_obey_is_killed",
}
"""Processes that runs of two ranks do not have, with the file and test of each."""


@dataclass(frozen=True)
class Fault:
    """One fault: to a process of `kind` (of `rank`), `how`, `delay_s` after step `step`."""

    kind: str
    how: str
    rank: int = 0
    step: int = 2
    delay_s: float = 0.0

    @property
    def name(self) -> str:
        who = f"{self.kind}{self.rank}" if self.kind == "rank" else self.kind
        return f"{who} {self.how}"


@dataclass
class Row:
    """What became of a run."""

    name: str
    mode: str
    faults: list[Fault]
    seed: int = -1
    outcome: str = ""
    line: str = ""
    """The line that names the process."""
    named_s: float | None = None
    clean_s: float = 0.0
    starts: int = 0
    state: str = ""
    left: list[str] = field(default_factory=list)
    is_explained: bool = False
    seconds: float = 0.0


class Forks:
    """A start of two ranks as forks, in the role of torchrun."""

    def __init__(self, argv: Sequence[str], folder: Path, within: Sequence[object], programs: bool):
        job: runs.Job = {"name": "x", "argv": list(argv), "programs": programs}
        self.gang = runs.Running(2, [job | ({"within": within} if within else {})], folder)
        self.folder, self.said = folder, ""
        self._ends_at = 0.0

    def pids(self, fault: Fault) -> list[int]:
        rank = self.gang.processes[fault.rank].pid
        return [rank] if fault.kind == "rank" else faults.children(rank, fault.kind)

    def text(self) -> str:
        files = sorted(self.folder.glob("x.*.txt")) + sorted(self.folder.glob("start.*.txt"))
        return self.said + "".join(file.read_text(errors="replace") for file in files)

    def codes(self) -> list[int | None]:
        """Exit codes of the ranks; a rank that returned an error has one too."""
        codes = [p.poll() for p in self.gang.processes]
        for rank, code in enumerate(codes):
            with suppress(OSError, ValueError):
                told = json.loads((self.folder / f"codes{rank}.json").read_text())["x"]
                codes[rank] = code if code is None else (code or told)
        return codes

    def is_over(self) -> bool:
        """Whether all ranks have ended. If one has failed, end the others as torchrun does."""
        codes = self.codes()
        if None not in codes:
            return True
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None and not self._ends_at:
            self.said += f"torchrun: rank {failed} ended with code {codes[failed]}\n"
            self._ends_at = time.monotonic() + END_S
            for process in self.gang.processes:
                process.send_signal(signal.SIGTERM)
        if self._ends_at and time.monotonic() > self._ends_at:
            self.gang.kill()
        return False

    def kill(self) -> None:
        self.gang.kill()


class Launched:
    """A start by recipes/torch_run.py: torchrun, its ranks and their children are programs."""

    def __init__(self, argv: Sequence[str], folder: Path, extra: dict[str, str] | None = None):
        folder.mkdir(parents=True)
        launcher = [sys.executable, str(ROOT / "recipes" / "torch_run.py"), "--standalone"]
        launcher += ["--local-addr", "localhost", "--nproc-per-node", "2", "-m", "rlcore", "train"]
        variables = os.environ | {"PYTHONPATH": kit.python_path(), "CUDA_VISIBLE_DEVICES": ""}
        self._file = folder / "x.txt"
        self._ranks: set[psutil.Process] = set()
        with self._file.open("wb") as out:
            self.process = subprocess.Popen(
                [*launcher, *argv], env=variables | (extra or {}), cwd=ROOT, stdout=out, stderr=out
            )

    def pids(self, fault: Fault) -> list[int]:
        if fault.kind == "agent":
            return [self.process.pid]
        return [p.pid for p in self._children()][fault.rank : fault.rank + 1]

    def _children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return []

    def text(self) -> str:
        return self._file.read_text(errors="replace")

    def codes(self) -> list[int | None]:
        return [self.process.poll()]

    def is_over(self) -> bool:
        """Whether torchrun and its ranks have ended. A torchrun that stays stopped is ended here
        after its ranks, as a user would."""
        self._ranks.update(self._children())
        if any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in self._ranks):
            return False
        if self._ranks and is_stopped(self.process.pid):
            self.process.kill()
            self.process.wait()
        return self.process.poll() is not None

    def kill(self) -> None:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        self.process.kill()
        self.process.wait()


class Bench:
    """Runs the rows in `folder`."""

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self.folder = folder
        self.model = runs.tiny_model(folder / "model")
        forks._context()  # The server of all forks starts now, without the mark of a row.
        self._clean: dict[str, dict[str, Any]] = {}

    def argv(self, mode: str, where: Path, *more: object) -> list[str]:
        if mode == "judge":
            more = (
                *more,
                "--reward.model",
                self.judge(),
                "--reward.rubric",
                self.judge() / "r.jinja",
            )
        return runs.arguments(self.model, where, "x", *COMMON, *MODES[mode][0], *more)

    def judge(self) -> Path:
        """The folder of a random judge, which is made at the first call."""
        folder = self.folder / "judge"
        if not folder.exists():
            kit.tiny_hf_folder(folder, vocab_size=len(label_task.VOCAB), num_hidden_layers=2)
            make_char_tokenizer(folder, label_task.CHARS)
            (folder / "r.jinja").write_text("{{ answer }};{{ response }}=")
        return folder

    def reference(self, mode: str) -> dict[str, Any]:
        """The last checkpoint of a run without faults."""
        if mode not in self._clean:
            where = self.folder / f"clean_{mode}"
            gang = runs.run(2, [{"name": "x", "argv": self.argv(mode, where)}], where / "gang")
            gang.check("x", 2)
            self._clean[mode] = runs.checkpoint(where / "x", STEPS)
        return self._clean[mode]

    def row(self, name: str, mode: str, todo: Sequence[Fault], seed: int = -1) -> Row:
        """Run a schedule to its end."""
        row = Row(name, mode, list(todo), seed)
        where = self.folder / re.sub(r"\W+", "_", f"{name}_{seed}")
        shutil.rmtree(where, ignore_errors=True)
        where.mkdir(parents=True)
        # Not in `folder`, which may be too deep for sockets.
        temporary = tempfile.TemporaryDirectory(prefix="row-", ignore_cleanup_errors=True)
        mark = uuid.uuid4().hex
        os.environ |= {"TMPDIR": temporary.name, "RLCORE_MATRIX": mark}
        began = time.monotonic()
        try:
            with ExitStack() as stack:
                self._run(row, where, mark, stack)
        except subprocess.CalledProcessError as error:
            row.outcome = f"SKIP: {' '.join(map(str, error.cmd))[:60]} is not allowed here"
            row.is_explained = True
        finally:
            for pid in faults.marked(mark):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            del os.environ["TMPDIR"], os.environ["RLCORE_MATRIX"]
            temporary.cleanup()
        row.seconds = time.monotonic() - began
        if row.is_explained:
            shutil.rmtree(where, ignore_errors=True)
        return row

    def _run(self, row: Row, where: Path, mark: str, stack: ExitStack) -> None:
        todo, runs_dir, within = list(row.faults), where / "runs", []
        more: list[object] = []
        spaces: list[str] = []
        disk = next((f for f in todo if f.kind == "disk"), None)
        if disk is not None:
            runs_dir = stack.enter_context(faults.loop_disk(where)) / "runs"
            how, _, on_error = disk.how.partition(" ")
            target = runs_dir / "x" if how == "removed" else runs_dir.parent
            phase = ("gen", "update_actor", "save_checkpoint")[disk.rank]
            within = ["tests.faults:at_phase", phase, disk.step, how, str(target)]
            more = ["--checkpoint.on_error", on_error or "stop"]
        if any(f.kind == "network" for f in todo):
            spaces = stack.enter_context(faults.two_nodes(f"rl{os.getpid()}"))
            within = ["tests.faults:on_nodes", *spaces]
            more = ["--cluster.interface", "rl0"]
        argv = self.argv(row.mode, runs_dir, *more)
        signals = [f for f in todo if f.kind != "disk"]
        # The run goes on, and its files miss what was removed with its folder.
        lost = disk is not None and disk.how == "removed continue"
        by_agent = any(f.kind in ("agent", "clock") for f in todo)
        clock = where / "clock"
        extra = faults.clock(clock) if any(f.kind == "clock" for f in todo) else {}
        if extra is None:
            row.outcome, row.is_explained = "SKIP: libfaketime is not installed", True
            return
        if row.mode == "sglang" and importlib.util.find_spec("sglang") is None:
            row.outcome, row.is_explained = "SKIP: SGLang is not installed", True
            return
        programs = any(f.kind in ("engine", "scheduler") for f in todo)
        pending, hurt = list(signals), list[tuple[Fault, int, float]]()
        for at in range(STARTS):
            row.starts += 1
            folder = where / f"gang{at}"
            start = (
                Launched(argv, folder, extra) if by_agent else Forks(argv, folder, within, programs)
            )
            stack.callback(start.kill)
            struck = time.monotonic() if disk is not None and not at else 0.0
            seen = hurt if at == 0 else []
            last = time.monotonic()
            while not start.is_over():
                time.sleep(0.05)
                now = time.monotonic()
                if pending and self._strike(start, pending[0], runs_dir, spaces, seen):
                    pending.pop(0)
                    last = now
                self._look(row, start, seen or [(f, 0, struck) for f in todo if struck])
                if now - last > DEADLINE_S + 60 * (not seen):
                    row.outcome = "hangs: " + " ".join(start.text().splitlines()[-1:])[:150]
                    start.kill()
                    return
            self._look(row, start, seen or [(f, 0, struck) for f in todo if struck])
            failed = any(start.codes())
            row.clean_s = max(row.clean_s, self._clean_after(row, mark))
            if failed and (seen or struck) and not row.line:
                row.outcome = "not named: " + " ".join(start.text().splitlines()[-2:])[:200]
                return
            if failed and not seen and not struck:
                row.outcome = f"start {at} failed: " + start.text()[-300:]
                return
            if not failed and (lost or self._steps(runs_dir) == STEPS):
                break
            if disk is not None:
                faults.mend(where)
                within = []
            for space in spaces:
                faults.link(space, "up")
        else:
            row.outcome = f"not done after {STARTS} starts"
            return
        row.outcome = "finished" if row.starts == 1 else "named" if row.line else "saved in order"
        row.left += faults.leftovers(runs_dir, Path(os.environ["TMPDIR"]))
        row.state = self._state(row, runs_dir / "x")
        promised = MODES[row.mode][2]
        is_hurt = any(f.kind not in ("rank", "agent", "disk") for f in row.faults)
        good = {"exact": ("exact",), "near": ("exact", "near"), "whole": ("whole",)}[promised]
        row.is_explained = (
            not row.left
            and (
                row.state in good or (is_hurt and row.state.endswith(("near", "on_error", "again")))
            )
            and not pending
        )

    def _strike(
        self,
        start: Any,
        fault: Fault,
        runs_dir: Path,
        spaces: Sequence[str],
        hurt: list[tuple[Fault, int, float]],
    ) -> bool:
        """Cause the fault if its time has come; return whether it has."""
        if self._steps(runs_dir) < fault.step:
            return False
        time.sleep(fault.delay_s)
        if fault.kind == "network":
            faults.link(spaces[1], "down")
            hurt.append((fault, 0, time.monotonic()))
            return True
        if fault.kind == "clock":
            (runs_dir.parent / "clock").write_text({"back": "-2d", "forward": "+2d"}[fault.how])
            hurt.append((fault, 0, time.monotonic()))
            return True
        pids = start.pids(fault)
        if not pids:
            return start.is_over()
        with suppress(ProcessLookupError):
            os.kill(pids[0], SIGNALS[fault.how])
            hurt.append((fault, pids[0], time.monotonic()))
        return True

    def _look(self, row: Row, start: Any, hurt: Sequence[tuple[Fault, int, float]]) -> None:
        """Find the line that names the process."""
        if row.line or not hurt:
            return
        text = start.text()
        for fault, pid, at in hurt:
            pattern = NAMED[fault.kind].format(rank=fault.rank, pid=pid)
            for line in text.splitlines():
                if re.search(pattern, line):
                    row.line, row.named_s = line.strip()[:200], time.monotonic() - at
                    return

    def _clean_after(self, row: Row, mark: str) -> float:
        """Wait until no process of the run is left; return the seconds."""
        began = time.monotonic()
        while time.monotonic() < began + 20:
            left = faults.marked(mark) | _forks()
            if not left:
                return time.monotonic() - began
            time.sleep(0.1)
        row.left += [f"process {pid}: {line[-60:]}" for pid, line in left.items()]
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return time.monotonic() - began

    def _steps(self, runs_dir: Path) -> int:
        file = runs_dir / "x" / "metrics.jsonl"
        try:
            return max((json.loads(line)["step"] for line in file.open()), default=0)
        except (OSError, ValueError):
            return 0

    def _state(self, row: Row, folder: Path) -> str:
        """Compare the end with that of the run without faults."""
        if MODES[row.mode][2] == "whole":
            lines = [json.loads(line) for line in (folder / "rollouts.jsonl").open()]
            trained = [line["id"] for line in lines if line["step"] > 0]
            return "whole" if len(trained) == len(set(trained)) == STEPS * 16 else "not whole"
        ours, theirs = runs.checkpoint(folder, STEPS), self.reference(row.mode)
        apart = 0.0
        for key, value in theirs.items():
            if hasattr(value, "shape") and value.is_floating_point():
                apart = max(apart, float((ours[key].double() - value.double()).abs().max()))
        if apart < NEAR:
            return "near" if apart else "exact"
        rows = runs.rows(folder).values()
        if errors := sum(row.get("reward/errors", 0.0) for row in rows):
            return f"{errors:g} on_error"
        again = sum(v for row in rows for k, v in row.items() if k.startswith("env/failures/"))
        return f"{again:g} again" if again else f"differs by {apart:.1e}"


def _forks() -> dict[int, str]:
    """Forks that still run, but for those of this process's own server."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if server is None:
        return {}
    try:
        found = psutil.Process(server).children(recursive=True)
        return {p.pid: "a fork" for p in found if p.status() != psutil.STATUS_ZOMBIE}
    except psutil.NoSuchProcess:
        return {}


# ---- rows


def rows() -> dict[str, tuple[str, list[Fault]]]:
    """All rows of the matrix by name."""
    found: dict[str, tuple[str, list[Fault]]] = {}
    for mode, (_, child, _) in MODES.items():
        if mode not in DRAWN:
            for how in SIGNALS:
                found[f"{mode} {child} {how}"] = mode, [Fault(child, how, delay_s=0.1)]
            continue
        rollout = 1 if mode in ("async", "env") else 0
        kinds = [Fault("rank", "", 0), Fault("rank", "", 1), Fault("engine", "", rollout)]
        for one in [*kinds, Fault(child, "", rollout)]:
            for how in SIGNALS:
                fault = replace(one, how=how, delay_s=0.1)
                found[f"{mode} {fault.name}"] = mode, [fault]
    for how in SIGNALS:
        found[f"sync agent {how}"] = "sync", [Fault("agent", how)]
    for mode in ("sync", "tail", "async"):
        for how in ("back", "forward"):
            found[f"{mode} clock {how}"] = mode, [Fault("clock", how)]
    for how in ("full", "readonly", "removed"):
        for on_error in ("stop", "continue"):
            for phase in range(3):
                name = f"sync disk {how} {on_error} {('gen', 'update', 'save')[phase]}"
                found[name] = "sync", [Fault("disk", f"{how} {on_error}", phase)]
    for mode in ("sync", "async"):
        found[f"{mode} network partition"] = mode, [Fault("network", "partition")]
    return found


def draw(seed: int) -> tuple[str, list[Fault]]:
    """The schedule of a seed: a mode, and one to three faults."""
    dice = random.Random(seed)
    mode = dice.choice(DRAWN)
    _, child, _ = MODES[mode]
    rollout = 1 if mode in ("async", "env") else None
    found = []
    for step in sorted(dice.sample(range(1, STEPS), dice.choice((1, 1, 2, 3)))):
        kind = dice.choice(["rank", "rank", "engine", child])
        rank = dice.randrange(2) if kind == "rank" or rollout is None else rollout
        how, delay_s = dice.choice(list(SIGNALS)), dice.uniform(0.0, 0.4)
        found.append(Fault(kind, how, rank, step, round(delay_s, 3)))
    return mode, found


# ---- tables


HEAD = "| row | outcome | named s | clean s | starts | state | left |\n" + "| --- " * 7 + "|\n"


def table(found: Sequence[Row]) -> str:
    """The rows in Markdown."""
    lines = []
    for r in found:
        name = r.name if r.seed < 0 else f"{r.name}: " + ", ".join(f.name for f in r.faults)
        named = "" if r.named_s is None else f"{r.named_s:.1f}"
        what = f"{r.outcome[:60]} | {named} | {r.clean_s:.1f} | {r.starts} | {r.state}"
        lines.append(f"| {name} | {what} | {len(r.left) or ''} |\n".replace("\n |", " |"))
    return HEAD + "".join(lines)


def page(found: Sequence[Row]) -> str:
    """The rows, and the tests of what has no row, in Markdown."""
    good = sum(row.is_explained for row in found)
    text = (
        f"# Freeze and loss matrix\n\n{good} of {len(found)} rows are explained.\n\n{table(found)}"
    )
    text += (
        "\n## Processes with tests of their own\n\n| process | file | test |\n| --- | --- | --- |\n"
    )
    for process, test in ELSEWHERE.items():
        file, _, name = test.partition(" ")
        text += f"| {process} | `{file}` | `{name}` |\n"
    return text


def keep(file: Path, row: Row) -> None:
    """Add a row to the results, in place of an older one of its name."""
    about: dict[str, Any] = {"rows": []}
    if file.exists():
        about = json.loads(file.read_text())
    others = [r for r in about["rows"] if r["name"] != row.name]
    about |= {"machine": env.report(), "rows": [*others, asdict(row)]}
    write_atomic(file, json.dumps(about, indent=1, default=str) + "\n")
    made = [Row(**r | {"faults": [Fault(**f) for f in r["faults"]]}) for r in about["rows"]]
    made.sort(key=lambda r: (r.seed, r.mode))
    write_atomic(file.with_suffix(".md"), page(made))


def chosen(a: argparse.Namespace) -> Iterator[tuple[str, Callable[[Bench], Row]]]:
    if a.random:
        for seed in range(a.seed, a.seed + a.random):
            mode, todo = draw(seed)
            name = f"seed {seed} {mode}"
            yield name, lambda b, n=name, m=mode, t=todo, s=seed: b.row(n, m, t, s)
        return
    for name, (mode, todo) in rows().items():
        if not a.only or any(all(w in name for w in words.split()) for words in a.only):
            yield name, lambda b, n=name, m=mode, t=todo: b.row(n, m, t)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--only", nargs="+", default=[], help="words of the rows to run")
    p.add_argument("--random", type=int, default=0, help="number of random schedules")
    p.add_argument("--seed", type=int, default=0, help="seed of the first random schedule")
    p.add_argument("--list", action="store_true", help="print the names of the rows")
    p.add_argument("--dir", type=Path, default=ROOT / "runs" / "freeze", help="folder of the runs")
    p.add_argument("--json", type=Path, help="JSON file to which results are added")
    a = p.parse_args(argv)
    todo = list(chosen(a))
    if a.list:
        print("\n".join(name for name, _ in todo))
        return 0
    bench, bad = Bench(a.dir.absolute()), 0
    for name, run in todo:
        row = run(bench)
        bad += not row.is_explained
        told = ", ".join(f"{f.name} after step {f.step}" for f in row.faults)
        verdict = "" if row.is_explained else "  NOT EXPLAINED"
        named = "" if row.named_s is None else f" named {row.named_s:.1f} s"
        print(
            f"{name:28} {row.seconds:6.1f} s  {row.outcome[:90]}{named}  clean {row.clean_s:.1f} s "
            f"{row.state}{verdict}  [{told}]  {row.line[:100]} {' '.join(row.left)}",
            flush=True,
        )
        if a.json:
            keep(a.json, row)
    print(f"{len(todo)} rows, {bad} not explained")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

"""Code reward: runs the program in a response against the tests of its data row, in a sandbox.

A row has tests of one or both kinds:
    Python statements, as in MBPP: `assert add(2, 3) == 5`. They call functions of the program, from
        a process that the program cannot access (sandbox/README.md).
    Cases of stdin and stdout. The program is a script, and its output is compared word by word.

Each rank has `--reward.workers` worker threads, each with its own sandbox.
"""

import json
import queue
import re
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.config.schema import RewardConfig
from rlcore.records import Prompt, RequestId, RewardResult
from rlcore.rewards.kind import RewardKind, RunnerHost
from rlcore.rewards.wire import ScoreJob
from rlcore.sandbox import isolation
from rlcore.sandbox.box import Broken, ProgramLimits, ProgramOutcome, Sandbox
from rlcore.utils.log import log

# Possessive quantifiers prevent backtracking, which takes quadratic time on a long header line.
# A slow regular expression also blocks all other threads of the rank.
_HEADER = r"^([ \t]*+)```[ \t]*+([A-Za-z0-9_+-]*+)[^\n]*+\n"
_FENCE = re.compile(_HEADER + r"(.*?)^[ \t]*+```", re.M | re.S)
_OPEN = re.compile(_HEADER + r"(.*)\Z", re.M | re.S)
_CLOSE_S = 20.0
_SENTENCES = {
    "memory": "memory: the program took more than {limits.memory_mb} MB",
    "cpu": "cpu: the processes of the program took more CPU time than 4 CPUs give",
    "output": "output: the program printed more than {limits.output_bytes} bytes",
}


@dataclass(frozen=True, kw_only=True)
class CodeRewardConfig(RewardConfig):
    """Keys of `--reward code`."""

    tests_field: str = "test_list"
    """Name of the column with Python tests, a list of statements or one text."""
    setup_field: str = "test_setup_code"
    """Name of the column with code that runs before the tests."""
    cases_field: str = "cases"
    """Name of the column with stdin/stdout cases: a list of {input, output}, or {inputs, outputs}
    with two lists; both also as JSON text."""
    partial_credit: bool = False
    """Whether the score is the share of passed tests; otherwise it is 1 only if all pass."""
    max_tests: int = 0
    """Maximum number of tests run per row, starting with the first; 0: all."""
    program_memory_mb: int = 512
    """Maximum memory of a program and its child processes in MB."""
    program_processes: int = 32
    """Maximum number of processes and threads of a program."""
    allow_packages: bool = False
    """Whether programs may import this environment's packages in addition to the standard
    library."""
    require_isolation: isolation.IsolationGrade = "fallback"
    """Weakest grade of isolation with which the run starts; below `namespaces` it warns.
    `fallback`: limits and filters only. `namespaces`: Linux namespaces, too. `cgroup`: a memory
    cgroup, too."""


@dataclass(frozen=True)
class Checks:
    """Tests of one data row."""

    statements: tuple[str, ...]
    setup: str
    cases: tuple[tuple[str, str], ...]
    """Stdin/stdout cases: pairs of the input and the expected output."""

    def __len__(self) -> int:
        return len(self.statements) + len(self.cases)


class CodeRunner:
    """`kind.Runner` of the code reward: runs programs in sandboxes; see the module docstring."""

    def __init__(self, config: CodeRewardConfig, host: RunnerHost) -> None:
        self._config, self._host = config, host
        self._jobs: queue.SimpleQueue[ScoreJob | None] = queue.SimpleQueue()
        self._open: set[RequestId] = set()
        """Samples that were submitted and are not scored yet; `_cancelled` has some of them."""
        self._cancelled: set[RequestId] = set()
        self._lock, self._grading = threading.Lock(), threading.Lock()
        self._grade: isolation.Grade | None = None
        self._closing = False
        self._threads = [
            threading.Thread(target=self._main, name=f"reward code {i}", daemon=True)
            for i in range(config.workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: ScoreJob) -> None:
        """Queue a job (`Runner.submit`)."""
        with self._lock:
            self._open.add(job.sample.id)
            self._cancelled.discard(job.sample.id)
        self._jobs.put(job)

    def cancel(self, ids: Collection[RequestId]) -> None:
        """Cancel samples (`Runner.cancel`). Their running programs are killed at once."""
        with self._lock:
            self._cancelled |= self._open.intersection(ids)

    def close(self) -> None:
        """Kill all programs and stop the threads."""
        if self._closing:
            return
        self._closing = True
        for _ in self._threads:
            self._jobs.put(None)
        end = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                log.error("reward code: a sandbox did not exit within %g s", _CLOSE_S)

    # ---- worker threads

    def _main(self) -> None:
        packages = isolation.installed_packages() if self._config.allow_packages else ()
        try:
            with Sandbox(self._isolation(packages), packages) as box:
                while (job := self._jobs.get()) is not None and not self._closing:
                    if job.sample.id not in self._cancelled:
                        self._host.done(job, self._score(job, box), "")
                    self._forget(job.sample.id)
        except Exception as error:  # report the failed thread, so that `poll` raises an error
            self._host.fail(f"reward code: {error}")

    def _isolation(self, packages: tuple[str, ...]) -> isolation.IsolationGrade:
        """Return this machine's grade of isolation. The first worker thread finds and logs it."""
        with self._grading:
            if self._grade is None:
                self._grade = isolation.grade(self._config.require_isolation, packages)
                say = log.warning if self._grade.name == "fallback" else log.info
                say("sandbox: %s", self._grade.sentence)
            return self._grade.name

    def _forget(self, id: RequestId) -> None:
        with self._lock:
            self._open.discard(id)
            self._cancelled.discard(id)

    def _score(self, job: ScoreJob, box: Sandbox) -> RewardResult:
        begin = time.monotonic()

        def deadline() -> float:
            if self._closing or job.sample.id in self._cancelled:
                return 0.0
            return begin + self._host.timeout_s(job)

        try:
            checks = checks_of(job.prompt, self._config)
            passed, error = run_checks(program_of(job.text), checks, box, deadline, self._limits())
            share = passed / len(checks)
        except Broken as broken:
            share, error = 0.0, f"crash: {broken}"
        except ValueError as wrong_row:
            share, error = 0.0, str(wrong_row)
        if error == "timeout":
            error = f"timeout after {round(self._host.timeout_s(job), 3):g} s"
        return RewardResult(
            score=share if self._config.partial_credit else float(share == 1),
            details={"passed": share},
            error=error,
            latency_s=time.monotonic() - begin,
        )

    def _limits(self) -> ProgramLimits:
        return ProgramLimits(
            memory_mb=self._config.program_memory_mb, processes=self._config.program_processes
        )


def run_checks(
    program: str, checks: Checks, box: Sandbox, deadline: Any, limits: ProgramLimits
) -> tuple[int, str]:
    """Return the number of passed tests, and why the program was killed: `timeout`, an error
    message, or "" if it was not killed. A killed program passes no test."""
    passed = 0
    if checks.statements:
        source = f"{program}\n\n{checks.setup}\n" if checks.setup.strip() else program
        verdicts = box.test(source, checks.statements, deadline, limits=limits)
        if error := _error(verdicts.outcome, limits):
            return 0, error
        passed += sum(verdicts.passed)
    for given, wanted in checks.cases:
        outcome = box.run(program, deadline, stdin=given, limits=limits)
        if error := _error(outcome, limits):
            return 0, error
        passed += outcome.code == 0 and _same_words(outcome.stdout, wanted)
    return passed, ""


def _error(outcome: ProgramOutcome, limits: ProgramLimits) -> str:
    return _SENTENCES.get(outcome.why, outcome.why).format(limits=limits)


def _same_words(printed: bytes, wanted: str) -> bool:
    """Return whether a program's output has the same words as the expected text. White space does
    not count; bytes that are not UTF-8 are replaced."""
    return printed.decode("utf-8", "replace").split() == wanted.split()


def program_of(text: str) -> str:
    """Extract the program from a response: the last closed code block whose language is Python or
    not given. If there is none, take the text after an unclosed fence, else the whole response. An
    indented block loses the indentation of its fence."""
    for found in (_FENCE.findall(text), _OPEN.findall(_FENCE.sub("", text))):
        blocks = [(indent, body) for indent, language, body in found if language.lower() in _PYTHON]
        if blocks:
            return _dedented(*blocks[-1])
    return text


def _dedented(indent: str, body: str) -> str:
    """Remove the indentation of a fence from each line, but at most that of the first line."""
    first = next((line for line in body.split("\n") if line.strip()), "")
    most = min(len(indent), len(first) - len(first.lstrip(" \t")))
    return re.sub(rf"^[ \t]{{1,{most}}}", "", body, flags=re.M) if most else body


_PYTHON = ("", "py", "python", "python3")


def checks_of(prompt: Prompt, config: CodeRewardConfig) -> Checks:
    """Read the tests of a data row. Raises ValueError if the row has no tests or invalid tests."""
    row = prompt.fields
    try:
        checks = Checks(
            statements=tuple(_texts(row.get(config.tests_field))),
            setup=str(row.get(config.setup_field) or ""),
            cases=tuple(_cases(row.get(config.cases_field))),
        )
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"row: the tests cannot be read ({type(error).__name__}: {error})"
        ) from error
    if not len(checks):
        raise ValueError(
            f"row {prompt.index} of {prompt.dataset} has no tests in {config.tests_field} or "
            f"{config.cases_field}; set --reward.tests_field or --reward.cases_field"
        )
    if config.max_tests:
        kept = checks.statements[: config.max_tests]
        checks = Checks(kept, checks.setup, checks.cases[: config.max_tests - len(kept)])
    return checks


def _texts(found: Any) -> Sequence[str]:
    if isinstance(found, str):
        found = json.loads(found) if found.lstrip().startswith("[") else [found]
    return [_text(test) for test in found or () if _text(test).strip()]


def _cases(found: Any) -> list[tuple[str, str]]:
    if isinstance(found, str):
        found = json.loads(found) if found.strip() else None
    if isinstance(found, dict):
        pairs = list(zip(found["inputs"], found["outputs"], strict=True))
    else:
        pairs = [(case["input"], case["output"]) for case in found or ()]
    return [(_text(given), _text(wanted)) for given, wanted in pairs]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} instead of text")
    return value


KIND = RewardKind(CodeRewardConfig, serve=CodeRunner)

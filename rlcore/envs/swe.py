"""Software tasks in the style of SWE-bench: shell commands in a workspace, then the task's tests.

A row of `--data.train` has the field `tests` (a command that exits with 0 if the task is done), and
`image`, a container for docker, or `repo`, a folder or tar archive that is copied into the sandbox
(`rlcore/sandbox/workspace.py`). Its optional `workdir` is where commands run. The prompt is the
issue. If a turn has a fenced block of bash, the block is run and its output is the observation. If
a turn has a line `submit`, the episode ends; its score is 1 if the tests pass, else 0.

Workspaces are used only through `Workspace`. Containers have not been run: the contract test
replaces docker with a stub.

The docker command is called instead of the package docker, to save the dependency.
"""

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import gymnasium
from gymnasium.spaces import Text

from rlcore.config.schema import EnvConfig
from rlcore.envs.kind import EnvKind
from rlcore.sandbox import isolation
from rlcore.sandbox.shell import TIMED_OUT
from rlcore.sandbox.workspace import SandboxWorkspace, archive_of
from rlcore.utils.bounds import above, at_least

# Possessive quantifiers prevent backtracking, which takes quadratic time and blocks the process.
_BLOCK = re.compile(r"```(?:bash|sh)[^\n`]*+\n(.*?)```", re.DOTALL)
_SUBMIT = re.compile(r"^[^\S\n]*+submit[^\S\n]*+$", re.MULTILINE | re.IGNORECASE)
_GRACE_S = 10.0


class SweTask(NamedTuple):
    """Software task of one data row."""

    image: str
    """Image of the container; empty: none."""
    repo: str
    """Path of the folder or tar archive that is copied into the sandbox; empty: none."""
    tests: str
    workdir: str
    """Folder in which commands run; empty: the top of the workspace."""


class Workspace(Protocol):
    """Interface of the container or sandbox of one episode."""

    def run(self, command: str, timeout_s: float) -> tuple[int, str]:
        """Run a command. Returns exit status and output; the status is 124 after a time-out."""

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class SweConfig(EnvConfig):
    """Keys of `--env swe`."""

    max_turns: int = 40
    timeout_s: float = 900.0
    workspace: Literal["auto", "docker", "sandbox"] = "auto"
    """Place where commands run. `docker`: a container of the row's `image`. `sandbox`: a copy of
    the row's `repo` in the sandbox. `auto`: docker if it is on PATH and the row has an `image`."""
    command_timeout_s: Annotated[float, above(0)] = 120.0
    """Seconds after which a command is killed; its observation then reports the timeout."""
    tests_timeout_s: Annotated[float, above(0)] = 600.0
    """Seconds after which the tests count as failed."""
    max_output_chars: Annotated[int, at_least(100)] = 8000
    """Maximum number of characters of a command's output; a longer output is cut in the middle."""
    docker_args: tuple[str, ...] = ("--network=none", "--memory=4g", "--pids-limit=512")
    """Further arguments of `docker run`."""
    memory_mb: Annotated[int, at_least(64)] = 1024
    """Memory limit in MB of a command in the sandbox; files add up to 128 MB."""
    allow_packages: bool = False
    """Whether Python in the sandbox may import this environment's packages, such as pytest."""
    require_isolation: isolation.IsolationGrade = "fallback"
    """Weakest grade of isolation of the sandbox: `fallback`, `namespaces` or `cgroup` (as
    `--reward.require_isolation`)."""

    def problems(self) -> list[str]:
        """Return errors for conflicting keys (`EnvConfig.problems`)."""
        return [
            f"--env.{key} {getattr(self, key):g}: must be below env.timeout_s {self.timeout_s:g}"
            for key in ("command_timeout_s", "tests_timeout_s")
            if not getattr(self, key) < self.timeout_s
        ]


class Swe(gymnasium.Env[str, str]):
    """Software-task environment with one workspace per episode."""

    observation_space = action_space = Text(max_length=1 << 20, min_length=0)

    def __init__(self, config: SweConfig, open_workspace: Callable[[SweTask], Workspace]) -> None:
        self._config, self._open = config, open_workspace
        self._tests = ""
        self._workspace: Workspace | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start the workspace; the prompt is the issue. Raises ValueError if a field is missing."""
        super().reset(seed=seed)
        row = options or {}
        task = SweTask(*(str(row.get(field) or "") for field in SweTask._fields))
        if not task.tests:
            raise ValueError("the row has no field tests; --env swe needs it, and repo or image")
        self.close()
        self._tests = task.tests
        self._workspace = self._open(task)
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Run the turn's command and return its output. On `submit`, run the tests instead."""
        assert self._workspace is not None, "call reset first"
        blocks = _BLOCK.findall(action)
        if blocks:
            command = blocks[-1].replace("\0", "")  # no command may have one
            code, printed = self._workspace.run(command, self._config.command_timeout_s)
            return self._shown(code, printed), 0.0, False, False, {"success": 0.0}
        if not _SUBMIT.search(action):
            said = "Give a command in a block of bash, or a line that says submit.\n"
            return said, 0.0, False, False, {"success": 0.0}
        code, _ = self._workspace.run(self._tests, self._config.tests_timeout_s)
        done = float(code == 0)
        return "", done, True, False, {"success": done}

    def close(self) -> None:
        """Close the workspace."""
        if self._workspace is not None:
            self._workspace.close()
            self._workspace = None

    def _shown(self, code: int, printed: str) -> str:
        most = self._config.max_output_chars
        if len(printed) > most:
            half = most // 2
            left = len(printed) - 2 * half
            printed = f"{printed[:half]}\n... {left} characters ...\n{printed[-half:]}"
        end = (
            f"killed after {self._config.command_timeout_s:g} s"
            if code == TIMED_OUT
            else f"exit {code}"
        )
        return f"{printed.rstrip()}\n[{end}]\n"


class Container:
    """Docker container of one episode, idle between commands."""

    def __init__(self, task: SweTask, args: tuple[str, ...]) -> None:
        words = ["run", "--detach", "--rm", "--init", *args, "--workdir", task.workdir or "/"]
        self._id = self._docker([*words, task.image, "sleep", "infinity"], 300.0).strip()

    def run(self, command: str, timeout_s: float) -> tuple[int, str]:
        """Run a command in the container (`Workspace.run`)."""
        words = ["exec", self._id, "timeout", "-k", "5", f"{timeout_s:g}", "bash", "-c", command]
        done = subprocess.run(
            ["docker", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=timeout_s + _GRACE_S,
            check=False,
        )
        return done.returncode, done.stdout.decode("utf-8", "replace")

    def close(self) -> None:
        """Remove the container (`Workspace.close`)."""
        self._docker(["rm", "--force", self._id], 60.0)

    def _docker(self, words: list[str], timeout_s: float) -> str:
        done = subprocess.run(
            ["docker", *words], capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode:
            raise RuntimeError(f"docker {words[0]}: {done.stderr.strip()[-300:]}")
        return done.stdout


def _make(config: SweConfig) -> Swe:
    """Create an environment. Raises RuntimeError if no workspace of the config can start here."""
    packages = isolation.installed_packages() if config.allow_packages else ()
    if config.workspace == "docker" and not has_docker():
        raise RuntimeError(
            "docker is not on PATH; install it, or set --env.workspace sandbox and give rows a repo"
        )
    if config.workspace == "sandbox" or not has_docker():
        isolation.grade_name(config.require_isolation, packages)

    def open_workspace(task: SweTask) -> Workspace:
        prefers_docker = config.workspace == "auto" and task.image and has_docker()
        if config.workspace == "docker" or prefers_docker:
            _check_field("image", task.image, "docker")
            return Container(task, config.docker_args)
        _check_field("repo", task.repo, "the sandbox")
        return SandboxWorkspace(
            isolation.grade_name(config.require_isolation, packages),
            archive_of(Path(task.repo)),
            folder=task.workdir or ".",
            memory_mb=config.memory_mb,
            packages=packages,
        )

    return Swe(config, open_workspace)


def has_docker() -> bool:
    """Return whether the docker command is on PATH."""
    return shutil.which("docker") is not None


def _check_field(name: str, value: str, place: str) -> None:
    if not value:
        raise ValueError(f"the row has no field {name}, which --env swe needs with {place}")


KIND = EnvKind(SweConfig, _make)

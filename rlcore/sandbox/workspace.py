"""Shell commands of one episode in the sandbox, on a copy of a folder.

    with SandboxWorkspace(grade, archive_of(Path("repo"))) as workspace:
        status, output = workspace.run("make test", timeout_s=60)

The copy is a tar archive in memory. Every command unpacks, changes and packs it in a fresh program
(`shell.py`), so neither processes nor files outlive a command, and this process never reads what a
command has packed. A copy has the limits of /tmp in the sandbox: 128 MB and 4,096 files.
"""

import inspect
import io
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from rlcore.sandbox import shell
from rlcore.sandbox.box import ProgramLimits, Sandbox
from rlcore.sandbox.inside import TMP_BYTES, TMP_FILES
from rlcore.sandbox.isolation import IsolationGrade

_CHECK_S = 30.0
_PACK_S = 30.0
"""Seconds for unpacking and packing, in addition to those of a command."""
_OUTPUT_BYTES = TMP_BYTES + (32 << 20)
"""Most bytes of a packed copy and the output of a command."""


def archive_of(path: Path) -> bytes:
    """Return a folder as a tar archive, or the bytes of an archive. Raises ValueError if there is
    neither, or if it is too large for the sandbox."""
    if path.is_file():
        _check_size(path, path.stat().st_size, 1)
        return path.read_bytes()
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder or tar archive")
    num_bytes = num_files = 0

    def counted(member: tarfile.TarInfo) -> tarfile.TarInfo:
        nonlocal num_bytes, num_files
        num_bytes, num_files = num_bytes + member.size, num_files + 1
        _check_size(path, num_bytes, num_files)
        return member

    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        archive.add(path, ".", filter=counted)
    return data.getvalue()


def _check_size(path: Path, num_bytes: int, num_files: int) -> None:
    if num_bytes > TMP_BYTES or num_files > TMP_FILES:
        raise ValueError(
            f"{path}: has more than {TMP_BYTES >> 20} MB or {TMP_FILES} files, the most that the "
            "sandbox holds; use docker"
        )


class SandboxWorkspace:
    """Sandbox with a copy of a folder, in which commands run one after the other."""

    def __init__(
        self,
        grade: IsolationGrade,
        archive: bytes,
        *,
        folder: str = ".",
        memory_mb: int = 512,
        packages: Sequence[str] = (),
    ) -> None:
        """Start the sandbox and check the copy.

        Args:
            archive: the copy, a tar archive; also a compressed one.
            folder: folder of the archive in which commands run.
            memory_mb: memory limit of a command, as `ProgramLimits.memory_mb`.
            packages: folders from which Python programs may import.

        Raises:
            ValueError: the archive cannot be unpacked, or has no such folder.
        """
        self._archive, self._folder = archive, folder
        self._limits = ProgramLimits(memory_mb=memory_mb, output_bytes=_OUTPUT_BYTES)
        self._box = Sandbox(grade, packages)
        try:
            status, output = self.run("true", _CHECK_S)
            if status:
                raise ValueError(f"the sandbox cannot use the archive; {output}")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(self, command: str, timeout_s: float) -> tuple[int, str]:
        """Run a command. Returns its exit status, 124 after a time-out, and its output. If the
        sandbox kills it, or if the copy cannot be packed, the copy stays as it was before, and the
        output says so. Raises Broken if the sandbox fails."""
        end = time.monotonic() + timeout_s + _PACK_S
        outcome = self._box.run(
            f"{inspect.getsource(shell)}\n"
            f"run_command({command!r}, {self._folder!r}, {timeout_s!r})\n",
            lambda: end,
            stdin=self._archive,
            limits=self._limits,
        )
        text = outcome.stderr.decode("utf-8", "replace")
        output, _, status = text.rpartition("\n")
        if not outcome.code and status.isdigit():
            self._archive = outcome.stdout
            return int(status), output
        reason = outcome.why or text.strip().rpartition("\n")[2] or f"exit status {outcome.code}"
        status_of_lost = shell.TIMED_OUT if outcome.why == "timeout" else 1
        return status_of_lost, f"the command has no effect and no output: {reason}"

    def close(self) -> None:
        """Stop the sandbox. Idempotent."""
        self._box.close()

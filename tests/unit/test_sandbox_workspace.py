"""Workspaces in the sandbox: what a command sees and changes, and what its end leaves."""

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlcore.sandbox import isolation, workspace
from rlcore.sandbox.box import ProgramLimits
from rlcore.sandbox.workspace import SandboxWorkspace, archive_of

TIME_S = 60.0  # the machine may be busy, and programs in the sandbox have the lowest priority
GRADES = isolation.GRADES[: isolation.GRADES.index(isolation.grade_name()) + 1]


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    (folder / "src").mkdir(parents=True)
    (folder / "src/app.py").write_text("print('hello')\n")
    (folder / "run").write_text("#!/bin/sh\nexec python3 src/app.py\n")
    (folder / "run").chmod(0o755)
    (folder / "link").symlink_to("/usr/bin/env")
    return folder


@pytest.fixture(params=GRADES)
def box(request: pytest.FixtureRequest, repo: Path) -> Iterator[SandboxWorkspace]:
    with SandboxWorkspace(request.param, archive_of(repo), memory_mb=256) as made:
        yield made


def children(box: SandboxWorkspace) -> list[str]:
    """Names of all processes below the sandbox's own, of which bubblewrap has one."""
    found = psutil.Process(box._box.pid).children(recursive=True)
    return [name for process in found if (name := process.name()) in ("bash", "sleep", "yes")]


def test_commands_work_on_a_copy_and_their_changes_last(box: SandboxWorkspace, repo: Path) -> None:
    assert box.run("./run; readlink link", TIME_S) == (0, "hello\n/usr/bin/env\n")
    assert box.run("sed -i s/hello/bye/ src/app.py; rm link; exit 3", TIME_S) == (3, "")
    assert box.run("./run; ls; kill -TERM $$", TIME_S) == (143, "bye\nrun\nsrc\n")
    assert (repo / "src/app.py").read_text() == "print('hello')\n" and (repo / "link").is_symlink()


def test_a_late_command_is_killed_with_what_it_started(box: SandboxWorkspace) -> None:
    late = "echo kept >new; (setsid sleep 1000 &); sleep 1000 & echo said; sleep 1000"
    assert box.run(late, 1.0) == (124, "said\n")
    assert not children(box)
    assert box.run("cat new; sleep 1000 &", TIME_S) == (0, "kept\n")  # does not wait for it
    assert not children(box)


def test_what_a_command_leaves_behind_changes_no_file_while_it_is_packed(
    box: SandboxWorkspace,
) -> None:
    """A file that becomes shorter cannot be packed."""
    large, small = "truncate -s 15000000 big", "truncate -s 0 big"
    command = f"{large}; while :; do {small}; {large}; done & sleep 0.2"
    assert box.run(command, TIME_S) == (0, "")


def test_a_command_does_not_reach_the_files_of_the_machine(
    box: SandboxWorkspace, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("found")
    status, output = box.run(f"cat {tmp_path}/secret; cat {__file__}; touch /usr/mark", TIME_S)
    assert status and "found" not in output and "secret" in output
    assert not os.path.exists("/usr/mark")


def test_git_and_programs_behind_alternatives_work(box: SandboxWorkspace) -> None:
    commit = "git init -q && git add -A && git -c user.name=a -c user.email=a commit -qm one"
    command = f"{commit} && echo more >>run && git diff --stat && awk 'BEGIN {{print 6 * 7}}'"
    status, output = box.run(command, TIME_S)
    assert status == 0 and output.startswith(" run | 1 +\n") and output.endswith("\n42\n")


def test_output_and_memory_have_limits(box: SandboxWorkspace) -> None:
    status, output = box.run("yes", TIME_S)
    assert status == 153 and len(output) == ProgramLimits().file_mb << 20
    status, output = box.run("python3 -c 'bytearray(300 << 20)'", TIME_S)
    assert status == 1 and output.endswith("MemoryError\n")


def test_a_copy_that_cannot_be_packed_stays_as_it_was(box: SandboxWorkspace) -> None:
    status, output = box.run("echo lost >new; chmod 000 new", TIME_S)
    assert status == 1
    assert output.startswith("the command has no effect and no output: PermissionError")
    assert box.run("ls", TIME_S) == (0, "link\nrun\nsrc\n")


def test_a_program_that_the_sandbox_kills_has_no_effect(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "_PACK_S", -0.5)
    monkeypatch.setattr(workspace, "_CHECK_S", TIME_S)
    with SandboxWorkspace(isolation.grade_name(), archive_of(repo)) as box:
        lost = "the command has no effect and no output: timeout"
        assert box.run("echo lost >new; sleep 1000", 1.0) == (124, lost)
        assert box.run("ls", TIME_S) == (0, "link\nrun\nsrc\n")


def test_a_command_may_be_long_and_odd(box: SandboxWorkspace) -> None:
    command = f"echo '{'x' * 300_000}' | wc -c; echo \u00e9'\udc80'"
    assert box.run(command, TIME_S) == (0, "300001\n\u00e9\ufffd\ufffd\ufffd\n")
    assert box.run("", TIME_S) == (0, "") and box.run("fi", TIME_S)[0] == 2


def test_an_archive_may_be_compressed_and_commands_run_in_its_folder(
    repo: Path, tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "repo.tar.gz", "w:gz") as archive:
        archive.add(repo, "repo-1.0")
    data = archive_of(tmp_path / "repo.tar.gz")
    with SandboxWorkspace(isolation.grade_name(), data, folder="repo-1.0/src") as box:
        assert box.run("python3 app.py", TIME_S) == (0, "hello\n")
        pid = box._box.pid
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("data", "keys", "match"),
    [
        (b"no archive", {}, "cannot use the archive; .*ReadError"),
        (None, {"folder": "nowhere"}, "cannot use the archive; .*No such file.*nowhere"),
    ],
)
def test_an_archive_that_cannot_be_used_is_refused(
    repo: Path, data: bytes | None, keys: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        SandboxWorkspace(isolation.grade_name(), data or archive_of(repo), **keys)


def test_a_folder_that_is_too_large_is_refused(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="/nowhere: no such folder or tar archive"):
        archive_of(Path("/nowhere"))
    assert archive_of(repo)  # 5 members of 46 bytes
    monkeypatch.setattr(workspace, "TMP_FILES", 4)
    with pytest.raises(ValueError, match=r"repo: has more than 128 MB or 4 files"):
        archive_of(repo)
    monkeypatch.undo()
    with open(repo / "large", "wb") as file:
        file.truncate((128 << 20) + 1)
    for path in (repo, repo / "large"):
        with pytest.raises(ValueError, match=r"has more than 128 MB or 4096 files"):
            archive_of(path)

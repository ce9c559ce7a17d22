"""The program `rlcore`: how its process ends."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import atexit, os, sys, threading, time
from rlcore import __main__ as program

class Kept:
    def __del__(self, write=os.write):
        write(1, b"finalised\\n")

def command(argv):
    import torch
    torch.kept = Kept()
    atexit.register(print, "exit handler")
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    if argv == ["raise"]:
        raise KeyboardInterrupt
    sys.stdout.write("not flushed\\n")
    sys.file = open(os.environ["LEFT_OPEN"], "w")
    sys.file.write("by a callback")
    return 3

program.main = command
sys.exit(program.script())
"""


def run(file: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *argv],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"LEFT_OPEN": str(file)},
    )


def test_a_command_that_used_torch_ends_after_its_exit_handlers_without_finalisation(
    tmp_path: Path,
):
    done = run(tmp_path / "open")
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.split("\n") == ["not flushed", "thread", "exit handler", ""]
    assert (tmp_path / "open").read_text() == "by a callback"


def test_a_command_that_was_interrupted_ends_as_python_ends(tmp_path: Path):
    done = run(tmp_path / "open", "raise")
    assert done.returncode != 0 and done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert done.stdout.split("\n") == ["thread", "exit handler", "finalised", ""]

"""A cluster for tests: Redis and an arbiter in a folder; what jobs of rlcore did in it."""

import json
import os
import shutil
import signal
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

from rlcore.cli import mux as cli
from rlcore.rollout.transport import free_port
from tests import runs

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="no redis-server; tools/setup.sh --mux installs it"
)


class Up:
    """Redis and an arbiter in a folder."""

    def __init__(self, folder: Path, rollout: int, train: int, *more: str) -> None:
        self.folder = folder
        pools = ["--rollout-pool", str(rollout), "--train-pool", str(train)]
        self.argv = ["up", *pools, "--port", str(free_port()), "--dir", str(folder)]
        self.argv += ["--rollout-switch-s", "1", "--train-switch-s", "1", *more]
        self.up()

    def up(self) -> None:
        assert cli.main(self.argv) == 0

    @property
    def about(self) -> dict:
        return json.loads((self.folder / "mux.json").read_text())

    @property
    def url(self) -> str:
        return cli._url(self.about)

    def kill(self, what: str) -> None:
        """As the machine would; it is our own child."""
        pid = self.about["pids"][what]
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def status(self, capsys) -> dict:
        capsys.readouterr()
        assert cli.main(["status", "--json", "--dir", str(self.folder)]) == 0
        return json.loads(capsys.readouterr().out)


PHASES = {
    "rollout": ("start", "rollout", "testing"),
    "train": ("start", "train", "save_checkpoint"),
}
"""Of a job with ranks that only sample, by the pool whose nodes they are on."""


def learned(run: Path) -> dict[int, dict[str, Any]]:
    """The metrics of a run by step, without the clock's and those of its turns, of how weights came
    and of what was on the device with --train.offload: what it is alone, it is among others."""
    loose = "mux/", "sync/", "memory/"
    return {
        step: {k: v for k, v in runs.same(row).items() if not k.startswith(loose)}
        for step, row in runs.rows(run).items()
    }


def turns(folder: Path) -> list[dict[str, Any]]:
    """Of all runs in a folder, or of one. The line that a killed one was writing is left out."""
    return [
        json.loads(line)
        for path in folder.rglob("permits.jsonl")
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def overlaps(
    jobs: Iterable[list[dict[str, Any]]], pool: str, colocated: Collection[int] = ()
) -> list[tuple]:
    """Turns of jobs on the one node of a pool that were there together. Of `colocated` ones every
    turn is on the nodes of both."""
    spans = sorted(
        (turn["granted"], turn["left"], job)
        for job, of_job in enumerate(jobs)
        for turn in of_job
        if not turn.get("part") and (job in colocated or turn["phase"] in PHASES[pool])
    )
    return [(a, b) for a, b in zip(spans, spans[1:], strict=False) if b[0] < a[1]]

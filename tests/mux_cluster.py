"""A cluster for tests: Redis and an arbiter in a folder."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from rlcore.cli import mux as cli
from rlcore.rollout.transport import free_port

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

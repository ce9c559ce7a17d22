"""Ranks on pretend devices, and what the ranks of test_learner.py run."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rlcore.rollout.transport import free_port
from tests import kit, pretend
from tests.ranks import learner_ranks as ranks

MAIN = "import sys; from tests import kit; kit._rank(*sys.argv[1:])"


def run_ranks(n: int, target: str, args: Mapping[str, Any]) -> list[Any]:
    """Run `module:function(rank, **args)` as `kit.run_ranks` does, with a pretend device for each
    rank and NCCL between them."""
    with TemporaryDirectory(prefix="pretend") as name:
        folder = Path(name)
        (folder / "args.json").write_text(json.dumps(dict(args)))
        run_gang(n, ["-c", MAIN, target, name], folder)
        files = [folder / f"result{rank}" for rank in range(n)]
        return [torch.load(file, map_location="cpu", weights_only=True) for file in files]


def run_gang(n: int, command: Sequence[str], folder: Path, timeout_s: float = 500.0) -> str:
    """Run Python with these arguments on n ranks that have a pretend device each. Return what rank
    0 wrote. AssertionError if a rank fails."""
    env = pretend.environment() | {"WORLD_SIZE": str(n), "RLCORE_PRETEND_CUDA_DEVICES": str(n)}
    env |= {"LOCAL_WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env |= {"PYTHONFAULTHANDLER": "1"}  # an abort names the thread that it came from
    gang: list[Any] = []
    logs = [folder / f"log{rank}" for rank in range(n)]
    try:
        for rank in range(n):
            with logs[rank].open("wb") as log:
                gang.append(
                    subprocess.Popen(
                        [sys.executable, *command],
                        env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        cwd=kit.ROOT,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        failed = kit._wait(gang, timeout_s)
    finally:
        for process in gang:
            process.kill()
            process.wait()
    texts = [log.read_text(errors="replace") for log in logs]
    assert not failed, f"rank {failed[0]} {failed[1]}:\n" + "\n----\n".join(
        t[-6000:] for t in texts
    )
    return texts[0]


def parity(rank: int, folder: str, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Two updates of each case, then offload and onload, and a checkpoint that the case `then` of
    another layout loads."""
    found = {}
    for name, case in cases.items():
        case = dict(case)
        then = case.pop("then", None)
        learner = ranks.make(**case)
        mine = ranks.mine(learner, ranks.rows(0))
        seen = ranks.observe(learner, 2)
        seen["device"] = learner.device.type
        seen["weights"] = {key: tensor.cpu() for key, tensor in seen["weights"].items()}
        before = learner.logprobs(mine)
        held = sum(learner.resident_bytes().values())
        learner.offload()
        seen["offloaded to"] = sum(learner.resident_bytes().values()) / held
        learner.onload()
        seen["same after onload"] = torch.equal(before, learner.logprobs(mine))
        if then is not None:
            learner.save(Path(folder) / name)
        learner.close()
        if then is not None:
            other = ranks.make(then, **{k: v for k, v in case.items() if k != "layout"})
            other.load(Path(folder) / name)
            seen["loaded"] = {
                key: tensor.cpu() for key, tensor in kit.state(other.export()).items()
            }
            other.close()
        found[name] = seen
    return found

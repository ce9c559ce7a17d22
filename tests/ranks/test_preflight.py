"""Preflight and start of two ranks, each of which takes itself for a node. GPUs and NCCL are not
covered: the ranks have CPUs and gloo."""

import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from rlcore.rollout.transport import free_port
from tests import kit, runs
from tests.forks import Fork

pytestmark = pytest.mark.ranks(2)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return runs.tiny_model(tmp_path / "model")


def program(words: Sequence[str], stuck: bool | None) -> None:
    """`rlcore WORDS`. With `stuck`, given or not, an all-reduce has two seconds; true: this rank
    never comes back from it."""
    from rlcore import __main__
    from rlcore.cli.checks import ranks

    if stuck is not None:
        ranks.ALL_REDUCE_S = 2.0
    if stuck:
        ranks.all_reduce = lambda *_: time.sleep(600)
    sys.exit(__main__.main(list(words)))


def outcome(
    folder: Path,
    commands: Sequence[Sequence[str]],
    stuck: tuple[bool, ...] = (),
    has_agent: bool = True,
) -> list[tuple[int, str]]:
    """Exit code and output of each of two ranks. The store is here, as torchrun has it, or without
    `has_agent` in rank 0."""
    port, store = free_port(), None
    if has_agent:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    launcher = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "TORCHELASTIC_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(launcher)}
    env |= {"PYTHONPATH": kit.python_path(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"TORCHELASTIC_USE_AGENT_STORE": str(has_agent)}
    processes = []
    for rank, words in enumerate(commands):
        of_rank = env | {"RANK": str(rank), "GROUP_RANK": str(rank)}
        args = words, stuck[rank] if stuck else None
        processes.append(Fork(program, args, of_rank, folder / f"rank{rank}.txt"))
    try:
        codes = [process.wait(150) for process in processes]
    finally:
        for process in processes:
            process.kill()
    del store
    return [(code, (folder / f"rank{rank}.txt").read_text()) for rank, code in enumerate(codes)]


def arguments(model: Path, folder: Path, *more: object) -> list[str]:
    return runs.arguments(model, folder, "x", "--cluster.interface", "lo", *more)


def test_two_nodes_that_can_work_together_are_one_table(tmp_path: Path, model: Path) -> None:
    words = ["preflight", *arguments(model, tmp_path / "runs")]
    (code, said), (other, nothing) = outcome(tmp_path, [words, words])
    assert (code, other) == (0, 0), said + nothing
    nodes, run = said.split("run:")
    assert nodes.startswith("all nodes:\n") and "node 0" not in nodes and not nothing
    assert nodes.count("SKIP  driver") == nodes.count("PASS  gloo") == 1
    assert "all ranks see" in nodes and list((tmp_path / "runs").iterdir()) == []
    assert "PASS  data" in run and said.splitlines()[-1].startswith("preflight: 0 FAIL")


def test_nodes_without_a_shared_disk_are_named(tmp_path: Path, model: Path) -> None:
    words = [["preflight", *arguments(model, tmp_path / name)] for name in ("here", "there")]
    (code, said), (other, nothing) = outcome(tmp_path, words)
    assert (code, other) == (1, 1), said + nothing
    (line,) = [line for line in said.splitlines() if line.startswith("  FAIL")]
    assert "shared" in line and "rank 1 cannot read the file that rank 0 wrote" in line
    assert "PASS  gloo" in said


def test_a_node_without_the_interface_is_named(tmp_path: Path, model: Path) -> None:
    words = ["preflight", *arguments(model, tmp_path / "runs")]
    (code, said), _ = outcome(tmp_path, [words, [*words, "--cluster.interface", "nope"]])
    assert code == 1
    assert re.search(r"\nnode 1 \(.*\):\n  FAIL  network .* nope: not an interface", said), said


def test_a_rank_that_does_not_join_is_named_beside_what_the_others_found(
    tmp_path: Path, model: Path
) -> None:
    words = ["preflight", *arguments(model, tmp_path / "runs", "--cluster.timeout_s", 3)]
    ((code, said),) = outcome(tmp_path, [words])
    assert code == 1
    assert "FAIL  ranks      start-up: rank 1 of 2 has not joined" in said
    assert "SKIP  driver" in said and "PASS  data" in said


def test_a_rank_that_hangs_in_an_all_reduce_is_named_and_ends(tmp_path: Path, model: Path) -> None:
    words = ["preflight", *arguments(model, tmp_path / "runs")]
    (code, said), (other, nothing) = outcome(tmp_path, [words, words], stuck=(False, True))
    assert (code, other) == (1, 1), said + nothing
    (line,) = [line for line in said.splitlines() if line.startswith("  FAIL")]
    assert re.search("gloo .* has not ended within 2 s on rank (0, )?1 on .*; check the net", line)


@pytest.mark.parametrize("has_agent", [True, False], ids=["torchrun", "rank 0"])
@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ("--run.dir there", "rank 1 cannot read the file that rank 0 wrote"),
        ("--cluster.interface nope", "rank 1 on .*: --cluster.interface nope: not an interface"),
        (
            "--cluster.rollout_ranks 1 --cluster.train_cores 7777",
            "rank 1 on .*: --cluster.train_cores 7777: this process may only use",
        ),
    ],
)
def test_a_start_that_one_rank_refuses_ends_on_all_with_its_reason(
    tmp_path: Path, model: Path, keys: str, reason: str, has_agent: bool
) -> None:
    words = ["train", *arguments(model, tmp_path / "runs")]
    own = [str(tmp_path / word) if word == "there" else word for word in keys.split()]
    (code, said), (other, nothing) = outcome(tmp_path, [words, [*words, *own]], has_agent=has_agent)
    assert (code, other) == (2, 2), said + nothing
    assert re.search(reason, said) and len(said.splitlines()) == 1 and not nothing

"""How `launch` makes processes: by hand, under torchrun, inside srun. A stand-in for rlcore records
what each process was told. Several real hosts are not covered."""

import signal
import socket
import time
from pathlib import Path

import pytest

from tests.recipes.conftest import RECIPES

ARGV = ["train", "--run.name", "probe", "--run.steps", "7", "--algo.clip_high", "0.3"]


def free_ports() -> int:
    """A port that is free, and the next one too."""
    while True:
        with socket.socket() as a, socket.socket() as b:
            a.bind(("127.0.0.1", 0))
            port = a.getsockname()[1]
            try:
                b.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def wait_for(condition, timeout_s=60):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"nothing after {timeout_s} s"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """A zombie is dead: nobody may be there to collect it."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ranks(records) -> list[tuple[str, ...]]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return [tuple(r["env"][n] for n in names) for r in records]


TWO_RANKS = [("0", "0", "2", "2"), ("1", "1", "2", "2")]


@pytest.mark.ranks(2)
def test_bash_starts_one_process_per_gpu_and_the_users_keys_come_last(bench):
    rc, out = bench.run("bash", bench.recipe(), "--algo.clip_high", "0.3")
    assert rc == 0, out
    assert ranks(bench.records()) == TWO_RANKS
    assert all(r["argv"] == ARGV and r["env"]["OMP_NUM_THREADS"] == "1" for r in bench.records())


@pytest.mark.ranks(2)
def test_a_preflight_is_of_the_processes_and_keys_of_the_run(bench):
    rc, out = bench.run("bash", bench.recipe(), "--preflight", "--algo.clip_high", "0.3")
    assert rc == 0, out
    assert ranks(bench.records("preflight")) == TWO_RANKS and not bench.records()
    assert all(r["argv"] == ["preflight", *ARGV[1:]] for r in bench.records("preflight"))


@pytest.mark.ranks(2)
def test_torchrun_with_a_process_per_gpu_becomes_the_program(bench):
    command = (*bench.torchrun, "--standalone", "--nproc-per-node", 2, bench.recipe())
    process = bench.start(*command, "--algo.clip_high", "0.3", SLEEP_S="1")
    wait_for(lambda: len(bench.records()) == 2)
    children = f"/proc/{process.pid}/task/{process.pid}/children"
    with open(children) as f:  # exec keeps the pid: torchrun's signals reach the program itself
        assert {r["pid"] for r in bench.records()} <= {int(pid) for pid in f.read().split()}
    rc, out = bench.end(process)
    assert rc == 0, out
    assert ranks(bench.records()) == TWO_RANKS
    assert bench.records()[0]["argv"] == ARGV


@pytest.mark.ranks(2)
def test_torchrun_with_its_default_of_one_process_fans_out(bench):
    rc, out = bench.run(*bench.torchrun, "--standalone", "--nnodes", 1, bench.recipe())
    assert rc == 0, out
    assert ranks(bench.records()) == TWO_RANKS


@pytest.mark.ranks(4)
def test_two_agents_with_one_process_each_fan_out_to_four(bench):
    port = free_ports()
    agents = []
    for node in (0, 1):
        where = ("--nnodes", 2, "--node-rank", node, "--master-addr", "127.0.0.1")
        agents.append(bench.start(*bench.torchrun, *where, "--master-port", port, bench.recipe()))
    for agent in agents:
        rc, out = bench.end(agent)
        assert rc == 0, out
    assert ranks(bench.records()) == [
        ("0", "0", "4", "2"),
        ("1", "1", "4", "2"),
        ("2", "0", "4", "2"),
        ("3", "1", "4", "2"),
    ]
    assert {r["env"]["MASTER_PORT"] for r in bench.records()} == {str(port + 1)}


SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "10007",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
}


@pytest.mark.parametrize(
    "told, port",
    [
        (SLURM, "20007"),
        (SLURM | {"HEAD_PORT": "4000"}, "4000"),
        ({"NODES": "2", "NODE_RANK": "1"}, "29500"),
        ({"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "RANK": "1", "WORLD_SIZE": "2"}, "5001"),
    ],
    ids=["srun", "srun with a port", "by hand", "torchrun"],
)
def test_one_process_per_node_starts_the_processes_of_its_node(bench, told, port):
    told = told | {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "5000"}
    [command] = bench.commands("bash", bench.recipe(), **told)
    where = "--nnodes 2 --node-rank 1 --master-addr 127.0.0.1 --master-port " + port
    start = f"--nproc-per-node 2 {where} --max-restarts 0 -m rlcore train".split()
    assert Path(command[0]).samefile(RECIPES / "torch_run.py")
    assert command[1 : 1 + len(start)] == start


def test_srun_asks_slurm_for_the_head(bench):
    scontrol = bench.folder / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames n[3-4]" ] && printf "n3\\nn4\\n"\n')
    scontrol.chmod(0o755)
    path = f"{bench.folder}:{bench.env['PATH']}"
    told = SLURM | {"HEAD_ADDR": "", "SLURM_STEP_NODELIST": "n[3-4]", "PATH": path}
    [command] = bench.commands("bash", bench.recipe(), **told)
    assert command[command.index("--master-addr") + 1] == "n3"


def test_a_wrong_number_of_processes_is_refused_with_the_repair(bench):
    told = {"LOCAL_WORLD_SIZE": "3", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "3"}
    rc, out = bench.run("bash", bench.recipe(), **told)
    assert rc == 2
    assert (
        "3 processes on this node and GPUS_PER_NODE is 2: give torchrun --nproc-per-node 2" in out
    )
    assert "GPUS_PER_NODE=3" in out
    assert bench.records() == []


@pytest.mark.parametrize(
    "env, sentence",
    [
        ({"NODE_RANK": "1", "HEAD_ADDR": ""}, "NODE_RANK=1 without HEAD_ADDR"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "srun started 8 tasks on 2 nodes: give it"),
        ({"PYTHON": "/nowhere/python"}, "/nowhere/python does not exist: run bash tools/setup.sh"),
        ({"PYTHON": "", "RLCORE_VENV": "/nowhere"}, "/nowhere/bin/python does not exist: run bash"),
        ({"PYTHON": "/usr/bin/env -S no"}, "/usr/bin/env -S no does not exist"),
    ],
)
def test_a_start_that_cannot_work_ends_with_one_sentence(bench, env, sentence):
    if "NODE_RANK" not in env:
        env = SLURM | env
    rc, out = bench.run("bash", bench.recipe(), **env)
    assert rc == 2
    assert sentence in out
    assert len(out.splitlines()) == 1


def test_a_python_without_the_packages_is_refused_by_their_names(bench):
    bare = bench.folder / "python"
    bare.write_text("#!/bin/sh\necho megatron tyro\n")  # what find_spec would miss
    bare.chmod(0o755)
    rc, out = bench.run("bash", bench.recipe(), PYTHON=str(bare))
    assert rc == 2
    assert f"{bare} has no megatron, tyro: run bash tools/setup.sh" in out


def test_the_interactive_step_of_slurm_is_not_srun(bench):
    told = SLURM | {"SLURM_STEP_ID": "4294967290"}
    [command] = bench.commands("bash", bench.recipe(), **told)
    assert "--standalone" in command


@pytest.mark.ranks(2)
def test_a_failing_rank_gives_a_failing_exit_status(bench):
    start = (*bench.torchrun, "--standalone", "--nproc-per-node", 2)
    rc, out = bench.run(*start, bench.recipe(), EXIT_1="3")
    assert rc != 0
    assert "exitcode  : 3" in out


@pytest.mark.ranks(2)
def test_a_failing_rank_is_one_line_and_its_exit_status(bench, tmp_path):
    """What the rank itself says stands right above it, and not above a page of torchrun's, whose
    temporary folder is gone."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    rc, out = bench.run("bash", bench.recipe(), EXIT_1="3", TMPDIR=str(temporary))
    assert rc == 3
    assert list(temporary.iterdir()) == []
    assert "rlcore: rank 1 ended with code 3; the run has ended" in out
    assert "Traceback" not in out and "FAILED" not in out


@pytest.mark.ranks(2)
@pytest.mark.parametrize("nproc", [1, 2])
def test_sigterm_to_torchrun_leaves_no_worker(bench, nproc):
    command = (*bench.torchrun, "--standalone", "--nproc-per-node", nproc, bench.recipe())
    process = bench.start(*command, SLEEP_S="300")
    wait_for(lambda: len(bench.records()) == 2)
    workers = [r["pid"] for r in bench.records()]
    assert all(map(alive, workers))
    process.send_signal(signal.SIGTERM)
    rc, _ = bench.end(process, 60)
    assert rc != 0
    wait_for(lambda: not any(map(alive, workers)), 10)


@pytest.mark.parametrize(
    "told, nodes",
    [
        ({"NODES": "4"}, "4"),
        ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"}, "2"),
        ({"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "4"}, "4"),
    ],
)
def test_dry_run_is_one_process_that_knows_the_full_world(bench, told, nodes):
    if "LOCAL_WORLD_SIZE" in told:
        told = told | {"RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}
    rc, out = bench.run("bash", bench.recipe(), "--dry-run", GPUS_PER_NODE="8", **told)
    assert rc == 0, out
    [record] = bench.records()
    assert (record["env"]["NODES"], record["env"]["GPUS_PER_NODE"]) == (nodes, "8")
    assert not {"RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"} & record["env"].keys()


def test_dry_run_on_other_ranks_of_torchrun_ends_at_once(bench):
    told = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
    assert bench.run("bash", bench.recipe(), "--dry-run", **told) == (0, "")
    assert bench.records() == []


# ---- the model that a recipe makes before it starts


@pytest.mark.ranks(2)
def test_the_tiny_model_of_a_seed_is_made_once(bench):
    recipe = bench.recipe("tiny_qwen3")
    rc, out = bench.run("bash", recipe, "--run.seed", "3")
    assert rc == 0, out
    made = bench.records("tiny")
    assert ranks(made) == TWO_RANKS
    assert made[0]["argv"][:3] == ["tiny", "--seed", "3"]
    assert (bench.folder / "runs/models/label-s3").is_dir()

    assert len(bench.commands("bash", recipe, "--run.seed=3")) == 1
    assert len(bench.records()) == 2


@pytest.mark.ranks(2)
def test_every_process_of_torchrun_waits_until_one_has_made_the_model(bench):
    command = (*bench.torchrun, "--standalone", "--nproc-per-node", 2, bench.recipe("tiny_qwen3"))
    rc, out = bench.run(*command)
    assert rc == 0, out
    assert ranks(bench.records("tiny")) == TWO_RANKS
    assert ranks(bench.records()) == TWO_RANKS
    models = bench.folder / "runs/models"
    assert sorted(p.name for p in models.iterdir()) == ["label-s0", "label-s0.lock"]


def test_a_model_of_the_users_own_is_not_made(bench):
    [command] = bench.commands("bash", bench.recipe("tiny_qwen3"), "--model.path", "/some/model")
    assert "train" in command


@pytest.mark.ranks(2)
def test_a_warm_start_that_fails_ends_the_recipe(bench):
    rc, out = bench.run("bash", bench.recipe("tiny_qwen3"), EXIT_0="3")
    assert rc != 0
    assert bench.records("tiny")  # the other rank may be ended before it has begun
    assert bench.records() == []
    assert not (bench.folder / "runs/models/label-s0").exists()


@pytest.mark.ranks(2)
def test_sigterm_during_the_warm_start_leaves_no_worker(bench):
    process = bench.start("bash", bench.recipe("tiny_qwen3"), SLEEP_S="300")
    wait_for(lambda: len(bench.records("tiny")) == 2)
    process.send_signal(signal.SIGTERM)
    rc, _ = bench.end(process, 60)
    assert rc == 143
    workers = [r["pid"] for r in bench.records("tiny")]
    wait_for(lambda: not any(map(alive, workers)), 10)


def test_a_start_of_one_node_of_several_says_so(bench) -> None:
    rc, out = bench.run("bash", bench.recipe(), NODES="2")
    assert rc == 0 and "this start is of one node, and the recipe is laid out for 2" in out
    rc, out = bench.run("bash", bench.recipe(), NODES="1")
    assert rc == 0 and "laid out" not in out

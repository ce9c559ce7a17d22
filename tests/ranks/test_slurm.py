"""The tiny recipe under a real Slurm with two nodes, both on this machine."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import runs, slurm

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        bool(slurm.missing()),
        reason=f"no {slurm.missing()}: bash tools/setup.sh --slurm",
    ),
]

STEPS = 60
JOB = runs.ROOT / "recipes" / "slurm" / "job.sbatch"
RECIPE = runs.ROOT / "recipes" / "grpo_tiny.sh"
SMALL = (
    *("--model.random_init", "--data.num_val_prompts", 8, "--data.prompts_per_step", 4),
    *("--rollout.samples_per_prompt", 4, "--rollout.max_tokens", 24, "--eval.every", 0),
    *("--train.samples_per_update", 0, "--checkpoint.no_export_hf"),
    *("--log.no_tensorboard", "--log.no_plot"),
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


class Job:
    """The tiny recipe as a user submits it, over both nodes, a process on each."""

    def __init__(self, cluster: slurm.Slurm, folder: Path, *keys: object, flags: tuple = ()):
        self.cluster, self.run = cluster, folder / "runs" / "x"
        env = {
            "MODEL_PATH": str(runs.tiny_model(folder / "model")),
            "GPUS_PER_NODE": "1",
            "HEAD_ADDR": "127.0.0.1",  # the nodes' names are no hosts
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(runs.ROOT),
            "RLCORE_VENV": os.environ.get("RLCORE_VENV", str(runs.ROOT / ".venv")),
        }
        where = "--run.dir", folder / "runs", "--run.name", "x"
        self.number = cluster.submit(
            *("--nodes", 2, "--gres", "none", *flags, JOB, RECIPE, *SMALL, *where, *keys),
            cwd=folder,
            **env,
        )
        self.said = folder / f"slurm-{self.number}.log"

    def until(self, *states: str) -> None:
        """Wait until the job is in a state."""
        self.cluster.until(
            lambda: self.cluster.job(self.number)["JobState"] in states, 200, self.said
        )

    def steps(self) -> list[int]:
        file = self.run / "metrics.jsonl"
        return list(runs.rows(self.run)) if file.exists() else []


def preempt(cluster: slurm.Slurm, folder: Path) -> int:
    """Another job takes the nodes for a second."""
    high = "--partition", "high", "--nodes", 2, "--output", folder / "other.txt"
    return cluster.submit(*high, "--wrap", "sleep 1", cwd=folder)


def test_a_job_over_two_nodes_is_preempted_saves_is_queued_again_and_goes_on(
    cluster: slurm.Slurm, tmp_path: Path
) -> None:
    """In a partition with GraceTime, where Slurm itself would take it for finished."""
    job = Job(cluster, tmp_path, "--run.steps", STEPS)
    cluster.until(lambda: 2 in job.steps(), 200, job.said)
    other = preempt(cluster, tmp_path)
    job.until("PENDING")
    job.until("COMPLETED", "FAILED", "CANCELLED")
    text, told = job.said.read_text(), cluster.job(job.number)
    assert told["JobState"] == "COMPLETED", text[-3000:]
    assert told["Restarts"] == "1" and told["NodeList"] == "n[1-2]"
    assert cluster.job(other)["JobState"] == "COMPLETED"
    [last] = re.findall(rf"ended by SIGTERM after step (\d+) of {STEPS}, which is saved", text)
    assert f"{last} of {STEPS} steps done" in text  # resumed
    assert job.steps() == list(range(STEPS + 1))


@pytest.mark.slow
def test_slurm_queues_it_again_itself_and_a_cancelled_job_stays_cancelled(
    cluster: slurm.Slurm, tmp_path: Path
) -> None:
    job = Job(cluster, tmp_path, "--run.steps", 500, flags=("--partition", "rude"))
    cluster.until(lambda: 2 in job.steps(), 200, job.said)
    preempt(cluster, tmp_path)
    job.until("PENDING")
    before = job.steps()[-1]
    cluster.until(lambda: before + 3 in job.steps(), 200, job.said)
    cluster.run("scancel", job.number)
    job.until("CANCELLED")
    cluster.until(lambda: not cluster.run("squeue", "--noheader").strip(), 60, job.said)
    told, text = cluster.job(job.number), job.said.read_text()
    assert told["JobState"] == "CANCELLED" and told["Restarts"] == "1", text[-3000:]
    assert text.count("of 500, which is saved") == 2
    assert job.steps() == list(range(job.steps()[-1] + 1))

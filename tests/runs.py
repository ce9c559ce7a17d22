"""Runs of the whole program, for tests: many runs after each other in one process per rank, since
to start a process takes longer than to run a tiny model.
"""

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from tests import forks
from tests.forks import Fork

ROOT = Path(__file__).resolve().parents[1]

Job = dict[str, Any]
"""`name` and `argv` of `rlcore train`; `ranks`: how many of the gang take part; `file_bytes`: the
longest file that it can write; `before`: a command to run first; `path`: folders to import from;
`within`: `module:function` of a context manager around it, and its arguments; `programs`: engine
children are programs, as in a real run, and can be found by their command line; `engine`: what
builds the engine of a child process, instead of the torch engine's own."""


def tiny_model(folder: Path, task: str = "label", **changes: Any) -> Path:
    """config.json and tokenizer of a model for a generated task; weights come from the seed."""
    from rlcore.cli.tiny import write_tokenizer
    from rlcore.data import label_task
    from tests import kit

    folder.mkdir(parents=True, exist_ok=True)
    config = kit.tiny_config("qwen3") | {
        "model_type": "qwen3",
        "vocab_size": write_tokenizer(task, folder),
        "num_hidden_layers": 2,
        "initializer_range": 0.1,
        "max_position_embeddings": 256,
        "eos_token_id": label_task.EOS,
        "pad_token_id": label_task.PAD,
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def arguments(model: Path, runs: Path, name: str, *more: object) -> list[str]:
    """A run that takes part of a second, with rewards that differ. The last of a key wins."""
    settings = {
        "run.dir": runs,
        "run.name": name,
        "run.steps": 4,
        "model.path": model,
        "model.dtype": "float32",
        "data.train": "label",
        "data.val": "label",
        "data.num_val_prompts": 8,
        "data.prompts_per_step": 4,
        "rollout.samples_per_prompt": 4,
        "rollout.max_tokens": 24,
        "rollout.max_running_requests": 5,
        "train.lr": 1e-3,
        "train.tokens_per_micro_batch": 256,
        "eval.every": 0,
        "cluster.timeout_s": 60,
    }
    words = ["--model.random_init", "--reward", "tests.scores.variety"]
    words += ["--log.no_tensorboard", "--log.no_plot"]
    for key, value in settings.items():
        words += [f"--{key}", str(value)]
    return [*words, *map(str, more)]


class Gang:
    """What became of some jobs on some ranks."""

    def __init__(self, folder: Path, codes: list[int | None]):
        self.folder = folder
        self.codes = codes
        """Exit codes of the processes; a negative one is a signal."""

    def code(self, job: str, rank: int = 0) -> int:
        """What `rlcore train` returned; 99 where it raised."""
        return json.loads((self.folder / f"codes{rank}.json").read_text())[job]

    def text(self, job: str, rank: int = 0) -> str:
        """What the job said on the terminal."""
        return (self.folder / f"{job}.{rank}.txt").read_text()

    def check(self, job: str, ranks: int = 1) -> None:
        """The job went well everywhere."""
        for rank in range(ranks):
            assert self.code(job, rank) == 0, (job, rank, self.text(job, rank)[-4000:])


class Running:
    """A gang at work."""

    def __init__(self, n: int, jobs: Sequence[Job], folder: Path, nodes: Sequence[str] = ()):
        """`nodes`: what the node of each rank is called."""
        from tests import kit

        self.folder = folder
        folder.mkdir(parents=True)
        (folder / "jobs.json").write_text(json.dumps(with_ports(n, jobs)))
        launcher = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "TORCHELASTIC_")
        env = {k: v for k, v in os.environ.items() if not k.startswith(launcher)}
        env |= {"PYTHONPATH": kit.python_path(), "OMP_NUM_THREADS": "1", "GANG": str(n)}
        env["CUDA_VISIBLE_DEVICES"] = ""  # n ranks of one GPU make no NCCL world
        self.processes = []
        for rank in range(n):
            of_rank = env | {"GANG_RANK": str(rank)}
            if nodes:
                of_rank["RLCORE_NODE"] = nodes[rank]
            self.processes.append(Fork(_rank, (folder,), of_rank, folder / f"start.{rank}.txt"))

    def poll(self) -> Gang | None:
        """What became of it, once it is over. When one rank dies the others are ended, as torchrun
        does."""
        codes = [p.poll() for p in self.processes]
        if None in codes and not any(codes):
            return None
        self.kill()
        return Gang(self.folder, [p.returncode for p in self.processes])

    def kill(self) -> None:
        """End what still runs, at once."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def wait(self, timeout_s: float = 280.0) -> Gang:
        """The end of all ranks; AssertionError past the time. Nothing is left behind."""
        end = time.monotonic() + timeout_s
        try:
            while (gang := self.poll()) is None:
                if time.monotonic() > end:
                    texts = [p.read_text()[-1500:] for p in sorted(self.folder.glob("*.txt"))]
                    raise AssertionError("not done in time\n" + "\n----\n".join(texts))
                time.sleep(0.02)
        finally:
            self.kill()
        return gang


def run(n: int, jobs: Sequence[Job], folder: Path, timeout_s: float = 280.0) -> Gang:
    """Run `jobs` one after the other on n ranks."""
    return Running(n, jobs, folder).wait(timeout_s)


def with_ports(n: int, jobs: Sequence[Job]) -> list[Job]:
    """Each job with the port where its ranks meet. A job may begin minutes from now, and its rank 1
    waits at the port before rank 0 is there: it must be none that the system hands out meanwhile,
    such as to the sockets of the jobs before."""
    from rlcore.rollout.transport import free_port

    return [job | {"port": free_port() if n > 1 else 0} for job in jobs]


def rows(run_folder: Path) -> dict[int, dict[str, Any]]:
    """The rows of metrics.jsonl by step, without a line that a run is still writing; AssertionError
    where a step is there twice."""
    text = (run_folder / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps)), steps
    return {line.pop("step"): line for line in lines}


def same(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what the clock and the machine had a say in."""
    from rlcore.metrics.names import CLOCK

    return {name: value for name, value in row.items() if not name.startswith(CLOCK)}


def checkpoint(run_folder: Path, step: int) -> dict[str, Any]:
    """Everything that a checkpoint holds, flat: tensors, bytes, and the rest of the state."""
    from safetensors.torch import load_file

    folder = run_folder / "checkpoints" / f"step_{step:06d}"
    found: dict[str, Any] = {}
    for file in sorted((folder / "learner").glob("*.safetensors")):
        found |= load_file(file)
    assert found
    found["common"] = json.loads((folder / "learner" / "checkpoint.json").read_text())
    found["state"] = json.loads((folder / "state.json").read_text())
    return found


# ---- one rank


def _rank(folder: Path) -> None:
    from rlcore.cli import train
    from rlcore.cli.builders import engine

    rank, codes = int(os.environ["GANG_RANK"]), {}
    usual = engine.TORCH_ENGINE
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file that is too large is an error like any
    for job in json.loads((folder / "jobs.json").read_text()):
        n = job.get("ranks", int(os.environ["GANG"]))
        if rank >= n:
            continue
        _join(rank, n, job["port"])
        with open(folder / f"{job['name']}.{rank}.txt", "wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        sys.path[:0] = job.get("path", [])
        engine.TORCH_ENGINE = job.get("engine", usual)
        if "before" in job:
            subprocess.run(job["before"], check=True)
        limit = job.get("file_bytes", resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            with _within(*job.get("within", ())), _engines(job):
                codes[job["name"]] = train.main(job["argv"])
        except BaseException:
            traceback.print_exc()
            codes[job["name"]] = 99
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        sys.stdout.flush()
        _leave()
        (folder / f"codes{rank}.json").write_text(json.dumps(codes))


def _engines(job: Job) -> AbstractContextManager[Any]:
    return nullcontext() if job.get("programs") else forks.forked_engines()


def _within(target: str = "", *args: Any) -> AbstractContextManager[Any]:
    if not target:
        return nullcontext()
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)(*args)


def _join(rank: int, n: int, port: int) -> None:
    """The variables that torchrun would set."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "MASTER_PORT": port}
    for name, value in names.items():
        if n > 1:
            os.environ[name] = str(value)
        else:
            os.environ.pop(name, None)
    os.environ["MASTER_ADDR"] = "127.0.0.1"


def _leave() -> None:
    """Drop the world of a job that failed."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()

"""A stand-in for `python -m rlcore` that writes down how it was started."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"

STAND_IN = """
import json, os, pathlib, sys, time
folder = pathlib.Path(os.environ["RECORD"])
command = sys.argv[1]
if command == "tiny":
    out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
    out.mkdir(exist_ok=True)
rank = os.environ.get("RANK", "0")
text = json.dumps({"argv": sys.argv[1:], "pid": os.getpid(), "env": dict(os.environ)})
part = folder / f"{command}-{rank}.part"
part.write_text(text)
part.rename(folder / f"{command}-{rank}.json")
time.sleep(float(os.environ.get("SLEEP_S", "0")))
sys.exit(int(os.environ.get(f"EXIT_{rank}", "0")))
"""

# config.json of Qwen2.5-0.5B.
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
    "eos_token_id": 151643,
}


class Bench:
    """A folder to start recipes in, with the stand-in ahead of the real package."""

    torchrun = (sys.executable, "-m", "torch.distributed.run")

    def __init__(self, folder: Path):
        self.folder, self.record = folder, folder / "record"
        self.record.mkdir()
        package = folder / "fake" / "rlcore"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(STAND_IN)
        drop = (
            "TORCHELASTIC_",
            "SLURM_",
            "RLCORE_",
            "LOCAL_",
            "NODE",
            "GPUS_",
            "RANK",
            "WORLD_SIZE",
            "MASTER_",
        )
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
        self.env |= {
            "PYTHONPATH": str(folder / "fake"),
            "RECORD": str(self.record),
            "PYTHON": sys.executable,
            "CUDA_VISIBLE_DEVICES": "",
            "HEAD_ADDR": "127.0.0.1",
        }

    def recipe(self, *models: str) -> Path:
        """A small recipe of the usual form: two processes per node."""
        path = self.folder / "probe.sh"
        tail = (RECIPES / "grpo_tiny.sh").read_text().partition("\n: '''\n")[2]
        sources = "".join(f'source "$RECIPES/models/{m}.sh"\n' for m in models)
        path.write_text(
            "#!/usr/bin/env bash\n__doc__=r'''A probe.\n'\n"
            f'source "{RECIPES}/common.sh"\nGPUS_PER_NODE=${{GPUS_PER_NODE:-2}}\n{sources}'
            f"launch --run.steps 7 \"$@\"\n: '''\n{tail}"
        )
        return path

    def commands(self, *command: object, **env: str) -> list[list[str]]:
        """The Python commands that a start comes to; none is run but the check of the packages."""
        echo = self.folder / "python"
        check = f'[ "$1" != -c ] || exec {sys.executable} "$@"'
        echo.write_text(
            f"#!/bin/sh\n{check}\nprintf 'python\\036'\nprintf '%s\\036' \"$@\"\necho\n"
        )
        echo.chmod(0o755)
        rc, out = self.run(*command, **{"PYTHON": str(echo)} | env)
        assert rc == 0, out
        return [line.split("\036")[1:-1] for line in out.split("\n")[:-1]]

    def start(self, *command: object, **env: str) -> subprocess.Popen:
        """Start a command in a session of its own."""
        return subprocess.Popen(
            [str(c) for c in command],
            env=self.env | env,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *command: object, timeout_s: float = 120, **env: str) -> tuple[int, str]:
        """Exit status and output of a command."""
        process = self.start(*command, **env)
        return self.end(process, timeout_s)

    def end(self, process: subprocess.Popen, timeout_s: float = 120) -> tuple[int, str]:
        """Wait for a started command; past the time it and all that it started are killed."""
        try:
            out, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, out

    def records(self, command: str = "train") -> list[dict]:
        """What every rank of the stand-in wrote down, by rank."""
        found = [json.loads(p.read_text()) for p in self.record.glob(f"{command}-*.json")]
        return sorted(found, key=lambda r: int(r["env"].get("RANK", 0)))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)

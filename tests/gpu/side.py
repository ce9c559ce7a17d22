"""What the GPU tests share: learners, their state, and what they are compared with on the CPU.

Nothing here runs at import: files are collected where there is no GPU.
"""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import kit, runs
from tests.ranks import learner_ranks as ranks

DEVICE = torch.device(os.environ.get("RLCORE_GPU_TESTS_DEVICE", "cuda:0"))
"""Where the tests run. `tools/gpu_check.sh --cpu` sets cpu: their logic without a GPU."""

needs_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="needs an NVIDIA GPU")
"""Mark of a test whose logic needs a GPU: its memory, streams, kernels or handles."""

_PRETEND = "RLCORE_PRETEND_CUDA" in os.environ

needs_real_gpu = pytest.mark.skipif(
    _PRETEND, reason="a pretend device has no CUDA graphs, tensor cores or Triton"
)
"""Mark of a test that captures CUDA graphs, as SGLang does, too, multiplies 16-bit numbers into
32 bits, or has kernels of Triton."""

needs_kernels = pytest.mark.skipif(
    _PRETEND and "tests.pretend.native" not in sys.modules,
    reason="a pretend device runs no kernels; -p tests.pretend.native has those of the CPU",
)
"""Mark of a test that needs the native build for the device."""

needs_te = pytest.mark.skipif(
    find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
)

OFFLOAD = ("--train.offload", "--model.dtype", "bfloat16")
"""Keys of a run in which engine and learner take turns on the GPU."""


@contextmanager
def learner(layout: Mapping[str, Any] | None = None, **case: Any) -> Iterator[Any]:
    """A tiny learner in a world of one on this machine's device, whose bits repeat."""
    made = ranks.make({"deterministic": True, **(layout or {})}, **case)
    try:
        yield made
    finally:
        made.close()
        del made
        gc.collect()


def parity(rank: int, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What each case shows in two updates; by `kit.run_ranks` on the CPU, by a call on the GPU."""
    found = {}
    for name, case in cases.items():
        with learner(**case) as made:
            found[name] = ranks.observe(made, 2)
    return found


def on_cpu(function: str, **args: Any) -> Any:
    """`tests.<module>:<function>(0, **args)` in a process that sees no GPU."""
    return kit.run_ranks(1, f"tests.{function}", args, timeout_s=200)[0]


def state(made: Any) -> dict[str, Tensor]:
    """Copies of everything that training changes: weights, main weights, moments and steps."""
    found = {f"weight {i}": p for i, p in enumerate(made._parameters())}
    for i, part in enumerate(made._optimizer.chained_optimizers):
        inner = part.optimizer
        for k, p in enumerate(p for group in inner.param_groups for p in group["params"]):
            found[f"main {i}.{k}"] = p
            found |= {f"{name} {i}.{k}": value for name, value in inner.state[p].items()}
    tensors = {name: torch.as_tensor(value) for name, value in found.items()}
    return {name: t.detach().cpu().clone() for name, t in tensors.items()}


def train(folder: Path, name: str, *more: object) -> str:
    """Run `rlcore train` on the model in `folder`; return its output, or raise AssertionError with
    the output if the run fails."""
    argv = runs.arguments(folder / "model", folder / "runs", name, *more)
    launcher = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "TORCHELASTIC_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(launcher)}
    done = subprocess.run(
        [sys.executable, "-m", "rlcore", "train", *argv],
        env=env | {"PYTHONPATH": kit.python_path()},
        cwd=kit.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def weights(made: Any) -> dict[str, Tensor]:
    """The export, on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in made.export()}


def main_parameters(made: Any) -> list[Tensor]:
    """What the optimizer steps on."""
    return [p for part in made._optimizer.chained_optimizers for p in part.get_parameters()]


def storage_bytes(tensors: Iterator[Tensor]) -> int:
    """Device memory behind some tensors; what they share counts once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def apart(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm of `theirs`."""
    ours, theirs = ours.detach().cpu().double(), theirs.detach().cpu().double()
    return float((ours - theirs).norm() / theirs.norm())

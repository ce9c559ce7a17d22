"""Check one machine: driver, GPUs, native kernels, CUDA toolkit, C library, sandbox."""

import os

import torch

from rlcore.cli.checks import CheckResult, attempt
from rlcore.config.schema import Config, reward_sections
from rlcore.ops import native
from rlcore.rollout.sglang_engine import cuda
from rlcore.sandbox import isolation
from rlcore.utils import nvidia

GLIBC = (2, 34)
"""Oldest C library for SGLang's CUDA wheels (manylinux_2_34)."""
IN_USE_GB = 2.0
"""GPU memory in GB above which another program must be using the GPU; CUDA contexts need less."""


def check(cfg: Config) -> list[CheckResult]:
    """Return the results of checks that one rank of a node makes; `driver` and `gpus` are checks of
    every rank."""
    toolkit = dict(os.environ)
    return [
        memory(),
        kernels(),
        libcudart(cfg, toolkit),
        nvcc(cfg, toolkit),
        compiler(cfg, toolkit),
        glibc(cfg),
        sandbox(cfg),
    ]


def driver() -> CheckResult:
    """Check that the driver supports the CUDA version of torch, and that torch finds a GPU."""
    version, found = torch.version.cuda, nvidia.driver_version() or "of unknown version"
    if not nvidia.has_gpu():
        text = "no NVIDIA GPU is visible, so the run uses the CPU"
        if not version or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            return CheckResult("driver", "SKIP", text)
        remedy = "start the container with its GPUs, or set CUDA_VISIBLE_DEVICES to nothing"
        return CheckResult(
            "driver", "WARN", f"torch is built for CUDA {version}, but {text}; {remedy}"
        )
    if not version:
        return CheckResult(
            "driver",
            "WARN",
            f"torch {torch.__version__} is built for the CPU, so the run does not use the GPUs of "
            "this machine; run bash tools/setup.sh --cuda",
        )
    try:
        newest = nvidia.driver_cuda()
    except RuntimeError as error:
        return CheckResult(
            "driver",
            "FAIL",
            f"the NVIDIA driver does not load ({error}); install it, or start the container with "
            "its GPUs",
        )
    supports = f"driver {found} supports CUDA up to {newest[0]}.{newest[1]}"
    major = int(version.partition(".")[0])
    if newest[0] < major:
        return CheckResult(
            "driver",
            "FAIL",
            f"{supports}, but torch is built for CUDA {version}; install a driver for CUDA "
            f"{major}, or a torch build for CUDA {newest[0]} (RLCORE_TORCH_INDEX of "
            "tools/setup.sh)",
        )
    if not torch.cuda.is_available():
        return CheckResult(
            "driver",
            "FAIL",
            f"{supports}, but torch finds no GPU ({_cuda_error()}); check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES",
        )
    return CheckResult("driver", "PASS", f"{supports}; torch is built for CUDA {version}")


def _cuda_error() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return "no error"


def gpus() -> CheckResult:
    """Check that each process of this node has a GPU; ranks of a node may see different GPUs."""
    if not torch.cuda.is_available():
        return CheckResult("gpus", "SKIP", "torch finds no GPU")
    count, mask = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    processes = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("GPUS_PER_NODE") or 0)
    seen = "visible" if mask is None else f"visible (CUDA_VISIBLE_DEVICES={mask})"
    text = f"{count} {seen}, {processes} needed" if processes else f"{count} {seen}"
    if count < processes:
        remedy = f"set GPUS_PER_NODE={count}, or let every process see all GPUs of its node"
        return CheckResult("gpus", "FAIL", f"{text}; {remedy}")
    if processes and count > processes:
        remedy = f"to use all, set GPUS_PER_NODE={count}"
        return CheckResult("gpus", "WARN", f"{text}; {remedy}")
    return CheckResult("gpus", "PASS", text)


def memory() -> CheckResult:
    """Check that no other program uses the GPUs' memory."""
    if not torch.cuda.is_available():
        return CheckResult("memory", "SKIP", "torch finds no GPU")
    try:
        found = nvidia.visible_gpus()
    except RuntimeError as error:
        return CheckResult("memory", "SKIP", f"{error}, so the memory in use is not known")
    taken = [
        f"GPU {g.index}: {g.used_gb:.1f} of {g.total_gb:.0f} GB"
        + (f" by {', '.join(g.processes)}" if g.processes else "")
        for g in found
        if g.used_gb > IN_USE_GB
    ]
    if taken:
        remedy = "end the other programs, or leave these GPUs out of CUDA_VISIBLE_DEVICES"
        return CheckResult("memory", "WARN", f"in use are {'; '.join(taken)}; {remedy}")
    kinds = sorted({f"{g.name} with {g.total_gb:.0f} GB" for g in found})
    return CheckResult("memory", "PASS", f"free on all GPUs: {', '.join(kinds)}")


def kernels() -> CheckResult:
    """Check that rlcore's CUDA kernels run on this machine's GPU."""
    if not torch.cuda.is_available():
        return CheckResult("kernels", "SKIP", "torch finds no GPU")
    if os.environ.get("RLCORE_NATIVE") == "0":
        return CheckResult("kernels", "WARN", "switched off by RLCORE_NATIVE=0; unset it")
    if why := native.obstacle("cuda"):
        return CheckResult("kernels", "FAIL", f"{why}; {native.REMEDY}")
    return CheckResult("kernels", "PASS", "rlcore's CUDA kernels run on this GPU")


def libcudart(cfg: Config, env: dict[str, str]) -> CheckResult:
    """Check that SGLang's processes can load the CUDA runtime library. Sets `env` for it."""
    if skipped := _without_sglang("libcudart", cfg):
        return skipped
    return attempt("libcudart", lambda: f"{cuda.set_runtime(env, _major())} loads")


def nvcc(cfg: Config, env: dict[str, str]) -> CheckResult:
    """Check that nvcc is of torch's CUDA version."""
    if skipped := _without_sglang("nvcc", cfg):
        return skipped
    return attempt("nvcc", lambda: f"{cuda.set_toolkit(env, _major())} is of CUDA {_major()}")


def compiler(cfg: Config, env: dict[str, str]) -> CheckResult:
    """Check that there is a C++ compiler."""
    if skipped := _without_sglang("c++", cfg):
        return skipped
    return attempt("c++", lambda: cuda.set_compiler(env))


def glibc(cfg: Config) -> CheckResult:
    """Check that the C library is new enough for SGLang's wheels."""
    if skipped := _without_sglang("glibc", cfg):
        return skipped
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        found = tuple(map(int, version.split(".")[:2]))
    except (ValueError, OSError):  # the C library is not glibc
        name, version, found = "another C library than glibc", "", ()
    wanted = ".".join(map(str, GLIBC))
    if found < GLIBC:
        return CheckResult(
            "glibc",
            "FAIL",
            f"{name} {version}".strip() + f", but SGLang's wheels need {wanted}; use Ubuntu 22.04, "
            "Debian 12, RHEL 9 or newer, or --rollout.engine torch",
        )
    return CheckResult("glibc", "PASS", f"{name} {version}, at least {wanted}")


def _without_sglang(check: str, cfg: Config) -> CheckResult | None:
    """Return SKIP if the run does not use SGLang on GPUs, else None."""
    if cfg.rollout.engine != "sglang":
        return CheckResult(check, "SKIP", "only --rollout.engine sglang needs it")
    if not torch.cuda.is_available():
        return CheckResult(check, "SKIP", "only SGLang on GPUs needs it")
    return None


def _major() -> str:
    return str(torch.version.cuda).partition(".")[0]


def sandbox(cfg: Config) -> CheckResult:
    """Find the grade of isolation, and compare it with what rewards and environment require."""
    wanted: list[isolation.IsolationGrade] = [
        section.require_isolation
        for section in (*reward_sections(cfg.reward).values(), cfg.env)
        if hasattr(section, "require_isolation")
    ]
    try:
        grade = isolation.grade(max(wanted, key=isolation.GRADES.index, default="fallback"))
    except (RuntimeError, TimeoutError) as error:
        return CheckResult("sandbox", "FAIL" if wanted else "SKIP", str(error))
    if not wanted:
        return CheckResult("sandbox", "SKIP", f"the run uses none; here: {grade.sentence}")
    if grade.name == "fallback":
        remedy = "install bubblewrap and allow user namespaces (rlcore/sandbox/README.md)"
        return CheckResult("sandbox", "WARN", f"{grade.sentence}; {remedy}")
    return CheckResult("sandbox", "PASS", grade.sentence)

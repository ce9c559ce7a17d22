"""Check the version of Megatron-Core, and make Megatron run without CUDA.

Every `megatron.core.*` module gets, instead of `torch`, a proxy in which `torch.cuda.*` and
`device="cuda"` mean the CPU. Other modules see the real torch, except that `Tensor.type` and
`Tensor.cuda` are patched to behave differently for calls from Megatron. With CUDA nothing is
changed. The shim uses private functions of Megatron, so it requires one exact version.
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from rlcore.utils.errors import ConfigError

VERSION = "0.16.1"
CPU = torch.device("cpu")


def prepare() -> None:
    """Check the installation and, without CUDA, install the shim. Idempotent.

    Raises:
        ConfigError: megatron-core has another version, or psutil is missing.
    """
    _check_installation()
    # Hide Megatron's import warnings about optional packages, which the local layers do not need.
    warnings.filterwarnings(
        "ignore",
        message=r"(Apex|Transformer Engine and Apex) (is|are) not installed",
        module=r"megatron\.core",
    )
    # Hide warnings about deprecated torch functions that Megatron calls; users cannot act on them.
    for message in (r"`load_state_dict` is deprecated", r"Please use DTensor instead"):
        warnings.filterwarnings("ignore", message=message, category=FutureWarning)
    warnings.filterwarnings(
        "ignore",
        message=r"`torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
        category=FutureWarning,
    )
    # Megatron needs CUDA_DEVICE_MAX_CONNECTIONS for its kernel order and warns if it is unset.
    # CUDA reads the variable when the first context is created, so set the variable early.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Without CUBLAS_WORKSPACE_CONFIG, cuBLAS is not reproducible and torch warns at every matmul.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.cuda.is_available():
        return
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    finder = _Finder(_proxy_of_torch())
    sys.meta_path.insert(0, finder)
    for name, module in list(sys.modules.items()):
        if name == "megatron.core" or name.startswith("megatron.core."):
            finder.fix(module)
    _patch_tensor_methods()


def _check_installation() -> None:
    try:
        found = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != VERSION:
        raise ConfigError(
            f"megatron-core {found}: rlcore needs exactly {VERSION}; "
            f"run tools/setup.sh or pip install megatron-core=={VERSION}"
        )
    if importlib.util.find_spec("psutil") is None:
        raise ConfigError(
            "psutil is missing: without it Megatron's checkpoint writer hangs; pip install psutil"
        )


class _Null:
    """Stand-in for a CUDA stream or event; all methods do nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., "_Null"]:
        return _Null

    def __enter__(self) -> "_Null":
        return self

    def __exit__(self, *exc: object) -> None: ...


class _Proxy(types.ModuleType):
    """Proxy for a module that replaces some of the module's names."""

    def __init__(self, real: types.ModuleType, **replaced: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(replaced, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _on_cpu(function: Callable) -> Callable:
    """Wrap a tensor factory so that `device="cuda"` or a device number means the CPU."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and (isinstance(device, int) or str(device).startswith("cuda")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return wrapped


def _proxy_of_torch() -> _Proxy:
    random_state = {
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    }
    cuda = _Proxy(
        torch.cuda,
        current_device=lambda: CPU,
        set_device=_nothing,
        device_count=lambda: 1,
        synchronize=_nothing,
        empty_cache=_nothing,
        manual_seed=torch.manual_seed,
        Stream=_Null,
        Event=_Null,
        current_stream=_Null,
        default_stream=_Null,
        stream=lambda stream: contextlib.nullcontext(),
        is_current_stream_capturing=lambda: False,
        random=_Proxy(torch.cuda.random, **random_state),
        **random_state,
    )
    names = "tensor zeros ones empty full arange rand randn empty_like zeros_like ones_like"
    factories = {name: _on_cpu(getattr(torch, name)) for name in names.split()}
    distributed = _Proxy(torch.distributed, all_gather=_all_gather, reduce_scatter=_reduce_scatter)
    return _Proxy(torch, cuda=cuda, distributed=distributed, **factories)


def _all_gather(outputs, tensor, group=None, async_op=False):  # noqa: ANN001, ANN202
    """Gather tensors of unequal sizes by broadcasts, because gloo supports only equal sizes."""
    dist = torch.distributed
    if len({out.shape for out in outputs}) == 1:
        return dist.all_gather(outputs, tensor, group=group, async_op=async_op)
    outputs[dist.get_rank(group)].copy_(tensor)
    for rank, out in enumerate(outputs):
        dist.broadcast(out, src=dist.get_global_rank(group, rank), group=group)
    return None


def _reduce_scatter(output, inputs, op=torch.distributed.ReduceOp.SUM, group=None, async_op=False):  # noqa: ANN001, ANN202
    """Reduce-scatter tensors of unequal sizes by all-reduces; gloo supports only equal sizes."""
    dist = torch.distributed
    if len({part.shape for part in inputs}) == 1:
        return dist.reduce_scatter(output, inputs, op=op, group=group, async_op=async_op)
    for rank, part in enumerate(inputs):
        total = part.contiguous().clone()
        dist.all_reduce(total, op=op, group=group)
        if rank == dist.get_rank(group):
            output.copy_(total)
    return None


class _Finder(importlib.abc.MetaPathFinder):
    """Import finder that gives every `megatron.core.*` module the proxy of torch."""

    def __init__(self, proxy: _Proxy) -> None:
        self.proxy = proxy

    def find_spec(self, name, path=None, target=None):  # noqa: ANN001, ANN201
        if name != "megatron.core" and not name.startswith("megatron.core."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return spec
        run = spec.loader.exec_module

        def run_and_fix(module: types.ModuleType) -> None:
            run(module)
            self.fix(module)

        spec.loader.exec_module = run_and_fix
        return spec

    def fix(self, module: Any) -> None:
        if getattr(module, "torch", None) is torch:
            module.torch = self.proxy
        if module.__name__ == "megatron.core.jit":
            # Skip torch.compile, which does not pay off for small CPU models.
            module.jit_fuser = module.noop_decorator
        if module.__name__ == "megatron.core.tensor_parallel.random":
            module._get_cuda_rng_state = lambda device=None, clone=False, graph_safe=False: (
                torch.get_rng_state()
            )
            module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: (
                torch.set_rng_state(state)
            )
        if hasattr(module, "maybe_move_tensor_to_cpu"):
            # All-to-all needs split sizes as numpy, but Megatron converts only CUDA tensors.
            move = module.maybe_move_tensor_to_cpu
            module.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
                tensor.numpy()
                if as_numpy and torch.is_tensor(tensor)
                else move(tensor, as_numpy, record_stream)
            )


def _patch_tensor_methods() -> None:
    """Patch two methods of tensors for callers in `megatron.core`: `type()` returns a CUDA type
    name, and `cuda()` does nothing."""

    def from_megatron() -> bool:
        name = sys._getframe(2).f_globals.get("__name__", "")
        return name.startswith("megatron.core")

    real_type, real_cuda = torch.Tensor.type, torch.Tensor.cuda

    @functools.wraps(real_type)
    def type_(self, *args, **kwargs):  # noqa: ANN001, ANN202
        answer = real_type(self, *args, **kwargs)
        if isinstance(answer, str) and from_megatron():
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    @functools.wraps(real_cuda)
    def cuda(self, *args, **kwargs):  # noqa: ANN001, ANN202
        return self if from_megatron() else real_cuda(self, *args, **kwargs)

    torch.Tensor.type = type_  # type: ignore[method-assign]  # what this function is for
    torch.Tensor.cuda = cuda  # type: ignore[method-assign]  # what this function is for


def patch_moe_utils() -> None:
    """Define `te_general_gemm` in `moe_utils`, which Megatron 0.16.1 needs without TE, too."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def patch_norm() -> None:
    """Compute the gradient norm without waiting for each tensor's norm, as Megatron 0.16.1 does
    without TE and Apex."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    def norm(chunk_size: int, flag: Any, tensors: list, per_tensor: bool) -> tuple:
        return torch.nn.utils.get_total_norm(tensors[0]).view(1), None

    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = norm
